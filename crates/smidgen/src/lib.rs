//! smidgen: fine-tuning of large language models in a smidgen of memory.
//!
//! This crate is the outside world: recipes, models and data on disk, the training loop, reports and the
//! command line. What a run computes is compiled by `smidgen-compile` and run by `smidgen-runtime`.

#![forbid(unsafe_code)]

pub mod adapted;
pub mod advice;
pub mod arithmetic;
pub mod bench;
pub mod budget;
pub mod cgroup;
pub mod cli;
pub mod commands;
pub mod devices;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod failure;
pub mod generate;
pub mod host;
pub mod hub;
pub mod job;
pub mod life;
pub mod logits;
pub mod merge;
pub mod planning;
pub mod processes;
pub mod profiles;
pub mod report;
pub mod train;
pub mod trained_choice;

#[cfg(test)]
#[path = "../../smidgen-formats/tests/four_bit/mod.rs"]
pub(crate) mod four_bit;
