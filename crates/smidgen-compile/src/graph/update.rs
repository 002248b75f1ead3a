//! The optimizer step: norm over all gradients, AdamW for every trained leaf, gradients back to zero.
//!
//! The moments are leaves like any other. The update does nothing if the report is not finite, so NaN and infinity never
//! reach a weight. LS-LoRA's regularizer is part of the update, because it applies once per step.

use crate::leaves::FOURIER_COEFFICIENTS;
use crate::names::{input, state};
use crate::passes::transfer::clear;
use crate::request::{AdapterForm, Master, Request};
use smidgen_ir::{
    ACTIVITY_COLUMNS, AdamW, DType, Entry, Extent, Graph, LeafKind, Node, Op, Phase, RandomPlace, Shape,
    Storage, Type, ValueId,
};

/// Elements that an update fetches or widens at a time: enough that a transfer runs at the full speed of the link.
pub const PIECE_ELEMENTS: usize = 16 << 20;

pub fn append_update(graph: &mut Graph, request: &Request) {
    append_update_in_pieces(graph, request, PIECE_ELEMENTS);
}

/// [`append_update`] with pieces of another size.
pub fn append_update_in_pieces(graph: &mut Graph, request: &Request, piece_elements: usize) {
    let optimizer = &request.optimizer;
    let find = |graph: &Graph, name: &str| {
        let found = graph.values.iter().position(|value| value.name == name && !value.is_temp());
        ValueId(found.expect("the forward stage adds every input and state") as u32)
    };
    let (loss, report, hyper) =
        (find(graph, state::LOSS), find(graph, state::REPORT), find(graph, input::HYPER));
    let trained: Vec<(ValueId, ValueId)> = graph.trainable().collect();
    let mut nodes: Vec<Node> = Vec::new();
    let place = (Phase::Update, None);
    if let AdapterForm::Fourier { reg } = request.form {
        let coefficients = find(graph, FOURIER_COEFFICIENTS);
        let gradient = graph.gradient_of(coefficients).expect("coefficients are trained");
        let op = Op::FourierReg { weight: reg / (4 * request.adapters.len()) as f64 };
        let updates = vec![find(graph, state::REG_LOSS), gradient];
        graph.emit(&mut nodes, op, vec![coefficients, hyper], updates, &[], place);
    }
    let mut inputs = vec![loss, hyper];
    inputs.extend(trained.iter().map(|(_, gradient)| *gradient));
    graph.emit(
        &mut nodes,
        Op::GradNorm { clip: optimizer.clip, squares: false },
        inputs,
        vec![report],
        &[],
        place,
    );
    let rows = Type::f32(Shape::matrix(trained.len(), ACTIVITY_COLUMNS));
    let activity = graph.add_leaf(state::ACTIVITY, rows, LeafKind::State);
    for (row, &(parameter, gradient)) in trained.iter().enumerate() {
        let (name, shape) = (graph.value(parameter).name.clone(), graph.value(parameter).ty.shape.clone());
        let storages = optimizer.moments.storage(&name, graph.value(parameter).ty.elements(&request.extent));
        let [first, second] = [("m", storages[0]), ("v", storages[1])].map(|(letter, storage)| {
            graph.add_leaf(format!("{letter} {name}"), Type::new(shape.clone(), storage), LeafKind::Moment)
        });
        let weight_decay = if decays(&name) { optimizer.adamw.weight_decay } else { 0.0 };
        let settings = AdamW { weight_decay, ..optimizer.adamw };
        let op = if storages == [Storage::F32; 2] { Op::AdamW(settings) } else { Op::AdamW8(settings) };
        let inputs = vec![gradient, report, hyper];
        let own = if trained.len() == 1 { activity } else { graph.add_slice(activity, row, 1) };
        let updates = vec![parameter, first, second, own];
        match (optimizer.master, graph.value(parameter).ty.storage) {
            (Master::Bf16 { seed }, Storage::Plain(DType::Bf16)) => {
                let random = RandomPlace { seed, tensor: row as u64, first_row: 0 };
                update_bf16(graph, &mut nodes, (op, inputs, updates), random, piece_elements);
            }
            _ => {
                graph.emit(&mut nodes, op, inputs, updates, &[], place);
            }
        }
    }
    for leaf in trained.into_iter().map(|(_, gradient)| gradient).chain([loss]) {
        clear(graph, &mut nodes, leaf, place);
    }
    graph.set_nodes(Entry::Update, nodes);
}

/// The update of a matrix in bf16: a piece of its rows is widened to f32, updated, and rounded at random.
fn update_bf16(
    graph: &mut Graph,
    nodes: &mut Vec<Node>,
    (op, inputs, updates): (Op, Vec<ValueId>, Vec<ValueId>),
    random: RandomPlace,
    piece_elements: usize,
) {
    let (place, hyper) = ((Phase::Update, None), inputs[2]);
    let (rows, columns) = graph.value(updates[0]).ty.shape.at(&Extent::default());
    let has_rows = updates[..3].iter().all(|id| graph.value(*id).ty.storage.has_contiguous_rows());
    let most = if has_rows { (piece_elements / columns).max(1) } else { rows };
    for first in (0..rows).step_by(most) {
        let count = most.min(rows - first);
        let mut part =
            |whole: ValueId| if count == rows { whole } else { graph.add_slice(whole, first, count) };
        let (gradient, [parameter, m, v]) = (part(inputs[0]), [0, 1, 2].map(|index| part(updates[index])));
        let name = graph.name_from(parameter, |name| format!("{name} wide"));
        let wide = graph.emit(nodes, Op::Widen, vec![parameter], vec![], &[name], place)[0];
        let own_inputs = vec![gradient, inputs[1], hyper];
        graph.emit(nodes, op.clone(), own_inputs, vec![wide, m, v, updates[3]], &[], place);
        let round = Op::RoundAtRandom(RandomPlace { first_row: first as u64, ..random });
        graph.emit(nodes, round, vec![wide, hyper], vec![parameter], &[], place);
    }
}

/// As in the Trainer of transformers, biases (of steps too) and norms do not decay; all else does, embeddings included.
fn decays(name: &str) -> bool {
    !name.contains("bias") && !name.ends_with("norm.weight")
}
