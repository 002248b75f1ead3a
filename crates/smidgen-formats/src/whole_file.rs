//! Replaces files atomically: after a crash or on a full disk, a file is the old one or the complete new one.
//! The bytes go to a temporary file in the same folder, are synced, and the file is then renamed over the
//! target. If anything fails or panics before the rename, the temporary file is removed and the old file
//! survives.
//! A symbolic link at the target is replaced, never followed.
//! Left out: keeping the old file's permissions.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

#[derive(Debug, Error)]
#[error("`{}` could not be written: {step}: {source}", path.display())]
pub struct WriteFileError {
    pub path: PathBuf,
    pub step: &'static str,
    pub source: io::Error,
}

/// Writes one file completely or not at all.
pub fn write_whole(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), WriteFileError> {
    let mut staged = StagedFile::create(path)?;
    staged.write(write)?;
    commit_together(vec![staged])
}

/// A temporary file next to its target, which has not been renamed yet. Dropping it removes it.
pub struct StagedFile {
    target: PathBuf,
    temporary: PathBuf,
    writer: BufWriter<File>,
    renamed: bool,
}

impl StagedFile {
    pub fn create(target: &Path) -> Result<StagedFile, WriteFileError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let step = "creating a temporary file next to it";
        let Some(file_name) = target.file_name() else {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "the path has no file name");
            return Err(failed(target, step, source));
        };
        loop {
            let mut temporary_name = std::ffi::OsString::from(".");
            temporary_name.push(file_name);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            temporary_name.push(format!(".{}-{number}.tmp", std::process::id()));
            let temporary = target.with_file_name(temporary_name);
            match File::create_new(&temporary) {
                Ok(file) => {
                    return Ok(StagedFile {
                        target: target.to_path_buf(),
                        temporary,
                        writer: BufWriter::with_capacity(32 << 10, file),
                        renamed: false,
                    });
                }
                // A killed process with the same id may have left this file behind.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(failed(target, step, error)),
            }
        }
    }

    pub fn write(
        &mut self,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), WriteFileError> {
        write(&mut self.writer).map_err(|error| failed(&self.target, "writing", error))
    }

    fn sync(&mut self) -> Result<(), WriteFileError> {
        self.writer.flush().map_err(|error| failed(&self.target, "writing", error))?;
        self.writer.get_ref().sync_all().map_err(|error| failed(&self.target, "syncing", error))
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        if !self.renamed {
            // A failure is ignored: nothing can be done, and the error that led here matters more.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Renames several staged files over their targets, in order. All are on disk before the first is renamed, so
/// a full disk leaves all old files in place. Only a crash between two renames can leave old and new files
/// together.
pub fn commit_together(mut staged: Vec<StagedFile>) -> Result<(), WriteFileError> {
    for file in &mut staged {
        file.sync()?;
    }
    for file in &mut staged {
        fs::rename(&file.temporary, &file.target)
            .map_err(|error| failed(&file.target, "renaming the temporary file", error))?;
        file.renamed = true;
    }
    let mut folders: Vec<&Path> = staged.iter().map(|file| folder_of(&file.temporary)).collect();
    folders.dedup();
    folders.into_iter().try_for_each(sync_folder)
}

/// Removes temporary files and folders for `target` that killed processes left behind. Those of running
/// processes stay.
pub fn sweep_leftovers(target: &Path) {
    let Some(name) = target.file_name().and_then(|name| name.to_str()) else { return };
    for entry in fs::read_dir(folder_of(target)).into_iter().flatten().flatten() {
        let found = entry.file_name();
        let writer = found.to_str().and_then(|found| writer_of(found, name));
        if writer.is_some_and(|process| process == std::process::id() || !is_running(process)) {
            let path = entry.path();
            // A failure is ignored: leftovers only take space.
            let _ = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        }
    }
}

/// The process id in a temporary name for `target`: `.NAME.PROCESS.tmp` or `.NAME.PROCESS-NUMBER.tmp`.
fn writer_of(found: &str, target: &str) -> Option<u32> {
    let middle = found.strip_prefix('.')?.strip_prefix(target)?.strip_prefix('.')?.strip_suffix(".tmp")?;
    let (process, number) = middle.split_once('-').unwrap_or((middle, "0"));
    number.parse::<u64>().ok()?;
    process.parse().ok()
}

/// Without `/proc`, every process counts as running.
fn is_running(process: u32) -> bool {
    !Path::new("/proc/self").exists() || Path::new("/proc").join(process.to_string()).exists()
}

/// Makes renames and new entries in a folder durable.
pub fn sync_folder(folder: &Path) -> Result<(), WriteFileError> {
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(|error| failed(folder, "syncing the folder", error))
}

/// The folder of a path; `.` for a bare name.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn failed(path: &Path, step: &'static str, source: io::Error) -> WriteFileError {
    WriteFileError { path: path.to_path_buf(), step, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_of_killed_processes_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let own = std::process::id();
        let gone = 4_000_000_000u32;
        // Process 1 is always running.
        let stay = [
            ".a.1.tmp".to_string(),
            ".a.1-7.tmp".into(),
            "a.tmp".into(),
            format!(".a.gguf.{gone}.tmp"),
            format!(".b.{gone}.tmp"),
            ".a.x.tmp".into(),
            format!(".a.{gone}-x.tmp"),
            format!(".a.{gone}"),
        ];
        let removed = [format!(".a.{gone}.tmp"), format!(".a.{gone}-3.tmp"), format!(".a.{own}.tmp")];
        for name in stay.iter().chain(&removed) {
            fs::create_dir(folder.path().join(name)).unwrap();
            fs::write(folder.path().join(name).join("x"), "x").unwrap();
        }
        fs::write(folder.path().join(format!(".a.{gone}-4.tmp")), "x").unwrap();
        sweep_leftovers(&folder.path().join("a"));
        let mut expected = stay.to_vec();
        expected.sort();
        assert_eq!(names(folder.path()), expected);
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_new_file_replaces_the_old_and_nothing_else_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        for text in ["old and longer", "new"] {
            write_whole(&path, |w| w.write_all(text.as_bytes())).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(names(folder.path()), ["state"]);
    }

    #[test]
    fn the_old_file_survives_an_error_halfway() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        fs::write(&path, "old").unwrap();
        let error = write_whole(&path, |w| {
            w.write_all(&[7; 200_000])?;
            Err(io::Error::new(io::ErrorKind::StorageFull, "disk full"))
        })
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("`{}` could not be written: writing: disk full", path.display())
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(folder.path()), ["state"]);
    }

    #[test]
    fn the_old_file_survives_a_panic_halfway() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        fs::write(&path, "old").unwrap();
        let outcome = std::panic::catch_unwind(|| write_whole(&path, |_| panic!("the source gave up")));
        assert!(outcome.is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(folder.path()), ["state"]);
    }

    #[test]
    fn a_failed_second_file_leaves_both_old_ones() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (folder.path().join("a"), folder.path().join("b"));
        fs::write(&first, "old a").unwrap();
        fs::write(&second, "old b").unwrap();
        let mut staged = StagedFile::create(&first).unwrap();
        staged.write(|w| w.write_all(b"new a")).unwrap();
        let mut other = StagedFile::create(&second).unwrap();
        other.write(|_| Err(io::Error::other("no"))).expect_err("the source fails");
        drop((staged, other));
        assert_eq!(fs::read_to_string(&first).unwrap(), "old a");
        assert_eq!(fs::read_to_string(&second).unwrap(), "old b");
        assert_eq!(names(folder.path()), ["a", "b"]);
    }

    #[test]
    fn a_missing_folder_and_a_missing_name_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let error = write_whole(&folder.path().join("no/state"), |_| Ok(())).unwrap_err();
        assert_eq!(error.source.kind(), io::ErrorKind::NotFound);
        let error = write_whole(Path::new("/"), |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains("the path has no file name"));
    }

    #[test]
    fn a_rename_onto_a_folder_fails_and_cleans_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taken");
        fs::create_dir(&path).unwrap();
        let error = write_whole(&path, |w| w.write_all(b"x")).unwrap_err();
        assert_eq!(error.step, "renaming the temporary file");
        assert_eq!(names(folder.path()), ["taken"]);
    }
}
