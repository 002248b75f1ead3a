//! Progress of saving a large checkpoint or model.
//!
//! It is measured by the size of the folder, so the code that writes does not report progress. On a terminal it is
//! shown in the progress bar; elsewhere one line says that something large is being saved. Small ones show nothing.

use super::progress::Progress;
use indicatif::ProgressBar;
use smidgen_ir::bytes::format_bytes;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Nothing is shown for less than this.
const LARGE_BYTES: u64 = 1 << 30;
const EVERY: Duration = Duration::from_millis(500);

/// Shows how much of a folder is written, until it is dropped.
#[derive(Debug)]
pub struct Saving {
    watcher: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Saving {
    /// Begins to show progress; `what` has about `bytes` and is written into `folder`.
    pub fn begin(progress: &Progress, what: &str, folder: PathBuf, bytes: u64) -> Saving {
        if bytes < LARGE_BYTES {
            return Saving { watcher: None };
        }
        let what = format!("saving {what} of {}", format_bytes(bytes));
        let Some(bar) = progress.bar() else {
            progress.say(&what);
            return Saving { watcher: None };
        };
        let (stop, stopped) = channel();
        let watch = move || {
            while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                show(&bar, &what, &folder, bytes);
            }
        };
        // Without the thread, only the display is missing.
        let thread = std::thread::Builder::new().name("smidgen-saving".to_owned()).spawn(watch).ok();
        Saving { watcher: thread.map(|thread| (stop, thread)) }
    }
}

fn show(bar: &ProgressBar, what: &str, folder: &Path, bytes: u64) {
    let percent = 100 * folder_bytes(folder).min(bytes) / bytes.max(1);
    bar.set_message(format!("{what}: {percent} %"));
}

/// Bytes of the files in a folder, without its subfolders.
fn folder_bytes(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.metadata().ok())
        .filter(|data| data.is_file())
        .map(|data| data.len())
        .sum()
}

impl Drop for Saving {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.watcher.take() {
            drop(stop);
            // A panic there only concerns the display.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_that_is_written_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), vec![0; 300]).unwrap();
        std::fs::write(folder.path().join("b"), vec![0; 100]).unwrap();
        assert_eq!(folder_bytes(folder.path()), 400);
        let bar = ProgressBar::hidden();
        show(&bar, "saving a checkpoint", folder.path(), 800);
        assert_eq!(bar.message(), "saving a checkpoint: 50 %");
        show(&bar, "saving a checkpoint", folder.path(), 200);
        assert_eq!(bar.message(), "saving a checkpoint: 100 %");
    }

    #[test]
    fn a_watcher_ends_with_its_save() {
        let folder = tempfile::tempdir().unwrap();
        let progress = Progress::new(1, 0, 1, true);
        drop(Saving::begin(&progress, "a checkpoint", folder.path().into(), 2 * LARGE_BYTES));
        drop(Saving::begin(&progress, "a checkpoint", folder.path().into(), 1));
    }
}
