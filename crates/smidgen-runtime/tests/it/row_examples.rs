//! Examples of operations on rows: embedding, norms, dropout, gated activations, sums, factors, gather.
//!
//! Sizes are odd, so that no vector or block is full; weights are in every plain storage.

use crate::draft::Draft;
use crate::examples::{Example, gradient};
use smidgen_ir::{Activation, DType, Dim, HeadPart, Norm, Op, PlainActivation};

const STORED: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

pub fn examples() -> Vec<Example> {
    let mut examples = Vec::new();
    for dtype in STORED {
        examples.push(embed(dtype, 1.0));
        examples.push(embed(dtype, 4.5));
        examples.push(norm(dtype, false));
        examples.push(norm(dtype, true));
    }
    examples.extend([
        norm_of_gathered_rows(),
        norm_of_each_head(false),
        norm_of_each_head(true),
        norm_over_many_rows(),
        norm_without_weight(33, 33),
        norm_without_weight(3 * 8, 8),
        norm_without_weight(3 * 64, 64),
        norm_without_weight_next_to_a_residual(),
        layer_norm(33, false),
        layer_norm(24, true),
        layer_norm_next_to_two_branches(),
        scaled_by_a_number(DType::F32),
        scaled_by_a_number(DType::Bf16),
        scaled_by_numbers(24, 6),
        scaled_by_numbers(15, 15),
        scaled_by_numbers(64, 4),
        scaled_sum(),
        sum_of_scaled_sums(),
        norm_next_to_a_residual(false),
        norm_next_to_a_residual(true),
        dropout(false),
        dropout(true),
        gated_act(Activation::Silu),
        gated_act(Activation::GeluTanh),
        gated_act(Activation::Gelu),
        gated_act(Activation::Sigmoid),
        gated_act(Activation::Identity),
        gated_act(CLAMPED),
        gated_act_of_itself(),
        gate_of_each_head(Activation::Sigmoid, 3, 11),
        gate_of_each_head(Activation::Sigmoid, 2, 64),
        gate_of_each_head(CLAMPED, 5, 8),
        add_and_double(),
        gather(),
        columns_of_each_layer(&[(0, 8), (8, 8), (16, 8)], 24),
        columns_of_each_layer(&[(3, 4), (11, 5)], 19),
        columns_of_each_layer(&[(0, 9), (4, 9), (9, 3)], 13),
        heads_with_shared_columns(3, 5, 2, 4, 9),
        heads_with_shared_columns(4, 16, 8, 16, 32),
        sum_of_heads(3, 7, 2, 3),
        sum_of_heads(8, 24, 8, 8),
        columns_of_each_head(3, 8, [(0, 4), (4, 4)]),
        columns_of_each_head(2, 11, [(1, 3), (5, 4)]),
    ]);
    examples
}

/// 23 tokens from 7 ids: every row of the table gets the gradients of several tokens.
fn embed(dtype: DType, scale: f32) -> Example {
    let mut draft = Draft::new(&[23], 1);
    let ids = draft.ids("ids", Dim::Tokens, 7);
    let table = draft.matrix("table", 7, 19, dtype);
    let y = draft.op(Op::Embed { scale, element: DType::F32, padding: None }, &[ids, table], &["y"])[0];
    gradient(&["embed", "embed_grad"], draft.gradient_of(&format!("embed {dtype} times {scale}"), y))
}

const NORM: &[&str] = &["rms_norm", "rms_norm_grad", "rms_norm_weight_grad"];

fn norm(dtype: DType, plus_one: bool) -> Example {
    let mut draft = Draft::new(&[5, 6], 1);
    let x = draft.tokens("x", 33);
    let weight = draft.vector("weight", 33, dtype);
    let y =
        draft.op(Op::RmsNorm { norm: Norm { eps: 1e-5, plus_one }, unweighted: None }, &[x, weight], &["y"])
            [0];
    gradient(NORM, draft.gradient_of(&format!("norm {dtype} plus_one={plus_one}"), y))
}

fn norm_of_gathered_rows() -> Example {
    let mut draft = Draft::new(&[17], 3);
    let x = draft.rows("x", 9);
    let weight = draft.vector("weight", 9, DType::F32);
    let y = draft.op(
        Op::RmsNorm { norm: Norm { eps: 1e-3, plus_one: false }, unweighted: None },
        &[x, weight],
        &["y"],
    )[0];
    gradient(NORM, draft.gradient_of("norm of gathered rows", y))
}

/// With a weight of the head size, each head is normalized separately.
fn norm_of_each_head(plus_one: bool) -> Example {
    let mut draft = Draft::new(&[7, 4], 1);
    let x = draft.tokens("x", 3 * 11);
    let weight = draft.vector("weight", 11, DType::Bf16);
    let y =
        draft.op(Op::RmsNorm { norm: Norm { eps: 1e-5, plus_one }, unweighted: None }, &[x, weight], &["y"])
            [0];
    gradient(NORM, draft.gradient_of(&format!("norm of each head plus_one={plus_one}"), y))
}

/// More rows than one group of partial sums.
fn norm_over_many_rows() -> Example {
    let mut draft = Draft::new(&[130], 1);
    let x = draft.tokens("x", 5);
    let weight = draft.vector("weight", 5, DType::F32);
    let y = draft.op(
        Op::RmsNorm { norm: Norm { eps: 1e-6, plus_one: false }, unweighted: None },
        &[x, weight],
        &["y"],
    )[0];
    gradient(NORM, draft.gradient_of("norm over many rows", y))
}

/// x + norm(x): the gradient of the residual is the addend of the norm's gradient.
fn norm_next_to_a_residual(plus_one: bool) -> Example {
    let mut draft = Draft::new(&[13], 1);
    let x = draft.tokens("x", 21);
    let weight = draft.vector("weight", 21, DType::F32);
    let n =
        draft.op(Op::RmsNorm { norm: Norm { eps: 1e-5, plus_one }, unweighted: None }, &[x, weight], &["n"])
            [0];
    let y = draft.op(Op::Add { scale: 1.0 }, &[x, n], &["y"])[0];
    let subject = draft.gradient_of(&format!("norm next to a residual plus_one={plus_one}"), y);
    let with_addend = |op: &Op| matches!(op, Op::RmsNormGrad { addend: true, .. });
    assert!(subject.graph.entries[0].1.iter().any(|node| with_addend(&node.op)));
    gradient(NORM, subject)
}

fn norm_without_weight(columns: usize, group: usize) -> Example {
    let mut draft = Draft::new(&[5, 6], 1);
    let x = draft.tokens("x", columns);
    let norm = Norm { eps: 1e-5, plus_one: false };
    let y = draft.op(Op::RmsNorm { norm, unweighted: Some(group) }, &[x], &["y"])[0];
    let name = format!("norm of {columns} channels in groups of {group} without weight");
    gradient(&["rms_norm", "rms_norm_grad"], draft.gradient_of(&name, y))
}

fn norm_without_weight_next_to_a_residual() -> Example {
    let mut draft = Draft::new(&[13], 1);
    let x = draft.tokens("x", 24);
    let norm = Norm { eps: 1e-5, plus_one: false };
    let n = draft.op(Op::RmsNorm { norm, unweighted: Some(24) }, &[x], &["n"])[0];
    let y = draft.op(Op::Add { scale: 1.0 }, &[x, n], &["y"])[0];
    let name = "norm without weight next to a residual";
    gradient(&["rms_norm", "rms_norm_grad"], draft.gradient_of(name, y))
}

const LAYER_NORM: &[&str] = &["layer_norm", "layer_norm_grad", "layer_norm_weight_grad"];

/// More rows than one group of partial sums.
fn layer_norm(columns: usize, bias: bool) -> Example {
    let mut draft = Draft::new(&[50, 20], 1);
    let x = draft.tokens("x", columns);
    let mut inputs = vec![x, draft.vector("weight", columns, DType::Bf16)];
    if bias {
        inputs.push(draft.vector("bias", columns, DType::F32));
    }
    let y = draft.op(Op::LayerNorm { eps: 1e-5, bias }, &inputs, &["y"])[0];
    let covers: &[&str] = if bias { &["layer_norm", "bias_grad"] } else { LAYER_NORM };
    gradient(covers, draft.gradient_of(&format!("layer norm of {columns} channels, bias={bias}"), y))
}

/// Cohere: attention and the feed-forward block read one norm, and the residual is the addend of its gradient.
fn layer_norm_next_to_two_branches() -> Example {
    let mut draft = Draft::new(&[13], 1);
    let x = draft.tokens("x", 40);
    let weight = draft.vector("weight", 40, DType::F32);
    let n = draft.op(Op::LayerNorm { eps: 1e-5, bias: false }, &[x, weight], &["n"])[0];
    let branch = draft.op(Op::Act(PlainActivation::Silu), &[n], &["branch"])[0];
    let first = draft.op(Op::Add { scale: 1.0 }, &[x, branch], &["first"])[0];
    let y = draft.op(Op::Add { scale: 1.0 }, &[first, n], &["y"])[0];
    gradient(LAYER_NORM, draft.gradient_of("layer norm next to two branches", y))
}

fn dropout(rest: bool) -> Example {
    let mut draft = Draft::new(&[4, 7], 1);
    let x = draft.tokens("x", 35);
    let keys = draft.keys("keys");
    let y = draft.op(Op::Dropout { p: 0.3, stream: 5, rest }, &[x, keys], &["y"])[0];
    gradient(&["dropout"], draft.gradient_of(&format!("dropout rest={rest}"), y))
}

fn gated_act(activation: Activation) -> Example {
    let mut draft = Draft::new(&[11], 1);
    let (gate, up) = (draft.tokens("gate", 37), draft.tokens("up", 37));
    let y = draft.op(Op::GatedAct(activation), &[gate, up], &["y"])[0];
    gradient(&["gated_act", "gated_act_grad"], draft.gradient_of(&format!("gated act {activation:?}"), y))
}

/// Most numbers are below 1 here, so some gates and some of up are clamped.
const CLAMPED: Activation = Activation::ClampedSwiglu { limit: 0.6, alpha: 1.702 };

fn gate_of_each_head(activation: Activation, heads: usize, head_dim: usize) -> Example {
    let mut draft = Draft::new(&[11], 1);
    let (gate, up) = (draft.tokens("gate", heads), draft.tokens("up", heads * head_dim));
    let y = draft.op(Op::GatedAct(activation), &[gate, up], &["y"])[0];
    let name = format!("{heads} gates {activation:?} of {head_dim} channels");
    gradient(&["gated_act", "gated_act_grad"], draft.gradient_of(&name, y))
}

/// act(x)·x: both gradients add to one value.
fn gated_act_of_itself() -> Example {
    let mut draft = Draft::new(&[9], 1);
    let x = draft.tokens("x", 17);
    let y = draft.op(Op::GatedAct(Activation::Silu), &[x, x], &["y"])[0];
    gradient(&["gated_act", "gated_act_grad"], draft.gradient_of("gated act of itself", y))
}

/// (a + b) + (a + b): a value that is read twice by one node.
fn add_and_double() -> Example {
    let mut draft = Draft::new(&[7], 1);
    let (a, b) = (draft.tokens("a", 13), draft.tokens("b", 13));
    let sum = draft.op(Op::Add { scale: 1.0 }, &[a, b], &["sum"])[0];
    let y = draft.op(Op::Add { scale: 1.0 }, &[sum, sum], &["y"])[0];
    gradient(&["add"], draft.gradient_of("add and double", y))
}

/// Granite: a block's output is scaled and added to the residual, whose gradient has no other part.
fn scaled_sum() -> Example {
    let mut draft = Draft::new(&[7], 1);
    let (a, b) = (draft.tokens("a", 13), draft.tokens("b", 13));
    let y = draft.op(Op::Add { scale: 0.22 }, &[a, b], &["y"])[0];
    gradient(&["add"], draft.gradient_of("scaled sum", y))
}

/// A value with contributions of three factors, one of which is 1.
fn sum_of_scaled_sums() -> Example {
    let mut draft = Draft::new(&[7], 1);
    let (a, b) = (draft.tokens("a", 16), draft.tokens("b", 16));
    let first = draft.op(Op::Add { scale: -0.5 }, &[a, b], &["first"])[0];
    let second = draft.op(Op::Add { scale: 3.0 }, &[first, b], &["second"])[0];
    let y = draft.op(Op::Add { scale: 1.0 }, &[second, b], &["y"])[0];
    gradient(&["add"], draft.gradient_of("sum of scaled sums", y))
}

fn scaled_by_a_number(dtype: DType) -> Example {
    let mut draft = Draft::new(&[70], 1);
    let x = draft.tokens("x", 24);
    let scale = draft.vector("scale", 1, dtype);
    let y = draft.op(Op::ScaleBy, &[x, scale], &["y"])[0];
    gradient(&["scale_by", "scale_by_grad"], draft.gradient_of(&format!("scaled by a number in {dtype}"), y))
}

/// A number for each of several groups of channels.
fn scaled_by_numbers(columns: usize, numbers: usize) -> Example {
    let mut draft = Draft::new(&[33, 37], 1);
    let x = draft.tokens("x", columns);
    let scale = draft.vector("scale", numbers, DType::F32);
    let y = draft.op(Op::ScaleBy, &[x, scale], &["y"])[0];
    let name = format!("{columns} channels scaled by {numbers} numbers");
    gradient(&["scale_by", "scale_by_grad"], draft.gradient_of(&name, y))
}

/// Layers take their columns of one matrix, which may overlap or leave some out; layer i doubles its sum so far.
fn columns_of_each_layer(parts: &[(usize, usize)], width: usize) -> Example {
    let mut draft = Draft::new(&[11], 1);
    let x = draft.tokens("x", width);
    let mut y = None;
    for &(first, columns) in parts {
        let slice = draft.op(Op::SliceColumns { first, columns, groups: 1 }, &[x], &["slice"])[0];
        let weight = draft.matrix(&format!("weight from {first}"), 7, columns, DType::F32);
        let own = draft.op(Op::Linear { bias: false, lora: None }, &[slice, weight], &["own"])[0];
        y = Some(match y {
            None => own,
            Some(y) => draft.op(Op::Add { scale: 2.0 }, &[own, y], &["y"])[0],
        });
    }
    let subject = draft.gradient_of(&format!("columns {parts:?} of {width}"), y.unwrap());
    gradient(&["slice_columns", "place_columns"], subject)
}

/// As keys and values of latent attention: heads of `own` and `shared` columns, filled up with zeros to `width`, and others of
/// the `value` columns behind the own ones.
fn heads_with_shared_columns(heads: usize, own: usize, shared: usize, value: usize, width: usize) -> Example {
    let mut draft = Draft::new(&[9], 1);
    let (x, all) = (draft.tokens("x", heads * (own + value)), draft.tokens("shared", shared + 1));
    let part = |heads, from, columns, to| HeadPart { heads, from, columns, to };
    let parts = vec![part(1, 1, shared, 0), part(heads, 0, own, shared)];
    let keys = draft.op(Op::PlaceHeads { heads, head_dim: width, parts }, &[all, x], &["keys"])[0];
    let parts = vec![part(heads, own, value, width - value)];
    let values = draft.op(Op::PlaceHeads { heads, head_dim: width, parts }, &[x], &["values"])[0];
    let y = draft.op(Op::Add { scale: 2.0 }, &[keys, values], &["y"])[0];
    gradient(&["place_heads"], draft.gradient_of(&format!("{heads} heads of {width} with shared columns"), y))
}

/// Columns of all heads of x, added up.
fn sum_of_heads(heads: usize, width: usize, from: usize, columns: usize) -> Example {
    let mut draft = Draft::new(&[9], 1);
    let x = draft.tokens("x", heads * width);
    let parts = vec![HeadPart { heads, from, columns, to: 8 }];
    let y = draft.op(Op::PlaceHeads { heads: 1, head_dim: 8 + columns, parts }, &[x], &["y"])[0];
    gradient(&["place_heads"], draft.gradient_of(&format!("the sum of {heads} heads of {width}"), y))
}

/// Both parts of each head, multiplied by each other.
fn columns_of_each_head(heads: usize, width: usize, parts: [(usize, usize); 2]) -> Example {
    let mut draft = Draft::new(&[5, 6], 1);
    let x = draft.tokens("x", heads * width);
    let [one, other] = parts.map(|(first, columns)| {
        let slice = draft.op(Op::SliceColumns { first, columns, groups: heads }, &[x], &["slice"])[0];
        let weight = draft.matrix(&format!("weight from {first}"), 7, heads * columns, DType::F32);
        draft.op(Op::Linear { bias: false, lora: None }, &[slice, weight], &["own"])[0]
    });
    let y = draft.op(Op::GatedAct(Activation::Identity), &[one, other], &["y"])[0];
    let subject = draft.gradient_of(&format!("columns {parts:?} of {heads} heads of {width}"), y);
    gradient(&["slice_columns", "place_columns"], subject)
}

/// Gathers every third token; the others get no gradient.
fn gather() -> Example {
    let mut draft = Draft::new(&[8, 9], 3);
    let x = draft.tokens("x", 11);
    let y = draft.op(Op::GatherRows, &[x, draft.supervised()], &["y"])[0];
    gradient(&["gather_rows", "scatter_rows"], draft.gradient_of("gather", y))
}
