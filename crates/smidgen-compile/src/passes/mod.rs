//! Passes: each rewrites the graph or writes down a choice, and changes no result.

pub mod recompute;
pub mod remove_dead;
pub mod reuse_in_place;
