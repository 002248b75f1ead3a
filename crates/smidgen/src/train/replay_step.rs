//! A step that was not finite, run again one operation at a time: which of them wrote the first NaN or infinity.
//!
//! In depth-first and breadth-first order; `replay.rs` looks at the operations.

use super::replay::{Culprit, find_among, find_culprit};
use super::trainer::Trainer;
use crate::failure::Failure;
use crate::session::weights::clear;
use smidgen_data::tokens::TokenSet;
use smidgen_ir::{Entry, Extent, LeafKind};
use smidgen_runtime::Device;
use smidgen_runtime::executor::Turn;

impl<D: Device> Trainer<'_, D> {
    /// Finds the first operation of a step that wrote a NaN or infinity. The step changed only its report, which the replay
    /// does not read, or, where updates are early, finite tensors by finite gradients.
    pub(super) fn replay(
        &mut self,
        train: &TokenSet,
        samples: &[u32],
        step: u64,
    ) -> Result<Option<Culprit>, Failure> {
        clear(&mut self.executor, LeafKind::Gradient)?;
        clear(&mut self.executor, LeafKind::State)?;
        // Another step may have been packed since.
        self.pack(train, samples)?;
        let packing = std::mem::take(&mut self.packing);
        if self.executor.has_laps() {
            let micro_batches: Vec<&[u32]> = packing.micro_batches().collect();
            let culprit = self.replay_laps(train, samples, &micro_batches, step)?;
            return match culprit {
                Some(culprit) => Ok(Some(culprit)),
                None => find_culprit(&mut self.executor, Entry::Update, None),
            };
        }
        for positions in packing.micro_batches() {
            let chosen = positions.iter().map(|position| samples[*position as usize]);
            self.micro_batch.fill(train, chosen).map_err(Failure::disk)?;
            self.feed.write_micro_batch(&mut self.executor, &self.micro_batch, step)?;
            let culprit = find_culprit(&mut self.executor, Entry::MicroStep, Some(&self.micro_batch))?;
            if culprit.is_some() {
                return Ok(culprit);
            }
        }
        // Every gradient is finite: then it is their norm.
        find_culprit(&mut self.executor, Entry::Update, None)
    }

    /// The same for the micro-batches of a step in breadth-first order.
    fn replay_laps(
        &mut self,
        train: &TokenSet,
        samples: &[u32],
        micro_batches: &[&[u32]],
        step: u64,
    ) -> Result<Option<Culprit>, Failure> {
        let Trainer { executor, micro_batch, feed, .. } = self;
        let chosen = |number: usize| micro_batches[number].iter().map(|position| samples[*position as usize]);
        let extents: Vec<Extent> =
            (0..micro_batches.len()).map(|number| train.extent(chosen(number))).collect();
        let mut culprit = None;
        executor.visit_laps(&extents, |executor, turn| {
            match turn {
                _ if culprit.is_some() => {}
                Turn::Feed(number) => {
                    micro_batch.fill(train, chosen(number)).map_err(Failure::disk)?;
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
