//! The checks between stages: a graph is well formed, and no two values of a plan overwrite each other.
//!
//! A violation is a bug of the stage that ran last, never the user's mistake: [`graph`] and [`plan`] return all findings as
//! text, and callers panic with the name of the stage. Whether the computed numbers are right is not checked here.

use crate::by_value::{ByValue, ValueSet};
use crate::graph::{Entry, Graph, LeafKind, Node, Space, Value, ValueId, ValueRole};
use crate::op::Op;
use crate::op_table::{Property, Route};
use crate::plan::{ALIGNMENT, BufferId, EntryPlan, Lifetime, Plan, Region, Step, ends_of_transfers};
use crate::rank::{Cut, Shard};
use crate::shape::{Dim, Type};
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

/// Panics with the first finding, naming the stage that produced it: one line that a user can report.
pub fn expect_sound(stage: &str, findings: &[String]) {
    if let [first, others @ ..] = findings {
        let more = if others.is_empty() { String::new() } else { format!(" (and {} more)", others.len()) };
        panic!("`{stage}` broke an invariant: {first}{more}; this is a bug of smidgen, please report it");
    }
}

/// A node or a step; it becomes text only in a finding.
#[derive(Clone, Copy)]
struct Position {
    entry: Entry,
    kind: &'static str,
    index: usize,
    op: &'static str,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Position { entry, kind, index, op } = self;
        write!(f, "{entry} {kind} {index} ({op})")
    }
}

/// Every value is written once and before it is read, operands fit their operation, and no entry point touches a
/// temporary of another.
pub fn graph(graph: &Graph) -> Vec<String> {
    let mut findings = Vec::new();
    let mut written = ValueSet::default();
    for (entry, nodes) in &graph.entries {
        let mut defined = Defined::default();
        let mut fetched = ValueSet::default();
        for (index, node) in nodes.iter().enumerate() {
            let place = Position { entry: *entry, kind: "node", index, op: node.op.name() };
            check_node(graph, node, place, &defined, &fetched, &mut findings);
            if node.op.has(Property::CopiesLeaf) {
                fetched.extend(&node.outputs);
            }
            for output in &node.outputs {
                let value = graph.value(*output);
                let whole = graph.whole(*output);
                let is_next = defined.write(whole, tile_of(&value.ty).filter(|_| whole != *output));
                if !written.insert(*output) || !is_next {
                    findings.push(format!("{place}: `{}` is written twice", value.name));
                }
            }
        }
    }
    let fetched: ValueSet = graph
        .entries
        .iter()
        .flat_map(|(_, nodes)| nodes)
        .filter(|node| node.op.has(Property::CopiesLeaf))
        .flat_map(|node| node.outputs.iter().copied())
        .collect();
    for value in &graph.values {
        if let ValueRole::Slice(slice) = &value.role {
            let whole = graph.value(slice.of);
            let may_have_parts = whole.leaf().is_some() || fetched.contains(&slice.of);
            if tile_of(&value.ty).is_some() || !may_have_parts {
                check_tile(whole, value, slice.first_row, &mut findings);
            } else {
                check_slice(whole, value, slice.first_row, &mut findings);
            }
        }
    }
    for (leaf, gradient) in graph.trainable() {
        let (value, gradient) = (graph.value(leaf), graph.value(gradient));
        if value.ty.shape != gradient.ty.shape {
            findings.push(format!("gradient of `{}` has shape {}", value.name, gradient.ty.shape));
        }
    }
    findings
}

/// A rank can use only its own rows of a divided leaf: any of them if rows are contiguous, otherwise all of them at once.
fn check_own_rows(leaf: &Value, slice: &Value, first_row: usize, shard: Shard, findings: &mut Vec<String>) {
    let own = shard.own_rows(&leaf.ty);
    let is_own = match slice.ty.shape.0.first() {
        Some(Dim::Const(rows)) if leaf.ty.storage.has_contiguous_rows() => {
            own.start <= first_row && first_row + rows <= own.end
        }
        Some(Dim::Const(rows)) => (first_row, *rows) == (own.start, own.len()),
        _ => false,
    };
    if shard.cut != Cut::Rows || !is_own {
        findings.push(format!("`{}` is not what this rank stores of `{}`", slice.name, leaf.name));
    }
}

/// The values written so far, as a whole or tile by tile.
#[derive(Default)]
struct Defined {
    whole: ValueSet,
    /// How many tokens of a value its tiles have covered.
    covered: ByValue<usize>,
}

impl Defined {
    /// Records a write. Returns whether it is the next tile of the value, or all of it, and was not written before.
    fn write(&mut self, whole: ValueId, tile: Option<(usize, usize)>) -> bool {
        let Some((first, most)) = tile else {
            return self.whole.insert(whole) && !self.covered.contains_key(&whole);
        };
        let covered = self.covered.get_or_insert_with(whole, || 0);
        let is_next = *covered == first && !self.whole.contains(&whole);
        *covered = first + most;
        is_next
    }

    /// Whether a value may be read: all of its `tokens` must have been written, or those of the tile.
    fn holds(&self, whole: ValueId, tile: Option<(usize, usize)>, tokens: usize) -> bool {
        let needed = tile.map_or(tokens, |(first, most)| tokens.min(first + most).max(first + 1));
        self.whole.contains(&whole) || self.covered.get(&whole).is_some_and(|covered| *covered >= needed)
    }
}

/// The first token of a tile and the most tokens it can have.
fn tile_of(ty: &Type) -> Option<(usize, usize)> {
    match ty.shape.0.first() {
        Some(Dim::Tile { first, most }) => Some((*first, *most)),
        _ => None,
    }
}

/// A tile is some tokens of an activation or an input, with the same storage, width and space.
fn check_tile(whole: &Value, tile: &Value, first_row: usize, findings: &mut Vec<String>) {
    let fits = !matches!(whole.role, ValueRole::Slice(_))
        && whole.ty.shape.0.first() == Some(&Dim::Tokens)
        && tile_of(&tile.ty).is_some_and(|(first, most)| first == first_row && most > 0)
        && whole.space == tile.space
        && whole.ty.storage == tile.ty.storage
        && whole.ty.shape.0[1..] == tile.ty.shape.0[1..];
    if !fits {
        findings.push(format!("`{}` {} is not a part of `{}` {}", tile.name, tile.ty, whole.name, whole.ty));
    }
}

/// A slice is some rows of a leaf or of its copy, with the same storage, width and space.
fn check_slice(leaf: &Value, slice: &Value, first_row: usize, findings: &mut Vec<String>) {
    let rows = |value: &Value| match value.ty.shape.0.first() {
        Some(Dim::Const(rows)) => *rows,
        _ => 0,
    };
    let fits = leaf.space == slice.space
        && leaf.ty.storage == slice.ty.storage
        && leaf.ty.shape.0[1..] == slice.ty.shape.0[1..]
        && first_row + rows(slice) <= rows(leaf);
    if !fits {
        findings.push(format!("`{}` {} is not a part of `{}` {}", slice.name, slice.ty, leaf.name, leaf.ty));
    }
}

fn check_node(
    graph: &Graph,
    node: &Node,
    place: Position,
    defined: &Defined,
    fetched: &ValueSet,
    findings: &mut Vec<String>,
) {
    if let Some(bad) = node.operands().find(|id| id.index() >= graph.values.len()) {
        findings.push(format!("{place}: value {} does not exist", bad.0));
        return;
    }
    for id in node.reads() {
        let whole = graph.whole(id);
        let tile = tile_of(&graph.value(id).ty).filter(|_| whole != id);
        if graph.value(whole).is_temp() && !defined.holds(whole, tile, 0) {
            findings.push(format!("{place}: `{}` is read before it is written", graph.value(id).name));
        }
    }
    for id in &node.updates {
        if graph.value(*id).is_temp() && !fetched.contains(id) {
            findings.push(format!("{place}: updates the temporary `{}`", graph.value(*id).name));
        }
    }
    check_spaces(graph, node, place, findings);
    let types = |ids: &[ValueId]| ids.iter().map(|id| &graph.value(*id).ty).collect::<Vec<_>>();
    match node.op.infer(&types(&node.inputs), &types(&node.updates)) {
        Err(error) => findings.push(format!("{place}: {error}")),
        Ok(outputs) => {
            if outputs.iter().collect::<Vec<_>>() != types(&node.outputs) {
                findings.push(format!("{place}: outputs do not have the types of the shape rule"));
            }
        }
    }
    for operand in node.operands() {
        if let ValueRole::Slice(slice) = &graph.value(operand).role
            && let Some(shard) = graph.value(slice.of).role.shard()
        {
            let (leaf, slice, first_row) = (graph.value(slice.of), graph.value(operand), slice.first_row);
            check_own_rows(leaf, slice, first_row, shard, findings);
        }
    }
    let gathers = matches!(node.op, Op::AllGather(_));
    if let [divided] = &node.inputs[..]
        && gathers
        && graph.value(*divided).space != Space::Device
    {
        let value = graph.value(*divided);
        findings.push(format!("{place}: `{}` is on {}", value.name, value.space.name()));
    }
    let divided = node.reads().find(|id| graph.value(*id).role.shard().is_some());
    if let Some(id) = divided.filter(|_| !gathers) {
        findings.push(format!("{place}: `{}` is divided over ranks", graph.value(id).name));
    }
    for output in &node.outputs {
        if !graph.value(graph.whole(*output)).is_temp() {
            findings.push(format!("{place}: writes the leaf `{}` as an output", graph.value(*output).name));
        }
    }
}

/// Operands must be on the device, except those of transfers and inputs that an operation can read offloaded.
fn check_spaces(graph: &Graph, node: &Node, place: Position, findings: &mut Vec<String>) {
    let stows = node.op.route() == Some(Route::FromDevice);
    let writes_offloaded = stows || node.op.runs_on_host();
    let inputs = node.inputs.iter().enumerate().map(|(index, id)| (*id, node.op.reads_offloaded(index)));
    let results = node.outputs.iter().chain(&node.updates).map(|id| (*id, writes_offloaded));
    for (id, may_be_offloaded) in inputs.chain(results) {
        let value = graph.value(id);
        if value.space != Space::Device && !may_be_offloaded {
            findings.push(format!("{place}: `{}` is on {}", value.name, value.space.name()));
        }
    }
    let offloaded = if stows {
        node.outputs.first().or(node.updates.first())
    } else {
        node.inputs.first().filter(|_| node.op.route() == Some(Route::ToDevice))
    };
    let is_carried =
        |id: &ValueId| graph.value(*id).leaf().is_some_and(|leaf| matches!(leaf.kind, LeafKind::Carried(_)));
    let is_resident = |id: &&ValueId| graph.value(**id).space == Space::Device && !is_carried(id);
    if let Some(id) = offloaded.filter(is_resident) {
        findings.push(format!("{place}: `{}` is on the device already", graph.value(*id).name));
    }
}

/// Every access is inside its buffer and its lifetime, regions are in bounds, and no two buffers in use overlap.
pub fn plan(plan: &Plan) -> Vec<String> {
    let mut findings = Vec::new();
    check_places(plan, &mut findings);
    check_overlaps(plan, &mut findings);
    for entry in &plan.entries {
        let mut defined = Defined::default();
        for (index, step) in entry.steps.iter().enumerate() {
            let place = Position { entry: entry.entry, kind: "step", index, op: step.op.name() };
            check_step(plan, step, place, &mut defined, &mut findings);
        }
        check_transfers(plan, &entry.steps, &mut findings);
        check_laps(plan, entry, &mut findings);
    }
    findings
}

/// The steps of a lap repeat for every micro-batch. A buffer that is also used outside of them must live for all of them,
/// and a transfer must be complete before they repeat.
fn check_laps(plan: &Plan, entry: &EntryPlan, findings: &mut Vec<String>) {
    let mut before = 0;
    for lap in &entry.laps {
        let each = &lap.each;
        if each.start < before || each.end < each.start || lap.end < each.end || lap.end > entry.steps.len() {
            findings.push(format!("lap {each:?} does not follow the one that ends at {before}"));
            return;
        }
        before = lap.end;
        for (index, buffer) in plan.buffers.iter().enumerate() {
            let Lifetime::Steps { entry: own, first, last } = buffer.lifetime else { continue };
            let is_outside = own != entry.entry || last < each.start || first >= each.end;
            let is_inside = each.contains(&first) && each.contains(&last);
            if !is_outside && !is_inside && (first > each.start || last + 1 < each.end) {
                findings.push(format!("buffer {index} lives for a part of lap {each:?} only"));
            }
        }
        for index in each.clone().filter(|index| entry.steps[*index].op.is_transfer()) {
            if !entry.steps[index + 1..each.end].iter().any(|step| step.awaits.contains(&index)) {
                findings.push(format!("transfer {index} is not complete when its lap repeats"));
            }
        }
    }
    if !entry.laps.is_empty() && before != entry.steps.len() {
        findings.push(format!("laps end at {before} of {} steps", entry.steps.len()));
    }
}

fn check_places(plan: &Plan, findings: &mut Vec<String>) {
    for (index, buffer) in plan.buffers.iter().enumerate() {
        let size = plan.size(buffer.space);
        let (first, end) = match buffer.lifetime.region() {
            Region::Persistent => (0, size.persistent_bytes),
            Region::Transient => (size.persistent_bytes, size.bytes()),
        };
        if buffer.offset < first || buffer.end() > end {
            let (offset, bytes) = (buffer.offset, buffer.bytes);
            findings.push(format!("buffer {index} at {offset}+{bytes} leaves its region {first}..{end}"));
        }
        if !buffer.offset.is_multiple_of(ALIGNMENT) {
            findings.push(format!("buffer {index} at {} is not aligned", buffer.offset));
        }
    }
}

/// Sweeps the buffers of each space by offset; lifetimes are compared only if the bytes overlap.
fn check_overlaps(plan: &Plan, findings: &mut Vec<String>) {
    for space in Space::ALL {
        let is_in_space =
            |index: &usize| plan.buffers[*index].bytes > 0 && plan.buffers[*index].space == space;
        let mut order: Vec<usize> = (0..plan.buffers.len()).filter(is_in_space).collect();
        order.sort_by_key(|index| plan.buffers[*index].offset);
        let mut open: Vec<usize> = Vec::new();
        for index in order {
            let buffer = &plan.buffers[index];
            open.retain(|other| plan.buffers[*other].end() > buffer.offset);
            for other in &open {
                if plan.buffers[*other].lifetime.meets(buffer.lifetime) {
                    findings.push(format!("buffers {other} and {index} overlap while both live"));
                }
            }
            open.push(index);
        }
    }
}

fn check_step(plan: &Plan, step: &Step, place: Position, defined: &mut Defined, findings: &mut Vec<String>) {
    for id in step.inputs.iter().chain(&step.outputs).chain(&step.updates) {
        let value = plan.value(*id);
        let Some(buffer) = value.buffer else {
            findings.push(format!("{place}: `{}` has no buffer", value.name));
            continue;
        };
        let bytes = value.end_byte(&plan.extent_of_lifetime(plan.buffer(buffer).lifetime));
        if bytes > plan.buffer(buffer).bytes {
            findings.push(format!("{place}: `{}` needs {bytes} bytes, its buffer has fewer", value.name));
        }
        check_alive(plan, buffer, place, findings);
    }
    for id in step.inputs.iter().chain(&step.updates) {
        let value = plan.value(*id);
        let whole = value.role.whole(*id);
        let tile = tile_of(&value.ty).filter(|_| whole != *id);
        let tokens = plan.extent_of(place.entry).tokens;
        if plan.value(whole).role == ValueRole::Temp && !defined.holds(whole, tile, tokens) {
            findings.push(format!("{place}: `{}` is read before it is written", value.name));
        }
    }
    for output in &step.outputs {
        let value = plan.value(*output);
        let tile = tile_of(&value.ty).filter(|_| value.role != ValueRole::Temp);
        defined.write(value.role.whole(*output), tile);
    }
    if let Some(workspace) = step.workspace {
        check_alive(plan, workspace, place, findings);
    }
    check_aliases(plan, step, place, findings);
}

#[derive(Clone, Copy, PartialEq)]
enum Access {
    Read,
    Write,
}

/// Until a step waits for a transfer, no step may touch what it writes, change what it reads, or reuse the memory of
/// either. A transfer that no step waits for ends with the entry point; one that only other transfers wait for is complete
/// for those alone.
fn check_transfers(plan: &Plan, steps: &[Step], findings: &mut Vec<String>) {
    if !steps.iter().any(|step| step.op.is_transfer()) {
        return;
    }
    let places = |ids: &[ValueId]| ids.iter().filter_map(|id| plan.bytes_of(*id)).collect::<Vec<_>>();
    let touched_by = |step: &Step| {
        let read = places(&step.inputs).into_iter().map(|place| (place, Access::Read));
        let written = [places(&step.outputs), places(&step.updates)].concat().into_iter();
        read.chain(written.map(|place| (place, Access::Write))).collect::<Vec<_>>()
    };
    let ends = ends_of_transfers(steps.iter().map(|step| (&step.op, step.awaits.as_slice())));
    // For each buffer, the transfers in progress that read or write it.
    let mut in_progress: Vec<Vec<(usize, Access, Range<usize>)>> = vec![vec![]; plan.buffers.len()];
    for (index, step) in steps.iter().enumerate() {
        let touched = touched_by(step);
        let mut disturbed = BTreeSet::new();
        for ((id, bytes), own) in &touched {
            let open = &mut in_progress[id.index()];
            open.retain(|(transfer, ..)| ends[*transfer] > index);
            let disturbs = |(_, access, other): &&(usize, Access, Range<usize>)| {
                let meets = other.start < bytes.end && bytes.start < other.end;
                meets && [*access, *own].contains(&Access::Write)
            };
            let disturbing = open.iter().filter(disturbs).map(|(transfer, ..)| *transfer);
            disturbed.extend(disturbing.filter(|transfer| !step.awaits.contains(transfer)));
        }
        findings.extend(
            disturbed
                .into_iter()
                .map(|transfer| format!("transfer {transfer}: step {index} does not wait for it")),
        );
        if !step.op.is_transfer() {
            continue;
        }
        let end = ends[index];
        for ((id, bytes), access) in touched {
            if let Lifetime::Steps { last, .. } = plan.buffer(id).lifetime
                && last < end.min(steps.len() - 1)
            {
                findings.push(format!(
                    "transfer {index}: buffer {} ends at step {last}, before step {end} waits",
                    id.0
                ));
            }
            in_progress[id.index()].push((index, access, bytes));
        }
    }
}

fn check_alive(plan: &Plan, id: BufferId, place: Position, findings: &mut Vec<String>) {
    if !plan.buffer(id).lifetime.covers(place.entry, place.index) {
        findings.push(format!("{place}: buffer {} is used outside its lifetime", id.0));
    }
}

/// An output shares a buffer with an input only where the op table allows it, and never with another output.
fn check_aliases(plan: &Plan, step: &Step, place: Position, findings: &mut Vec<String>) {
    let buffer = |id: &ValueId| plan.value(*id).buffer;
    for (o, output) in step.outputs.iter().enumerate() {
        for (i, input) in step.inputs.iter().enumerate() {
            if buffer(output) == buffer(input) && !step.op.in_place().contains(&(o, i)) {
                findings.push(format!("{place}: output {o} may not replace input {i}"));
            }
        }
        let others = step.outputs.iter().skip(o + 1).chain(&step.updates);
        if others.into_iter().any(|other| buffer(other) == buffer(output)) {
            findings.push(format!("{place}: output {o} shares its buffer with another result"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::graph as verified;
    use super::*;
    use crate::graph::{LeafKind, Slice};
    use crate::shape::{Shape, Type};
    use crate::storage::{DType, Storage};

    const ROWS: usize = 10;

    /// A bf16 matrix (10, 6), and rows of it.
    fn with_slice(first_row: usize, rows: usize) -> (Graph, ValueId) {
        let mut graph = Graph::default();
        let ty = Type::new(Shape::matrix(ROWS, 6), Storage::Plain(DType::Bf16));
        let leaf = graph.add_leaf("w", ty, LeafKind::Weight);
        let slice = graph.add_slice(leaf, first_row, rows);
        (graph, slice)
    }

    fn finding(graph: &Graph) -> String {
        let findings = verified(graph);
        assert_eq!(findings.len(), 1, "{findings:?}");
        findings[0].clone()
    }

    #[test]
    fn rows_of_a_leaf_are_accepted() {
        for (first_row, rows) in [(0, ROWS), (0, 1), (3, 7), (9, 1)] {
            assert_eq!(verified(&with_slice(first_row, rows).0), Vec::<String>::new());
        }
    }

    #[test]
    fn rows_outside_a_leaf_are_found() {
        for (first_row, rows) in [(0, 11), (4, 7), (10, 1)] {
            let (graph, _) = with_slice(first_row, rows);
            let name = format!("w[{first_row}..{}]", first_row + rows);
            assert_eq!(
                finding(&graph),
                format!("`{name}` bf16 ({rows}, 6) is not a part of `w` bf16 (10, 6)")
            );
        }
    }

    #[test]
    fn rows_of_another_width_or_storage_are_found() {
        for ty in [
            Type::new(Shape::matrix(2, 5), Storage::Plain(DType::Bf16)),
            Type::f32(Shape::matrix(2, 6)),
            Type::new(Shape::of(Dim::Tokens, 5), Storage::Plain(DType::Bf16)),
        ] {
            let (mut graph, slice) = with_slice(0, 2);
            graph.values[slice.index()].ty = ty;
            assert!(finding(&graph).contains("is not a part of `w`"));
        }
    }

    /// A slice has rows of a leaf, not of an activation or of another slice.
    #[test]
    fn rows_of_anything_but_a_leaf_are_found() {
        let (mut graph, slice) = with_slice(2, 4);
        let ty = graph.value(slice).ty.clone();
        graph.add_value(
            "rows of rows",
            ty,
            ValueRole::Slice(Slice { of: slice, first_row: 0, gradient: None }),
        );
        assert!(finding(&graph).contains("`rows of rows`"));
    }

    /// A slice may be updated like its leaf, and never written as an output.
    #[test]
    fn a_slice_is_never_an_output() {
        let (mut graph, slice) = with_slice(2, 4);
        let node = |outputs, updates| Node {
            op: Op::Zero,
            inputs: vec![],
            outputs,
            updates,
            phase: crate::graph::Phase::Update,
            layer: None,
        };
        graph.entries = vec![(Entry::Update, vec![node(vec![], vec![slice])])];
        assert_eq!(verified(&graph), Vec::<String>::new());
        graph.entries = vec![(Entry::Update, vec![node(vec![slice], vec![slice])])];
        let findings = verified(&graph);
        assert!(findings.iter().any(|finding| finding.contains("as an output")), "{findings:?}");
    }
}
