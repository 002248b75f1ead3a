//! The micro-batches of an optimizer step: which samples this rank has, and how often it runs.
//!
//! The samples of a step are divided over ranks by their tokens, and packed. The loss is divided once, by the supervised
//! tokens of the whole step, over all ranks. The last micro-batch also sums the gradients over ranks.
//! Left out: the update, and everything that is said about a step.

use super::begun_step::{BegunStep, Rounds};
use super::trainer::Trainer;
use crate::failure::Failure;
use crate::plan::demand::pack;
use smidgen_data::batch::BatchPlan;
use smidgen_data::tokens::TokenSet;
use smidgen_ir::{Entry, Sharding};
use smidgen_runtime::Device;

impl<D: Device> Trainer<'_, D> {
    /// Queues the micro-batches of an optimizer step.
    pub(super) fn begin_step(
        &mut self,
        batches: &mut BatchPlan,
        train: &TokenSet,
        step: u64,
        lr: f64,
    ) -> Result<BegunStep, Failure> {
        let batch = batches.step_samples(step);
        let (samples, epoch) = (batch.samples, batch.epoch_after);
        let tokens: u64 = samples.iter().map(|sample| u64::from(train.length(*sample as usize))).sum();
        let supervised: u64 =
            samples.iter().map(|sample| u64::from(train.supervised(*sample as usize))).sum();
        let rank = self.job.request.rank;
        self.shares.divide(samples, |sample| train.length(sample as usize), rank.of);
        let rounds = self.count_rounds(train, samples)?;
        let mut own = std::mem::take(&mut self.spare_samples);
        own.clear();
        own.extend_from_slice(self.shares.of(rank.index));
        if self.executor.has_laps() {
            // Without clipping a lap updates what it completes.
            let scale = self.scale();
            self.feed.write_hyper(&mut self.executor, lr, step + 1, scale);
        }
        self.run_micro_batches(train, &own, step, supervised, rounds)?;
        Ok(BegunStep { step, epoch, lr, tokens, supervised, samples: own, rounds })
    }

    /// How many micro-batches this rank runs. Every rank takes part in the sum of a step; and where weights are gathered
    /// for each micro-batch, all ranks run equally many.
    fn count_rounds(&mut self, train: &TokenSet, samples: &[u32]) -> Result<Rounds, Failure> {
        let rank = self.job.request.rank;
        let shortest = samples.iter().copied().min_by_key(|sample| train.length(*sample as usize));
        let filler = shortest.expect("a step has a sample");
        let gathers = self.policy.divides(Sharding::Gradients) && !rank.is_only();
        let ranks = if gathers { 0..rank.of } else { rank.index..rank.index + 1 };
        let mut count = 1;
        for index in ranks {
            pack(&mut self.packing, &self.policy, train, self.shares.of(index))?;
            count = count.max(self.packing.micro_batches().len());
        }
        Ok(Rounds { count, filler })
    }

    /// Runs the micro-batches of this rank's samples, and empty ones while other ranks have more.
    pub(super) fn run_micro_batches(
        &mut self,
        train: &TokenSet,
        samples: &[u32],
        step: u64,
        supervised: u64,
        rounds: Rounds,
    ) -> Result<(), Failure> {
        self.pack(train, samples)?;
        let loss_weight = self.scale() / supervised as f64;
        self.feed.write_loss_weight(&mut self.executor, loss_weight);
        if self.executor.has_laps() {
            return self.run_laps(train, samples, step);
        }
        let packing = std::mem::take(&mut self.packing);
        let mut own = packing.micro_batches();
        for round in 1..=rounds.count {
            match own.next() {
                Some(positions) => {
                    let chosen = positions.iter().map(|position| samples[*position as usize]);
                    self.micro_batch.fill(train, chosen).map_err(Failure::disk)?;
                }
                None => {
                    self.micro_batch.fill(train, [rounds.filler]).map_err(Failure::disk)?;
                    self.feed.write_loss_weight(&mut self.executor, 0.0);
                }
            }
            self.feed.write_micro_batch(&mut self.executor, &self.micro_batch, step)?;
            let extent = self.micro_batch.extent();
            self.executor.run_summing(Entry::MicroStep, &extent, round == rounds.count)?;
            if let Some(liveness) = &mut self.liveness {
                let positions = &self.micro_batch.positions;
                liveness.see_positions(self.micro_batch.rows.iter().map(|row| positions[*row as usize]));
            }
        }
        drop(own);
        self.packing = packing;
        Ok(())
    }

    /// Runs the micro-batches of a step in breadth-first order. A step of one rank has no empty ones.
    fn run_laps(&mut self, train: &TokenSet, samples: &[u32], step: u64) -> Result<(), Failure> {
        let Trainer { executor, packing, micro_batch, feed, liveness, extents, .. } = self;
        let chosen =
            |positions: &[u32]| positions.iter().map(|position| samples[*position as usize]).collect();
        let micro_batches: Vec<Vec<u32>> = packing.micro_batches().map(chosen).collect();
        extents.clear();
        extents.extend(micro_batches.iter().map(|samples| train.extent(samples.iter().copied())));
        let mut seen = 0;
        executor.run_laps(extents, |executor, number| {
            micro_batch.fill(train, micro_batches[number].iter().copied()).map_err(Failure::disk)?;
            feed.write_micro_batch(executor, micro_batch, step)?;
            // Each micro-batch comes once for every lap.
            if let Some(liveness) = liveness.as_mut().filter(|_| seen == number) {
                let positions = &micro_batch.positions;
                liveness.see_positions(micro_batch.rows.iter().map(|row| positions[*row as usize]));
                seen += 1;
            }
            Ok(())
        })
    }

    pub(super) fn pack(&mut self, train: &TokenSet, samples: &[u32]) -> Result<(), Failure> {
        pack(&mut self.packing, &self.policy, train, samples)
    }
}
