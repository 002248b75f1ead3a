//! Fetching for a list of nodes: an offloaded leaf is copied to the device for each run of nodes that needs it.
//!
//! Such a run is one layer's forward or backward pass: a weight that it reads several times is fetched once. The fetched
//! copy is a temporary like any other: the arena reserves its bytes for that time, and nodes are rewritten to read it. The
//! head and the tensors of an update are fetched piece by piece. What nodes change is copied back. A trained weight is
//! rounded after the fetch if matmuls need another type. Weights that are divided over ranks are gathered instead of
//! fetched: each rank keeps its part and updates only that, on the device or, if it is offloaded, in a fetched copy.

use super::prefetch::{
    Brought, Insertions, Need, begin_ahead, bring, division, fetched_for, fetched_part_bytes, read_copy,
    seam_before,
};
use super::transfer::{settle, stow};
use smidgen_ir::{ByValue, Cut, Extent, Graph, Node, Op, Phase, Property, Space, ValueId};

/// The value that is fetched for an operand: the whole leaf that it is a slice of, or only the slice for heads and updates.
fn value_to_fetch(graph: &Graph, op: &Op, operand: ValueId) -> ValueId {
    let whole = graph.whole(operand);
    let by_rows = match division(graph, whole) {
        Some(_) => works_on_part(graph, op, whole),
        // Of a divided gradient or moment, this rank has no other rows.
        None => {
            op.has(Property::ReadsHead)
                || op.has(Property::ByRows)
                || graph.value(whole).role.shard().is_some()
        }
    };
    if by_rows { operand } else { whole }
}

/// Whether a node works on rows of a divided weight that this rank stores, so nothing has to be gathered.
fn works_on_part(graph: &Graph, op: &Op, leaf: ValueId) -> bool {
    let is_of_rows = division(graph, leaf).is_some_and(|shard| shard.cut == Cut::Rows);
    is_of_rows && op.has(Property::ByRows)
}

/// A leaf, or some of its rows, that nodes `need.first..=need.last` read or change while it is on the device.
struct Visit {
    value: ValueId,
    need: Need,
    is_changed: bool,
}

impl Visit {
    /// Whether a node is near enough to extend the visit. In an update, a gradient is not kept from its norm to its update.
    fn is_near(&self, index: usize, node: &Node) -> bool {
        const STEPS_OF_AN_UPDATE: usize = 3;
        node.phase != Phase::Update || index - self.need.last < STEPS_OF_AN_UPDATE
    }
}

/// Fetches what the nodes need as early as the window allows, and copies back what they change.
pub fn fetch_where_needed(
    graph: &mut Graph,
    mut nodes: Vec<Node>,
    extent: &Extent,
    window_bytes: usize,
) -> Vec<Node> {
    let visits = find_visits(graph, &nodes, extent);
    let needs: Vec<Need> = visits.iter().map(|visit| visit.need).collect();
    let begins = begin_ahead(&needs, window_bytes);
    let mut insertions = Insertions::default();
    // Where the last visit that changed a leaf copies it back.
    let mut stowed: ByValue<usize> = ByValue::default();
    for (visit, begin) in visits.iter().zip(begins) {
        let leaf = graph.whole(visit.value);
        let begin = seam_before(&nodes, begin).max(stowed.get(&leaf).copied().unwrap_or(0));
        if visit.is_changed {
            stowed.insert(leaf, visit.need.last + 1);
        }
        let place = (nodes[visit.need.first].phase, nodes[visit.need.first].layer);
        let Brought { ahead, here, copy } = bring(graph, visit.value, place);
        ahead.into_iter().for_each(|node| insertions.push(begin, node));
        here.into_iter().for_each(|node| insertions.push(seam_before(&nodes, visit.need.first), node));
        read_copy(graph, &mut nodes[visit.need.first..=visit.need.last], visit.value, copy);
        if visit.is_changed {
            let mut emitted = Vec::new();
            stow(graph, &mut emitted, copy, visit.value, place);
            emitted.drain(..).for_each(|node| insertions.push(visit.need.last + 1, node));
            settle(graph, &mut emitted, copy, visit.value, place);
            // The transfer overlaps with the next node.
            emitted.drain(..).for_each(|node| insertions.push(visit.need.last + 2, node));
        }
    }
    insertions.into_nodes(nodes)
}

/// All visits of an entry point, ordered by their first node.
fn find_visits(graph: &Graph, nodes: &[Node], extent: &Extent) -> Vec<Visit> {
    let mut visits: Vec<Visit> = Vec::new();
    // The last visit of each leaf, and the run of nodes of one layer that it was in. A visit of other rows replaces it.
    let mut open: ByValue<(usize, usize)> = ByValue::default();
    let mut run = 0;
    for (index, node) in nodes.iter().enumerate() {
        if index > 0 && nodes[index - 1].layer != node.layer {
            run += 1;
        }
        // Transfers, and updates on the host, need nothing fetched.
        if node.op.is_transfer() || node.op.has(Property::Waits) {
            continue;
        }
        let inputs = node.inputs.iter().enumerate();
        let is_needed = |input: usize, id: ValueId| {
            !node.op.reads_offloaded(input) || division(graph, graph.whole(id)).is_some()
        };
        let needed = inputs.filter(|(input, id)| is_needed(*input, **id)).map(|(_, id)| (*id, false));
        for (operand, is_changed) in needed.chain(node.updates.iter().map(|id| (*id, true))) {
            let (leaf, value) = (graph.whole(operand), value_to_fetch(graph, &node.op, operand));
            if works_on_part(graph, &node.op, leaf) && graph.value(leaf).space == Space::Device {
                continue;
            }
            let Some(source) = fetched_for(graph, leaf) else { continue };
            match open.get(&leaf) {
                Some(&(visit, own_run))
                    if own_run == run
                        && visits[visit].value == value
                        && visits[visit].is_near(index, node) =>
                {
                    visits[visit].need.last = index;
                    visits[visit].is_changed |= is_changed;
                }
                _ => {
                    let bytes = |id: ValueId| graph.value(id).ty.bytes(extent);
                    // A rounded weight also needs the fetched rows in f32.
                    let rounded_from = match division(graph, leaf) {
                        Some(shard) if value == leaf => fetched_part_bytes(graph, leaf, shard),
                        _ if source == leaf => 0,
                        _ => bytes(value) * bytes(source) / bytes(leaf),
                    };
                    let bytes = bytes(value) + rounded_from;
                    open.insert(leaf, (visits.len(), run));
                    visits.push(Visit { value, need: Need { first: index, last: index, bytes }, is_changed });
                }
            }
        }
    }
    visits
}
