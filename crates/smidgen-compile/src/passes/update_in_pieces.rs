//! The update of what is offloaded: a few rows at a time are fetched, updated and copied back.
//!
//! AdamW treats elements one by one, so pieces change no bit, and the device holds pieces instead of whole tensors. The
//! norm is the sum of the squares of each gradient: those of an offloaded gradient are formed while it is on the device.
//! Moments in 8 bits have blocks across rows and come whole.

use smidgen_ir::policy::Order;
use smidgen_ir::{
    ByValue, DType, Entry, Extent, Graph, LeafKind, Node, Op, Policy, Shape, Space, Storage, Type, ValueId,
    ValueRole, ValueSet,
};

/// Elements of a piece: enough that a transfer runs at the full speed of the link.
pub const PIECE_ELEMENTS: usize = 16 << 20;

/// Rewrites `update` with pieces of `piece_elements`, and returns where `micro_step` puts the squares of each offloaded gradient, if it has to.
pub fn apply(graph: &mut Graph, policy: &Policy, extent: &Extent, piece_elements: usize) -> ByValue<ValueId> {
    let mut squares = ByValue::default();
    let Some(index) = graph.entries.iter().position(|(entry, _)| *entry == Entry::Update) else {
        return squares;
    };
    if !policy.streams() {
        return squares;
    }
    let is_breadth = policy.order == Order::Breadth;
    let nodes = std::mem::take(&mut graph.entries[index].1);
    let is_offloaded = |graph: &Graph, id: ValueId| graph.value(graph.whole(id)).space != Space::Device;
    // Gradients that `micro_step` begins at zero, and those that were cleared with their update.
    let mut cleared = ValueSet::default();
    let mut own: Vec<Node> = Vec::with_capacity(nodes.len());
    for mut node in nodes {
        let place = (node.phase, node.layer);
        match node.op {
            Op::GradNorm { clip, squares: false } => {
                let gradients = node.inputs.split_off(2);
                if gradients.iter().any(|gradient| is_offloaded(graph, *gradient)) {
                    let ty = Type::new(Shape::vector(gradients.len()), Storage::Plain(DType::F64));
                    let all = graph.add_leaf("squares", ty, LeafKind::State);
                    for (row, gradient) in gradients.iter().enumerate() {
                        let sum = if gradients.len() == 1 { all } else { graph.add_slice(all, row, 1) };
                        if is_breadth && is_offloaded(graph, *gradient) {
                            squares.insert(*gradient, sum);
                        } else {
                            graph.emit(&mut own, Op::SquaredNorm, vec![*gradient], vec![sum], &[], place);
                        }
                    }
                    node.inputs.push(all);
                    node.op = Op::GradNorm { clip, squares: true };
                } else {
                    node.inputs.extend(gradients);
                }
                own.push(node);
            }
            Op::AdamW(_) | Op::AdamW8(_) => {
                let gradient = node.inputs[0];
                let clears = is_offloaded(graph, gradient);
                if clears {
                    cleared.insert(gradient);
                }
                for piece in pieces(graph, node, extent, piece_elements) {
                    let gradient = piece.inputs[0];
                    own.push(piece);
                    if clears && !is_breadth {
                        graph.emit(&mut own, Op::Zero, vec![], vec![gradient], &[], place);
                    }
                }
            }
            Op::Zero if cleared.contains(&node.updates[0]) => {}
            _ => own.push(node),
        }
    }
    graph.entries[index].1 = own;
    squares
}

/// The node, or the same for some rows at a time where something of it is offloaded.
fn pieces(graph: &mut Graph, node: Node, extent: &Extent, piece_elements: usize) -> Vec<Node> {
    let tensors = || node.inputs[..1].iter().chain(&node.updates[..3]);
    let is_whole = tensors().all(|id| !matches!(graph.value(*id).role, ValueRole::Slice(_)));
    let is_offloaded = tensors().any(|id| graph.value(*id).space != Space::Device);
    let has_rows = tensors().all(|id| graph.value(*id).ty.storage.has_contiguous_rows());
    let (rows, columns) = graph.value(node.inputs[0]).ty.shape.at(extent);
    let most = (piece_elements / columns).max(1);
    if !(is_whole && is_offloaded && has_rows) || rows <= most {
        return vec![node];
    }
    let mut all = Vec::new();
    for first in (0..rows).step_by(most) {
        let mut piece = node.clone();
        let mut part = |whole: &mut ValueId| *whole = graph.add_slice(*whole, first, most.min(rows - first));
        piece.inputs[..1].iter_mut().for_each(&mut part);
        piece.updates[..3].iter_mut().for_each(&mut part);
        all.push(piece);
    }
    all
}
