//! Examples of recurrent mixers: causal convolutions, decays and scans, on packed samples and in generation.
//!
//! Samples are shorter and longer than a chunk. Chunks and packing change no bit of a result, and neither does it matter
//! in which pieces generation feeds a sequence.

use crate::check::same_bytes_everywhere;
use crate::draft::Draft;
use crate::examples::{Example, Proof, gradient};
use crate::numbers::{Content, decode_reals, random_reals};
use crate::subject::{Scalar, Subject};
use smidgen_ir::{
    DType, DecayShape, Dim, Entry, Extent, Graph, LeafKind, Op, Phase, ScanShape, Shape, Storage, Type,
    ValueId,
};
use std::collections::BTreeSet;

pub fn examples() -> Vec<Example> {
    let mut examples = vec![
        convolution(&[2, 7, 1, 5], 13, 4, DType::F32, true),
        convolution(&[40], 33, 3, DType::Bf16, false),
        convolution(&[3, 6], 70, 2, DType::F16, true),
        Example { covers: &["cached_conv"], proof: Proof::Values(cached_convolutions_are_convolutions) },
        Example { covers: &["cached_scan"], proof: Proof::Values(cached_scans_are_scans) },
    ];
    // Heads, key heads, channels of keys and of values.
    let sizes = [[1, 1, 8, 8], [6, 2, 8, 16], [2, 2, 5, 11], [9, 1, 7, 4], [3, 1, 20, 33]];
    for (index, sizes) in sizes.into_iter().enumerate() {
        for delta in [true, false] {
            let segments: &[usize] = if index == 1 { &[9, 1, 21, 2] } else { &[6, 11] };
            examples.push(gradient(
                &["decay", "decay_grad", "scan", "scan_grad"],
                scan_subject(segments, shape(sizes, delta, 4), delta.then_some(1.0)),
            ));
        }
    }
    examples.push(gradient(&["decay_grad"], scan_subject(&[5], shape([4, 2, 8, 8], true, 64), Some(2.0))));
    examples
}

fn shape([heads, key_heads, key_dim, value_dim]: [usize; 4], delta: bool, chunk: usize) -> ScanShape {
    let key_scale = (key_dim as f32).powf(-0.5);
    ScanShape { heads, key_heads, key_dim, value_dim, delta, query_scale: 0.7, key_scale, chunk }
}

const CONVOLUTION: &[&str] = &["causal_conv", "causal_conv_weight_grad"];

fn convolution(segments: &[usize], channels: usize, taps: usize, dtype: DType, bias: bool) -> Example {
    let mut draft = Draft::new(segments, 1);
    let x = draft.tokens("x", channels);
    let weight = draft.matrix("weight", channels, taps, dtype);
    let mut inputs = vec![x, draft.boundaries(), weight];
    if bias {
        inputs.push(draft.vector("bias", channels, dtype));
    }
    let y = draft.op(Op::CausalConv { bias, backward: false }, &inputs, &["y"])[0];
    gradient(CONVOLUTION, draft.gradient_of(&format!("convolution of {channels} x {taps} in {dtype}"), y))
}

/// A scan with its decay; tokens are written with their step unless there is a factor. The steps of some tokens are
/// clamped.
pub fn scan_subject(segments: &[usize], shape: ScanShape, write: Option<f32>) -> Subject {
    let mut draft = Draft::new(segments, 1);
    let (keys, values) = shape.channels();
    let [q, k] = ["q", "k"].map(|name| draft.tokens(name, keys));
    let v = draft.tokens("v", values);
    let a = draft.tokens("a", shape.heads);
    let log_decay = draft.vector("log_decay", shape.heads, DType::F32);
    let dt_bias = draft.vector("dt_bias", shape.heads, DType::F32);
    let mut inputs = vec![a, log_decay, dt_bias];
    inputs.extend(write.map(|_| draft.tokens("b", shape.heads)));
    let (least, most) = if write.is_some() { (0.0, f32::INFINITY) } else { (0.35, 1.7) };
    let gates = draft.op(Op::Decay(DecayShape { least, most, write }), &inputs, &["g", "beta"]);
    let inputs = [q, k, v, gates[0], gates[1], draft.boundaries()];
    let y = draft.op(Op::Scan(shape), &inputs, &["y"])[0];
    draft.gradient_of(&format!("scan {shape} over {segments:?}"), y)
}

#[test]
fn chunks_change_no_bit_of_a_scan() {
    let outcome = |chunk| {
        let shape = ScanShape { chunk, ..shape([6, 2, 8, 16], true, 1) };
        same_bytes_everywhere(&scan_subject(&[5, 17, 40], shape, Some(1.0)))
    };
    let expected = outcome(1000);
    for chunk in [1, 3, 8, 17, 64] {
        assert!(outcome(chunk) == expected, "chunks of {chunk}");
    }
}

/// Leaves of a graph that runs one operation on whole sequences, and another on pieces of them.
#[derive(Default)]
struct Leaves {
    graph: Graph,
    contents: Vec<(ValueId, Content)>,
}

impl Leaves {
    fn add(&mut self, name: &str, shape: Shape, dtype: DType, content: Content) -> ValueId {
        let kind = if name == "state" { LeafKind::Weight } else { LeafKind::Input };
        let id = self.graph.add_leaf(name, Type::new(shape, Storage::Plain(dtype)), kind);
        self.contents.push((id, content));
        id
    }

    fn tokens(&mut self, name: &str, columns: usize, reals: &[f32]) -> ValueId {
        self.add(name, Shape::of(Dim::Tokens, columns), DType::F32, Content::Reals(reals.to_vec()))
    }

    fn integers(&mut self, name: &str, dim: Dim, integers: Vec<i32>) -> ValueId {
        self.add(name, Shape::rows_of(dim), DType::I32, Content::Integers(integers))
    }
}

/// Lengths of two sequences, and the pieces in which both are fed: the slot and the number of tokens of each part.
const LENGTHS: [usize; 2] = [9, 7];
const PIECES: &[&[(usize, usize)]] =
    &[&[(0, 4), (1, 1)], &[(1, 1)], &[(0, 1), (1, 1)], &[(1, 4), (0, 3)], &[(0, 1)]];

/// Runs an operation on both sequences as samples, and the one of generation piece by piece from slots 2 and 0. `emit`
/// gets the leaf of each input by token, and what follows them; the state is an update of as many columns.
fn compare_with_pieces(
    name: &str,
    inputs: &[(usize, f32)],
    state_columns: usize,
    emit: impl Fn(&mut Leaves, Vec<ValueId>, Option<[ValueId; 3]>) -> (Op, Vec<ValueId>),
) {
    let total: usize = LENGTHS.iter().sum();
    let rows_of = |columns: usize, scale: f32, seed: usize| -> Vec<f32> {
        random_reals(seed as u64, total * columns).iter().map(|real| scale * real).collect()
    };
    let values: Vec<Vec<f32>> =
        inputs.iter().enumerate().map(|(seed, (columns, scale))| rows_of(*columns, *scale, seed)).collect();
    let run = |tokens: usize, slices: &[Vec<f32>], places: Option<(Vec<i32>, Vec<i32>, Vec<f32>)>| {
        let mut leaves = Leaves::default();
        let ids = inputs.iter().zip(slices).enumerate();
        let ids = ids
            .map(|(index, ((columns, _), slice))| leaves.tokens(&format!("in{index}"), *columns, slice))
            .collect();
        let boundaries = vec![0, LENGTHS[0] as i32, tokens as i32];
        let places = places.map(|(slots, positions, state)| {
            let slots = leaves.integers("slots", Dim::Tokens, slots);
            let positions = leaves.integers("positions", Dim::Tokens, positions);
            let shape = Shape::matrix(3, state_columns);
            [slots, positions, leaves.add("state", shape, DType::F32, Content::Reals(state))]
        });
        let is_cached = places.is_some();
        let (op, mut operands) = emit(&mut leaves, ids, places);
        if !is_cached {
            let boundaries = leaves.integers("boundaries", Dim::Boundaries, boundaries);
            let at = if matches!(op, Op::CausalConv { .. }) { 1 } else { operands.len() };
            operands.insert(at, boundaries);
        }
        let updates: Vec<ValueId> = places.iter().map(|[.., state]| *state).collect();
        let Leaves { mut graph, contents } = leaves;
        let mut nodes = Vec::new();
        let y =
            graph.emit(&mut nodes, op, operands, updates.clone(), &["y".into()], (Phase::Forward, None))[0];
        graph.entries = vec![(Entry::MicroStep, nodes)];
        let segments = if is_cached { 0 } else { 2 };
        let extent = Extent { tokens, rows: tokens, segments, audio: 0 };
        let scalar = Scalar::Dot { y, dy: vec![] };
        let subject = Subject { name: name.into(), graph, extent, contents, scalar };
        let mut executor = subject.load(subject.plan(extent, 2), 2);
        subject.write_contents(&mut executor);
        executor.run(Entry::MicroStep, &extent).unwrap();
        let state = updates.first().map(|state| decode_reals(&subject.read_bytes(&mut executor, *state)));
        (decode_reals(&subject.read_bytes(&mut executor, y)), state)
    };
    let (whole, _) = run(total, &values, None);
    let columns = whole.len() / total;
    let (mut fed, mut state) = ([0; 2], random_reals(77, 3 * state_columns));
    for piece in PIECES {
        let (mut rows, mut slots, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        for &(sequence, count) in *piece {
            for _ in 0..count {
                rows.push(sequence * LENGTHS[0] + fed[sequence]);
                slots.push([2, 0][sequence]);
                positions.push(fed[sequence] as i32);
                fed[sequence] += 1;
            }
        }
        let slices: Vec<Vec<f32>> = inputs
            .iter()
            .zip(&values)
            .map(|((columns, _), values)| {
                rows.iter().flat_map(|row| values[row * columns..(row + 1) * columns].to_vec()).collect()
            })
            .collect();
        let (y, next) = run(rows.len(), &slices, Some((slots, positions, state)));
        state = next.expect("generation has a state");
        for (row, y) in rows.iter().zip(y.chunks(columns)) {
            assert_eq!(y, &whole[row * columns..(row + 1) * columns], "{name}, row {row}");
        }
    }
    assert_eq!(fed, LENGTHS);
}

fn cached_convolutions_are_convolutions() -> BTreeSet<&'static str> {
    for (channels, taps, bias) in [(5, 4, true), (70, 2, false), (33, 7, true)] {
        compare_with_pieces("convolution", &[(channels, 1.0)], (taps - 1) * channels, |leaves, x, places| {
            let weight = Content::Reals(random_reals(5, channels * taps));
            let weight = leaves.add("weight", Shape::matrix(channels, taps), DType::F32, weight);
            let mut inputs = vec![x[0], weight];
            if bias {
                let bias = Content::Reals(random_reals(6, channels));
                inputs.push(leaves.add("bias", Shape::vector(channels), DType::F32, bias));
            }
            let Some([slots, positions, _]) = places else {
                return (Op::CausalConv { bias, backward: false }, inputs);
            };
            inputs.extend([slots, positions]);
            (Op::CachedConv { bias }, inputs)
        });
    }
    ["cached_conv"].into()
}

fn cached_scans_are_scans() -> BTreeSet<&'static str> {
    for (sizes, delta) in [([6, 2, 8, 16], true), ([3, 1, 20, 33], false), ([2, 2, 5, 11], true)] {
        let shape = shape(sizes, delta, 4);
        let (keys, values) = shape.channels();
        let inputs = [(keys, 1.0), (keys, 1.0), (values, 1.0), (shape.heads, 0.3), (shape.heads, 0.5)];
        compare_with_pieces("scan", &inputs, shape.heads * shape.state(), |_, mut inputs, places| {
            let Some([slots, positions, _]) = places else { return (Op::Scan(shape), inputs) };
            inputs.extend([slots, positions]);
            (Op::CachedScan(shape), inputs)
        });
    }
    ["cached_scan"].into()
}
