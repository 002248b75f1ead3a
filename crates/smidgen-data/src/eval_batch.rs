//! Micro-batches of an evaluation: samples in order, as many as fit into a number of tokens.
//!
//! Batches of training are shuffled and packed (`batch.rs`, `micro_batch.rs`); these are not.

use crate::tokens::TokenSet;
pub use crate::tokens::largest_extent;
use smidgen_ir::Extent;
use std::ops::Range;

/// The samples of each micro-batch of the first `limit` samples (0: all).
fn eval_batches(set: &TokenSet, limit: usize, micro_tokens: usize) -> impl Iterator<Item = Range<u32>> {
    let samples = if limit == 0 { set.len() } else { limit.min(set.len()) } as u32;
    let mut next = 0;
    std::iter::from_fn(move || {
        let (first, mut tokens) = (next, 0);
        while next < samples && (next == first || tokens + set.length(next as usize) as usize <= micro_tokens)
        {
            tokens += set.length(next as usize) as usize;
            next += 1;
        }
        (first < next).then_some(first..next)
    })
}

/// Calls `visit` with the samples of each micro-batch of the first `limit` samples (0: all).
pub fn for_each_eval_batch<E>(
    set: &TokenSet,
    limit: usize,
    micro_tokens: usize,
    visit: impl FnMut(Range<u32>) -> Result<(), E>,
) -> Result<(), E> {
    eval_batches(set, limit, micro_tokens).try_for_each(visit)
}

/// The number of micro-batches of the first `limit` samples (0: all).
pub fn count_eval_batches(set: &TokenSet, limit: usize, micro_tokens: usize) -> f64 {
    eval_batches(set, limit, micro_tokens).count() as f64
}

/// The maxima over all micro-batches of the first `limit` samples (0: all).
pub fn eval_extent(set: &TokenSet, limit: usize, micro_tokens: usize) -> Extent {
    eval_batches(set, limit, micro_tokens)
        .map(|samples| set.extent(samples))
        .fold(Extent::default(), largest_extent)
}
