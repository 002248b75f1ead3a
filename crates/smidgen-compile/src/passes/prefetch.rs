//! Prefetch: starts transfers to the device as early as a window of bytes allows, so that they overlap with computation,
//! and rewrites nodes to read the fetched copies.
//!
//! Transfers keep the order in which their values are needed. Positions count the nodes before anything is inserted; a
//! transfer that starts at a position is inserted in front of that node.

use super::transfer::{fetch, fetch_as, gather};
use smidgen_ir::{Dim, Graph, LeafKind, Node, Op, Phase, Shard, Slice, Space, ValueId, ValueRole};
use std::collections::{BTreeMap, HashMap};

/// A value that has to be on the device from node `first` to node `last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    pub first: usize,
    pub last: usize,
    pub bytes: usize,
}

/// The position at which the transfer of each of `needs` starts, if all of them together may use `window_bytes`. `needs` must
/// be sorted by `first`.
pub fn begin_ahead(needs: &[Need], window_bytes: usize) -> Vec<usize> {
    let nodes = needs.iter().map(|need| need.last + 1).max().unwrap_or(0);
    let mut live_bytes = vec![0usize; nodes];
    for need in needs {
        live_bytes[need.first..=need.last].iter_mut().for_each(|bytes| *bytes += need.bytes);
    }
    let mut before = 0;
    let begin = |need: &Need| {
        let mut begin = need.first;
        while begin > before && live_bytes[begin - 1] + need.bytes <= window_bytes {
            begin -= 1;
            live_bytes[begin] += need.bytes;
        }
        before = begin;
        begin
    };
    needs.iter().map(begin).collect()
}

/// The last position up to `position` where a node may be inserted without separating nodes that a device may fuse.
pub fn seam_before(nodes: &[Node], position: usize) -> usize {
    (0..=position).rev().find(|position| !splits_a_pair(nodes, *position)).unwrap_or(0)
}

/// The first position from `position` on where a node may be inserted without separating nodes that a device may fuse.
pub fn seam_after(nodes: &[Node], position: usize) -> usize {
    (position..nodes.len()).find(|position| !splits_a_pair(nodes, *position)).unwrap_or(nodes.len())
}

/// Whether a position is between a matmul and the sum that follows it, the gradients of B and of h, or a node and the
/// rounding of its output.
fn splits_a_pair(nodes: &[Node], position: usize) -> bool {
    let Some([before, after, ..]) = position.checked_sub(1).map(|before| &nodes[before..]) else {
        return false;
    };
    before.op.fuses_with(&after.op)
}

/// Rewrites nodes to use the copy instead of a value, and slices of the copy instead of slices of the value.
pub fn read_copy(graph: &mut Graph, nodes: &mut [Node], value: ValueId, copy: ValueId) {
    let mut rows: HashMap<ValueId, ValueId> = HashMap::new();
    for node in nodes {
        let Node { op, inputs, updates, .. } = node;
        let is_divided = graph.value(value).role.shard().is_some();
        let inputs =
            inputs.iter_mut().enumerate().filter(|(input, _)| is_divided || !op.reads_offloaded(*input));
        for operand in inputs.map(|(_, id)| id).chain(updates) {
            match &graph.value(*operand).role {
                ValueRole::Slice(slice) if slice.of == value => {
                    let slice = *slice;
                    *operand = *rows.entry(*operand).or_insert_with(|| {
                        let name = graph.name_from(*operand, |name| format!("{name} here"));
                        let ty = graph.value(*operand).ty.clone();
                        let role = ValueRole::Slice(Slice { of: copy, gradient: None, ..slice });
                        graph.add_value(name, ty, role)
                    });
                }
                _ if *operand == value => *operand = copy,
                _ => {}
            }
        }
    }
}

/// The leaf that a rounded leaf is rounded from, or the value itself.
pub fn source_of(graph: &Graph, value: ValueId) -> ValueId {
    graph.value(value).leaf().and_then(|leaf| leaf.rounded).map_or(value, |rounded| rounded.of)
}

/// The value that is fetched for a leaf or a slice of one.
fn source_rows_of(graph: &mut Graph, value: ValueId) -> ValueId {
    let whole = graph.whole(value);
    let source = fetched_for(graph, whole).unwrap_or(whole);
    match (&graph.value(value).role, graph.value(value).ty.shape.0.first()) {
        (_, _) if source == whole => value,
        (ValueRole::Slice(slice), Some(Dim::Const(rows))) => {
            let (first_row, rows) = (slice.first_row, *rows);
            graph.add_slice(source, first_row, rows)
        }
        _ => source,
    }
}

/// How a weight is divided over ranks, if it is.
pub fn division(graph: &Graph, leaf: ValueId) -> Option<Shard> {
    let leaf = graph.value(leaf).leaf()?;
    leaf.shard.filter(|_| matches!(leaf.kind, LeafKind::Weight | LeafKind::Adapter | LeafKind::Derived))
}

/// The leaf that is fetched for a leaf that nodes read: itself, or the leaf that it is rounded from. `None` if it is on the
/// device. A divided leaf is gathered itself, also if it is a rounded copy.
pub fn fetched_for(graph: &Graph, value: ValueId) -> Option<ValueId> {
    if division(graph, value).is_some() {
        return Some(value);
    }
    let source = source_of(graph, value);
    (graph.value(source).space != Space::Device).then_some(source)
}

/// The fetched `copy` of the source of `value`, rounded if `value` is a rounded leaf.
fn rounded_copy(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    value: ValueId,
    copy: ValueId,
    name: String,
    place: (Phase, Option<usize>),
) -> ValueId {
    let rounded = graph.value(graph.whole(value)).leaf().and_then(|leaf| leaf.rounded);
    let Some(rounded) = rounded else { return copy };
    let op = Op::Round { scale: rounded.scale, to: graph.value(value).ty.storage.plain() };
    graph.emit(nodes, op, vec![copy], vec![], &[name], place)[0]
}

/// The nodes that bring an offloaded or divided value to the device.
#[derive(Debug)]
pub struct Brought {
    /// Transfers, which may start early.
    pub ahead: Vec<Node>,
    /// What computes or exchanges once they are complete.
    pub here: Vec<Node>,
    pub copy: ValueId,
}

/// Fetches a value, gathers its parts from all ranks, or both: each rank then fetches its rows of an offloaded weight, and
/// the rows are rounded before they are gathered.
pub fn bring(graph: &mut Graph, value: ValueId, place: (Phase, Option<usize>)) -> Brought {
    let (mut ahead, mut here) = (Vec::new(), Vec::new());
    // Rows of a divided leaf are those that this rank stores.
    let shard = division(graph, value);
    let source = if shard.is_some() { source_of(graph, value) } else { source_rows_of(graph, value) };
    let name = graph.name_from(value, |name| format!("{name} here"));
    let Some(shard) = shard else {
        let fetched = fetch(graph, &mut ahead, source, "here", place);
        let is_gathered = division(graph, graph.whole(value)).is_some();
        let copy =
            if is_gathered { fetched } else { rounded_copy(graph, &mut here, value, fetched, name, place) };
        return Brought { ahead, here, copy };
    };
    if graph.value(source).space == Space::Device {
        let copy = gather(graph, &mut ahead, vec![value], name, shard, place);
        return Brought { ahead, here, copy };
    }
    let fetched = fetch_own_rows(graph, &mut ahead, source, shard, place);
    let rounded = graph.name_from(fetched, |name| format!("{name} rounded"));
    let part = rounded_copy(graph, &mut here, value, fetched, rounded, place);
    let gathers = if here.is_empty() { &mut ahead } else { &mut here };
    let copy = gather(graph, gathers, vec![source, part], name, shard, place);
    Brought { ahead, here, copy }
}

/// The bytes of rows that are fetched before a divided leaf is gathered, if it is offloaded: those of the largest part, so
/// that all ranks gather in the same order.
pub fn fetched_part_bytes(graph: &Graph, leaf: ValueId, shard: Shard) -> usize {
    let source = graph.value(source_of(graph, leaf));
    let parts = shard.bytes(&source.ty).into_iter().map(|part| part.len());
    if source.space == Space::Device { 0 } else { parts.max().unwrap_or(0) }
}

/// Emits the fetch of this rank's rows of a divided leaf that is offloaded.
pub fn fetch_own_rows(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    leaf: ValueId,
    shard: Shard,
    place: (Phase, Option<usize>),
) -> ValueId {
    let rows = shard.own_rows(&graph.value(leaf).ty);
    let own = graph.add_slice(leaf, rows.start, rows.len());
    fetch_part(graph, nodes, own, place)
}

/// Emits the fetch of rows of a divided leaf. Its name is the same on every rank: ranks compare what they exchange.
pub fn fetch_part(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    part: ValueId,
    place: (Phase, Option<usize>),
) -> ValueId {
    let name = graph.name_from(graph.whole(part), |name| format!("{name} part"));
    fetch_as(graph, nodes, part, name, place)
}

/// Nodes to be inserted, by the position of the node that they precede.
#[derive(Debug, Default)]
pub struct Insertions {
    at: BTreeMap<usize, Vec<Node>>,
}

impl Insertions {
    pub fn push(&mut self, position: usize, node: Node) {
        self.at.entry(position).or_default().push(node);
    }

    pub fn into_nodes(mut self, nodes: Vec<Node>) -> Vec<Node> {
        let count = nodes.len();
        let mut all = Vec::with_capacity(count + self.at.len());
        for (position, node) in nodes.into_iter().enumerate() {
            all.extend(self.at.remove(&position).unwrap_or_default());
            all.push(node);
        }
        all.extend(self.at.into_values().flatten());
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: [Need; 3] = [
        Need { first: 2, last: 3, bytes: 10 },
        Need { first: 5, last: 5, bytes: 20 },
        Need { first: 6, last: 9, bytes: 10 },
    ];

    #[test]
    fn without_a_window_values_are_fetched_when_they_are_needed() {
        assert_eq!(begin_ahead(&NEEDS, 0), [2, 5, 6]);
    }

    #[test]
    fn a_window_lets_transfers_start_earlier_but_keeps_their_order() {
        // The second starts when the first is freed; the third has no room while the second is there.
        assert_eq!(begin_ahead(&NEEDS, 20), [0, 4, 6]);
        assert_eq!(begin_ahead(&NEEDS, 30), [0, 0, 4]);
        assert_eq!(begin_ahead(&NEEDS, 1000), [0, 0, 0]);
    }
}
