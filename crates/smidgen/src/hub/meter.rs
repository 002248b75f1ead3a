//! Progress of a download: a bar on a terminal, otherwise one line per file, nothing when quiet.
//!
//! It goes to stderr. Bytes of an earlier attempt count as done, so that the bar of a resumed download starts there.

use crate::console::progress::{for_stderr, say};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use smidgen_ir::bytes::format_bytes;
use std::io::IsTerminal;

pub struct Meter {
    bar: Option<ProgressBar>,
    quiet: bool,
}

impl Meter {
    pub fn new(total_bytes: u64, quiet: bool) -> Meter {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(Some(total_bytes), ProgressDrawTarget::stderr());
            let template =
                "{bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta} {wide_msg}";
            bar.set_style(ProgressStyle::with_template(template).expect("the template is valid"));
            bar
        });
        Meter { bar, quiet }
    }

    pub fn begin(&self, name: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(name.to_owned());
        }
    }

    pub fn advance(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
        }
    }

    /// Bytes that have to be downloaded again.
    pub fn go_back(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(bar.position().saturating_sub(bytes));
        }
    }

    pub fn end(&self, name: &str, bytes: u64) {
        if self.bar.is_none() {
            self.say(&format!("  {name}  {}", format_bytes(bytes)));
        }
    }

    pub fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(for_stderr(line)),
            None if !self.quiet => say(line),
            None => {}
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
