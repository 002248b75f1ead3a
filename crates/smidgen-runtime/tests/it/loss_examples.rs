//! Examples of the fused loss: its gradients of rows, head, and an adapter on the head.
//!
//! Logits are compared with f64. Chunks divide the rows evenly, leave a remainder, or hold all rows; none of this may
//! change the gradients.

use crate::check::same_bytes_everywhere;
use crate::draft::Draft;
use crate::examples::{Example, Proof, gradient};
use crate::numbers::{Content, decode_reals, random_reals, stored};
use crate::subject::{Scalar, Subject};
use smidgen_compile::passes::head_pieces;
use smidgen_ir::{
    DType, Dim, Entry, Extent, Graph, LeafKind, LossHead, Op, Phase, Shape, Storage, Type, ValueId, verify,
};
use std::collections::BTreeSet;

pub fn examples() -> Vec<Example> {
    let mut examples = Vec::new();
    for (chunk, dtype) in [(4, DType::F32), (5, DType::Bf16), (100, DType::F16), (1, DType::F32)] {
        for rank in [0, 3] {
            for train_head in [false, true] {
                examples.push(loss(chunk, dtype, rank, train_head, None));
            }
        }
    }
    // Logits are about 1 here, so a softcap of 1.3 changes most of them.
    for (chunk, dtype, rank, train_head) in
        [(4, DType::F32, 0, true), (5, DType::Bf16, 3, false), (100, DType::F16, 3, true)]
    {
        examples.push(loss(chunk, dtype, rank, train_head, Some(1.3)));
    }
    // A vocabulary of 29 in pieces of 15, 8 and 1.
    for (pieces, chunk, dtype, softcap) in [
        (2, 4, DType::F32, None),
        (4, 5, DType::Bf16, Some(1.3)),
        (29, 100, DType::F16, None),
        (4, 1, DType::F32, Some(1.3)),
    ] {
        examples.push(loss_in_pieces(pieces, chunk, dtype, softcap));
    }
    examples.push(Example { covers: &["logits"], proof: Proof::Values(logits_match_f64) });
    examples
}

/// 10 of 19 tokens over a vocabulary of 29; rank 0 is no adapter.
fn loss(chunk: usize, dtype: DType, rank: usize, train_head: bool, softcap: Option<f32>) -> Example {
    let mut draft = Draft::new(&[9, 10], 2);
    assert_eq!(draft.extent().rows, 10);
    let x = draft.rows("x", 15);
    let table = if train_head {
        draft.matrix("head", 29, 15, dtype)
    } else {
        draft.frozen_matrix("head", 29, 15, dtype)
    };
    let adapter = (rank > 0).then(|| (draft.rows("h", rank), draft.matrix("b", 29, rank, DType::F32)));
    let lora = (rank > 0).then_some(0.5);
    draft.loss(
        LossHead { chunk, gradient: true, lora, train_head, softcap, row_losses: false },
        x,
        table,
        adapter,
    );
    let name = format!("loss chunk={chunk} {dtype} rank={rank} train_head={train_head} cap={softcap:?}");
    gradient(&["lm_head_loss"], draft.gradient_of_loss(&name))
}

/// Like `loss`, without an adapter, over a head in pieces.
fn loss_in_pieces(pieces: usize, chunk: usize, dtype: DType, softcap: Option<f32>) -> Example {
    let mut draft = Draft::new(&[9, 10], 2);
    let (x, table) = (draft.rows("x", 15), draft.frozen_matrix("head", 29, 15, dtype));
    let head = LossHead { chunk, gradient: true, lora: None, train_head: false, softcap, row_losses: false };
    draft.loss(head, x, table, None);
    let mut subject =
        draft.gradient_of_loss(&format!("{pieces} pieces chunk={chunk} {dtype} cap={softcap:?}"));
    head_pieces::cut_head(&mut subject.graph, pieces);
    verify::expect_sound("head_pieces", &verify::graph(&subject.graph));
    gradient(&["head_sums", "head_loss", "head_grad"], subject)
}

const SCALE: f32 = 0.6;

/// Every storage of the head, with and without an adapter and a softcap, whole and in pieces.
fn logits_match_f64() -> BTreeSet<&'static str> {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for rank in [0, 3] {
            for (softcap, pieces) in [(None, 1), (Some(1.3), 1), (None, 5), (Some(1.3), 3)] {
                logits(dtype, rank, softcap, pieces);
            }
        }
    }
    BTreeSet::from(["logits"])
}

fn logits(dtype: DType, rank: usize, softcap: Option<f32>, pieces: usize) {
    let (rows, channels, vocabulary) = (7, 33, 41);
    let mut graph = Graph::default();
    let mut contents: Vec<(ValueId, Content)> = Vec::new();
    let mut leaf = |name: &str, shape: Shape, dtype: DType| -> (ValueId, Vec<f64>) {
        let ty = Type::new(shape, Storage::Plain(dtype));
        let extent = Extent { tokens: rows, rows, segments: 1, audio: 0 };
        let values: Vec<f32> = random_reals(contents.len() as u64, ty.elements(&extent))
            .iter()
            .map(|value| stored(ty.storage, *value))
            .collect();
        let wide = values.iter().map(|value| f64::from(*value)).collect();
        let id = graph.add_leaf(name, ty, LeafKind::Input);
        contents.push((id, Content::Reals(values)));
        (id, wide)
    };
    let (x, x_values) = leaf("x", Shape::of(Dim::Rows, channels), DType::F32);
    let (head, head_values) = leaf("head", Shape::matrix(vocabulary, channels), dtype);
    let (h, h_values) = leaf("h", Shape::of(Dim::Rows, rank.max(1)), DType::F32);
    let (b, b_values) = leaf("b", Shape::matrix(vocabulary, rank.max(1)), DType::F32);
    let y = graph.add_leaf("logits", Type::f32(Shape::of(Dim::Rows, vocabulary)), LeafKind::State);

    let (lora, inputs) = match rank {
        0 => (None, vec![x, head]),
        _ => (Some(SCALE), vec![x, head, h, b]),
    };
    let mut nodes = Vec::new();
    let place = (Phase::Forward, None);
    graph.emit(&mut nodes, Op::Logits { lora, softcap, first_word: 0 }, inputs, vec![y], &[], place);
    graph.entries = vec![(Entry::MicroStep, vec![]), (Entry::Eval, nodes)];
    head_pieces::cut_head(&mut graph, pieces);
    let count = graph.nodes(Entry::Eval).len();
    assert_eq!(count, if rank == 0 { pieces } else { 1 }, "an adapted head is one piece");
    let name = format!("logits {dtype} rank={rank} cap={softcap:?} pieces={pieces}");
    let extent = Extent { tokens: rows, rows, segments: 1, audio: 0 };
    let scalar = Scalar::Dot { y, dy: vec![] };
    let subject = Subject { name: name.clone(), graph, extent, contents, scalar };
    subject.run_on_null(subject.roomy_plan(1)).unwrap();
    let got = decode_reals(&same_bytes_everywhere(&subject).result); // (S, V)

    let row_of = |values: &[f64], row: usize, width: usize| values[row * width..][..width].to_vec();
    let dot = |a: Vec<f64>, b: Vec<f64>| a.iter().zip(&b).map(|(a, b)| a * b).sum::<f64>();
    let mut cap_effect = 0.0f64;
    for row in 0..rows {
        for token in 0..vocabulary {
            let mut want = dot(row_of(&x_values, row, channels), row_of(&head_values, token, channels));
            if rank > 0 {
                let low = dot(row_of(&h_values, row, rank), row_of(&b_values, token, rank));
                want += f64::from(SCALE) * low;
            }
            let plain = want;
            if let Some(cap) = softcap.map(f64::from) {
                want = cap * (want / cap).tanh();
            }
            cap_effect = cap_effect.max((want - plain).abs());
            let got = got[row * vocabulary + token];
            assert!((f64::from(got) - want).abs() < 2e-6, "{name} [{row}, {token}]: {got}, want {want}");
        }
    }
    assert_eq!(softcap.is_some(), cap_effect > 0.5, "{name}: the softcap changes logits by {cap_effect}");
}
