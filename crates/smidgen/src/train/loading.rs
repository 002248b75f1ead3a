//! Loads a trainer: base weights, then the state that training starts from.
//!
//! That state is the initial adapter, or the trained tensors and the optimizer state of a checkpoint.

use super::loss_scale::LossScale;
use super::made_of::MadeOf;
use super::resume::{self, Start};
use super::run_dir::RunDir;
use super::standing::Standing;
use super::trained_state;
use super::trainer::{Trainer, measurable_peak};
use crate::failure::Failure;
use crate::plan::job::Job;
use crate::session::feed::Feed;
use crate::session::weights::{self, WeightHashes, clear};
use smidgen_data::micro_batch::{MicroBatch, Packing};
use smidgen_data::share::Shares;
use smidgen_ir::{Entry, LeafKind, Plan, Policy};
use smidgen_runtime::{Device, Executor};
use std::time::Instant;

impl<'a, D: Device> Trainer<'a, D> {
    /// Reserves the memory of the plan on the device and fills it.
    pub fn load(
        job: &'a Job,
        plan: Plan,
        device: D,
        dir: RunDir,
        policy: Policy,
        start: &Start,
    ) -> Result<Trainer<'a, D>, Failure> {
        Trainer::fill(job, Executor::load(plan, device)?, dir, policy, start, || Ok(()))
    }

    /// Fills memory that is already reserved: weights, adapters, optimizer state. `are_loaded` returns once the other
    /// ranks have loaded the weights that they share with this one.
    pub fn fill(
        job: &'a Job,
        mut executor: Executor<D>,
        dir: RunDir,
        policy: Policy,
        start: &Start,
        are_loaded: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<Trainer<'a, D>, Failure> {
        let feed = Feed::of(executor.plan(), job.recipe.train.seed);
        let extent = executor.plan().extent;
        let arena_peak_bytes = executor.plan().peak_live_bytes() as u64;
        let threads = job.request.threads;
        let mut weight_hashes = WeightHashes::new();
        // Only the first rank writes checkpoints, which contain the hashes.
        match job.world.is_first() {
            true => weight_hashes = weights::load_hashed_weights(&mut executor, &job.model, threads)?,
            false => weights::load_weights(&mut executor, &job.model, threads)?,
        }
        are_loaded()?;
        for kind in [LeafKind::Gradient, LeafKind::Moment, LeafKind::State] {
            clear(&mut executor, kind)?;
        }
        let mut standing = Standing::default();
        match start {
            Start::Beginning => trained_state::start(&mut executor, job)?,
            Start::Checkpoint { folder, standing: saved, .. } => {
                resume::read_state(&mut executor, job, folder)?;
                standing = *saved;
            }
        }
        executor.run(Entry::Refresh, &extent)?;
        Ok(Trainer {
            executor,
            job,
            dir,
            policy,
            team: None,
            is_stopping: false,
            feed,
            micro_batch: MicroBatch::with_capacity(extent),
            packing: Packing::default(),
            shares: Shares::default(),
            extents: Vec::new(),
            spare_samples: Vec::new(),
            pending: None,
            standing,
            loss_scale: start.loss_scale().or(LossScale::of(job.request.precision)),
            liveness: None,
            weight_hashes,
            made_of: MadeOf::default(),
            is_monitored: true,
            meter: None,
            limit_bytes: None,
            exceeded_bytes: None,
            watch: None,
            arena_peak_bytes,
            last_row: Instant::now(),
        })
    }

    /// Stops and saves if measured memory exceeds the planned peak by more than the measuring error.
    pub fn with_planned_peak(self, peak_bytes: u64) -> Trainer<'a, D> {
        Trainer { limit_bytes: Some(measurable_peak(peak_bytes)), ..self }
    }
}
