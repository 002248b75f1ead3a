//! Dead code: nodes whose results nobody reads and that change no leaf.
//!
//! It lets the stages before it emit a node where it is natural, without knowing who will read it.
//! One walk from the end finds everything, because a node comes after what it reads.

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
