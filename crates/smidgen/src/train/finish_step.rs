//! The end of an optimizer step: its update, its report, and its row of metrics.
//!
//! A step that overflowed in f16 is repeated with a smaller loss scale. A step that is not finite changed nothing: it
//! is replayed to find the cause, and the run fails.

use super::interrupt::Interrupt;
use super::loss_scale::LossScale;
use super::metrics::MetricsRow;
use super::monitor::{self, Measurement};
use super::replay::Culprit;
use super::trainer::{PendingStep, Trainer};
use crate::console::colour::WARNING;
use crate::console::progress::Progress;
use crate::failure::Failure;
use crate::ranks::team::{RankReport, TeamReport};
use crate::session::feed::StepReport;
use smidgen_data::tokens::TokenSet;
use smidgen_ir::Entry;
use smidgen_runtime::Device;
use std::time::Instant;

impl<D: Device> Trainer<'_, D> {
    /// Queues the update of a step and the copy of its report.
    pub(super) fn begin_update(&mut self, step: &PendingStep) -> Result<(), Failure> {
        let scale = self.scale();
        self.feed.write_hyper(&mut self.executor, step.lr, step.step + 1, scale);
        let extent = self.executor.plan().extent;
        self.executor.run(Entry::Update, &extent)?;
        self.executor.run(Entry::Refresh, &extent)?;
        self.feed.begin_report(&mut self.executor).map_err(Failure::from)
    }

    /// Waits for the report of a step and returns its row of metrics.
    pub(super) fn finish_step(
        &mut self,
        step: PendingStep,
        progress: &Progress,
        interrupt: &Interrupt,
    ) -> Result<MetricsRow, Failure> {
        let (report, overflows) = self.wait_for_report(&step)?;
        self.check_liveness(step.lr, progress)?;
        let own_seconds = self.last_row.elapsed().as_secs_f64();
        self.last_row = Instant::now();
        let measured = match self.is_monitored {
            true => monitor::measure(self.executor.device_mut()),
            false => Measurement::default(),
        };
        if let Some(meter) = &mut self.meter {
            meter.sample(&measured);
        }
        let is_above = |bytes: &u64| self.limit_bytes.is_some_and(|limit| *bytes > limit);
        self.exceeded_bytes = measured.device_bytes().filter(is_above);
        let together = match &mut self.team {
            None => TeamReport { slowest_s: own_seconds, ..TeamReport::default() },
            Some(team) => team.end_step(&RankReport {
                step: step.step + 1,
                seconds: own_seconds,
                is_stopping: interrupt.is_requested(),
                exceeded_bytes: self.exceeded_bytes,
                device_bytes: measured.device_bytes(),
            })?,
        };
        let seconds = together.slowest_s;
        self.is_stopping = together.is_stopping;
        self.exceeded_bytes = together.exceeded_bytes.or(self.exceeded_bytes);
        self.spare_samples = step.samples;
        Ok(MetricsRow {
            ranks: self.job.request.rank.of as u64,
            rank_bytes: together.rank_bytes,
            step: step.step + 1,
            epoch: step.epoch,
            loss: report.loss,
            reg_loss: report.reg_loss,
            grad_norm: report.grad_norm,
            lr: step.lr,
            tokens: step.tokens,
            supervised_tokens: step.supervised,
            step_ms: seconds * 1e3,
            tokens_per_s: step.tokens as f64 / seconds,
            overflows,
            device_bytes: measured.device_bytes(),
            device_free_bytes: measured.free_bytes,
            device_peak_bytes: measured.device_peak_bytes(),
            gpu_util: measured.gpu_util,
            arena_peak_bytes: self.arena_peak_bytes,
            pinned_bytes: measured.pinned_bytes(),
            host_rss_bytes: measured.rss_bytes,
            host_peak_bytes: measured.rss_peak_bytes,
            monitor_ms: measured.ms,
        })
    }

    /// The report of a step that is finite, and how often the step was repeated because it overflowed.
    fn wait_for_report(&mut self, step: &PendingStep) -> Result<(StepReport, u64), Failure> {
        let mut report = self.feed.finish_report(&mut self.executor)?;
        let mut overflows = 0;
        while !report.finite && self.loss_scale.as_mut().is_some_and(LossScale::shrink) {
            overflows += 1;
            self.run_micro_batches(step)?;
            self.begin_update(step)?;
            report = self.feed.finish_report(&mut self.executor)?;
        }
        if !report.finite {
            let culprit = self.replay(&step.samples, step.step)?;
            let failure = not_finite(&self.rows().train, step, &report, culprit.as_ref());
            return Err(match &mut self.team {
                Some(team) => team.first_informed(failure, culprit.is_some())?,
                None => failure,
            });
        }
        if let Some(loss_scale) = &mut self.loss_scale {
            loss_scale.see_finite();
        }
        Ok((report, overflows))
    }

    fn check_liveness(&mut self, lr: f64, progress: &Progress) -> Result<(), Failure> {
        if let Some(liveness) = self.liveness.take_if(|liveness| liveness.see_update(lr)) {
            for warning in liveness.end(&mut self.executor, self.team.as_deref_mut())? {
                progress.say(&format!("{WARNING} {warning}"));
            }
        }
        Ok(())
    }

    /// The loss scale; 1 where gradients have the range of f32.
    pub(super) fn scale(&self) -> f64 {
        self.loss_scale.map_or(1.0, |loss_scale| loss_scale.scale())
    }
}

fn not_finite(
    train: &TokenSet,
    step: &PendingStep,
    report: &StepReport,
    culprit: Option<&Culprit>,
) -> Failure {
    let (samples, number) = (&step.samples, step.step + 1);
    let places: Vec<String> =
        samples.iter().take(4).map(|sample| train.place(*sample as usize).to_string()).collect();
    let more = if samples.len() > 4 { format!(" and {} more", samples.len() - 4) } else { String::new() };
    let first = culprit.map_or(String::new(), |culprit| format!("\n  {}", culprit.describe(train)));
    let failure = Failure::training(format!(
        "step {number} is not finite: loss {}, gradient norm {}; its samples are {}{more}; trained weights are unchanged{first}",
        report.loss,
        report.grad_norm,
        places.join(", ")
    ));
    if number == 1 || culprit.is_some_and(Culprit::is_weight) {
        return failure
            .hint("the weights are suspect: look for NaN in the checkpoint or the initial adapter");
    }
    failure.hint("a lower `train.lr` is the usual remedy; checkpoints written before are intact")
}
