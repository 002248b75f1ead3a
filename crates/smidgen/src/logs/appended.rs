//! A file to which a run appends whole records, and which is cut when the run continues from a checkpoint.
//!
//! A record is one write, so a killed run leaves at most a torn last one. Truncation is one operation, so a cut file is
//! whole if the process is killed before or after it.
//! Left out: what a record is (`metrics.rs`, `events.rs`).

use crate::failure::Failure;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub struct AppendedFile {
    path: PathBuf,
    pub(super) file: File,
}

impl AppendedFile {
    /// A missing file is created.
    pub fn open(path: &Path) -> Result<AppendedFile, Failure> {
        let file = OpenOptions::new().append(true).create(true).open(path);
        let file = file.map_err(|error| Failure::file("open", path, error))?;
        Ok(AppendedFile { path: path.to_path_buf(), file })
    }

    pub fn append(&mut self, record: &[u8]) -> Result<(), Failure> {
        self.file.write_all(record).map_err(|error| Failure::file("write to", &self.path, error))
    }

    /// Flushes records to disk, so that they survive a power failure; called before a checkpoint counts as written.
    pub fn sync(&self) -> Result<(), Failure> {
        self.file.sync_data().map_err(|error| {
            Failure::disk(error).context(format!("cannot write `{}` to disk", self.path.display()))
        })
    }
}

/// Keeps the first bytes of a file. A file that is not longer is not touched.
pub fn keep_first(path: &Path, bytes: u64) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    if file.metadata()?.len() > bytes {
        file.set_len(bytes)?;
        file.sync_all()?;
    }
    Ok(())
}
