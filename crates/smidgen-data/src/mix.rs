//! Several sources mixed by weight into one order of samples: a pure function of (seed, epoch).
//!
//! An epoch has as many samples as all sources together, and each source provides its share of them by weight.
//! A source provides its samples pass after pass: every sample once before any comes again, in a new order per pass,
//! and an epoch continues where the one before it stopped. So a source with a large weight is repeated within an epoch,
//! and one with a small weight takes several epochs for one pass.
//! How an epoch is cut into batches is in `batch.rs`.

use std::ops::Range;

use crate::permutation::{permute, seed_of_stream, shuffle};

#[derive(Clone, Debug)]
pub struct Mix {
    sources: Vec<MixedSource>,
}

#[derive(Clone, Copy, Debug)]
struct MixedSource {
    first: u32,
    samples: u32,
    per_epoch: u32,
}

impl Mix {
    /// No source is empty, and every weight is above 0.
    pub fn new(sources: impl Iterator<Item = Range<usize>>, weights: &[f64]) -> Mix {
        let ranges: Vec<Range<usize>> = sources.collect();
        assert_eq!(ranges.len(), weights.len(), "every source has a weight");
        let samples: usize = ranges.iter().map(Range::len).sum();
        let shares = share_out(samples as u32, weights);
        let sources = ranges.into_iter().zip(shares).map(|(range, per_epoch)| MixedSource {
            first: range.start as u32,
            samples: range.len() as u32,
            per_epoch,
        });
        Mix { sources: sources.collect() }
    }

    pub fn samples_per_epoch(&self) -> Vec<u32> {
        self.sources.iter().map(|source| source.per_epoch).collect()
    }

    /// Fills `order` with the samples of an epoch; `pass` is scratch.
    pub(super) fn fill(
        &self,
        order: &mut Vec<u32>,
        pass: &mut Vec<u32>,
        seed: u64,
        epoch: u64,
        shuffled: bool,
    ) {
        order.clear();
        for (stream, source) in (1..).zip(&self.sources) {
            let mut position = epoch * u64::from(source.per_epoch);
            let end = position + u64::from(source.per_epoch);
            while position < end {
                let samples = u64::from(source.samples);
                let (number, offset) = (position / samples, position % samples);
                permute(pass, source.samples, seed_of_stream(seed, stream), number, shuffled);
                let count = (samples - offset).min(end - position);
                let taken = &pass[offset as usize..(offset + count) as usize];
                order.extend(taken.iter().map(|sample| source.first + sample));
                position += count;
            }
        }
        if shuffled { shuffle(order, seed, epoch) } else { self.interleave(order, pass) }
    }

    /// Spreads the samples of every source evenly over the epoch.
    fn interleave(&self, order: &mut Vec<u32>, scratch: &mut Vec<u32>) {
        scratch.clear();
        scratch.extend_from_slice(order);
        order.clear();
        let total = scratch.len() as u64;
        let mut given = vec![0_u64; self.sources.len()];
        for position in 1..=total {
            // The source that is furthest behind its share; the first of several.
            let behind = |index: usize| {
                let due = position as i128 * i128::from(self.sources[index].per_epoch);
                due - i128::from(given[index]) * i128::from(total)
            };
            let next = (0..given.len()).rev().max_by_key(|&index| behind(index)).unwrap_or(0);
            let before: u64 = self.sources[..next].iter().map(|source| u64::from(source.per_epoch)).sum();
            order.push(scratch[(before + given[next]) as usize]);
            given[next] += 1;
        }
    }
}

/// Whole numbers in proportion to the weights that add up to `total`, each at least 1. The largest remainders are
/// rounded up.
fn share_out(total: u32, weights: &[f64]) -> Vec<u32> {
    let sum: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|weight| f64::from(total) * weight / sum).collect();
    let mut shares: Vec<u32> = exact.iter().map(|share| (*share as u32).max(1)).collect();
    let behind = |shares: &[u32], index: usize| exact[index] - f64::from(shares[index]);
    let given = |shares: &[u32]| shares.iter().map(|&share| u64::from(share)).sum::<u64>();
    while given(&shares) < u64::from(total) {
        let next = (0..shares.len()).rev().max_by(|&a, &b| behind(&shares, a).total_cmp(&behind(&shares, b)));
        shares[next.unwrap_or(0)] += 1;
    }
    while given(&shares) > u64::from(total) {
        let large = (0..shares.len()).filter(|&index| shares[index] > 1);
        let next = large.min_by(|&a, &b| behind(&shares, a).total_cmp(&behind(&shares, b)));
        shares[next.unwrap_or(0)] -= 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mix(samples: &[usize], weights: &[f64]) -> Mix {
        let mut first = 0;
        let ranges: Vec<Range<usize>> = samples
            .iter()
            .map(|count| {
                first += count;
                first - count..first
            })
            .collect();
        Mix::new(ranges.into_iter(), weights)
    }

    fn epoch(mix: &Mix, seed: u64, epoch: u64, shuffled: bool) -> Vec<u32> {
        let (mut order, mut pass) = (vec![7; 3], vec![9; 5]);
        mix.fill(&mut order, &mut pass, seed, epoch, shuffled);
        order
    }

    #[test]
    fn shares_follow_the_weights_and_add_up() {
        assert_eq!(share_out(10, &[1.0, 1.0]), [5, 5]);
        assert_eq!(share_out(10, &[0.7, 0.3]), [7, 3]);
        assert_eq!(share_out(10, &[1.0, 1.0, 1.0]), [4, 3, 3]);
        assert_eq!(share_out(10, &[1.0, 1e-9]), [9, 1]);
        assert_eq!(share_out(3, &[1e9, 1.0, 1.0]), [1, 1, 1]);
        assert_eq!(share_out(1000, &[2.0, 5.0, 1.0]), [250, 625, 125]);
    }

    /// The source of 4 gives 9 of 12 per epoch, that of 8 gives 3.
    #[test]
    fn a_source_is_used_up_before_it_is_repeated() {
        for shuffled in [true, false] {
            let mix = mix(&[4, 8], &[3.0, 1.0]);
            assert_eq!(mix.samples_per_epoch(), [9, 3]);
            let (mut of_first, mut of_second) = ([0; 4], [0; 8]);
            for number in 0..8 {
                let order = epoch(&mix, 42, number, shuffled);
                assert_eq!(order.len(), 12);
                assert_eq!(order.iter().filter(|&&sample| sample < 4).count(), 9);
                for sample in order {
                    match sample {
                        0..4 => of_first[sample as usize] += 1,
                        _ => of_second[sample as usize - 4] += 1,
                    }
                }
                let spread = |counts: &[i32]| counts.iter().max().unwrap() - counts.iter().min().unwrap();
                assert!(spread(&of_first) <= 1 && spread(&of_second) <= 1, "{of_first:?} {of_second:?}");
            }
            assert_eq!((of_first, of_second), ([18; 4], [3; 8]));
        }
    }

    #[test]
    fn an_epoch_follows_from_seed_and_number_alone() {
        let mix = mix(&[5, 7], &[1.0, 2.0]);
        let walked: Vec<_> = (0..4).map(|number| epoch(&mix, 3, number, true)).collect();
        assert_eq!(epoch(&mix, 3, 2, true), walked[2]);
        assert_ne!(walked[0], walked[1]);
        assert_ne!(epoch(&mix, 4, 0, true), walked[0]);
    }

    #[test]
    fn without_shuffling_sources_alternate_in_their_own_order() {
        let mix = mix(&[4, 4], &[3.0, 1.0]);
        assert_eq!(epoch(&mix, 1, 0, false), [0, 1, 4, 2, 3, 0, 5, 1]);
        assert_eq!(epoch(&mix, 1, 1, false), [2, 3, 6, 0, 1, 2, 7, 3]);
    }
}
