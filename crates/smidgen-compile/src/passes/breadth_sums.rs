//! Sums over ranks in breadth-first order: once per step, after the lap that completes what is summed.
//!
//! A gradient that is divided over ranks is added up in a partial gradient for each lap that adds to it. After the lap each
//! rank receives its rows of the sum; if these are offloaded, the sum overwrites the same rows of the partial gradient and
//! is copied out while the next lap runs.

use super::lap_nodes::LapNodes;
use super::prefetch::{fetch_part, read_copy};
use super::shard::own_part;
use super::transfer::{clear, scatter_over_ranks, settle, stow, sum_over_ranks, sum_squares};
use super::update_early::Early;
use smidgen_ir::{ByValue, Dim, Graph, LeafKind, Node, Rank, Space, ValueId, ValueRole, ValueSet};

/// Gives every rank its rows of the gradients that are divided. `squares` maps an offloaded gradient to the value for its
/// sum of squares.
pub(super) fn scatter_gradients(
    graph: &mut Graph,
    laps: &mut [LapNodes],
    squares: &ByValue<ValueId>,
    rank: Rank,
) {
    let touched: Vec<Vec<ValueId>> = laps.iter().map(|lap| partials_of(graph, &lap.each)).collect();
    let mut begun = ValueSet::default();
    for index in 0..laps.len() {
        let place = laps[index].place();
        for &partial in &touched[index] {
            let part = own_part(graph, partial).expect("it is partial");
            let is_last = !touched[index + 1..].iter().any(|later| later.contains(&partial));
            let is_first = begun.insert(partial);
            let own = if is_first { partial } else { another(graph, &mut laps[index].each, partial, part) };
            clear(graph, &mut laps[index].before, own, place);
            let is_offloaded = graph.value(part).space != Space::Device;
            let after = &mut laps[index].after;
            let sum = match (is_offloaded, is_first) {
                (false, _) => part,
                (true, true) => rows_like(graph, own, part),
                (true, false) => fetch_part(graph, after, part, place),
            };
            scatter_over_ranks(graph, after, vec![own], vec![sum], rank, place);
            if let Some(squares) = squares.get(&graph.whole(part)).filter(|_| is_last) {
                sum_squares(graph, after, vec![sum], *squares, place);
            }
            if is_offloaded {
                stow(graph, after, sum, part, place);
            }
            // The transfer overlaps with the next lap.
            let settled = (index + 1).min(laps.len() - 1);
            settle(graph, &mut laps[settled].after, own, part, place);
        }
    }
}

/// Sums the loss, and the gradients that every rank keeps on its device.
pub(super) fn sum_resident(graph: &mut Graph, laps: &mut [LapNodes], early: &Early, rank: Rank) {
    if rank.is_only() {
        return;
    }
    let gradients: ValueSet = graph.trainable().map(|(_, gradient)| gradient).collect();
    let is_kept = |graph: &Graph, id: ValueId| {
        gradients.contains(&id)
            && graph.value(id).space == Space::Device
            && graph.value(id).role.shard().is_none()
            && !early.updates.contains_key(&id)
    };
    let mut last: ByValue<usize> = ByValue::default();
    for (index, lap) in laps.iter().enumerate() {
        for node in &lap.each {
            let updates = node.updates.iter().map(|id| graph.whole(*id));
            last.extend(updates.filter(|id| is_kept(graph, *id)).map(|id| (id, index)));
            last.extend(node.updated_loss().map(|loss| (loss, index)));
        }
    }
    for (index, lap) in laps.iter_mut().enumerate() {
        let sums: Vec<ValueId> = last.iter().filter(|(_, lap)| **lap == index).map(|(id, _)| id).collect();
        if !sums.is_empty() {
            let mut emitted = Vec::new();
            sum_over_ranks(graph, &mut emitted, sums, rank, lap.place());
            lap.after.splice(0..0, emitted);
        }
    }
}

/// The partial gradients of divided gradients that some nodes add to.
fn partials_of(graph: &Graph, nodes: &[Node]) -> Vec<ValueId> {
    let mut found = Vec::new();
    for leaf in nodes.iter().flat_map(|node| &node.updates).map(|id| graph.whole(*id)) {
        if own_part(graph, leaf).is_some() && !found.contains(&leaf) {
            found.push(leaf);
        }
    }
    found
}

/// Makes a lap add to a partial gradient of its own.
fn another(graph: &mut Graph, nodes: &mut [Node], partial: ValueId, part: ValueId) -> ValueId {
    let (name, ty) = (graph.value(partial).name.clone(), graph.value(partial).ty.clone());
    let own = graph.add_leaf(name, ty, LeafKind::Partial(part));
    read_copy(graph, nodes, partial, own);
    own
}

/// The rows of a whole partial gradient that are this rank's part.
fn rows_like(graph: &mut Graph, whole: ValueId, part: ValueId) -> ValueId {
    let first_row = graph.value(part).role.first_row();
    match (&graph.value(part).role, graph.value(part).ty.shape.0.first()) {
        (ValueRole::Slice(_), Some(Dim::Const(rows))) => {
            let rows = *rows;
            graph.add_slice(whole, first_row, rows)
        }
        other => panic!("{other:?} is not a part"),
    }
}
