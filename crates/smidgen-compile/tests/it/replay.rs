//! Replays a plan by identity: tracks which value each byte of memory holds.
//!
//! This checks plans independently of `verify`, without lifetimes and rules: every write replaces what it touches, and a
//! read must find the value that it names, or the leaf of which that is a slice.

use smidgen_ir::{Entry, Plan, ValueId, ValueRole};

/// Replays every step of an entry point and returns the reads that find another value.
pub fn replay(plan: &Plan, entry: Entry) -> Vec<String> {
    let mut memory = Memory::default();
    for (index, value) in plan.values.iter().enumerate() {
        // A gradient that no step touches has no memory.
        if let (ValueRole::Leaf(_), Some(_)) = (&value.role, value.buffer) {
            memory.write(plan, ValueId(index as u32));
        }
    }
    let mut findings = Vec::new();
    for (index, step) in plan.entry(entry).steps.iter().enumerate() {
        for id in step.inputs.iter().chain(&step.updates) {
            if !memory.holds(plan, *id) {
                let name = &plan.value(*id).name;
                findings.push(format!("{entry} step {index} ({}): `{name}` was overwritten", step.op.name()));
            }
        }
        if let Some(workspace) = step.workspace {
            let buffer = plan.buffer(workspace);
            memory.clear(buffer.offset, buffer.end());
            // Operands are needed while the scratch is in use.
            for id in step.inputs.iter().chain(&step.updates) {
                if !memory.holds(plan, *id) {
                    let name = &plan.value(*id).name;
                    findings.push(format!("{entry} step {index}: scratch overlaps `{name}`"));
                }
            }
        }
        for id in &step.outputs {
            memory.write(plan, *id);
        }
        for id in step.outputs.iter().chain(&step.updates) {
            if !memory.holds(plan, *id) {
                findings.push(format!("{entry} step {index}: results overlap at `{}`", plan.value(*id).name));
            }
        }
    }
    findings
}

/// Pieces of memory and the values that they hold, by offset.
#[derive(Default)]
struct Memory {
    pieces: std::collections::BTreeMap<usize, (usize, ValueId)>,
}

impl Memory {
    fn place(plan: &Plan, id: ValueId) -> (usize, usize) {
        let value = plan.value(id);
        let buffer = plan.buffer(value.buffer.expect("a planned value has a buffer"));
        (buffer.offset, buffer.offset + value.ty.bytes(&plan.extent))
    }

    fn clear(&mut self, start: usize, end: usize) {
        let below = self.pieces.range(..end).rev();
        let hit: Vec<usize> = below.take_while(|(_, piece)| piece.0 > start).map(|(at, _)| *at).collect();
        for at in hit {
            self.pieces.remove(&at);
        }
    }

    fn write(&mut self, plan: &Plan, id: ValueId) {
        let (start, end) = Memory::place(plan, id);
        self.clear(start, end);
        if end > start {
            self.pieces.insert(start, (end, id));
        }
    }

    fn holds(&self, plan: &Plan, id: ValueId) -> bool {
        let id = plan.value(id).role.whole(id);
        let (start, end) = Memory::place(plan, id);
        start == end || self.pieces.get(&start) == Some(&(end, id))
    }
}
