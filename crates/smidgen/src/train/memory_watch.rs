//! Watches memory while a run trains: what it uses after each step, in each phase, and what is free at checkpoints.
//!
//! A run that is measured above its plan stops. With `memory.adapt` it also stops at a checkpoint if free memory calls
//! for another plan, and continues with that one (`replanning.rs`).
//! Left out: measuring itself (`logs/monitor.rs`), and planning (`plan/planning.rs`).

use super::free_memory::FreeMemory;
use crate::failure::Failure;
use crate::logs::monitor::{self, Measurement};
use crate::logs::phases::{Phase, PhaseMeter};
use crate::machine::process_memory::read_rss;
use crate::plan::budget::{JobBudget, measurable_peak};
use crate::plan::facts::{MemoryFacts, budget_for};
use crate::plan::job::Job;
use crate::plan::planning::{Planned, WORTHWHILE, unlimited_step_ms};
use smidgen_ir::bytes::format_bytes;
use smidgen_runtime::Device;
use smidgen_runtime::device::DeviceMemory;

#[derive(Debug)]
pub struct MemoryWatch<'a> {
    /// Whether memory is measured after every step; only a benchmark of the monitor turns it off.
    pub is_monitored: bool,
    /// Records the measured memory of each phase.
    pub meter: Option<&'a mut PhaseMeter>,
    /// Measured device memory above this stops the run.
    pub limit_bytes: Option<u64>,
    /// Checked at checkpoints: does the free memory call for another plan?
    pub free: Option<FreeWatch<'a>>,
}

impl<'a> MemoryWatch<'a> {
    /// Watches nothing but what is in every row.
    pub fn rows_only() -> MemoryWatch<'a> {
        MemoryWatch { is_monitored: true, meter: None, limit_bytes: None, free: None }
    }

    /// Stops the run if measured memory exceeds the planned peak by more than the measuring error.
    pub fn limit_to(&mut self, planned_bytes: u64) {
        self.limit_bytes = Some(measurable_peak(planned_bytes));
    }

    pub fn enter(&mut self, phase: Phase, device: &mut impl Device) {
        if let Some(meter) = &mut self.meter {
            meter.enter(phase, &monitor::measure(device));
        }
    }

    pub fn measure_step(&mut self, device: &mut impl Device) -> Measurement {
        if !self.is_monitored {
            return Measurement::default();
        }
        let measured = monitor::measure(device);
        if let Some(meter) = &mut self.meter {
            meter.sample(&measured);
        }
        measured
    }

    /// The measured memory (not the excess alone), if it is above the limit.
    pub fn exceeded_bytes(&self, measured: &Measurement) -> Option<u64> {
        measured.device_bytes().filter(|bytes| self.limit_bytes.is_some_and(|limit| *bytes > limit))
    }

    /// Refuses to train if the largest micro-batch has already used more than the plan.
    pub fn refuse_above_plan(&self, device: &mut impl Device) -> Result<(), Failure> {
        let Some(limit) = self.limit_bytes else { return Ok(()) };
        let own = device.memory().map(|memory| memory.bytes);
        let Some(bytes) = own.or_else(|| read_rss().map(|memory| memory.rss_bytes)) else { return Ok(()) };
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

    /// The memory that the run could reserve now, if it calls for another plan.
    pub fn moved(&mut self, device: &mut impl Device) -> Option<u64> {
        self.free.as_mut()?.check(device.memory())
    }
}

/// A run looks for a faster plan if free memory has grown by at least a tenth of the budget and eight times the
/// measuring error.
const GROWTH_SHARE: u64 = 10;
const GROWTH_OVER_NOISE: u64 = 8;

/// The check of free memory that a run makes at its checkpoints.
#[derive(Debug)]
pub struct FreeWatch<'a> {
    pub free_memory: &'a mut dyn FreeMemory,
    pub job: &'a Job,
    /// Peak of the plan, memory outside the arena included.
    pub peak_bytes: u64,
    /// The budget that the plan was made for.
    pub budget: JobBudget,
    /// Whether more memory would make the run faster.
    pub may_grow: bool,
}

impl FreeWatch<'_> {
    fn check(&mut self, device: Option<DeviceMemory>) -> Option<u64> {
        let reachable = self.free_memory.reachable_bytes(device, self.peak_bytes)?;
        let (noise, before) = (self.free_memory.noise_bytes(), self.budget.bytes);
        let grown = budget_for(self.job, reachable).bytes.saturating_sub(before);
        let has_grown = grown >= GROWTH_OVER_NOISE * noise && grown >= before / GROWTH_SHARE;
        let is_short = lacks(self.peak_bytes, reachable, noise);
        (is_short || (has_grown && self.may_grow)).then_some(reachable)
    }
}

/// Whether a plan exceeds the available memory by more than the measuring error.
pub fn lacks(peak_bytes: u64, reachable_bytes: u64, noise_bytes: u64) -> bool {
    let tolerance = noise_bytes + if noise_bytes > 0 { peak_bytes / 100 } else { 0 };
    reachable_bytes + tolerance < peak_bytes
}

/// Whether unlimited memory would make the run faster by more than the error of predictions.
pub fn may_grow(job: &Job, facts: &MemoryFacts, planned: &Planned) -> Result<bool, Failure> {
    Ok(planned.solution.step_ms >= WORTHWHILE * unlimited_step_ms(job, facts)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_within_the_measuring_error_are_ignored() {
        let lacks = |reachable: u64, noise: u64| lacks(1000 << 20, reachable << 20, noise << 20);
        // The tolerance is 8 MiB and 1 %.
        assert!(!lacks(1000, 8) && !lacks(982, 8) && lacks(981, 8) && lacks(0, 8) && !lacks(2000, 8));
        assert!(!lacks(1000, 0) && lacks(999, 0));
    }
}
