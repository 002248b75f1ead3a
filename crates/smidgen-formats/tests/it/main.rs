//! Tests of this crate from outside, in one binary.
//!
//! Its allocator counts bytes per thread, so that a test can say how much memory reading a file may take.
//! Tests of one file are next to it, in `src/`.

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
