//! Disk space: how much a run will write, whether it fits, and the numbers for a failed write.
//!
//! The large files of a checkpoint are tensors of the plan, so their size is known before the first step; the other
//! files have a fixed bound. `metrics.jsonl` is small and not counted.

use crate::failure::{Failure, FailureKind};
use crate::plan::artifact::{Artifact, saves_end};
use crate::plan::job::Job;
use crate::plan::model::model_bytes;
use smidgen_formats::tokenizer::copy::tokenizer_bytes;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{LeafKind, Plan};
use smidgen_recipe::Recipe;
use std::path::Path;

/// Bound on headers, configs and the job of a checkpoint with a thousand adapted linear layers.
const SMALL_FILES_BYTES: u64 = 1 << 20;
/// Bytes of a row of `trainer_state.json`, and its maximum of rows.
const HISTORY_ROW_BYTES: u64 = 200;
const HISTORY_ROWS: u64 = 1500;

/// Bytes that a run writes to disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    pub checkpoint_bytes: u64,
    /// The final adapter or model.
    pub artifact: Artifact,
    pub artifact_bytes: u64,
    /// Checkpoints on disk at the same time, including the one that is being written.
    pub checkpoints: u64,
}

impl Footprint {
    pub fn of(plan: &Plan, job: &Job, total_steps: u64) -> Footprint {
        let bytes_of = |kind: LeafKind| -> u64 {
            plan.leaves(kind).map(|(_, value)| value.ty.bytes(&plan.extent) as u64).sum()
        };
        let small_files = SMALL_FILES_BYTES + HISTORY_ROW_BYTES * total_steps.min(HISTORY_ROWS);
        let artifact = Artifact::of(&job.recipe);
        let tokenizer_bytes = tokenizer_bytes(&job.model, job.request.spec.vocabulary);
        let trained_bytes = bytes_of(LeafKind::Adapter) + small_files;
        Footprint {
            checkpoint_bytes: trained_bytes + bytes_of(LeafKind::Moment),
            artifact,
            artifact_bytes: tokenizer_bytes
                + match artifact {
                    Artifact::Adapter => trained_bytes,
                    Artifact::Model => model_bytes(&job.request, &job.model) + small_files,
                },
            checkpoints: checkpoints_at_once(&job.recipe, total_steps),
        }
    }

    pub fn total_bytes(&self) -> u64 {
        self.checkpoints * self.checkpoint_bytes + self.artifact_bytes
    }
}

fn checkpoints_at_once(recipe: &Recipe, total_steps: u64) -> u64 {
    let train = &recipe.train;
    // The last one may be shorter than `save_every` after the one before.
    let regular = match train.save_every {
        _ if !saves_end(recipe) => 0,
        0 => total_steps.min(1),
        save_every => total_steps.div_ceil(save_every),
    };
    // Any evaluation may be the best so far, and its checkpoint is kept in addition to `keep`.
    let evaluations = total_steps.div_ceil(train.eval_every.max(1));
    let (best, one_more) = if train.eval_every > 0 { (evaluations, 1) } else { (0, 0) };
    let kept = (train.keep as u64).max(1) + one_more;
    (regular + best).min(kept + 1)
}

/// Refuses a run that does not fit on the disk, before anything is written.
pub fn check_room(folder: &Path, checkpoints_there: u64, footprint: &Footprint) -> Result<(), Failure> {
    let Some(free) = free_bytes(folder) else { return Ok(()) };
    refuse_without_room(folder, footprint, checkpoints_there, free)
}

fn refuse_without_room(
    path: &Path,
    footprint: &Footprint,
    checkpoints_there: u64,
    free: u64,
) -> Result<(), Failure> {
    let to_come = footprint.checkpoints.saturating_sub(checkpoints_there);
    let needed = to_come * footprint.checkpoint_bytes + footprint.artifact_bytes;
    if needed <= free {
        return Ok(());
    }
    let checkpoints = match to_come {
        0 => String::new(),
        1 => format!("a checkpoint of {} and ", format_bytes(footprint.checkpoint_bytes)),
        _ => format!("{to_come} checkpoints of {} and ", format_bytes(footprint.checkpoint_bytes)),
    };
    Err(Failure::disk(format!(
        "the disk of `{}` has {} free, the run needs {}: {checkpoints}{} of {}",
        path.display(),
        format_bytes(free),
        format_bytes(needed),
        footprint.artifact.one(),
        format_bytes(footprint.artifact_bytes)
    ))
    .hint("free some space, lower `train.keep`, or choose an `output.dir` on another disk"))
}

/// Adds the needed and the free space to a failed write.
pub fn with_room(failure: Failure, path: &Path, what: &str, needed_bytes: u64) -> Failure {
    let Some(free) = free_bytes(path).filter(|_| failure.kind == FailureKind::Disk) else { return failure };
    let (needed, free) = (format_bytes(needed_bytes), format_bytes(free));
    failure.detail(format!("{what} needs {needed}, the disk of `{}` has {free} free", path.display())).hint(
        "earlier checkpoints are intact: free some space, then continue from the last one with `--resume`",
    )
}

/// Free bytes on the disk of a path, which need not exist yet.
#[cfg(unix)]
pub fn free_bytes(path: &Path) -> Option<u64> {
    let absolute = std::path::absolute(path).ok()?;
    let there = absolute.ancestors().find(|ancestor| ancestor.exists())?;
    let status = nix::sys::statvfs::statvfs(there).ok()?;
    // These are narrower than 64 bits on some systems.
    #[allow(clippy::useless_conversion)]
    let (blocks, block_bytes) = (u64::from(status.blocks_available()), u64::from(status.fragment_size()));
    blocks.checked_mul(block_bytes)
}

#[cfg(not(unix))]
pub fn free_bytes(_path: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOOTPRINT: Footprint = Footprint {
        checkpoint_bytes: 3 << 20,
        artifact: Artifact::Adapter,
        artifact_bytes: 1 << 20,
        checkpoints: 4,
    };

    #[test]
    fn room_is_counted_to_the_byte() {
        let check = |there, free| refuse_without_room(Path::new("runs/x"), &FOOTPRINT, there, free);
        assert!(check(0, 13 << 20).is_ok());
        assert!(check(3, 4 << 20).is_ok());
        assert!(check(9, 1 << 20).is_ok());
        let said = check(0, (13 << 20) - 1).unwrap_err().to_string();
        let words = "the disk of `runs/x` has 13.00 MiB free, the run needs 13.00 MiB: 4 checkpoints of 3.00 MiB and an adapter of 1.00 MiB";
        assert!(said.contains(words), "{said}");
        let said = check(3, 0).unwrap_err().to_string();
        assert!(said.contains("needs 4.00 MiB: a checkpoint of 3.00 MiB and an adapter"), "{said}");
    }

    #[test]
    fn checkpoints_at_once_follow_the_recipe() {
        let recipe = |save_every, keep, eval_every, early_stop| {
            let text = format!(
                "[model]\npath = \"m\"\n[data]\ntrain = \"t\"\neval = \"e\"\n[output]\ndir = \"o\"\n[train]\nsave_every = {save_every}\nkeep = {keep}\neval_every = {eval_every}\nearly_stop = {early_stop}\n"
            );
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("recipe.toml");
            std::fs::write(&path, text).unwrap();
            smidgen_recipe::read_recipe(&path, &[]).unwrap()
        };
        // Only the end; saved once; one more than is kept; the newest, the best and the one being written.
        assert_eq!(checkpoints_at_once(&recipe(0, 3, 0, 0), 100), 1);
        assert_eq!(checkpoints_at_once(&recipe(40, 3, 0, 0), 100), 3);
        assert_eq!(checkpoints_at_once(&recipe(100, 3, 0, 0), 100), 1);
        assert_eq!(checkpoints_at_once(&recipe(1, 3, 0, 0), 100), 4);
        assert_eq!(checkpoints_at_once(&recipe(1, 1, 10, 0), 100), 3);
        assert_eq!(checkpoints_at_once(&recipe(0, 3, 50, 1), 100), 3);
        assert_eq!(checkpoints_at_once(&recipe(0, 3, 0, 0), 0), 0);
    }

    #[test]
    fn free_space_is_that_of_the_nearest_existing_folder() {
        let folder = tempfile::tempdir().unwrap();
        let there = free_bytes(folder.path());
        assert!(there.is_none_or(|bytes| bytes > 0));
        assert_eq!(there.is_some(), free_bytes(&folder.path().join("not/yet/there")).is_some());
    }
}
