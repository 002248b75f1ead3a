//! Tests of this crate from outside, in one binary.
//!
//! Its allocator counts bytes per thread, so that tests can limit the memory that reading a file takes.
//! Unit tests are next to their files, in `src/`.

#![allow(clippy::unwrap_used)]

mod audio;
mod checkpoint_mutations;
mod config_mutations;
#[path = "../four_bit/mod.rs"]
mod four_bit;
mod hostile_templates;
#[path = "../mutation/mod.rs"]
mod mutation;
mod quant_state_mutations;
mod tokenizer;
