//! The optimizer step: gradient norm, AdamW with f32 or 8-bit moments, zeroing of gradients, rounding of adapters, and
//! the regularizer of LS-LoRA's coefficients.
//!
//! Consecutive steps with the same operation on different tensors share a launch, up to 56 of them. Loss, report and
//! hyper are f64 in device memory, and the kernels read them there, so that the host does not wait between gradients
//! and update. Kernels: `kernels/optimizer.cu`.

use super::modules::KernelFile;
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::storage::DYNAMIC8_BLOCK;
use smidgen_ir::workspace_cuda::squares_chunks;
use smidgen_ir::{AdamW, Op, RandomPlace, Storage};

pub const FILE: KernelFile = KernelFile {
    name: "optimizer.cu",
    source: concat!(
        include_str!("../../kernels/counter.cuh"),
        include_str!("../../kernels/dynamic_map.cuh"),
        include_str!("../../kernels/optimizer.cu")
    ),
    kernels: &[
        "sum_of_squares",
        "add_partials",
        "add_squares",
        "grad_norm_report",
        "adamw",
        "adamw8",
        "widen",
        "round_at_random",
        "zero_tensors",
        "accumulate",
        "round_tensors",
        "fourier_reg",
    ],
};

/// Tensors per launch. This and the structures must match `optimizer.cu`.
const TABLE_TENSORS: usize = 56;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct UpdateTensor {
    parameters: u64,
    gradient: u64,
    first: u64,
    second: u64,
    activity: u64,
    elements: i64,
    first_block: u32,
    aligned: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RoundedTensor {
    from: u64,
    to: u64,
    to_stride: i64,
    elements: i64,
    columns: i32,
    scale: f32,
    first_block: u32,
    eight: i32,
}

#[repr(C)]
struct Table<T> {
    count: i64,
    tensors: [T; TABLE_TENSORS],
}

/// Launches a kernel over all tensors, at most [`TABLE_TENSORS`] per launch. Each tensor comes with its number of
/// blocks; `place` stores the tensor's first block in its entry, and `args` gets the number of blocks of earlier
/// launches.
fn launch_tables<T: Copy + Default>(
    stage: &Stage<'_>,
    kernel: &'static str,
    tensors: impl Iterator<Item = (T, usize)>,
    place: impl Fn(&mut T, u32),
    args: impl Fn(usize) -> Vec<Arg>,
) -> Result<(), DeviceError> {
    let mut table = Table { count: 0, tensors: [T::default(); TABLE_TENSORS] };
    let (mut blocks, mut blocks_before) = (0, 0);
    let mut tensors = tensors.filter(|(_, blocks)| *blocks > 0).peekable();
    while let Some((tensor, own)) = tensors.next() {
        let entry = &mut table.tensors[table.count as usize];
        *entry = tensor;
        place(entry, blocks as u32);
        table.count += 1;
        blocks += own;
        if table.count as usize == TABLE_TENSORS || tensors.peek().is_none() {
            stage.launch_with(kernel, blocks as u32, THREADS, &table, &args(blocks_before))?;
            blocks_before += blocks;
            (table.count, blocks) = (0, 0);
        }
    }
    Ok(())
}

fn is_aligned(places: &[u64]) -> i32 {
    i32::from(places.iter().all(|place| place.is_multiple_of(16)))
}

/// to += from, f32.
pub fn accumulate(stage: &Stage<'_>, to: u64, from: u64, floats: usize) -> Result<(), DeviceError> {
    if floats == 0 {
        return Ok(());
    }
    let args = [Arg::Pointer(to), Arg::Pointer(from), Arg::Wide(floats as u64)];
    let blocks = floats.div_ceil(4 * THREADS as usize) as u32;
    stage.launch("accumulate", [blocks, 1, 1], THREADS, 0, &args)
}

/// Inputs: parts of gradients; updates squares (1).
pub fn squared_norm(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let squares = sum_squares(stage, &step.inputs)?;
    let count = step.inputs.len() as i32;
    let args = [Arg::Pointer(squares), Arg::Int(count), stage.address(&step.updates[0])];
    stage.launch("add_squares", [1, 1, 1], THREADS, 0, &args)
}

/// Inputs: loss (1), hyper (3), gradients, and squares (M) of other gradients if there are any; updates report (4).
pub fn grad_norm(
    stage: &Stage<'_>,
    step: &BoundStep,
    clip: f32,
    has_squares: bool,
) -> Result<(), DeviceError> {
    let (gradients, more) = step.inputs[2..].split_at(step.inputs.len() - 2 - usize::from(has_squares));
    let squares = sum_squares(stage, gradients)?;
    let args = [
        stage.address(&step.inputs[0]),
        stage.address(&step.inputs[1]),
        Arg::Pointer(squares),
        Arg::Int(gradients.len() as i32),
        Arg::Pointer(more.first().map_or(0, |squares| stage.pointer(squares))),
        Arg::Int(more.first().map_or(0, |squares| stage.rows(squares)) as i32),
        Arg::Float(clip),
        stage.address(&step.updates[0]),
    ];
    stage.launch("grad_norm_report", [1, 1, 1], THREADS, 0, &args)
}

/// Computes the sum of the squares of each gradient in the workspace, and returns the address of these sums. A gradient
/// is summed chunk by chunk, and then over its chunks, so its sum does not depend on the other gradients.
fn sum_squares(stage: &Stage<'_>, gradients: &[Operand]) -> Result<u64, DeviceError> {
    let chunks = |gradient: &Operand| squares_chunks(dense_elements(stage, gradient));
    let count: usize = gradients.iter().map(chunks).sum();
    let partials = stage.workspace_of(8 * (count + gradients.len()));
    let tensors = gradients.iter().map(|operand| {
        let (gradient, elements) = (stage.pointer(operand), dense_elements(stage, operand));
        let aligned = is_aligned(&[gradient]);
        let tensor = UpdateTensor { gradient, elements: elements as i64, aligned, ..UpdateTensor::default() };
        (tensor, squares_chunks(elements))
    });
    let args = |before: usize| vec![Arg::Pointer(partials + 8 * before as u64)];
    launch_tables(stage, "sum_of_squares", tensors, |tensor, block| tensor.first_block = block, args)?;
    let squares = partials + 8 * count as u64;
    let mut first = partials;
    let sums = gradients.iter().map(|gradient| {
        let own = first;
        first += 8 * chunks(gradient) as u64;
        let elements = chunks(gradient) as i64;
        (UpdateTensor { gradient: own, elements, ..UpdateTensor::default() }, 1)
    });
    let args = |before: usize| vec![Arg::Pointer(squares + 8 * before as u64)];
    launch_tables(stage, "add_partials", sums, |tensor, block| tensor.first_block = block, args)?;
    Ok(squares)
}

/// Each step has as inputs gradient, report (4), hyper (3), and as updates parameter, first and second moment,
/// activity. All steps have the same report and hyper.
pub fn adamw(stage: &Stage<'_>, steps: &[BoundStep], settings: &AdamW) -> Result<(), DeviceError> {
    let blocks = |elements: usize| elements.div_ceil(4 * THREADS as usize);
    update(stage, steps, settings, "adamw", blocks, |moment| moment.storage == Storage::F32)
}

/// Like [`adamw`], with both moments in [`Storage::Dynamic8`].
pub fn adamw8(stage: &Stage<'_>, steps: &[BoundStep], settings: &AdamW) -> Result<(), DeviceError> {
    let blocks_of_8_warps = |elements: usize| elements.div_ceil(DYNAMIC8_BLOCK).div_ceil(8);
    let fits = |moment: &Operand| matches!(moment.storage, Storage::Dynamic8 { .. });
    update(stage, steps, settings, "adamw8", blocks_of_8_warps, fits)
}

fn update(
    stage: &Stage<'_>,
    steps: &[BoundStep],
    settings: &AdamW,
    kernel: &'static str,
    blocks: impl Fn(usize) -> usize,
    fits: impl Fn(&Operand) -> bool,
) -> Result<(), DeviceError> {
    let tensors = steps.iter().map(|step| {
        let elements = dense_elements(stage, &step.inputs[0]);
        assert_eq!(dense_elements(stage, &step.updates[0]), elements, "elements of a parameter");
        assert!(step.updates[1..3].iter().all(&fits), "`{kernel}` does not support these moments");
        let gradient = stage.pointer(&step.inputs[0]);
        let [parameters, first, second, activity] =
            [0, 1, 2, 3].map(|index| stage.pointer(&step.updates[index]));
        let aligned = is_aligned(&[gradient, parameters, first, second]);
        let tensor = UpdateTensor {
            parameters,
            gradient,
            first,
            second,
            activity,
            elements: elements as i64,
            first_block: 0,
            aligned,
        };
        (tensor, blocks(elements))
    });
    let [report, hyper] = [1, 2].map(|index| stage.pointer(&steps[0].inputs[index]));
    let args = |_| {
        let decays = [settings.beta1, settings.beta2, settings.eps, settings.weight_decay].map(Arg::Double);
        [Arg::Pointer(report), Arg::Pointer(hyper)].into_iter().chain(decays).collect()
    };
    launch_tables(stage, kernel, tensors, |tensor, block| tensor.first_block = block, args)
}

/// Sets the update of each step to 0.
pub fn zero(stage: &Stage<'_>, steps: &[BoundStep]) -> Result<(), DeviceError> {
    let tensors = steps.iter().map(|step| {
        let value = &step.updates[0];
        assert!(value.is_dense(), "`zero` supports no gaps between rows");
        let bytes = value.bytes_at(stage.extent);
        let words = bytes / 4;
        assert_eq!(4 * words, bytes, "`zero` sets whole 32-bit words");
        let gradient = stage.pointer(value);
        let aligned = is_aligned(&[gradient]);
        let tensor = UpdateTensor { gradient, elements: words as i64, aligned, ..UpdateTensor::default() };
        (tensor, words.div_ceil(16 * THREADS as usize))
    });
    launch_tables(stage, "zero_tensors", tensors, |tensor, block| tensor.first_block = block, |_| vec![])
}

/// Sets the update or output of each step to scale·input, in the type of activations.
pub fn round(stage: &Stage<'_>, steps: &[BoundStep]) -> Result<(), DeviceError> {
    let tensors = steps.iter().map(|step| {
        let Op::Round { scale, .. } = step.op else { unreachable!("the caller passes `Round` steps only") };
        let weight = &step.inputs[0];
        let rounded = step.outputs.first().unwrap_or_else(|| &step.updates[0]);
        assert_eq!(rounded.storage, Storage::Plain(stage.activations), "type of a rounded copy");
        let (from, to) = (stage.pointer(weight), stage.pointer(rounded));
        let elements = dense_elements(stage, weight);
        let eight = is_aligned(&[from, to]) == 1
            && weight.columns.is_multiple_of(8)
            && (rounded.stride * stage.activations.bytes()).is_multiple_of(16);
        let tensor = RoundedTensor {
            from,
            to,
            to_stride: rounded.stride as i64,
            elements: elements as i64,
            columns: weight.columns as i32,
            scale,
            first_block: 0,
            eight: i32::from(eight),
        };
        (tensor, elements.div_ceil(8 * THREADS as usize))
    });
    launch_tables(stage, "round_tensors", tensors, |tensor, block| tensor.first_block = block, |_| vec![])
}

/// Converts a weight from bf16 to f32.
pub fn widen(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let elements = dense_elements(stage, &step.outputs[0]);
    let args = [stage.address(&step.inputs[0]), stage.address(&step.outputs[0]), Arg::Wide(elements as u64)];
    let blocks = elements.div_ceil(8 * THREADS as usize) as u32;
    stage.launch("widen", [blocks, 1, 1], THREADS, 0, &args)
}

/// Rounds the first input (f32) stochastically to the updated weight (bf16). The second input is hyper (3).
pub fn round_at_random(stage: &Stage<'_>, step: &BoundStep, place: &RandomPlace) -> Result<(), DeviceError> {
    let wide = &step.inputs[0];
    let elements = dense_elements(stage, wide);
    let args = [
        stage.address(wide),
        stage.address(&step.inputs[1]),
        stage.address(&step.updates[0]),
        Arg::Wide(elements as u64),
        Arg::Int(wide.columns as i32),
        Arg::Wide(place.seed),
        Arg::Wide(place.tensor),
        Arg::Wide(place.first_row),
    ];
    let blocks = elements.div_ceil(8 * THREADS as usize) as u32;
    stage.launch("round_at_random", [blocks, 1, 1], THREADS, 0, &args)
}

/// Inputs: coefficients (M, 4), hyper (3); updates loss (1), dcoefficients (M, 4).
pub fn fourier_reg(stage: &Stage<'_>, step: &BoundStep, weight: f64) -> Result<(), DeviceError> {
    let coefficients = &step.inputs[0];
    let args = [
        stage.address(coefficients),
        Arg::Int((dense_elements(stage, coefficients) / 4) as i32),
        Arg::Double(weight),
        stage.address(&step.inputs[1]),
        stage.address(&step.updates[0]),
        stage.address(&step.updates[1]),
    ];
    stage.launch("fourier_reg", [1, 1, 1], THREADS, 0, &args)
}

/// Elements of a dense f32 tensor, as all trained tensors, their gradients and moments are.
fn dense_elements(stage: &Stage<'_>, operand: &Operand) -> usize {
    assert!(operand.storage == Storage::F32 && operand.is_dense(), "{operand:?} is not dense f32");
    stage.rows(operand) * operand.columns
}

/// Must match `optimizer.cu`.
const THREADS: u32 = 256;
