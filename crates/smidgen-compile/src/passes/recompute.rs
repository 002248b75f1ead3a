//! Recompute: if a backward node needs a dropped activation, its producer runs again in front of it.
//!
//! `apply` works per tensor and takes any keep set; `keep_set` makes the one that follows from the policy's layers. A
//! recomputed layer keeps only its input; of several recomputed layers in one lap, only the first keeps it. Other layers
//! keep everything that backward reads, except norm outputs, gated activations and dropped-out inputs if recomputing them
//! needs no further bytes. So no matmul and no attention runs twice outside the recomputed layers, and inside them only
//! what backward reads runs again (never the last matmul of a layer).

use smidgen_ir::policy::Policy;
use smidgen_ir::{ByValue, Entry, Graph, Node, Phase, Property, ValueId, ValueRole, ValueSet};

pub type KeepSet = ValueSet;

/// Forward activations of `micro_step` that stay until backward reads them.
pub fn keep_set(graph: &Graph, policy: &Policy) -> KeepSet {
    let nodes = graph.nodes(Entry::MicroStep);
    let split = first_backward(nodes);
    let (forward, backward) = nodes.split_at(split);
    let read_by_backward: ValueSet = backward.iter().flat_map(|node| &node.inputs).copied().collect();
    let layer_of: ByValue<Option<usize>> =
        forward.iter().flat_map(|node| node.outputs.iter().map(|output| (*output, node.layer))).collect();
    let is_recomputed = |layer: usize| policy.recompute.contains(layer);
    // Within a lap, the input of a layer is recomputed by the backward pass of the layer before, if that has one.
    let has_backward = |layer: usize| backward.iter().any(|node| node.layer == Some(layer));
    let follows_in_lap = |from: Option<usize>, to: Option<usize>| match (from, to) {
        (Some(from), Some(to)) => {
            let lap = policy.lap_of(from);
            lap.is_some() && lap == policy.lap_of(to) && is_recomputed(from) && has_backward(from)
        }
        _ => false,
    };
    let mut keep = KeepSet::default();
    for node in forward {
        // Values outside the layers and values that one layer passes to the next are always kept, except inside a lap. So a
        // layer can be recomputed from its own input, or from that of its lap.
        let is_passed_on = |from: &Option<usize>| *from != node.layer && !follows_in_lap(*from, node.layer);
        keep.extend(node.inputs.iter().filter(|input| layer_of.get(input).is_some_and(is_passed_on)));
        let recomputed = node.layer.is_some_and(is_recomputed);
        keep.extend(
            node.outputs
                .iter()
                .filter(|output| node.layer.is_none() || (!recomputed && read_by_backward.contains(output))),
        );
    }
    // A cheap output is dropped if all of its inputs are kept and read by backward anyway, or are dropped for the same
    // reason: a dropped-out norm is recomputed from the norm's input.
    let mut rederived = ValueSet::default();
    for node in forward.iter().filter(|node| node.op.has(Property::Cheap)) {
        let mut temps = node.inputs.iter().filter(|input| graph.value(**input).is_temp());
        let costs_nothing = |input: &ValueId| {
            rederived.contains(input) || (keep.contains(input) && read_by_backward.contains(input))
        };
        if temps.all(costs_nothing) {
            for output in &node.outputs {
                keep.remove(output);
                rederived.insert(*output);
            }
        }
    }
    keep
}

/// Re-emits, in front of each backward node, the producers of the values that it reads and that the keep set lacks.
pub fn apply(graph: &mut Graph, keep: &KeepSet) {
    let mut nodes = graph.take_nodes(Entry::MicroStep).expect("micro_step is built");
    let backward = nodes.split_off(first_backward(&nodes));
    let mut producer: ByValue<usize> = ByValue::default();
    for (position, node) in nodes.iter().enumerate() {
        producer.extend(node.outputs.iter().map(|output| (*output, position)));
    }
    let mut rewrite =
        Rewrite { graph, forward: &nodes, producer, keep, again: ByValue::default(), nodes: Vec::new() };
    for mut node in backward {
        for input in &mut node.inputs {
            *input = rewrite.available(*input);
        }
        rewrite.nodes.push(node);
    }
    let backward = rewrite.nodes;
    nodes.extend(backward);
    graph.set_nodes(Entry::MicroStep, nodes);
}

fn first_backward(nodes: &[Node]) -> usize {
    nodes.iter().position(|node| node.phase != Phase::Forward).unwrap_or(nodes.len())
}

struct Rewrite<'a> {
    graph: &'a mut Graph,
    forward: &'a [Node],
    producer: ByValue<usize>,
    keep: &'a KeepSet,
    /// Recomputed values so far, by their originals.
    again: ByValue<ValueId>,
    nodes: Vec<Node>,
}

impl Rewrite<'_> {
    /// The value to read instead of `value` in the backward half.
    fn available(&mut self, value: ValueId) -> ValueId {
        let Some(&position) = self.producer.get(&value) else { return value };
        if self.keep.contains(&value) {
            return value;
        }
        if let Some(&again) = self.again.get(&value) {
            return again;
        }
        let original = &self.forward[position];
        assert!(original.updates.is_empty(), "`{}` changes a leaf and cannot run again", original.op.name());
        let inputs = original.inputs.iter().map(|input| self.available(*input)).collect();
        let outputs: Vec<ValueId> = original
            .outputs
            .iter()
            .map(|output| {
                let name = self.graph.name_from(*output, |name| format!("{name} again"));
                let ty = self.graph.value(*output).ty.clone();
                self.graph.add_value(name, ty, ValueRole::Temp)
            })
            .collect();
        self.again.extend(original.outputs.iter().copied().zip(outputs.iter().copied()));
        self.nodes.push(Node { inputs, outputs, phase: Phase::Recompute, ..original.clone() });
        self.again[&value]
    }
}
