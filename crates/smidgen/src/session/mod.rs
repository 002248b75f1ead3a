//! A plan loaded on a device with its weights and adapters: what training, evaluation, generation and benches share.
//!
//! `weights.rs` fills the reservation from files, `adapters.rs` reads and writes adapters, `feed.rs` passes
//! micro-batches in and reports out, `logits.rs` and `adapted.rs` look at a model without a recipe.
//! Left out: loops over data, which belong to the commands' own folders.

pub mod adapted;
pub mod adapters;
pub mod feed;
pub mod likelihood;
pub mod logits;
pub mod weights;
