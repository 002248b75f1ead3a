//! In-place reuse: an output takes over the buffer of an input that is last read by the node.
//!
//! The operation must allow it, the types must be equal, and the input must occur once among the operands. The result maps
//! a value to the one whose buffer it shares; chains are resolved to their first value. A value that is written tile by
//! tile takes over a value whose tiles are last read where its own are written. A value inside a tile may share the bytes
//! of the tile that it becomes.

use smidgen_ir::{ByValue, Entry, Graph, Node, ValueId, ValueSet};

pub type SharedBuffers = ByValue<ValueId>;

pub fn find(graph: &Graph) -> SharedBuffers {
    let mut owner = SharedBuffers::default();
    for (entry, nodes) in &graph.entries {
        let lives = Lives::of(graph, *entry, nodes);
        for (index, node) in nodes.iter().enumerate() {
            let mut taken: Vec<ValueId> = Vec::new();
            for &(output, input) in node.op.in_place() {
                let (output, input) = (node.outputs[output], node.inputs[input]);
                let are_temps = graph.value(output).is_temp() && graph.value(input).is_temp();
                let fits = are_temps && lives.can_follow(graph, (index, node), output, input);
                if fits && !owner.contains_key(&output) && !taken.contains(&input) {
                    let first = owner.get(&input).copied().unwrap_or(input);
                    owner.insert(output, first);
                    taken.push(input);
                }
            }
        }
        share_by_tiles(graph, nodes, &lives, &mut owner);
    }
    owner
}

/// The value whose buffer another shares.
pub fn owner_of(graph: &Graph, shared: &SharedBuffers, value: ValueId) -> ValueId {
    let whole = graph.whole(shared.get(&value).copied().unwrap_or(value));
    shared.get(&whole).copied().unwrap_or(whole)
}

/// When values are last read.
struct Lives {
    /// The last node that reads each value, or any slice of it.
    last_read: ByValue<usize>,
    /// Values that every micro-batch of a lap reads, so that no node inside the lap is their last.
    of_laps: ValueSet,
}

impl Lives {
    fn of(graph: &Graph, entry: Entry, nodes: &[Node]) -> Lives {
        let mut last_read = ByValue::default();
        for (index, node) in nodes.iter().enumerate() {
            for value in node.reads() {
                last_read.insert(value, index);
                last_read.insert(graph.whole(value), index);
            }
        }
        let laps = if entry == Entry::MicroStep { graph.laps.as_slice() } else { &[] };
        let mut of_laps = ValueSet::default();
        let mut before = 0;
        for lap in laps {
            let once = nodes[before..lap.each.start].iter().chain(&nodes[lap.each.end..lap.end]);
            of_laps.extend(once.flat_map(|node| &node.outputs).copied());
            before = lap.end;
        }
        Lives { last_read, of_laps }
    }

    /// Whether the node is the last to read the input, and the output has the same type.
    fn can_follow(
        &self,
        graph: &Graph,
        (index, node): (usize, &Node),
        output: ValueId,
        input: ValueId,
    ) -> bool {
        let once = node.operands().filter(|operand| *operand == input).count() == 1;
        once && !self.of_laps.contains(&graph.whole(input))
            && self.last_read.get(&input) == Some(&index)
            && graph.value(output).ty == graph.value(input).ty
    }
}

/// Finds sharing for outputs that are written tile by tile. A tile is a separate value that no other tile's nodes read.
fn share_by_tiles(graph: &Graph, nodes: &[Node], lives: &Lives, owner: &mut SharedBuffers) {
    let is_tile = |value: ValueId| graph.whole(value) != value && graph.value(graph.whole(value)).is_temp();
    let mut owners: ValueSet = owner.iter().map(|(_, owner)| *owner).collect();
    // The value that each output can take over as a whole, if all of its tiles agree, and where its last tile is written.
    let mut candidates: ByValue<(Option<ValueId>, usize)> = ByValue::default();
    for (index, node) in nodes.iter().enumerate() {
        for &output in node.outputs.iter().filter(|output| is_tile(**output)) {
            let pairs = node.op.in_place().iter().filter(|(own, _)| node.outputs[*own] == output);
            let inputs: Vec<ValueId> = pairs
                .map(|(_, input)| node.inputs[*input])
                .filter(|input| lives.can_follow(graph, (index, node), output, *input))
                .collect();
            let other = inputs.iter().find(|input| is_tile(**input)).map(|input| graph.whole(*input));
            let candidate = candidates.get_or_insert_with(graph.whole(output), || (other, index));
            let agreed = candidate.0.filter(|agreed| Some(*agreed) == other);
            *candidate = (agreed, index);
            let inside = inputs.iter().find(|input| graph.value(**input).is_temp());
            let is_free = |input: &&ValueId| !owner.contains_key(input) && !owners.contains(input);
            if let (None, Some(input)) = (other, inside.filter(is_free)) {
                owner.insert(*input, output);
                owners.insert(output);
            }
        }
    }
    for (output, (other, written)) in candidates.iter() {
        let Some(other) = other.filter(|other| lives.last_read.get(other) == Some(written)) else {
            continue;
        };
        owner.insert(output, other);
    }
    // A value that was taken over may itself have taken over another.
    let firsts: Vec<(ValueId, ValueId)> =
        owner.iter().map(|(value, _)| (value, first_of(owner, value))).collect();
    owner.extend(firsts);
}

fn first_of(owner: &SharedBuffers, mut value: ValueId) -> ValueId {
    while let Some(before) = owner.get(&value) {
        value = *before;
    }
    value
}
