//! Causal attention over packed segments, forward: o = softmax(scale · q·kᵀ) · v for each head.
//!
//! Tokens are rows, heads are adjacent in a row, and several query heads may share a key head.
//! A task owns some queries of one key head and walks over blocks of keys with a running maximum and
//! sum, so no (T, T) matrix exists; the backward pass needs only o and the log of the sum, `lse`.
//! Blocks follow from the shape alone, so the result does not depend on the number of threads.
//! Left out: the gradient (`attention_gradient.rs`), masks other than causal and window, dropout.

pub use super::attention_tiles::AttentionOptions;
use super::attention_tiles::{
    AttentionScratch, COLUMN_NUMBERS, KEY_BLOCK, QUERY_BLOCK, TOGETHER, capped_tanh, clear_hidden,
    keys_of_piece, row_pieces, visible_columns,
};
use super::isa::{Isa, Lanes, exp_of_each, on_each_isa};
use super::kernel::{LeftRun, OutputView, RightRows, TileMatmul, TileWrite};
use super::packing::{Transpose, transpose_with};
use super::pool::run_tasks;
use std::ops::Range;

/// A matrix (T, heads · D) of f32 that is read; `row_stride` floats from one row to the next.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    pub pointer: *const f32,
    pub row_stride: usize,
}

/// A matrix (T, heads · D) of f32 that is written.
#[derive(Clone, Copy, Debug)]
pub struct TokensMut {
    pub pointer: *mut f32,
    pub row_stride: usize,
}

/// The buffers of the forward pass; q and o are (T, H·D), k and v (T, Hkv·D), lse (T, H) dense or null.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBuffers {
    pub q: Tokens,
    pub k: Tokens,
    pub v: Tokens,
    pub o: TokensMut,
    pub lse: *mut f32,
}

// SAFETY: views are only addresses; tasks that share them write disjoint elements.
unsafe impl Sync for AttentionBuffers {}

/// Computes o and lse on the current thread pool.
///
/// # Safety
/// The machine supports `isa`; the buffers are readable, o and lse writable, for T tokens while the call
/// runs; o and lse overlap nothing else.
pub unsafe fn attention(
    isa: Isa,
    options: &AttentionOptions<'_>,
    buffers: &AttentionBuffers,
    workspace: &mut [f32],
) {
    let scratch = options.check_and_align(workspace);
    let blocks = options.tokens().div_ceil(QUERY_BLOCK);
    run_tasks(blocks * options.kv_heads, |task| {
        // The last queries of a segment see the most keys: start with them.
        let (block, kv_head) = (blocks - 1 - task / options.kv_heads, task % options.kv_heads);
        let tokens = block * QUERY_BLOCK..options.tokens().min((block + 1) * QUERY_BLOCK);
        let mut segment = options.segments.partition_point(|&b| b as usize <= tokens.start) - 1;
        let mut start = tokens.start;
        while start < tokens.end {
            let bounds = options.segment(segment);
            let end = tokens.end.min(bounds.end);
            if start < end {
                let queries = Queries {
                    kv_head,
                    segment_start: bounds.start,
                    positions: start..end,
                    first_row: start,
                    key_rows: None,
                };
                // SAFETY: the task owns these rows of o and lse for the heads of `kv_head`, and the
                // workspace of its thread.
                unsafe { attend(isa, options, buffers, &queries, &scratch) };
                start = end;
            }
            segment += 1;
        }
    });
}

impl Tokens {
    /// The address of the channels of one head of one token.
    pub(super) unsafe fn of_head(self, token: usize, head: usize, head_dim: usize) -> *const f32 {
        // SAFETY: the caller names a token and a head of the matrix.
        unsafe { self.pointer.add(token * self.row_stride + head * head_dim) }
    }

    /// The channels of one head of some tokens: in place or, if rows are a multiple of 4 KiB apart, as a dense copy.
    unsafe fn dense_head(
        self,
        tokens: Range<usize>,
        head: usize,
        head_dim: usize,
        target: *mut f32,
    ) -> Tokens {
        // SAFETY: the caller makes the promises of both functions.
        unsafe {
            if !self.row_stride.is_multiple_of(1024) {
                return Tokens {
                    pointer: self.of_head(tokens.start, head, head_dim),
                    row_stride: self.row_stride,
                };
            }
            self.copy_head(tokens, head, head_dim, target);
        }
        Tokens { pointer: target, row_stride: head_dim }
    }

    /// [`Self::copy_head`] for keys or values, whose rows may be given by a table.
    unsafe fn copy_keys(
        self,
        keys: Range<usize>,
        key_rows: Option<&[i32]>,
        head: usize,
        head_dim: usize,
        target: *mut f32,
    ) {
        // SAFETY: the caller names keys whose rows are in the matrix, and a target that is large enough.
        unsafe {
            let Some(rows) = key_rows else { return self.copy_head(keys, head, head_dim, target) };
            for (index, row) in rows[keys].iter().enumerate() {
                let source = self.of_head(*row as usize, head, head_dim);
                std::ptr::copy_nonoverlapping(source, target.add(index * head_dim), head_dim);
            }
        }
    }

    /// Copies the channels of one head of some tokens to a dense matrix (count, D).
    pub(super) unsafe fn copy_head(
        self,
        tokens: Range<usize>,
        head: usize,
        head_dim: usize,
        target: *mut f32,
    ) {
        for (row, token) in tokens.enumerate() {
            // SAFETY: the caller names tokens and a head of the matrix, and a target that is large enough.
            unsafe {
                let source = self.of_head(token, head, head_dim);
                std::ptr::copy_nonoverlapping(source, target.add(row * head_dim), head_dim);
            }
        }
    }
}

impl TokensMut {
    /// The address of the channels of one head of one token.
    pub(super) unsafe fn of_head(self, token: usize, head: usize, head_dim: usize) -> *mut f32 {
        // SAFETY: the caller names a token and a head of the matrix.
        unsafe { self.pointer.add(token * self.row_stride + head * head_dim) }
    }

    /// The same rows as the C of a matmul.
    pub(super) unsafe fn output(self, token: usize, head: usize, head_dim: usize) -> OutputView {
        OutputView {
            // SAFETY: the caller names a token and a head of the matrix.
            pointer: unsafe { self.of_head(token, head, head_dim) },
            row_stride: self.row_stride,
            column_stride: 1,
        }
    }
}

on_each_isa! {
    /// Writes a scaled transpose on the calling thread.
    ///
    /// # Safety
    /// The machine supports `isa`; source and target are valid for the shape.
    pub(super) unsafe fn transpose(block: &Transpose) = transpose_with;
}

/// Consecutive queries of one segment, for all heads that share a key head.
pub(super) struct Queries<'a> {
    pub kv_head: usize,
    /// The first key of the segment.
    pub segment_start: usize,
    /// The queries, numbered like the keys; at most QUERY_BLOCK.
    pub positions: Range<usize>,
    /// The row of q and o that holds the first query.
    pub first_row: usize,
    /// The row of k and v that holds each key; `None` if it is the key's number.
    pub key_rows: Option<&'a [i32]>,
}

/// Computes the rows of o, and of lse unless it is null, that belong to the queries.
///
/// # Safety
/// The machine supports `isa`; the rows of the queries and their keys are inside the buffers, and no other thread
/// uses these rows of o and lse while the call runs.
pub(super) unsafe fn attend(
    isa: Isa,
    options: &AttentionOptions<'_>,
    buffers: &AttentionBuffers,
    queries: &Queries<'_>,
    scratch: &AttentionScratch,
) {
    let scratch = scratch.of_current_thread();
    let &Queries { kv_head, segment_start, first_row, key_rows, .. } = queries;
    let queries = queries.positions.clone();
    let rows = first_row..first_row + queries.len();
    let (group, head_dim) = (options.group(), options.head_dim);
    let first_key = options.first_key(segment_start, queries.start);
    let mut key = segment_start + (first_key - segment_start) / KEY_BLOCK * KEY_BLOCK;
    let mut is_first = true;
    // SAFETY: all tokens are inside the segment; tiles have at most QUERY_BLOCK × KEY_BLOCK scores; the
    // rows of o and lse belong to this task.
    unsafe {
        while key < queries.end {
            let keys = KEY_BLOCK.min(queries.end - key);
            let block = key..key + keys;
            buffers.k.copy_keys(block.clone(), key_rows, kv_head, head_dim, scratch.keys);
            transpose(
                isa,
                &Transpose {
                    source: scratch.keys,
                    source_stride: head_dim,
                    rows: keys,
                    columns: head_dim,
                    target: scratch.keys_transposed,
                    target_stride: KEY_BLOCK,
                    scale: options.scale,
                },
            );
            let values = scratch.values;
            buffers.v.copy_keys(block, key_rows, kv_head, head_dim, values);
            for member in 0..group {
                let head = kv_head * group + member;
                let q = buffers.q.dense_head(rows.clone(), head, head_dim, scratch.queries);
                for piece in row_pieces(options.unit, queries.start, queries.len(), key, keys) {
                    let left = q.pointer.add(piece.first * q.row_stride);
                    scratch.multiply(
                        isa,
                        options.unit,
                        &TileMatmul {
                            rows: piece.rows,
                            columns: piece.keys,
                            runs: &[LeftRun::strided(left, q.row_stride, 1, head_dim)],
                            right: RightRows {
                                pointer: scratch.keys_transposed,
                                row_stride: KEY_BLOCK,
                                padded: true,
                            },
                            output: OutputView {
                                pointer: scratch.scores.add(piece.first * KEY_BLOCK),
                                row_stride: KEY_BLOCK,
                                column_stride: 1,
                            },
                            write: TileWrite::Overwrite,
                        },
                    );
                }
                let state = scratch.state.add(2 * member * QUERY_BLOCK);
                let output = buffers.o.output(first_row, head, head_dim);
                exponentiate(
                    isa,
                    &ScoreTile {
                        options,
                        segment_start,
                        queries: queries.clone(),
                        key,
                        keys,
                        scores: scratch.scores,
                        state,
                        is_first,
                        output,
                    },
                );
                for piece in row_pieces(options.unit, queries.start, queries.len(), key, keys) {
                    let probabilities = scratch.scores.add(piece.first * KEY_BLOCK);
                    scratch.multiply(
                        isa,
                        options.unit,
                        &TileMatmul {
                            rows: piece.rows,
                            columns: head_dim,
                            runs: &[LeftRun::strided(probabilities, KEY_BLOCK, 1, piece.keys)],
                            right: RightRows { pointer: values, row_stride: head_dim, padded: false },
                            output: output.at(piece.first, 0),
                            write: if is_first { TileWrite::Overwrite } else { TileWrite::Add },
                        },
                    );
                }
            }
            is_first = false;
            key += KEY_BLOCK;
        }
        for member in 0..group {
            let head = kv_head * group + member;
            let state = scratch.state.add(2 * member * QUERY_BLOCK);
            for (index, row) in rows.clone().enumerate() {
                let (max, sum) = (*state.add(index), *state.add(QUERY_BLOCK + index));
                let sink = options.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks.get(head));
                // With a sink, the sum and o are rescaled to the larger of both maxima.
                let most = max.max(sink);
                let (factor, max) = ((max - most).exp(), most);
                let sum = if sink > f32::NEG_INFINITY { sum * factor + (sink - most).exp() } else { sum };
                if !buffers.lse.is_null() {
                    *buffers.lse.add(row * options.heads + head) = max + sum.ln();
                }
                let o = buffers.o.of_head(row, head, head_dim);
                scale_row(isa, o, head_dim, factor / sum);
            }
        }
    }
}

on_each_isa! {
    /// Multiplies `count` floats.
    ///
    /// # Safety
    /// The machine supports `isa`; the row is writable.
    unsafe fn scale_row(row: *mut f32, count: usize, factor: f32) = scale_row_with;
}

#[inline(always)]
unsafe fn scale_row_with<V: Lanes>(row: *mut f32, count: usize, factor: f32) {
    // SAFETY: whole vectors, then the rest, of `count` floats.
    unsafe {
        let whole = count / V::WIDTH * V::WIDTH;
        for at in (0..whole).step_by(V::WIDTH) {
            V::load(row.add(at)).mul(V::splat(factor)).store(row.add(at));
        }
        if whole < count {
            V::load_first(row.add(whole), count - whole)
                .mul(V::splat(factor))
                .store_first(row.add(whole), count - whole);
        }
    }
}

/// A tile of scores (queries, keys) with the running state of its rows.
struct ScoreTile<'a> {
    options: &'a AttentionOptions<'a>,
    segment_start: usize,
    queries: Range<usize>,
    key: usize,
    keys: usize,
    scores: *mut f32,
    state: *mut f32,
    is_first: bool,
    output: OutputView,
}

on_each_isa! {
    /// Turns scores into exp(score - running maximum), zero where masked, and rescales the running sums and the
    /// partial o to the new maximum.
    ///
    /// # Safety
    /// The machine supports `isa`; the tile's buffers are writable.
    unsafe fn exponentiate(tile: &ScoreTile<'_>) = exponentiate_with;
}

#[inline(always)]
unsafe fn exponentiate_with<V: Lanes>(tile: &ScoreTile<'_>) {
    let options = tile.options;
    for (row, query) in tile.queries.clone().enumerate() {
        let (low, high) = visible_columns(options, tile.segment_start, query, tile.key, tile.keys);
        // SAFETY: a row holds KEY_BLOCK floats, a whole number of vectors of any width; lanes past the last key
        // are never visible.
        unsafe {
            let scores = tile.scores.add(row * KEY_BLOCK);
            let keys = keys_of_piece(tile.queries.start, row, tile.key, tile.keys);
            let steps = keys.div_ceil(TOGETHER * V::WIDTH);
            let hidden = V::splat(f32::NEG_INFINITY);
            let mut max = [hidden; TOGETHER];
            let is_plain =
                low == 0.0 && high as usize == steps * TOGETHER * V::WIDTH && options.softcap.is_none();
            for step in 0..steps {
                for (index, max) in max.iter_mut().enumerate() {
                    let at = (step * TOGETHER + index) * V::WIDTH;
                    let mut score = V::load(scores.add(at));
                    if !is_plain {
                        if let Some(cap) = options.softcap {
                            score = capped_tanh(score, cap).mul(V::splat(cap));
                        }
                        let columns = V::load(COLUMN_NUMBERS.as_ptr().add(at));
                        score = columns.select_less(V::splat(high), score, hidden);
                        score = columns.select_less(V::splat(low), hidden, score);
                        score.store(scores.add(at));
                    }
                    *max = max.max(score);
                }
            }
            let (max_seen, sum_seen) = (tile.state.add(row), tile.state.add(QUERY_BLOCK + row));
            let (old_max, old_sum) =
                if tile.is_first { (f32::NEG_INFINITY, 0.0) } else { (*max_seen, *sum_seen) };
            let max = max[0].max(max[1]).max(max[2].max(max[3])).largest();
            let new_max = old_max.max(max);
            // While a row has seen no key at all, its maximum is -∞, and -∞ - -∞ would be NaN.
            let base = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max };
            let mut sum = [V::splat(0.0); TOGETHER];
            for step in 0..steps {
                let at = scores.add(step * TOGETHER * V::WIDTH);
                let mut power = sum;
                for (index, power) in power.iter_mut().enumerate() {
                    *power = V::load(at.add(index * V::WIDTH)).sub(V::splat(base));
                }
                power = exp_of_each(power);
                for (index, (power, sum)) in power.iter().zip(&mut sum).enumerate() {
                    power.store(at.add(index * V::WIDTH));
                    *sum = sum.add(*power);
                }
            }
            clear_hidden(options.unit, scores, steps * TOGETHER * V::WIDTH, tile.keys);
            let sum = sum[0].add(sum[1]).add(sum[2].add(sum[3])).sum();
            let factor = if old_max == new_max { 1.0 } else { (old_max - base).exp() };
            *max_seen = new_max;
            *sum_seen = old_sum * factor + sum;
            if factor != 1.0 && !tile.is_first {
                let o = tile.output.pointer.add(row * tile.output.row_stride);
                scale_row_with::<V>(o, options.head_dim, factor);
            }
        }
    }
}
