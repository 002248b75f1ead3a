//! Saves what was trained: checkpoints during a run, and at its end the folder `adapter/` or `model/`.
//!
//! Only one rank writes. The others take part where a tensor is divided over ranks and has to be gathered.

use super::checksums::write_checksums;
use super::journal::Journal;
use super::monitor;
use super::phases::Phase;
use super::resume;
use super::run_dir::checkpoint_name;
use super::standing::Standing;
use super::trained_state;
use super::trained_weights;
use super::trainer::Trainer;
use super::trainer_state::{Moment, write_trainer_state};
use crate::console::colour::WARNING;
use crate::console::progress::Progress;
use crate::console::saving::Saving;
use crate::failure::Failure;
use crate::plan::disk::{Footprint, with_room};
use crate::plan::job::Job;
use crate::plan::product::Product;
use crate::rows::data::Data;
use crate::session::adapters;
use smidgen_data::batch::BatchPlan;
use smidgen_formats::tokenizer::copy::copy_tokenizer;
use smidgen_ir::{LeafKind, PlannedValue};
use smidgen_runtime::Device;
use std::path::Path;

impl<D: Device> Trainer<'_, D> {
    pub(super) fn save_checkpoint(
        &mut self,
        batches: &BatchPlan,
        step: u64,
        journal: &mut Journal,
        progress: &Progress,
        footprint: &Footprint,
    ) -> Result<(), Failure> {
        journal.sync()?;
        self.enter(Phase::Save);
        let (name, bytes) = (checkpoint_name(step), footprint.checkpoint_bytes);
        let saving = Saving::begin(progress, "a checkpoint", self.dir.unfinished(&name), bytes);
        self.write_checkpoint(batches, step, journal)
            .map_err(|failure| with_room(failure, self.dir.path(), "a checkpoint", bytes))?;
        drop(saving);
        self.enter(Phase::Train);
        Ok(())
    }

    fn write_checkpoint(
        &mut self,
        batches: &BatchPlan,
        step: u64,
        journal: &mut Journal,
    ) -> Result<(), Failure> {
        self.standing.note_saved(step);
        let Trainer { executor, job, dir, policy, standing, loss_scale, made_of, .. } = self;
        if !dir.is_written() {
            return resume::help_write_state(executor, job);
        }
        let moment = moment(job, batches, step, *standing, false, dir.path());
        dir.write_folder(&checkpoint_name(step), |folder| {
            let totals = &journal.history().totals;
            resume::write_state(executor, job, policy, step, standing, *loss_scale, made_of, totals, folder)?;
            write_prompt(job, folder)?;
            write_trainer_state(folder, &moment, journal.history())?;
            write_checksums(folder)
        })?;
        self.prune_checkpoints()
    }

    pub(super) fn prune_checkpoints(&self) -> Result<(), Failure> {
        let best = self.standing.best_saved.map(|best| best.step);
        self.dir.prune_checkpoints(self.job.recipe.train.keep, best)
    }

    /// Writes `adapter/` or `model/`: the last state, or with early stopping the best evaluated one.
    pub(super) fn save_final(
        mut self,
        batches: &BatchPlan,
        step: u64,
        journal: &mut Journal,
        progress: &Progress,
        footprint: &Footprint,
    ) -> Result<(), Failure> {
        journal.sync()?;
        self.enter(Phase::Save);
        let Footprint { product, product_bytes, .. } = *footprint;
        let dir = self.dir.clone();
        let _saving = Saving::begin(progress, product.one(), dir.unfinished(product.folder()), product_bytes);
        self.write_final(product, batches, step, journal, progress)
            .map_err(|failure| with_room(failure, dir.path(), product.one(), product_bytes))
    }

    fn write_final(
        self,
        product: Product,
        batches: &BatchPlan,
        step: u64,
        journal: &mut Journal,
        progress: &Progress,
    ) -> Result<(), Failure> {
        let Trainer { mut executor, job, dir, standing, mut meter, .. } = self;
        // All ranks read and gather tensors that are divided over them.
        let is_divided = |(_, value): (_, &PlannedValue)| value.role.shard().is_some();
        if !dir.is_written() && !executor.plan().leaves(LeafKind::Adapter).any(is_divided) {
            return Ok(());
        }
        if job.recipe.train.early_stop > 0
            && let Some(best) = standing.best_saved.filter(|best| best.step != step)
        {
            trained_state::read_saved(&mut executor, job, &dir.checkpoint(best.step))?;
        }
        if !dir.is_written() {
            return trained_weights::help_write_model(&mut executor, job);
        }
        let moment = moment(job, batches, step, standing, true, dir.path());
        let mut warnings = Vec::new();
        dir.write_folder(product.folder(), |folder| {
            match product {
                Product::Adapter => adapters::save_adapter(&mut executor, job, folder)?,
                Product::Model => trained_weights::write_model(&mut executor, job, folder)?,
            }
            if let Some(meter) = &mut meter {
                meter.sample(&monitor::measure(executor.device_mut()));
            }
            // The arena is freed first: the plan does not count a tokenizer in addition to it.
            drop(executor);
            match product {
                // A missing tokenizer is only a warning: the adapter is what counts.
                Product::Adapter => warnings.extend(
                    copy_tokenizer(&job.model, folder)
                        .err()
                        .map(|error| format!("the tokenizer was not saved with the adapter: {error}")),
                ),
                Product::Model => warnings = trained_weights::write_beside(&job.model, folder)?,
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
    batches: &BatchPlan,
    step: u64,
    standing: Standing,
    is_end: bool,
    run_folder: &'a Path,
) -> Moment<'a> {
    let Data::Rows(rows) = &job.data else { unreachable!("training without data is refused before") };
    Moment {
        step,
        epoch: batches.epochs_after(step),
        total_steps: batches.total_steps(),
        epochs: batches.epochs(),
        samples: rows.train.len(),
        settings: &job.recipe.train,
        standing,
        is_end,
        run_folder,
    }
}

/// Saves how prompts were written, so that generation with the result can write them in the same way.
fn write_prompt(job: &Job, folder: &Path) -> Result<(), Failure> {
    let Data::Rows(rows) = &job.data else { return Ok(()) };
    rows.prompt.iter().try_for_each(|prompt| prompt.write(folder).map_err(Failure::writing))
}
