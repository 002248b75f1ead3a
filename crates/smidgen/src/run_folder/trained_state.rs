//! Trained tensors between device and disk: those of an adapter, or with full training those of the base model.
//!
//! The recipe decides which of the two; the code that calls these functions works with either.

use super::trained_weights::{help_write_trained, read_trained, start_trained, write_trained};
use crate::failure::Failure;
use crate::plan::artifact::Artifact;
use crate::plan::job::Job;
use crate::session::adapters::{read_adapter, save_adapter, start_adapters};
use smidgen_runtime::{Device, Executor};
use std::path::Path;

/// Fills every trained tensor with the values that training starts from.
pub fn start<D: Device>(executor: &mut Executor<D>, job: &Job) -> Result<(), Failure> {
    match Artifact::of(&job.recipe) {
        Artifact::Adapter => start_adapters(executor, job),
        Artifact::Model => start_trained(executor, &job.request, &job.model),
    }
}

/// Reads the trained tensors of a checkpoint.
pub fn read_saved<D: Device>(executor: &mut Executor<D>, job: &Job, folder: &Path) -> Result<(), Failure> {
    match Artifact::of(&job.recipe) {
        Artifact::Adapter => read_adapter(executor, &job.request, folder),
        Artifact::Model => read_trained(executor, &job.request, folder),
    }
}

/// Writes the trained tensors into a checkpoint.
pub fn save_trained<D: Device>(executor: &mut Executor<D>, job: &Job, folder: &Path) -> Result<(), Failure> {
    match Artifact::of(&job.recipe) {
        Artifact::Adapter => save_adapter(executor, job, folder),
        Artifact::Model => write_trained(executor, &job.request, folder),
    }
}

/// Takes part in gathering while another rank writes them.
pub fn help_save_trained<D: Device>(executor: &mut Executor<D>, job: &Job) -> Result<(), Failure> {
    if job.request.trained.is_empty() { Ok(()) } else { help_write_trained(executor, &job.request) }
}
