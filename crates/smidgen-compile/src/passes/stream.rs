//! Streaming: fetches the offloaded leaves that the nodes of each entry point need (`fetch.rs`).
//!
//! In breadth-first order `micro_step` is skipped, because `breadth.rs` has done this.

use super::fetch::fetch_where_needed;
use smidgen_ir::{Entry, Extent, Graph, Policy};

/// Fetches offloaded leaves where nodes need them.
pub fn apply(graph: &mut Graph, policy: &Policy, extent: &Extent) {
    for index in 0..graph.entries.len() {
        if graph.entries[index].0 == Entry::MicroStep && policy.is_breadth_first() {
            continue;
        }
        let nodes = std::mem::take(&mut graph.entries[index].1);
        graph.entries[index].1 = fetch_where_needed(graph, nodes, extent, policy.window_bytes);
    }
}
