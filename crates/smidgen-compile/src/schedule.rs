//! The schedule: nodes become steps, and values become buffers with a lifetime but without an offset.
//!
//! The order is the order of the graph: autodiff and recompute emit each node just before its results are needed, so
//! lifetimes are short without a search.

use crate::passes::join_operands::{self, Layout};
use crate::passes::reuse_in_place::{SharedBuffers, owner_of};
use crate::request::Request;
use smidgen_ir::plan::{align_up, ends_of_transfers};
use smidgen_ir::workspace::Target;
use smidgen_ir::{
    Buffer, BufferId, ByValue, Category, DType, DeviceKind, Dim, Entry, EntryPlan, Fusion, Graph, Lap,
    LeafKind, Lifetime, Node, Operands, Plan, PlannedValue, Property, Space, SpaceSize, Step, Type, Value,
    ValueId, ValueRole, ValueSet,
};
use std::ops::Range;

/// A plan whose buffers are all at offset 0.
#[derive(Debug)]
pub struct Schedule {
    pub plan: Plan,
}

impl Schedule {
    /// Device bytes that are in use for the whole run. Any packing needs these and the transient bytes in use.
    pub fn persistent_bytes(&self) -> usize {
        self.sum_bytes(Space::Device, |buffer| buffer.lifetime == Lifetime::Run)
    }

    /// Bytes in a space other than the device. Activations count as if they were never freed, because all of them are
    /// there when the backward pass starts.
    pub fn size_in(&self, space: Space) -> SpaceSize {
        let is_shared = |buffer: &Buffer| self.plan.has_ranks && buffer.is_shareable();
        let persistent_bytes = self.sum_bytes(space, |_| true);
        SpaceSize { persistent_bytes, transient_bytes: 0, shared_bytes: self.sum_bytes(space, is_shared) }
    }

    fn sum_bytes(&self, space: Space, is_counted: impl Fn(&Buffer) -> bool) -> usize {
        let in_space = self.plan.buffers.iter().filter(|buffer| buffer.space == space);
        in_space.filter(|buffer| is_counted(buffer)).map(|buffer| align_up(buffer.bytes)).sum()
    }
}

/// Where a value is stored.
#[derive(Clone, Copy, Default)]
struct InBuffer {
    buffer: Option<BufferId>,
    first_byte: usize,
    stride: Option<usize>,
}

pub fn plan_lifetimes(
    mut graph: Graph,
    shared: &SharedBuffers,
    layout: &Layout,
    request: &Request,
) -> Schedule {
    let mut plan = Plan {
        title: request.title.clone(),
        extent: request.extent,
        device: request.device,
        precision: request.precision,
        decode_extent: request.decode_extent(),
        threads: request.threads,
        encoder_layers: request.encoder_layers(),
        persistent_bytes: 0,
        transient_bytes: 0,
        has_ranks: !request.rank.is_only(),
        host: SpaceSize::default(),
        disk: SpaceSize::default(),
        values: Vec::new(),
        buffers: Vec::new(),
        entries: Vec::new(),
    };
    let used = used_leaves(&graph);
    let touches = touches_of_leaves(&graph);
    let mut places = vec![InBuffer::default(); graph.values.len()];
    for (index, value) in graph.values.iter().enumerate() {
        let id = ValueId(index as u32);
        match &value.role {
            ValueRole::Leaf(_) if layout.inside.contains_key(&id) => {}
            // A copy that is rounded after each fetch is a temporary, not this leaf.
            ValueRole::Leaf(leaf) if leaf.rounded.is_some_and(|from| is_offloaded(&graph, from.of)) => {}
            // A gradient that exists only as the partial gradient of a lap.
            ValueRole::Leaf(leaf) if leaf.kind == LeafKind::Gradient && !used.contains(&id) => {}
            ValueRole::Leaf(leaf) => {
                let category = Category::of_leaf(leaf.kind);
                let lifetime = leaf_lifetime(&graph, leaf.kind, touches.get(&id));
                let room = layout.room.get(&id);
                let bytes = room.map_or_else(
                    || value.stored_bytes(&plan.extent_of_lifetime(lifetime)),
                    |room| room.bytes(&value.ty),
                );
                places[index].stride = room.map(|room| room.stride);
                let buffer = Buffer { space: value.space, offset: 0, bytes, category, lifetime };
                places[index].buffer = Some(add_buffer(&mut plan, buffer));
            }
            ValueRole::Slice(_) | ValueRole::Temp => {}
        }
    }
    // Leaves inside others need the places of those first; slices follow at the end.
    for (guest, place) in &layout.inside {
        let host = places[place.host.index()];
        let element = graph.value(place.host).ty.storage.plain().map_or(0, DType::bytes);
        let stride = host.stride.expect("a host has room");
        let first_byte = (place.first_row * stride + place.first_column) * element;
        places[guest.index()] = InBuffer { first_byte, ..host };
    }
    let target = Target { device: request.device, precision: request.precision, threads: request.threads };
    for (entry, nodes) in std::mem::take(&mut graph.entries) {
        let extent = plan.extent_of(entry);
        let usual = request.workload.extent(&extent);
        let awaits = awaited(&graph, &nodes);
        let mut lives = lifetimes(&graph, &nodes, shared, request.device);
        extend_to_transfers(&graph, &nodes, &awaits, shared, &mut lives);
        let laps = if entry == Entry::MicroStep { std::mem::take(&mut graph.laps) } else { vec![] };
        let spare = spare_of_owners(&graph, layout, shared);
        let mut buffer_of: ByValue<BufferId> = ByValue::default();
        for (owner, &(first, last)) in lives.iter() {
            let spare = spare.get(&owner).copied().unwrap_or(0);
            let bytes = join_operands::strided_bytes(&graph.value(owner).ty, spare, &extent);
            let category = category_of(&graph, &nodes[first]);
            let (first, last) = cover_laps(&laps, first, last);
            let lifetime = Lifetime::Steps { entry, first, last };
            let buffer = Buffer { space: graph.value(owner).space, offset: 0, bytes, category, lifetime };
            buffer_of.insert(owner, add_buffer(&mut plan, buffer));
        }
        let mut steps = Vec::with_capacity(nodes.len());
        let ends = ends_of_groups(request.device, &nodes);
        // Reused for all nodes: allocating new lists for each would cost more than filling them.
        let mut types: [Vec<&Type>; 3] = Default::default();
        for (index, (node, awaits)) in nodes.into_iter().zip(awaits).enumerate() {
            for output in &node.outputs {
                let owner = owner_of(&graph, shared, *output);
                let whole = graph.whole(*output);
                let (_, columns) = graph.value(whole).ty.shape.at(&extent);
                let place = &mut places[whole.index()];
                place.buffer = Some(buffer_of[&owner]);
                place.stride = spare.get(&owner).map(|spare| columns + spare);
                // A value that shares the bytes of a tile starts where the tile starts.
                if let Some(ValueRole::Slice(tile)) =
                    shared.get(output).map(|other| &graph.value(*other).role)
                {
                    let element = graph.value(whole).ty.storage.plain().map_or(0, DType::bytes);
                    place.first_byte = tile.first_row * place.stride.unwrap_or(columns) * element;
                }
            }
            for (types, ids) in types.iter_mut().zip([&node.inputs, &node.outputs, &node.updates]) {
                types.clear();
                types.extend(ids.iter().map(|id| &graph.value(*id).ty));
            }
            let [inputs, outputs, updates] = &types;
            let scratch = node.op.workspace_bytes(inputs, &extent, target);
            let life = Lifetime::Steps { entry, first: index, last: index };
            let before: Option<&Step> = steps.last().filter(|_| index > 0 && ends[index - 1] >= index);
            let workspace = match before {
                // Fused steps share their scratch, so the operands of neither overlap the scratch of the other.
                Some(Step { workspace: Some(id), .. }) => {
                    let buffer = &mut plan.buffers[id.index()];
                    buffer.bytes = buffer.bytes.max(scratch);
                    if let Lifetime::Steps { last, .. } = &mut buffer.lifetime {
                        *last = index;
                    }
                    Some(*id)
                }
                _ => (scratch > 0).then(|| {
                    let (space, category) = (Space::Device, Category::Workspace);
                    let buffer = Buffer { space, offset: 0, bytes: scratch, category, lifetime: life };
                    add_buffer(&mut plan, buffer)
                }),
            };
            let keys_per_query = request.workload.keys_per_query;
            let extent = &usual;
            let cost = node.op.cost(&Operands { inputs, outputs, updates, extent, keys_per_query });
            let Node { op, inputs, outputs, updates, phase, layer } = node;
            steps.push(Step { op, inputs, outputs, updates, workspace, awaits, phase, layer, cost });
        }
        plan.entries.push(EntryPlan { entry, steps, laps });
    }
    for (index, value) in graph.values.iter().enumerate() {
        let ValueRole::Slice(slice) = &value.role else { continue };
        places[index] = places[slice.of.index()];
        let place = &mut places[index];
        if let (Some(stride), Some(dtype)) = (place.stride, graph.value(slice.of).ty.storage.plain()) {
            place.first_byte += slice.first_row * stride * dtype.bytes();
        }
    }
    let planned = |(value, place): (Value, InBuffer)| {
        let Value { name, ty, role, .. } = value;
        let InBuffer { buffer, first_byte, stride } = place;
        PlannedValue { name, ty, role, buffer, first_byte, stride }
    };
    plan.values = graph.values.into_iter().zip(places).map(planned).collect();
    Schedule { plan }
}

/// Values that any node touches.
fn used_leaves(graph: &Graph) -> ValueSet {
    let nodes = graph.entries.iter().flat_map(|(_, nodes)| nodes);
    nodes.flat_map(Node::operands).map(|id| graph.whole(id)).collect()
}

/// The first and the last node of `micro_step` that touch a leaf, for leaves that exist only for some steps.
fn touches_of_leaves(graph: &Graph) -> ByValue<(usize, usize)> {
    let mut touches: ByValue<(usize, usize)> = ByValue::default();
    for (index, node) in graph.nodes(Entry::MicroStep).iter().enumerate() {
        for operand in node.operands() {
            let whole = graph.whole(operand);
            let kind = graph.value(whole).leaf().map(|leaf| leaf.kind);
            if matches!(kind, Some(LeafKind::Partial(_) | LeafKind::Carried(_))) {
                touches.get_or_insert_with(whole, || (index, index)).1 = index;
            }
        }
    }
    touches
}

fn is_offloaded(graph: &Graph, leaf: ValueId) -> bool {
    graph.value(leaf).space != Space::Device
}

/// Extends a lifetime to whole laps, unless it is inside one micro-batch of a lap: a value that is also used outside must
/// live while the steps of the lap repeat.
fn cover_laps(laps: &[Lap], first: usize, last: usize) -> (usize, usize) {
    let lap_at = |step: usize| laps.iter().map(|lap| &lap.each).find(|each| each.contains(&step));
    let (begin, end) = (lap_at(first), lap_at(last));
    if begin.is_some() && begin == end {
        return (first, last);
    }
    (begin.map_or(first, |each| each.start), end.map_or(last, |each| each.end - 1))
}

/// The category of a temporary: that of the leaf that it is a copy of, otherwise activations.
fn category_of(graph: &Graph, producer: &Node) -> Category {
    let copied = producer.inputs.first().and_then(|input| graph.value(graph.whole(*input)).leaf());
    match copied.filter(|_| producer.op.is_transfer() && producer.op.has(Property::CopiesLeaf)) {
        Some(leaf) => Category::of_leaf(leaf.kind),
        None => Category::Activations,
    }
}

/// Extends the lifetimes of what a transfer reads or writes until a step waits for it, or to the end of the entry point.
fn extend_to_transfers(
    graph: &Graph,
    nodes: &[Node],
    awaits: &[Vec<usize>],
    shared: &SharedBuffers,
    lives: &mut ByValue<(usize, usize)>,
) {
    let ends =
        ends_of_transfers(nodes.iter().zip(awaits).map(|(node, awaits)| (&node.op, awaits.as_slice())));
    for (node, end) in nodes.iter().zip(ends).filter(|(node, _)| node.op.is_transfer()) {
        for operand in node.operands() {
            if let Some(life) = lives.get_mut(&owner_of(graph, shared, operand)) {
                life.1 = life.1.max(end.min(nodes.len() - 1));
            }
        }
    }
}

/// The transfers that each node waits for. The nodes that wait are the first node that computes with a fetched value, the
/// node that frees a stowed value, and the node that fetches it again. Computations do not wait for a transfer that only
/// waits for another transfer.
fn awaited(graph: &Graph, nodes: &[Node]) -> Vec<Vec<usize>> {
    // Transfers that no computation has waited for, by the value that they write, with its rows.
    let mut in_progress: ByValue<Vec<(Range<usize>, usize)>> = ByValue::default();
    let mut awaits = vec![Vec::new(); nodes.len()];
    for (index, node) in nodes.iter().enumerate() {
        for operand in node.reads() {
            let rows = rows_of(graph, operand);
            if let Some(open) = in_progress.get_mut(&graph.whole(operand)) {
                let meets = |other: &Range<usize>| other.start < rows.end && rows.start < other.end;
                awaits[index].extend(open.iter().filter(|(other, _)| meets(other)).map(|(_, step)| *step));
                if !node.op.is_transfer() {
                    open.retain(|(other, _)| !meets(other));
                }
            }
        }
        if node.op.is_transfer() {
            for written in node.outputs.iter().chain(&node.updates) {
                let open = in_progress.get_or_insert_with(graph.whole(*written), Vec::new);
                open.push((rows_of(graph, *written), index));
            }
        }
    }
    awaits
}

/// The rows that a value occupies in the value that it is a slice of.
fn rows_of(graph: &Graph, value: ValueId) -> Range<usize> {
    match (&graph.value(value).role, graph.value(value).ty.shape.0.first()) {
        // A rank may have no rows of a tensor, but must still wait for its transfer.
        (ValueRole::Slice(slice), Some(Dim::Const(rows))) => {
            slice.first_row..slice.first_row + (*rows).max(1)
        }
        _ => 0..usize::MAX,
    }
}

/// For every node the last one that a GPU may fuse with it. Operands and scratch of a fused group live until its end.
fn ends_of_groups(device: DeviceKind, nodes: &[Node]) -> Vec<usize> {
    let mut ends: Vec<usize> = Vec::with_capacity(nodes.len());
    while ends.len() < nodes.len() {
        let first = ends.len();
        let end = if device == DeviceKind::Cuda { first + count_fused(&nodes[first..]) } else { first + 1 };
        ends.resize(end, end - 1);
    }
    ends
}

/// How many nodes from the first on a GPU fuses: the gradients of B and of h, which read the same dy, or a node and the
/// rounding of its outputs.
fn count_fused(nodes: &[Node]) -> usize {
    let (first, rest) = nodes.split_first().expect("a node");
    let of_adapter = |next: &Node| {
        first.op.begins() == Some(Fusion::AdapterGradient)
            && first.op.fuses_with(&next.op)
            && next.op.terms() == 1
            && first.inputs[0] == next.inputs[0]
    };
    let rounds = |next: &&Node| {
        first.op.has(Property::Rounds)
            && first.op.fuses_with(&next.op)
            && first.outputs.contains(&next.inputs[0])
    };
    1 + if rest.first().is_some_and(of_adapter) { 1 } else { rest.iter().take_while(rounds).count() }
}

/// The lifetime of a leaf. A cache lives during all of `decode`: no temporary of that entry point overlaps it, so it keeps
/// its contents from one run to the next, while temporaries of other entry points may overwrite it. A partial gradient
/// lives from its clearing to its transfer, a carried value from the lap that writes it to the last that reads it.
fn leaf_lifetime(graph: &Graph, kind: LeafKind, touches: Option<&(usize, usize)>) -> Lifetime {
    match kind {
        LeafKind::Partial(_) | LeafKind::Carried(_) => {
            let (first, last) = touches.copied().unwrap_or_default();
            let (first, last) = cover_laps(&graph.laps, first, last);
            Lifetime::Steps { entry: Entry::MicroStep, first, last }
        }
        LeafKind::Cache => {
            let last = graph.nodes(Entry::Decode).len().saturating_sub(1);
            Lifetime::Steps { entry: Entry::Decode, first: 0, last }
        }
        LeafKind::Weight
        | LeafKind::Adapter
        | LeafKind::Gradient
        | LeafKind::Moment
        | LeafKind::Derived
        | LeafKind::Input
        | LeafKind::State => Lifetime::Run,
    }
}

/// Spare columns of each buffer that has any, by its owner: the most that a value in it needs.
fn spare_of_owners(graph: &Graph, layout: &Layout, shared: &SharedBuffers) -> ByValue<usize> {
    let mut most: ByValue<usize> = ByValue::default();
    for (value, columns) in &layout.spare {
        let spare = most.get_or_insert_with(owner_of(graph, shared, *value), || 0);
        *spare = (*spare).max(*columns);
    }
    most
}

/// First and last step of every temporary of one entry point that owns a buffer.
fn lifetimes(
    graph: &Graph,
    nodes: &[Node],
    shared: &SharedBuffers,
    device: DeviceKind,
) -> ByValue<(usize, usize)> {
    let mut lives: ByValue<(usize, usize)> = ByValue::default();
    let ends = ends_of_groups(device, nodes);
    for (index, (node, last)) in nodes.iter().zip(ends).enumerate() {
        for output in &node.outputs {
            let life = lives.get_or_insert_with(owner_of(graph, shared, *output), || (index, last));
            life.1 = last;
        }
        for value in node.reads() {
            if let Some(life) = lives.get_mut(&owner_of(graph, shared, value)) {
                life.1 = last;
            }
        }
    }
    lives
}

fn add_buffer(plan: &mut Plan, buffer: Buffer) -> BufferId {
    let id = BufferId(plan.buffers.len() as u32);
    plan.buffers.push(buffer);
    id
}
