//! The run folder: which files a run writes, and whether a folder already holds a run.
//!
//! Nothing is overwritten: without `--resume` a folder that holds a run is refused. A checkpoint, the final adapter and
//! the final model are written under a temporary name and renamed, so they are complete or absent.

use crate::failure::Failure;
use crate::plan::product::Product;
use smidgen_formats::whole_file::{sync_folder, write_whole};
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
pub struct RunDir {
    path: PathBuf,
    /// Of several ranks, one writes; the others read, and whatever they would write is skipped.
    is_written: bool,
}

/// The file by which a run owns its folder.
pub const LOCK_FILE: &str = ".lock";

/// Files and folders of a run; any of them marks a run folder.
const TRACES: [&str; 5] = ["job.toml", "metrics.jsonl", "plan.json", "recipe.toml", "adapter"];

/// The folder of the checkpoint after a step.
pub fn checkpoint_name(step: u64) -> String {
    format!("checkpoint-{step}")
}

impl RunDir {
    /// The folder of a run, which need not exist yet. Nothing is written.
    pub fn at(path: &Path) -> Result<RunDir, Failure> {
        if path.exists() && !path.is_dir() {
            return Err(Failure::disk(format!("`{}` is a file, not a folder", path.display()))
                .hint("choose another `output.dir`"));
        }
        Ok(RunDir { path: path.to_path_buf(), is_written: true })
    }

    /// The same for a process that leaves the writing to another one.
    pub fn only_read(self) -> RunDir {
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
        let model = self.file(Product::Model.folder());
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

    /// Whether the folder holds nothing yet, its lock aside.
    pub fn is_unwritten(&self) -> bool {
        self.entries().next().is_none()
    }

    /// Removes everything in the folder but its lock, and the folder where nothing is left.
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

    /// Hides the old result of a run that continues, so that it is not mistaken for the new one.
    /// Writing the new result removes it.
    pub fn set_aside(&self, product: Product) -> Result<(), Failure> {
        if !self.is_written {
            return Ok(());
        }
        let (made, old) = (self.file(product.folder()), self.file(&format!(".{}.old", product.folder())));
        let hide = || {
            if !made.exists() {
                return Ok(());
            }
            if old.exists() {
                fs::remove_dir_all(&old)?;
            }
            fs::rename(&made, &old)
        };
        hide().map_err(|error: std::io::Error| Failure::file("rename", &made, error))
    }

    /// Removes a hidden result whose successor exists.
    pub fn forget_aside(&self, product: Product) -> Result<(), Failure> {
        if !self.is_written {
            return Ok(());
        }
        let old = self.file(&format!(".{}.old", product.folder()));
        match old.exists() {
            true => fs::remove_dir_all(&old).map_err(|error| Failure::file("remove", &old, error)),
            false => Ok(()),
        }
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

    /// Where a folder of that name is while it is filled.
    pub fn unfinished(&self, name: &str) -> PathBuf {
        self.file(&format!(".{name}.tmp"))
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
        let (target, temporary, old) =
            (self.file(name), self.unfinished(name), self.file(&format!(".{name}.old")));
        let failed = |error: std::io::Error| Failure::file("write", &target, error);
        for leftover in [&temporary, &old] {
            if leftover.exists() {
                fs::remove_dir_all(leftover).map_err(failed)?;
            }
        }
        fs::create_dir(&temporary).map_err(failed)?;
        let filled = fill(&temporary).and_then(|()| sync_folder(&temporary).map_err(Failure::disk));
        if let Err(failure) = filled {
            // The first failure is reported, not one of the clean-up.
            let _ = fs::remove_dir_all(&temporary);
            return Err(failure);
        }
        if target.exists() {
            fs::rename(&target, &old).map_err(failed)?;
        }
        fs::rename(&temporary, &target).map_err(failed)?;
        sync_folder(&self.path).map_err(Failure::disk)?;
        if old.exists() {
            fs::remove_dir_all(&old).map_err(failed)?;
        }
        Ok(())
    }

    /// Removes the partial files and folders that a killed run left.
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

    /// Removes the oldest checkpoints until `keep` are left in addition to the best evaluated one, but never the newest.
    /// A checkpoint is renamed before it is deleted, so that a partial one is never seen.
    pub fn prune_checkpoints(&self, keep: usize, best: Option<u64>) -> Result<(), Failure> {
        if !self.is_written {
            return Ok(());
        }
        for step in removable(&self.checkpoints(), keep, best) {
            let (path, hidden) = (self.checkpoint(step), self.file(".checkpoint.old"));
            let remove = || {
                if hidden.exists() {
                    fs::remove_dir_all(&hidden)?;
                }
                fs::rename(&path, &hidden)?;
                fs::remove_dir_all(&hidden)
            };
            remove().map_err(|error| Failure::file("remove", &path, error))?;
        }
        Ok(())
    }
}

/// Names under which a run writes before it renames, and hides before it removes. A hidden result is
/// not among them: it is removed when its successor exists.
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

/// Which of the ascending steps are removed; the best does not count.
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
    fn what_a_killed_run_left_is_swept() {
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
