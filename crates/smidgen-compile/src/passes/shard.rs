//! Exchanges between ranks: sums of gradients, and the parts of divided tensors.
//!
//! Every rank runs the same steps on its own samples. Gradients and the loss are summed over the ranks as soon as they are
//! complete, several tensors at once, while the backward pass of earlier layers runs. With divided moments a rank updates
//! its own rows and receives the other rows from the other ranks; `collect` gathers divided tensors for a checkpoint. With
//! divided gradients a layer adds to a partial gradient that exists only while the layer runs. With divided weights a rank
//! stores its rows of each trained weight and of its rounded copy; `stream.rs` gathers what a layer reads. What a rank
//! stores may be offloaded: its rows are then fetched for an exchange and copied back.

use super::place::divided_matrices;
use super::prefetch::{Insertions, fetch_own_rows, fetch_part, read_copy, seam_after, seam_before};
use super::transfer::{
    clear, fetch, gather, gather_changes, scatter_over_ranks, settle, stow, sum_over_ranks, sum_squares,
};
use smidgen_ir::policy::{Policy, Sharding};
use smidgen_ir::{
    ByValue, Cut, DType, Dim, Entry, Extent, Graph, LeafKind, Node, Op, Phase, Property, Rank, Route, Shape,
    Shard, Space, Storage, Type, ValueId, ValueSet,
};
use std::ops::Range;

/// Gradients are collected up to this many bytes before they are exchanged.
const BUCKET_BYTES: usize = 16 << 20;

/// Divides moments, gradients and trained weights over the ranks. Runs before anything is offloaded.
pub fn divide_trained(graph: &mut Graph, policy: &Policy, rank: Rank) {
    if rank.is_only() || !policy.divides(Sharding::Moments) || !graph.has_entry(Entry::Update) {
        return;
    }
    let shard = Shard { rank, cut: Cut::Rows };
    let weights =
        if policy.divides(Sharding::Weights) { round_own_rows(graph, policy, shard) } else { vec![] };
    let parts = if policy.divides_gradients() { divide_gradients(graph, shard) } else { ByValue::default() };
    let nodes = graph.take_nodes(Entry::Update).unwrap_or_default();
    let (mut own, mut trained, mut moments) = (Vec::new(), Vec::new(), Vec::new());
    // For each widened value: the weight, and the rows of it that this rank updates.
    let mut widened: ByValue<(ValueId, Range<usize>)> = ByValue::default();
    let mut place = (Phase::Update, None);
    for mut node in nodes {
        if node.op == Op::Widen {
            let (leaf, rows) = own_rows(graph, node.inputs[0], shard);
            widened.insert(node.outputs[0], (leaf, rows.clone()));
            if rows.is_empty() {
                continue;
            }
            graph.values[node.outputs[0].index()].ty.shape.0[0] = Dim::Const(rows.len());
            node.inputs[0] = graph.add_slice(leaf, rows.start, rows.len());
        } else if let Op::RoundAtRandom(random) = &mut node.op {
            let (leaf, rows) = widened[&node.inputs[0]].clone();
            if rows.is_empty() {
                continue;
            }
            random.first_row = rows.start as u64;
            node.updates[0] = graph.add_slice(leaf, rows.start, rows.len());
        } else if node.op.has(Property::Optimizer) {
            place = (node.phase, node.layer);
            let [parameter, first, second, _] = node.updates[..] else {
                unreachable!("AdamW has four updates")
            };
            let is_widened = widened.contains_key(&parameter);
            let (leaf, rows) = match widened.get(&parameter) {
                Some(widened) => widened.clone(),
                None => own_rows(graph, parameter, shard),
            };
            if !weights.contains(&leaf) && !trained.contains(&leaf) {
                trained.push(leaf);
            }
            let own_moments = [first, second].map(|moment| graph.whole(moment));
            for moment in own_moments {
                if !moments.contains(&moment) {
                    graph.leaf_mut(moment).shard = Some(shard);
                    moments.push(moment);
                }
            }
            if rows.is_empty() {
                continue;
            }
            let gradient = graph.whole(node.inputs[0]);
            let is_all = rows == shard.own_rows(&graph.value(leaf).ty);
            let mut part = |whole: ValueId| graph.add_slice(whole, rows.start, rows.len());
            node.inputs[0] =
                parts.get(&gradient).copied().filter(|_| is_all).unwrap_or_else(|| part(gradient));
            if !is_widened {
                node.updates[0] = part(leaf);
            }
            (node.updates[1], node.updates[2]) = (part(own_moments[0]), part(own_moments[1]));
        } else if let Op::GradNorm { squares, .. } = &mut node.op {
            let gradients = node.inputs.split_off(2);
            let (divided, rest): (Vec<ValueId>, Vec<ValueId>) =
                gradients.into_iter().partition(|input| parts.contains_key(input));
            if divided.is_empty() {
                node.inputs.extend(rest);
                own.push(node);
                continue;
            }
            *squares = true;
            let place = (node.phase, node.layer);
            let divided: Vec<ValueId> = divided.iter().map(|gradient| parts[gradient]).collect();
            let is_offloaded = policy.offloads_gradients();
            let count = if is_offloaded { divided.len() + rest.len() } else { 1 };
            let ty = Type::new(Shape::vector(count), Storage::Plain(DType::F64));
            let all = graph.add_leaf("squares", ty, LeafKind::State);
            if is_offloaded {
                // One after the other, so that they are not all on the device at the same time.
                for (row, gradient) in divided.iter().chain(&rest).enumerate() {
                    let sum = graph.add_slice(all, row, 1);
                    sum_squares(graph, &mut own, vec![*gradient], sum, place);
                }
                let of_divided = graph.add_slice(all, 0, divided.len());
                sum_over_ranks(graph, &mut own, vec![of_divided], rank, place);
            } else {
                node.inputs.extend(rest);
                sum_squares(graph, &mut own, divided, all, place);
                sum_over_ranks(graph, &mut own, vec![all], rank, place);
            }
            node.inputs.push(all);
        } else if node.op == Op::Zero {
            // The first `Zero` follows all updates.
            if !trained.is_empty() {
                let updates = std::mem::take(&mut trained);
                gather_changes(graph, &mut own, updates, shard, place);
            }
            if let Some(part) = parts.get(&node.updates[0]) {
                node.updates[0] = *part;
            }
        }
        own.push(node);
    }
    graph.set_nodes(Entry::Update, own);
    let mut nodes = Vec::new();
    for divided in weights.into_iter().chain(moments) {
        let name = graph.name_from(divided, |name| format!("{name} whole"));
        let whole = gather(graph, &mut nodes, vec![divided], name, shard, place);
        // The host reads each one before the next is gathered, so they share memory.
        settle(graph, &mut nodes, whole, whole, place);
    }
    graph.entries.push((Entry::Collect, nodes));
}

/// The leaf that a value is a slice of, and the rows of that slice that this rank updates.
fn own_rows(graph: &Graph, value: ValueId, shard: Shard) -> (ValueId, Range<usize>) {
    let leaf = graph.whole(value);
    let first = graph.value(value).role.first_row();
    let (rows, _) = graph.value(value).ty.shape.at(&Extent::default());
    let own = shard.own_rows(&graph.value(leaf).ty);
    let (start, end) = (own.start.max(first), own.end.min(first + rows));
    (leaf, start..end.max(start))
}

/// Makes each rank round only its rows of the divided trained matrices, and returns these matrices. `place.rs` marks them
/// as divided later, and `stream.rs` gathers them.
fn round_own_rows(graph: &mut Graph, policy: &Policy, shard: Shard) -> Vec<ValueId> {
    let matrices = divided_matrices(graph, policy, shard);
    let Some(nodes) = graph.take_nodes(Entry::Refresh) else { return matrices };
    let mut own = Vec::with_capacity(nodes.len());
    for mut node in nodes {
        if node.op.has(Property::ByRows) && matrices.contains(&node.inputs[0]) {
            let (_, rows) = own_rows(graph, node.inputs[0], shard);
            if rows.is_empty() {
                continue;
            }
            for whole in [&mut node.inputs[0], &mut node.updates[0]] {
                *whole = graph.add_slice(*whole, rows.start, rows.len());
            }
        }
        own.push(node);
    }
    graph.set_nodes(Entry::Refresh, own);
    matrices
}

/// Divides large gradients over the ranks and returns the rows that this rank keeps, by gradient. The backward pass then
/// adds to partial gradients. A gradient stays whole if a regularizer adds to it, or if it is too small for several ranks.
fn divide_gradients(graph: &mut Graph, shard: Shard) -> ByValue<ValueId> {
    let updates = graph.nodes(Entry::Update).iter();
    let regularized: ValueSet = updates
        .filter(|node| matches!(node.op, Op::FourierReg { .. }))
        .flat_map(|node| node.updates.clone())
        .collect();
    let is_large = |id: &ValueId| !shard.rows(&graph.value(*id).ty)[1].is_empty();
    let gradients = graph.trainable().map(|(_, gradient)| gradient);
    let large: Vec<ValueId> = gradients.filter(|id| !regularized.contains(id) && is_large(id)).collect();
    let mut parts: ByValue<ValueId> = ByValue::default();
    let Some(mut nodes) = graph.take_nodes(Entry::MicroStep) else { return parts };
    for gradient in large {
        let rows = shard.own_rows(&graph.value(gradient).ty);
        let part = graph.add_slice(gradient, rows.start, rows.len());
        let name = graph.name_from(gradient, |name| format!("{name} partial"));
        let partial = graph.add_leaf(name, graph.value(gradient).ty.clone(), LeafKind::Partial(part));
        read_copy(graph, &mut nodes, gradient, partial);
        graph.leaf_mut(gradient).shard = Some(shard);
        parts.insert(gradient, part);
    }
    graph.set_nodes(Entry::MicroStep, nodes);
    parts
}

/// Fetches the rows that this rank stores of an offloaded tensor before they are gathered, and copies an offloaded weight
/// that ranks have updated back once it is complete. Runs after it is decided what is offloaded.
pub fn gather_offloaded(graph: &mut Graph) {
    for index in 0..graph.entries.len() {
        if !graph.entries[index].1.iter().any(|node| node.op.is_collective()) {
            continue;
        }
        let mut own = Vec::new();
        for mut node in std::mem::take(&mut graph.entries[index].1) {
            let place = (node.phase, node.layer);
            let Op::AllGather(shard) = node.op else {
                own.push(node);
                continue;
            };
            if let [divided] = node.inputs[..]
                && is_offloaded(graph, divided)
            {
                node.inputs.push(fetch_own_rows(graph, &mut own, divided, shard, place));
            }
            let updates = std::mem::take(&mut node.updates);
            let (away, here): (Vec<ValueId>, Vec<ValueId>) =
                updates.into_iter().partition(|id| is_offloaded(graph, *id));
            node.updates = here;
            if !(node.inputs.is_empty() && node.updates.is_empty()) {
                own.push(node);
            }
            for leaf in away {
                let copy = fetch(graph, &mut own, leaf, "here", place);
                gather_changes(graph, &mut own, vec![copy], shard, place);
                stow(graph, &mut own, copy, leaf, place);
                settle(graph, &mut own, copy, leaf, place);
            }
        }
        graph.entries[index].1 = own;
    }
}

fn is_offloaded(graph: &Graph, id: ValueId) -> bool {
    graph.value(id).space != Space::Device
}

/// Sums gradients and the loss over the ranks in depth-first order. Runs after all passes that reorder nodes, because the
/// order of nodes decides when a gradient is complete. In breadth-first order `breadth.rs` has done this.
pub fn sum_gradients(graph: &mut Graph, rank: Rank, extent: &Extent) {
    if rank.is_only() || !graph.laps.is_empty() {
        return;
    }
    let Some(nodes) = graph.take_nodes(Entry::MicroStep) else { return };
    let mut insertions = Insertions::default();
    for (position, copy) in copies_of_offloaded(graph, &nodes) {
        let place = (nodes[position].phase, nodes[position].layer);
        let mut emitted = Vec::new();
        sum_over_ranks(graph, &mut emitted, vec![copy], rank, place);
        emitted.into_iter().for_each(|node| insertions.push(position, node));
    }
    // Partial gradients of the last exchange, with the parts that receive their sums.
    let mut scattered: Vec<(ValueId, ValueId)> = Vec::new();
    for Bucket { last, sums, partials } in buckets(graph, &nodes, extent) {
        let place = (Phase::Backward, nodes[last].layer);
        let position = seam_after(&nodes, last + 1);
        let mut emitted = Vec::new();
        for (partial, part) in std::mem::take(&mut scattered) {
            settle(graph, &mut emitted, partial, part, place);
        }
        if !sums.is_empty() {
            sum_over_ranks(graph, &mut emitted, sums, rank, place);
        }
        if !partials.is_empty() {
            let parts: Vec<ValueId> =
                partials.iter().filter_map(|partial| own_part(graph, *partial)).collect();
            scattered = partials.iter().copied().zip(parts.iter().copied()).collect();
            let mut sums = Vec::with_capacity(parts.len());
            for part in &parts {
                sums.push(if is_offloaded(graph, *part) {
                    fetch_part(graph, &mut emitted, *part, place)
                } else {
                    *part
                });
            }
            scatter_over_ranks(graph, &mut emitted, partials, sums.clone(), rank, place);
            for (sum, part) in sums.into_iter().zip(parts).filter(|(sum, part)| sum != part) {
                stow(graph, &mut emitted, sum, part, place);
            }
        }
        emitted.into_iter().for_each(|node| insertions.push(position, node));
    }
    let mut emitted = Vec::new();
    for (partial, part) in scattered {
        settle(graph, &mut emitted, partial, part, (Phase::Backward, None));
    }
    emitted.into_iter().for_each(|node| insertions.push(nodes.len(), node));
    let cleared = clear_partials(graph, &nodes);
    cleared.into_iter().for_each(|(position, node)| insertions.push(position, node));
    graph.set_nodes(Entry::MicroStep, insertions.into_nodes(nodes));
}

/// The fetched copies of offloaded gradients that are complete, each with the position of the node that copies it back.
fn copies_of_offloaded(graph: &Graph, nodes: &[Node]) -> Vec<(usize, ValueId)> {
    let gradients: ValueSet = graph.trainable().map(|(_, gradient)| gradient).collect();
    let mut last: ByValue<(usize, ValueId)> = ByValue::default();
    for (index, node) in
        nodes.iter().enumerate().filter(|(_, node)| node.op.route() == Some(Route::FromDevice))
    {
        let stowed = node.updates.iter().filter(|id| gradients.contains(id));
        last.extend(stowed.map(|gradient| (*gradient, (index, node.inputs[0]))));
    }
    let mut all: Vec<(usize, ValueId)> = last.iter().map(|(_, found)| *found).collect();
    all.sort_unstable();
    all
}

/// The rows of the summed gradient that this rank keeps, if the value is a partial gradient.
pub fn own_part(graph: &Graph, partial: ValueId) -> Option<ValueId> {
    match graph.value(partial).leaf()?.kind {
        LeafKind::Partial(part) => Some(part),
        _ => None,
    }
}

/// Nodes that set each partial gradient to zero, with their positions in front of the first node that adds to it.
fn clear_partials(graph: &mut Graph, nodes: &[Node]) -> Vec<(usize, Node)> {
    let mut seen = ValueSet::default();
    let mut cleared = Vec::new();
    for (index, node) in nodes.iter().enumerate() {
        for update in node.updates.iter().map(|update| graph.whole(*update)).collect::<Vec<_>>() {
            if own_part(graph, update).is_some() && seen.insert(update) {
                let mut emitted = Vec::new();
                clear(graph, &mut emitted, update, (node.phase, node.layer));
                cleared.extend(emitted.into_iter().map(|node| (seam_before(nodes, index), node)));
            }
        }
    }
    cleared
}

/// Gradients that are exchanged together.
struct Bucket {
    /// The node that completes them.
    last: usize,
    /// Values that every rank receives the whole sum of.
    sums: Vec<ValueId>,
    /// Partial gradients, of whose sum a rank receives its rows.
    partials: Vec<ValueId>,
}

fn buckets(graph: &Graph, nodes: &[Node], extent: &Extent) -> Vec<Bucket> {
    // The last node that adds to each gradient.
    let mut last_adds: ByValue<usize> = ByValue::default();
    let gradients: ValueSet = graph.trainable().map(|(_, gradient)| gradient).collect();
    for (index, node) in nodes.iter().enumerate() {
        let updates = node.updates.iter().map(|id| graph.whole(*id));
        let is_summed = |id: &ValueId| {
            !is_offloaded(graph, *id) && (gradients.contains(id) || own_part(graph, *id).is_some())
        };
        last_adds.extend(updates.filter(is_summed).map(|id| (id, index)));
        last_adds.extend(node.updated_loss().map(|loss| (loss, index)));
    }
    let mut complete: Vec<(usize, ValueId)> = last_adds.iter().map(|(id, index)| (*index, id)).collect();
    complete.sort_unstable();
    let mut buckets = Vec::new();
    let (mut values, mut bytes) = (Vec::new(), 0);
    for (at, &(last, id)) in complete.iter().enumerate() {
        values.push(id);
        bytes += graph.value(id).ty.bytes(extent);
        let is_last_of_node = complete.get(at + 1).is_none_or(|(next, _)| *next != last);
        let is_last = at + 1 == complete.len();
        if is_last || (is_last_of_node && bytes >= BUCKET_BYTES) {
            let (partials, sums) = values.drain(..).partition(|id| own_part(graph, *id).is_some());
            buckets.push(Bucket { last, sums, partials });
            bytes = 0;
        }
    }
    buckets
}
