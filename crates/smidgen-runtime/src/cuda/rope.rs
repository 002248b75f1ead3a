//! Launches the rotary embedding: its table, and the rotation.
//!
//! The frequencies come from the same function as on the CPU, so both devices have the same bits. They are passed as
//! kernel arguments, eight at a time.

use super::modules::KernelFile;
use super::spans::{MatrixAddress, SPAN, THREADS, count, int, long};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::{Dim, Entry, Op, RopeSpec};

pub const FILE: KernelFile = KernelFile {
    name: "rope.cu",
    source: include_str!("../../kernels/rope.cu"),
    kernels: &[
        "rope_table_columns",
        "rope_eight",
        "rope_one",
        "rope_interleaved_eight",
        "rope_interleaved_one",
    ],
};

/// Frequencies per launch.
const PAIRS_AT_ONCE: usize = 8;
/// Heads that a thread rotates by the same angles.
const HEADS_AT_ONCE: usize = 4;

/// How frequencies follow from lengths, and scales from positions. Must match the struct in `rope.cu`.
#[repr(C)]
struct TableRule {
    original: i32,
    stretch: f32,
    scale: f32,
    beta: f32,
    beta_original: i32,
}

/// The table of cosines and sines.
pub fn rope_table(stage: &Stage<'_>, step: &BoundStep, spec: &RopeSpec) -> Result<(), DeviceError> {
    let (positions, table) = (&step.inputs[0], &step.outputs[0]);
    let tokens = stage.rows(positions);
    if tokens == 0 {
        return Ok(());
    }
    let short = spec.inverse_frequencies();
    let long_list = spec.long_frequencies().map_or_else(|| short.clone(), |(list, _)| list);
    let rule = TableRule {
        original: spec.short_until().unwrap_or(0) as i32,
        stretch: spec.stretch().map_or(0.0, |stretch| stretch.factor),
        scale: spec.attention_scale,
        beta: spec.position_scale.map_or(0.0, |scale| scale.beta),
        beta_original: spec.position_scale.map_or(1, |scale| scale.original as i32),
    };
    let (lengths, kind, lengths_count) = match step.inputs.get(1) {
        None => (0, 0, 0),
        Some(lengths) => {
            let kind = match lengths.rows {
                Dim::Tokens => 2,
                Dim::Boundaries
                | Dim::Tile { .. }
                | Dim::Routed(_)
                | Dim::Rows
                | Dim::Const(_)
                | Dim::Audio(_) => 1,
            };
            (stage.pointer(lengths), kind, stage.rows(lengths))
        }
    };
    let pairs = short.chunks(PAIRS_AT_ONCE).zip(long_list.chunks(PAIRS_AT_ONCE)).enumerate();
    for (index, (of_short, of_long)) in pairs {
        let mut args = vec![
            stage.address(positions),
            Arg::Pointer(lengths),
            Arg::Int(kind),
            int(lengths_count),
            stage.address(table),
            long(table.stride),
            int(short.len()),
            int(PAIRS_AT_ONCE * index),
            int(tokens),
        ];
        for list in [of_short, of_long] {
            let padded = list.iter().copied().chain(std::iter::repeat(0.0)).take(PAIRS_AT_ONCE);
            args.extend(padded.map(Arg::Float));
        }
        let blocks = count((PAIRS_AT_ONCE * tokens).div_ceil(THREADS as usize));
        stage.launch_structure("rope_table_columns", [blocks, 1, 1], THREADS, 0, &rule, &args)?;
    }
    Ok(())
}

/// Must match the struct in `rope.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RotatedMatrix {
    x: u64,
    x_stride: i64,
    y: u64,
    y_stride: i64,
    heads: i32,
    units: u32,
}

/// Must match the struct in `rope.cu`.
#[repr(C)]
struct Rotation {
    matrices: [RotatedMatrix; 2],
    table: u64,
    table_stride: i64,
    direction: f32,
    head_dim: i32,
    half: i32,
    units_of_head: u32,
}

/// The attributes of a rotation.
struct Attributes {
    heads: usize,
    inverse: bool,
    interleaved: bool,
}

fn attributes(step: &BoundStep) -> Option<Attributes> {
    let Op::Rope { heads, inverse, interleaved } = step.op else { return None };
    Some(Attributes { heads, inverse, interleaved })
}

/// Whether two steps are rotations, such as those of q and k, that can share a launch: in generation, if both are by the
/// same angles.
pub fn are_one_launch(stage: &Stage<'_>, first: &BoundStep, second: &BoundStep) -> bool {
    let of = |step: &BoundStep| {
        let Attributes { heads, inverse, interleaved } = attributes(step)?;
        Some((step.inputs[0].columns / heads, inverse, interleaved, step.inputs[1]))
    };
    let angles = of(first).filter(|_| stage.step.entry == Entry::Decode);
    angles.is_some() && angles == of(second) && second.is_independent_of(first)
}

/// Rotates every head by the angles of its token, in one matrix or in two.
pub fn rope(stage: &Stage<'_>, steps: &[BoundStep]) -> Result<(), DeviceError> {
    let Attributes { heads, inverse, interleaved } =
        attributes(&steps[0]).expect("the caller passes rotations only");
    let (first, table) = (&steps[0].inputs[0], &steps[0].inputs[1]);
    let (tokens, head_dim) = (stage.rows(first), first.columns / heads);
    let (dim, half) = (table.columns, table.columns / 2);
    let mut operands = steps.iter().flat_map(|step| [&step.inputs[0], &step.outputs[0]]).chain([table]);
    let rotated = if interleaved { dim } else { half };
    let spans = head_dim.is_multiple_of(SPAN) && rotated.is_multiple_of(SPAN);
    let aligned = spans && operands.all(|operand| MatrixAddress::of(stage, operand).aligned);
    // A span is rotated together with its partner, or is a span of whole pairs; channels from `dim` on are copied.
    let units_of_head = match (aligned, interleaved) {
        (true, true) => head_dim / SPAN,
        (true, false) => (half + head_dim - dim) / SPAN,
        (false, _) => half + head_dim - dim,
    };
    let mut matrices = [RotatedMatrix::default(); 2];
    for (matrix, step) in matrices.iter_mut().zip(steps) {
        let (x, y) = (&step.inputs[0], &step.outputs[0]);
        let heads = x.columns / head_dim;
        *matrix = RotatedMatrix {
            x: stage.pointer(x),
            x_stride: x.stride as i64,
            y: stage.pointer(y),
            y_stride: y.stride as i64,
            heads: heads as i32,
            units: count(units_of_head * heads.div_ceil(HEADS_AT_ONCE) * tokens),
        };
    }
    let most_units = matrices.iter().map(|matrix| matrix.units).max().unwrap_or(0);
    if most_units == 0 {
        return Ok(());
    }
    let rotation = Rotation {
        matrices,
        table: stage.pointer(table),
        table_stride: table.stride as i64,
        direction: if inverse { -1.0 } else { 1.0 },
        head_dim: head_dim as i32,
        half: half as i32,
        units_of_head: units_of_head as u32,
    };
    let kernel = match (interleaved, aligned) {
        (false, true) => "rope_eight",
        (false, false) => "rope_one",
        (true, true) => "rope_interleaved_eight",
        (true, false) => "rope_interleaved_one",
    };
    let grid = [most_units.div_ceil(THREADS), steps.len() as u32, 1];
    stage.launch_structure(kernel, grid, THREADS, 0, &rotation, &[])
}
