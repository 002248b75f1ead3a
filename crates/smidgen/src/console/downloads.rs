//! Progress of a download: a bar on a terminal, otherwise one line per file, nothing when quiet.
//!
//! It goes to stderr. Bytes of an earlier attempt count as done, so that the bar of a resumed download starts there.

use super::colour::{WARNING, escape_controls};
use super::progress::{begin_bar, for_stderr, say};
use indicatif::ProgressBar;
use smidgen_hub::Access;
use smidgen_ir::bytes::format_bytes;

/// Missing files are downloaded unless the environment forbids it, and downloads are shown unless quiet.
pub fn hub_access(quiet: bool) -> Access {
    Access::from_environment((!quiet).then_some(|total_bytes| Box::new(Download::begin(total_bytes)) as _))
}

struct Download {
    /// `None` where there is no terminal to draw it on.
    bar: Option<ProgressBar>,
}

impl Download {
    fn begin(total_bytes: u64) -> Download {
        let template = "{bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta} {wide_msg}";
        Download { bar: begin_bar(false, Some(total_bytes), template) }
    }
}

impl smidgen_hub::Progress for Download {
    fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(for_stderr(line)),
            None => say(line),
        }
    }

    fn warn(&self, line: &str) {
        self.say(&format!("{WARNING} {line}"));
    }

    fn begin_file(&self, name: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(escape_controls(name).into_owned());
        }
    }

    fn advance(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
        }
    }

    fn go_back(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(bar.position().saturating_sub(bytes));
        }
    }

    fn end_file(&self, name: &str, bytes: u64) {
        if self.bar.is_none() {
            say(&format!("  {name}  {}", format_bytes(bytes)));
        }
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
