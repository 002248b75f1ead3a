//! Any thread count gives the same bytes, also at sizes that are cut into many tasks.
//!
//! The examples of single operations are so small that one task may be enough; here each operation with a
//! reduction has many. Only bytes are compared; the gradients are checked at the small sizes.

use crate::check::same_bytes_everywhere;
use crate::draft::Draft;
use smidgen_compile::passes::head_pieces;
use smidgen_ir::workspace_cpu::fourier_partials;
use smidgen_ir::{AttentionShape, DType, Dim, LossHead, Norm, Op};

#[test]
fn matmuls_and_norms() {
    let mut draft = Draft::new(&[301], 1);
    let x = draft.tokens("x", 700);
    let norm = draft.vector("norm", 700, DType::F32);
    let n = draft.op(
        Op::RmsNorm { norm: Norm { eps: 1e-5, plus_one: false }, unweighted: None },
        &[x, norm],
        &["n"],
    )[0];
    let (weight, bias) =
        (draft.matrix("weight", 801, 700, DType::Bf16), draft.vector("bias", 801, DType::F32));
    let a = draft.matrix("a", 16, 700, DType::F32);
    let h = draft.op(Op::Linear { bias: false, lora: None }, &[n, a], &["h"])[0];
    let b = draft.matrix("b", 801, 16, DType::F32);
    let y = draft.op(Op::Linear { bias: true, lora: Some(0.5) }, &[n, weight, bias, h, b], &["y"])[0];
    same_bytes_everywhere(&draft.gradient_of("matmuls and norms", y));
}

#[test]
fn attention_over_long_segments() {
    let mut draft = Draft::new(&[210, 1, 140], 1);
    let shape = AttentionShape {
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        scale: 0.125,
        window: None,
        softcap: None,
        sinks: false,
    };
    let (q_channels, kv_channels) = shape.channels();
    let (q, k, v) =
        (draft.tokens("q", q_channels), draft.tokens("k", kv_channels), draft.tokens("v", kv_channels));
    let o = draft.op(Op::Attention(shape), &[q, k, v, draft.boundaries()], &["o", "lse"])[0];
    same_bytes_everywhere(&draft.gradient_of("attention over long segments", o));
}

#[test]
fn embedding_and_loss_over_a_large_vocabulary() {
    let mut draft = Draft::new(&[260], 2);
    let ids = draft.ids("ids", Dim::Tokens, 50);
    let embedding = draft.matrix("embedding", 50, 65, DType::Bf16);
    let x =
        draft.op(Op::Embed { scale: 1.0, element: DType::F32, padding: None }, &[ids, embedding], &["x"])[0];
    let rows = draft.op(Op::GatherRows, &[x, draft.supervised()], &["rows"])[0];
    let table = draft.matrix("head", 3001, 65, DType::F16);
    let head = LossHead {
        chunk: 48,
        gradient: true,
        lora: None,
        train_head: true,
        softcap: None,
        row_losses: false,
    };
    draft.loss(head, rows, table, None);
    same_bytes_everywhere(&draft.gradient_of_loss("embedding and loss"));
}

#[test]
fn a_large_vocabulary_in_pieces() {
    let mut draft = Draft::new(&[260], 2);
    let (x, table) = (draft.rows("x", 65), draft.frozen_matrix("head", 3001, 65, DType::F16));
    let head = LossHead {
        chunk: 48,
        gradient: true,
        lora: None,
        train_head: false,
        softcap: Some(2.0),
        row_losses: false,
    };
    draft.loss(head, x, table, None);
    let mut subject = draft.gradient_of_loss("loss in pieces");
    head_pieces::cut_head(&mut subject.graph, 3);
    same_bytes_everywhere(&subject);
}

#[test]
fn gains_of_many_columns() {
    let mut draft = Draft::new(&[301], 1);
    let z = draft.tokens("z", 801);
    let norms: Vec<f32> = (0..801).map(|column| 0.5 + column as f32 / 801.0).collect();
    let (magnitude, norm) =
        (draft.vector("magnitude", 801, DType::F32), draft.frozen_vector_of("norm", &norms));
    let bias = draft.vector("bias", 801, DType::Bf16);
    let y = draft.op(Op::ScaleColumns { bias: true }, &[z, magnitude, norm, bias], &["y"])[0];
    same_bytes_everywhere(&draft.gradient_of("gains of many columns", y));
}

/// More rows than are computed at once, and many groups of partial sums.
#[test]
fn a_trained_function_of_many_rows() {
    let mut draft = Draft::new(&[301], 1);
    let (base, h) = (draft.tokens("base", 801), draft.tokens("h", 16));
    assert!(fourier_partials(301, 801) > 5 * 10);
    let b = draft.matrix("b", 801, 16, DType::F32);
    let coefficients = draft.matrix_of("coefficients", [1, 4], DType::F32, &[0.1, 1.0, 0.2, -0.3]);
    let sigma = draft.matrix_of("sigma", [1, 1], DType::F32, &[1.3]);
    let y = draft.op(Op::Fourier { scale: 0.3 }, &[base, h, b, coefficients, sigma], &["y"])[0];
    same_bytes_everywhere(&draft.gradient_of("a trained function of many rows", y));
}
