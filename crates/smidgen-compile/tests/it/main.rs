//! Integration tests of the compiler: plans of real shapes, properties of the planner, snapshots.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapter_structure;
mod cuda_layout;
mod determinism;
mod dial;
mod exhaustive;
mod head_pieces;
mod laps;
mod leanest;
mod packing;
mod random_graph;
mod random_graphs;
mod rank_choices;
mod recompute_structure;
mod replay;
mod rounding;
mod shapes;
mod snapshots;
mod solver;
mod structure;
mod utilization;
