//! The dry step: the largest micro-batch of the run is computed once before the first step, and its results
//! discarded.
//!
//! A run that would later run out of memory, or exceed its plan, fails before anything is trained.
//! Results do not change: gradients and accumulators are cleared afterwards.
//! It is skipped if the first micro-batch of the first step is the largest anyway.

use super::metrics::read_rss;
use super::trainer::Trainer;
use crate::failure::Failure;
use crate::plan::demand::largest_samples;
use crate::session::weights::clear;
use smidgen_data::batch::BatchPlan;
use smidgen_data::micro_batch::token_and_row_count;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{Entry, LeafKind};
use smidgen_runtime::Device;

impl<D: Device> Trainer<'_, D> {
    pub(super) fn run_dry_step(&mut self, batches: &mut BatchPlan, first: u64) -> Result<(), Failure> {
        let (train, ranks) = (&self.rows().train, self.job.request.rank.of);
        let largest = largest_samples(batches, train, &self.policy, ranks)?;
        // Several ranks always run it: all of them or none have to.
        if ranks == 1 {
            let samples = batches.step_samples(first).samples;
            self.pack(samples)?;
            let begins = self.packing.micro_batches().next().unwrap_or_default();
            let begins = begins.iter().map(|position| samples[*position as usize]);
            if token_and_row_count(train, begins) >= token_and_row_count(train, largest.iter().copied()) {
                return Ok(());
            }
        }
        self.micro_batch.fill(train, largest).map_err(Failure::disk)?;
        // Where the micro-step contains updates, a loss that is not finite keeps them from changing anything.
        self.feed.write_loss_weight(&mut self.executor, f64::NAN);
        self.feed.write_micro_batch(&mut self.executor, &self.micro_batch, first)?;
        let extent = self.micro_batch.extent();
        match self.executor.has_laps() {
            true => self.executor.run_laps(&[extent], |_, _| Ok::<(), Failure>(()))?,
            false => self.executor.run_with_sums(Entry::MicroStep, &extent, false)?,
        }
        // Waits for the device, so that its failure is reported here.
        self.feed.read_report(&mut self.executor)?;
        clear(&mut self.executor, LeafKind::Gradient)?;
        clear(&mut self.executor, LeafKind::State)?;
        self.refuse_above_plan()
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
