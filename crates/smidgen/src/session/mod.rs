//! A plan loaded on a device with its weights and adapters; shared by training, evaluation, generation and
//! benchmarks.
//!
//! `weights.rs` fills the reserved memory from files, `adapters.rs` reads and writes adapters, `feed.rs` passes
//! micro-batches in and reports out, `encoding.rs` encodes audio, `logits.rs` and `adapted.rs` compute logits without
//! a recipe.
//! Left out: loops over data (`train/`, `eval/`, `generate/`).

pub mod adapted;
pub mod adapters;
pub mod encoding;
pub mod feed;
pub mod likelihood;
pub mod logits;
pub mod weights;
