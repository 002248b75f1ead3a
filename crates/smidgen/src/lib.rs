//! smidgen: fine-tuning of large language models in a smidgen of memory.

#![forbid(unsafe_code)]

mod bench;
mod commands;
mod console;
mod doctor;
mod eval;
mod export;
mod failure;
mod generate;
mod hub;
mod merge;
mod plan;
mod report;
mod rows;
mod session;
mod train;

/// What the program and the project's own tests need beyond the library: no part of its interface.
#[doc(hidden)]
pub mod internal {
    pub use crate::commands::{command, run};
    pub use crate::console::progress::Progress;
    pub use crate::console::wrap::fold;
    pub use crate::generate::stream::TextStream;
    pub use crate::merge::original::OriginalModel;
    pub use crate::merge::{MergeOptions, merge};
    pub use crate::plan::host::read_ram;
    pub use crate::plan::job::{Job, Purpose};
    pub use crate::plan::planning::{Planned, plan_job};
    pub use crate::report::command_reference::render_command_reference;
    pub use crate::report::plan_table::render_table;
    pub use crate::report::plan_texts::render_plan_texts;
    pub use crate::rows::data::{Data, Rows};
    pub use crate::session::adapters::{self, AdapterPlace};
    pub use crate::session::feed::Feed;
    pub use crate::session::logits::LogitsRun;
    pub use crate::session::weights;
    pub use crate::train::course::Course;
    pub use crate::train::free_memory::FreeMemory;
    pub use crate::train::interrupt::Interrupt;
    pub use crate::train::journal::Journal;
    pub use crate::train::outcome::{Ending, RunPolicy, Went};
    pub use crate::train::resume::{Start, adopt_products, find_start};
    pub use crate::train::run_dir::RunDir;
    pub use crate::train::trained_state;
    pub use crate::train::trainer::Trainer;
}

#[cfg(test)]
#[path = "../../smidgen-formats/tests/four_bit/mod.rs"]
pub(crate) mod four_bit;
