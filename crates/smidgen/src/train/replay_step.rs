//! Replays a step that was not finite, in depth-first or breadth-first order.
//!
//! `replay.rs` runs the operations one by one.

use super::replay::{Culprit, find_among, find_culprit};
use super::trainer::Trainer;
use crate::failure::Failure;
use crate::session::weights::clear;
use smidgen_ir::{Entry, Extent, LeafKind};
use smidgen_runtime::Device;
use smidgen_runtime::executor::Turn;

impl<D: Device> Trainer<'_, D> {
    /// Finds the first operation of a step that wrote a NaN or infinity. The step itself changed only its report,
    /// which the replay does not read, and where updates are early, finite tensors by finite gradients.
    pub(super) fn replay(&mut self, samples: &[u32], step: u64) -> Result<Option<Culprit>, Failure> {
        clear(&mut self.executor, LeafKind::Gradient)?;
        clear(&mut self.executor, LeafKind::State)?;
        // Another step may have been packed since.
        self.pack(samples)?;
        let chosen =
            |positions: &[u32]| positions.iter().map(|position| samples[*position as usize]).collect();
        let micro_batches: Vec<Vec<u32>> = self.packing.micro_batches().map(chosen).collect();
        let culprit = match self.executor.has_laps() {
            true => self.replay_laps(&micro_batches, step)?,
            false => self.replay_in_order(&micro_batches, step)?,
        };
        match culprit {
            Some(culprit) => Ok(Some(culprit)),
            // Every gradient is finite, so it is their norm.
            None => find_culprit(&mut self.executor, Entry::Update, None),
        }
    }

    fn replay_in_order(&mut self, micro_batches: &[Vec<u32>], step: u64) -> Result<Option<Culprit>, Failure> {
        let train = &self.rows().train;
        for samples in micro_batches {
            self.micro_batch.fill(train, samples.iter().copied()).map_err(Failure::disk)?;
            self.feed.write_micro_batch(&mut self.executor, &self.micro_batch, step)?;
            let culprit = find_culprit(&mut self.executor, Entry::MicroStep, Some(&self.micro_batch))?;
            if culprit.is_some() {
                return Ok(culprit);
            }
        }
        Ok(None)
    }

    fn replay_laps(&mut self, micro_batches: &[Vec<u32>], step: u64) -> Result<Option<Culprit>, Failure> {
        let train = &self.rows().train;
        let Trainer { executor, micro_batch, feed, .. } = self;
        let extents: Vec<Extent> =
            micro_batches.iter().map(|samples| train.extent(samples.iter().copied())).collect();
        let mut culprit = None;
        executor.visit_laps(&extents, |executor, turn| {
            match turn {
                _ if culprit.is_some() => {}
                Turn::Feed(number) => {
                    let samples = micro_batches[number].iter().copied();
                    micro_batch.fill(train, samples).map_err(Failure::disk)?;
                    feed.write_micro_batch(executor, micro_batch, step)?;
                }
                Turn::Run(steps, extent) => {
                    culprit = find_among(executor, Entry::MicroStep, steps, &extent, Some(micro_batch))?;
                }
            }
            Ok::<(), Failure>(())
        })?;
        Ok(culprit)
    }
}
