//! smidgen: fine-tuning of large language models in a smidgen of memory.
//!
//! This crate is the outside world: recipes, models and data on disk, the training loop, reports and the
//! command line. What a run computes is compiled by `smidgen-compile` and run by `smidgen-runtime`.

#![forbid(unsafe_code)]

pub mod bench;
pub mod commands;
pub mod console;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod failure;
pub mod generate;
pub mod hub;
pub mod merge;
pub mod plan;
pub mod report;
pub mod rows;
pub mod session;
pub mod train;

#[cfg(test)]
#[path = "../../smidgen-formats/tests/four_bit/mod.rs"]
pub(crate) mod four_bit;
