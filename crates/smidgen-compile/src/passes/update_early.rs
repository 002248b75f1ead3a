//! Early updates: without clipping no update depends on the norm of all gradients, so a tensor is updated as soon as its
//! own gradient is complete, and the gradient is not kept.
//!
//! In breadth-first order that is after the lap that completes the gradient (`breadth.rs`). An update needs only the report
//! of its own gradient, which says whether that is finite; the norm of all gradients is still reported. With loss scaling
//! (f16) a step may have to be repeated, so updates wait for the report of all gradients. So they do where ranks divide
//! optimizer state: a rank then sees only its own rows of a gradient.

use super::transfer::stow;
use crate::request::Request;
use smidgen_ir::policy::{Policy, Sharding};
use smidgen_ir::{ByValue, Entry, Graph, LeafKind, Node, Op, Precision, Property, Space, ValueId};

/// Whether tensors are updated in `micro_step`.
pub fn is_early(request: &Request, policy: &Policy) -> bool {
    policy.is_breadth_first()
        && policy.streams()
        && request.optimizer.clip == 0.0
        && request.precision != Precision::F16
        && (request.rank.is_only() || !policy.divides(Sharding::Moments))
}

/// The nodes of the update that move to `micro_step`.
#[derive(Debug, Default)]
pub struct Early {
    /// The update nodes of each gradient. They run when the gradient is complete and its squares are summed.
    pub updates: ByValue<Vec<Node>>,
    /// Nodes that copy the hyperparameters to the host, before the first update there.
    pub hyper: Vec<Node>,
}

/// Removes from `update` the updates of the gradients in `squares`, whose squares `micro_step` sums up.
pub fn take(graph: &mut Graph, squares: &ByValue<ValueId>) -> Early {
    let mut early = Early::default();
    let Some(nodes) = graph.take_nodes(Entry::Update) else { return early };
    let norm = nodes.iter().find(|node| node.op.has(Property::Reports)).cloned();
    let norm = norm.expect("an update has a norm");
    let (mut kept, mut widened, mut last) = (Vec::new(), Vec::new(), None);
    for mut node in nodes {
        let updated = (node.op.has(Property::Optimizer))
            .then(|| graph.whole(node.inputs[0]))
            .filter(|gradient| squares.contains_key(gradient));
        if let Some(gradient) = updated {
            let is_on_host = node.op.runs_on_host();
            let own = early.updates.get_or_insert_with(gradient, Vec::new);
            if own.is_empty() {
                own.extend(report(graph, &norm, squares[&gradient], is_on_host));
            }
            let report = own.iter().rev().find(|node| is_report(&node.op));
            node.inputs[1] = report.expect("a report comes first").updates[0];
            own.append(&mut widened);
            own.push(node);
            last = Some(gradient);
        } else if node.op == Op::Widen {
            widened.push(node);
        } else if matches!(node.op, Op::RoundAtRandom(_)) {
            let own = last.and_then(|gradient| early.updates.get_mut(&gradient));
            own.expect("what is rounded was updated").push(node);
        } else if node.op.is_copy() || node.op.has(Property::Waits) {
            // The other copy is the report of all gradients, which early updates do not need.
            let is_settings = node.inputs[0] == norm.inputs[1];
            early.hyper.extend(is_settings.then_some(node));
        } else if node.op != Op::Zero || !early.updates.contains_key(&node.updates[0]) {
            kept.push(node);
        }
    }
    graph.set_nodes(Entry::Update, kept);
    early
}

fn is_report(op: &Op) -> bool {
    op.is_copy() || op.has(Property::Reports)
}

/// Nodes that make the report of one gradient, and its copy on the host if the update runs there.
fn report(graph: &mut Graph, norm: &Node, squares: ValueId, is_on_host: bool) -> Vec<Node> {
    let (place, mut nodes) = ((norm.phase, norm.layer), Vec::new());
    let ty = graph.value(norm.updates[0]).ty.clone();
    let own = graph.add_leaf("report of a gradient", ty.clone(), LeafKind::State);
    let inputs = vec![norm.inputs[0], norm.inputs[1], squares];
    graph.emit(&mut nodes, Op::GradNorm { clip: 0.0, squares: true }, inputs, vec![own], &[], place);
    if is_on_host {
        let copy = graph.add_leaf("report of a gradient on the host", ty, LeafKind::State);
        graph.values[copy.index()].space = Space::Host;
        stow(graph, &mut nodes, own, copy, place);
    }
    nodes
}
