//! The update: the norm over all gradients, AdamW with moments in f32 or 8 bits, the pull of LS-LoRA's coefficients.
//!
//! A launch for each tensor. Loss, report and hyper are f64 in device memory and are read there, so that nothing waits
//! between the gradients and the update. Kernels: `kernels/optimizer.cu`.

use super::stage::{Arg, KernelFile, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::storage::DYNAMIC8_BLOCK;
use smidgen_ir::workspace_cuda::squares_chunks;
use smidgen_ir::{AdamW, Storage};

pub const FILE: KernelFile = KernelFile {
    name: "optimizer.cu",
    source: concat!(
        include_str!("../../kernels/dynamic_map.cuh"),
        include_str!("../../kernels/optimizer.cu")
    ),
    kernels: &["sum_of_squares", "grad_norm_report", "adamw", "adamw8", "fourier_reg"],
};

/// Inputs loss (1), gradients …; updates report (4).
pub fn grad_norm(stage: &Stage<'_>, step: &BoundStep, clip: f32) -> Result<(), DeviceError> {
    let (partials, bytes) = stage.workspace();
    let mut count = 0;
    for gradient in &step.inputs[1..] {
        let elements = dense_elements(stage, gradient);
        let chunks = squares_chunks(elements);
        if chunks == 0 {
            continue;
        }
        assert!(8 * (count + chunks) <= bytes, "workspace of {bytes} bytes for more than {count} sums");
        let pointer = stage.pointer(gradient);
        let args = [
            Arg::Pointer(pointer),
            Arg::Long(elements as i64),
            Arg::Int(i32::from(pointer.is_multiple_of(16))),
            Arg::Pointer(partials + 8 * count as u64),
        ];
        stage.launch("sum_of_squares", [chunks as u32, 1, 1], THREADS, 0, &args)?;
        count += chunks;
    }
    let args = [
        Arg::Pointer(stage.pointer(&step.inputs[0])),
        Arg::Pointer(partials),
        Arg::Int(count as i32),
        Arg::Float(clip),
        Arg::Pointer(stage.pointer(&step.updates[0])),
    ];
    stage.launch("grad_norm_report", [1, 1, 1], THREADS, 0, &args)
}

/// Inputs gradient, report (4), hyper (2); updates parameter, first and second moment.
pub fn adamw(stage: &Stage<'_>, step: &BoundStep, settings: &AdamW) -> Result<(), DeviceError> {
    let elements = dense_elements(stage, &step.inputs[0]);
    for state in &step.updates {
        assert_eq!(dense_elements(stage, state), elements, "elements of a state");
    }
    update(stage, step, settings, "adamw", elements.div_ceil(4 * THREADS as usize))
}

/// The same with both moments in [`Storage::Dynamic8`].
pub fn adamw8(stage: &Stage<'_>, step: &BoundStep, settings: &AdamW) -> Result<(), DeviceError> {
    let elements = dense_elements(stage, &step.inputs[0]);
    assert_eq!(dense_elements(stage, &step.updates[0]), elements, "elements of a parameter");
    for moment in &step.updates[1..] {
        assert!(matches!(moment.storage, Storage::Dynamic8 { .. }), "a moment in {}", moment.storage);
    }
    let blocks_of_8_warps = elements.div_ceil(DYNAMIC8_BLOCK).div_ceil(8);
    update(stage, step, settings, "adamw8", blocks_of_8_warps)
}

fn update(
    stage: &Stage<'_>,
    step: &BoundStep,
    settings: &AdamW,
    kernel: &'static str,
    blocks: usize,
) -> Result<(), DeviceError> {
    if blocks == 0 {
        return Ok(());
    }
    let gradient = stage.pointer(&step.inputs[0]);
    let states = [0, 1, 2].map(|index| stage.pointer(&step.updates[index]));
    let aligned = [gradient, states[0], states[1], states[2]].iter().all(|place| place.is_multiple_of(16));
    let args = [
        Arg::Pointer(states[0]),
        Arg::Pointer(gradient),
        Arg::Pointer(states[1]),
        Arg::Pointer(states[2]),
        Arg::Long(dense_elements(stage, &step.inputs[0]) as i64),
        Arg::Int(i32::from(aligned)),
        Arg::Pointer(stage.pointer(&step.inputs[1])),
        Arg::Pointer(stage.pointer(&step.inputs[2])),
        Arg::Double(settings.beta1),
        Arg::Double(settings.beta2),
        Arg::Double(settings.eps),
        Arg::Double(settings.weight_decay),
    ];
    stage.launch(kernel, [blocks as u32, 1, 1], THREADS, 0, &args)
}

/// Input coefficients (M, 4); updates loss (1), dcoefficients (M, 4).
pub fn fourier_reg(stage: &Stage<'_>, step: &BoundStep, weight: f64) -> Result<(), DeviceError> {
    let coefficients = &step.inputs[0];
    let args = [
        Arg::Pointer(stage.pointer(coefficients)),
        Arg::Int((dense_elements(stage, coefficients) / 4) as i32),
        Arg::Double(weight),
        Arg::Pointer(stage.pointer(&step.updates[0])),
        Arg::Pointer(stage.pointer(&step.updates[1])),
    ];
    stage.launch("fourier_reg", [1, 1, 1], THREADS, 0, &args)
}

/// Elements of an f32 tensor without gaps, as all trained ones, their gradients and moments are.
fn dense_elements(stage: &Stage<'_>, operand: &Operand) -> usize {
    assert!(operand.storage == Storage::F32 && operand.is_dense(), "{operand:?} is not dense f32");
    stage.rows(operand) * operand.columns
}

/// That of `optimizer.cu`.
const THREADS: u32 = 256;
