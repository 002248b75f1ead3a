//! Attention of new tokens over cached keys and values, and writes to the cache.
//!
//! A sequence has a slot; a table holds the cache row of each of its positions, so the rows of a sequence may be
//! anywhere and sequences may share rows. Tokens of one slot at consecutive positions are processed together, cut at
//! the ends of position blocks; keys are read in the blocks of `attention.rs`, by the same code. The result of a
//! query therefore depends only on its own sequence: not on the number of threads, nor on other sequences in the
//! batch, nor on whether its keys were added one by one. It equals whole-sequence attention bit for bit.
//! Left out: several tasks for one query and key head, which would help long sequences on many threads.

use super::attention::{AttentionBuffers, AttentionOptions, Queries, attend};
use super::attention_tiles::QUERY_BLOCK;
use super::isa::Isa;
use super::pool::run_tasks;
use super::view::{DstRows, SrcRows};

/// Which cache rows the tokens of a batch use.
#[derive(Clone, Copy, Debug)]
pub struct CachePlaces<'a> {
    /// The cache row of each position of each slot.
    pub table: &'a [i32], // (L, P)
    pub positions_of_slot: usize,
    pub slots: &'a [i32],     // (T)
    pub positions: &'a [i32], // (T)
    pub cache_rows: usize,
}

impl<'a> CachePlaces<'a> {
    /// The cache rows of a token's sequence, up to its own position.
    fn rows_up_to(&self, token: usize) -> &'a [i32] {
        let (slot, position) = (self.slots[token], self.positions[token]);
        let fits = 0 <= position && (position as usize) < self.positions_of_slot;
        assert!(fits, "position {position} is outside a slot of {} positions", self.positions_of_slot);
        let first = slot as usize * self.positions_of_slot;
        &self.table[first..=first + position as usize]
    }

    /// Whether the token is processed together with the one before it.
    fn continues(&self, token: usize) -> bool {
        token > 0
            && self.slots[token] == self.slots[token - 1]
            && self.positions[token] == self.positions[token - 1] + 1
            && !(self.positions[token] as usize).is_multiple_of(QUERY_BLOCK)
    }

    /// How many tokens from `token` on are processed together.
    fn run_length(&self, token: usize) -> usize {
        1 + (token + 1..self.slots.len()).take_while(|next| self.continues(*next)).count()
    }

    fn check(&self) {
        assert_eq!(self.slots.len(), self.positions.len());
        for token in 0..self.slots.len() {
            if token + 1 < self.slots.len() && self.continues(token + 1) {
                continue;
            }
            let inside = |row: &i32| 0 <= *row && (*row as usize) < self.cache_rows;
            assert!(
                self.rows_up_to(token).iter().all(inside),
                "a row of slot {} is outside a cache of {} rows",
                self.slots[token],
                self.cache_rows
            );
        }
    }
}

/// Writes each token's row to its place in the cache.
pub fn write_rows(
    places: &CachePlaces<'_>,
    new: SrcRows,   // (T, C)
    cache: DstRows, // (N, C)
) {
    assert_eq!((new.rows(), new.columns()), (places.slots.len(), cache.columns()));
    for token in 0..new.rows() {
        let row = places.rows_up_to(token).last().map_or(-1, |row| *row);
        assert!(
            0 <= row && (row as usize) < cache.rows(),
            "row {row} is outside a cache of {} rows",
            cache.rows()
        );
        cache.row(row as usize).copy_from(new.row(token));
    }
}

/// Computes o on the current thread pool. `options.segments` is not read; k and v of the buffers are the cache.
///
/// # Safety
/// The machine supports `isa`; the buffers are readable, o is writable, for the tokens and rows of `places` while the
/// call runs; o overlaps nothing else.
pub unsafe fn cached_attention(
    isa: Isa,
    options: &AttentionOptions<'_>,
    places: &CachePlaces<'_>,
    buffers: &AttentionBuffers,
    workspace: &mut [f32],
) {
    places.check();
    let scratch = options.check_and_align(workspace);
    let tokens = places.slots.len();
    run_tasks(tokens * options.kv_heads, |task| {
        let (token, kv_head) = (task / options.kv_heads, task % options.kv_heads);
        if places.continues(token) {
            return;
        }
        let count = places.run_length(token);
        let first = places.positions[token] as usize;
        let queries = Queries {
            kv_head,
            segment_start: 0,
            positions: first..first + count,
            first_row: token,
            key_rows: Some(places.rows_up_to(token + count - 1)),
        };
        // SAFETY: the task owns these rows of o for the heads of `kv_head`, and the workspace of its thread; `check`
        // has asserted that the rows of the keys are inside the cache.
        unsafe { attend(isa, options, buffers, &queries, &scratch) };
    });
}
