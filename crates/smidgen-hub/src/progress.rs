//! What a download reports while it runs.
//!
//! The caller implements [`Progress`] and decides what is shown: this crate prints nothing itself. Only pip, which is
//! another program, writes to stderr, and only if there is somebody to report to.

/// Shows one download. It ends when the value is dropped. By default, nothing is shown.
pub trait Progress {
    fn say(&self, _line: &str) {}

    fn warn(&self, _line: &str) {}

    fn begin_file(&self, _name: &str) {}

    /// Bytes that have arrived, or that an earlier attempt left on disk.
    fn advance(&self, _bytes: u64) {}

    /// Bytes that have to be downloaded again.
    fn go_back(&self, _bytes: u64) {}

    /// A file is complete.
    fn end_file(&self, _name: &str, _bytes: u64) {}
}

/// Starts to show a download of this many bytes; 0 for requests before the size is known.
pub type StartProgress = fn(total_bytes: u64) -> Box<dyn Progress>;

/// Shows nothing.
pub(crate) struct Silent;

impl Progress for Silent {}
