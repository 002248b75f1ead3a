//! Launches attention for generation: writes to the KV cache, and attention over it.
//!
//! A query and head get one block, or several if there are few queries. The caches have the type of activations.
//! Heads over 256 channels have their own kernels, in which a lane has twice as many channels.

use super::modules::KernelFile;
use super::spans::{MatrixAddress, SPAN, THREADS, count, dtype_code, int};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::AttentionShape;
use smidgen_ir::workspace_cuda::{CACHE_PIECE, MOST_SHARED_QUERIES, cached_attention_bytes};

pub const FILE: KernelFile = KernelFile {
    name: "cached_attention.cu",
    source: include_str!("../../kernels/cached_attention.cu"),
    kernels: &[
        "cache_rows",
        "cached_attention_eight",
        "cached_attention_one",
        "cached_attention_pieces_eight",
        "cached_attention_pieces_one",
        "cached_attention_wide_eight",
        "cached_attention_wide_one",
        "cached_attention_wide_pieces_eight",
        "cached_attention_wide_pieces_one",
        "join_pieces",
    ],
};

/// The largest head size of the kernels in which a lane has a single span of channels.
const MOST_NARROW: usize = 32 * SPAN;

/// Writes the keys and values of new tokens to their cache rows.
pub fn cache_rows(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let tokens = stage.rows(&step.inputs[0]);
    if tokens == 0 {
        return Ok(());
    }
    let [k, v] = [0, 1].map(|index| MatrixAddress::of(stage, &step.inputs[index]));
    let [keys, values] = [0, 1].map(|index| MatrixAddress::of(stage, &step.updates[index]));
    let [table, slots, positions] = [2, 3, 4].map(|index| &step.inputs[index]);
    let (rows, columns) = (stage.rows(&step.updates[0]), step.updates[0].columns);
    let aligned = columns.is_multiple_of(SPAN) && [k, v, keys, values].iter().all(|place| place.aligned);
    let mut args = vec![k.pointer, k.stride, v.pointer, v.stride];
    args.extend([stage.address(table), int(stage.rows(table)), int(table.columns)]);
    args.extend([slots, positions].map(|operand| stage.address(operand)));
    args.extend([keys.pointer, keys.stride, values.pointer, values.stride]);
    args.extend([int(rows), int(columns), Arg::Int(i32::from(aligned))]);
    stage.launch("cache_rows", [count(tokens), 1, 1], THREADS, 0, &args)
}

/// Must match the struct in `cached_attention.cu`.
#[repr(C)]
struct CachedAttention {
    q: u64,
    q_stride: i64,
    keys: u64,
    keys_stride: i64,
    values: u64,
    values_stride: i64,
    table: u64,
    slots: u64,
    positions: u64,
    o: u64,
    o_stride: i64,
    pieces: u64,
    slots_of_table: i32,
    positions_of_slot: i32,
    cache_rows: i32,
    group: i32,
    head_dim: i32,
    lanes: i32,
    window: i32,
    scale: f32,
    softcap: f32,
    sinks: u64,
    sinks_dtype: i32,
}

/// Attention over the cached rows of each query's slot.
pub fn cached_attention(
    stage: &Stage<'_>,
    step: &BoundStep,
    shape: &AttentionShape,
) -> Result<(), DeviceError> {
    let [q, keys, values, table, slots, positions, ..] = &step.inputs[..] else {
        unreachable!("the shape rule asks for six inputs")
    };
    let sinks = step.inputs.get(6);
    let (o, tokens, head_dim) = (&step.outputs[0], stage.rows(q), shape.head_dim);
    if tokens == 0 {
        return Ok(());
    }
    let aligned = head_dim.is_multiple_of(SPAN)
        && [q, keys, values].iter().all(|operand| MatrixAddress::of(stage, operand).aligned);
    // If there are too few queries to keep the GPU busy, several blocks share a query of a long sequence.
    let pieces = table.columns.div_ceil(CACHE_PIECE);
    let is_shared = tokens <= MOST_SHARED_QUERIES && pieces > 1;
    let (workspace, bytes) = stage.workspace();
    let attention = CachedAttention {
        q: stage.pointer(q),
        q_stride: q.stride as i64,
        keys: stage.pointer(keys),
        keys_stride: keys.stride as i64,
        values: stage.pointer(values),
        values_stride: values.stride as i64,
        table: stage.pointer(table),
        slots: stage.pointer(slots),
        positions: stage.pointer(positions),
        o: stage.pointer(o),
        o_stride: o.stride as i64,
        pieces: workspace,
        slots_of_table: stage.rows(table) as i32,
        positions_of_slot: table.columns as i32,
        cache_rows: stage.rows(keys) as i32,
        group: (shape.heads / shape.kv_heads) as i32,
        head_dim: head_dim as i32,
        // At least 8, so that a block has at most 32 teams.
        lanes: head_dim.div_ceil(SPAN).next_power_of_two().clamp(8, 32) as i32,
        window: shape.window.unwrap_or(0) as i32,
        scale: shape.scale,
        softcap: shape.softcap.unwrap_or(0.0),
        sinks: sinks.map_or(0, |sinks| stage.pointer(sinks)),
        sinks_dtype: sinks.map_or(0, dtype_code),
    };
    let kernel = match (head_dim > MOST_NARROW, is_shared, aligned) {
        (false, false, true) => "cached_attention_eight",
        (false, false, false) => "cached_attention_one",
        (false, true, true) => "cached_attention_pieces_eight",
        (false, true, false) => "cached_attention_pieces_one",
        (true, false, true) => "cached_attention_wide_eight",
        (true, false, false) => "cached_attention_wide_one",
        (true, true, true) => "cached_attention_wide_pieces_eight",
        (true, true, false) => "cached_attention_wide_pieces_one",
    };
    let grid = |blocks: usize| [count(tokens), count(shape.heads), count(blocks)];
    if !is_shared {
        return stage.launch_structure(kernel, grid(1), THREADS, 0, &attention, &[]);
    }
    assert!(cached_attention_bytes(tokens, table.columns, shape) <= bytes, "`check` compares them");
    stage.launch_structure(kernel, grid(pieces), THREADS, 0, &attention, &[])?;
    let threads = head_dim.next_multiple_of(32).min(256) as u32;
    stage.launch_structure("join_pieces", grid(1), threads, 0, &attention, &[int(pieces)])
}
