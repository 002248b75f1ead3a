//! Examples of attention and rotary embeddings, on packed segments with grouped heads.
//!
//! Segments are shorter and longer than a tile of queries and a tile of keys.

use crate::check::same_bytes_everywhere;
use crate::decoder_cache::cached_logits_equal_those_of_whole_sequences;
use crate::draft::Draft;
use crate::examples::{Example, Proof, gradient};
use crate::numbers::{Content, decode_reals, random_reals};
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
        with_sinks(&[9], [2, 1, 8], Some(1), None),
        attention(&[2, 7], [2, 1, 8], Some(100), None),
        attention(&[13], [2, 1, 80], None, None),
        attention(&[13], [2, 1, 112], None, None),
        attention(&[9], [1, 1, 192], Some(4), None),
        attention(&[3, 70], [2, 1, 268], None, None),
        attention(&[33, 70], [2, 1, 320], Some(40), None),
        attention(&[33, 70, 1], [2, 1, 512], None, None),
        attention(&[40, 18], [3, 3, 512], Some(17), Some(0.5)),
        with_sinks(&[1, 5, 2, 9], [4, 2, 8], None, None),
        with_sinks(&[QUERY_BLOCK + 3, 2, KEY_BLOCK + 11], [2, 1, 64], Some(40), None),
        with_sinks(&[33, 70], [2, 1, 512], None, Some(0.7)),
        shared_keys_and_values(),
        Example {
            covers: &["cache_rows", "cached_attention"],
            proof: Proof::Values(cached_attention_is_attention),
        },
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
    let scale = (head_dim as f32).powf(-0.5);
    subject_of(segments, AttentionShape { heads, kv_heads, head_dim, scale, window, softcap, sinks: false })
}

fn subject_of(segments: &[usize], shape: AttentionShape) -> Subject {
    let mut draft = Draft::new(segments, 1);
    let (q, kv) = shape.channels();
    let mut inputs =
        vec![draft.tokens("q", q), draft.tokens("k", kv), draft.tokens("v", kv), draft.boundaries()];
    if shape.sinks {
        inputs.push(draft.vector("sinks", shape.heads, DType::F32));
    }
    let o = draft.op(Op::Attention(shape), &inputs, &["o", "lse"])[0];
    draft.gradient_of(&format!("attention {shape} over {segments:?}"), o)
}

/// The scale is 1, as in models with normalized queries and keys.
fn with_sinks(
    segments: &[usize],
    [heads, kv_heads, head_dim]: [usize; 3],
    window: Option<usize>,
    softcap: Option<f32>,
) -> Example {
    let shape = AttentionShape { heads, kv_heads, head_dim, scale: 1.0, window, softcap, sinks: true };
    gradient(&["attention", "attention_grad", "sinks_grad"], subject_of(segments, shape))
}

/// Two layers read the same keys and values, so their gradients are sums.
fn shared_keys_and_values() -> Example {
    let mut draft = Draft::new(&[4, 9], 1);
    let [k, v] = ["k", "v"].map(|name| draft.tokens(name, 16));
    let [first, second] = ["first", "second"].map(|name| draft.tokens(name, 32));
    let shape = AttentionShape {
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        scale: 0.35,
        window: None,
        softcap: None,
        sinks: false,
    };
    let below = draft.op(Op::Attention(shape), &[first, k, v, draft.boundaries()], &["o", "lse"])[0];
    let q = draft.op(Op::Add { scale: 1.0 }, &[below, second], &["q"])[0];
    let windowed = AttentionShape { window: Some(3), ..shape };
    let o =
        draft.op(Op::Attention(windowed), &[q, k, v, draft.boundaries()], &["o of both", "lse of both"])[0];
    let subject = draft.gradient_of("shared keys and values", o);
    let sums = subject.graph.entries[0].1.iter().filter(|node| matches!(node.op, Op::Add { .. }));
    assert_eq!(sums.count(), 3, "one sum of the forward pass, and those of the gradients of k and v");
    gradient(&["attention", "attention_grad"], subject)
}

/// Cached attention gives the bytes of attention, also with sinks and for the largest heads.
fn cached_attention_is_attention() -> BTreeSet<&'static str> {
    let plain = AttentionShape {
        heads: 4,
        kv_heads: 2,
        head_dim: 12,
        scale: 0.5,
        window: None,
        softcap: None,
        sinks: false,
    };
    let mut ran = BTreeSet::new();
    for shape in [
        plain,
        AttentionShape { sinks: true, ..plain },
        AttentionShape { sinks: true, window: Some(5), softcap: Some(0.5), ..plain },
        AttentionShape { head_dim: 512, sinks: true, ..plain },
    ] {
        ran.extend(cached_and_whole(shape));
    }
    ran
}

fn cached_and_whole(shape: AttentionShape) -> BTreeSet<&'static str> {
    const TOKENS: usize = 23;
    let (q_columns, kv_columns) = shape.channels();
    let (mut graph, mut contents) = (Graph::default(), Vec::new());
    let mut leaf = |name: &str, shape: Shape, dtype: DType, kind: LeafKind, content: Content| {
        let id = graph.add_leaf(name, Type::new(shape, Storage::Plain(dtype)), kind);
        contents.push((id, content));
        id
    };
    let [q, k, v] = [("q", q_columns), ("k", kv_columns), ("v", kv_columns)].map(|(name, columns)| {
        let reals = Content::Reals(random_reals(columns as u64 + name.len() as u64, TOKENS * columns));
        leaf(name, Shape::of(Dim::Tokens, columns), DType::F32, LeafKind::Input, reals)
    });
    let mut integers = |name: &str, shape: Shape, numbers: Vec<i32>| {
        leaf(name, shape, DType::I32, LeafKind::Input, Content::Integers(numbers))
    };
    let boundaries = integers("boundaries", Shape::rows_of(Dim::Boundaries), vec![0, TOKENS as i32]);
    let table = integers("table", Shape::matrix(1, TOKENS), (0..TOKENS as i32).rev().collect());
    let slots = integers("slots", Shape::rows_of(Dim::Tokens), vec![0; TOKENS]);
    let positions = integers("positions", Shape::rows_of(Dim::Tokens), (0..TOKENS as i32).collect());
    let caches = ["keys", "values"].map(|name| {
        let zeros = Content::Reals(vec![0.0; TOKENS * kv_columns]);
        leaf(name, Shape::matrix(TOKENS, kv_columns), DType::F32, LeafKind::Weight, zeros)
    });
    let sinks = shape.sinks.then(|| {
        let reals = Content::Reals(random_reals(9, shape.heads));
        leaf("sinks", Shape::vector(shape.heads), DType::F32, LeafKind::Weight, reals)
    });
    let (mut whole, mut cached, place) = (Vec::new(), Vec::new(), (Phase::Forward, None));
    let names = |name: &str| [name.to_string(), format!("{name} lse")];
    let inputs = [q, k, v, boundaries].into_iter().chain(sinks).collect();
    let expected = graph.emit(&mut whole, Op::Attention(shape), inputs, vec![], &names("o"), place)[0];
    graph.emit(&mut cached, Op::CacheRows, vec![k, v, table, slots, positions], caches.to_vec(), &[], place);
    let inputs = [q, caches[0], caches[1], table, slots, positions].into_iter().chain(sinks).collect();
    let got =
        graph.emit(&mut cached, Op::CachedAttention(shape), inputs, vec![], &names("cached")[..1], place)[0];
    graph.entries = vec![(Entry::MicroStep, whole), (Entry::Eval, cached)];
    let subject = Subject {
        name: format!("cached attention {shape}"),
        graph,
        extent: Extent { tokens: TOKENS, rows: TOKENS, segments: 1, audio: 0 },
        contents,
        scalar: Scalar::Dot { y: got, dy: vec![] },
    };
    let mut executor = subject.load(subject.plan(subject.extent, 2), 2);
    executor.run(Entry::MicroStep, &subject.extent).unwrap();
    let expected = subject.read_bytes(&mut executor, expected);
    executor.run(Entry::Eval, &subject.extent).unwrap();
    assert!(subject.read_bytes(&mut executor, got) == expected, "{}", subject.name);
    ["cache_rows", "cached_attention"].into()
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
