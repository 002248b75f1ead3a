//! Breadth-first order: all micro-batches of a step pass one layer, or a few, before the next layer begins.
//!
//! The nodes of `micro_step` are cut into laps of `layers_per_lap` layers. In front of a lap its offloaded weights are
//! fetched, one lap ahead if the window allows, and what it adds to offloaded gradients begins at zero; behind it these
//! gradients are complete, and are copied out while the next lap runs. What one lap leaves for a later one is carried: every
//! micro-batch has its rows in an array for the whole step, on the device or, for backward, offloaded. What follows
//! from the inputs alone is computed again instead.
//! Each gradient is summed over the micro-batches in their order, as in depth-first order, so the bytes are the same.
//! Where updates are early (`update_early.rs`), they follow behind the lap, and the gradient ends with it.

use super::fetch::fetch_where_needed;
use super::prefetch::{fetched_for, read_copy, rounded_copy, seam_behind};
use super::update_early::Early;
use smidgen_ir::policy::Policy;
use smidgen_ir::{
    ByValue, DeviceKind, Dim, Entry, Extent, Graph, Lap, LeafKind, Node, Op, Phase, Space, ValueId,
    ValueRole, ValueSet,
};

/// Reorders `micro_step`. `step` is the largest optimizer step; `squares` is where those of a gradient go; `early` is what
/// follows behind it.
pub fn apply(
    graph: &mut Graph,
    policy: &Policy,
    (extent, step): (&Extent, &Extent),
    device: DeviceKind,
    squares: &ByValue<ValueId>,
    early: Early,
) {
    let Some(index) = graph.entries.iter().position(|(entry, _)| *entry == Entry::MicroStep) else { return };
    let nodes = std::mem::take(&mut graph.entries[index].1);
    let mut laps = cut(nodes, policy);
    carry(graph, &mut laps, policy, step, device);
    fetch_weights(graph, &mut laps, extent, policy.window_bytes);
    stow_gradients(graph, &mut laps, squares, &early);
    update_behind_laps(graph, &mut laps, early, (extent, policy.window_bytes));
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
    graph.entries[index].1 = nodes;
}

/// A lap before it has a place in the list of nodes.
#[derive(Debug, Default)]
struct LapNodes {
    before: Vec<Node>,
    each: Vec<Node>,
    after: Vec<Node>,
    /// Gradients that it completes and that are updated behind it, and where they are on the device.
    complete: Vec<(ValueId, ValueId)>,
}

impl LapNodes {
    fn place(&self) -> (Phase, Option<usize>) {
        let first = self.each.first().expect("a lap has a node");
        (first.phase, first.layer)
    }

    /// The last node that writes a value, or rows of it.
    fn writer(&self, graph: &Graph, value: ValueId) -> Option<usize> {
        let is_written = |node: &Node| node.outputs.iter().any(|output| graph.whole(*output) == value);
        self.each.iter().rposition(is_written)
    }
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

fn carry(graph: &mut Graph, laps: &mut [LapNodes], policy: &Policy, step: &Extent, device: DeviceKind) {
    for Crossing { value, from, to } in find_crossings(graph, laps) {
        if let Some(node) = made_from_inputs(graph, &laps[from], value) {
            to.iter().for_each(|lap| compute_again(graph, &mut laps[*lap], &node, value));
            let is_read =
                laps[from].each.iter().any(|other| other.reads().any(|id| node.outputs.contains(&id)));
            if !is_read {
                laps[from].each.retain(|other| *other != node);
            }
            continue;
        }
        // What forward reads next stays on the device, and so does what backward hands on; of what waits for backward the
        // layer decides that begins with it, or that it is inside of.
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
                let here = pass(graph, laps, (value, value), from, &[next], (Space::Device, step));
                pass(graph, laps, (here, value), next, &waiting, (space, step));
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

/// The node that makes a value from nothing but inputs of the micro-batch.
fn made_from_inputs(graph: &Graph, lap: &LapNodes, value: ValueId) -> Option<Node> {
    let node = lap.each.iter().find(|node| node.outputs.contains(&value))?;
    let is_input = |id: &ValueId| graph.value(*id).leaf().is_some_and(|leaf| leaf.kind == LeafKind::Input);
    (node.updates.is_empty() && node.inputs.iter().all(is_input)).then(|| node.clone())
}

/// Computes a node again at the begin of a lap that reads one of its results, once for all of them.
fn compute_again(graph: &mut Graph, lap: &mut LapNodes, node: &Node, value: ValueId) {
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

/// Has a lap put the rows of a value into an array, and others take them from there instead of reading `read`. Returns
/// what the last of them has taken.
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
        Some(Dim::Rows) => step.rows,
        other => panic!("`{}` with {other:?} rows cannot be carried", graph.value(value).name),
    };
    let name = graph.name_from(value, |name| format!("{name} of all"));
    let array = graph.add_leaf(name, ty, LeafKind::Carried(rows));
    graph.values[array.index()].space = space;
    let lap = &mut laps[from];
    let place = lap.place();
    let behind = lap.writer(graph, value).map_or(0, |last| last + 1);
    let behind = seam_behind(&lap.each, behind);
    let mut emitted = Vec::new();
    graph.emit(&mut emitted, Op::Stow, vec![value], vec![array], &[], place);
    lap.each.splice(behind..behind, emitted.drain(..));
    graph.emit(&mut lap.each, Op::Stowed, vec![value, array], vec![], &[], place);
    let mut last = value;
    for lap in to {
        let lap = &mut laps[*lap];
        let place = lap.place();
        let name = graph.name_from(value, |name| format!("{name} back"));
        last = graph.emit(&mut emitted, Op::Fetch, vec![array], vec![], &[name], place)[0];
        read_copy(graph, &mut lap.each, read, last);
        lap.each.splice(0..0, emitted.drain(..));
    }
    last
}

/// Fetches what the nodes of each lap read and is not on the device.
fn fetch_weights(graph: &mut Graph, laps: &mut [LapNodes], extent: &Extent, window_bytes: usize) {
    let needed: Vec<Vec<(ValueId, ValueId)>> = laps.iter().map(|lap| offloaded_inputs(graph, lap)).collect();
    let bytes = |pairs: &[(ValueId, ValueId)]| {
        let own = |(value, source): &(ValueId, ValueId)| {
            let of = |id: ValueId| graph.value(id).ty.bytes(extent);
            of(*source) + if value == source { 0 } else { of(*value) }
        };
        pairs.iter().map(own).sum::<usize>()
    };
    let bytes: Vec<usize> = needed.iter().map(|pairs| bytes(pairs)).collect();
    for (index, pairs) in needed.into_iter().enumerate() {
        let is_ahead = index > 0 && bytes[index - 1] + bytes[index] <= window_bytes;
        let place = laps[index].place();
        let (mut fetches, mut rounds) = (Vec::new(), Vec::new());
        for (value, source) in pairs {
            let name = graph.name_from(source, |name| format!("{name} here"));
            let copy = graph.emit(&mut fetches, Op::Fetch, vec![source], vec![], &[name], place)[0];
            let here = rounded_copy(graph, &mut rounds, value, copy, place);
            read_copy(graph, &mut laps[index].each, value, here);
        }
        laps[index - usize::from(is_ahead)].before.extend(fetches);
        laps[index].before.extend(rounds);
    }
}

/// Leaves that a lap reads and that have to be fetched, each with what is fetched for it.
fn offloaded_inputs(graph: &Graph, lap: &LapNodes) -> Vec<(ValueId, ValueId)> {
    let mut pairs: Vec<(ValueId, ValueId)> = Vec::new();
    for node in lap.each.iter().filter(|node| !node.op.is_transfer() && node.op != Op::Stowed) {
        let inputs = node.inputs.iter().enumerate().filter(|(input, _)| !node.op.reads_offloaded(*input));
        for leaf in inputs.map(|(_, id)| graph.whole(*id)) {
            let Some(source) = fetched_for(graph, leaf) else { continue };
            if !pairs.contains(&(leaf, source)) {
                pairs.push((leaf, source));
            }
        }
    }
    pairs
}

/// Has laps add to gradients on the device that are copied to where they are stored behind the lap. What is updated behind
/// the lap is stored only if the host updates it.
fn stow_gradients(graph: &mut Graph, laps: &mut [LapNodes], squares: &ByValue<ValueId>, early: &Early) {
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
                // Several laps add to it: a head that is the embedding too.
                (true, Space::Device) if !is_last => {
                    graph.emit(before, Op::Zero, vec![], vec![gradient], &[], place);
                    gradient
                }
                (false, Space::Device) => gradient,
                (true, _) => {
                    let ty = graph.value(gradient).ty.clone();
                    let own = graph.add_leaf(name, ty, LeafKind::Partial(gradient));
                    graph.emit(before, Op::Zero, vec![], vec![own], &[], place);
                    own
                }
                (false, _) => graph.emit(before, Op::Fetch, vec![gradient], vec![], &[name], place)[0],
            };
            if own != gradient {
                read_copy(graph, &mut laps[index].each, gradient, own);
            }
            let after = &mut laps[index].after;
            if let Some(sum) = squares.get(&gradient).filter(|_| is_last) {
                graph.emit(after, Op::SquaredNorm, vec![own], vec![*sum], &[], place);
            }
            let update = early.updates.get(&gradient).filter(|_| is_last);
            laps[index].complete.extend(update.map(|_| (gradient, own)));
            let is_stored = update.is_none_or(|nodes| nodes.iter().any(is_on_host));
            if own != gradient && is_stored {
                let after = &mut laps[index].after;
                graph.emit(after, Op::Stow, vec![own], vec![gradient], &[], place);
                // It travels while the next lap is worked on.
                let settled = (index + 1).min(laps.len() - 1);
                graph.emit(&mut laps[settled].after, Op::Stowed, vec![own, gradient], vec![], &[], place);
            }
        }
    }
}

fn is_on_host(node: &Node) -> bool {
    matches!(node.op, Op::AdamWOnHost(_))
}

/// Updates tensors behind the laps that complete their gradients. What an update fetches first comes during the lap.
fn update_behind_laps(
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
            if update.iter().any(is_on_host) {
                lap.before.append(&mut early.hyper);
            }
            nodes.append(&mut update);
        }
        let nodes = fetch_where_needed(graph, nodes, extent, window_bytes);
        let is_ahead = nodes.iter().take_while(|node| node.op == Op::Fetch).count();
        let mut nodes = nodes.into_iter();
        lap.before.extend(nodes.by_ref().take(is_ahead));
        lap.after.extend(nodes);
    }
    assert!(early.updates.iter().next().is_none(), "a lap completes every gradient");
}

/// Gradients that a lap adds to, and that are not on the device or are complete behind a lap.
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
