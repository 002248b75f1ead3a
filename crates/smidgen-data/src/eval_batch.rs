//! Micro-batches of an evaluation: samples in order, as many as fit a number of tokens.
//!
//! Left out: the batches of training, which are shuffled and packed (`batch.rs`, `micro_batch.rs`).

use crate::tokens::TokenSet;
pub use crate::tokens::largest_extent;
use smidgen_ir::Extent;

/// Calls `visit` with the samples of each evaluation micro-batch: in order, until the next would exceed
/// `micro_tokens`.
pub fn for_each_eval_batch<E>(
    set: &TokenSet,
    limit: usize,
    micro_tokens: usize,
    mut visit: impl FnMut(std::ops::Range<u32>) -> Result<(), E>,
) -> Result<(), E> {
    let samples = if limit == 0 { set.len() } else { limit.min(set.len()) } as u32;
    let mut first = 0;
    while first < samples {
        let (mut end, mut tokens) = (first, 0);
        while end < samples && (end == first || tokens + set.length(end as usize) as usize <= micro_tokens) {
            tokens += set.length(end as usize) as usize;
            end += 1;
        }
        visit(first..end)?;
        first = end;
    }
    Ok(())
}

/// Evaluation micro-batches of the first `limit` samples (0: all).
pub fn count_eval_batches(set: &TokenSet, limit: usize, micro_tokens: usize) -> f64 {
    let mut batches = 0.0;
    let Ok(()) = for_each_eval_batch(set, limit, micro_tokens, |_| {
        batches += 1.0;
        Ok::<(), std::convert::Infallible>(())
    });
    batches
}

/// The largest evaluation micro-batch of the first `limit` samples (0: all).
pub fn eval_extent(set: &TokenSet, limit: usize, micro_tokens: usize) -> Extent {
    let mut largest = Extent::default();
    let result: Result<(), std::convert::Infallible> =
        for_each_eval_batch(set, limit, micro_tokens, |samples| {
            largest = largest_extent(largest, set.extent(samples));
            Ok(())
        });
    match result {
        Ok(()) => largest,
    }
}
