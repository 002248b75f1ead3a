//! The start of an optimizer step: which samples this rank computes, and their micro-batches.
//!
//! The samples of a step are divided over ranks by their tokens, and packed into micro-batches. The loss is divided
//! once, by the supervised tokens of the whole step over all ranks. The last micro-batch also sums the gradients over
//! ranks.

use super::trainer::{PendingStep, Trainer};
use crate::failure::Failure;
use crate::plan::demand::pack;
use smidgen_data::batch::BatchPlan;
use smidgen_ir::Entry;
use smidgen_runtime::Device;

impl<D: Device> Trainer<'_, D> {
    /// Queues the micro-batches of an optimizer step.
    pub(super) fn begin_step(
        &mut self,
        batches: &mut BatchPlan,
        step: u64,
        lr: f64,
    ) -> Result<PendingStep, Failure> {
        let train = &self.rows().train;
        let batch = batches.step_samples(step);
        let length = |sample: u32| train.length(sample as usize);
        let tokens = batch.samples.iter().map(|sample| u64::from(length(*sample))).sum();
        let supervised =
            batch.samples.iter().map(|sample| u64::from(train.supervised(*sample as usize))).sum();
        let shortest = batch.samples.iter().copied().min_by_key(|sample| length(*sample));
        let rank = self.job.request.rank;
        self.shares.divide(batch.samples, length, rank.of);
        let mut samples = std::mem::take(&mut self.spare_samples);
        samples.clear();
        samples.extend_from_slice(self.shares.of(rank.index));
        let begun = PendingStep {
            step,
            epoch: batch.epoch_after,
            lr,
            tokens,
            supervised,
            samples,
            rounds: self.count_rounds()?,
            filler: shortest.expect("a step has a sample"),
        };
        if self.executor.has_laps() {
            // Without clipping, a lap already runs the updates of the layers that it completes.
            let scale = self.scale();
            self.feed.write_hyper(&mut self.executor, lr, step + 1, scale);
        }
        self.run_micro_batches(&begun)?;
        Ok(begun)
    }

    /// How many micro-batches this rank runs: at least one, because every rank takes part in the sum of a step. Where
    /// weights are gathered for each micro-batch, all ranks run equally many.
    fn count_rounds(&mut self) -> Result<usize, Failure> {
        let (train, rank) = (&self.rows().train, self.job.request.rank);
        let gathers = self.policy.divides_gradients() && !rank.is_only();
        let ranks = if gathers { 0..rank.of } else { rank.index..rank.index + 1 };
        let mut count = 1;
        for index in ranks {
            pack(&mut self.packing, &self.policy, train, self.shares.of(index))?;
            count = count.max(self.packing.micro_batches().len());
        }
        Ok(count)
    }

    /// Runs the micro-batches of this rank's samples, and empty ones while other ranks have more.
    pub(super) fn run_micro_batches(&mut self, step: &PendingStep) -> Result<(), Failure> {
        let train = &self.rows().train;
        self.pack(&step.samples)?;
        let loss_weight = self.scale() / step.supervised as f64;
        self.feed.write_loss_weight(&mut self.executor, loss_weight);
        if self.executor.has_laps() {
            return self.run_laps(step);
        }
        let packing = std::mem::take(&mut self.packing);
        let mut own = packing.micro_batches();
        for round in 1..=step.rounds {
            match own.next() {
                Some(positions) => {
                    let chosen = positions.iter().map(|position| step.samples[*position as usize]);
                    self.micro_batch.fill(train, chosen).map_err(Failure::disk)?;
                }
                None => {
                    self.micro_batch.fill(train, [step.filler]).map_err(Failure::disk)?;
                    self.feed.write_loss_weight(&mut self.executor, 0.0);
                }
            }
            self.feed.write_micro_batch(&mut self.executor, &self.micro_batch, step.step)?;
            let extent = self.micro_batch.extent();
            self.executor.run_with_sums(Entry::MicroStep, &extent, round == step.rounds)?;
            if let Some(liveness) = &mut self.liveness {
                liveness.see_micro_batch(&self.micro_batch);
            }
        }
        drop(own);
        self.packing = packing;
        Ok(())
    }

    /// Runs the micro-batches of a step in breadth-first order: only the rank's own, or an empty one if it has no samples.
    fn run_laps(&mut self, step: &PendingStep) -> Result<(), Failure> {
        let train = &self.rows().train;
        let Trainer { executor, packing, micro_batch, feed, liveness, extents, .. } = self;
        let chosen =
            |positions: &[u32]| positions.iter().map(|position| step.samples[*position as usize]).collect();
        let mut micro_batches: Vec<Vec<u32>> = packing.micro_batches().map(chosen).collect();
        if micro_batches.is_empty() {
            micro_batches.push(vec![step.filler]);
            feed.write_loss_weight(executor, 0.0);
        }
        extents.clear();
        extents.extend(micro_batches.iter().map(|samples| train.extent(samples.iter().copied())));
        executor.run_laps(extents, |executor, number| {
            micro_batch.fill(train, micro_batches[number].iter().copied()).map_err(Failure::disk)?;
            feed.write_micro_batch(executor, micro_batch, step.step)?;
            if let Some(liveness) = liveness {
                liveness.see_micro_batch(micro_batch);
            }
            Ok(())
        })
    }

    pub(super) fn pack(&mut self, samples: &[u32]) -> Result<(), Failure> {
        let train = &self.rows().train;
        pack(&mut self.packing, &self.policy, train, samples)
    }
}
