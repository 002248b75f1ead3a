//! Emits copies between memory spaces, exchanges between ranks, and what comes with them: waiting and clearing.
//!
//! Each function appends one node at a place (phase and layer). Passes that offload, divide or reorder are written in these
//! words, so that only this file says how such a node is made.

use smidgen_ir::{Graph, Node, Op, Phase, Rank, Shard, ValueId};

type NodePlace = (Phase, Option<usize>);

/// Copies an offloaded or carried value to the device. The copy has the name of the value and `suffix`.
pub fn fetch(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    value: ValueId,
    suffix: &str,
    place: NodePlace,
) -> ValueId {
    let name = graph.name_from(value, |name| format!("{name} {suffix}"));
    fetch_as(graph, nodes, value, name, place)
}

/// As [`fetch`], with another name.
pub fn fetch_as(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    value: ValueId,
    name: String,
    place: NodePlace,
) -> ValueId {
    graph.emit(nodes, Op::Fetch, vec![value], vec![], &[name], place)[0]
}

/// Copies a value to a new offloaded temporary.
pub fn stow_new(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    value: ValueId,
    suffix: &str,
    place: NodePlace,
) -> ValueId {
    let name = graph.name_from(value, |name| format!("{name} {suffix}"));
    graph.emit(nodes, Op::Stow, vec![value], vec![], &[name], place)[0]
}

/// Copies a value over an offloaded or carried one.
pub fn stow(graph: &mut Graph, nodes: &mut Vec<Node>, value: ValueId, target: ValueId, place: NodePlace) {
    graph.emit(nodes, Op::Stow, vec![value], vec![target], &[], place);
}

/// Waits until a value is copied or scattered to another. Then its memory is free.
pub fn settle(graph: &mut Graph, nodes: &mut Vec<Node>, value: ValueId, target: ValueId, place: NodePlace) {
    graph.emit(nodes, Op::Stowed, vec![value, target], vec![], &[], place);
}

/// Sets a value to zero.
pub fn clear(graph: &mut Graph, nodes: &mut Vec<Node>, value: ValueId, place: NodePlace) {
    graph.emit(nodes, Op::Zero, vec![], vec![value], &[], place);
}

/// Sums values over all ranks.
pub fn sum_over_ranks(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    values: Vec<ValueId>,
    rank: Rank,
    place: NodePlace,
) {
    graph.emit(nodes, Op::AllReduce(rank), vec![], values, &[], place);
}

/// Gives this rank its rows of the sums of values over all ranks.
pub fn scatter_over_ranks(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    values: Vec<ValueId>,
    parts: Vec<ValueId>,
    rank: Rank,
    place: NodePlace,
) {
    graph.emit(nodes, Op::ReduceScatter(rank), values, parts, &[], place);
}

/// Gathers a value that is divided over ranks: one on the device, or an offloaded one with this rank's fetched rows.
pub fn gather(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    divided: Vec<ValueId>,
    name: String,
    shard: Shard,
    place: NodePlace,
) -> ValueId {
    graph.emit(nodes, Op::AllGather(shard), divided, vec![], &[name], place)[0]
}

/// Sends the rows of values that this rank has changed to the other ranks, and receives theirs.
pub fn gather_changes(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    values: Vec<ValueId>,
    shard: Shard,
    place: NodePlace,
) {
    graph.emit(nodes, Op::AllGather(shard), vec![], values, &[], place);
}

/// Sums up the squares of values.
pub fn sum_squares(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    values: Vec<ValueId>,
    sum: ValueId,
    place: NodePlace,
) {
    graph.emit(nodes, Op::SquaredNorm, values, vec![sum], &[], place);
}
