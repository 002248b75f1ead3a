//! Examples of routed experts: every router, tokens that leave experts without rows, and one expert with all of them.
//!
//! Logits are far enough apart that no step of a finite difference changes a choice.

use crate::draft::Draft;
use crate::examples::{Example, gradient};
use smidgen_ir::{
    Activation, Code4, DType, ExpertRows, Op, Router, RouterGroups, RouterScores, Storage, ValueId,
};

const ROUTING: &[&str] = &["route", "route_grad", "dispatch", "spread_rows", "combine_rows", "row_dots"];
const MATMULS: &[&str] = &["grouped_linear", "grouped_linear_grad"];
const TRAINED: &[&str] = &["grouped_linear", "grouped_weight_grad", "grouped_bias_grad"];

const SOFTMAX: Router = Router {
    experts: 5,
    chosen: 2,
    scores: RouterScores::Softmax,
    is_corrected: false,
    groups: None,
    renormalizes: false,
    added_to_sum: 0.0,
    scale: 1.0,
    has_expert_scales: false,
};

pub fn examples() -> Vec<Example> {
    let renormalized = Router { renormalizes: true, ..SOFTMAX };
    let sigmoid = Router { scores: RouterScores::Sigmoid, scale: 1.5, ..SOFTMAX };
    let grouped = Router {
        experts: 6,
        is_corrected: true,
        groups: Some(RouterGroups { count: 3, chosen: 2, best: 2 }),
        renormalizes: true,
        added_to_sum: 0.25,
        ..sigmoid
    };
    vec![
        routed(SOFTMAX, false),
        routed(renormalized, false),
        routed(sigmoid, true),
        routed(grouped, false),
        routed(Router { has_expert_scales: true, ..renormalized }, false),
        routed(Router { chosen: 5, ..renormalized }, false),
        routed(Router { experts: 1, chosen: 1, ..sigmoid }, true),
        experts(Storage::F32, true, &[0, 1, 2, 3]),
        experts(Storage::F32, false, &[2]),
        experts(Storage::Plain(DType::Bf16), true, &[0, 3]),
        experts(Storage::Bnb4 { code: Code4::Nf4, double: true }, false, &[1, 2]),
        experts(Storage::Int8Rows, true, &[0, 1, 3]),
    ]
}

/// Logits of experts far from each other: a trained matrix whose column e is about 4e times a number of the token.
fn logits(draft: &mut Draft, router: &Router) -> ValueId {
    let tokens = draft.extent().tokens;
    let number = |token: usize, expert: usize| {
        let turned = (expert + token) % router.experts;
        0.7 * turned as f32 + 0.05 * ((3 * token + expert) % 4) as f32 - 1.0
    };
    let values: Vec<f32> =
        (0..tokens).flat_map(|token| (0..router.experts).map(move |expert| number(token, expert))).collect();
    draft.tokens_of("logits", router.experts, &values)
}

/// Rows of tokens go to their experts and come back: Σ over the chosen experts of weight · row.
fn routed(router: Router, weighs_inputs: bool) -> Example {
    let mut draft = Draft::new(&[7], 1);
    let logits = logits(&mut draft, &router);
    let mut inputs = vec![logits];
    if router.is_corrected {
        let numbers: Vec<f32> = (0..router.experts).map(|expert| 0.01 * expert as f32).collect();
        inputs.push(draft.frozen_vector_of("correction", &numbers));
    }
    if router.has_expert_scales {
        inputs.push(draft.vector("scales", router.experts, DType::F32));
    }
    let routed = draft.op(Op::Route(router), &inputs, &["weights", "choices"]);
    let [weights, choices] = routed[..] else { unreachable!("a route has two outputs") };
    let dispatch = Op::Dispatch { experts: router.experts };
    let dispatched = draft.op(dispatch, &[choices], &["places", "experts"]);
    let [places, of_rows] = dispatched[..] else { unreachable!("a dispatch has two outputs") };
    let x = draft.tokens("x", 9);
    let weighted = |is_weighted: bool| is_weighted.then_some(weights);
    let spread: Vec<ValueId> = [x, places].into_iter().chain(weighted(weighs_inputs)).collect();
    let rows = draft.op(Op::SpreadRows { weighted: weighs_inputs }, &spread, &["rows"])[0];
    // Weights that add up to 1 have no gradient if all experts compute the same.
    let matrices = draft.matrix("matrices", router.experts * 6, 9, DType::F32);
    let part = ExpertRows { experts: router.experts, first: 0, rows: 6 };
    let op = Op::GroupedLinear { part, bias: false, lora: None };
    let rows = draft.op(op, &[rows, matrices, of_rows], &["of experts"])[0];
    let combine: Vec<ValueId> = [rows, places].into_iter().chain(weighted(!weighs_inputs)).collect();
    let y = draft.op(Op::CombineRows { weighted: !weighs_inputs }, &combine, &["y"])[0];
    gradient(ROUTING, draft.gradient_of(&format!("routed by {router}, inputs {weighs_inputs}"), y))
}

/// Two parts of the matrices of four experts, of which only `used` have rows, with biases and an adapter if trained.
fn experts(storage: Storage, adapted: bool, used: &[usize]) -> Example {
    let (experts, each, k) = (4, 11, 64);
    let mut draft = Draft::new(&[13], 1);
    let tokens = draft.extent().tokens;
    let chosen: Vec<i32> = (0..tokens).map(|token| used[token % used.len()] as i32).collect();
    let choices = draft.choices("choices", 1, chosen);
    let dispatched = draft.op(Op::Dispatch { experts }, &[choices], &["places", "experts"]);
    let [places, of_rows] = dispatched[..] else { unreachable!("a dispatch has two outputs") };
    let x = draft.tokens("x", k);
    let rows = draft.op(Op::SpreadRows { weighted: false }, &[x, places], &["rows"])[0];
    let weight = match storage.plain() {
        Some(dtype) => draft.matrix("weight", experts * each, k, dtype),
        None => draft.quantized_matrix("weight", experts * each, k, storage),
    };
    let mut inputs = vec![rows, weight, of_rows];
    if adapted {
        inputs.push(draft.vector("bias", experts * each, DType::F32));
        let a = draft.matrix("a", experts * 3, k, DType::F32);
        let part = ExpertRows { experts, first: 0, rows: 3 };
        let h = draft.op(Op::GroupedLinear { part, bias: false, lora: None }, &[rows, a, of_rows], &["h"])[0];
        inputs.extend([h, draft.matrix("b", experts * each, 3, DType::F32)]);
    }
    let lora = adapted.then_some(1.5);
    let mut parts = [(0, 4, "upper"), (4, 7, "lower")].map(|(first, rows, name)| {
        let part = ExpertRows { experts, first, rows };
        draft.op(Op::GroupedLinear { part, bias: adapted, lora }, &inputs, &[name])[0]
    });
    parts[0] = draft.op(Op::SliceColumns { first: 1, columns: 1, groups: 1 }, &[parts[0]], &["gate"])[0];
    let product = draft.op(Op::GatedAct(Activation::Silu), &parts, &["product"])[0];
    let y = draft.op(Op::CombineRows { weighted: false }, &[product, places], &["y"])[0];
    let name = format!("experts {used:?} in {storage}, adapted {adapted}");
    let covers = if adapted && storage == Storage::F32 { TRAINED } else { MATMULS };
    gradient(covers, draft.gradient_of(&name, y))
}
