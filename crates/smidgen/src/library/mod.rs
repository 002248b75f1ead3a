//! The calls of the library: plan, train and generate. They print nothing.
//!
//! `lib.rs` lists the public items. Commands are built from the same pieces and add arguments and output.
//! Left out: recipes (`smidgen-recipe`) and jobs (`plan/job.rs`), which are public as they are.

pub mod generate;
pub mod plan;
pub mod train;
