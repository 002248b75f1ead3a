//! Examples of operations on rows: embedding, norm, dropout, gated activations, add, gather.
//!
//! Sizes are odd, so that no vector or block is full; weights are in every plain storage.

use crate::draft::Draft;
use crate::examples::{Example, gradient};
use smidgen_ir::{Activation, DType, Dim, Norm, Op};

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
        norm_next_to_a_residual(false),
        norm_next_to_a_residual(true),
        dropout(false),
        dropout(true),
        gated_act(Activation::Silu),
        gated_act(Activation::GeluTanh),
        gated_act_of_itself(),
        add_and_double(),
        gather(),
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
    let y = draft.op(Op::RmsNorm(Norm { eps: 1e-5, plus_one }), &[x, weight], &["y"])[0];
    gradient(NORM, draft.gradient_of(&format!("norm {dtype} plus_one={plus_one}"), y))
}

fn norm_of_gathered_rows() -> Example {
    let mut draft = Draft::new(&[17], 3);
    let x = draft.rows("x", 9);
    let weight = draft.vector("weight", 9, DType::F32);
    let y = draft.op(Op::RmsNorm(Norm { eps: 1e-3, plus_one: false }), &[x, weight], &["y"])[0];
    gradient(NORM, draft.gradient_of("norm of gathered rows", y))
}

/// With a weight of the head size, each head is normalized separately.
fn norm_of_each_head(plus_one: bool) -> Example {
    let mut draft = Draft::new(&[7, 4], 1);
    let x = draft.tokens("x", 3 * 11);
    let weight = draft.vector("weight", 11, DType::Bf16);
    let y = draft.op(Op::RmsNorm(Norm { eps: 1e-5, plus_one }), &[x, weight], &["y"])[0];
    gradient(NORM, draft.gradient_of(&format!("norm of each head plus_one={plus_one}"), y))
}

/// More rows than one group of partial sums.
fn norm_over_many_rows() -> Example {
    let mut draft = Draft::new(&[130], 1);
    let x = draft.tokens("x", 5);
    let weight = draft.vector("weight", 5, DType::F32);
    let y = draft.op(Op::RmsNorm(Norm { eps: 1e-6, plus_one: false }), &[x, weight], &["y"])[0];
    gradient(NORM, draft.gradient_of("norm over many rows", y))
}

/// x + norm(x): the gradient of the residual is the addend of the norm's gradient.
fn norm_next_to_a_residual(plus_one: bool) -> Example {
    let mut draft = Draft::new(&[13], 1);
    let x = draft.tokens("x", 21);
    let weight = draft.vector("weight", 21, DType::F32);
    let n = draft.op(Op::RmsNorm(Norm { eps: 1e-5, plus_one }), &[x, weight], &["n"])[0];
    let y = draft.op(Op::Add, &[x, n], &["y"])[0];
    let subject = draft.gradient_of(&format!("norm next to a residual plus_one={plus_one}"), y);
    let with_addend = |op: &Op| matches!(op, Op::RmsNormGrad { addend: true, .. });
    assert!(subject.graph.entries[0].1.iter().any(|node| with_addend(&node.op)));
    gradient(NORM, subject)
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
    let sum = draft.op(Op::Add, &[a, b], &["sum"])[0];
    let y = draft.op(Op::Add, &[sum, sum], &["y"])[0];
    gradient(&["add"], draft.gradient_of("add and double", y))
}

/// Gathers every third token; the others get no gradient.
fn gather() -> Example {
    let mut draft = Draft::new(&[8, 9], 3);
    let x = draft.tokens("x", 11);
    let y = draft.op(Op::GatherRows, &[x, draft.supervised()], &["y"])[0];
    gradient(&["gather_rows", "scatter_rows"], draft.gradient_of("gather", y))
}
