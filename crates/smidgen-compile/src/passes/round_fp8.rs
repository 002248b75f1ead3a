//! Rounding to fp8: what matmuls in fp8 read is rounded by nodes of their own, once for all matmuls that read it.
//!
//! q, k and v share one rounded x, and gate and up another. For dx = dy·W the scales of W's rows are multiplied into dy
//! first, so every dy is rounded for its own weight. If the node that makes a value can round it as well, the rounding
//! stands right behind it, and a GPU launches both as one; otherwise it stands in front of the first matmul. A rounded
//! value is shared only within a layer and a phase: rounding again is cheaper than keeping it.
//! Left out: generation, whose matmuls of a few rows read weights in fp8 and activations as they are.

use crate::request::Request;
use smidgen_ir::workspace_cuda::multiplies_in_fp8;
use smidgen_ir::{ByValue, Entry, Extent, Graph, Node, Op, Phase, Precision, ValueId};
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

/// A value as some matmuls read it: what it is multiplied by before it is rounded, if anything, and where in the program
/// they are.
type Use = (ValueId, Option<ValueId>, Phase, Option<usize>);

fn with_rounding(graph: &mut Graph, mut nodes: Vec<Node>) -> Vec<Node> {
    let maker_of: ByValue<usize> = nodes
        .iter()
        .enumerate()
        .flat_map(|(index, node)| node.outputs.iter().map(move |output| (*output, index)))
        .collect();
    let mut in_front: Vec<Vec<Node>> = vec![Vec::new(); nodes.len()];
    let mut behind = in_front.clone();
    let mut rounded: HashMap<Use, ValueId> = HashMap::new();
    for index in 0..nodes.len() {
        for (input, weight) in factors(graph, &nodes[index]) {
            let node = &nodes[index];
            let (x, phase, layer) = (node.inputs[input], node.phase, node.layer);
            let scales = matches!(node.op, Op::LinearGrad { .. }).then_some(weight);
            let value = *rounded.entry((x, scales, phase, layer)).or_insert_with(|| {
                let maker = maker_of.get(&x).copied().filter(|maker| {
                    let maker = &nodes[*maker];
                    maker.op.can_round() && (maker.phase, maker.layer) == (phase, layer)
                });
                let place = maker.map_or_else(|| &mut in_front[index], |maker| &mut behind[maker]);
                let name = graph.name_from(x, |name| format!("{name} in fp8"));
                let inputs = [Some(x), scales].into_iter().flatten().collect();
                let op = Op::RoundFp8 { scaled: scales.is_some() };
                graph.emit(place, op, inputs, vec![], &[name], (phase, layer))[0]
            });
            nodes[index].inputs[input] = value;
        }
    }
    let parts = in_front.into_iter().zip(nodes).zip(behind);
    parts.flat_map(|((front, node), behind)| front.into_iter().chain([node]).chain(behind)).collect()
}

/// The inputs of a node that are multiplied in fp8, and their weights.
fn factors(graph: &Graph, node: &Node) -> Vec<(usize, ValueId)> {
    let terms = if let Op::LinearGrad { scales } = &node.op {
        scales.len()
    } else {
        usize::from(matches!(node.op, Op::Linear { .. }))
    };
    let pairs = (0..terms).map(|term| (2 * term, node.inputs[2 * term + 1]));
    pairs.filter(|(_, weight)| is_multiplied_in_fp8(graph, *weight)).collect()
}

fn is_multiplied_in_fp8(graph: &Graph, weight: ValueId) -> bool {
    let ty = &graph.value(weight).ty;
    let (rows, columns) = ty.shape.at(&Extent::default());
    multiplies_in_fp8(Precision::Fp8, ty.storage, rows, columns)
}
