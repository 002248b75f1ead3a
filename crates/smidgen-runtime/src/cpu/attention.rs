//! Causal attention over packed segments, forward: o = softmax(scale · q·kᵀ) · v for each head.
//!
//! Tokens are rows, heads lie side by side in a row, and several query heads may share a key head.
//! A task owns some queries of one key head and walks over blocks of keys with a running maximum and
//! sum, so no (T, T) matrix exists; what the backward pass needs is o and the log of the sum, `lse`.
//! Blocks follow from the shape alone: the bytes do not depend on the number of threads.
//! Left out: the gradient (`attention_gradient.rs`), masks other than causal and window, dropout.

use super::isa::{Isa, Lanes, exp, on_each_isa, tanh};
use super::kernel::{LeftRun, OutputView, RightRows, TileProduct, TileWrite, tile_product};
use super::packing::{Transpose, transpose_with};
use super::tasks::{LINE_FLOATS, aligned_floats, current_thread, run_tasks};
use std::ops::Range;

/// What attention computes. Segment s is the tokens `segments[s]..segments[s + 1]`; the first boundary
/// is 0, the last one T, and equal neighbours are an empty segment.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOptions<'a> {
    pub segments: &'a [i32],
    pub heads: usize,
    pub kv_heads: usize,
    /// A multiple of 8, at most 256.
    pub head_dim: usize,
    pub scale: f32,
    /// Query i sees key j of its segment where i - window < j <= i; `None` is all j <= i.
    pub window: Option<usize>,
    /// Scores s become c · tanh(s / c) before the mask.
    pub softcap: Option<f32>,
}

/// A matrix (T, heads · D) of f32 that is read, rows `row_stride` floats apart.
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

/// The buffers of the forward pass; q and o are (T, H·D), k and v (T, Hkv·D), lse (T, H) dense.
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

/// Floats of workspace that attention needs, forward or backward, in a pool of so many threads.
pub const fn attention_workspace_floats(
    threads: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
) -> usize {
    LINE_FLOATS + threads * thread_floats(heads / kv_heads, head_dim)
}

/// Computes o and lse in the current rayon pool.
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
        // The last queries of a segment see the most keys: begin with them.
        let (block, kv_head) = (blocks - 1 - task / options.kv_heads, task % options.kv_heads);
        let tokens = block * QUERY_BLOCK..options.tokens().min((block + 1) * QUERY_BLOCK);
        let mut segment = options.segments.partition_point(|&b| b as usize <= tokens.start) - 1;
        let mut start = tokens.start;
        while start < tokens.end {
            let bounds = options.segment(segment);
            let end = tokens.end.min(bounds.end);
            if start < end {
                // SAFETY: the task owns these rows of o and lse for the heads of `kv_head`, and the
                // workspace of its thread.
                unsafe { attend(isa, options, buffers, kv_head, bounds.start, start..end, &scratch) };
                start = end;
            }
            segment += 1;
        }
    });
}

/// Queries of one tile.
pub(super) const QUERY_BLOCK: usize = 64;
/// Keys of one tile: two panels of the kernel.
pub(super) const KEY_BLOCK: usize = 96;

const fn thread_floats(group: usize, head_dim: usize) -> usize {
    // Two transposed blocks (D, KEY_BLOCK), two tiles of scores, and two floats a query and head.
    2 * head_dim * KEY_BLOCK + 2 * QUERY_BLOCK * KEY_BLOCK + 2 * group * QUERY_BLOCK
}

/// The workspace of all threads.
pub(super) struct AttentionScratch {
    pointer: *mut f32,
    group: usize,
    head_dim: usize,
}

// SAFETY: each thread uses its own part.
unsafe impl Sync for AttentionScratch {}

/// The workspace of one thread.
#[derive(Clone, Copy)]
pub(super) struct ThreadScratch {
    /// kᵀ, times the scale: (D, KEY_BLOCK).
    pub keys: *mut f32,
    /// vᵀ: (D, KEY_BLOCK).
    pub values: *mut f32,
    /// Scores, then probabilities: (QUERY_BLOCK, KEY_BLOCK).
    pub scores: *mut f32,
    /// Gradients of the probabilities, then of the scores: (QUERY_BLOCK, KEY_BLOCK).
    pub score_gradients: *mut f32,
    /// For each head of the group, QUERY_BLOCK maxima and QUERY_BLOCK sums.
    pub state: *mut f32,
}

impl AttentionScratch {
    pub(super) fn of_current_thread(&self) -> ThreadScratch {
        let offset = current_thread() * thread_floats(self.group, self.head_dim);
        // SAFETY: `check_and_align` made sure that the workspace has a part for every thread.
        unsafe {
            let keys = self.pointer.add(offset);
            let values = keys.add(self.head_dim * KEY_BLOCK);
            let scores = values.add(self.head_dim * KEY_BLOCK);
            let score_gradients = scores.add(QUERY_BLOCK * KEY_BLOCK);
            ThreadScratch {
                keys,
                values,
                scores,
                score_gradients,
                state: score_gradients.add(QUERY_BLOCK * KEY_BLOCK),
            }
        }
    }
}

impl AttentionOptions<'_> {
    pub(super) fn tokens(&self) -> usize {
        self.segments.last().map_or(0, |&end| end as usize)
    }

    pub(super) fn segment(&self, index: usize) -> Range<usize> {
        self.segments[index] as usize..self.segments[index + 1] as usize
    }

    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    pub(super) fn check_and_align(&self, workspace: &mut [f32]) -> AttentionScratch {
        let threads = rayon::current_num_threads();
        let needed = attention_workspace_floats(threads, self.heads, self.kv_heads, self.head_dim);
        assert!(
            workspace.len() >= needed,
            "attention on {threads} threads needs {needed} floats of workspace, got {}",
            workspace.len()
        );
        assert!(
            self.segments.first() == Some(&0) && self.segments.is_sorted(),
            "segment boundaries must begin at 0 and never fall"
        );
        assert!(
            self.head_dim.is_multiple_of(8) && (8..=256).contains(&self.head_dim),
            "head size {} is not a multiple of 8 in 8..=256",
            self.head_dim
        );
        assert!(
            self.heads.is_multiple_of(self.kv_heads),
            "{} heads cannot share {} key heads",
            self.heads,
            self.kv_heads
        );
        assert_ne!(self.window, Some(0), "a window of 0 hides every key");
        AttentionScratch {
            pointer: aligned_floats(workspace).as_mut_ptr(),
            group: self.group(),
            head_dim: self.head_dim,
        }
    }

    /// The first key that `query` sees in a segment that begins at `segment_start`.
    pub(super) fn first_key(&self, segment_start: usize, query: usize) -> usize {
        match self.window {
            None => segment_start,
            Some(window) => segment_start.max((query + 1).saturating_sub(window)),
        }
    }
}

impl Tokens {
    /// The address of a token's part that belongs to a head.
    pub(super) unsafe fn of_head(self, token: usize, head: usize, head_dim: usize) -> *const f32 {
        // SAFETY: the caller names a token and a head of the matrix.
        unsafe { self.pointer.add(token * self.row_stride + head * head_dim) }
    }
}

impl TokensMut {
    /// The address of a token's part that belongs to a head.
    pub(super) unsafe fn of_head(self, token: usize, head: usize, head_dim: usize) -> *mut f32 {
        // SAFETY: the caller names a token and a head of the matrix.
        unsafe { self.pointer.add(token * self.row_stride + head * head_dim) }
    }

    /// The same rows as the C of a product.
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
    /// The machine supports `isa`; source and target are good for the shape.
    pub(super) unsafe fn transpose(block: &Transpose) = transpose_with;
}

/// The queries `queries` of one segment, for all heads of `kv_head`.
unsafe fn attend(
    isa: Isa,
    options: &AttentionOptions<'_>,
    buffers: &AttentionBuffers,
    kv_head: usize,
    segment_start: usize,
    queries: Range<usize>,
    scratch: &AttentionScratch,
) {
    let scratch = scratch.of_current_thread();
    let (group, head_dim) = (options.group(), options.head_dim);
    let first_key = options.first_key(segment_start, queries.start);
    let mut key = segment_start + (first_key - segment_start) / KEY_BLOCK * KEY_BLOCK;
    let mut is_first = true;
    // SAFETY: all tokens are inside the segment; tiles have at most QUERY_BLOCK × KEY_BLOCK scores; the
    // rows of o and lse belong to this task.
    unsafe {
        while key < queries.end {
            let keys = KEY_BLOCK.min(queries.end - key);
            transpose(
                isa,
                &Transpose {
                    source: buffers.k.of_head(key, kv_head, head_dim),
                    source_stride: buffers.k.row_stride,
                    rows: keys,
                    columns: head_dim,
                    target: scratch.keys,
                    target_stride: KEY_BLOCK,
                    scale: options.scale,
                },
            );
            for member in 0..group {
                let head = kv_head * group + member;
                let q = buffers.q.of_head(queries.start, head, head_dim);
                tile_product(
                    isa,
                    &TileProduct {
                        rows: queries.len(),
                        columns: keys,
                        runs: &[LeftRun::strided(q, buffers.q.row_stride, 1, head_dim)],
                        right: RightRows { pointer: scratch.keys, row_stride: KEY_BLOCK, padded: true },
                        output: OutputView {
                            pointer: scratch.scores,
                            row_stride: KEY_BLOCK,
                            column_stride: 1,
                        },
                        write: TileWrite::Overwrite,
                    },
                );
                let state = scratch.state.add(2 * member * QUERY_BLOCK);
                let output = buffers.o.output(queries.start, head, head_dim);
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
                tile_product(
                    isa,
                    &TileProduct {
                        rows: queries.len(),
                        columns: head_dim,
                        runs: &[LeftRun::strided(scratch.scores, KEY_BLOCK, 1, keys)],
                        right: RightRows {
                            pointer: buffers.v.of_head(key, kv_head, head_dim),
                            row_stride: buffers.v.row_stride,
                            padded: false,
                        },
                        output,
                        write: match is_first {
                            true => TileWrite::Overwrite,
                            false => TileWrite::Add,
                        },
                    },
                );
            }
            is_first = false;
            key += KEY_BLOCK;
        }
        for member in 0..group {
            let head = kv_head * group + member;
            let state = scratch.state.add(2 * member * QUERY_BLOCK);
            for (row, query) in queries.clone().enumerate() {
                let (most, sum) = (*state.add(row), *state.add(QUERY_BLOCK + row));
                *buffers.lse.add(query * options.heads + head) = most + sum.ln();
                let o = buffers.o.of_head(query, head, head_dim);
                scale_row(isa, o, head_dim, 1.0 / sum);
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
    /// Turns scores into exp(score - running maximum), zero where masked, and brings the running sums
    /// and what o holds so far to the new maximum.
    ///
    /// # Safety
    /// The machine supports `isa`; the tile's buffers are writable.
    unsafe fn exponentiate(tile: &ScoreTile<'_>) = exponentiate_with;
}

/// 0, 1, 2, … as floats, to compare lanes with the bounds of a row.
pub(super) static COLUMN_NUMBERS: [f32; KEY_BLOCK] = {
    let mut numbers = [0.0; KEY_BLOCK];
    let mut column = 0;
    while column < KEY_BLOCK {
        numbers[column] = column as f32;
        column += 1;
    }
    numbers
};

/// The columns of a row of a tile that its query sees, as floats.
#[inline(always)]
pub(super) fn visible_columns(
    options: &AttentionOptions<'_>,
    segment_start: usize,
    query: usize,
    key: usize,
    keys: usize,
) -> (f32, f32) {
    let low = options.first_key(segment_start, query).saturating_sub(key).min(keys);
    let high = (query + 1).saturating_sub(key).min(keys);
    (low as f32, high as f32)
}

/// Softcap on a vector of scores.
#[inline(always)]
pub(super) unsafe fn capped_tanh<V: Lanes>(score: V, cap: f32) -> V {
    // SAFETY: arithmetic on lanes; the caller promises the instruction set.
    unsafe { tanh(score.mul(V::splat(1.0 / cap))) }
}

#[inline(always)]
unsafe fn exponentiate_with<V: Lanes>(tile: &ScoreTile<'_>) {
    let options = tile.options;
    for (row, query) in tile.queries.clone().enumerate() {
        let (low, high) = visible_columns(options, tile.segment_start, query, tile.key, tile.keys);
        // SAFETY: a row holds KEY_BLOCK floats, a whole number of vectors of any width; lanes behind
        // the last key are never visible.
        unsafe {
            let scores = tile.scores.add(row * KEY_BLOCK);
            let vectors = tile.keys.div_ceil(V::WIDTH);
            let hidden = V::splat(f32::NEG_INFINITY);
            let mut most = hidden;
            for index in 0..vectors {
                let at = index * V::WIDTH;
                let mut score = V::load(scores.add(at));
                if let Some(cap) = options.softcap {
                    score = capped_tanh(score, cap).mul(V::splat(cap));
                }
                let columns = V::load(COLUMN_NUMBERS.as_ptr().add(at));
                score = columns.select_less(V::splat(high), score, hidden);
                score = columns.select_less(V::splat(low), hidden, score);
                score.store(scores.add(at));
                most = most.max(score);
            }
            let (most_seen, sum_seen) = (tile.state.add(row), tile.state.add(QUERY_BLOCK + row));
            let (old_most, old_sum) = match tile.is_first {
                true => (f32::NEG_INFINITY, 0.0),
                false => (*most_seen, *sum_seen),
            };
            let new_most = old_most.max(most.largest());
            // While a row has seen no key at all, its maximum is -∞, and -∞ - -∞ would be NaN.
            let base = if new_most == f32::NEG_INFINITY { 0.0 } else { new_most };
            let mut sum = V::splat(0.0);
            for index in 0..vectors {
                let at = scores.add(index * V::WIDTH);
                let power = exp(V::load(at).sub(V::splat(base)));
                power.store(at);
                sum = sum.add(power);
            }
            let factor = if old_most == new_most { 1.0 } else { (old_most - base).exp() };
            *most_seen = new_most;
            *sum_seen = old_sum * factor + sum.sum();
            if factor != 1.0 && !tile.is_first {
                let o = tile.output.pointer.add(row * tile.output.row_stride);
                scale_row_with::<V>(o, options.head_dim, factor);
            }
        }
    }
}
