//! `run.json`: the parts of a run, at which step each began and how it ended.
//!
//! A part is what one process did with one plan. A resumed run has several, and so has a run that changed its plan
//! because free memory changed; a killed part has no end. The file adds to `metrics.jsonl` the total number of steps,
//! and which rows were measured in the same process, so that only those are compared for leaks.
//! Whether a part is running is not in the file, because it would be wrong after `kill -9`. Instead the writer of
//! `metrics.jsonl` holds a lock that the kernel releases (`logs/metrics.rs`).

use super::outcome::{Ending, RunResult};
use super::run_dir::RunDir;
use crate::failure::Failure;
use serde::{Deserialize, Serialize};
use smidgen_formats::digest::Hasher;
use smidgen_formats::json_file::{JsonFileError, read_json_file};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

pub const FILE_NAME: &str = "run.json";
/// Enough for thousands of parts.
const MAX_BYTES: u64 = 4_000_000;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    pub total_steps: u64,
    /// The hash of `recipe.toml` as the run wrote it; `None` in older runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe_sha256: Option<String>,
    pub parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    pub began_unix_s: u64,
    /// Only the process that began a part may end it.
    pub process_id: u32,
    /// Updates done before this part.
    pub first_step: u64,
    /// Peak of its plan.
    pub planned_bytes: u64,
    /// `None` while the part runs, and if it was killed.
    pub ended: Option<PartEnd>,
    /// Changes of data or model since the part before, accepted by `--accept-changes`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accepted: Vec<String>,
    /// Updates done when the part ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_step: Option<u64>,
    /// The error, if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PartEnd {
    Done,
    StoppedEarly,
    Interrupted,
    AbovePlan,
    /// Continued with another plan, in the same process.
    PlanChanged,
    Failed,
}

impl History {
    /// The history of a run folder, if it has one.
    pub fn read(folder: &Path) -> Result<Option<History>, JsonFileError> {
        let path = folder.join(FILE_NAME);
        if !path.exists() {
            return Ok(None);
        }
        read_json_file(&path, MAX_BYTES).map(Some)
    }

    /// Parts that resumed from a checkpoint in another process.
    pub fn resumes(&self) -> usize {
        let later = self.parts.iter().zip(self.parts.iter().skip(1));
        later.filter(|(before, _)| before.ended != Some(PartEnd::PlanChanged)).count()
    }
}

/// Records the recipe that is about to be written.
pub fn note_recipe(dir: &RunDir, text: &str) -> Result<(), Failure> {
    let mut history = History::read(dir.path()).ok().flatten().unwrap_or_default();
    history.recipe_sha256 = Some(sha256(text));
    write(dir, &history)
}

/// Refuses a `recipe.toml` that was changed since the run wrote it: a run continues with its `job.toml`, so the change
/// would do nothing.
pub fn refuse_edited_recipe(folder: &Path, text: &str) -> Result<(), Failure> {
    let written = History::read(folder).ok().flatten().and_then(|history| history.recipe_sha256);
    if written.is_none_or(|written| written == sha256(text)) {
        return Ok(());
    }
    let path = folder.join("recipe.toml");
    Err(Failure::recipe(format!(
        "`{}` was edited after the run wrote it, and would be ignored",
        path.display()
    ))
    .hint("`smidgen resume RUN section.key=value` changes a key of the run")
    .hint("to continue the run as it was, undo the edit or remove the file: all settings are in `job.toml`"))
}

fn sha256(text: &str) -> String {
    let mut hasher = Hasher::sha256();
    hasher.update(text.as_bytes());
    hasher.finish_hex()
}

/// Adds a part. A new run starts a new history; a resumed one continues it.
pub fn begin_part(
    dir: &RunDir,
    total_steps: u64,
    first_step: u64,
    planned_bytes: u64,
    accepted: Vec<String>,
) -> Result<(), Failure> {
    // An unreadable history does not stop a run.
    let mut history = History::read(dir.path()).ok().flatten().unwrap_or_default();
    history.total_steps = total_steps;
    let began_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    history.parts.push(Part {
        began_unix_s,
        process_id: std::process::id(),
        first_step,
        planned_bytes,
        ended: None,
        accepted,
        last_step: None,
        message: None,
    });
    write(dir, &history)
}

/// Ends the last part because the run continues with another plan.
pub fn end_plan(dir: &RunDir, step: u64) -> Result<(), Failure> {
    end_part(dir, PartEnd::PlanChanged, Some(step), None)
}

/// Ends the last part of this process, if one began.
pub fn end_run(dir: &RunDir, went: &Result<RunResult, Failure>) -> Result<(), Failure> {
    match went {
        Ok(went) => {
            let ended = match went.outcome.ending {
                Ending::Done => PartEnd::Done,
                Ending::StoppedEarly => PartEnd::StoppedEarly,
                Ending::Interrupted => PartEnd::Interrupted,
                Ending::Exceeded { .. } => PartEnd::AbovePlan,
                Ending::MemoryMoved { .. } => PartEnd::PlanChanged,
            };
            end_part(dir, ended, Some(went.outcome.steps), None)
        }
        Err(failure) => end_part(dir, PartEnd::Failed, None, Some(failure.message.clone())),
    }
}

/// Ends the last part of a run that was killed after everything was saved. Returns whether there was one to end.
pub fn end_killed(dir: &RunDir, ended: PartEnd, last_step: u64) -> Result<bool, Failure> {
    let Ok(Some(mut history)) = History::read(dir.path()) else { return Ok(false) };
    let Some(part) = history.parts.last_mut().filter(|part| part.ended.is_none()) else { return Ok(false) };
    (part.ended, part.last_step) = (Some(ended), Some(last_step));
    write(dir, &history).map(|()| true)
}

fn end_part(
    dir: &RunDir,
    ended: PartEnd,
    last_step: Option<u64>,
    message: Option<String>,
) -> Result<(), Failure> {
    let Ok(Some(mut history)) = History::read(dir.path()) else { return Ok(()) };
    let is_own = |part: &&mut Part| part.ended.is_none() && part.process_id == std::process::id();
    let Some(part) = history.parts.last_mut().filter(is_own) else { return Ok(()) };
    (part.ended, part.last_step, part.message) = (Some(ended), last_step, message);
    write(dir, &history)
}

fn write(dir: &RunDir, history: &History) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(history).map_err(Failure::disk)?;
    dir.write_text(FILE_NAME, &format!("{text}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let dir = RunDir::at(folder.path()).unwrap();
        assert_eq!(History::read(folder.path()).unwrap(), None);
        end_plan(&dir, 3).unwrap();
        assert!(!folder.path().join(FILE_NAME).exists());
        // Killed; resumed and replanned on the way; failed.
        begin_part(&dir, 90, 0, 5, vec![]).unwrap();
        begin_part(&dir, 90, 10, 5, vec![]).unwrap();
        end_plan(&dir, 20).unwrap();
        begin_part(&dir, 100, 20, 4, vec![]).unwrap();
        end_run(&dir, &Err(Failure::training("step 31 is not finite"))).unwrap();
        // No part has begun since.
        end_plan(&dir, 99).unwrap();
        let history = History::read(folder.path()).unwrap().unwrap();
        assert_eq!((history.total_steps, history.resumes()), (100, 1));
        let ends: Vec<_> =
            history.parts.iter().map(|part| (part.first_step, part.ended, part.last_step)).collect();
        let expected =
            [(0, None, None), (10, Some(PartEnd::PlanChanged), Some(20)), (20, Some(PartEnd::Failed), None)];
        assert_eq!(ends, expected);
        assert_eq!(history.parts[2].message.as_deref(), Some("step 31 is not finite"));
    }

    #[test]
    fn an_unreadable_file_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let dir = RunDir::at(folder.path()).unwrap();
        dir.write_text(FILE_NAME, "{").unwrap();
        assert!(History::read(folder.path()).is_err());
        begin_part(&dir, 9, 0, 5, vec![]).unwrap();
        assert_eq!(History::read(folder.path()).unwrap().unwrap().parts.len(), 1);
    }
}
