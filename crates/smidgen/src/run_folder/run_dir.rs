//! The run folder: which files a run writes, and whether a folder already holds a run.
//!
//! Nothing is overwritten: without `--resume` a folder that holds a run is refused. A checkpoint, the final adapter
//! and the final model are written under a temporary name and renamed, so they are complete or absent.

use crate::failure::Failure;
use crate::plan::artifact::Artifact;
use smidgen_formats::whole_file::{sync_folder, write_whole};
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
pub struct RunDir {
    path: PathBuf,
    /// Of several ranks only one writes. On the others, all writing methods do nothing.
    is_written: bool,
}

/// The file whose lock gives a run its folder.
pub const LOCK_FILE: &str = ".lock";

/// A folder with any of these files or folders holds a run.
const TRACES: [&str; 5] = ["job.toml", "metrics.jsonl", "plan.json", "recipe.toml", "adapter"];

pub fn checkpoint_name(step: u64) -> String {
    format!("checkpoint-{step}")
}

impl RunDir {
    /// The folder need not exist yet. Nothing is written.
    pub fn at(path: &Path) -> Result<RunDir, Failure> {
        if path.exists() && !path.is_dir() {
            return Err(Failure::disk(format!("`{}` is a file, not a folder", path.display()))
                .hint("choose another `output.dir`"));
        }
        Ok(RunDir { path: path.to_path_buf(), is_written: true })
    }

    /// The folder for a rank that does not write: all writing methods do nothing.
    pub fn without_writing(self) -> RunDir {
        RunDir { is_written: false, ..self }
    }

    pub fn is_written(&self) -> bool {
        self.is_written
    }

    /// Refuses a folder that holds a run, before anything is written or read.
    pub fn refuse_run(&self) -> Result<(), Failure> {
        if self.holds_run() {
            return Err(Failure::disk(format!("`{}` already holds a run", self.path.display()))
                .hint("`--resume` continues it; choose another `output.dir` to start a new run"));
        }
        Ok(())
    }

    /// Refuses a folder in which the run's model would replace another one: the base, or a model that no run wrote.
    pub fn refuse_foreign_model(&self, base: &Path) -> Result<(), Failure> {
        let model = self.file(Artifact::Model.folder());
        let canonical = |path: &Path| path.canonicalize().ok();
        let holds_base =
            canonical(&model).zip(canonical(base)).is_some_and(|(model, base)| base.starts_with(model));
        if !holds_base && (self.holds_run() || !model.exists()) {
            return Ok(());
        }
        Err(Failure::disk(format!("the run would replace `{}`", model.display()))
            .hint("choose another `output.dir`: a run with `adapter.kind = \"full\"` writes its model into `model` there"))
    }

    /// Creates the folder if it does not exist.
    pub fn make(&self) -> Result<(), Failure> {
        if !self.is_written {
            return Ok(());
        }
        fs::create_dir_all(&self.path).map_err(|error| {
            Failure::file("create", &self.path, error)
                .hint("choose another `output.dir`, or create the folder with write permission")
        })
    }

    /// Whether the folder contains nothing but its lock.
    pub fn is_empty(&self) -> bool {
        self.entries().next().is_none()
    }

    /// Removes everything in the folder except its lock, then the folder if it is empty.
    pub fn clear(&self) {
        if !self.is_written {
            return;
        }
        for path in self.entries() {
            let _ = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        }
        let _ = fs::remove_dir(&self.path);
    }

    fn entries(&self) -> impl Iterator<Item = PathBuf> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| !path.ends_with(LOCK_FILE))
    }

    /// Hides the old result of a run that continues, so that nobody mistakes it for the new one. Writing the new
    /// result removes it.
    pub fn set_aside(&self, artifact: Artifact) -> Result<(), Failure> {
        if !self.is_written {
            return Ok(());
        }
        let (result, old) = (self.file(artifact.folder()), self.hidden(artifact.folder()));
        let hide = || {
            if !result.exists() {
                return Ok(());
            }
            remove_folder(&old)?;
            fs::rename(&result, &old)
        };
        hide().map_err(|error: std::io::Error| Failure::file("rename", &result, error))
    }

    /// Removes the hidden old result once the new one exists.
    pub fn forget_aside(&self, artifact: Artifact) -> Result<(), Failure> {
        if !self.is_written {
            return Ok(());
        }
        let old = self.hidden(artifact.folder());
        remove_folder(&old).map_err(|error| Failure::file("remove", &old, error))
    }

    fn holds_run(&self) -> bool {
        TRACES.iter().any(|name| self.path.join(name).exists()) || !self.checkpoints().is_empty()
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub fn write_text(&self, name: &str, text: &str) -> Result<(), Failure> {
        if !self.is_written {
            return Ok(());
        }
        write_whole(&self.file(name), |out| out.write_all(text.as_bytes())).map_err(Failure::disk)
    }

    /// Steps of the complete checkpoints, ascending.
    pub fn checkpoints(&self) -> Vec<u64> {
        let Ok(entries) = fs::read_dir(&self.path) else { return vec![] };
        let mut steps: Vec<u64> = entries
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("checkpoint-")?.parse().ok())
            .collect();
        steps.sort_unstable();
        steps
    }

    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.file(&checkpoint_name(step))
    }

    /// The temporary path of a folder while it is written.
    pub fn unfinished(&self, name: &str) -> PathBuf {
        self.file(&format!(".{name}.tmp"))
    }

    /// The path of an old folder until it is removed.
    fn hidden(&self, name: &str) -> PathBuf {
        self.file(&format!(".{name}.old"))
    }

    /// Fills a folder under a temporary name and renames it to `name`, so that it is complete or absent.
    /// An existing folder of that name is replaced.
    pub fn write_folder(
        &self,
        name: &str,
        fill: impl FnOnce(&Path) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if !self.is_written {
            return Ok(());
        }
        let (target, temporary, old) = (self.file(name), self.unfinished(name), self.hidden(name));
        let failed = |error: std::io::Error| Failure::file("write", &target, error);
        remove_folder(&temporary).and_then(|()| remove_folder(&old)).map_err(failed)?;
        fs::create_dir(&temporary).map_err(failed)?;
        let filled = fill(&temporary).and_then(|()| sync_folder(&temporary).map_err(Failure::disk));
        if let Err(failure) = filled {
            // Reports the first failure, not one of the clean-up.
            let _ = fs::remove_dir_all(&temporary);
            return Err(failure);
        }
        if target.exists() {
            fs::rename(&target, &old).map_err(failed)?;
        }
        fs::rename(&temporary, &target).map_err(failed)?;
        sync_folder(&self.path).map_err(Failure::disk)?;
        remove_folder(&old).map_err(failed)
    }

    /// Removes partial files and folders that a killed run left.
    pub fn sweep(&self) -> Result<(), Failure> {
        if !self.is_written {
            return Ok(());
        }
        let Ok(entries) = fs::read_dir(&self.path) else { return Ok(()) };
        for entry in entries.flatten() {
            if is_leftover(&entry.file_name().to_string_lossy()) {
                let path = entry.path();
                let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(|error| Failure::file("remove", &path, error))?;
            }
        }
        Ok(())
    }

    /// Removes the oldest checkpoints until `keep` are left, not counting the best evaluated one. The newest always
    /// stays.
    /// A checkpoint is renamed before it is deleted, so nobody sees a partial one.
    pub fn prune_checkpoints(&self, keep: usize, best: Option<u64>) -> Result<(), Failure> {
        if !self.is_written {
            return Ok(());
        }
        for step in removable(&self.checkpoints(), keep, best) {
            let (path, hidden) = (self.checkpoint(step), self.file(".checkpoint.old"));
            let remove = || {
                remove_folder(&hidden)?;
                fs::rename(&path, &hidden)?;
                fs::remove_dir_all(&hidden)
            };
            remove().map_err(|error| Failure::file("remove", &path, error))?;
        }
        Ok(())
    }
}

/// Removes a folder if it exists.
fn remove_folder(path: &Path) -> std::io::Result<()> {
    if path.exists() { fs::remove_dir_all(path) } else { Ok(()) }
}

/// Whether a run uses this name for something that it has not finished writing or removing. A hidden old result is
/// not included: it stays until the new one exists.
fn is_leftover(name: &str) -> bool {
    let files = [
        "recipe.toml.",
        "plan.json.",
        "plan.txt.",
        "job.toml.",
        "phases.json.",
        "run.json.",
        "report.html.",
        "events.out.tfevents.",
    ];
    let hidden = name.strip_prefix('.');
    let is_folder = hidden
        .is_some_and(|name| name.starts_with("checkpoint") || name == "adapter.tmp" || name == "model.tmp");
    let is_file = hidden.is_some_and(|name| files.iter().any(|file| name.starts_with(file)));
    let ends = name.ends_with(".tmp") || name.ends_with(".old");
    name == "metrics.jsonl.tmp" || ((is_folder || is_file) && ends)
}

/// The checkpoints to remove. `steps` are ascending; the best is not counted.
fn removable(steps: &[u64], keep: usize, best: Option<u64>) -> Vec<u64> {
    let others: Vec<u64> = steps.iter().copied().filter(|step| Some(*step) != best).collect();
    let excess = others.len().saturating_sub(keep.max(1));
    others[..excess].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_the_newest_nor_the_best_is_removed() {
        assert_eq!(removable(&[1, 2, 3, 4], 2, None), [1, 2]);
        assert_eq!(removable(&[1, 2, 3, 4], 2, Some(1)), [2]);
        assert_eq!(removable(&[1, 2, 3, 4], 2, Some(4)), [1]);
        assert_eq!(removable(&[1, 2, 3, 4], 1, Some(4)), [1, 2]);
        assert_eq!(removable(&[1, 2, 3], 1, Some(1)), [2]);
        assert_eq!(removable(&[1, 2, 3], 0, None), [1, 2]);
        assert_eq!(removable(&[1, 3], 1, Some(1)), [0u64; 0]);
        assert_eq!(removable(&[1, 2], 3, Some(9)), [0u64; 0]);
        assert_eq!(removable(&[], 1, None), [0u64; 0]);
    }

    #[test]
    fn leftovers_of_a_killed_run_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            ".checkpoint-4.tmp",
            ".checkpoint.old",
            ".adapter.tmp",
            ".adapter.old",
            ".model.tmp",
            ".model.old",
            "checkpoint-3",
            ".other.tmp",
        ] {
            fs::create_dir_all(folder.path().join(name).join("inside")).unwrap();
        }
        let files = [
            ".plan.txt.123-2.tmp",
            ".events.out.tfevents.1.x.2.0.123-4.tmp",
            "metrics.jsonl.tmp",
            "plan.txt",
            ".notes.tmp",
        ];
        for name in files {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        RunDir::at(folder.path()).unwrap().sweep().unwrap();
        let mut names: Vec<String> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(
            names,
            [".adapter.old", ".model.old", ".notes.tmp", ".other.tmp", "checkpoint-3", "plan.txt"]
        );
    }
}
