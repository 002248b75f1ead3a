//! Parts of fused linears, and the steps that DoRA, LS-LoRA and trained biases add, counted on compiled plans.
//!
//! Plain LoRA is tested in `structure`; what the steps compute is tested in the runtime.

use crate::shapes;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::request::Moments;
use smidgen_compile::{AdapterForm, DecoderSpec, Request, TrainedBiases, compile};
use smidgen_ir::{Entry, LayerSet, LeafKind, Op, Phase, Plan, Policy, Step, Storage, ValueId, ValueRole};

const LAYERS: usize = 4;
const REG: f64 = 0.5;

fn request(spec: DecoderSpec, form: AdapterForm) -> Request {
    Request { form, ..shapes::request(spec, Targets::AllLinear, Layers::All, 24, 2) }
}

fn plan(request: &Request) -> Plan {
    compile(request, &Policy::resident(LayerSet::none(), 8))
}

fn steps_of(plan: &Plan, entry: Entry, keep: impl Fn(&Step) -> bool) -> Vec<&Step> {
    plan.entry(entry).steps.iter().filter(|step| keep(step)).collect()
}

fn count(plan: &Plan, entry: Entry, name: &str) -> usize {
    steps_of(plan, entry, |step| step.op.name() == name).len()
}

fn with_biases(spec: DecoderSpec) -> DecoderSpec {
    spec.with_biases(true)
}

/// No activation is as wide as q, k and v together, or gate and up, so none has to be split.
#[test]
fn a_fused_linear_is_never_computed_as_a_whole() {
    let spec = shapes::small_phi3(LAYERS);
    let linears = spec.linears();
    let rows_of = |module: &str| linears.iter().find(|linear| linear.path.ends_with(module)).unwrap().n;
    let wholes = ["qkv_proj", "gate_up_proj"].map(rows_of);
    for form in [AdapterForm::Lora, AdapterForm::Dora, AdapterForm::Fourier { reg: REG }] {
        let plan = plan(&request(spec.clone(), form));
        for value in plan.values.iter().filter(|value| value.role == ValueRole::Temp) {
            let columns = value.ty.shape.at(&plan.extent).1;
            assert!(!wholes.contains(&columns), "`{}` has {columns} columns", value.name);
        }
        assert!(Op::NAMES.iter().all(|name| !name.contains("split") && !name.contains("concat")));
    }
}

/// Every part reads the same h, and one matmul sums its gradients.
#[test]
fn a_fused_linear_has_one_h() {
    let request = request(shapes::small_phi3(LAYERS), AdapterForm::Lora);
    let plan = plan(&request);
    assert_eq!(request.adapters.len(), 4 * LAYERS);
    let forward = |step: &Step| step.phase == Phase::Forward;
    let reads_a = |step: &Step| step.inputs.iter().any(|id| plan.value(*id).name.ends_with(".lora_A.weight"));
    let matmuls = steps_of(&plan, Entry::MicroStep, |step| forward(step) && reads_a(step));
    assert_eq!(matmuls.len(), request.adapters.len());
    for (module, readers) in [("self_attn.qkv_proj", 3), ("mlp.gate_up_proj", 2)] {
        for layer in 0..LAYERS {
            let a = plan.leaf_named(&format!("model.layers.{layer}.{module}.lora_A.weight")).unwrap();
            let h = matmuls.iter().find(|step| step.inputs[1] == a).unwrap().outputs[0];
            let read = steps_of(&plan, Entry::MicroStep, |step| forward(step) && step.inputs.contains(&h));
            assert_eq!(read.len(), readers, "readers of the h of {module}");
            let d_h = format!("d {}", plan.value(h).name);
            let back: Vec<&Step> = steps_of(&plan, Entry::MicroStep, |step| {
                step.outputs.iter().any(|id| plan.value(*id).name == d_h)
            });
            let terms: Vec<usize> = back.iter().map(|step| step.inputs.len() / 2).collect();
            assert_eq!(terms, [readers], "matmuls that compute `{d_h}`");
        }
    }
}

/// The parts add gradients to all rows of B, each once, in order.
#[test]
fn parts_cover_the_rows_of_b_once() {
    let request = request(with_biases(shapes::small_phi3(LAYERS)), AdapterForm::Dora);
    let request = Request { biases: TrainedBiases::All, ..request };
    let plan = plan(&request);
    for module in &request.adapters {
        for name in [module.b_name(), module.magnitude_name(), format!("{}.bias", module.path)] {
            let gradient = plan.leaf_named(&format!("grad {name}")).unwrap();
            let (rows, _) = plan.value(gradient).ty.shape.at(&plan.extent);
            let mut covered: Vec<(usize, usize)> = Vec::new();
            for update in plan.entry(Entry::MicroStep).steps.iter().flat_map(|step| &step.updates) {
                covered.extend(rows_within(&plan, *update, gradient));
            }
            covered.sort_unstable();
            let fused = module.path.ends_with("qkv_proj") || module.path.ends_with("gate_up_proj");
            assert_eq!(covered.len() > 1, fused, "{name}: {covered:?}");
            let mut next = 0;
            for (first, part) in covered {
                assert_eq!(first, next, "{name}");
                next = first + part;
            }
            assert_eq!(next, rows, "{name}");
        }
    }
}

/// First row and number of rows of a value that is a leaf or a slice of it.
fn rows_within(plan: &Plan, id: ValueId, leaf: ValueId) -> Option<(usize, usize)> {
    let rows = plan.value(id).ty.shape.at(&plan.extent).0;
    match plan.value(id).role {
        ValueRole::Slice(slice) if slice.of == leaf => Some((slice.first_row, rows)),
        _ => (id == leaf).then_some((0, rows)),
    }
}

/// Slices have no memory of their own.
#[test]
fn rows_of_a_leaf_cost_nothing() {
    let plan = plan(&request(shapes::small_phi3(LAYERS), AdapterForm::Lora));
    let mut slices = 0;
    for value in &plan.values {
        if let ValueRole::Slice(slice) = value.role {
            assert_eq!(value.buffer, plan.value(slice.of).buffer);
            slices += 1;
        }
    }
    // Weights, B and its gradient, in five parts a layer; a row of activity for A and B of four linears.
    assert_eq!(slices, LAYERS * (5 * 3 + 4 * 2));
}

/// All norms but the first of the lowest adapted layer need a gradient.
#[test]
fn nothing_is_built_below_the_lowest_adapted_layer() {
    let dialects = [
        (shapes::small_phi3(LAYERS), 1),
        (shapes::small_gemma2(LAYERS), 3),
        (shapes::small_gemma3(LAYERS), 3 + 2),
    ];
    for (spec, norms_in_the_lowest) in dialects {
        for form in [AdapterForm::Lora, AdapterForm::Dora, AdapterForm::Fourier { reg: REG }] {
            let request = shapes::request(spec.clone(), Targets::AllLinear, Layers::Last(1), 24, 2);
            let plan = plan(&Request { form, ..request });
            let name = format!("{} {form:?}", spec.model_type);
            let backward = steps_of(&plan, Entry::MicroStep, |step| step.phase != Phase::Forward);
            assert!(backward.iter().any(|step| step.layer == Some(LAYERS - 1)));
            assert!(backward.iter().all(|step| step.layer.is_none_or(|layer| layer == LAYERS - 1)), "{name}");
            let norms = backward
                .iter()
                .filter(|step| matches!(step.op, Op::RmsNormGrad { .. }) && step.layer.is_some());
            assert_eq!(norms.count(), norms_in_the_lowest, "{name}");
        }
    }
}

/// Row norms change in `refresh` alone, in one step per module; the magnitudes are trained, the norms never.
#[test]
fn dora_refreshes_every_module() {
    for (spec, parts) in [(shapes::small_phi3(LAYERS), 7), (shapes::small_gemma2(LAYERS), 7)] {
        let request = request(spec, AdapterForm::Dora);
        let modules = request.adapters.len();
        let plan = plan(&request);
        assert_eq!(count(&plan, Entry::Refresh, "row_norms"), modules);
        assert_eq!(plan.entry(Entry::Refresh).steps.len(), modules);
        for entry in [Entry::MicroStep, Entry::Update, Entry::Eval] {
            assert_eq!(count(&plan, entry, "row_norms"), 0, "{entry}");
        }
        assert_eq!(count(&plan, Entry::MicroStep, "magnitude_grad"), parts * LAYERS);
        assert_eq!(plan.leaves(LeafKind::Derived).count(), modules);
        assert_eq!(plan.leaves(LeafKind::Gradient).count(), 3 * modules);
        let derived: Vec<ValueId> = plan.leaves(LeafKind::Derived).map(|(id, _)| id).collect();
        for entry in [Entry::MicroStep, Entry::Update, Entry::Eval] {
            let updates = plan.entry(entry).steps.iter().flat_map(|step| &step.updates);
            assert!(
                updates
                    .into_iter()
                    .all(|id| derived.iter().all(|norm| rows_within(&plan, *id, *norm).is_none()))
            );
        }
    }
}

/// Without dropout, DoRA needs one matmul with the weight per part; with dropout, it needs two.
#[test]
fn dora_multiplies_with_the_weight_twice_only_under_dropout() {
    let matmuls = |dropout: f32, entry: Entry| {
        let request = Request { dropout, ..request(shapes::small_phi3(LAYERS), AdapterForm::Dora) };
        let plan = plan(&request);
        let linears =
            steps_of(&plan, entry, |step| step.phase == Phase::Forward && step.op.name() == "linear");
        let parts = linears.into_iter().filter(|step| !plan.value(step.inputs[1]).name.contains("lora_A"));
        parts.count()
    };
    assert_eq!(matmuls(0.0, Entry::MicroStep), 7 * LAYERS);
    assert_eq!(matmuls(0.1, Entry::MicroStep), 2 * 7 * LAYERS);
    assert_eq!(matmuls(0.1, Entry::Eval), 7 * LAYERS);
}

/// The regularizer runs once in `update`, before the norm of all gradients, and is a mean over all coefficients.
#[test]
fn ls_lora_regularizes_in_the_update() {
    let request = request(shapes::small_phi3(LAYERS), AdapterForm::Fourier { reg: REG });
    let modules = request.adapters.len();
    let plan = plan(&request);
    let update = &plan.entry(Entry::Update).steps;
    let names: Vec<&str> = update.iter().take(2).map(|step| step.op.name()).collect();
    assert_eq!(names, ["fourier_reg", "grad_norm"]);
    assert_eq!(update[0].op, Op::FourierReg { weight: REG / (4 * modules) as f64 });
    assert!(update[1].inputs.contains(&update[0].updates[1]), "the norm includes what the regularizer added");
    for (entry, expected) in
        [(Entry::MicroStep, 0), (Entry::Update, 1), (Entry::Refresh, 0), (Entry::Eval, 0)]
    {
        assert_eq!(count(&plan, entry, "fourier_reg"), expected, "{entry}");
    }
    assert_eq!(count(&plan, Entry::MicroStep, "fourier_grad"), 7 * LAYERS);
}

/// Parameters of fewer than 4096 elements keep f32 moments: here DoRA's magnitudes, LS-LoRA's functions and B of k and v.
#[test]
fn only_large_parameters_have_moments_in_8_bits() {
    for form in [AdapterForm::Lora, AdapterForm::Dora, AdapterForm::Fourier { reg: 0.1 }] {
        // A of q is (16, 256), just large enough; B of k is (128, 16).
        let mut request = request(shapes::llama(256, 300, LAYERS, (4, 2), 64, false), form);
        request.optimizer.moments = Moments::Bits8;
        let plan = plan(&request);
        let (mut small, mut large) = (0, 0);
        for step in &plan.entry(Entry::Update).steps {
            let in_8_bits = match step.op {
                Op::AdamW(_) => false,
                Op::AdamW8(_) => true,
                _ => continue,
            };
            let [parameter, first, second] = [0, 1, 2].map(|index| plan.value(step.updates[index]));
            let elements = parameter.ty.elements(&plan.extent);
            assert_eq!(in_8_bits, elements >= 4096, "{} has {elements} elements", parameter.name);
            let storages = [first, second].map(|moment| moment.ty.storage);
            let expected = if in_8_bits {
                [true, false].map(|signed| Storage::Dynamic8 { signed })
            } else {
                [Storage::F32; 2]
            };
            assert_eq!(storages, expected, "{}", parameter.name);
            *if in_8_bits { &mut large } else { &mut small } += 1;
        }
        assert!(small >= 2 * LAYERS && large >= 10 * LAYERS, "{small} small, {large} large");
    }
}

/// The setting decides which biases are trained, and they do not decay.
#[test]
fn trained_biases_are_leaves_of_their_own_kind() {
    let spec = with_biases(shapes::small_gemma2(LAYERS));
    let targets = || Targets::Names(vec!["q_proj".into(), "down_proj".into()]);
    for (biases, a_layer) in [(TrainedBiases::None, 0), (TrainedBiases::Adapted, 2), (TrainedBiases::All, 7)]
    {
        let request = shapes::request(spec.clone(), targets(), Layers::All, 24, 2);
        let mut request = Request { biases, ..request };
        request.optimizer.adamw.weight_decay = 0.1;
        let plan = plan(&request);
        assert_eq!(count(&plan, Entry::MicroStep, "bias_grad"), a_layer * LAYERS, "{biases:?}");
        let trained = plan.leaves(LeafKind::Adapter).filter(|(_, value)| value.name.ends_with(".bias"));
        assert_eq!(trained.count(), a_layer * LAYERS, "{biases:?}");
        for step in steps_of(&plan, Entry::Update, |step| matches!(step.op, Op::AdamW(_))) {
            let Op::AdamW(settings) = step.op else { unreachable!("only these are kept") };
            let name = &plan.value(step.updates[0]).name;
            assert_eq!(settings.weight_decay, if name.ends_with(".bias") { 0.0 } else { 0.1 }, "{name}");
        }
    }
}

/// As in other trainers, names decide: only tensors named bias or norm do not decay, so magnitudes and LS-LoRA's functions
/// decay like the matrices.
#[test]
fn everything_that_is_no_bias_decays() {
    for (form, name) in [
        (AdapterForm::Dora, "lora_magnitude_vector"),
        (AdapterForm::Fourier { reg: REG }, "fourier_params.weight"),
        (AdapterForm::Fourier { reg: REG }, "fourier_params.sigma"),
    ] {
        let mut request = request(shapes::small_gemma2(LAYERS), form);
        request.optimizer.adamw.weight_decay = 0.1;
        let plan = plan(&request);
        let steps = steps_of(&plan, Entry::Update, |step| matches!(step.op, Op::AdamW(_)));
        let mut found = false;
        for step in steps {
            let Op::AdamW(settings) = step.op else { unreachable!("only these are kept") };
            found |= plan.value(step.updates[0]).name.contains(name);
            assert_eq!(settings.weight_decay, 0.1, "{}", plan.value(step.updates[0]).name);
        }
        assert!(found, "{name}");
    }
}
