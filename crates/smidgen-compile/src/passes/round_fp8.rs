//! Rounding to fp8: the inputs of fp8 matmuls are rounded by separate nodes, once for all matmuls that read a value.
//!
//! q, k and v share one rounded x, and gate and up another. For dx = dy·W the scales of W's rows are multiplied into dy
//! first, so every dy is rounded for its own weight. If the node that makes a value can also round it, the rounding follows
//! it directly, and a GPU fuses both; otherwise it precedes the first matmul. A rounded value is shared only within a layer
//! and a phase: rounding again is cheaper than keeping it.
//! Left out: generation, whose matmuls have few rows and read activations without rounding.

use crate::request::Request;
use smidgen_ir::workspace_cuda::multiplies_in_fp8;
use smidgen_ir::{ByValue, Entry, Extent, Graph, Node, Op, Phase, Precision, Property, ValueId};
use std::collections::HashMap;

pub fn apply(graph: &mut Graph, request: &Request) {
    if request.precision != Precision::Fp8 {
        return;
    }
    for index in 0..graph.entries.len() {
        if graph.entries[index].0 != Entry::Decode {
            let nodes = std::mem::take(&mut graph.entries[index].1);
            graph.entries[index].1 = with_rounding(graph, nodes);
        }
    }
}

/// The matmuls that share one rounding: the value that they read, the weight whose scales are multiplied into it before it
/// is rounded, if any, and their phase and layer.
type Use = (ValueId, Option<ValueId>, Phase, Option<usize>);

fn with_rounding(graph: &mut Graph, mut nodes: Vec<Node>) -> Vec<Node> {
    let maker_of: ByValue<usize> = nodes
        .iter()
        .enumerate()
        .flat_map(|(index, node)| node.outputs.iter().map(move |output| (*output, index)))
        .collect();
    let mut before: Vec<Vec<Node>> = vec![Vec::new(); nodes.len()];
    let mut after = before.clone();
    let mut rounded: HashMap<Use, ValueId> = HashMap::new();
    for index in 0..nodes.len() {
        for (input, weight) in factors(graph, &nodes[index]) {
            let node = &nodes[index];
            let (x, phase, layer) = (node.inputs[input], node.phase, node.layer);
            let scales = matches!(node.op, Op::LinearGrad { .. }).then_some(weight);
            let value = *rounded.entry((x, scales, phase, layer)).or_insert_with(|| {
                let maker = maker_of.get(&x).copied().filter(|maker| {
                    let maker = &nodes[*maker];
                    maker.op.has(Property::Rounds) && (maker.phase, maker.layer) == (phase, layer)
                });
                let place = maker.map_or_else(|| &mut before[index], |maker| &mut after[maker]);
                let name = graph.name_from(x, |name| format!("{name} in fp8"));
                let inputs = [Some(x), scales].into_iter().flatten().collect();
                let op = Op::RoundFp8 { scaled: scales.is_some() };
                graph.emit(place, op, inputs, vec![], &[name], (phase, layer))[0]
            });
            nodes[index].inputs[input] = value;
        }
    }
    let parts = before.into_iter().zip(nodes).zip(after);
    parts.flat_map(|((before, node), after)| before.into_iter().chain([node]).chain(after)).collect()
}

/// The inputs of a node that are multiplied in fp8, and their weights.
fn factors(graph: &Graph, node: &Node) -> Vec<(usize, ValueId)> {
    let pairs = (0..node.op.terms()).map(|term| (2 * term, node.inputs[2 * term + 1]));
    pairs.filter(|(_, weight)| is_multiplied_in_fp8(graph, *weight)).collect()
}

fn is_multiplied_in_fp8(graph: &Graph, weight: ValueId) -> bool {
    let ty = &graph.value(weight).ty;
    let (rows, columns) = ty.shape.at(&Extent::default());
    multiplies_in_fp8(Precision::Fp8, ty.storage, rows, columns)
}
