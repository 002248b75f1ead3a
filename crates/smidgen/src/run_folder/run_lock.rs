//! One owner per run folder: an exclusive lock from before the data is read until the run ends.
//!
//! The operating system holds the lock, on the file `.lock` in the folder, so a killed process releases it. Dropping
//! the lock removes the file, and the folders that were created for it if nothing was written: a run that is refused
//! leaves nothing behind. Commands that only read (`report`, `dash`, `eval`) take no lock.

use super::run_dir::{LOCK_FILE, RunDir};
use crate::failure::Failure;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

/// The right to write a run folder.
#[derive(Debug)]
pub struct RunLock {
    path: PathBuf,
    /// Folders that did not exist before, innermost first.
    created: Vec<PathBuf>,
    /// Keeps the lock while it is open.
    _file: File,
}

impl RunLock {
    /// Takes the lock, and creates the folder for it. Fails if another process has the lock.
    pub fn take(dir: &RunDir) -> Result<RunLock, Failure> {
        let missing = dir.path().ancestors().take_while(|folder| !folder.exists());
        let created: Vec<PathBuf> = missing.map(Path::to_path_buf).collect();
        dir.make()?;
        let path = dir.file(LOCK_FILE);
        loop {
            let open = File::options().create(true).append(true).open(&path);
            let file = open.map_err(|error| Failure::file("open", &path, error))?;
            match file.try_lock() {
                // The last owner may have removed the file after it was opened here.
                Ok(()) if !is_at(&file, &path) => continue,
                Ok(()) => return Ok(RunLock { path, created, _file: file }),
                Err(TryLockError::WouldBlock) => {
                    return Err(Failure::disk(format!(
                        "another process is training in `{}`",
                        dir.path().display()
                    ))
                    .hint("wait until it ends, or choose another `output.dir`"));
                }
                Err(TryLockError::Error(error)) => return Err(Failure::file("lock", &path, error)),
            }
        }
    }
}

/// Whether the open file is the one at this path.
fn is_at(file: &File, path: &Path) -> bool {
    let is_same = || {
        use std::os::unix::fs::MetadataExt;
        let (open, named) = (file.metadata()?, fs::metadata(path)?);
        Ok::<bool, std::io::Error>((open.dev(), open.ino()) == (named.dev(), named.ino()))
    };
    is_same().unwrap_or(false)
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // Removed while the lock is still held, so that it cannot be another owner's file.
        let _ = fs::remove_file(&self.path);
        // Only empty folders can be removed.
        let _ = self.created.iter().try_for_each(fs::remove_dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_owner_and_is_cleaned_up() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = RunDir::at(&scratch.path().join("runs/run")).unwrap();
        let lock = RunLock::take(&dir).unwrap();
        let refused = RunLock::take(&dir).unwrap_err();
        assert!(refused.message.contains("another process is training in"), "{}", refused.message);
        drop(lock);
        assert!(!scratch.path().join("runs").exists(), "a run that wrote nothing leaves nothing");
        dir.make().unwrap();
        drop(RunLock::take(&dir).unwrap());
        assert!(dir.path().exists(), "a folder that was there before stays");
        let lock = RunLock::take(&dir).unwrap();
        dir.write_text("job.toml", "").unwrap();
        drop(lock);
        assert!(dir.file("job.toml").exists() && !dir.file(LOCK_FILE).exists());
    }

    #[test]
    fn a_file_that_was_removed_is_not_the_lock() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join(LOCK_FILE);
        let file = File::create(&path).unwrap();
        assert!(is_at(&file, &path));
        fs::remove_file(&path).unwrap();
        assert!(!is_at(&file, &path));
        File::create(&path).unwrap();
        assert!(!is_at(&file, &path));
    }
}
