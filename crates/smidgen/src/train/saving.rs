//! Saves what was trained: checkpoints during a run, and at its end the folder `adapter/` or `model/`.
//!
//! Only one rank writes. The others take part where a tensor is divided over ranks and has to be gathered.

use super::trainer::Trainer;
use crate::console::colour::WARNING;
use crate::console::progress::Progress;
use crate::console::saving::Saving;
use crate::failure::Failure;
use crate::logs::evaluations::Evaluations;
use crate::logs::journal::Journal;
use crate::logs::monitor;
use crate::logs::trainer_state::{Moment, write_trainer_state};
use crate::plan::artifact::Artifact;
use crate::plan::disk::{Footprint, with_room};
use crate::plan::job::Job;
use crate::run_folder::checksums::write_checksums;
use crate::run_folder::resume::{self, State};
use crate::run_folder::run_dir::checkpoint_name;
use crate::run_folder::{trained_state, trained_weights};
use crate::session::adapters;
use smidgen_formats::tokenizer::copy::copy_tokenizer;
use smidgen_ir::{LeafKind, PlannedValue};
use smidgen_runtime::Device;
use std::path::Path;

impl<D: Device> Trainer<'_, D> {
    pub(super) fn save_checkpoint(
        &mut self,
        step: u64,
        journal: &mut Journal,
        progress: &Progress,
        footprint: &Footprint,
    ) -> Result<(), Failure> {
        journal.sync()?;
        let (name, bytes) = (checkpoint_name(step), footprint.checkpoint_bytes);
        let _saving = Saving::begin(progress, "a checkpoint", self.dir.unfinished(&name), bytes);
        self.write_checkpoint(step, journal)
            .map_err(|failure| with_room(failure, self.dir.path(), "a checkpoint", bytes))
    }

    fn write_checkpoint(&mut self, step: u64, journal: &Journal) -> Result<(), Failure> {
        self.evaluations.note_saved(step);
        let Trainer { steps, dir, evaluations, contents, .. } = &mut *self;
        let job = steps.job();
        if !dir.is_written() {
            return resume::help_write_state(&mut steps.executor, job);
        }
        let state = State {
            step,
            policy: steps.policy().clone(),
            evaluations: *evaluations,
            compute: job.arithmetic.name(),
            loss_scale: steps.loss_scale(),
            contents: Some(contents.clone()),
            totals: Some(journal.history().totals),
        };
        let moment = moment(job, step, *evaluations, false, dir.path());
        dir.write_folder(&checkpoint_name(step), |folder| {
            resume::write_state(&mut steps.executor, job, state, folder)?;
            steps.objective.iter().try_for_each(|objective| objective.write_before(folder))?;
            steps.rollouts.iter().try_for_each(|rollouts| rollouts.write(folder))?;
            write_prompt(job, folder)?;
            write_trainer_state(folder, &moment, journal.history())?;
            write_checksums(folder)
        })?;
        self.prune_checkpoints()
    }

    pub(super) fn prune_checkpoints(&self) -> Result<(), Failure> {
        let best = self.evaluations.best_saved.map(|best| best.step);
        self.dir.prune_checkpoints(self.steps.job().recipe.train.keep, best)
    }

    /// Writes `adapter/` or `model/`: the last state, or with early stopping the best evaluated one.
    pub(super) fn save_result(
        self,
        step: u64,
        journal: &mut Journal,
        progress: &Progress,
        footprint: &Footprint,
    ) -> Result<(), Failure> {
        journal.sync()?;
        let Footprint { artifact, artifact_bytes, .. } = *footprint;
        let dir = self.dir.clone();
        let _saving =
            Saving::begin(progress, artifact.one(), dir.unfinished(artifact.folder()), artifact_bytes);
        self.write_result(artifact, step, journal, progress)
            .map_err(|failure| with_room(failure, dir.path(), artifact.one(), artifact_bytes))
    }

    fn write_result(
        self,
        artifact: Artifact,
        step: u64,
        journal: &Journal,
        progress: &Progress,
    ) -> Result<(), Failure> {
        let Trainer { steps, dir, evaluations, mut memory, .. } = self;
        let job = steps.job();
        let mut executor = steps.executor;
        // All ranks read and gather tensors that are divided over them.
        let is_divided = |(_, value): (_, &PlannedValue)| value.role.shard().is_some();
        if !dir.is_written() && !executor.plan().leaves(LeafKind::Adapter).any(is_divided) {
            return Ok(());
        }
        if job.recipe.train.early_stop > 0
            && let Some(best) = evaluations.best_saved.filter(|best| best.step != step)
        {
            trained_state::read_saved(&mut executor, job, &dir.checkpoint(best.step))?;
        }
        if !dir.is_written() {
            return trained_weights::help_write_model(&mut executor, job);
        }
        let moment = moment(job, step, evaluations, true, dir.path());
        let mut warnings = Vec::new();
        dir.write_folder(artifact.folder(), |folder| {
            match artifact {
                Artifact::Adapter => adapters::save_adapter(&mut executor, job, folder)?,
                Artifact::Model => trained_weights::write_model(&mut executor, job, folder)?,
            }
            if let Some(meter) = &mut memory.meter {
                meter.sample(&monitor::measure(executor.device_mut()));
            }
            // The arena is freed first: the plan does not count a tokenizer in addition to it.
            drop(executor);
            match artifact {
                // A missing tokenizer is only a warning: the adapter is what counts.
                Artifact::Adapter => warnings.extend(
                    copy_tokenizer(&job.model, folder)
                        .err()
                        .map(|error| format!("the tokenizer was not saved with the adapter: {error}")),
                ),
                Artifact::Model => warnings = trained_weights::write_beside(&job.model, folder)?,
            }
            write_prompt(job, folder)?;
            write_trainer_state(folder, &moment, journal.history())?;
            write_checksums(folder)
        })?;
        for warning in warnings {
            progress.say(&format!("{WARNING} {warning}"));
        }
        Ok(())
    }
}

/// The state of the run for `trainer_state.json`.
fn moment<'a>(
    job: &'a Job,
    step: u64,
    evaluations: Evaluations,
    is_end: bool,
    run_folder: &'a Path,
) -> Moment<'a> {
    let rows = job.rows();
    Moment {
        step,
        epoch: rows.batches.epochs_after(step),
        total_steps: rows.batches.total_steps(),
        epochs: rows.batches.epochs(),
        samples: rows.train.len(),
        settings: &job.recipe.train,
        evaluations,
        is_end,
        run_folder,
    }
}

/// Saves how prompts were written, so that generation with the result can write them in the same way.
fn write_prompt(job: &Job, folder: &Path) -> Result<(), Failure> {
    job.rows().prompt.iter().try_for_each(|prompt| prompt.write(folder).map_err(Failure::writing))
}
