//! Launches the rotary embedding: its table, and the rotation.
//!
//! The frequencies come from the same function as on the CPU, so both devices agree to the last bit; they are passed
//! as kernel arguments, eight at a time.

use super::modules::KernelFile;
use super::spans::{Place, SPAN, THREADS, count, int, long, word};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::{Dim, RopeSpec};

pub const FILE: KernelFile = KernelFile {
    name: "rope.cu",
    source: include_str!("../../kernels/rope.cu"),
    kernels: &["rope_table_columns", "rope_eight", "rope_one"],
};

/// Frequencies per launch.
const PAIRS_AT_ONCE: usize = 8;
/// Heads that a thread rotates by the same angles.
const HEADS_AT_ONCE: usize = 4;

/// The table of cosines and sines.
pub fn rope_table(stage: &Stage<'_>, step: &BoundStep, spec: &RopeSpec) -> Result<(), DeviceError> {
    let (positions, table) = (&step.inputs[0], &step.outputs[0]);
    let tokens = stage.rows(positions);
    if tokens == 0 {
        return Ok(());
    }
    let short = spec.inverse_frequencies();
    let (long_list, original) = spec.long_frequencies().unwrap_or_else(|| (short.clone(), 0));
    let (lengths, kind, lengths_count) = match step.inputs.get(1) {
        None => (0, 0, 0),
        Some(lengths) => {
            let kind = match lengths.rows {
                Dim::Tokens => 2,
                Dim::Boundaries | Dim::Tile { .. } | Dim::Rows | Dim::Const(_) | Dim::Audio(_) => 1,
            };
            (stage.pointer(lengths), kind, stage.rows(lengths))
        }
    };
    let pairs = short.chunks(PAIRS_AT_ONCE).zip(long_list.chunks(PAIRS_AT_ONCE)).enumerate();
    for (index, (of_short, of_long)) in pairs {
        let mut args = vec![
            Arg::Pointer(stage.pointer(positions)),
            Arg::Pointer(lengths),
            Arg::Int(kind),
            int(lengths_count),
            int(original),
            Arg::Float(spec.attention_scale),
            Arg::Pointer(stage.pointer(table)),
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
        stage.launch("rope_table_columns", [blocks, 1, 1], THREADS, 0, &args)?;
    }
    Ok(())
}

/// Rotates every head by the angles of its token.
pub fn rope(stage: &Stage<'_>, step: &BoundStep, heads: usize, inverse: bool) -> Result<(), DeviceError> {
    let (x, table, y) = (&step.inputs[0], &step.inputs[1], &step.outputs[0]);
    let (tokens, head_dim) = (stage.rows(x), x.columns / heads);
    let (dim, half) = (table.columns, table.columns / 2);
    let [x, table, y] = [x, table, y].map(|operand| Place::of(stage, operand));
    let spans = head_dim.is_multiple_of(SPAN) && half.is_multiple_of(SPAN);
    let aligned = spans && x.aligned && table.aligned && y.aligned;
    // A span is rotated together with its partner; channels from `dim` on are copied.
    let units_of_head = (half + head_dim - dim) / if aligned { SPAN } else { 1 };
    let units = count(units_of_head * heads.div_ceil(HEADS_AT_ONCE) * tokens);
    if units == 0 {
        return Ok(());
    }
    let args = [
        x.pointer,
        x.stride,
        table.pointer,
        table.stride,
        Arg::Float(if inverse { -1.0 } else { 1.0 }),
        y.pointer,
        y.stride,
        int(heads),
        int(head_dim),
        int(half),
        word(units_of_head),
        Arg::Word(units),
    ];
    let kernel = if aligned { "rope_eight" } else { "rope_one" };
    stage.launch(kernel, [units.div_ceil(THREADS), 1, 1], THREADS, 0, &args)
}
