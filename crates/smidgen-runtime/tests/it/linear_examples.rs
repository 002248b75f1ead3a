//! Examples of matmuls: linears with and without bias and adapter, and several linears on one input.
//!
//! Sizes are odd, and some cross a block of depth or columns.

use crate::check::same_bytes_everywhere;
use crate::draft::Draft;
use crate::examples::{Example, Proof, gradient};
use crate::numbers::{Content, random_reals};
use crate::subject::{Scalar, Subject};
use smidgen_ir::workspace_cpu::{COLUMN_BLOCK, DEPTH_BLOCK};
use smidgen_ir::{
    AttentionShape, Block, Code4, DType, Dim, Entry, Extent, Graph, LeafKind, Op, Phase, Shape, Storage,
    Type, ValueId, quant,
};
use std::collections::BTreeSet;

const LINEAR: &[&str] = &["linear", "linear_grad", "weight_grad"];
const WITH_BIAS: &[&str] = &["linear", "linear_grad", "weight_grad", "bias_grad"];

/// One of each family.
const QUANTIZED: [Storage; 5] = [
    Storage::Int8Rows,
    Storage::Fp8Rows,
    Storage::Bnb4 { code: Code4::Nf4, double: true },
    Storage::Bnb4 { code: Code4::Fp4, double: false },
    Storage::Gguf(Block::Q8_0),
];

pub fn examples() -> Vec<Example> {
    let mut examples = Vec::new();
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for bias in [false, true] {
            for rank in [0, 3] {
                examples.push(linear(dtype, bias, rank, [11, 21, 33]));
            }
        }
    }
    examples.push(linear(DType::Bf16, true, 5, [5, 7, DEPTH_BLOCK + 9]));
    examples.push(linear(DType::F32, true, 5, [6, COLUMN_BLOCK + 13, 9]));
    examples.push(linear(DType::F16, false, 70, [1, 4, 3]));
    examples.push(linear(DType::F32, false, 4, [150, 10, 12]));
    for storage in QUANTIZED {
        examples.push(linear_with_quantized_weight(storage));
    }
    examples.push(Example { covers: &["round_fp8"], proof: Proof::Values(fp8_rounding_matches_weights) });
    examples.push(linear_over_gathered_rows());
    examples.extend([scaled_branch_of_a_residual(15, 3), scaled_branch_of_a_residual(64, 16)]);
    examples.extend([scaled_branch_with_a_bias(), three_on_one_input()]);
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        examples.push(gradient(WITH_BIAS, queries_keys_and_values(dtype, true)));
    }
    examples
}

/// Activations rounded to fp8 have the bytes of a weight stored as fp8, also with the scales of a weight's rows as
/// factors.
fn fp8_rounding_matches_weights() -> BTreeSet<&'static str> {
    let (tokens, n, k) = (150, 21, 5);
    let values = random_reals(7, tokens * n);
    let stored = quant::encode(Storage::Fp8Rows, 2 * n, k, &random_reals(8, 2 * n * k)).unwrap();
    let scale = |row: usize| {
        let at = 2 * n * k + 4 * row;
        f32::from_le_bytes(stored[at..at + 4].try_into().unwrap())
    };
    for scaled in [false, true] {
        let mut graph = Graph::default();
        let x = graph.add_leaf("x", Type::f32(Shape::of(Dim::Tokens, n)), LeafKind::Input);
        let whole = Type::new(Shape::matrix(2 * n, k), Storage::Fp8Rows);
        let weight = graph.add_leaf("weight", whole, LeafKind::Weight);
        let lower = graph.add_slice(weight, n, n);
        let inputs = if scaled { vec![x, lower] } else { vec![x] };
        let (mut nodes, place) = (Vec::new(), (Phase::Forward, None));
        let y = graph.emit(&mut nodes, Op::RoundFp8 { scaled }, inputs, vec![], &["y".into()], place)[0];
        graph.entries = vec![(Entry::MicroStep, vec![]), (Entry::Eval, nodes)];
        let extent = Extent { tokens, rows: 1, segments: 1, audio: 0 };
        let contents = vec![(x, Content::Reals(values.clone())), (weight, Content::Bytes(stored.clone()))];
        let scalar = Scalar::Dot { y, dy: vec![] };
        let subject = Subject { name: format!("round_fp8 {scaled}"), graph, extent, contents, scalar };
        subject.run_on_null(subject.roomy_plan(1)).unwrap();
        let got = same_bytes_everywhere(&subject).result;
        let times = |index: usize| if scaled { scale(n + index % n) } else { 1.0 };
        let numbers: Vec<f32> =
            values.iter().enumerate().map(|(index, value)| value * times(index)).collect();
        assert_eq!(got, quant::encode(Storage::Fp8Rows, tokens, n, &numbers).unwrap(), "{scaled}");
    }
    BTreeSet::from(["round_fp8"])
}

/// y (T, N) of x (T, K); rank 0 is no adapter.
fn linear(dtype: DType, bias: bool, rank: usize, [tokens, n, k]: [usize; 3]) -> Example {
    let mut draft = Draft::new(&[tokens], 1);
    let x = draft.tokens("x", k);
    let mut inputs = vec![x, draft.matrix("weight", n, k, dtype)];
    if bias {
        inputs.push(draft.vector("bias", n, dtype));
    }
    let lora = (rank > 0).then_some(1.5);
    if rank > 0 {
        inputs.push(draft.tokens("h", rank));
        inputs.push(draft.matrix("b", n, rank, DType::F32));
    }
    let y = draft.op(Op::Linear { bias, lora }, &inputs, &["y"])[0];
    let name = format!("linear {dtype} bias={bias} rank={rank} T={tokens} N={n} K={k}");
    gradient(if bias { WITH_BIAS } else { LINEAR }, draft.gradient_of(&name, y))
}

/// A frozen weight, an adapter and a bias: the gradient of x comes from weight and adapter.
fn linear_with_quantized_weight(storage: Storage) -> Example {
    let (n, k) = (37, 96);
    let mut draft = Draft::new(&[9], 1);
    let x = draft.tokens("x", k);
    let weight = draft.quantized_matrix("weight", n, k, storage);
    let (bias, h) = (draft.vector("bias", n, DType::F32), draft.tokens("h", 3));
    let b = draft.matrix("b", n, 3, DType::F32);
    let y = draft.op(Op::Linear { bias: true, lora: Some(1.5) }, &[x, weight, bias, h, b], &["y"])[0];
    gradient(WITH_BIAS, draft.gradient_of(&format!("linear {storage}"), y))
}

fn linear_over_gathered_rows() -> Example {
    let mut draft = Draft::new(&[19], 2);
    let x = draft.rows("x", 13);
    let weight = draft.matrix("weight", 17, 13, DType::Bf16);
    let y = draft.op(Op::Linear { bias: false, lora: None }, &[x, weight], &["y"])[0];
    gradient(LINEAR, draft.gradient_of("linear over gathered rows", y))
}

/// x + 0.22·(x·Wᵀ + h·Bᵀ): the factor is part of every matmul of the gradient, and no activation is scaled.
fn scaled_branch_of_a_residual(width: usize, rank: usize) -> Example {
    let mut draft = Draft::new(&[10, 3], 1);
    let x = draft.tokens("x", width);
    let weight = draft.matrix("weight", width, width, DType::Bf16);
    let [a, b] =
        [("a", rank, width), ("b", width, rank)].map(|(name, n, k)| draft.matrix(name, n, k, DType::F32));
    let h = draft.op(Op::Linear { bias: false, lora: None }, &[x, a], &["h"])[0];
    let branch = draft.op(Op::Linear { bias: false, lora: Some(2.0) }, &[x, weight, h, b], &["branch"])[0];
    let y = draft.op(Op::Add { scale: 0.22 }, &[x, branch], &["y"])[0];
    let subject = draft.gradient_of(&format!("a scaled branch of a residual of {width}"), y);
    assert!(!subject.graph.entries[0].1.iter().any(|node| matches!(node.op, Op::Scale { .. })));
    gradient(&["linear_grad", "weight_grad", "add"], subject)
}

/// As before, with a trained bias, whose gradient needs the scaled rows.
fn scaled_branch_with_a_bias() -> Example {
    let mut draft = Draft::new(&[10], 1);
    let x = draft.tokens("x", 16);
    let (weight, bias) = (draft.matrix("weight", 16, 16, DType::F32), draft.vector("bias", 16, DType::F32));
    let branch = draft.op(Op::Linear { bias: true, lora: None }, &[x, weight, bias], &["branch"])[0];
    let y = draft.op(Op::Add { scale: 0.22 }, &[x, branch], &["y"])[0];
    gradient(WITH_BIAS, draft.gradient_of("a scaled branch with a bias", y))
}

/// q, k and v of one x, each with its adapter: the gradient of x is one matmul of six terms.
fn three_on_one_input() -> Example {
    let mut draft = Draft::new(&[10], 1);
    let x = draft.tokens("x", 15);
    let mut sum = None;
    for name in ["q", "k", "v"] {
        let a = draft.matrix(&format!("{name} a"), 3, 15, DType::F32);
        let h = draft.op(Op::Linear { bias: false, lora: None }, &[x, a], &["h"])[0];
        let weight = draft.matrix(&format!("{name} weight"), 9, 15, DType::Bf16);
        let b = draft.matrix(&format!("{name} b"), 9, 3, DType::F32);
        let y = draft.op(Op::Linear { bias: false, lora: Some(0.5) }, &[x, weight, h, b], &[name])[0];
        sum = Some(match sum {
            None => y,
            Some(sum) => draft.op(Op::Add { scale: 1.0 }, &[sum, y], &["sum"])[0],
        });
    }
    let subject = draft.gradient_of("three linears on one input", sum.unwrap());
    let terms = subject.graph.entries[0].1.iter().filter_map(|node| match &node.op {
        Op::LinearGrad { scales } => Some(scales.len()),
        _ => None,
    });
    assert_eq!(terms.max(), Some(6));
    gradient(&["linear_grad"], subject)
}

const ATTENTION: AttentionShape = AttentionShape {
    heads: 3,
    kv_heads: 1,
    head_dim: 8,
    scale: 0.35,
    window: None,
    softcap: None,
    sinks: false,
};
const INNER: usize = 15;
const RANK: usize = 3;
/// Rows of q, k and v.
const PARTS: [(&str, usize, usize); 3] = [("q", 0, 24), ("k", 24, 8), ("v", 32, 8)];
const ALL_ROWS: usize = 40;

/// Attention over q, k and v of one x, as three parts of one linear or as three linears with the same numbers.
fn queries_keys_and_values(dtype: DType, fused: bool) -> Subject {
    let mut draft = Draft::new(&[4, 6], 1);
    let (x, h) = (draft.tokens("x", INNER), draft.tokens("h", RANK));
    let values = |seed: u64, columns: usize| random_reals(seed, ALL_ROWS * columns);
    let (weight, b, bias) = (values(71, INNER), values(72, RANK), values(73, 1));
    let whole = |draft: &mut Draft, first: usize, rows: usize, prefix: &str| -> [ValueId; 3] {
        let part = |values: &[f32], columns: usize| values[first * columns..][..rows * columns].to_vec();
        [
            draft.matrix_of(&format!("{prefix}weight"), [rows, INNER], dtype, &part(&weight, INNER)),
            draft.vector_of(&format!("{prefix}bias"), dtype, &part(&bias, 1)),
            draft.matrix_of(&format!("{prefix}b"), [rows, RANK], DType::F32, &part(&b, RANK)),
        ]
    };
    let operands: Vec<[ValueId; 3]> = if fused {
        let leaves = whole(&mut draft, 0, ALL_ROWS, "");
        PARTS.iter().map(|(_, first, rows)| leaves.map(|leaf| draft.rows_of(leaf, *first, *rows))).collect()
    } else {
        let mut leaves = |(name, first, rows): &(&str, usize, usize)| {
            whole(&mut draft, *first, *rows, &format!("{name} "))
        };
        PARTS.iter().map(&mut leaves).collect()
    };
    let mut outputs = Vec::new();
    for ([weight, bias, b], (name, ..)) in operands.into_iter().zip(PARTS) {
        let op = Op::Linear { bias: true, lora: Some(0.5) };
        outputs.push(draft.op(op, &[x, weight, bias, h, b], &[name])[0]);
    }
    outputs.push(draft.boundaries());
    let o = draft.op(Op::Attention(ATTENTION), &outputs, &["o", "lse"])[0];
    draft.gradient_of(&format!("parts of one linear, {dtype}"), o)
}

/// Rows of one leaf give the same bits as separate leaves, and so do their gradients.
#[test]
fn parts_of_one_linear_are_three_linears() {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let [fused, separate] = [true, false].map(|fused| queries_keys_and_values(dtype, fused));
        let [fused, separate] = [fused, separate].map(|subject| same_bytes_everywhere(&subject));
        assert!(fused.result == separate.result, "{dtype}: other results");
        for name in ["x source", "h source"] {
            assert!(fused.gradients[name] == separate.gradients[name], "{dtype}: other gradient of `{name}`");
        }
        for name in ["weight", "bias", "b"] {
            let parts: Vec<u8> = PARTS
                .iter()
                .flat_map(|(part, ..)| separate.gradients[&format!("{part} {name}")].clone())
                .collect();
            assert!(fused.gradients[name] == parts, "{dtype}: other gradient of `{name}`");
        }
    }
}
