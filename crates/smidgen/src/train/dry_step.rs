//! The dry step: before the first step, the largest micro-batch of the run is run once and its results are discarded.
//!
//! A step that would run out of memory later, or exceed the plan, fails before anything is trained.
//! Results do not change: gradients and accumulators are set back to zero and nothing is counted.
//! Skipped where the first micro-batch is already the largest.

use super::metrics::read_rss;
use super::trainer::Trainer;
use crate::failure::Failure;
use crate::plan::demand::{largest_samples, pack};
use crate::session::weights::clear;
use smidgen_data::batch::BatchPlan;
use smidgen_data::micro_batch::{Packing, token_and_row_count};
use smidgen_data::tokens::TokenSet;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{Entry, LeafKind};
use smidgen_runtime::Device;

impl<D: Device> Trainer<'_, D> {
    /// Returns whether it was run.
    pub(super) fn run_dry_step(
        &mut self,
        batches: &mut BatchPlan,
        train: &TokenSet,
        first: u64,
    ) -> Result<bool, Failure> {
        let ranks = self.job.request.rank.of;
        let largest = largest_samples(batches, train, &self.policy, ranks)?;
        let step = batches.step_samples(first).samples;
        let mut packing = Packing::default();
        pack(&mut packing, &self.policy, train, step)?;
        let begins = packing.micro_batches().next().unwrap_or_default();
        let begins = begins.iter().map(|position| step[*position as usize]);
        // All ranks run it or none.
        let is_first =
            token_and_row_count(train, begins) >= token_and_row_count(train, largest.iter().copied());
        if is_first && ranks == 1 {
            return Ok(false);
        }
        self.micro_batch.fill(train, largest).map_err(Failure::disk)?;
        // A loss that is not finite updates nothing, where updates are a part of the micro-step.
        self.feed.write_loss_weight(&mut self.executor, f64::NAN);
        self.feed.write_micro_batch(&mut self.executor, &self.micro_batch, first)?;
        let extent = self.micro_batch.extent();
        match self.executor.has_laps() {
            true => self.executor.run_laps(&[extent], |_, _| Ok::<(), Failure>(()))?,
            false => self.executor.run_summing(Entry::MicroStep, &extent, false)?,
        }
        // Waits for the device, so that its failure is reported here.
        self.feed.read_report(&mut self.executor)?;
        clear(&mut self.executor, LeafKind::Gradient)?;
        clear(&mut self.executor, LeafKind::State)?;
        self.refuse_above_plan()?;
        Ok(true)
    }

    fn refuse_above_plan(&mut self) -> Result<(), Failure> {
        let Some(limit) = self.limit_bytes else { return Ok(()) };
        let device = self.executor.device_mut().memory().map(|memory| memory.bytes);
        let Some(bytes) = device.or_else(|| read_rss().map(|memory| memory.rss_bytes)) else { return Ok(()) };
        if bytes <= limit {
            return Ok(());
        }
        Err(Failure::memory(format!(
            "the largest micro-batch takes {}, the plan allows {}: nothing was trained",
            format_bytes(bytes),
            format_bytes(limit)
        ))
        .hint("this is a bug in smidgen's plan, or another program on the GPU; a lower `memory.budget` plans with less"))
    }
}
