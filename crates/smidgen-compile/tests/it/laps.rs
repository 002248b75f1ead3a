//! Layers per lap in breadth-first order: the solver chooses two if only that fits.
//!
//! Full training of a model with an odd number of layers, in many micro-batches, so that the inputs of layers need more
//! memory than the weights of a second layer. The budget is what laps of two layers need.

use crate::shapes;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::{
    Budget, Choice, Context, Demand, Purpose, Question, Request, Solution, SolveError, cards, solve,
};
use smidgen_ir::{DeviceKind, Extent, LayerRule, Order, Pins, Policy, Precision};

const MICRO_BATCHES: usize = 32;

fn solved(pins: &Pins, budget: Budget) -> Result<Solution, SolveError> {
    let spec = shapes::llama(512, 1024, 9, (8, 4), 2048, false);
    let trained = spec.tensors().into_iter().map(|tensor| tensor.name).collect();
    let request = shapes::request(spec, Targets::AllLinear, Layers::All, 512, 1);
    let (device, precision) = (DeviceKind::Cuda, Precision::Bf16);
    let extent = Extent { tokens: 512, rows: 511, segments: 1, audio: 0 };
    let all = |count: usize| MICRO_BATCHES * count;
    let step = Extent { tokens: all(512), rows: all(511), segments: all(1), audio: 0 };
    let card = cards::find("rtx-4090").expect("a built-in card").profile();
    solve(&Question {
        purpose: Purpose::Training,
        request: &Request { adapters: vec![], trained, device, precision, ..request },
        demands: &[Demand { micro_tokens: 512, extent, step, micro_steps: MICRO_BATCHES as f64 }],
        pins,
        context: Context { device, overhead: card.overhead, ..Context::default() },
        budget,
        profile: &card.at(precision),
    })
}

fn laps_of(layers_per_lap: usize) -> Pins {
    Pins { layers_per_lap: Some(layers_per_lap), ..Pins::default() }
}

fn in_laps(pins: Pins) -> Pins {
    Pins { order: Some(Order::Breadth), ..pins }
}

/// The smallest budget for laps of two layers, on the device and in host memory.
fn enough_for_two() -> Budget {
    let pins = Pins { recompute: Some(LayerRule::All), ..in_laps(laps_of(2)) };
    let leanest = solved(&pins, Budget::device(1)).expect_err("a byte is too little").leanest;
    assert_eq!(leanest.policy.layers_per_lap, 2);
    let offload_bytes = leanest.plan.host.bytes() as u64;
    Budget { offload_bytes, ..Budget::device(leanest.peak_bytes) }
}

#[test]
fn two_layers_per_lap_fit_where_one_does_not() {
    let budget = enough_for_two();
    let refused = solved(&in_laps(laps_of(1)), budget).expect_err("one layer per lap keeps every input");
    assert_eq!(refused.leanest.policy.layers_per_lap, 1);
    let found = solved(&in_laps(Pins::default()), budget).expect("two layers per lap fit");
    assert_eq!((found.policy.order, found.policy.layers_per_lap), (Order::Breadth, 2));
    assert!(found.reasons.iter().any(|reason| reason.choice == Choice::Laps));
}

#[test]
fn two_layers_per_lap_are_chosen_where_they_are_faster_than_depth_first_order() {
    let budget = enough_for_two();
    let [one, open] =
        [laps_of(1), Pins::default()].map(|pins| solved(&pins, budget).expect("something fits"));
    assert_eq!(one.policy.order, Order::Depth);
    assert_eq!((open.policy.order, open.policy.layers_per_lap), (Order::Breadth, 2));
    assert!(open.step_ms < 0.9 * one.step_ms, "{} ms, {} ms", open.step_ms, one.step_ms);
}

#[test]
fn one_layer_per_lap_is_chosen_where_there_is_room() {
    let room = Budget { device_bytes: 4 * enough_for_two().device_bytes, ..Budget::device(0) };
    let found = solved(&in_laps(Pins::default()), room).expect("there is room");
    assert_eq!(found.policy.layers_per_lap, 1);
}

/// Older checkpoints have policies without `layers_per_lap`.
#[test]
fn policies_without_laps_are_read() {
    let mut text = serde_json::to_value(Policy { order: Order::Breadth, ..Policy::default() }).unwrap();
    text.as_object_mut().unwrap().remove("layers_per_lap").expect("it is written");
    let policy: Policy = serde_json::from_value(text).unwrap();
    assert_eq!((policy.lap_of(0), policy.lap_of(1)), (Some(0), Some(1)));
}
