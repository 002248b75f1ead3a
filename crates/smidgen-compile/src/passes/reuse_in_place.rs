//! In-place reuse: an output takes over the buffer of an input that dies with the node.
//!
//! Only where the operation allows it, the sizes agree, and the input occurs once among the operands.
//! The result maps a value to the one whose buffer it shares; chains are resolved to their first value.

use smidgen_ir::{Graph, ValueId};
use std::collections::HashMap;

pub type SharedBuffers = HashMap<ValueId, ValueId>;

pub fn find(graph: &Graph) -> SharedBuffers {
    let mut owner = SharedBuffers::new();
    for (_, nodes) in &graph.entries {
        let mut last_read: HashMap<ValueId, usize> = HashMap::new();
        for (index, node) in nodes.iter().enumerate() {
            last_read.extend(node.reads().map(|value| (value, index)));
        }
        for (index, node) in nodes.iter().enumerate() {
            let mut taken: Vec<ValueId> = Vec::new();
            for &(output, input) in node.op.in_place() {
                let (output, input) = (node.outputs[output], node.inputs[input]);
                let once = node.operands().filter(|operand| *operand == input).count() == 1;
                let dies = last_read.get(&input) == Some(&index) && graph.value(input).is_temp();
                let same_size = graph.value(output).ty == graph.value(input).ty;
                if once && dies && same_size && !owner.contains_key(&output) && !taken.contains(&input) {
                    let first = owner.get(&input).copied().unwrap_or(input);
                    owner.insert(output, first);
                    taken.push(input);
                }
            }
        }
    }
    owner
}
