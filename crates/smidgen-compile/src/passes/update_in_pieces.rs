//! Updates of offloaded tensors: a few rows at a time are fetched, updated and copied back.
//!
//! AdamW treats every element independently, so pieces change no bit, and the device holds pieces instead of whole tensors.
//! The norm is computed from the sum of squares of each gradient; that of an offloaded gradient is computed while it is on
//! the device. Moments in 8 bits have blocks across rows and are fetched whole. A tensor whose weight, gradient and moments
//! are all in host memory may be updated there instead, without fetching anything.

use super::transfer::{clear, settle, stow, sum_squares};
use crate::names::state;
use smidgen_ir::{
    ByValue, DType, Entry, Extent, Graph, LeafKind, Node, Op, Policy, Shape, Space, Storage, Type, ValueId,
    ValueRole, ValueSet,
};

/// Rewrites `update` with pieces of `piece_elements`. Returns, for each gradient whose squares `micro_step` must sum, the
/// value that holds the sum: in breadth-first order the offloaded gradients, with early updates all gradients.
pub fn apply(
    graph: &mut Graph,
    policy: &Policy,
    extent: &Extent,
    piece_elements: usize,
    is_early: bool,
) -> ByValue<ValueId> {
    let mut squares = ByValue::default();
    if !policy.streams() {
        return squares;
    }
    let Some(nodes) = graph.take_nodes(Entry::Update) else { return squares };
    let is_breadth = policy.is_breadth_first();
    let mut host = None;
    let is_offloaded = |graph: &Graph, id: ValueId| graph.value(graph.whole(id)).space != Space::Device;
    // Gradients that need no `Zero` at the end: they are cleared with their update, or by `micro_step`.
    let mut cleared = ValueSet::default();
    let mut own: Vec<Node> = Vec::with_capacity(nodes.len());
    for mut node in nodes {
        let place = (node.phase, node.layer);
        if let Op::GradNorm { squares: reads_squares, .. } = &mut node.op
            && !*reads_squares
        {
            let gradients = node.inputs.split_off(2);
            if is_early || gradients.iter().any(|gradient| is_offloaded(graph, *gradient)) {
                let ty = Type::new(Shape::vector(gradients.len()), Storage::Plain(DType::F64));
                let all = graph.add_leaf("squares", ty, LeafKind::State);
                for (row, gradient) in gradients.iter().enumerate() {
                    let sum = if gradients.len() == 1 { all } else { graph.add_slice(all, row, 1) };
                    // A regularizer may have added to the gradient in the update.
                    let is_changed = own.iter().any(|node| node.updates.contains(gradient));
                    if (is_early && !is_changed) || (is_breadth && is_offloaded(graph, *gradient)) {
                        squares.insert(*gradient, sum);
                    } else {
                        sum_squares(graph, &mut own, vec![*gradient], sum, place);
                    }
                }
                node.inputs.push(all);
                *reads_squares = true;
            } else {
                node.inputs.extend(gradients);
            }
            own.push(node);
        } else if node.op == Op::SquaredNorm && is_breadth && is_offloaded(graph, node.inputs[0]) {
            // Ranks sum the squares of their rows in `micro_step`.
            squares.insert(graph.whole(node.inputs[0]), node.updates[0]);
        } else if let Op::AdamW(settings) | Op::AdamW8(settings) = node.op {
            let gradient = node.inputs[0];
            let clears = is_offloaded(graph, gradient);
            if clears {
                cleared.insert(graph.whole(gradient));
            }
            if is_breadth && runs_on_host(graph, policy, &node) {
                let host = host.get_or_insert_with(|| HostState::copied(graph, &mut own, &node));
                host.attach(graph, &mut node);
                own.push(Node { op: Op::AdamWOnHost(settings), ..node });
                continue;
            }
            for piece in pieces(graph, node, extent, piece_elements) {
                let gradient = piece.inputs[0];
                own.push(piece);
                if clears && !is_breadth {
                    clear(graph, &mut own, gradient, place);
                }
            }
        } else if node.op != Op::Zero || !cleared.contains(&graph.whole(node.updates[0])) {
            own.push(node);
        }
    }
    graph.set_nodes(Entry::Update, own);
    squares
}

/// Whether an update runs on the host: the policy says so, and weight, gradient and moments are all in host memory.
fn runs_on_host(graph: &Graph, policy: &Policy, node: &Node) -> bool {
    let mut tensors = node.inputs[..1].iter().chain(&node.updates[..3]);
    policy.updates == Space::Host
        && tensors
            .all(|id| graph.value(graph.whole(*id)).leaf().is_some() && graph.value(*id).space == Space::Host)
}

/// Copies in host memory of the state that updates on the host share.
struct HostState {
    report: ValueId,
    hyper: ValueId,
    /// Has rows for all tensors, also for those that the device updates.
    activity: ValueId,
}

impl HostState {
    /// Emits copies of report and hyperparameters to the host.
    fn copied(graph: &mut Graph, nodes: &mut Vec<Node>, node: &Node) -> HostState {
        let place = (node.phase, node.layer);
        let on_host = |graph: &mut Graph, like: ValueId, name: &str| {
            let leaf = graph.add_leaf(name, graph.value(like).ty.clone(), LeafKind::State);
            graph.values[leaf.index()].space = Space::Host;
            leaf
        };
        let [report, hyper] = [(1, "report on the host"), (2, "hyper on the host")].map(|(input, name)| {
            let copy = on_host(graph, node.inputs[input], name);
            stow(graph, nodes, node.inputs[input], copy, place);
            copy
        });
        for (input, copy) in [(1, report), (2, hyper)] {
            settle(graph, nodes, node.inputs[input], copy, place);
        }
        let activity = on_host(graph, graph.whole(node.updates[3]), state::HOST_ACTIVITY);
        HostState { report, hyper, activity }
    }

    /// Makes an update use these copies.
    fn attach(&self, graph: &mut Graph, node: &mut Node) {
        (node.inputs[1], node.inputs[2]) = (self.report, self.hyper);
        node.updates[3] = match graph.value(node.updates[3]).role {
            ValueRole::Slice(slice) => graph.add_slice(self.activity, slice.first_row, 1),
            _ => self.activity,
        };
    }
}

/// The update itself, or an update for each piece of rows if one of its tensors is offloaded.
fn pieces(graph: &mut Graph, node: Node, extent: &Extent, piece_elements: usize) -> Vec<Node> {
    let tensors = || node.inputs[..1].iter().chain(&node.updates[..3]);
    // The update of a weight in bf16 already comes in pieces, with a temporary.
    let is_stored = tensors().all(|id| graph.value(graph.whole(*id)).leaf().is_some());
    let is_offloaded = tensors().any(|id| graph.value(*id).space != Space::Device);
    let has_rows = tensors().all(|id| graph.value(*id).ty.storage.has_contiguous_rows());
    let (rows, columns) = graph.value(node.inputs[0]).ty.shape.at(extent);
    let most = (piece_elements / columns).max(1);
    if !(is_stored && is_offloaded && has_rows) || rows <= most {
        return vec![node];
    }
    let mut all = Vec::new();
    for first in (0..rows).step_by(most) {
        let mut piece = node.clone();
        let count = most.min(rows - first);
        let mut part = |id: &mut ValueId| {
            let first_row = graph.value(*id).role.first_row() + first;
            *id = graph.add_slice(graph.whole(*id), first_row, count);
        };
        piece.inputs[..1].iter_mut().for_each(&mut part);
        piece.updates[..3].iter_mut().for_each(&mut part);
        all.push(piece);
    }
    all
}
