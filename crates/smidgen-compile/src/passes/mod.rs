//! Passes: each rewrites the graph or writes down a choice, and changes no result.
//!
//! The order in which they run is in `compile`, and nowhere else; a pass knows no other pass.
//! Left out: offloading, streaming of weights, sharding.

pub mod lay_beside;
pub mod recompute;
pub mod remove_dead;
pub mod reuse_in_place;
