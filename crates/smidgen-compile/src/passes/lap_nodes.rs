//! The nodes of a lap while breadth-first order is built: those that run once before it, those that run for every
//! micro-batch, and those that run once after it.
//!
//! `breadth.rs` cuts `micro_step` into laps; `breadth_sums.rs` adds their sums over ranks.

use smidgen_ir::{Graph, Node, Phase, ValueId};

/// The nodes of a [`smidgen_ir::Lap`].
#[derive(Debug, Default)]
pub struct LapNodes {
    pub before: Vec<Node>,
    pub each: Vec<Node>,
    pub after: Vec<Node>,
    /// Gradients that the lap completes and that are updated after it, with their values on the device.
    pub complete: Vec<(ValueId, ValueId)>,
}

impl LapNodes {
    pub fn place(&self) -> (Phase, Option<usize>) {
        let first = self.each.first().expect("a lap has a node");
        (first.phase, first.layer)
    }

    /// The last node that writes a value, or a slice of it.
    pub fn writer(&self, graph: &Graph, value: ValueId) -> Option<usize> {
        let is_written = |node: &Node| node.outputs.iter().any(|output| graph.whole(*output) == value);
        self.each.iter().rposition(is_written)
    }
}
