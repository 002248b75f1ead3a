//! Rounding to fp8: how often, where, and which values may not overlap when a kernel rounds the value that it makes.

use crate::shapes;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::request::DecodeShape;
use smidgen_compile::{Request, compile, compile_decode};
use smidgen_ir::{
    DeviceKind, Entry, LayerSet, Op, Phase, Plan, Policy, Precision, Property, Step, Storage, ValueId, verify,
};

const LAYERS: usize = 3;

/// Every linear of the layers in fp8 and adapted.
fn request() -> Request {
    let spec = shapes::llama(32, 48, LAYERS, (4, 2), 64, false);
    let mut request = shapes::request(spec, Targets::AllLinear, Layers::All, 24, 2);
    for module in &request.adapters {
        request.storage.insert(format!("{}.weight", module.path), Storage::Fp8Rows);
    }
    Request { device: DeviceKind::Cuda, precision: Precision::Fp8, ..request }
}

fn plan(policy: &Policy) -> Plan {
    let plan = compile(&request(), policy);
    assert_eq!(verify::plan(&plan), Vec::<String>::new());
    plan
}

fn policies() -> [Policy; 3] {
    let tiled = Policy { tile_tokens: Some(8), ..Policy::resident(LayerSet::first(LAYERS), 8) };
    [Policy::resident(LayerSet::none(), 8), Policy::resident(LayerSet::first(LAYERS), 8), tiled]
}

fn is_rounding(step: &Step) -> bool {
    matches!(step.op, Op::RoundFp8 { .. })
}

#[test]
fn a_value_is_rounded_once_for_all_that_multiply_it() {
    let plan = plan(&policies()[0]);
    let steps = &plan.entry(Entry::MicroStep).steps;
    let count = |phase: Phase, layer: usize| {
        steps
            .iter()
            .filter(|step| is_rounding(step) && step.phase == phase && step.layer == Some(layer))
            .count()
    };
    for layer in 0..LAYERS {
        // For q, k and v; for o; for gate and up; for down.
        assert_eq!(count(Phase::Forward, layer), 4, "layer {layer}");
        // One for each linear. The input of the lowest layer needs no gradient, so q, k and v of that layer round none.
        assert_eq!(count(Phase::Backward, layer), if layer == 0 { 4 } else { 7 }, "layer {layer}");
    }
    let mut matmuls = 0;
    for step in steps {
        let (Op::Linear { .. } | Op::LinearGrad { .. }) = step.op else { continue };
        for pair in step.inputs.chunks_exact(2) {
            let [x, weight] = [pair[0], pair[1]].map(|id| plan.value(id).ty.storage);
            assert_eq!(x == Storage::Fp8Rows, weight == Storage::Fp8Rows, "{step:?}");
            matmuls += usize::from(x == Storage::Fp8Rows);
            if matches!(step.op, Op::Linear { .. }) {
                break;
            }
        }
    }
    assert_eq!(matmuls, 7 * LAYERS + 7 * LAYERS - 3);
}

/// The rounding directly follows the step that makes the value, if that is in the same layer and can round.
#[test]
fn rounding_follows_what_makes_a_value() {
    for policy in policies() {
        let plan = plan(&policy);
        let steps = &plan.entry(Entry::MicroStep).steps;
        for (index, step) in steps.iter().enumerate().filter(|(_, step)| is_rounding(step)) {
            let maker = steps.iter().position(|maker| maker.outputs.contains(&step.inputs[0]));
            let Some(maker) = maker.filter(|maker| {
                let maker = &steps[*maker];
                maker.op.has(Property::Rounds) && (maker.phase, maker.layer) == (step.phase, step.layer)
            }) else {
                continue;
            };
            assert!(
                steps[maker + 1..index].iter().all(is_rounding),
                "{step:?} is far from {:?}",
                steps[maker]
            );
        }
        let behind = |maker: &str| {
            steps.windows(2).filter(|pair| pair[0].op.name() == maker && is_rounding(&pair[1])).count()
        };
        for maker in ["rms_norm", "gated_act", "gated_act_grad", "rms_norm_grad"] {
            assert!(behind(maker) >= LAYERS - 1, "{} behind {maker}", behind(maker));
        }
    }
}

/// A block of the kernel writes all results of its rows while other blocks still read, so nothing may overlap.
#[test]
fn what_is_rounded_as_it_is_made_overlaps_nothing_of_it() {
    let mut pairs = 0;
    for policy in policies() {
        let plan = plan(&policy);
        let steps = &plan.entry(Entry::MicroStep).steps;
        for (index, maker) in steps.iter().enumerate().filter(|(_, step)| step.op.has(Property::Rounds)) {
            let roundings: Vec<&Step> =
                steps[index + 1..].iter().take_while(|step| is_rounding(step)).collect();
            let of_maker = || maker.inputs.iter().chain(&maker.outputs).copied();
            let range = |id: ValueId| {
                let buffer = plan.buffer(plan.value(id).buffer.unwrap());
                buffer.offset..buffer.end()
            };
            for (number, rounding) in roundings.iter().enumerate() {
                let own = range(rounding.outputs[0]);
                let others = roundings[..number].iter().map(|before| before.outputs[0]);
                for other in of_maker().chain(others) {
                    let range = range(other);
                    let name = &plan.value(other).name;
                    assert!(own.end <= range.start || range.end <= own.start, "{rounding:?} overlaps {name}");
                    pairs += 1;
                }
            }
        }
    }
    assert!(pairs > 100, "{pairs} pairs");
}

/// Matmuls of few rows read their input without rounding.
#[test]
fn generation_rounds_nothing_beforehand() {
    let shape = DecodeShape { slots: 2, positions: 16, cache_rows: 32, new_tokens: 8 };
    let plan = compile_decode(&Request { decode: Some(shape), ..request() }, &Policy::default());
    assert!(plan.entry(Entry::Decode).steps.iter().all(|step| !is_rounding(step)));
}
