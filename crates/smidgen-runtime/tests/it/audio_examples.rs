//! Examples of audio operations: rows placed among tokens, the layers of an encoder, and the convolutions in front of it.
//!
//! Audio rows come from a trained linear on a square input, so that every element's gradient reaches a weight. Clips and
//! chunks have several lengths; the convolutions are compared with sums in f64 over whole spectrograms.

use crate::check::same_bytes_everywhere;
use crate::draft::Draft;
use crate::examples::{Example, Proof, gradient};
use crate::numbers::{Content, decode_reals, random_reals};
use crate::subject::{Scalar, Subject};
use smidgen_ir::{
    AttentionShape, DType, Dim, Entry, Extent, Graph, LeafKind, MARK_COLUMNS, Op, Phase, PlainActivation,
    Shape, Storage, StridedConv, Type, ValueId,
};
use std::collections::BTreeSet;

/// Rows of three chunks; the first two belong to one clip.
const CHUNKS: [usize; 3] = [7, 4, 1];

pub fn examples() -> Vec<Example> {
    let mut examples = vec![
        placed(),
        scaled(),
        biased(),
        causal_conv(3, DType::F32),
        causal_conv(5, DType::Bf16),
        attention(2, 5, 3, DType::F32),
        attention(1, 19, 20, DType::Bf16),
    ];
    examples.extend([DType::F32, DType::Bf16].map(layer_norm));
    examples.extend([PlainActivation::Silu, PlainActivation::Gelu, PlainActivation::Relu].map(act));
    for (covers, compare) in [
        (&["strided_conv"] as &'static [_], convolutions_match_whole_clips as fn() -> _),
        (&["join_places"], places_are_joined_channel_by_channel),
        (&["mask_rows"], rows_without_frames_are_zero),
    ] {
        examples.push(Example { covers, proof: Proof::Values(compare) });
    }
    examples
}

/// The marks of audio rows in chunks; each chunk has a number of rows and may begin a clip.
fn marks(chunks: &[(usize, bool)], frames: impl Fn(usize) -> i32) -> Vec<i32> {
    let (mut marks, mut clip) = (Vec::new(), 0);
    for &(rows, begins_clip) in chunks {
        let first = (marks.len() / MARK_COLUMNS) as i32;
        clip = if begins_clip { first } else { clip };
        for row in first..first + rows as i32 {
            marks.extend([frames(row as usize), first, first + rows as i32, clip]);
        }
    }
    marks
}

fn draft() -> (Draft, ValueId) {
    let mut draft = Draft::with_audio(&[9, 8], CHUNKS.iter().sum());
    let marks = marks(&[(CHUNKS[0], true), (CHUNKS[1], false), (CHUNKS[2], true)], |_| 8);
    let marks = draft.marks(marks);
    (draft, marks)
}

/// Checks the gradient of audio rows that are placed among tokens; one of them is placed nowhere.
fn check(mut draft: Draft, name: &str, covers: &'static [&'static str], rows: ValueId) -> Example {
    let columns = draft.columns(rows);
    let x = draft.tokens("x", columns);
    let targets = (0..CHUNKS.iter().sum::<usize>() as i32).map(|row| if row == 5 { -1 } else { 16 - row });
    let targets = draft.integers("targets", Dim::Audio(1), targets.collect());
    let y = draft.op(Op::PlaceRows { clear: false }, &[x, targets, rows], &["y"])[0];
    gradient(covers, draft.gradient_of(name, y))
}

fn placed() -> Example {
    let (mut draft, _) = draft();
    let rows = draft.audio("audio", 11);
    check(draft, "placed rows", &["place_rows", "take_rows"], rows)
}

fn scaled() -> Example {
    let (mut draft, _) = draft();
    let x = draft.audio("audio", 7);
    let y = draft.op(Op::Scale { scale: 0.5 }, &[x], &["half"])[0];
    check(draft, "half", &["scale"], y)
}

fn biased() -> Example {
    let (mut draft, _) = draft();
    let x = draft.audio("audio", 18);
    let bias = draft.vector("bias", 18, DType::Bf16);
    let y = draft.op(Op::AddBias, &[x, bias], &["biased"])[0];
    check(draft, "add bias", &["add_bias", "bias_grad"], y)
}

fn layer_norm(dtype: DType) -> Example {
    let (mut draft, _) = draft();
    let x = draft.audio("audio", 21);
    let [weight, bias] = ["weight", "bias"].map(|name| draft.frozen_vector(name, 21, dtype));
    let y = draft.op(Op::LayerNorm { eps: 1e-5, bias: true }, &[x, weight, bias], &["normed"])[0];
    check(draft, &format!("layer norm {dtype}"), &["layer_norm", "layer_norm_grad"], y)
}

/// Inputs of ReLU are far from zero, where it has no derivative.
fn act(kind: PlainActivation) -> Example {
    let (mut draft, _) = draft();
    let mut x = draft.audio("audio", 19);
    if kind == PlainActivation::Relu {
        let sides: Vec<f32> = (0..19).map(|channel| if channel % 3 == 0 { -20.0 } else { 20.0 }).collect();
        let sides = draft.frozen_vector_of("sides", &sides);
        x = draft.op(Op::AddBias, &[x, sides], &["far"])[0];
    }
    let y = draft.op(Op::Act(kind), &[x], &["act"])[0];
    check(draft, &format!("{kind:?}"), &["act", "act_grad"], y)
}

fn causal_conv(taps: usize, dtype: DType) -> Example {
    let (mut draft, marks) = draft();
    let x = draft.audio("audio", 13);
    let weight = draft.frozen_matrix("weight", 13, taps, dtype);
    let bias = draft.frozen_vector("bias", 13, dtype);
    let y = draft.op(Op::CausalConv { bias: true, backward: false }, &[x, marks, weight, bias], &["conv"])[0];
    check(draft, &format!("causal conv of {taps}"), &["causal_conv"], y)
}

/// Chunks are longer and shorter than the largest distance of the bias.
fn attention(heads: usize, head_dim: usize, max_distance: usize, dtype: DType) -> Example {
    let (mut draft, marks) = draft();
    let [q, k, v] = ["q", "k", "v"].map(|name| draft.audio(name, heads * head_dim));
    let bias = draft.frozen_matrix("bias", 2 * max_distance, heads, dtype);
    let scale = (head_dim as f32).powf(-0.5);
    let shape =
        AttentionShape { heads, kv_heads: heads, head_dim, scale, window: None, softcap: None, sinks: false };
    let y = draft.op(Op::ChunkAttention(shape), &[q, k, v, marks, bias], &["o", "lse"])[0];
    let covers = &["chunk_attention", "chunk_attention_grad"];
    check(draft, &format!("chunk attention of {heads} heads, {max_distance} distances"), covers, y)
}

/// Attention over chunks of several tiles of the GPU kernels, to compare devices.
pub fn long_attention(heads: usize, head_dim: usize) -> Subject {
    let chunks = [70, 130, 3, 64];
    let rows: usize = chunks.iter().sum();
    let mut draft = Draft::with_audio(&[rows], rows);
    let marks = draft.marks(marks(&chunks.map(|rows| (rows, true)), |_| 8));
    let [q, k, v] = ["q", "k", "v"].map(|name| draft.audio(name, heads * head_dim));
    let bias = draft.frozen_matrix("bias", 2 * 100, heads, DType::F32);
    let scale = (rows as f32 * head_dim as f32).powf(-0.5);
    let shape =
        AttentionShape { heads, kv_heads: heads, head_dim, scale, window: None, softcap: None, sinks: false };
    let o = draft.op(Op::ChunkAttention(shape), &[q, k, v, marks, bias], &["o", "lse"])[0];
    let x = draft.tokens("x", heads * head_dim);
    let targets = draft.integers("targets", Dim::Audio(1), (0..rows as i32).collect());
    let y = draft.op(Op::PlaceRows { clear: false }, &[x, targets, o], &["y"])[0];
    draft.gradient_of(&format!("chunk attention of {heads} heads of {head_dim}"), y)
}

/// Runs one operation on audio rows.
fn run(name: &str, op: Op, audio: usize, inputs: Vec<(Type, Content)>) -> Vec<f32> {
    let mut graph = Graph::default();
    let mut contents = Vec::new();
    for (index, (ty, content)) in inputs.into_iter().enumerate() {
        let id = graph.add_leaf(format!("input {index}"), ty, LeafKind::Input);
        contents.push((id, content));
    }
    let operands = contents.iter().map(|(id, _)| *id).collect();
    let mut nodes = Vec::new();
    let y = graph.emit(&mut nodes, op, operands, vec![], &["y".into()], (Phase::Forward, None))[0];
    graph.entries = vec![(Entry::MicroStep, vec![]), (Entry::Eval, nodes)];
    let extent = Extent { tokens: 1, rows: 1, segments: 1, audio };
    let scalar = Scalar::Dot { y, dy: vec![] };
    let subject = Subject { name: name.into(), graph, extent, contents, scalar };
    subject.run_on_null(subject.roomy_plan(1)).unwrap();
    decode_reals(&same_bytes_everywhere(&subject).result)
}

fn reals(shape: Shape, values: Vec<f32>) -> (Type, Content) {
    (Type::f32(shape), Content::Reals(values))
}

fn marked(marks: Vec<i32>) -> (Type, Content) {
    let ty = Type::new(Shape::of(Dim::Audio(1), MARK_COLUMNS), Storage::Plain(DType::I32));
    (ty, Content::Integers(marks))
}

/// A first convolution and depthwise ones, on clips of 21 and 8 frames. A later convolution sees the output frames of the
/// one before for each clip, and zeros beyond them.
fn convolutions_match_whole_clips() -> BTreeSet<&'static str> {
    for (frames, depthwise) in [(4, false), (2, true), (1, true)] {
        compare_convolution(StridedConv { frames, bins: 3, depthwise }, 17);
    }
    BTreeSet::from(["strided_conv"])
}

fn compare_convolution(conv: StridedConv, channels: usize) {
    let StridedConv { frames, bins, depthwise } = conv;
    let clips = [21usize, 8];
    let of_rows = [8, 8, 5, 8];
    let audio = of_rows.len();
    let input_channels = if depthwise { channels } else { 1 };
    let (in_frames, in_bins) = (2 * frames, 2 * bins);
    let x = random_reals(1, audio * in_frames * in_bins * input_channels);
    let (weight, bias) = (random_reals(2, channels * 9), random_reals(3, channels));
    let rows = if depthwise {
        Shape::of(Dim::Audio(in_frames * in_bins), channels)
    } else {
        Shape::of(Dim::Audio(in_frames), in_bins)
    };
    let inputs = vec![
        reals(rows, x.clone()),
        marked(marks(&[(3, true), (1, true)], |row| of_rows[row])),
        reals(Shape::matrix(channels, 9), weight.clone()),
        reals(Shape::vector(channels), bias.clone()),
    ];
    let got = run(&format!("{conv}"), Op::StridedConv(conv), audio, inputs);
    assert_eq!(got.len(), audio * frames * bins * channels);
    let mut first_row = 0;
    for mel_frames in clips {
        let valid_frames = mel_frames.div_ceil(8 / in_frames);
        let input = |frame: isize, bin: isize, channel: usize| -> f64 {
            let inside = (0..valid_frames as isize).contains(&frame) && (0..in_bins as isize).contains(&bin);
            let at = ((first_row * in_frames) as isize + frame) * in_bins as isize + bin;
            if inside { f64::from(x[at as usize * input_channels + channel % input_channels]) } else { 0.0 }
        };
        for frame in 0..valid_frames.div_ceil(2) {
            for (bin, channel) in (0..bins).flat_map(|bin| (0..channels).map(move |channel| (bin, channel))) {
                let mut want = f64::from(bias[channel]);
                for tap in 0..9 {
                    let (at, across) = (2 * frame + tap / 3, 2 * bin + tap % 3);
                    let x = input(at as isize - 1, across as isize - 1, channel);
                    want += f64::from(weight[9 * channel + tap]) * x;
                }
                let got = got[((first_row * frames + frame) * bins + bin) * channels + channel];
                assert!(
                    (f64::from(got) - want).abs() < 1e-5,
                    "{conv}: frame {frame} bin {bin}: {got}, {want}"
                );
            }
        }
        first_row += mel_frames.div_ceil(8);
    }
}

fn places_are_joined_channel_by_channel() -> BTreeSet<&'static str> {
    let inputs = vec![reals(Shape::of(Dim::Audio(3), 2), (0..12).map(|number| number as f32).collect())];
    let got = run("join places", Op::JoinPlaces { places: 3 }, 2, inputs);
    assert_eq!(got, [0., 2., 4., 1., 3., 5., 6., 8., 10., 7., 9., 11.]);
    BTreeSet::from(["join_places"])
}

fn rows_without_frames_are_zero() -> BTreeSet<&'static str> {
    let rows = reals(Shape::of(Dim::Audio(1), 2), (1..7).map(|number| number as f32).collect());
    let marks = marks(&[(3, true)], |row| [8, 3, 0][row]);
    assert_eq!(
        run("mask rows", Op::MaskRows { stored: false }, 3, vec![rows, marked(marks)]),
        [1., 2., 3., 4., 0., 0.]
    );
    BTreeSet::from(["mask_rows"])
}
