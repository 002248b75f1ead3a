//! Attention and rotary embeddings, on packed segments with grouped heads.
//!
//! Segments are shorter and longer than a tile of queries and a tile of keys.

use crate::draft::Draft;
use crate::examples::{Example, Proof, gradient};
use crate::numbers::{Content, decode_reals};
use crate::subject::{Scalar, Subject};
use smidgen_ir::workspace::{KEY_BLOCK, QUERY_BLOCK};
use smidgen_ir::{
    AttentionShape, DType, Dim, Entry, Extent, Graph, LeafKind, Op, Phase, RopeScaling, RopeSpec, Shape,
    Storage, Type,
};
use std::collections::BTreeSet;

const ROPE: RopeSpec = RopeSpec { theta: 1e4, dim: 12, scaling: RopeScaling::Default };

pub fn examples() -> Vec<Example> {
    vec![
        attention(&[1, 5, 2, 9], 4, 2, 8, None),
        attention(&[6], 1, 1, 16, None),
        attention(&[3, 8], 6, 2, 24, Some(4)),
        attention(&[2, 11], 2, 1, 12, Some(2)),
        attention(&[QUERY_BLOCK + 3, 2, KEY_BLOCK + 11], 3, 1, 8, None),
        rope(3, 16, false),
        rope(2, 12, true),
        Example { covers: &["rope_table"], proof: Proof::Values(rope_table_holds_cosines_and_sines) },
    ]
}

fn attention(
    segments: &[usize],
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
) -> Example {
    let mut draft = Draft::new(segments, 1);
    let q = draft.tokens("q", heads * head_dim);
    let k = draft.tokens("k", kv_heads * head_dim);
    let v = draft.tokens("v", kv_heads * head_dim);
    let shape = AttentionShape { heads, kv_heads, head_dim, scale: (head_dim as f32).powf(-0.5), window };
    let o = draft.op(Op::Attention(shape), &[q, k, v, draft.boundaries()], &["o", "lse"])[0];
    let name =
        format!("attention of {heads}/{kv_heads} heads of {head_dim} over {segments:?}, window {window:?}");
    gradient(&["attention", "attention_grad"], draft.gradient_of(&name, o))
}

/// Only the first 12 channels of a head are turned.
fn rope(heads: usize, head_dim: usize, inverse: bool) -> Example {
    let mut draft = Draft::new(&[4, 9], 1);
    let positions = draft.ids("positions", Dim::Tokens, 2000);
    let x = draft.tokens("x", heads * head_dim);
    let table = draft.op(Op::RopeTable(ROPE), &[positions], &["table"])[0];
    let y = draft.op(Op::Rope { heads, inverse }, &[x, table], &["y"])[0];
    gradient(&["rope"], draft.gradient_of(&format!("rope of {heads} heads of {head_dim}"), y))
}

/// Positions have no gradient, so the table is compared with f64 angles. At position 3000 the f32 angle
/// itself is off by 1e-4.
fn rope_table_holds_cosines_and_sines() -> BTreeSet<&'static str> {
    let positions = vec![0, 1, 2, 17, 511, 3000];
    let mut graph = Graph::default();
    let ty = Type::new(Shape::rows_of(Dim::Tokens), Storage::Plain(DType::I32));
    let input = graph.add_leaf("positions", ty, LeafKind::Input);
    let mut nodes = Vec::new();
    let place = (Phase::Forward, None);
    let y = graph.emit(&mut nodes, Op::RopeTable(ROPE), vec![input], vec![], &["y".into()], place)[0];
    graph.entries = vec![(Entry::MicroStep, vec![]), (Entry::Eval, nodes)];
    let extent = Extent { tokens: positions.len(), rows: 1, segments: 1 };
    let subject = Subject {
        name: "rope table".into(),
        graph,
        extent,
        contents: vec![(input, Content::Integers(positions.clone()))],
        scalar: Scalar::Dot { y, dy: vec![] },
    };
    subject.run_on_null(subject.roomy_plan(1)).unwrap();
    let outcome = crate::check::same_bytes_everywhere(&subject);
    let table = decode_reals(&outcome.result); // (T, 12)
    for (row, position) in positions.iter().enumerate() {
        for pair in 0..ROPE.dim / 2 {
            let angle = f64::from(*position) * 1e4f64.powf(-2.0 * pair as f64 / ROPE.dim as f64);
            let got = [table[row * ROPE.dim + pair], table[row * ROPE.dim + ROPE.dim / 2 + pair]];
            for (got, want) in got.into_iter().zip([angle.cos(), angle.sin()]) {
                let error = (f64::from(got) - want).abs();
                assert!(error < 5e-4, "position {position}, pair {pair}: got {got}, want {want}");
            }
        }
    }
    BTreeSet::from(["rope_table"])
}
