//! Progress of a run: a bar on a terminal, plain lines elsewhere.
//!
//! Everything goes to stderr; stdout is for data.

use crate::console::colour::{self, ERROR, HINT};
use crate::console::wrap::{columns, fold};
use crate::failure::Failure;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// Prints a line to stderr. A reader that closed the pipe (`2>&1 | head`) does not end a run: only the line is lost.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", for_stderr(line));
}

/// A failure to stderr: the message, and a line for each hint.
pub fn say_failure(failure: &Failure) {
    let hints: String = failure.hints.iter().map(|hint| format!("\n{HINT} {hint}")).collect();
    let gap = if hints.is_empty() { "" } else { "\n" };
    say(&format!("{ERROR} {}{gap}{hints}", failure.message));
}

/// As wide as the terminal, and in its colours.
pub fn for_stderr(line: &str) -> String {
    colour::for_stream(&fold(&colour::shown(line), columns()), &std::io::stderr())
}

#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    quiet: bool,
    log_every: u64,
    total: u64,
}

impl Progress {
    pub fn new(total: u64, done: u64, log_every: u64, quiet: bool) -> Progress {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{bar:20} {pos}/{len} {msg} {eta}");
            bar.set_style(style.expect("the template is valid"));
            bar.set_position(done);
            bar
        });
        Progress { bar, quiet, log_every, total }
    }

    pub fn step(&self, step: u64, loss: f64, lr: f64, tokens_per_s: f64) {
        let message = format!("loss {loss:.4} lr {lr:.3e} {tokens_per_s:.0} tok/s");
        if let Some(bar) = &self.bar {
            bar.set_position(step);
            bar.set_message(message);
        } else if self.log_every > 0
            && (step.is_multiple_of(self.log_every) || step == 1 || step == self.total)
        {
            self.say(&format!("step {step}/{}  {message}", self.total));
        }
    }

    pub fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(for_stderr(line)),
            None if !self.quiet => say(line),
            None => {}
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Rows tokenized so far, on a terminal only. Cleared on drop.
#[derive(Debug)]
pub struct RowProgress(Option<ProgressBar>);

impl RowProgress {
    pub fn new(quiet: bool) -> RowProgress {
        RowProgress((!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{spinner} tokenizing: {human_pos} rows, {per_sec}");
            bar.set_style(style.expect("the template is valid"));
            bar
        }))
    }

    /// Drawing starts with the first rows: a cached set has none.
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
