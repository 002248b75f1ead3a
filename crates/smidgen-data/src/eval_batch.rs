//! Micro-batches of an evaluation: samples in order, as many as fit into a number of tokens.
//!
//! Batches of training are shuffled and packed (`batch.rs`, `micro_batch.rs`); these are not.

use crate::tokens::TokenSet;
pub use crate::tokens::largest_extent;
use smidgen_ir::Extent;
use std::ops::Range;

/// The samples of each micro-batch of the first `limit` samples (0: all).
fn eval_batches(set: &TokenSet, limit: usize, micro_tokens: usize) -> impl Iterator<Item = Range<u32>> {
    let sequences = set.rows().sequences();
    let samples = if limit == 0 { set.len() } else { (limit * sequences).min(set.len()) } as u32;
    let (mut next, together) = (0, set.rows().together() as u32);
    let tokens_from = move |first: u32| -> usize {
        (first..first + together).map(|sample| set.length(sample as usize) as usize).sum()
    };
    std::iter::from_fn(move || {
        let (first, mut tokens) = (next, 0);
        while next < samples && (next == first || tokens + tokens_from(next) <= micro_tokens) {
            tokens += tokens_from(next);
            next += together;
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
