//! Examples of attention and rotary embeddings, on packed segments with grouped heads.
//!
//! Segments are shorter and longer than a tile of queries and a tile of keys.

use crate::check::same_bytes_everywhere;
use crate::decoder_cache::cached_logits_equal_those_of_whole_sequences;
use crate::draft::Draft;
use crate::examples::{Example, Proof, gradient};
use crate::numbers::{Content, decode_reals};
use crate::subject::{Scalar, Subject};
use smidgen_ir::workspace_cpu::{KEY_BLOCK, QUERY_BLOCK};
use smidgen_ir::{
    AttentionShape, DType, Dim, Entry, Extent, Graph, LeafKind, Op, Phase, PositionScale, RopeScaling,
    RopeSpec, Shape, Storage, Type,
};
use std::collections::BTreeSet;

const DIM: usize = 12;
const THETA: f32 = 1e4;

pub fn examples() -> Vec<Example> {
    vec![
        attention(&[1, 5, 2, 9], [4, 2, 8], None, None),
        attention(&[6], [1, 1, 16], None, None),
        attention(&[3, 8], [6, 2, 24], Some(4), None),
        attention(&[2, 11], [2, 1, 12], Some(2), None),
        attention(&[QUERY_BLOCK + 3, 2, KEY_BLOCK + 11], [3, 1, 8], None, None),
        attention(&[1, 5, 9], [4, 2, 8], None, Some(0.5)),
        attention(&[2, 11], [6, 2, 24], Some(4), Some(0.7)),
        attention(&[QUERY_BLOCK + 3, KEY_BLOCK + 11], [2, 1, 8], Some(KEY_BLOCK + 1), Some(0.5)),
        Example {
            covers: &["cache_rows", "cached_attention"],
            proof: Proof::Values(cached_logits_equal_those_of_whole_sequences),
        },
        rope(3, 16, false, false),
        rope(2, 12, true, false),
        rope(3, 16, false, true),
        rope(2, 12, true, true),
        rope(5, 13, false, true),
        rope_with(
            "rope with frequencies for half of the pairs",
            RopeScaling::Proportional { rotated_pairs: 3, factor: 1.0 },
        ),
        rope_with("rope of yarn", YARN),
        rope_with("rope of stretched samples", RopeScaling::Dynamic { factor: 2.0, max_positions: 5 }),
        rope_of_growing_queries(),
        rope_of_long_and_short_samples(),
        Example { covers: &["rope_table"], proof: Proof::Values(rope_table_holds_cosines_and_sines) },
        Example { covers: &["rope_table"], proof: Proof::Values(longrope_depends_on_the_sample_length) },
    ]
}

fn attention(segments: &[usize], sizes: [usize; 3], window: Option<usize>, softcap: Option<f32>) -> Example {
    gradient(&["attention", "attention_grad"], attention_subject(segments, sizes, window, softcap))
}

/// Sizes are heads, key heads and channels of a head. Scores are about 1/3 here, so a softcap of 0.5 changes them.
pub fn attention_subject(
    segments: &[usize],
    [heads, kv_heads, head_dim]: [usize; 3],
    window: Option<usize>,
    softcap: Option<f32>,
) -> Subject {
    let mut draft = Draft::new(segments, 1);
    let q = draft.tokens("q", heads * head_dim);
    let k = draft.tokens("k", kv_heads * head_dim);
    let v = draft.tokens("v", kv_heads * head_dim);
    let scale = (head_dim as f32).powf(-0.5);
    let shape = AttentionShape { heads, kv_heads, head_dim, scale, window, softcap };
    let o = draft.op(Op::Attention(shape), &[q, k, v, draft.boundaries()], &["o", "lse"])[0];
    let sizes = format!("{heads}/{kv_heads} heads of {head_dim} over {segments:?}");
    let name = format!("attention of {sizes}, window {window:?}, cap {softcap:?}");
    draft.gradient_of(&name, o)
}

/// Only the first 12 channels of a head are rotated.
fn rope(heads: usize, head_dim: usize, inverse: bool, interleaved: bool) -> Example {
    let mut draft = Draft::new(&[4, 9], 1);
    let positions = draft.ids("positions", Dim::Tokens, 2000);
    let x = draft.tokens("x", heads * head_dim);
    let table = draft.op(Op::RopeTable(RopeSpec::plain(THETA, DIM)), &[positions], &["table"])[0];
    let y = draft.op(Op::Rope { heads, inverse, interleaved }, &[x, table], &["y"])[0];
    let name = format!("rope of {heads} heads of {head_dim}, interleaved={interleaved}");
    gradient(&["rope"], draft.gradient_of(&name, y))
}

const YARN: RopeScaling = RopeScaling::Yarn {
    factor: 4.0,
    beta_fast: 32.0,
    beta_slow: 1.0,
    original_max_positions: 500,
    truncate: true,
};

/// Every channel of the heads is rotated, in samples of 4, 9 and 1 tokens.
fn rope_with(name: &str, scaling: RopeScaling) -> Example {
    rope_by(name, RopeSpec { scaling, attention_scale: 1.2, ..RopeSpec::plain(THETA, DIM) })
}

fn rope_of_growing_queries() -> Example {
    let position_scale = Some(PositionScale { beta: 0.3, original: 100 });
    rope_by("rope of growing queries", RopeSpec { position_scale, ..RopeSpec::plain(THETA, DIM) })
}

fn rope_by(name: &str, spec: RopeSpec) -> Example {
    let mut draft = Draft::new(&[4, 9, 1], 1);
    let positions = draft.ids("positions", Dim::Tokens, 2000);
    let x = draft.tokens("x", 2 * DIM);
    let boundaries = spec.depends_on_length().then(|| draft.boundaries());
    let inputs: Vec<_> = [positions].into_iter().chain(boundaries).collect();
    let table = draft.op(Op::RopeTable(spec), &inputs, &["table"])[0];
    let y = draft.op(Op::Rope { heads: 2, inverse: false, interleaved: true }, &[x, table], &["y"])[0];
    gradient(&["rope"], draft.gradient_of(name, y))
}

/// Cosines and sines are scaled, and the gradient is rotated back with the same table.
fn rope_of_long_and_short_samples() -> Example {
    let mut draft = Draft::new(&[4, 9, 1], 1);
    let positions = draft.ids("positions", Dim::Tokens, 2000);
    let x = draft.tokens("x", 2 * 16);
    let inputs = [positions, draft.boundaries()];
    let table = draft.op(Op::RopeTable(longrope(4)), &inputs, &["table"])[0];
    let y = draft.op(Op::Rope { heads: 2, inverse: false, interleaved: false }, &[x, table], &["y"])[0];
    gradient(&["rope"], draft.gradient_of("rope of long and short samples", y))
}

fn longrope(original_max_positions: usize) -> RopeSpec {
    let (short, long) = (vec![1.0, 1.1, 1.3, 1.5, 1.9, 2.0], vec![1.0, 1.5, 3.0, 7.0, 20.0, 45.0]);
    let scaling = RopeScaling::LongRope { short, long, original_max_positions };
    RopeSpec { scaling, attention_scale: 1.19, ..RopeSpec::plain(THETA, DIM) }
}

/// The table (T, 12) that a spec gives for positions in segments that end at `boundaries`.
fn table_of(name: &str, spec: &RopeSpec, positions: &[i32], boundaries: &[i32]) -> Vec<f32> {
    let mut graph = Graph::default();
    let mut integers = |name: &str, dim: Dim| {
        let ty = Type::new(Shape::rows_of(dim), Storage::Plain(DType::I32));
        graph.add_leaf(name, ty, LeafKind::Input)
    };
    let (place, ends) = (integers("positions", Dim::Tokens), integers("boundaries", Dim::Boundaries));
    let inputs = if spec.depends_on_length() { vec![place, ends] } else { vec![place] };
    let mut nodes = Vec::new();
    let op = Op::RopeTable(spec.clone());
    let y = graph.emit(&mut nodes, op, inputs, vec![], &["y".into()], (Phase::Forward, None))[0];
    graph.entries = vec![(Entry::MicroStep, vec![]), (Entry::Eval, nodes)];
    let subject = Subject {
        name: name.into(),
        graph,
        extent: Extent { tokens: positions.len(), rows: 1, segments: boundaries.len() - 1, audio: 0 },
        contents: vec![
            (place, Content::Integers(positions.to_vec())),
            (ends, Content::Integers(boundaries.to_vec())),
        ],
        scalar: Scalar::Dot { y, dy: vec![] },
    };
    subject.run_on_null(subject.roomy_plan(1)).unwrap();
    decode_reals(&same_bytes_everywhere(&subject).result)
}

/// Compares a row of a table with f64. At position 3000 the f32 angle itself is off by 1e-4.
fn compare_row(row: &[f32], position: i32, factors: &[f32], scale: f64) {
    for (pair, factor) in factors.iter().enumerate() {
        let frequency = f64::from(THETA).powf(-2.0 * pair as f64 / DIM as f64) / f64::from(*factor);
        let angle = f64::from(position) * frequency;
        let got = [row[pair], row[DIM / 2 + pair]];
        for (got, want) in got.into_iter().zip([scale * angle.cos(), scale * angle.sin()]) {
            let error = (f64::from(got) - want).abs();
            assert!(error < 5e-4, "position {position}, pair {pair}: got {got}, want {want}");
        }
    }
}

/// Positions have no gradient, so the table is compared with f64 angles.
fn rope_table_holds_cosines_and_sines() -> BTreeSet<&'static str> {
    let positions = [0, 1, 2, 17, 511, 3000];
    let table = table_of("rope table", &RopeSpec::plain(THETA, DIM), &positions, &[0, 6]);
    for (row, position) in table.chunks(DIM).zip(positions) {
        compare_row(row, position, &[1.0; DIM / 2], 1.0);
    }
    BTreeSet::from(["rope_table"])
}

/// Samples of 5, 6 and 1 tokens in one micro-batch; up to 5 tokens count as short.
fn longrope_depends_on_the_sample_length() -> BTreeSet<&'static str> {
    let spec = longrope(5);
    let RopeScaling::LongRope { short, long, .. } = &spec.scaling else {
        unreachable!("longrope is longrope")
    };
    let positions: Vec<i32> = (0..5).chain(0..6).chain(0..1).map(|position| 97 * position + 1).collect();
    let table = table_of("longrope table", &spec, &positions, &[0, 5, 11, 12]);
    for (index, (row, position)) in table.chunks(DIM).zip(&positions).enumerate() {
        let factors = if (5..11).contains(&index) { long } else { short };
        compare_row(row, *position, factors, f64::from(spec.attention_scale));
    }
    BTreeSet::from(["rope_table"])
}
