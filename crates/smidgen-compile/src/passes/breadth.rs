//! Breadth-first order: all micro-batches of a step pass one layer, or a few, before the next layer begins.
//!
//! The nodes of `micro_step` are cut into laps of `layers_per_lap` layers. Before a lap its offloaded weights are fetched,
//! one lap ahead if the window allows, and the partial sums for offloaded gradients are set to zero. After the lap these
//! sums are complete, and are copied out while the next lap runs. A value that one lap writes and a later lap reads is
//! carried: an array for the whole step holds the rows of every micro-batch, on the device or, if only backward reads it,
//! offloaded. A value that depends on inputs alone is recomputed instead. Each gradient is summed over the micro-batches in
//! their order, as in depth-first order, so the bytes are the same; only a tied head that is trained adds up those of the
//! head before those of the embedding. Ranks sum each gradient once per step, after the lap that completes it
//! (`breadth_sums.rs`). Early updates (`update_early.rs`) follow that lap, and the gradient is not kept.

use super::breadth_sums::{scatter_gradients, sum_resident};
use super::fetch::fetch_where_needed;
use super::lap_nodes::LapNodes;
use super::prefetch::{Brought, bring, division, fetched_for, fetched_part_bytes, read_copy, seam_after};
use super::transfer::{clear, fetch_as, settle, stow, sum_over_ranks, sum_squares};
use super::update_early::Early;
use smidgen_ir::policy::Policy;
use smidgen_ir::{
    ByValue, DeviceKind, Dim, Entry, Extent, Graph, Lap, LeafKind, Node, Phase, Property, Rank, Route, Space,
    ValueId, ValueRole, ValueSet,
};

/// Cuts `micro_step` into laps. `step` is the extent of the largest optimizer step; `squares` maps a gradient to the value
/// for its sum of squares; `early` has the updates to run as soon as a gradient is complete.
pub fn apply(
    graph: &mut Graph,
    policy: &Policy,
    (extent, step): (&Extent, &Extent),
    (device, rank): (DeviceKind, Rank),
    squares: &ByValue<ValueId>,
    early: Early,
) {
    let Some(nodes) = graph.take_nodes(Entry::MicroStep) else { return };
    let mut laps = cut(nodes, policy);
    carry(graph, &mut laps, policy, step, device);
    fetch_weights(graph, &mut laps, extent, policy.window_bytes);
    scatter_gradients(graph, &mut laps, squares, rank);
    stow_gradients(graph, &mut laps, squares, &early, rank);
    sum_resident(graph, &mut laps, &early, rank);
    update_after_laps(graph, &mut laps, early, (extent, policy.window_bytes));
    let mut nodes = Vec::new();
    graph.laps.clear();
    for lap in laps {
        nodes.extend(lap.before);
        let first = nodes.len();
        nodes.extend(lap.each);
        let each = first..nodes.len();
        nodes.extend(lap.after);
        graph.laps.push(Lap { each, end: nodes.len() });
    }
    graph.set_nodes(Entry::MicroStep, nodes);
}

fn cut(nodes: Vec<Node>, policy: &Policy) -> Vec<LapNodes> {
    let lap_of = |node: &Node| node.layer.and_then(|layer| policy.lap_of(layer));
    let mut laps: Vec<LapNodes> = Vec::new();
    for node in nodes {
        match laps.last_mut().filter(|lap| lap_of(&lap.each[0]) == lap_of(&node)) {
            Some(lap) => lap.each.push(node),
            None => laps.push(LapNodes { each: vec![node], ..LapNodes::default() }),
        }
    }
    laps
}

/// A value that one lap writes and later ones read.
struct Crossing {
    value: ValueId,
    from: usize,
    /// Ascending.
    to: Vec<usize>,
}

/// Stores the values that cross laps in arrays for the whole step, or recomputes them.
fn carry(graph: &mut Graph, laps: &mut [LapNodes], policy: &Policy, step: &Extent, device: DeviceKind) {
    for Crossing { value, from, to } in find_crossings(graph, laps) {
        if let Some(node) = made_from_inputs(graph, &laps[from], value) {
            to.iter().for_each(|lap| recompute(graph, &mut laps[*lap], &node, value));
            let is_read =
                laps[from].each.iter().any(|other| other.reads().any(|id| node.outputs.contains(&id)));
            if !is_read {
                laps[from].each.retain(|other| *other != node);
            }
            continue;
        }
        // The next forward lap reads its copy from the device, and so does everything that backward writes. The copy for
        // backward is offloaded if the policy offloads the layer that starts with the value, or that contains it.
        let next = to.iter().copied().find(|lap| is_forward(&laps[*lap]));
        let waiting: Vec<usize> = to.iter().copied().filter(|lap| Some(*lap) != next).collect();
        let decides = match next {
            Some(next) => laps[next].each[0].layer,
            None => laps[from].writer(graph, value).and_then(|writer| laps[from].each[writer].layer),
        };
        let waits = is_forward(&laps[from]) && !waiting.is_empty();
        let space =
            decides.filter(|_| waits).map_or(Space::Device, |layer| policy.space_of_activations(layer));
        let space = device.resolve(space);
        match next.filter(|_| space != Space::Device) {
            Some(next) => {
                let fetched = pass(graph, laps, (value, value), from, &[next], (Space::Device, step));
                pass(graph, laps, (fetched, value), next, &waiting, (space, step));
            }
            None => {
                pass(graph, laps, (value, value), from, &to, (space, step));
            }
        }
    }
}

fn is_forward(lap: &LapNodes) -> bool {
    lap.each[0].phase == Phase::Forward
}

fn find_crossings(graph: &Graph, laps: &[LapNodes]) -> Vec<Crossing> {
    let mut written: ByValue<usize> = ByValue::default();
    let mut crossings: Vec<Crossing> = Vec::new();
    let mut known: ByValue<usize> = ByValue::default();
    for (index, lap) in laps.iter().enumerate() {
        for node in &lap.each {
            for value in node.reads().map(|value| graph.whole(value)) {
                let Some(&from) = written.get(&value).filter(|from| **from != index) else { continue };
                let crossing = *known.get_or_insert_with(value, || {
                    crossings.push(Crossing { value, from, to: vec![] });
                    crossings.len() - 1
                });
                let to = &mut crossings[crossing].to;
                if to.last() != Some(&index) {
                    to.push(index);
                }
            }
            written.extend(node.outputs.iter().map(|output| (graph.whole(*output), index)));
        }
    }
    crossings
}

/// The node that writes a value, if it reads only inputs of the micro-batch.
fn made_from_inputs(graph: &Graph, lap: &LapNodes, value: ValueId) -> Option<Node> {
    let node = lap.each.iter().find(|node| node.outputs.contains(&value))?;
    let is_input = |id: &ValueId| graph.value(*id).leaf().is_some_and(|leaf| leaf.kind == LeafKind::Input);
    (node.updates.is_empty() && node.inputs.iter().all(is_input)).then(|| node.clone())
}

/// Recomputes a node at the start of a lap that reads one of its results, once for all of its results.
fn recompute(graph: &mut Graph, lap: &mut LapNodes, node: &Node, value: ValueId) {
    if !lap.each.iter().any(|node| node.reads().any(|read| graph.whole(read) == value)) {
        return;
    }
    let (phase, layer) = lap.place();
    let mut outputs = Vec::with_capacity(node.outputs.len());
    for output in &node.outputs {
        let name = graph.name_from(*output, |name| format!("{name} again"));
        let again = graph.add_value(name, graph.value(*output).ty.clone(), ValueRole::Temp);
        read_copy(graph, &mut lap.each, *output, again);
        outputs.push(again);
    }
    let phase = if phase == Phase::Forward { phase } else { Phase::Recompute };
    lap.each.insert(0, Node { outputs, phase, layer, ..node.clone() });
}

/// Makes lap `from` copy the rows of `value` into an array, and the laps `to` fetch them from there and use them instead of
/// `read`. Returns the value that the last of them fetches.
fn pass(
    graph: &mut Graph,
    laps: &mut [LapNodes],
    (value, read): (ValueId, ValueId),
    from: usize,
    to: &[usize],
    (space, step): (Space, &Extent),
) -> ValueId {
    let ty = graph.value(value).ty.clone();
    let rows = match ty.shape.0.first() {
        Some(Dim::Tokens) => step.tokens,
        Some(Dim::Routed(times)) => step.tokens * times,
        Some(Dim::Rows) => step.rows,
        Some(Dim::Audio(times)) => step.audio * times,
        other => panic!("`{}` with {other:?} rows cannot be carried", graph.value(value).name),
    };
    let name = graph.name_from(value, |name| format!("{name} of all"));
    let array = graph.add_leaf(name, ty, LeafKind::Carried(rows));
    graph.values[array.index()].space = space;
    let lap = &mut laps[from];
    let place = lap.place();
    let position = lap.writer(graph, value).map_or(0, |last| last + 1);
    let position = seam_after(&lap.each, position);
    let mut emitted = Vec::new();
    stow(graph, &mut emitted, value, array, place);
    lap.each.splice(position..position, emitted.drain(..));
    settle(graph, &mut lap.each, value, array, place);
    let mut last = value;
    for lap in to {
        let lap = &mut laps[*lap];
        let place = lap.place();
        let name = graph.name_from(value, |name| format!("{name} back"));
        last = fetch_as(graph, &mut emitted, array, name, place);
        read_copy(graph, &mut lap.each, read, last);
        lap.each.splice(0..0, emitted.drain(..));
    }
    last
}

/// Fetches the offloaded leaves that the nodes of each lap read.
fn fetch_weights(graph: &mut Graph, laps: &mut [LapNodes], extent: &Extent, window_bytes: usize) {
    let needed: Vec<Vec<(ValueId, ValueId)>> = laps.iter().map(|lap| offloaded_inputs(graph, lap)).collect();
    let bytes = |pairs: &[(ValueId, ValueId)]| {
        let own = |(value, source): &(ValueId, ValueId)| {
            let of = |id: ValueId| graph.value(id).ty.bytes(extent);
            match division(graph, *value) {
                Some(shard) => of(*value) + fetched_part_bytes(graph, *value, shard),
                None => of(*source) + if value == source { 0 } else { of(*value) },
            }
        };
        pairs.iter().map(own).sum::<usize>()
    };
    let bytes: Vec<usize> = needed.iter().map(|pairs| bytes(pairs)).collect();
    for (index, pairs) in needed.into_iter().enumerate() {
        let is_ahead = index > 0 && bytes[index - 1] + bytes[index] <= window_bytes;
        let place = laps[index].place();
        let (mut fetches, mut rounds) = (Vec::new(), Vec::new());
        for (value, _) in pairs {
            let Brought { ahead, here, copy } = bring(graph, value, place);
            fetches.extend(ahead);
            rounds.extend(here);
            read_copy(graph, &mut laps[index].each, value, copy);
        }
        laps[index - usize::from(is_ahead)].before.extend(fetches);
        laps[index].before.extend(rounds);
    }
}

/// Leaves that a lap reads and that must be fetched, each with the leaf that is fetched for it.
fn offloaded_inputs(graph: &Graph, lap: &LapNodes) -> Vec<(ValueId, ValueId)> {
    let mut pairs: Vec<(ValueId, ValueId)> = Vec::new();
    for node in lap.each.iter().filter(|node| !node.op.is_transfer() && !node.op.has(Property::Waits)) {
        for (input, leaf) in node.inputs.iter().map(|id| graph.whole(*id)).enumerate() {
            if node.op.reads_offloaded(input) && division(graph, leaf).is_none() {
                continue;
            }
            let Some(source) = fetched_for(graph, leaf) else { continue };
            if !pairs.contains(&(leaf, source)) {
                pairs.push((leaf, source));
            }
        }
    }
    pairs
}

/// Makes laps add to partial gradients on the device, which are copied to the offloaded gradients after the lap. A gradient
/// with an early update is copied only if the host updates the tensor.
fn stow_gradients(
    graph: &mut Graph,
    laps: &mut [LapNodes],
    squares: &ByValue<ValueId>,
    early: &Early,
    rank: Rank,
) {
    let touched: Vec<Vec<ValueId>> = laps.iter().map(|lap| changed_gradients(graph, lap, early)).collect();
    let mut begun = ValueSet::default();
    for index in 0..laps.len() {
        let place = laps[index].place();
        for &gradient in &touched[index] {
            let is_last = !touched[index + 1..].iter().any(|later| later.contains(&gradient));
            let is_first = begun.insert(gradient);
            let name = graph.name_from(gradient, |name| format!("{name} here"));
            let before = &mut laps[index].before;
            let own = match (is_first, graph.value(gradient).space) {
                // Several laps add to it, as for a head that is also the embedding.
                (true, Space::Device) if !is_last => {
                    clear(graph, before, gradient, place);
                    gradient
                }
                (false, Space::Device) => gradient,
                (true, _) => {
                    let ty = graph.value(gradient).ty.clone();
                    let own = graph.add_leaf(name, ty, LeafKind::Partial(gradient));
                    clear(graph, before, own, place);
                    own
                }
                (false, _) => fetch_as(graph, before, gradient, name, place),
            };
            if own != gradient {
                read_copy(graph, &mut laps[index].each, gradient, own);
            }
            let after = &mut laps[index].after;
            if is_last && !rank.is_only() {
                sum_over_ranks(graph, after, vec![own], rank, place);
            }
            if let Some(sum) = squares.get(&gradient).filter(|_| is_last) {
                sum_squares(graph, after, vec![own], *sum, place);
            }
            let update = early.updates.get(&gradient).filter(|_| is_last);
            laps[index].complete.extend(update.map(|_| (gradient, own)));
            let is_stored = update.is_none_or(|nodes| nodes.iter().any(|node| node.op.runs_on_host()));
            if own != gradient && is_stored {
                let after = &mut laps[index].after;
                stow(graph, after, own, gradient, place);
                // The transfer overlaps with the next lap.
                let settled = (index + 1).min(laps.len() - 1);
                settle(graph, &mut laps[settled].after, own, gradient, place);
            }
        }
    }
}

/// Adds the early updates after the laps that complete their gradients. Their first fetches overlap with the lap.
fn update_after_laps(
    graph: &mut Graph,
    laps: &mut [LapNodes],
    mut early: Early,
    (extent, window_bytes): (&Extent, usize),
) {
    for lap in laps {
        let mut nodes = Vec::new();
        for (gradient, own) in std::mem::take(&mut lap.complete) {
            let mut update = early.updates.remove(&gradient).expect("each is complete once");
            if own != gradient {
                read_copy(graph, &mut update, gradient, own);
            }
            if update.iter().any(|node| node.op.runs_on_host()) {
                lap.before.append(&mut early.hyper);
            }
            nodes.append(&mut update);
        }
        let nodes = fetch_where_needed(graph, nodes, extent, window_bytes);
        let is_ahead = nodes.iter().take_while(|node| node.op.route() == Some(Route::ToDevice)).count();
        let mut nodes = nodes.into_iter();
        lap.before.extend(nodes.by_ref().take(is_ahead));
        lap.after.extend(nodes);
    }
    assert!(early.updates.iter().next().is_none(), "a lap completes every gradient");
}

/// Gradients that a lap adds to and that do not stay on the device: they are offloaded, or have an early update.
fn changed_gradients(graph: &Graph, lap: &LapNodes, early: &Early) -> Vec<ValueId> {
    let mut found = Vec::new();
    let changes = lap.each.iter().filter(|node| !node.op.is_transfer()).flat_map(|node| &node.updates);
    for leaf in changes.map(|id| graph.whole(*id)) {
        let is_kept = graph.value(leaf).space == Space::Device && !early.updates.contains_key(&leaf);
        if !is_kept && !found.contains(&leaf) {
            found.push(leaf);
        }
    }
    found
}
