//! What planning knows about a device: its rates, its memory and its links.
//!
//! `profile.rs` turns the cost of a step into seconds, `cards.rs` has built-in profiles of GPUs, `links.rs` of what connects
//! ranks, and `context.rs` counts what a run needs outside the arena. Nothing here measures anything.

pub mod cards;
pub mod context;
pub mod links;
pub mod profile;
