//! Passes: each rewrites the graph or computes a layout, and changes no result.
//!
//! The order in which they run is in `stages.rs`, and nowhere else; a pass runs no other pass.
//! Five files are not passes: `lap_nodes.rs` and `breadth_sums.rs` are parts of `breadth.rs`, `fetch.rs` fetches the
//! offloaded leaves that a list of nodes needs, `prefetch.rs` decides how early a transfer may start and rewrites nodes
//! to read the fetched copy, and `transfer.rs` emits copies and exchanges.

pub mod breadth;
mod breadth_sums;
pub mod fetch;
pub mod head_pieces;
pub mod join_operands;
mod lap_nodes;
pub mod offload;
pub mod place;
pub mod prefetch;
pub mod recompute;
pub mod remove_dead;
pub mod reuse_in_place;
pub mod round_fp8;
pub mod shard;
pub mod stream;
pub mod tile;
pub mod transfer;
pub mod update_early;
pub mod update_in_pieces;
