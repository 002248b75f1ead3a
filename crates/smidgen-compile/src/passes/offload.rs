//! Offload: activations that backward reads are copied to host memory or disk after forward's last use, and fetched
//! again before backward needs them.
//!
//! The copy is a temporary of that memory space. The original stays until the copy is complete, one layer later; the
//! fetched value is another temporary, and its transfer starts one layer ahead. Activations of the last layer stay on the
//! device, because the backward pass needs them right away.

use super::prefetch::{Insertions, Need, begin_ahead, read_copy, seam_after, seam_before};
use super::transfer::{fetch_as, settle, stow_new};
use smidgen_ir::policy::Policy;
use smidgen_ir::{ByValue, DeviceKind, Entry, Extent, Graph, Node, Phase, Space, ValueId};
use std::collections::HashMap;

pub fn apply(graph: &mut Graph, policy: &Policy, extent: &Extent, device: DeviceKind) {
    if !policy.offloads_activations() {
        return;
    }
    let Some(mut nodes) = graph.take_nodes(Entry::MicroStep) else { return };
    let crossings = find_crossings(graph, policy, &nodes);
    let mut needs: Vec<(Need, &Crossing)> = crossings
        .iter()
        .map(|crossing| {
            let bytes = graph.value(crossing.value).ty.bytes(extent);
            (Need { first: crossing.first_backward, last: crossing.last_backward, bytes }, crossing)
        })
        .collect();
    needs.sort_by_key(|(need, crossing)| (need.first, crossing.value));
    // The values of one layer may be fetched while another layer runs.
    let mut by_layer: HashMap<Option<usize>, usize> = HashMap::new();
    for (need, _) in &needs {
        *by_layer.entry(nodes[need.first].layer).or_default() += need.bytes;
    }
    let window_bytes = 2 * by_layer.into_values().max().unwrap_or(0);
    let begins = begin_ahead(&needs.iter().map(|(need, _)| *need).collect::<Vec<_>>(), window_bytes);
    let mut insertions = Insertions::default();
    for ((need, crossing), begin) in needs.iter().zip(begins) {
        let value = crossing.value;
        let place = (Phase::Forward, nodes[crossing.last_forward].layer);
        let mut emitted = Vec::new();
        let copy = stow_new(graph, &mut emitted, value, "away", place);
        graph.values[copy.index()].space = device.resolve(crossing.space);
        insertions.push(seam_after(&nodes, crossing.last_forward + 1), emitted.remove(0));
        settle(graph, &mut emitted, value, copy, place);
        insertions.push(crossing.settled, emitted.remove(0));
        let place = (nodes[need.first].phase, nodes[need.first].layer);
        let name = graph.name_from(value, |name| format!("{name} back"));
        let back = fetch_as(graph, &mut emitted, copy, name, place);
        insertions.push(seam_before(&nodes, begin).max(crossing.settled), emitted.remove(0));
        read_copy(graph, &mut nodes[need.first..=need.last], value, back);
    }
    graph.set_nodes(Entry::MicroStep, insertions.into_nodes(nodes));
}

/// A value that forward writes and backward reads.
struct Crossing {
    value: ValueId,
    space: Space,
    last_forward: usize,
    /// The copy must be complete before this node.
    settled: usize,
    first_backward: usize,
    last_backward: usize,
}

fn find_crossings(graph: &Graph, policy: &Policy, nodes: &[Node]) -> Vec<Crossing> {
    let split = nodes.iter().position(|node| node.phase != Phase::Forward).unwrap_or(nodes.len());
    let last_layer = nodes[..split].iter().filter_map(|node| node.layer).max();
    let mut produced: ByValue<usize> = ByValue::default();
    let mut last_forward: ByValue<usize> = ByValue::default();
    for (index, node) in nodes[..split].iter().enumerate() {
        produced.extend(node.outputs.iter().map(|output| (graph.whole(*output), index)));
        last_forward.extend(node.reads().map(|value| (graph.whole(value), index)));
    }
    let mut backward: ByValue<(usize, usize)> = ByValue::default();
    for (index, node) in nodes.iter().enumerate().skip(split) {
        let wholes = node.reads().map(|value| graph.whole(value));
        for value in wholes.filter(|value| produced.contains_key(value)) {
            backward.get_or_insert_with(value, || (index, index)).1 = index;
        }
    }
    let crossing = |(value, &(first_backward, last_backward)): (ValueId, &(usize, usize))| {
        let last_forward = last_forward.get(&value).copied().unwrap_or(produced[&value]);
        // A value belongs to the last layer that reads it, so the input of a layer belongs to that layer.
        let layer = nodes[last_forward].layer.filter(|layer| Some(*layer) != last_layer)?;
        let space = policy.space_of_activations(layer);
        if space == Space::Device || !graph.value(value).is_temp() {
            return None;
        }
        let later =
            nodes[..split].iter().skip(last_forward + 1).position(|node| node.layer > Some(layer + 1));
        let settled = later.map_or(split, |nodes| last_forward + 1 + nodes);
        Some(Crossing { value, space, last_forward, settled, first_backward, last_backward })
    };
    backward.iter().filter_map(crossing).collect()
}
