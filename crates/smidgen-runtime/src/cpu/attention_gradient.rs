//! Causal attention over packed segments, backward: from do to dq, dk and dv.
//!
//! With s = scale · q·kᵀ, p = exp(s - lse) and o = p·v, and D = Σ do ∘ o over a head's channels:
//!     dv = pᵀ·do     dp = do·vᵀ     ds = p ∘ (dp - D)     dq = scale · ds·k     dk = scale · dsᵀ·q
//! (D is the sum over keys of p ∘ dp, which the derivative of softmax subtracts.) A softcap replaces s by
//! c·t with t = tanh(s / c), so ds is multiplied by 1 - t²; masked p are 0, hence so are their ds.
//! A task owns one segment and one key head with its query heads: it alone writes those rows of dq, dk
//! and dv, in a fixed order of tiles, so the bytes do not depend on the number of threads.
//! Left out: splitting one segment and key head over several threads.

use super::attention::{
    AttentionOptions, AttentionScratch, COLUMN_NUMBERS, KEY_BLOCK, QUERY_BLOCK, ThreadScratch, Tokens,
    TokensMut, capped_tanh, transpose, visible_columns,
};
use super::isa::{Isa, Lanes, exp, on_each_isa};
use super::kernel::{LeftRun, OutputView, RightRows, TileProduct, TileWrite, tile_product};
use super::packing::Transpose;
use super::tasks::run_tasks;
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

/// Computes the gradients of q, k and v in the current rayon pool, with the workspace that
/// `attention_workspace_floats` tells.
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
    // SAFETY: all tokens are inside the segment, whose rows of the gradients belong to this task.
    unsafe {
        for token in tokens.clone() {
            let q = buffers.q_gradient.of_head(token, kv_head * group, head_dim);
            std::slice::from_raw_parts_mut(q, group * head_dim).fill(0.0);
            let k = buffers.k_gradient.of_head(token, kv_head, head_dim);
            std::slice::from_raw_parts_mut(k, head_dim).fill(0.0);
            let v = buffers.v_gradient.of_head(token, kv_head, head_dim);
            std::slice::from_raw_parts_mut(v, head_dim).fill(0.0);
        }
        for key in tokens.clone().step_by(KEY_BLOCK) {
            let keys = KEY_BLOCK.min(tokens.end - key);
            let mut block = Transpose {
                source: buffers.k.of_head(key, kv_head, head_dim),
                source_stride: buffers.k.row_stride,
                rows: keys,
                columns: head_dim,
                target: scratch.keys,
                target_stride: KEY_BLOCK,
                scale: options.scale,
            };
            transpose(isa, &block);
            block.source = buffers.v.of_head(key, kv_head, head_dim);
            block.source_stride = buffers.v.row_stride;
            block.target = scratch.values;
            block.scale = 1.0;
            transpose(isa, &block);
            let last_query = match options.window {
                None => tokens.end,
                Some(window) => tokens.end.min((key + keys - 1).saturating_add(window)),
            };
            for head in kv_head * group..(kv_head + 1) * group {
                for query in (key..last_query).step_by(QUERY_BLOCK) {
                    let tile = GradientTile {
                        options,
                        buffers,
                        segment_start: tokens.start,
                        head,
                        kv_head,
                        queries: query..last_query.min(query + QUERY_BLOCK),
                        key,
                        keys,
                        scratch,
                    };
                    tile_gradient(isa, &tile);
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
    kv_head: usize,
    queries: Range<usize>,
    key: usize,
    keys: usize,
    scratch: ThreadScratch,
}

unsafe fn tile_gradient(isa: Isa, tile: &GradientTile<'_>) {
    let (buffers, scratch) = (tile.buffers, tile.scratch);
    let (head_dim, keys, rows) = (tile.options.head_dim, tile.keys, tile.queries.len());
    let score_tile = |pointer| OutputView { pointer, row_stride: KEY_BLOCK, column_stride: 1 };
    let transposed_rows = |pointer: *mut f32| RightRows { pointer, row_stride: KEY_BLOCK, padded: true };
    let plain_rows = |pointer, row_stride| RightRows { pointer, row_stride, padded: false };
    // SAFETY: tokens, heads and tile are inside the buffers; the rows of the gradients belong to the
    // calling task, the scratch to its thread.
    unsafe {
        let q = buffers.q.of_head(tile.queries.start, tile.head, head_dim);
        let k = buffers.k.of_head(tile.key, tile.kv_head, head_dim);
        let o_gradient = buffers.o_gradient.of_head(tile.queries.start, tile.head, head_dim);
        // (queries, keys) from channels
        for (left, stride, right, target) in [
            (q, buffers.q.row_stride, scratch.keys, scratch.scores),
            (o_gradient, buffers.o_gradient.row_stride, scratch.values, scratch.score_gradients),
        ] {
            tile_product(
                isa,
                &TileProduct {
                    rows,
                    columns: keys,
                    runs: &[LeftRun::strided(left, stride, 1, head_dim)],
                    right: transposed_rows(right),
                    output: score_tile(target),
                    write: TileWrite::Overwrite,
                },
            );
        }
        differentiate_scores(isa, tile);
        // (keys, channels) from queries
        for (left, right, stride, target) in [
            (scratch.scores, o_gradient, buffers.o_gradient.row_stride, buffers.v_gradient),
            (scratch.score_gradients, q, buffers.q.row_stride, buffers.k_gradient),
        ] {
            tile_product(
                isa,
                &TileProduct {
                    rows: keys,
                    columns: head_dim,
                    runs: &[LeftRun::strided(left, 1, KEY_BLOCK, rows)],
                    right: plain_rows(right, stride),
                    output: target.output(tile.key, tile.kv_head, head_dim),
                    write: TileWrite::Add,
                },
            );
        }
        // (queries, channels) from keys
        tile_product(
            isa,
            &TileProduct {
                rows,
                columns: head_dim,
                runs: &[LeftRun::strided(scratch.score_gradients, KEY_BLOCK, 1, keys)],
                right: plain_rows(k, buffers.k.row_stride),
                output: buffers.q_gradient.output(tile.queries.start, tile.head, head_dim),
                write: TileWrite::Add,
            },
        );
    }
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
            for index in 0..tile.keys.div_ceil(V::WIDTH) {
                let at = index * V::WIDTH;
                let mut score = V::load(scores.add(at));
                let mut slope = V::splat(options.scale);
                if let Some(cap) = options.softcap {
                    let bent = capped_tanh(score, cap);
                    score = bent.mul(V::splat(cap));
                    slope = zero.sub(bent).mul(bent).mul_add(slope, slope);
                }
                let mut probability = exp(score.sub(lse));
                let columns = V::load(COLUMN_NUMBERS.as_ptr().add(at));
                probability = columns.select_less(V::splat(high), probability, zero);
                probability = columns.select_less(V::splat(low), zero, probability);
                let gradient = V::load(gradients.add(at)).sub(shift);
                probability.store(scores.add(at));
                probability.mul(gradient).mul(slope).store(gradients.add(at));
            }
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
