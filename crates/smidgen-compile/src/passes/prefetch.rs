//! Prefetch: a transfer to the device starts as early as a window of bytes allows, so that it overlaps with computation;
//! and what nodes read instead of what was fetched.
//!
//! Transfers keep the order in which their values are needed. Positions count nodes before anything was inserted; a
//! transfer that starts at a position is inserted in front of that node.

use smidgen_ir::{Dim, Graph, LeafKind, Node, Op, Phase, Shard, Slice, Space, ValueId, ValueRole};
use std::collections::{BTreeMap, HashMap};

/// A value that has to be on the device from node `first` to node `last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    pub first: usize,
    pub last: usize,
    pub bytes: usize,
}

/// Where each of `needs` (by `first`, ascending) begins to travel, if together they may take `window_bytes`.
pub fn begin_ahead(needs: &[Need], window_bytes: usize) -> Vec<usize> {
    let nodes = needs.iter().map(|need| need.last + 1).max().unwrap_or(0);
    let mut alive = vec![0usize; nodes];
    for need in needs {
        alive[need.first..=need.last].iter_mut().for_each(|bytes| *bytes += need.bytes);
    }
    let mut before = 0;
    let begin = |need: &Need| {
        let mut begin = need.first;
        while begin > before && alive[begin - 1] + need.bytes <= window_bytes {
            begin -= 1;
            alive[begin] += need.bytes;
        }
        before = begin;
        begin
    };
    needs.iter().map(begin).collect()
}

/// The last place up to `position` where something may be inserted: nodes that a device forms as one are not parted.
pub fn seam_before(nodes: &[Node], position: usize) -> usize {
    (0..=position).rev().find(|position| !parts_a_pair(nodes, *position)).unwrap_or(0)
}

/// The first such place from `position` on.
pub fn seam_behind(nodes: &[Node], position: usize) -> usize {
    (position..nodes.len()).find(|position| !parts_a_pair(nodes, *position)).unwrap_or(nodes.len())
}

/// Whether the nodes before and after a position are a matmul with the sum that follows it, the gradients of B and of h,
/// or a node and the rounding of what it makes.
fn parts_a_pair(nodes: &[Node], position: usize) -> bool {
    let Some([before, behind, ..]) = position.checked_sub(1).map(|before| &nodes[before..]) else {
        return false;
    };
    let rounds = before.op.can_round() || matches!(before.op, Op::RoundFp8 { .. });
    let is_pair = matches!(
        (&before.op, &behind.op),
        (Op::Linear { .. }, Op::Add) | (Op::WeightGrad { .. }, Op::LinearGrad { .. })
    );
    is_pair || rounds && matches!(behind.op, Op::RoundFp8 { .. })
}

/// Has nodes read the copy instead of a value, and rows of the copy instead of rows of the value.
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

/// What is fetched for a value that may be rows of a leaf.
pub fn source_rows_of(graph: &mut Graph, value: ValueId) -> ValueId {
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

/// What is fetched for a value that nodes read: the value, or what it is rounded from. None where nothing has to be.
/// A rounded copy that is divided over ranks is gathered as it is.
pub fn fetched_for(graph: &Graph, value: ValueId) -> Option<ValueId> {
    if division(graph, value).is_some() {
        return Some(value);
    }
    let source = source_of(graph, value);
    (graph.value(source).space != Space::Device).then_some(source)
}

/// Emits what makes a fetched copy of `source` a copy of `value`: it is rounded if that is what `value` is.
pub fn rounded_copy(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    value: ValueId,
    copy: ValueId,
    place: (Phase, Option<usize>),
) -> ValueId {
    let whole = graph.whole(value);
    let is_gathered = division(graph, whole).is_some();
    let rounded = graph.value(whole).leaf().and_then(|leaf| leaf.rounded).filter(|_| !is_gathered);
    let Some(rounded) = rounded else { return copy };
    let op = Op::Round { scale: rounded.scale, to: graph.value(value).ty.storage.plain() };
    let name = graph.name_from(value, |name| format!("{name} here"));
    graph.emit(nodes, op, vec![copy], vec![], &[name], place)[0]
}

/// Nodes to be inserted, by the position in front of which they stand.
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
    fn without_a_window_values_come_when_they_are_needed() {
        assert_eq!(begin_ahead(&NEEDS, 0), [2, 5, 6]);
    }

    #[test]
    fn a_window_lets_them_come_earlier_but_never_before_one_that_is_needed_before() {
        // The second waits until the first is gone; the third has no room beside the second.
        assert_eq!(begin_ahead(&NEEDS, 20), [0, 4, 6]);
        assert_eq!(begin_ahead(&NEEDS, 30), [0, 0, 4]);
        assert_eq!(begin_ahead(&NEEDS, 1000), [0, 0, 0]);
    }
}
