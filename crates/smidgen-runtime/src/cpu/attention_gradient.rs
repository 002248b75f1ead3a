//! Causal attention over packed segments, backward: from do to dq, dk and dv.
//!
//! With s = scale · q·kᵀ, p = exp(s - lse) and o = p·v, and D = Σ do ∘ o over a head's channels:
//!     dv = pᵀ·do     dp = do·vᵀ     ds = p ∘ (dp - D)     dq = scale · ds·k     dk = scale · dsᵀ·q
//! (D is the sum over keys of p ∘ dp, which the derivative of softmax subtracts.) A softcap replaces s by
//! c·t with t = tanh(s / c), so ds is multiplied by 1 - t²; masked p are 0, hence so are their ds.
//! A task owns one segment and one key head with its query heads: it alone writes those rows of dq, dk
//! and dv, in a fixed order of tiles, so the result does not depend on the number of threads.
//! Left out: splitting one segment and key head over several threads.

use super::attention::{AttentionOptions, Tokens, TokensMut, transpose};
use super::attention_tiles::{
    AttentionScratch, COLUMN_NUMBERS, KEY_BLOCK, PIECE, QUERY_BLOCK, TOGETHER, ThreadScratch, capped_tanh,
    clear_hidden, is_on_diagonal, keys_of_piece, row_pieces, visible_columns,
};
use super::chunk::for_each_row;
use super::isa::{Isa, Lanes, exp_of_each, on_each_isa};
use super::kernel::{LeftRun, OutputView, RightRows, TileMatmul, TileWrite};
use super::packing::Transpose;
use super::pool::run_tasks;
use super::view::{Dst, SrcRows, StoredVector};
use std::ops::Range;

/// The buffers of the backward pass; q, o and their gradients are (T, H·D), k, v and theirs (T, Hkv·D),
/// lse (T, H) dense. Gradients are overwritten.
#[derive(Clone, Copy, Debug)]
pub struct AttentionGradientBuffers {
    pub q: Tokens,
    pub k: Tokens,
    pub v: Tokens,
    pub o: Tokens,
    pub lse: *const f32,
    pub o_gradient: Tokens,
    pub q_gradient: TokensMut,
    pub k_gradient: TokensMut,
    pub v_gradient: TokensMut,
}

// SAFETY: views are only addresses; tasks that share them write disjoint elements.
unsafe impl Sync for AttentionGradientBuffers {}

/// Computes the gradients of q, k and v on the current thread pool, with a workspace of
/// `smidgen_ir::workspace_cpu::attention_floats`.
///
/// # Safety
/// The machine supports `isa`; the buffers are readable, the gradients of q, k and v writable, for T
/// tokens while the call runs; those three overlap nothing else.
pub unsafe fn attention_gradient(
    isa: Isa,
    options: &AttentionOptions<'_>,
    buffers: &AttentionGradientBuffers,
    workspace: &mut [f32],
) {
    let scratch = options.check_and_align(workspace);
    let segments = options.segments.len() - 1;
    run_tasks(segments * options.kv_heads, |task| {
        let (segment, kv_head) = (task / options.kv_heads, task % options.kv_heads);
        // SAFETY: the task owns the rows of the segment in the gradients of `kv_head` and its heads,
        // and the workspace of its thread.
        unsafe { segment_gradient(isa, options, buffers, kv_head, segment, &scratch) }
    });
}

/// The gradient of the sinks: a sink s of a head has the share p = exp(s - lse) of every query, and no value, so
/// ds = p (0 - D), summed over the queries. `scratch` has at least a float for each query and head.
pub fn sinks_gradient(
    o: SrcRows,          // (T, H·D)
    lse: SrcRows,        // (T, H)
    o_gradient: SrcRows, // (T, H·D)
    sinks: StoredVector, // (H)
    target: Dst<f32>,    // (H)
    scratch: Dst<f32>,
) {
    let (tokens, heads) = (lse.rows(), lse.columns());
    let head_dim = o.columns() / heads;
    let parts = scratch.part(0, tokens * heads).rows(heads);
    for_each_row(tokens, o.columns(), |token| {
        for head in 0..heads {
            let [o, o_gradient] = [o, o_gradient].map(|rows| rows.row(token).part(head * head_dim, head_dim));
            let dot: f32 = (0..head_dim).map(|channel| o.get(channel) * o_gradient.get(channel)).sum();
            parts.row(token).set(head, -(sinks.get(head) - lse.row(token).get(head)).exp() * dot);
        }
    });
    for head in 0..heads {
        let sum: f64 = (0..tokens).map(|token| f64::from(parts.src().row(token).get(head))).sum();
        target.set(head, target.src().get(head) + sum as f32);
    }
}

unsafe fn segment_gradient(
    isa: Isa,
    options: &AttentionOptions<'_>,
    buffers: &AttentionGradientBuffers,
    kv_head: usize,
    segment: usize,
    scratch: &AttentionScratch,
) {
    let tokens = options.segment(segment);
    let (group, head_dim) = (options.group(), options.head_dim);
    let scratch = scratch.of_current_thread();
    // SAFETY: all tokens are inside the segment, whose rows of the gradients belong to this task; the
    // scratch holds KEY_BLOCK rows of each kind.
    unsafe {
        for token in tokens.clone() {
            let q = buffers.q_gradient.of_head(token, kv_head * group, head_dim);
            std::slice::from_raw_parts_mut(q, group * head_dim).fill(0.0);
        }
        for key in tokens.clone().step_by(KEY_BLOCK) {
            let keys = KEY_BLOCK.min(tokens.end - key);
            for (source, rows, transposed, scale) in [
                (buffers.k, scratch.keys, scratch.keys_transposed, options.scale),
                (buffers.v, scratch.values, scratch.values_transposed, 1.0),
            ] {
                source.copy_head(key..key + keys, kv_head, head_dim, rows);
                transpose(
                    isa,
                    &Transpose {
                        source: rows,
                        source_stride: head_dim,
                        rows: keys,
                        columns: head_dim,
                        target: transposed,
                        target_stride: KEY_BLOCK,
                        scale,
                    },
                );
            }
            for sums in [scratch.key_gradients, scratch.value_gradients] {
                std::slice::from_raw_parts_mut(sums, keys * head_dim).fill(0.0);
            }
            let last_query = match options.window {
                None => tokens.end,
                Some(window) => tokens.end.min((key + keys - 1).saturating_add(window)),
            };
            for head in kv_head * group..(kv_head + 1) * group {
                for query in (key..last_query).step_by(QUERY_BLOCK) {
                    let queries = query..last_query.min(query + QUERY_BLOCK);
                    let tile = GradientTile {
                        options,
                        buffers,
                        segment_start: tokens.start,
                        head,
                        key,
                        // Keys after the last query are masked for the whole tile.
                        keys: keys.min(queries.end - key),
                        queries,
                        scratch,
                    };
                    tile_gradient(isa, &tile);
                }
            }
            for (sums, target) in
                [(scratch.key_gradients, buffers.k_gradient), (scratch.value_gradients, buffers.v_gradient)]
            {
                for row in 0..keys {
                    let target = target.of_head(key + row, kv_head, head_dim);
                    std::ptr::copy_nonoverlapping(sums.add(row * head_dim), target, head_dim);
                }
            }
        }
    }
}

/// One tile of scores (queries, keys) of one head.
struct GradientTile<'a> {
    options: &'a AttentionOptions<'a>,
    buffers: &'a AttentionGradientBuffers,
    segment_start: usize,
    head: usize,
    queries: Range<usize>,
    key: usize,
    keys: usize,
    scratch: ThreadScratch,
}

unsafe fn tile_gradient(isa: Isa, tile: &GradientTile<'_>) {
    let (buffers, scratch) = (tile.buffers, tile.scratch);
    let (head_dim, keys, rows) = (tile.options.head_dim, tile.keys, tile.queries.len());
    let unit = tile.options.unit;
    // SAFETY: tokens, heads and tile are inside the buffers; the rows of the gradient of q belong to the
    // calling task, the scratch to its thread.
    unsafe {
        let copy_of = |source: Tokens, target: *mut f32| {
            source.copy_head(tile.queries.clone(), tile.head, head_dim, target);
            target.cast_const()
        };
        let q = copy_of(buffers.q, scratch.queries); // (queries, D)
        let o_gradient = copy_of(buffers.o_gradient, scratch.output_gradients); // (queries, D)
        let pieces = || row_pieces(unit, tile.queries.start, rows, tile.key, keys);
        // s and dp: (queries, keys), sums over channels.
        for (left, right, target) in [
            (q, scratch.keys_transposed, scratch.scores),
            (o_gradient, scratch.values_transposed, scratch.score_gradients),
        ] {
            for piece in pieces() {
                let left = left.add(piece.first * head_dim);
                scratch.multiply(
                    isa,
                    unit,
                    &TileMatmul {
                        rows: piece.rows,
                        columns: piece.keys,
                        runs: &[LeftRun::strided(left, head_dim, 1, head_dim)],
                        right: RightRows { pointer: right, row_stride: KEY_BLOCK, padded: true },
                        output: dense(target, KEY_BLOCK).at(piece.first, 0),
                        write: TileWrite::Overwrite,
                    },
                );
            }
        }
        differentiate_scores(isa, tile);
        // dv and dk: (keys, channels), sums over queries.
        let key_step =
            if is_on_diagonal(tile.queries.start, tile.key, keys) && unit.is_none() { PIECE } else { keys };
        for (left, right, target) in [
            (scratch.scores, o_gradient, scratch.value_gradients),
            (scratch.score_gradients, q, scratch.key_gradients),
        ] {
            for first in (0..keys).step_by(key_step) {
                // Earlier queries do not see these keys. Tiles begin a multiple of PIECE after their first
                // key, so all scores of the later rows have been computed.
                let hidden = match unit {
                    None => (tile.key + first).saturating_sub(tile.queries.start),
                    Some(_) => 0,
                };
                let left = left.add(hidden * KEY_BLOCK + first);
                scratch.multiply(
                    isa,
                    unit,
                    &TileMatmul {
                        rows: key_step.min(keys - first),
                        columns: head_dim,
                        runs: &[LeftRun::strided(left, 1, KEY_BLOCK, rows - hidden)],
                        right: RightRows {
                            pointer: right.add(hidden * head_dim),
                            row_stride: head_dim,
                            padded: false,
                        },
                        output: dense(target, head_dim).at(first, 0),
                        write: TileWrite::Add,
                    },
                );
            }
        }
        // dq: (queries, channels), sums over keys.
        let output = buffers.q_gradient.output(tile.queries.start, tile.head, head_dim);
        for piece in pieces() {
            let left = scratch.score_gradients.add(piece.first * KEY_BLOCK);
            scratch.multiply(
                isa,
                unit,
                &TileMatmul {
                    rows: piece.rows,
                    columns: head_dim,
                    runs: &[LeftRun::strided(left, KEY_BLOCK, 1, piece.keys)],
                    right: RightRows { pointer: scratch.keys, row_stride: head_dim, padded: false },
                    output: output.at(piece.first, 0),
                    write: TileWrite::Add,
                },
            );
        }
    }
}

fn dense(pointer: *mut f32, row_stride: usize) -> OutputView {
    OutputView { pointer, row_stride, column_stride: 1 }
}

on_each_isa! {
    /// Turns the tile's scores into probabilities, and the gradients of the probabilities into those of
    /// q·kᵀ, scale included.
    ///
    /// # Safety
    /// The machine supports `isa`; the tile is inside its buffers.
    unsafe fn differentiate_scores(tile: &GradientTile<'_>) = differentiate_scores_with;
}

#[inline(always)]
unsafe fn differentiate_scores_with<V: Lanes>(tile: &GradientTile<'_>) {
    let (options, buffers) = (tile.options, tile.buffers);
    for (row, query) in tile.queries.clone().enumerate() {
        let (low, high) = visible_columns(options, tile.segment_start, query, tile.key, tile.keys);
        // SAFETY: rows of the tile hold KEY_BLOCK floats, a whole number of vectors of any width; the
        // query is a token of the buffers.
        unsafe {
            let o = buffers.o.of_head(query, tile.head, options.head_dim);
            let o_gradient = buffers.o_gradient.of_head(query, tile.head, options.head_dim);
            let shift = V::splat(dot_with::<V>(o, o_gradient, options.head_dim));
            let lse = V::splat(*buffers.lse.add(query * options.heads + tile.head));
            let scores = tile.scratch.scores.add(row * KEY_BLOCK);
            let gradients = tile.scratch.score_gradients.add(row * KEY_BLOCK);
            let zero = V::splat(0.0);
            let keys = keys_of_piece(tile.queries.start, row, tile.key, tile.keys);
            for step in 0..keys.div_ceil(TOGETHER * V::WIDTH) {
                let at = step * TOGETHER * V::WIDTH;
                let mut powers = [zero; TOGETHER];
                let mut slopes = [V::splat(options.scale); TOGETHER];
                for (index, (power, slope)) in powers.iter_mut().zip(&mut slopes).enumerate() {
                    let mut score = V::load(scores.add(at + index * V::WIDTH));
                    if let Some(cap) = options.softcap {
                        let t = capped_tanh(score, cap);
                        score = t.mul(V::splat(cap));
                        *slope = zero.sub(t).mul(t).mul_add(*slope, *slope);
                    }
                    *power = score.sub(lse);
                }
                powers = exp_of_each(powers);
                for (index, (power, slope)) in powers.iter().zip(&slopes).enumerate() {
                    let at = at + index * V::WIDTH;
                    let columns = V::load(COLUMN_NUMBERS.as_ptr().add(at));
                    let probability = columns.select_less(V::splat(high), *power, zero);
                    let probability = columns.select_less(V::splat(low), zero, probability);
                    probability.store(scores.add(at));
                    let gradient = V::load(gradients.add(at)).sub(shift);
                    probability.mul(gradient).mul(*slope).store(gradients.add(at));
                }
            }
            let computed = keys.div_ceil(TOGETHER * V::WIDTH) * TOGETHER * V::WIDTH;
            clear_hidden(options.unit, scores, computed, tile.keys);
            clear_hidden(options.unit, gradients, computed, tile.keys);
        }
    }
}

#[inline(always)]
unsafe fn dot_with<V: Lanes>(a: *const f32, b: *const f32, count: usize) -> f32 {
    // SAFETY: whole vectors, then the rest, of `count` floats.
    unsafe {
        let whole = count / V::WIDTH * V::WIDTH;
        let mut sum = V::splat(0.0);
        for at in (0..whole).step_by(V::WIDTH) {
            sum = V::load(a.add(at)).mul_add(V::load(b.add(at)), sum);
        }
        if whole < count {
            let rest = count - whole;
            sum = V::load_first(a.add(whole), rest).mul_add(V::load_first(b.add(whole), rest), sum);
        }
        sum.sum()
    }
}
