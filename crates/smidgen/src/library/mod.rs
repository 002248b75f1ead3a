//! The calls of the library: a plan, a run and a generation from values, and nothing printed.
//!
//! `lib.rs` lists what is public; here is what a command line does around the other folders, in one call each. Commands
//! use the same pieces and add arguments and output.
//! Left out: recipes (`smidgen-recipe`) and jobs (`plan/job.rs`), which are public as they are.

pub mod generate;
pub mod plan;
pub mod train;
