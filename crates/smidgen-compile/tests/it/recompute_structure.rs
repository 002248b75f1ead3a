//! What recompute runs again: no matmul or attention outside the recomputed layers, and only what backward reads.
//!
//! Counted on compiled plans. The runtime's tests check that recompute changes no result.

use crate::shapes;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::{AdapterForm, Request, compile};
use smidgen_ir::{Entry, LayerSet, Op, Phase, Plan, Policy, Property, Step};
use std::collections::BTreeSet;

const LAYERS: usize = 5;

fn request(dropout: f32) -> Request {
    let spec = shapes::llama(32, 48, LAYERS, (4, 2), 64, false);
    Request { dropout, ..shapes::request(spec, Targets::AllLinear, Layers::All, 24, 2) }
}

fn plan(request: &Request, recompute: LayerSet) -> Plan {
    compile(request, &Policy::resident(recompute, 8))
}

fn again(plan: &Plan) -> Vec<&Step> {
    plan.entry(Entry::MicroStep).steps.iter().filter(|step| step.phase == Phase::Recompute).collect()
}

fn is_expensive(op: &Op) -> bool {
    matches!(op, Op::Linear { .. } | Op::Attention(_))
}

/// Layers in which a matmul or attention runs twice.
fn layers_run_again(plan: &Plan) -> BTreeSet<usize> {
    again(plan).iter().filter(|step| is_expensive(&step.op)).filter_map(|step| step.layer).collect()
}

/// Every model type with every form of adapter, with and without dropout.
fn every_kind_of_request() -> Vec<Request> {
    let mut requests = Vec::new();
    let others = [shapes::small_phi3(LAYERS), shapes::small_gemma2(LAYERS), shapes::small_gemma3(LAYERS)];
    for spec in others.into_iter().chain([request(0.0).spec]) {
        for form in [AdapterForm::Lora, AdapterForm::Dora, AdapterForm::Fourier { reg: 0.1 }] {
            for dropout in [0.0, 0.1] {
                let request = shapes::request(spec.clone(), Targets::AllLinear, Layers::All, 24, 2);
                requests.push(Request { form, dropout, ..request });
            }
        }
    }
    requests
}

#[test]
fn without_recompute_no_matmul_and_no_attention_runs_twice() {
    for request in every_kind_of_request() {
        let plan = plan(&request, LayerSet::none());
        let steps = again(&plan);
        assert!(!steps.is_empty(), "norms and activations are recomputed");
        for step in steps {
            let (model, form) = (&request.spec.model_type, request.form);
            assert!(step.op.has(Property::Cheap), "{model} {form:?}: `{}` runs twice", step.op.name());
        }
    }
}

#[test]
fn only_the_layers_asked_for_run_again() {
    let request = request(0.0);
    let lists = [
        LayerSet::first(LAYERS),
        LayerSet::first(2),
        LayerSet::every(2, LAYERS),
        LayerSet::from_iter([1, 4]),
    ];
    for recompute in lists {
        let expected: BTreeSet<usize> = recompute.iter().collect();
        assert_eq!(layers_run_again(&plan(&request, recompute)), expected);
    }
    assert!(LayerSet::every(2, LAYERS).iter().eq([0, 2, 4]));
}

#[test]
fn the_last_matmul_of_a_layer_never_runs_again() {
    for dropout in [0.0, 0.1] {
        let plan = plan(&request(dropout), LayerSet::first(LAYERS));
        let names: Vec<&str> = again(&plan)
            .iter()
            .flat_map(|step| &step.outputs)
            .map(|id| plan.value(*id).name.as_str())
            .collect();
        for layer in 0..LAYERS {
            let has = |name: &str| names.contains(&format!("layers.{layer}.{name} again").as_str());
            assert!(has("attn.q") && has("attn.o") && has("attn.out") && has("mlp.gate") && has("mlp.up"));
            assert!(!has("mlp.out") && !has("x"), "backward does not read the end of layer {layer}");
        }
    }
}

/// Dropped-out inputs are recomputed from values that are kept anyway, so dropout needs the working set of one layer and
/// not seven more activations of every layer.
#[test]
fn dropout_keeps_no_inputs_of_its_own() {
    let spec = shapes::llama_1b();
    let request = shapes::request(spec, Targets::AllLinear, Layers::All, 2048, 1);
    let with_dropout = Request { dropout: 0.1, ..request.clone() };
    let live = |request| plan(request, LayerSet::none()).peak().transient_live_bytes;
    let (without, with) = (live(&request), live(&with_dropout));
    let activation_bytes = 4 * 2048 * request.spec.hidden;
    assert!(with <= without + 8 * activation_bytes, "{with} bytes with dropout, {without} without");
}

/// Each dropped value is recomputed once, not once for each reader.
#[test]
fn nothing_runs_three_times() {
    for request in every_kind_of_request() {
        let plan = plan(&request, LayerSet::first(LAYERS));
        let mut seen = BTreeSet::new();
        for step in again(&plan) {
            for output in &step.outputs {
                let name = &plan.value(*output).name;
                assert!(seen.insert(name.clone()), "`{name}` is recomputed twice");
            }
        }
    }
}

/// The last layer is left out: backward starts there while the inputs of all other layers are kept, so recomputing it can
/// need more memory than keeping its activations.
#[test]
fn recomputing_more_layers_takes_less_memory_and_more_work() {
    let spec = shapes::llama(64, 128, LAYERS, (4, 2), 128, false);
    let request = shapes::request(spec, Targets::AllLinear, Layers::All, 4096, 4);
    let measured: Vec<(usize, f64)> = (0..LAYERS)
        .map(|count| {
            let plan = plan(&request, LayerSet::first(count));
            let flops = plan.entry(Entry::MicroStep).steps.iter().map(|step| step.cost.flops).sum();
            (plan.reserved_bytes(), flops)
        })
        .collect();
    for pair in measured.windows(2) {
        assert!(pair[1].0 < pair[0].0, "more layers, not fewer bytes: {measured:?}");
        assert!(pair[1].1 > pair[0].1, "more layers, not more work: {measured:?}");
    }
}
