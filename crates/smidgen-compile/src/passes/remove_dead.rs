//! Removes dead code: nodes that change no leaf and whose results are never read.
//!
//! So earlier stages may emit a node without knowing whether its results will be read. One pass from the end is enough,
//! because a node comes after everything that it reads.

use smidgen_ir::{Graph, ValueSet};

pub fn apply(graph: &mut Graph) {
    for (_, nodes) in &mut graph.entries {
        let mut read = ValueSet::default();
        let mut alive: Vec<bool> = nodes
            .iter()
            .rev()
            .map(|node| {
                let alive =
                    !node.updates.is_empty() || node.outputs.iter().any(|output| read.contains(output));
                if alive {
                    read.extend(node.reads());
                }
                alive
            })
            .collect();
        alive.reverse();
        let mut alive = alive.into_iter();
        nodes.retain(|_| alive.next().unwrap_or(true));
    }
}
