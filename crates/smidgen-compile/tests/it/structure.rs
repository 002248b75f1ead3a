//! What autodiff builds and what it leaves out, counted on compiled plans.
//!
//! It builds nothing below the lowest adapted layer, no gradient of a frozen weight, and no logits of rows without a label.

use crate::shapes;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::{Request, compile};
use smidgen_ir::{Dim, Entry, LayerSet, LeafKind, Op, Phase, Plan, Policy, Step, ValueRole};

fn plan(request: &Request) -> Plan {
    compile(request, &Policy::resident(LayerSet::none(), 8))
}

fn four_layers(targets: Targets, layers: Layers) -> Request {
    shapes::request(shapes::llama(32, 48, 4, (4, 2), 64, false), targets, layers, 24, 2)
}

fn micro_step(plan: &Plan, keep: impl Fn(&Step) -> bool) -> Vec<&Step> {
    plan.entry(Entry::MicroStep).steps.iter().filter(|step| keep(step)).collect()
}

fn only(names: &[&str]) -> Targets {
    Targets::Names(names.iter().map(|name| name.to_string()).collect())
}

#[test]
fn nothing_is_built_below_the_lowest_adapted_layer() {
    let plan = plan(&four_layers(Targets::AllLinear, Layers::Last(1)));
    let backward = micro_step(&plan, |step| step.phase == Phase::Backward);
    assert!(backward.iter().any(|step| step.layer == Some(3)));
    assert!(backward.iter().all(|step| step.layer.is_none_or(|layer| layer == 3)), "backward below layer 3");
    let again = micro_step(&plan, |step| step.phase == Phase::Recompute);
    assert!(again.iter().all(|step| step.layer == Some(3)), "recompute below layer 3");
    // The input of the lowest layer needs no gradient: its first norm is not differentiated.
    let norms =
        backward.iter().filter(|step| matches!(step.op, Op::RmsNormGrad { .. }) && step.layer.is_some());
    assert_eq!(norms.count(), 1, "only the norm before the feed-forward block");
}

#[test]
fn backward_grows_by_the_same_steps_with_every_adapted_layer() {
    let steps = |last| {
        let plan = plan(&four_layers(Targets::AllLinear, Layers::Last(last)));
        micro_step(&plan, |step| step.phase == Phase::Backward).len()
    };
    let counts: Vec<usize> = (1..=4).map(steps).collect();
    let growth: Vec<usize> = counts.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(growth[0] > 0 && growth.iter().all(|step| *step == growth[0]), "{counts:?}");
}

#[test]
fn only_adapters_get_weight_gradients() {
    let request = four_layers(Targets::AllLinear, Layers::All);
    let plan = plan(&request);
    let weight_gradients = micro_step(&plan, |step| matches!(step.op, Op::WeightGrad { .. }));
    assert_eq!(weight_gradients.len(), 2 * request.adapters.len());
    for step in &weight_gradients {
        let name = &plan.value(step.updates[0]).name;
        assert!(name.starts_with("grad ") && name.contains(".lora_"), "{name}");
    }
    let others = |op: &Op| matches!(op, Op::EmbedGrad { .. } | Op::BiasGrad | Op::RmsNormWeightGrad { .. });
    assert!(micro_step(&plan, |step| others(&step.op)).is_empty());
    assert_eq!(plan.leaves(LeafKind::Gradient).count(), 2 * request.adapters.len());
    assert_eq!(plan.leaves(LeafKind::Moment).count(), 4 * request.adapters.len());
}

#[test]
fn the_head_gets_only_supervised_rows() {
    let request = four_layers(Targets::AllLinear, Layers::All);
    let plan = plan(&request);
    let vocabulary = request.spec.vocabulary;
    for entry in [Entry::MicroStep, Entry::Eval] {
        let steps = &plan.entry(entry).steps;
        let gather = steps.iter().position(|step| step.op == Op::GatherRows).expect("rows are gathered");
        let names: Vec<&str> = steps[gather..gather + 3].iter().map(|step| step.op.name()).collect();
        assert_eq!(names, ["gather_rows", "rms_norm", "lm_head_loss"]);
        let x = plan.value(steps[gather + 2].inputs[0]);
        assert_eq!(x.ty.shape.0[..], [Dim::Rows, Dim::Const(request.spec.hidden)]);
    }
    let logits = plan.values.iter().filter(|value| value.role == ValueRole::Temp);
    let widths = logits.map(|value| value.ty.shape.at(&plan.extent).1);
    assert!(widths.max().is_some_and(|most| most < vocabulary), "logits of all rows exist");
}

#[test]
fn fewer_targets_keep_fewer_activations() {
    let transient = |targets| {
        let spec = shapes::llama(256, 512, 6, (8, 4), 512, false);
        let request = shapes::request(spec, targets, Layers::All, 2048, 2);
        plan(&request).peak().transient_live_bytes
    };
    let (all, two) = (transient(Targets::AllLinear), transient(only(&["q_proj", "v_proj"])));
    assert!(two < all, "{two} bytes for q and v, {all} for all");
    // Only an adapter reads its h. The inputs of o, gate, up and down are recomputed or read anyway, so at least one
    // rank-16 h per linear of each layer is saved.
    let h_bytes = 4 * 2048 * 16;
    assert!(all - two >= 5 * 5 * h_bytes, "saved {} bytes", all - two);
}

/// With adapters on q and v alone, only their A and B get weight gradients.
#[test]
fn adapters_on_two_linears_make_no_other_weight_gradients() {
    let request = four_layers(only(&["q_proj", "v_proj"]), Layers::All);
    let plan = plan(&request);
    assert_eq!(micro_step(&plan, |step| matches!(step.op, Op::WeightGrad { .. })).len(), 2 * 2 * 4);
    let lowest = micro_step(&plan, |step| step.phase == Phase::Backward && step.layer == Some(0));
    // k of the lowest layer depends on nothing trained, so no matmul propagates its gradient.
    let matmuls = lowest.iter().filter(|step| matches!(step.op, Op::LinearGrad { .. }));
    for step in matmuls {
        let reads_k = step.inputs.iter().any(|id| plan.value(*id).name.contains("k_proj"));
        assert!(!reads_k, "a gradient through k_proj of the lowest layer");
    }
}
