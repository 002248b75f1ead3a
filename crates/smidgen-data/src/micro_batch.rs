//! A step's samples as micro-batches: best-fit packing, the packed arrays, and the largest of a whole run.
//!
//! Packing is best-fit decreasing, a pure function of the lengths. How a step is cut changes memory and time, never the
//! math: samples stay whole and keep their own positions.
//! The shift by one happens here: row t carries a loss if the next token of the same sample is supervised.
//! `largest_micro_batch` packs every step before the run starts, so that the run is planned for its largest
//! micro-batch.
//! All buffers belong to the caller and are reused: after the largest micro-batch none grows.

use std::sync::Arc;

use smidgen_ir::audio_rows::marks_of_clip;
use smidgen_ir::{Extent, MARK_COLUMNS, Objective};
use thiserror::Error;

use crate::batch::BatchPlan;
use crate::clips::{ClipStore, SampleClips};
use crate::share::Shares;
pub use crate::tokens::token_and_row_count;
use crate::tokens::{ReadSampleError, TokenSet, largest_extent};

#[derive(Debug, Error, PartialEq, Eq)]
pub enum PackError {
    #[error("a sample has {tokens} tokens, a micro-batch takes {micro_tokens}")]
    SampleTooLong { tokens: usize, micro_tokens: usize },
}

/// How a step's samples are spread over micro-batches.
#[derive(Debug, Default)]
pub struct Packing {
    /// Positions within the step, micro-batch after micro-batch.
    pub(crate) positions: Vec<u32>,
    /// Micro-batch m is `positions[starts[m]..starts[m + 1]]`.
    pub(crate) starts: Vec<u32>,
    lengths: Vec<u32>,
    longest_first: Vec<u32>,
    /// Free tokens of each bin and its number in the order of opening, ascending.
    free: Vec<(usize, u32)>,
    bin_of: Vec<u32>,
    /// Each bin's number after bins are sorted by their first sample.
    renumbered: Vec<u32>,
}

impl Packing {
    /// Packs samples of these lengths into micro-batches of at most `micro_tokens`.
    ///
    /// The longest goes first (ties: the earlier), into the fullest micro-batch that still takes it
    /// (ties: the one opened first).
    pub fn pack(
        &mut self,
        lengths: impl IntoIterator<Item = u32>,
        micro_tokens: usize,
    ) -> Result<(), PackError> {
        self.lengths.clear();
        self.lengths.extend(lengths);
        self.positions.clear();
        self.starts.clear();
        let samples = self.lengths.len();
        if let Some(&longest) = self.lengths.iter().max()
            && longest as usize > micro_tokens
        {
            return Err(PackError::SampleTooLong { tokens: longest as usize, micro_tokens });
        }
        let total: u64 = self.lengths.iter().map(|&length| u64::from(length)).sum();
        if total <= micro_tokens as u64 {
            // Best fit would open one bin only.
            self.positions.extend(0..samples as u32);
            self.starts.push(0);
            if samples > 0 {
                self.starts.push(samples as u32);
            }
            return Ok(());
        }
        let bins = self.fill_bins(micro_tokens);
        self.order_by_first_sample(bins);
        Ok(())
    }

    /// Positions within the step of each micro-batch, ascending; micro-batches in order of their first sample.
    pub fn micro_batches(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        self.starts.windows(2).map(|range| &self.positions[range[0] as usize..range[1] as usize])
    }

    /// Writes each position's bin to `bin_of`, and returns the number of bins.
    fn fill_bins(&mut self, micro_tokens: usize) -> usize {
        let lengths = &self.lengths;
        self.longest_first.clear();
        self.longest_first.extend(0..lengths.len() as u32);
        self.longest_first
            .sort_unstable_by_key(|&position| (u32::MAX - lengths[position as usize], position));
        self.bin_of.clear();
        self.bin_of.resize(lengths.len(), 0);
        self.free.clear();
        for &position in &self.longest_first {
            let length = lengths[position as usize] as usize;
            let mut slot = self.free.partition_point(|&(free, _)| free < length);
            if slot == self.free.len() {
                self.free.push((micro_tokens, self.free.len() as u32));
                slot = self.free.len() - 1;
            }
            let (free, bin) = self.free[slot];
            self.bin_of[position as usize] = bin;
            let emptied = (free - length, bin);
            let target = self.free[..slot].partition_point(|&entry| entry < emptied);
            self.free[target..=slot].rotate_right(1);
            self.free[target] = emptied;
        }
        self.free.len()
    }

    fn order_by_first_sample(&mut self, bins: usize) {
        const UNSEEN: u32 = u32::MAX;
        self.renumbered.clear();
        self.renumbered.resize(bins, UNSEEN);
        // `starts[m + 1]` counts micro-batch m first, then becomes its end.
        self.starts.resize(bins + 1, 0);
        let mut seen = 0;
        for bin in &mut self.bin_of {
            let renumbered = &mut self.renumbered[*bin as usize];
            if *renumbered == UNSEEN {
                *renumbered = seen;
                seen += 1;
            }
            *bin = *renumbered;
            self.starts[*bin as usize + 1] += 1;
        }
        for micro_batch in 0..bins {
            self.starts[micro_batch + 1] += self.starts[micro_batch];
        }
        // From here on `renumbered` holds the position where the next sample of each micro-batch goes.
        self.renumbered.copy_from_slice(&self.starts[..bins]);
        self.positions.resize(self.bin_of.len(), 0);
        for (position, &bin) in self.bin_of.iter().enumerate() {
            let next = &mut self.renumbered[bin as usize];
            self.positions[*next as usize] = position as u32;
            *next += 1;
        }
    }
}

/// The packed arrays of one micro-batch: T tokens, S samples, R rows with a loss.
#[derive(Debug, Default)]
pub struct MicroBatch {
    pub ids: Vec<i32>, // (T)
    /// Positions within the sample: they restart at 0 with each sample.
    pub positions: Vec<i32>, // (T)
    /// Sample s is tokens `segments[s]..segments[s + 1]`.
    pub segments: Vec<i32>, // (S + 1)
    /// Tokens whose next token in the same sample is supervised, ascending.
    pub rows: Vec<i32>, // (R)
    /// The token that each row must predict.
    pub labels: Vec<i32>, // (R)
    /// The index in the token set of each token's sample: random numbers are keyed by it, so packing does not change
    /// them.
    pub sample_of_token: Vec<u32>, // (T)
    /// The position of the token that each audio row replaces; -1 for a row that only fills a chunk.
    pub audio_targets: Vec<i32>, // (A)
    pub audio_marks: Vec<i32>, // (A, 4)
    /// The clips of all samples, and the first audio row of each.
    pub clips: Vec<(u32, u32)>,
    /// The store that the rows of these clips are read from.
    pub clip_store: Option<Arc<ClipStore>>,
    /// For an objective: the numbers of each sample, and of each row the log-probabilities from before. The caller adds
    /// them; without them, samples count nothing.
    pub numbers: Vec<f64>, // (S, 5)
    pub before: Vec<f32>, // (R, 2)
}

impl MicroBatch {
    /// Maximum bytes per token of these arrays.
    pub const TOKEN_BYTES: u64 = 5 * 4;

    /// Reserves room for every micro-batch within `extent`.
    pub fn with_capacity(extent: Extent) -> Self {
        MicroBatch {
            ids: Vec::with_capacity(extent.tokens),
            positions: Vec::with_capacity(extent.tokens),
            segments: Vec::with_capacity(extent.segments + 1),
            rows: Vec::with_capacity(extent.rows),
            labels: Vec::with_capacity(extent.rows),
            sample_of_token: Vec::with_capacity(extent.tokens),
            audio_targets: Vec::with_capacity(extent.audio),
            audio_marks: Vec::with_capacity(MARK_COLUMNS * extent.audio),
            // A clip has at least one row.
            clips: Vec::with_capacity(extent.audio.min(extent.segments)),
            clip_store: None,
            numbers: Vec::with_capacity(Objective::SEQUENCE_COLUMNS * extent.segments),
            before: Vec::new(),
        }
    }

    pub fn extent(&self) -> Extent {
        Extent {
            tokens: self.ids.len(),
            rows: self.rows.len(),
            segments: self.segments.len().saturating_sub(1),
            audio: self.audio_targets.len(),
        }
    }

    /// Replaces the contents with these samples of the set, in this order.
    pub fn fill(
        &mut self,
        set: &TokenSet,
        samples: impl IntoIterator<Item = u32>,
    ) -> Result<(), ReadSampleError> {
        self.ids.clear();
        self.positions.clear();
        self.segments.clear();
        self.rows.clear();
        self.labels.clear();
        self.sample_of_token.clear();
        self.audio_targets.clear();
        self.audio_marks.clear();
        self.clips.clear();
        self.numbers.clear();
        self.before.clear();
        self.clip_store = set.clips().map(|clips| clips.store().clone());
        self.segments.push(0);
        for index in samples {
            let first = self.ids.len();
            set.read(index as usize, &mut self.ids, |position, label| {
                // The first position is not predicted: no token of the same sample comes before it.
                if position > 0 {
                    self.rows.push((first + position - 1) as i32);
                    self.labels.push(label);
                }
            })?;
            let length = self.ids.len() - first;
            self.positions.extend(0..length as i32);
            self.sample_of_token.extend(std::iter::repeat_n(index, length));
            self.segments.push(self.ids.len() as i32);
            if let Some(clips) = set.clips() {
                self.place_clips(clips, index, first);
            }
        }
        Ok(())
    }

    /// Adds the audio rows of a sample whose tokens begin at `first`.
    fn place_clips(&mut self, clips: &SampleClips, sample: u32, first: usize) {
        let tokens = self.ids[first..].iter().enumerate().filter(|(_, id)| **id == clips.token);
        let mut targets = tokens.map(|(position, _)| (first + position) as i32);
        for &clip in clips.of_sample(sample as usize) {
            let first_row = self.audio_targets.len();
            let (frames, rows) = (clips.store().frames(clip), clips.store().rows(clip));
            self.clips.push((clip, first_row as u32));
            self.audio_marks.extend(marks_of_clip(first_row, frames).flatten());
            self.audio_targets.extend(targets.by_ref().take(rows));
            self.audio_targets.resize(self.audio_marks.len() / MARK_COLUMNS, -1);
        }
    }
}

/// The maxima of a whole run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Largest {
    /// Bounds every micro-batch of every step; its numbers may come from different micro-batches.
    pub micro_batch: Extent,
    /// Most tokens that a rank has in a step, over all micro-batches: a larger `micro_tokens` gains nothing.
    pub step_tokens: usize,
    /// Most supervised tokens that a rank has in a step.
    pub step_rows: usize,
    /// Most micro-batches that a rank has in a step.
    pub step_micro_batches: usize,
}

/// Calls `see` with the samples of each rank in each step of a run, packed as the run will pack them. Returns whether
/// these are all steps; the first epochs of a very long run stand for the others.
fn for_each_share(
    plan: &BatchPlan,
    set: &TokenSet,
    micro_tokens: usize,
    ranks: usize,
    mut see: impl FnMut(&[u32], &Packing),
) -> Result<bool, PackError> {
    let (mut packing, mut shares) = (Packing::default(), Shares::default());
    let length = |sample: u32| set.length(sample as usize);
    plan.for_each_distinct_batch(|samples| {
        shares.divide(samples, length, ranks);
        shares.all().try_for_each(|samples| {
            packing.pack_samples(set, samples, micro_tokens)?;
            see(samples, &packing);
            Ok(())
        })
    })
}

/// Packs every step of a run for each rank, and returns the maxima over all of them. For a run that is too long to visit
/// they are bounds, which no step of any epoch exceeds.
pub fn largest_micro_batch(
    plan: &BatchPlan,
    set: &TokenSet,
    micro_tokens: usize,
    ranks: usize,
) -> Result<Largest, PackError> {
    let mut largest = Largest::default();
    let are_all = for_each_share(plan, set, micro_tokens, ranks, |samples, packing| {
        let mut step = Extent::default();
        for positions in packing.micro_batches() {
            let extent = set.extent(positions.iter().map(|&position| samples[position as usize]));
            step.tokens += extent.tokens;
            step.rows += extent.rows;
            largest.micro_batch = largest_extent(largest.micro_batch, extent);
        }
        largest.step_tokens = largest.step_tokens.max(step.tokens);
        largest.step_rows = largest.step_rows.max(step.rows);
        largest.step_micro_batches = largest.step_micro_batches.max(packing.micro_batches().len());
    })?;
    Ok(if are_all { largest } else { bound(plan, set, micro_tokens, ranks) })
}

/// Bounds of every step that could be drawn from a set: by its longest samples, and by how many of its shortest fit.
fn bound(plan: &BatchPlan, set: &TokenSet, micro_tokens: usize, ranks: usize) -> Largest {
    let extents: Vec<Extent> = (0..set.len() as u32).map(|sample| set.extent([sample])).collect();
    let largest_first = |of: fn(&Extent) -> usize| {
        let mut sizes: Vec<usize> = extents.iter().map(of).collect();
        sizes.sort_unstable_by(|one, other| other.cmp(one));
        sizes
    };
    let (lengths, rows) = (largest_first(|extent| extent.tokens), largest_first(|extent| extent.rows));
    let longest = lengths.first().copied().unwrap_or(0);
    let all_tokens: usize = lengths.iter().take(plan.most_samples()).sum();
    // A step of a number of tokens has at least one sample.
    let all_tokens = plan.most_tokens().map_or(all_tokens, |tokens| all_tokens.min(tokens.max(longest)));
    let step_tokens = match ranks {
        1 => all_tokens,
        // Samples go to the rank that has the fewest tokens.
        ranks => all_tokens.min(all_tokens / ranks + longest),
    };
    let samples_in = |limit: usize| {
        let shortest_first = lengths.iter().rev().take(plan.most_samples());
        let sums = shortest_first.scan(0, |sum, length| {
            *sum += length;
            Some(*sum)
        });
        sums.take_while(|sum| *sum <= limit).count()
    };
    let first = |sizes: &[usize], count: usize| sizes.iter().take(count).sum::<usize>();
    let tokens = micro_tokens.min(step_tokens);
    let (segments, step_samples) = (samples_in(tokens), samples_in(step_tokens));
    Largest {
        micro_batch: Extent {
            tokens,
            rows: first(&rows, segments).min(tokens),
            segments,
            audio: first(&largest_first(|extent| extent.audio), segments),
        },
        step_tokens,
        step_rows: first(&rows, step_samples).min(step_tokens),
        // Two micro-batches together have more tokens than one could take.
        step_micro_batches: (2 * (step_tokens / micro_tokens.max(1)) + 1).min(step_samples.max(1)),
    }
}

/// Samples, and the sequences that they are packed into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packed {
    pub samples: u64,
    pub sequences: u64,
    pub tokens: u64,
}

/// Packs the first epoch, or the whole run if it is shorter, as all ranks together will.
pub fn packed_epoch(
    plan: &BatchPlan,
    set: &TokenSet,
    micro_tokens: usize,
    ranks: usize,
) -> Result<Packed, PackError> {
    let (mut packing, mut shares, mut packed) = (Packing::default(), Shares::default(), Packed::default());
    let length = |sample: u32| set.length(sample as usize);
    plan.for_each_first_batch(|samples| {
        shares.divide(samples, length, ranks);
        packed.samples += samples.len() as u64;
        packed.tokens += samples.iter().map(|&sample| u64::from(length(sample))).sum::<u64>();
        shares.all().try_for_each(|samples| {
            packing.pack_samples(set, samples, micro_tokens)?;
            packed.sequences += packing.micro_batches().len() as u64;
            Ok(())
        })
    })?;
    Ok(packed)
}

/// The samples of the micro-batch of a run that has the most tokens. Of several with equally many tokens, the one with
/// the most supervised tokens, then the first.
pub fn largest_samples(
    plan: &BatchPlan,
    set: &TokenSet,
    micro_tokens: usize,
    ranks: usize,
) -> Result<Vec<u32>, PackError> {
    let (mut largest, mut most) = (Vec::new(), (0, 0));
    let _are_all = for_each_share(plan, set, micro_tokens, ranks, |samples, packing| {
        for positions in packing.micro_batches() {
            let chosen = positions.iter().map(|&position| samples[position as usize]);
            let count = token_and_row_count(set, chosen.clone());
            if count > most {
                most = count;
                largest.clear();
                largest.extend(chosen);
            }
        }
    })?;
    Ok(largest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{BatchOptions, BatchSize, RunLength};
    use crate::token_builder::test_sets::{set_of_lengths, set_of_rows};
    use proptest::prelude::*;

    fn pack(lengths: &[u32], micro_tokens: usize) -> Vec<Vec<u32>> {
        let mut packing = Packing::default();
        packing.pack(lengths.iter().copied(), micro_tokens).unwrap();
        packing.micro_batches().map(<[u32]>::to_vec).collect()
    }

    #[test]
    fn a_token_takes_at_most_token_bytes() {
        let extent = Extent { tokens: 1000, rows: 1000, segments: 1, audio: 0 };
        let MicroBatch { ids, positions, segments, rows, labels, sample_of_token, .. } =
            MicroBatch::with_capacity(extent);
        let numbers = [&ids, &positions, &rows, &labels].map(Vec::capacity).iter().sum::<usize>();
        assert_eq!(4 * (numbers + sample_of_token.capacity()) as u64, MicroBatch::TOKEN_BYTES * 1000);
        assert_eq!(segments.capacity(), 2);
    }

    #[test]
    fn best_fit_decreasing_by_hand() {
        // 4 | 3, then 1 joins the 3 (the fullest that takes it); 2 opens a third. Sorted by first sample.
        assert_eq!(pack(&[4, 2, 3, 1], 4), [vec![0], vec![1], vec![2, 3]]);
        // 6 and 5 open two; 4 fills the 6, not the 5; 3 joins the 5 (free: 0 and 2), the other 3 opens a third;
        // 1 goes to the fullest that takes it, with the 5 and the 3.
        assert_eq!(pack(&[3, 5, 1, 6, 4, 3], 10), [vec![0, 1, 2], vec![3, 4], vec![5]]);
        // Two bins with 1 free each: the one opened first.
        assert_eq!(pack(&[5, 5, 1], 6), [vec![0, 2], vec![1]]);
        // All fit: one micro-batch in the given order.
        assert_eq!(pack(&[1, 3, 2], 6), [vec![0, 1, 2]]);
        // Equal lengths fill bins in order.
        assert_eq!(pack(&[2, 2, 2, 2, 2], 4), [vec![0, 1], vec![2, 3], vec![4]]);
        assert_eq!(pack(&[], 4), Vec::<Vec<u32>>::new());
    }

    #[test]
    fn a_sample_longer_than_a_micro_batch_is_refused() {
        let mut packing = Packing::default();
        let error = packing.pack([3, 9, 2], 8).unwrap_err();
        assert_eq!(error.to_string(), "a sample has 9 tokens, a micro-batch takes 8");
        assert_eq!(packing.micro_batches().len(), 0);
    }

    #[test]
    fn the_arrays_of_a_micro_batch_by_hand() {
        let set = set_of_rows(&[
            (vec![9, 9], vec![9, 9]),
            (vec![10, 11, 12, 13], vec![10, -100, 22, 13]),
            (vec![20, 21, 22], vec![-100, 21, -100]),
        ]);
        let mut batch = MicroBatch::default();
        batch.fill(&set, [0]).unwrap();
        batch.fill(&set, [2, 1]).unwrap();
        assert_eq!(batch.ids, [20, 21, 22, 10, 11, 12, 13]);
        assert_eq!(batch.positions, [0, 1, 2, 0, 1, 2, 3]);
        assert_eq!(batch.segments, [0, 3, 7]);
        // Token 0 predicts 21; tokens 4 and 5 predict 22 and 13; nothing is predicted across the seam at 3,
        // and the supervised first label of sample 1 does not count.
        assert_eq!(batch.rows, [0, 4, 5]);
        assert_eq!(batch.labels, [21, 22, 13]);
        assert_eq!(batch.sample_of_token, [2, 2, 2, 1, 1, 1, 1]);
        assert_eq!(batch.extent(), Extent { tokens: 7, rows: 3, segments: 2, audio: 0 });
    }

    /// A run of fifty million steps is planned at once, for no less than any of its steps needs.
    #[test]
    fn a_very_long_run_has_bounds() {
        let set = set_of_lengths(&[2, 3, 4, 7, 2, 2, 5, 6, 3]);
        let plan = |batch, steps| {
            let options = BatchOptions {
                batch,
                run_length: RunLength::Steps(steps),
                seed: 0,
                shuffle: true,
                repeats: 1,
            };
            BatchPlan::new(&set, options).unwrap()
        };
        for batch in [BatchSize::Samples(3), BatchSize::Tokens(11), BatchSize::Samples(99)] {
            let short = plan(batch, 400);
            for (micro_tokens, ranks) in [(7, 1), (9, 1), (usize::MAX, 1), (8, 2), (usize::MAX, 3)] {
                let bound = bound(&short, &set, micro_tokens, ranks);
                let seen = largest_micro_batch(&short, &set, micro_tokens, ranks).unwrap();
                let pairs = [
                    (seen.micro_batch.tokens, bound.micro_batch.tokens),
                    (seen.micro_batch.rows, bound.micro_batch.rows),
                    (seen.micro_batch.segments, bound.micro_batch.segments),
                    (seen.step_tokens, bound.step_tokens),
                    (seen.step_rows, bound.step_rows),
                    (seen.step_micro_batches, bound.step_micro_batches),
                ];
                let holds = pairs.iter().all(|(seen, bound)| seen <= bound);
                assert!(holds, "{batch:?} {micro_tokens} {ranks}: {seen:?} {bound:?}");
            }
        }
        let long = plan(BatchSize::Samples(3), 50_000_000);
        assert_eq!(largest_micro_batch(&long, &set, 9, 1).unwrap(), bound(&long, &set, 9, 1));
    }

    #[test]
    fn the_largest_by_hand() {
        let set = set_of_lengths(&[2, 3, 4, 7, 2, 2]);
        let options = BatchOptions {
            batch: BatchSize::Samples(3),
            run_length: RunLength::Steps(5),
            seed: 0,
            shuffle: false,
            repeats: 1,
        };
        let plan = BatchPlan::new(&set, options).unwrap();
        // Steps (2 3 4), (7 2 2): micro-batches (3 4), (2) and (7), (2 2).
        let expected = Largest {
            micro_batch: Extent { tokens: 7, rows: 6, segments: 2, audio: 0 },
            step_tokens: 11,
            step_rows: 8,
            step_micro_batches: 2,
        };
        assert_eq!(largest_micro_batch(&plan, &set, 7, 1).unwrap(), expected);
        assert_eq!(
            largest_micro_batch(&plan, &set, 6, 1).unwrap_err(),
            PackError::SampleTooLong { tokens: 7, micro_tokens: 6 }
        );
        let whole = largest_micro_batch(&plan, &set, usize::MAX, 1).unwrap();
        assert_eq!(whole.micro_batch, Extent { tokens: 11, rows: 8, segments: 3, audio: 0 });
        // Of two with 7 tokens the one that is a single sample has more that are supervised.
        assert_eq!(largest_samples(&plan, &set, 7, 1).unwrap(), [3]);
        assert_eq!(largest_samples(&plan, &set, usize::MAX, 1).unwrap(), [3, 4, 5]);
        assert_eq!(token_and_row_count(&set, [1, 3]), (10, 8));
    }

    /// The definition, without any of the bookkeeping: try every bin for every sample.
    fn best_fit_by_definition(lengths: &[u32], micro_tokens: usize) -> Vec<Vec<u32>> {
        let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
        order.sort_by_key(|&position| std::cmp::Reverse(lengths[position as usize]));
        let mut bins: Vec<(usize, Vec<u32>)> = Vec::new();
        for position in order {
            let length = lengths[position as usize] as usize;
            let fits = bins.iter_mut().filter(|(free, _)| *free >= length);
            match fits.min_by_key(|(free, _)| *free) {
                Some((free, positions)) => {
                    *free -= length;
                    positions.push(position);
                }
                None => bins.push((micro_tokens - length, vec![position])),
            }
        }
        let mut bins: Vec<Vec<u32>> = bins.into_iter().map(|(_, positions)| positions).collect();
        bins.iter_mut().for_each(|bin| bin.sort());
        bins.sort();
        bins
    }

    proptest! {
        #[test]
        fn packing_is_best_fit_decreasing(
            lengths in prop::collection::vec(1u32..40, 0..60),
            micro_tokens in 40usize..90,
        ) {
            prop_assert_eq!(
                pack(&lengths, micro_tokens),
                best_fit_by_definition(&lengths, micro_tokens)
            );
        }

        #[test]
        fn micro_batches_cover_an_epoch_once_and_stay_within_the_extent(
            lengths in prop::collection::vec(2usize..30, 1..50),
            masked in prop::collection::vec(0usize..30, 50),
            batch in 1u64..12,
            by_tokens: bool,
            shuffle: bool,
            micro_tokens in 30usize..80,
            seed: u64,
        ) {
            let rows: Vec<_> = lengths
                .iter()
                .zip(&masked)
                .map(|(&length, &masked)| {
                    let ids: Vec<i64> = (0..length as i64).collect();
                    let masked = masked.min(length - 1);
                    let labels = ids.iter().map(|&id| if id < masked as i64 { -100 } else { id });
                    let labels = labels.collect();
                    (ids, labels)
                })
                .collect();
            let set = set_of_rows(&rows);
            let options = BatchOptions {
                batch: if by_tokens {
                    BatchSize::Tokens(batch * 10)
                } else {
                    BatchSize::Samples(batch)
                },
                run_length: RunLength::Epochs(2.0),
                seed,
                shuffle,
                repeats: 1,
            };
            let plan = BatchPlan::new(&set, options).unwrap();
            let largest = largest_micro_batch(&plan, &set, micro_tokens, 1).unwrap();
            let mut micro_batch = MicroBatch::with_capacity(largest.micro_batch);
            let capacity = micro_batch.ids.capacity();
            let mut packing = Packing::default();
            let mut reached = Largest::default();
            let mut seen = vec![0; set.len()];
            for step in 0..plan.total_steps() {
                let samples = plan.step_samples(step).samples;
                let lengths = samples.iter().map(|&sample| set.length(sample as usize));
                packing.pack(lengths, micro_tokens).unwrap();
                let mut step_tokens = 0;
                let mut step_rows = 0;
                for positions in packing.micro_batches() {
                    prop_assert!(positions.is_sorted());
                    let chosen = positions.iter().map(|&position| samples[position as usize]);
                    chosen.clone().for_each(|sample| seen[sample as usize] += 1);
                    micro_batch.fill(&set, chosen).unwrap();
                    let extent = micro_batch.extent();
                    prop_assert!(extent.tokens <= micro_tokens);
                    prop_assert_eq!(micro_batch.segments[extent.segments] as usize, extent.tokens);
                    step_tokens += extent.tokens;
                    step_rows += extent.rows;
                    let most = &mut reached.micro_batch;
                    most.tokens = most.tokens.max(extent.tokens);
                    most.rows = most.rows.max(extent.rows);
                    most.segments = most.segments.max(extent.segments);
                }
                reached.step_tokens = reached.step_tokens.max(step_tokens);
                reached.step_rows = reached.step_rows.max(step_rows);
                reached.step_micro_batches =
                    reached.step_micro_batches.max(packing.micro_batches().len());
            }
            // A bound, and a tight one: the run reaches every number.
            prop_assert_eq!(reached, largest);
            prop_assert_eq!(micro_batch.ids.capacity(), capacity);
            prop_assert!(seen.iter().all(|&times| times == 2));
        }
    }
}
