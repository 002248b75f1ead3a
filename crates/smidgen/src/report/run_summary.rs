//! A run in short: its peak memory, leaks, speed, loss and stability.
//!
//! The same numbers are in the last lines of `train`, in `report --json` and on the page. Memory is that of the device;
//! on a CPU it is the memory of the process.
//! A process touches some pages late, when code runs for the first time, so on a CPU a small rise is not a leak. A GPU's
//! memory is exact. The verdict itself is in `leak.rs`.

use super::leak::Leak;
use super::numbers::milliseconds;
use super::run_folder::{RunRecord, State, StepRow};
use super::series::median;
use crate::run_folder::history::PartEnd;
use serde::{Serialize, Serializer};
use smidgen_ir::bytes::format_bytes;

/// Serialized, it is what `report --json` prints.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RunSummary {
    pub title: String,
    /// The state of the run as text.
    pub state: String,
    pub steps: u64,
    pub total_steps: u64,
    /// Predicted time until the end, if the run is still running.
    pub eta_s: Option<f64>,
    pub memory: MemorySummary,
    pub speed: SpeedSummary,
    pub loss: LossSummary,
    pub stability: StabilitySummary,
    /// Changes between its parts that `--accept-changes` allowed.
    pub accepted_changes: Vec<String>,
}

/// Fields are `None` if they were not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct MemorySummary {
    pub peak_bytes: Option<u64>,
    pub planned_bytes: u64,
    pub budget_bytes: u64,
    pub mean_bytes: Option<u64>,
    #[serde(flatten)]
    pub leak: Leak,
    /// Memory efficiency: bytes in use at the peak ÷ reserved bytes, both of the plan.
    pub peak_live_of_reserved: f64,
    /// Lowest ÷ highest memory use over the steps.
    pub least_of_most_used: Option<f64>,
    pub least_free_bytes: Option<u64>,
    pub pinned_bytes: u64,
    pub host_bytes: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SpeedSummary {
    pub tokens_per_s: Option<f64>,
    pub step_ms: Option<f64>,
    pub planned_tokens_per_s: Option<f64>,
    pub planned_step_ms: Option<f64>,
    pub tokens: u64,
    /// Time in steps, without evaluations and checkpoints.
    pub seconds: f64,
    /// The fraction of that time spent measuring memory.
    pub monitor_of_time: f64,
    /// Mean GPU utilization in percent.
    pub gpu_util: Option<f64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LossSummary {
    pub first: Option<f64>,
    pub last: Option<f64>,
    pub best_eval: Option<BestEvaluation>,
    pub last_eval: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BestEvaluation {
    pub step: u64,
    pub eval_loss: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StabilitySummary {
    /// Steps with a loss or gradient that was not finite; such a step updates no weight.
    pub steps_not_finite: usize,
    /// Steps that overflowed in f16 and were repeated.
    pub steps_done_again: usize,
    pub resumes: usize,
    /// How often the plan changed because free memory changed.
    pub plan_changes: usize,
    /// Steps with a gradient norm above [`SPIKE`] times the median.
    pub gradient_spikes: usize,
    pub worst_spike: Option<Spike>,
    /// The median loss of the first and of the last quarter, if it rose by more than [`RISE`].
    #[serde(serialize_with = "is_some")]
    pub loss_rose: Option<(f64, f64)>,
    pub failure: Option<String>,
}

/// A step whose gradient norm was this many times the median.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spike {
    pub step: u64,
    pub times_the_usual: f64,
}

fn is_some<S: Serializer>(rise: &Option<(f64, f64)>, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_bool(rise.is_some())
}

/// A rise of a process that is not a leak. About 20 KiB was measured in a run that writes and removes checkpoints.
const PAGES_BYTES: u64 = 256 << 10;

impl MemorySummary {
    /// The same words in the terminal and on the page.
    pub fn render_efficiency(&self) -> String {
        format!("{} of the reserved memory in use at the peak", percent(self.peak_live_of_reserved))
    }
}

pub fn summarize(run: &RunRecord) -> RunSummary {
    RunSummary {
        title: run.plan.title.clone(),
        state: state(run),
        steps: run.steps_done(),
        total_steps: run.total_steps(),
        eta_s: eta_s(run),
        memory: memory(run),
        speed: speed(run),
        loss: loss(run),
        stability: stability(run),
        accepted_changes: (run.history.iter().flat_map(|history| &history.parts))
            .flat_map(|part| part.accepted.clone())
            .collect(),
    }
}

fn state(run: &RunRecord) -> String {
    let (done, total) = (run.steps_done(), run.total_steps());
    match run.state() {
        State::Planned => "planned only".into(),
        State::Running => format!("running, step {done} of {total}"),
        State::Killed => format!("killed or crashed after step {done} of {total}"),
        State::Unknown => format!("{done} steps"),
        State::Ended(PartEnd::Done) => format!("done, {total} steps"),
        State::Ended(PartEnd::StoppedEarly) => format!("stopped early after step {done} of {total}"),
        State::Ended(PartEnd::Interrupted) => format!("interrupted after step {done} of {total}"),
        State::Ended(PartEnd::AbovePlan) => {
            format!("stopped after step {done} of {total}: used more memory than planned")
        }
        State::Ended(PartEnd::PlanChanged) => format!("replanned after step {done} of {total}"),
        State::Ended(PartEnd::Failed) => format!("failed after step {done} of {total}"),
    }
}

/// Assumes that the remaining steps take as long as the recent ones, with evaluations as often as so far; saving is not
/// counted.
fn eta_s(run: &RunRecord) -> Option<f64> {
    const RECENT: usize = 100;
    let left = (run.total_steps() - run.steps_done()) as f64;
    let recent = &run.rows[run.rows.len().saturating_sub(RECENT)..];
    if run.state() != State::Running || recent.is_empty() {
        return None;
    }
    let step_ms = recent.iter().map(|row| row.step_ms).sum::<f64>() / recent.len() as f64;
    let eval_ms = run.evaluations.iter().map(|row| row.eval_ms).sum::<f64>() / sum_over_steps(run, |_| 1.0);
    Some(left * (step_ms + eval_ms) / 1e3)
}

/// A row counts for all steps that it stands for.
fn sum_over_steps(run: &RunRecord, value: impl Fn(&StepRow) -> f64) -> f64 {
    run.rows.iter().map(|row| row.steps as f64 * value(row)).sum()
}

fn memory(run: &RunRecord) -> MemorySummary {
    let used = || run.rows.iter().filter_map(|row| row.device_bytes);
    let (count, sum) = run
        .rows
        .iter()
        .filter_map(|row| Some((row.steps, row.device_bytes?)))
        .fold((0u64, 0u128), |(count, sum), (steps, bytes)| {
            (count + steps, sum + u128::from(steps) * u128::from(bytes))
        });
    let (least, most) = (used().min(), used().max());
    let peaks = run.rows.iter().filter_map(|row| row.device_peak_bytes.max(row.device_bytes));
    let arena = &run.plan.arena;
    let noise_bytes = if run.plan.policy.device == "cpu" { PAGES_BYTES } else { 0 };
    MemorySummary {
        planned_bytes: run.plan.peak_bytes,
        budget_bytes: run.plan.budget_bytes,
        peak_bytes: peaks.max(),
        mean_bytes: (count > 0).then(|| (sum / u128::from(count.max(1))) as u64),
        leak: Leak::worst(run.parts().into_iter().map(|part| Leak::of(part, noise_bytes))),
        least_of_most_used: least.zip(most).map(|(least, most)| least as f64 / most.max(1) as f64),
        peak_live_of_reserved: arena.peak_live_bytes as f64 / arena.reserved_bytes.max(1) as f64,
        least_free_bytes: run.rows.iter().filter_map(|row| row.device_free_bytes).min(),
        pinned_bytes: run.rows.iter().map(|row| row.pinned_bytes).max().unwrap_or(0),
        host_bytes: run.rows.iter().filter_map(|row| row.host_rss_bytes).max(),
    }
}

fn speed(run: &RunRecord) -> SpeedSummary {
    let milliseconds = sum_over_steps(run, |row| row.step_ms);
    let monitor_ms = sum_over_steps(run, |row| row.monitor_ms);
    let busy = || run.rows.iter().filter_map(|row| row.gpu_util);
    SpeedSummary {
        tokens_per_s: median(run.rows.iter().map(|row| row.tokens_per_s)),
        step_ms: median(run.rows.iter().map(|row| row.step_ms)),
        planned_tokens_per_s: run.plan.tokens_per_s,
        planned_step_ms: run.plan.step_ms,
        tokens: run.rows.iter().map(|row| row.steps * row.tokens).sum(),
        seconds: milliseconds / 1e3,
        monitor_of_time: if milliseconds > 0.0 { monitor_ms / milliseconds } else { 0.0 },
        gpu_util: (busy().count() > 0).then(|| busy().sum::<u32>() as f64 / busy().count() as f64),
    }
}

fn loss(run: &RunRecord) -> LossSummary {
    let finite = || run.rows.iter().map(|row| row.loss).filter(|loss| loss.is_finite());
    let mut evaluated = run.evaluations.iter().filter(|row| row.eval_loss.is_finite());
    let best = evaluated.clone().min_by(|a, b| a.eval_loss.total_cmp(&b.eval_loss));
    LossSummary {
        first: finite().next(),
        last: finite().next_back(),
        best_eval: best.map(|row| BestEvaluation { step: row.step, eval_loss: row.eval_loss }),
        last_eval: evaluated.next_back().map(|row| row.eval_loss),
    }
}

/// A gradient this many times the median is a spike.
const SPIKE: f64 = 10.0;
/// A run has diverged if its last losses are this many times its first ones.
const RISE: f64 = 1.5;

/// The number of gradient spikes, and the largest.
fn spikes(rows: &[StepRow]) -> (usize, Option<Spike>) {
    let median = median(rows.iter().map(|row| row.grad_norm)).filter(|median| *median > 0.0);
    let Some(median) = median else { return (0, None) };
    let all = rows.iter().map(|row| Spike { step: row.step, times_the_usual: row.grad_norm / median });
    let high = all.filter(|it| it.times_the_usual.is_finite() && it.times_the_usual > SPIKE);
    let worst = high.clone().max_by(|one, other| one.times_the_usual.total_cmp(&other.times_the_usual));
    (high.count(), worst)
}

/// The median loss of the first and the last quarter, if there are enough steps and it rose by more than [`RISE`].
fn loss_rose(rows: &[StepRow]) -> Option<(f64, f64)> {
    const FEWEST: usize = 8;
    let quarter = rows.len() / 4;
    let median_loss = |rows: &[StepRow]| median(rows.iter().map(|row| row.loss));
    let (first, last) = (median_loss(&rows[..quarter])?, median_loss(&rows[rows.len() - quarter..])?);
    (rows.len() >= FEWEST && last > RISE * first).then_some((first, last))
}

fn stability(run: &RunRecord) -> StabilitySummary {
    let (gradient_spikes, worst_spike) = spikes(&run.rows);
    let parts = run.history.iter().flat_map(|history| &history.parts);
    let changed = parts.clone().filter(|part| part.ended == Some(PartEnd::PlanChanged));
    StabilitySummary {
        steps_not_finite: run
            .rows
            .iter()
            .filter(|row| !row.loss.is_finite() || !row.grad_norm.is_finite())
            .count(),
        steps_done_again: run.rows.iter().filter(|row| row.overflows > 0).count(),
        resumes: run.history.as_ref().map_or(0, |history| history.resumes()),
        plan_changes: changed.count(),
        gradient_spikes,
        worst_spike,
        loss_rose: loss_rose(&run.rows),
        failure: parts.last().filter(|_| !run.is_running).and_then(|part| part.message.clone()),
    }
}

impl RunSummary {
    /// The memory of a finished run in one line.
    pub fn render_memory_line(&self) -> Vec<String> {
        let memory = &self.memory;
        let Some(peak) = memory.peak_bytes else {
            return vec!["memory: not measured on this system".into()];
        };
        let (peak, planned) = (format_bytes(peak), format_bytes(memory.planned_bytes));
        let mean = memory.mean_bytes.map_or(String::new(), |bytes| format!(", mean {}", format_bytes(bytes)));
        let (leak, efficiency) = (memory.leak.render(), memory.render_efficiency());
        vec![format!("memory: peak {peak}, planned {planned}{mean}, {leak}; {efficiency}")]
    }

    /// The run as text: one line each for memory, speed, loss and stability.
    pub fn render_lines(&self) -> Vec<String> {
        let mut lines = vec![format!("{}: {}", self.title, self.state)];
        if self.steps == 0 {
            return lines;
        }
        lines.extend(self.render_memory_line());
        let SpeedSummary { tokens_per_s, step_ms, planned_step_ms, .. } = self.speed;
        if let (Some(tokens_per_s), Some(step_ms)) = (tokens_per_s, step_ms) {
            let predicted =
                planned_step_ms.map_or(String::new(), |ms| format!(", predicted {}", milliseconds(ms, 1)));
            let step = milliseconds(step_ms, 1);
            lines.push(format!("speed: {tokens_per_s:.0} tokens/s, {step} per step{predicted}"));
        }
        if let (Some(first), Some(last)) = (self.loss.first, self.loss.last) {
            let best = self.loss.best_eval.map_or(String::new(), |BestEvaluation { step, eval_loss }| {
                format!(", best eval {eval_loss:.4} after step {step}")
            });
            lines.push(format!("loss: {first:.4} to {last:.4}{best}"));
        }
        let answer = if self.stability.is_stable() { "yes" } else { "no" };
        lines.push(format!("stable: {answer}, {}", self.stability.render()));
        lines.extend(self.accepted_changes.iter().map(|change| format!("accepted change: {change}")));
        lines
    }
}

impl StabilitySummary {
    pub fn is_stable(&self) -> bool {
        self.steps_not_finite == 0 && self.failure.is_none() && self.loss_rose.is_none()
    }

    pub fn render(&self) -> String {
        let mut words = vec![match self.steps_not_finite {
            0 => "every step finite".to_string(),
            count => format!("{count} steps not finite"),
        }];
        if let Some((first, last)) = self.loss_rose {
            words.push(format!("the loss rose from {first:.3} to {last:.3}"));
        }
        if let Some(Spike { step, times_the_usual: times }) = self.worst_spike {
            let count = self.gradient_spikes;
            let plural = if count == 1 { "" } else { "s" };
            words.push(format!(
                "{count} gradient spike{plural}, the worst {times:.0} times the median at step {step}"
            ));
        }
        if self.steps_done_again > 0 {
            words.push(format!("{} repeated after an overflow", self.steps_done_again));
        }
        words.push(match self.resumes {
            0 => "never resumed".into(),
            1 => "resumed once".into(),
            times => format!("resumed {times} times"),
        });
        if self.plan_changes > 0 {
            words.push(format!("replanned {} times", self.plan_changes));
        }
        if self.failure.is_some() {
            words.push("failed".into());
        }
        words.join(", ")
    }
}

/// A fraction in percent.
pub fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::run_folder::EvaluationRow;
    use crate::run_folder::history::{History, Part};
    use serde_json::json;

    fn run(device: &str, parts: &[u64], bytes: &[u64]) -> RunRecord {
        let row = |(index, bytes): (usize, &u64)| StepRow {
            step: index as u64 + 1,
            steps: 1,
            loss: 1.0,
            grad_norm: 1.0,
            lr: 0.1,
            tokens: 10,
            step_ms: 2.0,
            tokens_per_s: 5000.0,
            overflows: u64::from(index == 1),
            device_bytes: Some(*bytes),
            device_free_bytes: Some(9),
            device_peak_bytes: Some(*bytes + 1),
            pinned_bytes: 0,
            host_rss_bytes: None,
            gpu_util: None,
            monitor_ms: 0.001,
        };
        let part = |first_step: &u64| Part {
            began_unix_s: 0,
            process_id: 0,
            first_step: *first_step,
            planned_bytes: 0,
            ended: None,
            accepted: vec![],
            last_step: None,
            message: None,
        };
        let mut record = RunRecord { folder: Some("run".into()), ..RunRecord::default() };
        record.plan.policy.device = device.into();
        record.rows = bytes.iter().enumerate().map(row).collect();
        let parts = parts.iter().map(part).collect();
        record.history = Some(History { total_steps: 40, parts, ..History::default() });
        record
    }

    #[test]
    fn a_leak_is_looked_for_within_a_process() {
        let rising: Vec<u64> = (0..200).map(|step| (step + 1) << 20).collect();
        let memory = summarize(&run("cuda", &[0], &rising)).memory;
        assert_eq!((memory.leak.bytes(), memory.leak.has_leaked()), (Some(174 << 20), Some(true)));
        assert_eq!((memory.peak_bytes, memory.least_of_most_used), (Some((200 << 20) + 1), Some(0.005)));
        // A microsecond in every two milliseconds.
        assert!((summarize(&run("cuda", &[0], &rising)).speed.monitor_of_time - 5e-4).abs() < 1e-12);
        // Resumed after step 100, and the second process uses more memory from its start.
        let two: Vec<u64> = (0..200).map(|step| if step < 100 { 5 << 20 } else { 9 << 20 }).collect();
        let leak = summarize(&run("cuda", &[0, 100], &two)).memory.leak;
        assert_eq!((leak.bytes(), leak.has_leaked()), (Some(0), Some(false)));
        assert_eq!(summarize(&run("cuda", &[0], &two[..70])).memory.leak.has_leaked(), None);
    }

    #[test]
    fn a_process_may_grow_a_little_and_a_gpu_may_not() {
        let slow: Vec<u64> = (0..200).map(|step| (9 << 20) + 100 * step).collect();
        assert_eq!(summarize(&run("cpu", &[0], &slow)).memory.leak.has_leaked(), Some(false));
        assert_eq!(summarize(&run("cuda", &[0], &slow)).memory.leak.has_leaked(), Some(true));
    }

    #[test]
    fn the_status_is_a_sentence() {
        let mut record = run("cpu", &[0, 10], &[1; 20]);
        assert_eq!(summarize(&record).state, "killed or crashed after step 20 of 40");
        let stability = summarize(&record).stability;
        assert_eq!(stability.render(), "every step finite, 1 repeated after an overflow, resumed once");
        record.is_running = true;
        assert_eq!(summarize(&record).state, "running, step 20 of 40");
        record.rows[3].loss = f64::NAN;
        assert!(!summarize(&record).stability.is_stable());
        let lines = summarize(&record).render_lines();
        assert!(lines.last().unwrap().starts_with("stable: no, 1 steps not finite, "), "{lines:?}");
    }

    #[test]
    fn speed_and_loss_are_those_of_the_rows() {
        let mut record = run("cpu", &[0], &[1; 5]);
        for (row, step_ms) in record.rows.iter_mut().zip([9.0, 2.0, 3.0, 2.5, 100.0]) {
            (row.step_ms, row.tokens_per_s) = (step_ms, 10.0 / step_ms * 1e3);
        }
        (record.rows[0].loss, record.rows[4].loss) = (3.0, 0.5);
        (record.plan.step_ms, record.plan.tokens_per_s) = (Some(4.0), Some(2500.0));
        let evaluated = [(1, 2.0), (2, 1.25), (3, f64::NAN), (4, 1.5)];
        record.evaluations = evaluated
            .into_iter()
            .map(|(step, eval_loss)| EvaluationRow { step, eval_loss, eval_ms: 5.0 })
            .collect();
        let RunSummary { speed, loss, .. } = summarize(&record);
        assert_eq!((speed.step_ms, speed.planned_step_ms), (Some(3.0), Some(4.0)));
        assert_eq!((speed.tokens_per_s, speed.planned_tokens_per_s), (Some(1e4 / 3.0), Some(2500.0)));
        assert_eq!((speed.tokens, speed.seconds), (50, 0.1165));
        // The third row stands for 16 steps of a thinned run, whose memory was higher.
        (record.rows[2].steps, record.rows[2].device_bytes) = (16, Some(21));
        let RunSummary { speed: thinned, memory, .. } = summarize(&record);
        assert_eq!((thinned.tokens, thinned.seconds), (200, 0.1615));
        assert_eq!((memory.mean_bytes, memory.peak_bytes), (Some((16 * 21 + 4) / 20), Some(21)));
        assert_eq!((loss.first, loss.last), (Some(3.0), Some(0.5)));
        let best = BestEvaluation { step: 2, eval_loss: 1.25 };
        assert_eq!((loss.best_eval, loss.last_eval), (Some(best), Some(1.5)));
    }

    #[test]
    fn time_left_and_load_of_a_run_that_goes_on() {
        let mut record = run("cuda", &[0], &[1; 20]);
        record.evaluations = vec![EvaluationRow { step: 10, eval_loss: 1.0, eval_ms: 40.0 }];
        assert_eq!((summarize(&record).eta_s, summarize(&record).speed.gpu_util), (None, None));
        record.is_running = true;
        (record.rows[18].gpu_util, record.rows[19].gpu_util) = (Some(90), Some(95));
        // 20 steps of 2 ms are left, and 40 ms of evaluation in 20 steps.
        assert_eq!(summarize(&record).eta_s, Some(0.08));
        assert_eq!(summarize(&record).speed.gpu_util, Some(92.5));
        let json = json!(summarize(&record));
        assert_eq!((&json["eta_s"], &json["speed"]["gpu_util"]), (&json!(0.08), &json!(92.5)));
    }

    #[test]
    fn a_loss_that_rises_is_not_stable_and_spikes_are_counted() {
        let mut record = run("cpu", &[0], &[1; 20]);
        assert!(summarize(&record).stability.is_stable());
        (record.rows[7].grad_norm, record.rows[12].grad_norm, record.rows[3].grad_norm) = (11.0, 40.0, 9.0);
        let stability = summarize(&record).stability;
        let worst = Spike { step: 13, times_the_usual: 40.0 };
        assert_eq!((stability.gradient_spikes, stability.worst_spike), (2, Some(worst)));
        assert!(stability.is_stable(), "a spike alone is not instability");
        let words = "2 gradient spikes, the worst 40 times the median at step 13";
        assert!(stability.render().contains(words), "{}", stability.render());
        // A single high loss at the end does not count, a quarter of the steps does.
        record.rows[19].loss = 9.0;
        assert!(summarize(&record).stability.is_stable());
        record.rows[15..].iter_mut().for_each(|row| row.loss = 1.6);
        let stability = summarize(&record).stability;
        assert_eq!((stability.loss_rose, stability.is_stable()), (Some((1.0, 1.6)), false));
        assert!(stability.render().contains("the loss rose from 1.000 to 1.600"), "{}", stability.render());
        record.rows.truncate(7);
        assert_eq!(summarize(&record).stability.loss_rose, None);
        record.rows.truncate(1);
        assert_eq!(summarize(&record).stability.gradient_spikes, 0);
    }
}
