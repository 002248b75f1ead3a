//! Token tiles: between two attentions a layer runs on a part of the tokens at a time.
//!
//! There every token is computed independently, so a stretch of nodes can run tile by tile. Values that only the stretch
//! needs, above all the wide activations of a feed-forward block and their gradients, exist for one tile at a time. Values
//! that later nodes read are written tile by tile into one value. Gradients of weights are summed over the tiles, like over
//! micro-batches.

use smidgen_ir::policy::Policy;
use smidgen_ir::{ByValue, Dim, Entry, Extent, Graph, Node, Property, ValueId, ValueRole};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Cuts the stretches that hold a feed-forward block into tiles of `policy.tile_tokens`.
pub fn apply(graph: &mut Graph, policy: &Policy, extent: &Extent) {
    let Some(most) = policy.tile_tokens.filter(|tokens| *tokens < extent.tokens) else { return };
    let tiles: Vec<Dim> = (0..extent.tokens).step_by(most).map(|first| Dim::Tile { first, most }).collect();
    for entry in [Entry::MicroStep, Entry::Eval, Entry::Reference] {
        let Some(nodes) = graph.take_nodes(entry) else { continue };
        let nodes = cut(graph, nodes, &tiles);
        graph.set_nodes(entry, nodes);
    }
}

fn cut(graph: &mut Graph, nodes: Vec<Node>, tiles: &[Dim]) -> Vec<Node> {
    let mut last_read: ByValue<usize> = ByValue::default();
    for (index, node) in nodes.iter().enumerate() {
        last_read.extend(node.reads().map(|value| (graph.whole(value), index)));
    }
    let mut all = Vec::new();
    let mut done = 0;
    for stretch in stretches(graph, &nodes) {
        all.extend(nodes[done..stretch.start].iter().cloned());
        done = stretch.end;
        let is_read_later = |value: &ValueId| last_read.get(value).is_some_and(|last| *last >= stretch.end);
        let outputs: HashSet<ValueId> =
            nodes[stretch.clone()].iter().flat_map(|node| node.outputs.iter().copied()).collect();
        let read_later = outputs.iter().copied().filter(is_read_later).collect();
        for tile in tiles {
            let mut own = Tile {
                graph,
                tile: *tile,
                outputs: &outputs,
                read_later: &read_later,
                parts: HashMap::new(),
            };
            all.extend(nodes[stretch.clone()].iter().map(|node| own.node(node)));
        }
    }
    all.extend(nodes[done..].iter().cloned());
    all
}

/// Consecutive nodes of one layer that compute tokens independently and include a gated activation or its gradient.
fn stretches(graph: &Graph, nodes: &[Node]) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut first = 0;
    for end in 1..=nodes.len() {
        // Audio rows are not tokens, and rows sorted by expert are in no order of tokens.
        let has_tokens = |node: &Node| {
            let first = node.inputs.first().and_then(|input| graph.value(*input).ty.shape.0.first());
            !matches!(first, Some(Dim::Audio(_) | Dim::Routed(_)))
        };
        let can_tile =
            |node: &Node| node.op.has(Property::TokenLocal) && node.layer.is_some() && has_tokens(node);
        let has_begun = can_tile(&nodes[first]);
        if has_begun && nodes.get(end).is_some_and(|node| can_tile(node) && node.layer == nodes[first].layer)
        {
            continue;
        }
        if has_begun && nodes[first..end].iter().any(|node| node.op.has(Property::FeedForward)) {
            found.push(first..end);
        }
        first = end;
    }
    found
}

/// The nodes of a stretch for one tile.
struct Tile<'a> {
    graph: &'a mut Graph,
    tile: Dim,
    /// Values that the stretch writes.
    outputs: &'a HashSet<ValueId>,
    /// Values that the stretch writes and that later nodes read.
    read_later: &'a HashSet<ValueId>,
    /// The part of each value in this tile.
    parts: HashMap<ValueId, ValueId>,
}

impl Tile<'_> {
    fn node(&mut self, node: &Node) -> Node {
        let inputs = node.inputs.iter().map(|input| self.part(*input)).collect();
        let outputs = node.outputs.iter().map(|output| self.part(*output)).collect();
        Node { inputs, outputs, ..node.clone() }
    }

    fn part(&mut self, value: ValueId) -> ValueId {
        if self.graph.value(value).ty.shape.0.first() != Some(&Dim::Tokens) {
            return value;
        }
        if let Some(part) = self.parts.get(&value) {
            return *part;
        }
        let stays_inside = self.outputs.contains(&value) && !self.read_later.contains(&value);
        let part = if stays_inside {
            let name = self.graph.name_from(value, |name| format!("{name} of {}", self.tile));
            let mut ty = self.graph.value(value).ty.clone();
            ty.shape.0[0] = self.tile;
            self.graph.add_value(name, ty, ValueRole::Temp)
        } else {
            self.graph.add_tile(value, self.tile)
        };
        self.parts.insert(value, part);
        part
    }
}
