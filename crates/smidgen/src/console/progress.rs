//! Progress of a run: a bar on a terminal, plain lines elsewhere.
//!
//! Everything goes to stderr; stdout is for data.

use crate::console::colour::{self, ERROR, HINT};
use crate::console::wrap::{columns, fold};
use crate::failure::Failure;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use smidgen_ir::bytes::format_bytes;
use std::cell::Cell;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Prints a line to stderr. A reader that closed the pipe (`2>&1 | head`) does not end a run: only the line is lost.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", for_stderr(line));
}

/// Prints a failure to stderr: the message, and a line for each hint.
pub fn say_failure(failure: &Failure) {
    let hints: String = failure.hints.iter().map(|hint| format!("\n{HINT} {hint}")).collect();
    let gap = if hints.is_empty() { "" } else { "\n" };
    say(&format!("{ERROR} {}{gap}{hints}", failure.message));
}

/// Wraps a line to the width of the terminal, and removes colour if stderr does not show it.
pub fn for_stderr(line: &str) -> String {
    colour::for_stream(&fold(&colour::escape_controls(line), columns()), &std::io::stderr())
}

/// A bar on stderr, if it is a terminal; without a total it has no end.
pub(super) fn begin_bar(quiet: bool, total: Option<u64>, template: &str) -> Option<ProgressBar> {
    (!quiet && std::io::stderr().is_terminal()).then(|| {
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
        bar.set_style(ProgressStyle::with_template(template).expect("the template is valid"));
        bar
    })
}

/// The numbers of a finished step that are printed.
#[derive(Clone, Copy, Debug)]
pub struct StepProgress {
    pub step: u64,
    pub loss: f64,
    /// What the objective is about, where the loss does not say it: a reward, or how many pairs are right.
    pub score: Option<(&'static str, f64)>,
    pub lr: f64,
    pub tokens_per_s: f64,
    /// `None` if memory is not measured.
    pub device_bytes: Option<u64>,
    /// Host memory of offloaded tensors.
    pub pinned_bytes: u64,
}

#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    quiet: bool,
    log_every: u64,
    total: u64,
    /// Steps that earlier processes completed.
    done: u64,
    begun: Instant,
    planned_bytes: Cell<u64>,
}

impl Progress {
    pub fn new(total: u64, done: u64, log_every: u64, quiet: bool) -> Progress {
        let bar = begin_bar(quiet, Some(total), "{bar:10} {pos}/{len} {wide_msg}");
        bar.iter().for_each(|bar| bar.set_position(done));
        let planned_bytes = Cell::new(0);
        Progress { bar, quiet, log_every, total, done, begun: Instant::now(), planned_bytes }
    }

    /// Sets the planned peak, which is shown next to measured memory.
    pub fn plan_memory(&self, peak_bytes: u64) {
        self.planned_bytes.set(peak_bytes);
    }

    pub fn step(&self, news: &StepProgress) {
        let step = news.step;
        let is_logged =
            self.log_every > 0 && (step.is_multiple_of(self.log_every) || step == 1 || step == self.total);
        if self.bar.is_none() && !is_logged {
            return;
        }
        let elapsed_s = self.begun.elapsed().as_secs_f64();
        let left_s = seconds_left(step.saturating_sub(self.done), self.total.saturating_sub(step), elapsed_s);
        let place = format!("step {step}/{}  ", self.total);
        // On a terminal, the bar is five columns wider than the word `step`.
        let head = place.len() + if self.bar.is_some() { 5 } else { 0 };
        let message = render_step(news, self.planned_bytes.get(), left_s, columns().saturating_sub(head));
        match &self.bar {
            Some(bar) => {
                bar.set_position(step);
                bar.set_message(message);
            }
            None => self.say(&format!("{place}{message}")),
        }
    }

    /// Shows how far an evaluation between two steps is.
    pub fn evaluating(&self, counted: &Counted, done: usize) {
        match &self.bar {
            Some(bar) => bar.set_message(counted.text(done)),
            None => counted.line(done).iter().for_each(|line| self.say(line)),
        }
    }

    pub fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(for_stderr(line)),
            None if !self.quiet => say(line),
            None => {}
        }
    }

    /// The bar, if stderr is a terminal.
    pub(super) fn bar(&self) -> Option<ProgressBar> {
        self.bar.clone()
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// How far some counted work is, such as the samples of an evaluation.
#[derive(Debug)]
pub struct Counted {
    what: String,
    total: usize,
    begun: Instant,
    /// When the next line is printed, if there is no bar.
    next_line: Cell<Duration>,
}

/// Between two lines about the same work.
const LINE_EVERY: Duration = Duration::from_secs(10);

impl Counted {
    /// `what` is a text such as "evaluating the base".
    pub fn new(what: impl Into<String>, total: usize) -> Counted {
        Counted { what: what.into(), total, begun: Instant::now(), next_line: Cell::new(LINE_EVERY) }
    }

    fn text(&self, done: usize) -> String {
        self.text_after(done, self.begun.elapsed())
    }

    fn text_after(&self, done: usize, elapsed: Duration) -> String {
        let Counted { what, total, .. } = self;
        let left_s = seconds_left(done as u64, total.saturating_sub(done) as u64, elapsed.as_secs_f64());
        let eta = left_s.map_or(String::new(), |seconds| format!("  eta {}", short_time(seconds)));
        format!("{what}: {done}/{total}{eta}")
    }

    /// The line to print now, if one is due.
    fn line(&self, done: usize) -> Option<String> {
        self.line_after(done, self.begun.elapsed())
    }

    fn line_after(&self, done: usize, elapsed: Duration) -> Option<String> {
        if elapsed < self.next_line.get() {
            return None;
        }
        self.next_line.set(elapsed + LINE_EVERY);
        Some(self.text_after(done, elapsed))
    }
}

/// Counted work with a bar of its own on a terminal. Cleared on drop.
#[derive(Debug)]
pub struct CountedProgress {
    counted: Counted,
    bar: Option<ProgressBar>,
    quiet: bool,
}

impl CountedProgress {
    pub fn new(what: impl Into<String>, total: usize, quiet: bool) -> CountedProgress {
        let bar = begin_bar(quiet, Some(total as u64), "{bar:10} {wide_msg}");
        CountedProgress { counted: Counted::new(what, total), bar, quiet }
    }

    pub fn done(&self, count: usize) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(self.counted.text(count));
                bar.set_position(count as u64);
            }
            None if self.quiet => {}
            None => self.counted.line(count).iter().for_each(|line| say(line)),
        }
    }
}

impl Drop for CountedProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The predicted time of the remaining steps: the average of this process so far, evaluations and checkpoints included.
fn seconds_left(steps: u64, left: u64, elapsed_s: f64) -> Option<f64> {
    (steps > 0 && left > 0).then(|| elapsed_s / steps as f64 * left as f64)
}

/// The text of a step's line. If it is wider than `width`, the least important fields are left out.
fn render_step(news: &StepProgress, planned_bytes: u64, left_s: Option<f64>, width: usize) -> String {
    let StepProgress { loss, score, lr, tokens_per_s, device_bytes, pinned_bytes, .. } = *news;
    let memory = device_bytes.map(|bytes| match planned_bytes {
        0 => format!("mem {}", format_bytes(bytes)),
        planned => format!("mem {}", format_used(bytes, planned)),
    });
    let host = (pinned_bytes > 0).then(|| format!("host {}", format_bytes(pinned_bytes)));
    // Fields in the order of the line, each with its importance.
    let fields = [
        (5, Some(format!("loss {loss:.4}"))),
        (5, score.map(|(name, score)| format!("{name} {score:.3}"))),
        (0, Some(format!("lr {lr:.2e}"))),
        (2, Some(format!("{tokens_per_s:.0} tok/s"))),
        (4, memory),
        (1, host),
        (3, left_s.map(|seconds| format!("eta {}", short_time(seconds)))),
    ];
    let shown = |least: u8| {
        let fields = fields.iter().filter(|(importance, _)| *importance >= least);
        fields.filter_map(|(_, field)| field.as_deref()).collect::<Vec<_>>().join(" ")
    };
    (0..=5).map(shown).find(|line| line.len() <= width).unwrap_or_default()
}

/// Used and planned bytes in one unit: `22.15/22.42 GiB`.
fn format_used(used: u64, planned: u64) -> String {
    let planned_text = format_bytes(planned);
    let unit = planned_text.rsplit(' ').next().unwrap_or_default();
    let shift = ["B", "KiB", "MiB", "GiB", "TiB"].iter().position(|name| *name == unit).unwrap_or(0);
    let used = used as f64 / (1u64 << (10 * shift)) as f64;
    format!("{used:.2}/{planned_text}")
}

/// A time in its two largest units, without a space: `2m05s`.
fn short_time(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    match (whole / 86_400, whole / 3600 % 24, whole / 60 % 60, whole % 60) {
        (0, 0, 0, seconds) => format!("{seconds}s"),
        (0, 0, minutes, seconds) => format!("{minutes}m{seconds:02}s"),
        (0, hours, minutes, _) => format!("{hours}h{minutes:02}m"),
        (days, hours, ..) => format!("{days}d{hours:02}h"),
    }
}

/// Rows tokenized so far, on a terminal only. Cleared on drop.
#[derive(Debug)]
pub struct RowProgress(Option<ProgressBar>);

impl RowProgress {
    pub fn new(quiet: bool) -> RowProgress {
        RowProgress(begin_bar(quiet, None, "{spinner} tokenizing: {human_pos} rows, {per_sec}"))
    }

    /// The bar appears with the first rows, because a cached set has none to tokenize.
    pub fn add(&self, rows: u64) {
        if let Some(bar) = &self.0 {
            if bar.position() == 0 {
                bar.enable_steady_tick(Duration::from_millis(200));
            }
            bar.inc(rows);
        }
    }
}

impl Drop for RowProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step_progress() -> StepProgress {
        StepProgress {
            step: 1000,
            score: None,
            loss: 1.23456,
            lr: 1e-4,
            tokens_per_s: 12345.4,
            device_bytes: Some(23_783_379_763),
            pinned_bytes: 0,
        }
    }

    #[test]
    fn a_step_shows_loss_speed_memory_and_time_left() {
        let planned = 24_073_291_694;
        let line = render_step(&step_progress(), planned, Some(725.0), 66);
        assert_eq!(line, "loss 1.2346 lr 1.00e-4 12345 tok/s mem 22.15/22.42 GiB eta 12m05s");
        let offloaded = StepProgress { pinned_bytes: 17 << 30, ..step_progress() };
        let line = render_step(&offloaded, planned, Some(725.0), 200);
        assert!(line.contains(" mem 22.15/22.42 GiB host 17.00 GiB eta "), "{line}");
        let unmeasured = StepProgress { device_bytes: None, ..step_progress() };
        assert_eq!(render_step(&unmeasured, planned, None, 64), "loss 1.2346 lr 1.00e-4 12345 tok/s");
        assert!(render_step(&step_progress(), 0, None, 64).ends_with(" mem 22.15 GiB"));
    }

    #[test]
    fn a_narrow_terminal_loses_the_least_important_first() {
        let narrow = |width| render_step(&step_progress(), 24_073_291_694, Some(725.0), width);
        assert_eq!(narrow(60), "loss 1.2346 12345 tok/s mem 22.15/22.42 GiB eta 12m05s");
        assert_eq!(narrow(45), "loss 1.2346 mem 22.15/22.42 GiB eta 12m05s");
        assert_eq!(
            (narrow(32), narrow(12), narrow(3)),
            ("loss 1.2346 mem 22.15/22.42 GiB".into(), "loss 1.2346".into(), String::new())
        );
    }

    #[test]
    fn long_work_prints_a_line_every_ten_seconds() {
        let counted = Counted::new("evaluating the base", 400);
        let line = |done, seconds| counted.line_after(done, Duration::from_secs(seconds));
        assert_eq!(line(10, 2), None);
        assert_eq!(line(100, 11).as_deref(), Some("evaluating the base: 100/400  eta 33s"));
        assert_eq!(line(150, 20), None);
        assert_eq!(line(400, 44).as_deref(), Some("evaluating the base: 400/400"));
    }

    #[test]
    fn time_left_assumes_the_average_step() {
        assert_eq!(seconds_left(10, 30, 20.0), Some(60.0));
        assert_eq!((seconds_left(0, 30, 20.0), seconds_left(40, 0, 20.0)), (None, None));
        let times = [0.4, 59.6, 3599.0, 7260.0, 200_000.0].map(short_time);
        assert_eq!(times, ["0s", "1m00s", "59m59s", "2h01m", "2d07h"]);
    }
}
