//! The options of attention, and its tiles: their sizes, which scores are visible, and their workspace.
//!
//! A tile is the scores of some queries and some keys of one head and segment. Tiles that the causal
//! diagonal crosses are cut into pieces of 16 rows, each with only the keys that it may see.
//! Sizes and cuts follow from the shape alone. Left out: the computation on tiles (`attention.rs`,
//! `attention_gradient.rs`).

use super::arena::aligned_floats;
#[cfg(target_arch = "x86_64")]
use super::bf16_attention::bf16_tile_matmul;
use super::bf16_unit::Bf16Unit;
use super::isa::{Isa, Lanes, tanh};
use super::kernel::{TileMatmul, tile_matmul};
use super::pool::{current_thread, current_threads};
use super::view::StoredVector;
use smidgen_ir::workspace_cpu::{attention_floats, attention_thread_floats, bf16_attention_thread_floats};

pub use smidgen_ir::workspace_cpu::{KEY_BLOCK, QUERY_BLOCK};
use std::ops::Range;

/// The largest head size of a model.
pub const MOST_HEAD_DIM: usize = 512;

/// The shape and the variant of attention. Segment s is the tokens `segments[s]..segments[s + 1]`; the first boundary
/// is 0, the last one T, and equal neighbours are an empty segment.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOptions<'a> {
    pub segments: &'a [i32],
    pub heads: usize,
    pub kv_heads: usize,
    /// At most [`MOST_HEAD_DIM`].
    pub head_dim: usize,
    pub scale: f32,
    /// Query i sees key j of its segment if i - window < j <= i; `None` is all j <= i.
    pub window: Option<usize>,
    /// Scores s become c · tanh(s / c) before the mask.
    pub softcap: Option<f32>,
    /// A further score for each head, which belongs to no key.
    pub sinks: Option<StoredVector>, // (H)
    /// If set, matmuls round their operands to bf16 and use this unit, which the machine supports.
    pub unit: Option<Bf16Unit>,
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
        let threads = current_threads();
        let tiles = match self.unit {
            None => 0,
            Some(_) => threads * bf16_attention_thread_floats(self.head_dim),
        };
        let needed = tiles + attention_floats(threads, self.group(), self.head_dim);
        assert!(
            workspace.len() >= needed,
            "attention on {threads} threads needs {needed} floats of workspace, got {}",
            workspace.len()
        );
        assert!(
            self.segments.first() == Some(&0) && self.segments.is_sorted(),
            "segment boundaries must begin at 0 and never decrease"
        );
        let fits = (1..=MOST_HEAD_DIM).contains(&self.head_dim);
        assert!(fits, "head size {} is not in 1..={MOST_HEAD_DIM}", self.head_dim);
        assert!(self.sinks.is_none_or(|sinks| sinks.len() == self.heads), "a sink for each head");
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
            unit: self.unit,
            threads,
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

/// The workspace of all threads.
pub struct AttentionScratch {
    pub pointer: *mut f32,
    pub group: usize,
    pub head_dim: usize,
    pub unit: Option<Bf16Unit>,
    /// Threads of the pool; inside a task, `current_threads` is 1.
    pub threads: usize,
}

// SAFETY: each thread uses its own part.
unsafe impl Sync for AttentionScratch {}

/// The workspace of one thread. Rows of tokens are copied here because their own strides may be multiples
/// of 4 KiB, which compete for the same sets of the L1 cache.
#[derive(Clone, Copy)]
pub struct ThreadScratch {
    /// kᵀ, times the scale: (D, KEY_BLOCK).
    pub keys_transposed: *mut f32,
    /// vᵀ: (D, KEY_BLOCK).
    pub values_transposed: *mut f32,
    /// k: (KEY_BLOCK, D).
    pub keys: *mut f32,
    /// v: (KEY_BLOCK, D).
    pub values: *mut f32,
    /// The gradient of k so far: (KEY_BLOCK, D).
    pub key_gradients: *mut f32,
    /// The gradient of v so far: (KEY_BLOCK, D).
    pub value_gradients: *mut f32,
    /// q: (QUERY_BLOCK, D).
    pub queries: *mut f32,
    /// The gradient of o: (QUERY_BLOCK, D).
    pub output_gradients: *mut f32,
    /// Scores, then probabilities: (QUERY_BLOCK, KEY_BLOCK).
    pub scores: *mut f32,
    /// Gradients of the probabilities, then of the scores: (QUERY_BLOCK, KEY_BLOCK).
    pub score_gradients: *mut f32,
    /// For each head of the group, QUERY_BLOCK maxima and QUERY_BLOCK sums.
    pub state: *mut f32,
    /// Packed operands of bf16 matmuls, `tile_elements` for each side; unused in f32.
    pub tiles: *mut u16,
    pub tile_elements: usize,
}

impl ThreadScratch {
    /// A matmul of one tile, on the bf16 unit if attention uses one.
    ///
    /// # Safety
    /// As for `tile_matmul`; the scratch belongs to the calling thread and was made for `unit`.
    pub unsafe fn multiply(&self, isa: Isa, unit: Option<Bf16Unit>, matmul: &TileMatmul<'_>) {
        match unit {
            // SAFETY: the caller's promises are passed on.
            None => unsafe { tile_matmul(isa, matmul) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Some(unit) => unsafe { bf16_tile_matmul(unit, matmul, self.tiles, self.tile_elements) },
            #[cfg(not(target_arch = "x86_64"))]
            Some(unit) => unreachable!("{} was not detected", unit.name()),
        }
    }
}

impl AttentionScratch {
    pub fn of_current_thread(&self) -> ThreadScratch {
        let offset = current_thread() * attention_thread_floats(self.group, self.head_dim);
        let key_floats = self.head_dim * KEY_BLOCK;
        let query_floats = self.head_dim * QUERY_BLOCK;
        let score_floats = QUERY_BLOCK * KEY_BLOCK;
        let tile_floats = bf16_attention_thread_floats(self.head_dim);
        let behind_all = self.threads * attention_thread_floats(self.group, self.head_dim);
        // SAFETY: `check_and_align` made sure that the workspace has a part for every thread, and
        // `attention_thread_floats` is the sum of these.
        unsafe {
            let keys = self.pointer.add(offset);
            let queries = keys.add(6 * key_floats);
            let scores = queries.add(2 * query_floats);
            ThreadScratch {
                keys_transposed: keys,
                values_transposed: keys.add(key_floats),
                keys: keys.add(2 * key_floats),
                values: keys.add(3 * key_floats),
                key_gradients: keys.add(4 * key_floats),
                value_gradients: keys.add(5 * key_floats),
                queries,
                output_gradients: queries.add(query_floats),
                scores,
                score_gradients: scores.add(score_floats),
                state: scores.add(2 * score_floats),
                tiles: match self.unit {
                    None => std::ptr::null_mut(),
                    Some(_) => self.pointer.add(behind_all + current_thread() * tile_floats).cast(),
                },
                tile_elements: tile_floats,
            }
        }
    }
}

/// Vectors of a row that are computed together; KEY_BLOCK is a multiple of this many vectors of every width.
pub const TOGETHER: usize = 4;

/// 0, 1, 2, … as floats, to compare lanes with the bounds of a row.
pub static COLUMN_NUMBERS: [f32; KEY_BLOCK] = {
    let mut numbers = [0.0; KEY_BLOCK];
    let mut column = 0;
    while column < KEY_BLOCK {
        numbers[column] = column as f32;
        column += 1;
    }
    numbers
};

/// Rows of a piece of a tile on the diagonal.
pub const PIECE: usize = 16;

/// Rows of a tile, and how many of its first keys any of them may see.
pub struct RowPiece {
    pub first: usize,
    pub rows: usize,
    pub keys: usize,
}

/// Whether some query of the tile is before some of its keys.
pub fn is_on_diagonal(first_query: usize, key: usize, keys: usize) -> bool {
    key + keys > first_query + 1
}

/// How many keys of a tile the piece of a row may see; scores of later keys are never computed.
pub fn keys_of_piece(first_query: usize, row: usize, key: usize, keys: usize) -> usize {
    let end = first_query + (row / PIECE + 1) * PIECE;
    end.saturating_sub(key).min(keys)
}

/// Cuts a tile on the diagonal into pieces that skip most of its masked half. On the bf16 unit a tile is one piece that
/// includes the masked half.
pub fn row_pieces(
    unit: Option<Bf16Unit>,
    first_query: usize,
    rows: usize,
    key: usize,
    keys: usize,
) -> impl Iterator<Item = RowPiece> {
    let step = if is_on_diagonal(first_query, key, keys) && unit.is_none() { PIECE } else { rows };
    (0..rows).step_by(step).map(move |first| RowPiece {
        first,
        rows: step.min(rows - first),
        keys: if unit.is_some() { keys } else { keys_of_piece(first_query, first, key, keys) },
    })
}

/// Zeros a row of a tile from the first column that was not computed to the last key: bf16 matmuls read the whole
/// row.
///
/// # Safety
/// The row is writable for `keys` floats.
#[inline(always)]
pub unsafe fn clear_hidden(unit: Option<Bf16Unit>, row: *mut f32, from: usize, keys: usize) {
    if unit.is_some() && from < keys {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(row.add(from), keys - from).fill(0.0) };
    }
}

/// The columns of a row of a tile that its query sees, as floats.
#[inline(always)]
pub fn visible_columns(
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

/// tanh(score / cap), from which a softcap and its slope follow.
///
/// # Safety
/// The machine supports the instruction set of `V`.
#[inline(always)]
pub unsafe fn capped_tanh<V: Lanes>(score: V, cap: f32) -> V {
    // SAFETY: arithmetic on lanes; the caller promises the instruction set.
    unsafe { tanh(score.mul(V::splat(1.0 / cap))) }
}
