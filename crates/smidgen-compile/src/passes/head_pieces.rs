//! The head in pieces: an offloaded head is fetched in parts of the vocabulary, one after the other.
//!
//! A softmax needs the sum over the whole vocabulary, so for gradients the pieces are fetched twice: first for each row's
//! largest logit, the sum and the label's logit; then in the opposite order, because the last piece is still on the device,
//! to recompute the logits and form dx. That is one more matmul with the head, and the device holds a piece or two instead
//! of the whole head. Sums over the vocabulary are split, so losses and gradients differ by rounding.
//! Left out: a head that is trained, has an adapter, or whose rows are not contiguous; it is fetched whole.

use crate::model::spec::HEAD;
use crate::request::Request;
use smidgen_ir::policy::Policy;
use smidgen_ir::{ByValue, Extent, Graph, HeadPiece, LossHead, Node, Op, ValueId};

/// The most pieces.
const MOST_PIECES: usize = 8;
/// The fewest bytes of a piece: a transfer and a matmul must be worth starting.
const LEAST_BYTES: usize = 16 << 20;
/// Pieces start at multiples of this, so that rows of logits are aligned for the kernels.
const ROW_STEP: usize = 64;

/// In how many pieces the head can be fetched; 0 if it must be fetched whole.
pub fn count(request: &Request) -> usize {
    let storage = request.storage_of(request.spec.head_tensor());
    let is_adapted = request.adapters.iter().any(|module| module.path == HEAD);
    let is_trained = request.trained.contains(request.spec.head_tensor());
    let bytes = storage.bytes(request.spec.vocabulary, request.spec.hidden);
    let pieces = (bytes / LEAST_BYTES).min(MOST_PIECES);
    if storage.has_contiguous_rows() && !is_adapted && !is_trained && pieces > 1 { pieces } else { 0 }
}

/// Cuts an offloaded head into `policy.head_pieces` pieces in every entry point, unless it is trained or adapted.
pub fn apply(graph: &mut Graph, policy: &Policy) {
    if policy.offloads_table(false, true) {
        cut_head(graph, policy.head_pieces);
    }
}

/// Cuts the head of every entry point into `count` pieces, unless it is trained or adapted.
pub fn cut_head(graph: &mut Graph, count: usize) {
    if count < 2 {
        return;
    }
    // Entry points share the pieces.
    let mut pieces_of: ByValue<Vec<Piece>> = ByValue::default();
    for index in 0..graph.entries.len() {
        let nodes = std::mem::take(&mut graph.entries[index].1);
        let mut all = Vec::with_capacity(nodes.len() + 2 * count);
        let mut known = Vec::new();
        for node in nodes {
            let Some(head) = head_to_cut(graph, &node) else {
                all.push(node);
                continue;
            };
            let pieces = pieces_of.get_or_insert_with(node.inputs[1], || cut(graph, node.inputs[1], count));
            match head {
                Head::Loss(head) => emit_loss(graph, &mut all, &node, &head, pieces, &mut known),
                Head::Logits { softcap } => emit_logits(graph, &mut all, &node, softcap, pieces),
            }
        }
        graph.entries[index].1 = all;
    }
}

/// What is computed with a head.
enum Head {
    Loss(LossHead),
    Logits { softcap: Option<f32> },
}

/// The use of a head that can be cut: it has no adapter and is frozen.
fn head_to_cut(graph: &Graph, node: &Node) -> Option<Head> {
    let head = if let Op::LmHeadLoss(head) = node.op {
        (head.lora.is_none() && !head.train_head).then_some(Head::Loss(head))?
    } else if let Op::Logits { lora: None, softcap, .. } = node.op {
        Head::Logits { softcap }
    } else {
        return None;
    };
    // A trained head is not cut in any entry point, also not in those that do not train it.
    let value = graph.value(node.inputs[1]);
    let is_frozen = value.leaf().is_some_and(|leaf| leaf.gradient.is_none());
    (is_frozen && value.ty.storage.has_contiguous_rows()).then_some(head)
}

/// Rows of the head, and the token id of the first row.
#[derive(Clone, Copy, Debug)]
struct Piece {
    rows: ValueId,
    first_word: usize,
}

fn cut(graph: &mut Graph, head: ValueId, count: usize) -> Vec<Piece> {
    let (words, _) = graph.value(head).ty.shape.at(&Extent::default());
    let even = words.div_ceil(count);
    let step = if even > ROW_STEP { even.next_multiple_of(ROW_STEP) } else { even };
    let piece = |first_word: usize| {
        let rows = graph.add_slice(head, first_word, step.min(words - first_word));
        Piece { rows, first_word }
    };
    (0..words).step_by(step).map(piece).collect()
}

/// Emits the sums over all pieces, the loss, and the gradients over all pieces in the opposite order. The last gradient has
/// the output of the original loss.
///
/// `known` has the sums that this entry point already has, with the rows and labels that they are of.
fn emit_loss(
    graph: &mut Graph,
    all: &mut Vec<Node>,
    node: &Node,
    head: &LossHead,
    pieces: &[Piece],
    known: &mut Vec<([ValueId; 3], ValueId)>,
) {
    let [x, whole, labels, weight] = node.inputs[..] else { unreachable!("a plain loss has four inputs") };
    let place = (node.phase, node.layer);
    let attributes = |first_word: usize, continues: bool| {
        let LossHead { chunk, softcap, .. } = *head;
        HeadPiece { chunk, first_word, softcap, continues }
    };
    let same = known.iter().find(|(of, _)| *of == [x, whole, labels]);
    let mut sums: Option<ValueId> = same.map(|(_, sums)| *sums); // (S, 3)
    let new = if sums.is_some() { &[] } else { pieces };
    for &Piece { rows, first_word } in new {
        let op = Op::HeadSums(attributes(first_word, sums.is_some()));
        let inputs = [x, rows, labels].into_iter().chain(sums).collect();
        let names = [graph.name_from(x, |name| format!("{name} sums to {first_word}"))];
        sums = Some(graph.emit(all, op, inputs, vec![], &names, place)[0]);
    }
    let sums = sums.expect("a head has rows");
    known.push(([x, whole, labels], sums));
    let op = Op::HeadLoss { row_losses: head.row_losses };
    graph.emit(all, op, vec![sums, weight], node.updates.clone(), &[], place);
    let mut dx: Option<ValueId> = None; // (S, C)
    for (index, &Piece { rows, first_word }) in pieces.iter().enumerate().rev().filter(|_| head.gradient) {
        let op = Op::HeadGrad { piece: attributes(first_word, dx.is_some()), ends: index == 0 };
        let inputs = [x, rows, labels, weight, sums].into_iter().chain(dx).collect();
        if index == 0 {
            all.push(Node { op, inputs, updates: vec![], ..node.clone() });
        } else {
            let names = [graph.name_from(x, |name| format!("d {name} from {first_word}"))];
            dx = Some(graph.emit(all, op, inputs, vec![], &names, place)[0]);
        }
    }
}

fn emit_logits(graph: &mut Graph, all: &mut Vec<Node>, node: &Node, softcap: Option<f32>, pieces: &[Piece]) {
    for &Piece { rows, first_word } in pieces {
        let op = Op::Logits { lora: None, softcap, first_word };
        let inputs = vec![node.inputs[0], rows];
        graph.emit(all, op, inputs, node.updates.clone(), &[], (node.phase, node.layer));
    }
}
