//! Streaming: offloaded leaves are fetched to the device for each stretch of nodes that needs them.
//!
//! A stretch is a layer's turn, forward or backward: a weight that a layer reads several times in one turn is fetched
//! once. The fetched copy is a temporary like any other: the arena reserves bytes for it for that time, and nodes are
//! rewritten to read it. A head in pieces is fetched piece by piece. Moments are updated on the device and copied back.
//! Weights that are divided over ranks are gathered instead of fetched: each rank keeps its part on the device.
//! Vectors and small matrices stay whole and on the device: they are not worth a transfer.

use super::prefetch::{Insertions, Need, begin_ahead, read_copy, seam_before};
use smidgen_ir::policy::{Policy, Sharding};
use smidgen_ir::{
    ByValue, Cut, DeviceKind, Extent, Graph, LeafKind, Node, Op, Rank, Shard, Space, ValueId, ValueSet,
};

/// Matrices of fewer bytes stay on the device.
pub const FEWEST_BYTES: usize = 1 << 10;

/// Offloads matrices of at least `fewest_bytes` as the policy says, and fetches them where they are needed.
pub fn apply(
    graph: &mut Graph,
    policy: &Policy,
    extent: &Extent,
    (device, rank): (DeviceKind, Rank),
    fewest_bytes: usize,
) {
    let mut offloaded = offloaded_leaves(graph, policy, extent, fewest_bytes);
    if policy.sharding == Sharding::Weights && !rank.is_only() {
        let weights: Vec<ValueId> = offloaded.iter().filter(|id| is_weight(graph, *id)).collect();
        for id in weights {
            offloaded.remove(&id);
            graph.divide(id, Shard { rank, cut: Cut::Bytes });
        }
    }
    let fetched = fetched_weights(graph, &offloaded);
    for (index, value) in graph.values.iter_mut().enumerate() {
        let whole = value.role.whole(ValueId(index as u32));
        if offloaded.contains(&whole) {
            value.space = match fetched.contains(&whole) {
                true => device.resolve(policy.weights),
                // Rows are looked up, and moments written back, in memory that the device reaches.
                false => device.offload_space(),
            };
        }
    }
    for index in 0..graph.entries.len() {
        let nodes = std::mem::take(&mut graph.entries[index].1);
        graph.entries[index].1 = fetch_where_needed(graph, nodes, extent, policy.window_bytes);
    }
}

fn offloaded_leaves(graph: &Graph, policy: &Policy, extent: &Extent, fewest_bytes: usize) -> ValueSet {
    let mut offloaded = ValueSet::default();
    let all = || graph.entries.iter().flat_map(|(_, nodes)| nodes);
    let heads: ValueSet =
        all().filter(|node| node.op.reads_head()).map(|node| graph.whole(node.inputs[1])).collect();
    for node in all() {
        for operand in node.reads() {
            let whole = graph.whole(operand);
            let Some(leaf) = graph.value(whole).leaf() else { continue };
            let goes = match leaf.kind {
                // What is trained is changed on the device.
                LeafKind::Weight if leaf.gradient.is_some() => false,
                LeafKind::Weight => match node.layer {
                    Some(layer) => policy.offloaded_weights.contains(layer),
                    // Rows are looked up in place, so each has to be in one piece.
                    None => {
                        let goes = if let Op::Embed { .. } = node.op {
                            policy.tables_offloaded || (policy.embedding_offloaded && !heads.contains(&whole))
                        } else {
                            policy.tables_offloaded && node.op.reads_head()
                        };
                        let has_rows = graph.value(whole).ty.storage.has_contiguous_rows();
                        goes && (has_rows || policy.sharding == Sharding::Weights)
                    }
                },
                LeafKind::Moment => policy.optimizer_state != Space::Device,
                LeafKind::Adapter
                | LeafKind::Gradient
                | LeafKind::Partial(_)
                | LeafKind::Derived
                | LeafKind::Input
                | LeafKind::State
                | LeafKind::Cache => false,
            };
            let (rows, columns) = graph.value(whole).ty.shape.at(extent);
            let is_large = rows.min(columns) > 1 && graph.value(whole).ty.bytes(extent) >= fewest_bytes;
            if goes && is_large {
                offloaded.insert(whole);
            }
        }
    }
    offloaded
}

/// Offloaded weights that are fetched as a whole, which may come from disk also on a GPU.
fn fetched_weights(graph: &Graph, offloaded: &ValueSet) -> ValueSet {
    let nodes = graph.entries.iter().flat_map(|(_, nodes)| nodes);
    let embeds = nodes.filter(|node| matches!(node.op, Op::Embed { .. }));
    let looked_up: ValueSet = embeds.map(|node| graph.whole(node.inputs[1])).collect();
    offloaded.iter().filter(|id| !looked_up.contains(id) && is_weight(graph, *id)).collect()
}

fn is_weight(graph: &Graph, id: ValueId) -> bool {
    graph.value(id).leaf().is_some_and(|leaf| leaf.kind == LeafKind::Weight)
}

/// How a weight is divided over ranks, if it is.
fn division(graph: &Graph, leaf: ValueId) -> Option<Shard> {
    graph.value(leaf).role.shard().filter(|shard| shard.cut == Cut::Bytes)
}

/// What comes for an operand: the leaf that it is rows of, or a piece of the head by itself.
fn comes_as(graph: &Graph, op: &Op, operand: ValueId) -> ValueId {
    let whole = graph.whole(operand);
    if op.reads_head() && division(graph, whole).is_none() { operand } else { whole }
}

/// A leaf, or a piece of the head, that nodes `need.first..=need.last` of one layer's turn read, or change.
struct Visit {
    value: ValueId,
    need: Need,
    is_changed: bool,
}

fn fetch_where_needed(
    graph: &mut Graph,
    mut nodes: Vec<Node>,
    extent: &Extent,
    window_bytes: usize,
) -> Vec<Node> {
    let visits = find_visits(graph, &nodes, extent);
    let needs: Vec<Need> = visits.iter().map(|visit| visit.need).collect();
    let begins = begin_ahead(&needs, window_bytes);
    let mut insertions = Insertions::default();
    for (visit, begin) in visits.iter().zip(begins) {
        let place = (nodes[visit.need.first].phase, nodes[visit.need.first].layer);
        let name = graph.name_from(visit.value, |name| format!("{name} here"));
        let mut emitted = Vec::new();
        let op = division(graph, visit.value).map_or(Op::Fetch, Op::AllGather);
        let copy = graph.emit(&mut emitted, op, vec![visit.value], vec![], &[name], place)[0];
        emitted.drain(..).for_each(|node| insertions.push(seam_before(&nodes, begin), node));
        read_copy(graph, &mut nodes[visit.need.first..=visit.need.last], visit.value, copy);
        if visit.is_changed {
            graph.emit(&mut emitted, Op::Stow, vec![copy], vec![visit.value], &[], place);
            emitted.drain(..).for_each(|node| insertions.push(visit.need.last + 1, node));
            graph.emit(&mut emitted, Op::Stowed, vec![copy, visit.value], vec![], &[], place);
            // It travels while the next one is worked on.
            emitted.drain(..).for_each(|node| insertions.push(visit.need.last + 2, node));
        }
    }
    insertions.into_nodes(nodes)
}

/// Every stretch of an entry point that needs an offloaded leaf, by its first node.
fn find_visits(graph: &Graph, nodes: &[Node], extent: &Extent) -> Vec<Visit> {
    let mut visits: Vec<Visit> = Vec::new();
    // The last visit of each leaf, and the turn that it was in. Another piece of it ends that of the one before.
    let mut open: ByValue<(usize, usize)> = ByValue::default();
    let mut turn = 0;
    for (index, node) in nodes.iter().enumerate() {
        if index > 0 && nodes[index - 1].layer != node.layer {
            turn += 1;
        }
        let inputs = node.inputs.iter().enumerate();
        let is_needed = |input: usize, id: ValueId| {
            !node.op.reads_offloaded(input) || division(graph, graph.whole(id)).is_some()
        };
        let needed = inputs.filter(|(input, id)| is_needed(*input, **id)).map(|(_, id)| (*id, false));
        for (operand, is_changed) in needed.chain(node.updates.iter().map(|id| (*id, true))) {
            let (leaf, value) = (graph.whole(operand), comes_as(graph, &node.op, operand));
            if graph.value(leaf).space == Space::Device && division(graph, leaf).is_none() {
                continue;
            }
            match open.get(&leaf) {
                Some(&(visit, own_turn)) if own_turn == turn && visits[visit].value == value => {
                    visits[visit].need.last = index;
                    visits[visit].is_changed |= is_changed;
                }
                _ => {
                    let bytes = graph.value(value).ty.bytes(extent);
                    open.insert(leaf, (visits.len(), turn));
                    visits.push(Visit { value, need: Need { first: index, last: index, bytes }, is_changed });
                }
            }
        }
    }
    visits
}
