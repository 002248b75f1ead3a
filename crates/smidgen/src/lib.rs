//! Fine-tuning of large language models in a smidgen of memory.
//!
//! A [`Recipe`] says what to train. A [`Job`] is made from it: it has read and checked everything that a run needs. A
//! job can be planned, which predicts memory and speed without a device or weights, and trained:
//!
//! ```no_run
//! use smidgen::{Budget, Failure, Job, ModelPath, Purpose, Recipe, plan};
//!
//! # fn main() -> Result<(), Failure> {
//! let mut recipe = Recipe::new("hf:Qwen/Qwen2.5-7B-Instruct".parse()?);
//! recipe.set_rank(32);
//! recipe.memory.budget = Budget::Bytes(6 << 30);
//! let plan = plan(&Job::prepare(recipe, Purpose::Plan)?)?;
//! println!("{plan}");
//! # Ok(())
//! # }
//! ```
//!
//! [`train`] runs a job, on files that the recipe names or on rows in memory, and calls back after each step:
//!
//! ```no_run
//! # use smidgen::{Failure, Job, MemoryRows, Purpose, Recipe, TrainOptions, train};
//! # use std::ops::ControlFlow;
//! # fn fine_tune(recipe: Recipe, rows: MemoryRows) -> Result<(), Failure> {
//! let job = Job::prepare_rows(recipe, &rows, Purpose::Train)?;
//! let run = train(job, TrainOptions::default().on_step(|row| {
//!     println!("step {}: loss {:.4}", row.step, row.loss);
//!     ControlFlow::Continue(())
//! }))?;
//! println!("adapter in {}", run.product.display());
//! # Ok(())
//! # }
//! ```
//!
//! [`Session::open`] loads a model with an [`Adapter`], and [`generate`] answers prompts. Every error is a
//! [`Failure`], whose kind says what went wrong. The three programs in `examples/` are complete.
//!
//! The public items are those listed here. The crate's modules are private. The hidden `internal` module is for the
//! `smidgen` program and the project's own tests, and changes without notice. It re-exports single items instead of
//! making modules public, so that the compiler still reports unused code.

#![forbid(unsafe_code)]

mod bench;
mod commands;
mod console;
mod doctor;
mod eval;
mod export;
mod failure;
mod generate;
mod library;
mod logs;
mod machine;
mod merge;
mod model_files;
mod plan;
mod ranks;
mod report;
mod rewards;
mod rows;
mod run_folder;
mod serve;
mod session;
mod train;

pub use failure::{Failure, FailureKind};
pub use generate::sampler::Sampling;
pub use generate::stop::StoppedBy;
pub use library::generate::{Adapter, Answer, GenerateOptions, Session, SessionOptions, generate};
pub use library::plan::{Plan, plan};
pub use library::train::{Run, TrainOptions, train};
pub use logs::metrics::MetricsRow;
pub use plan::job::{Job, Purpose};
pub use rows::sets::MemoryRows;
pub use run_folder::outcome::Ending;
#[doc(inline)]
pub use smidgen_recipe::{
    AdapterKind, BaseFormat, Batch, Budget, Compute, DeviceChoice, Length, ModelPath, ProfileChoice, Recipe,
    RecipePath, read_recipe,
};

/// For the program and the project's own tests; not part of the interface.
#[doc(hidden)]
pub mod internal {
    pub use crate::commands::{command, run};
    pub use crate::console::colour::plain;
    pub use crate::console::progress::Progress;
    pub use crate::console::wrap::fold;
    pub use crate::generate::stream::TextStream;
    pub use crate::logs::journal::Journal;
    pub use crate::machine::host::read_ram;
    pub use crate::merge::{MergeOptions, merge};
    pub use crate::model_files::original::OriginalModel;
    pub use crate::plan::facts::MemoryFacts;
    pub use crate::plan::job::{Job, Purpose};
    pub use crate::plan::planning::{Planned, plan_job};
    pub use crate::report::command_reference::render_command_reference;
    pub use crate::report::plan_table::render_table;
    pub use crate::rows::data::{Data, Rows};
    pub use crate::run_folder::contents::Contents;
    pub use crate::run_folder::outcome::{Ending, RunResult};
    pub use crate::run_folder::resume::{Checkpoint, find_checkpoint, use_stored_algorithms};
    pub use crate::run_folder::run_dir::RunDir;
    pub use crate::run_folder::trained_state;
    pub use crate::session::adapters::{self, AdapterPlace};
    pub use crate::session::feed::Feed;
    pub use crate::session::logits::LogitsRun;
    pub use crate::session::weights;
    pub use crate::train::free_memory::FreeMemory;
    pub use crate::train::interrupt::Interrupt;
    pub use crate::train::replanning::{Ready, Run, RunOptions};
    pub use crate::train::trainer::Trainer;
    pub use smidgen_runtime::comm::mpi_places::find_mpiexec;
}

#[cfg(test)]
#[path = "../../smidgen-formats/tests/four_bit/mod.rs"]
pub(crate) mod four_bit;
