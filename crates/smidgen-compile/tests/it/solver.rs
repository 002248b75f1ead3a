//! The solver: its plan fits the budget, and no faster plan of the same kind does.
//!
//! Every claim is checked with plans that are compiled here, one for each number of recomputed layers.

use crate::shapes;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::{
    Budget, Choice, Context, Demand, Overhead, Profile, Purpose, Question, Rates, Request, Solution,
    SolveError, Why, compile, offloaded_weights::offload_all_weights, solve, solve::AS_FAST,
};
use smidgen_ir::{
    DeviceKind, Entry, Extent, LayerRule, LayerSet, Pins, Plan, Policy, Precision, Space, SpaceSize,
};

const LAYERS: usize = 7;
const CONTEXT: Context = shapes::process(1_000_000, 100, 3000);

fn request() -> Request {
    let spec = shapes::llama(64, 160, LAYERS, (4, 2), 256, false);
    shapes::request(spec, Targets::AllLinear, Layers::All, 512, 4)
}

fn demand(tokens: usize, micro_steps: f64) -> Demand {
    let extent = Extent { tokens, rows: tokens - 4, segments: 4, audio: 0 };
    Demand { micro_tokens: tokens, extent, step: extent, micro_steps }
}

fn solved(demands: &[Demand], pins: &Pins, budget: u64) -> Result<Solution, SolveError> {
    solved_in(demands, pins, Budget::device(budget))
}

fn solved_in(demands: &[Demand], pins: &Pins, budget: Budget) -> Result<Solution, SolveError> {
    solve(&Question {
        purpose: Purpose::Training,
        request: &request(),
        demands,
        pins,
        context: CONTEXT,
        budget,
        profile: &Profile::cpu(2, Precision::F32),
    })
}

/// Nothing may be offloaded.
fn resident() -> Pins {
    Pins {
        weights: Some(Space::Device),
        activations: Some(Space::Device),
        optimizer_state: Some(Space::Device),
        ..Pins::default()
    }
}

/// All weights are offloaded, and two layers of them are on the device at the same time.
fn streamed(request: &Request) -> Policy {
    offload_all_weights(Policy::resident(LayerSet::none(), 8), request, 2)
}

fn peak_of(plan: &Plan) -> u64 {
    let steps: usize = plan.entries.iter().map(|entry| entry.steps.len()).sum();
    let spilled = if plan.disk.bytes() > 0 { CONTEXT.spill_bytes } else { 0 };
    CONTEXT.overhead.fixed_bytes
        + CONTEXT.overhead.step_bytes * steps as u64
        + spilled
        + plan.reserved_bytes() as u64
}

/// Peak of a demand with the first `count` layers recomputed, by its own plan.
fn peak_with(demand: &Demand, count: usize, loss_chunk: usize) -> u64 {
    let request = Request { extent: demand.extent, ..request() };
    let policy = Policy::resident(LayerSet::first(count), loss_chunk);
    peak_of(&compile(&request, &policy))
}

#[test]
fn every_budget_gets_the_fewest_layers_that_fit() {
    let demand = demand(512, 1.0);
    let chunk = solved(&[demand], &resident(), u64::MAX).unwrap().policy.loss_chunk;
    let pins = Pins { loss_chunk: Some(chunk), ..resident() };
    let peaks: Vec<u64> = (0..=LAYERS).map(|count| peak_with(&demand, count, chunk)).collect();
    let least = *peaks.iter().min().unwrap();
    let most = peaks[0];
    assert!(least < most, "recompute saves nothing here");
    let error = solved(&[demand], &pins, least - 1).unwrap_err();
    assert_eq!(error.leanest.peak_bytes, least, "the leanest of {peaks:?}");
    let mut before: Option<(usize, u64)> = None;
    let mut seen = Vec::new();
    for part in 0..=24 {
        let budget = least + (most - least) * part / 24;
        let solution = solved(&[demand], &pins, budget).unwrap();
        let count = solution.policy.recompute.len();
        assert_eq!(solution.policy.recompute, LayerSet::first(count));
        assert!(solution.peak_bytes <= budget, "{} bytes for a budget of {budget}", solution.peak_bytes);
        assert_eq!(solution.peak_bytes, peaks[count], "the peak is that of the plan");
        assert_eq!(solution.peak_bytes, peak_of(&solution.plan));
        assert!(peaks[..count].iter().all(|peak| *peak > budget), "fewer than {count} layers fit {budget}");
        if let Some((layers_before, peak_before)) = before {
            assert!(count <= layers_before && solution.peak_bytes >= peak_before, "not monotone at {budget}");
        }
        before = Some((count, solution.peak_bytes));
        seen.push(count);
    }
    seen.dedup();
    assert!(seen.len() > 4, "the budgets met only {seen:?} recomputed layers");
}

/// A smaller loss chunk costs less time than recomputed layers, and the chunk is no smaller than necessary.
#[test]
fn the_loss_chunk_shrinks_before_layers_are_recomputed() {
    let demand = demand(512, 1.0);
    let usual = solved(&[demand], &resident(), u64::MAX).unwrap().policy.loss_chunk;
    let pinned = Pins { loss_chunk: Some(usual), ..resident() };
    let least = solved(&[demand], &pinned, 10).unwrap_err().leanest.peak_bytes;
    let (with_usual, free) =
        (solved(&[demand], &pinned, least).unwrap(), solved(&[demand], &resident(), least).unwrap());
    assert!(free.policy.loss_chunk < usual && free.step_ms < with_usual.step_ms);
    assert!(free.policy.recompute.len() < with_usual.policy.recompute.len());
    let more = Policy { loss_chunk: 2 * free.policy.loss_chunk, ..free.policy };
    assert!(peak_of(&compile(&Request { extent: demand.extent, ..request() }, &more)) > least);
    assert!(solved(&[demand], &resident(), least - 1).is_ok());
}

/// Values are offloaded if everything else is not enough, and count in the budget of their memory space.
#[test]
fn below_the_leanest_resident_plan_values_are_offloaded() {
    let demands = [demand(512, 1.0), demand(128, 4.0)];
    let least = solved(&demands, &resident(), 10).unwrap_err().leanest.peak_bytes;
    let lowest = solved(&demands, &Pins::default(), 10).unwrap_err().leanest;
    assert!(lowest.peak_bytes < least, "{} against {least}", lowest.peak_bytes);
    assert!(lowest.policy.tables_offloaded && lowest.policy.optimizer_state == Space::Disk);
    let mut before = f64::INFINITY;
    for part in 0..=12 {
        let budget = lowest.peak_bytes + (least + 1000 - lowest.peak_bytes) * part / 12;
        let solution = solved(&demands, &Pins::default(), budget).unwrap();
        assert!(solution.peak_bytes <= budget);
        assert_eq!(solution.peak_bytes, peak_of(&solution.plan));
        // Plans within that ratio count as equally fast.
        assert!(solution.step_ms <= AS_FAST * before, "{budget}: {} after {before}", solution.step_ms);
        before = solution.step_ms.min(before);
        // If nothing can be offloaded, it fits only if nothing has to be.
        let narrow = Budget { offload_bytes: 0, ..Budget::device(budget) };
        let alone = solved_in(&demands, &Pins::default(), narrow);
        assert_eq!(alone.is_ok(), budget >= least, "{budget}");
    }
}

#[test]
fn what_does_not_fit_carries_the_leanest_plan() {
    let (large, small) = (demand(512, 1.0), demand(128, 4.0));
    let error = solved(&[large, small], &resident(), 10).unwrap_err();
    assert_eq!(error.budget_bytes, 10);
    let leanest = &error.leanest;
    assert_eq!(leanest.demand, small, "the smaller micro-batch needs less");
    let peaks = (0..=LAYERS).map(|count| peak_with(&small, count, leanest.policy.loss_chunk));
    assert_eq!(Some(leanest.peak_bytes), peaks.min());
    let message = format!("the smallest plan needs {} bytes, the budget is 10", leanest.peak_bytes);
    assert_eq!(error.to_string(), message);
    // With that many bytes the run fits; with one byte less it does not.
    assert!(solved(&[large, small], &resident(), leanest.peak_bytes).is_ok());
    assert!(solved(&[large, small], &resident(), leanest.peak_bytes - 1).is_err());
}

/// Half the tokens without recompute, or all of them with it: the predicted step time decides.
#[test]
fn the_faster_micro_batch_wins() {
    let demands = [demand(512, 1.0), demand(256, 2.0), demand(128, 4.0)];
    let chunk = solved(&demands, &resident(), u64::MAX).unwrap().policy.loss_chunk;
    let roomy = peak_with(&demands[0], 0, chunk);
    let whole = solved(&demands, &resident(), roomy).unwrap();
    assert_eq!((whole.demand, whole.policy.recompute.len()), (demands[0], 0));
    let budget = peak_with(&demands[0], LAYERS, chunk);
    let best = solved(&demands, &resident(), budget).unwrap();
    for demand in demands {
        if let Ok(alone) = solved(&[demand], &resident(), budget) {
            assert!(best.step_ms <= alone.step_ms, "{demand:?} alone is faster");
        }
    }
}

#[test]
fn pins_are_always_obeyed() {
    let demand = demand(512, 1.0);
    let pins = Pins { recompute: Some(LayerRule::List(vec![1, 3])), loss_chunk: Some(24), ..resident() };
    let solution = solved(&[demand], &pins, u64::MAX).unwrap();
    let expected = Policy { micro_tokens: 512, ..Policy::resident(LayerSet::from_iter([1, 3]), 24) };
    assert_eq!(solution.policy, expected);
    let error = solved(&[demand], &pins, solution.peak_bytes - 1).unwrap_err();
    assert_eq!(error.leanest.policy, solution.policy, "a pinned choice is not changed to fit");
}

/// Every choice of a plan has one reason.
#[test]
fn reasons_say_why_a_choice_was_made() {
    let demands = [demand(512, 1.0)];
    let why = |solution: &Solution, choice: Choice| {
        let mut reasons = solution.reasons.iter().filter(|reason| reason.choice == choice);
        let first = reasons.next().map(|reason| reason.why);
        assert_eq!(reasons.next(), None, "two reasons for {choice:?}");
        first
    };
    let roomy = solved(&demands, &Pins::default(), u64::MAX).unwrap();
    assert_eq!(why(&roomy, Choice::Recompute), Some(Why::Fits));
    assert_eq!(why(&roomy, Choice::MicroBatch), Some(Why::FastestWithin { budget_bytes: u64::MAX }));
    assert_eq!(why(&roomy, Choice::Weights), None);
    let pins = Pins { recompute: Some(LayerRule::List(vec![0, 1])), ..Pins::default() };
    let pinned = solved(&demands, &pins, u64::MAX).unwrap();
    assert_eq!(why(&pinned, Choice::Recompute), Some(Why::Pinned));
    let leanest = solved(&demands, &Pins::default(), 10).unwrap_err().leanest;
    let (needs_least, budget_bytes) =
        (Why::NeedsLeast { peak_bytes: leanest.peak_bytes }, leanest.peak_bytes);
    let within = solved(&demands, &Pins::default(), budget_bytes).unwrap();
    for choice in [Choice::Recompute, Choice::Weights, Choice::Activations, Choice::OptimizerState] {
        assert_eq!(why(&leanest, choice), Some(needs_least));
        assert_eq!(why(&within, choice), Some(Why::FastestWithin { budget_bytes }));
    }
}

/// A price is the difference in bytes and time to the plan without the choice.
#[test]
fn prices_are_those_of_plans_without_a_choice() {
    let demands = [demand(512, 1.0)];
    assert_eq!(solved(&demands, &Pins::default(), u64::MAX).unwrap().prices, []);
    let lowest = solved(&demands, &Pins::default(), 10).unwrap_err().leanest.peak_bytes;
    let solution = solved(&demands, &Pins::default(), lowest).unwrap();
    let choices: Vec<Choice> = solution.prices.iter().map(|price| price.choice).collect();
    assert_eq!(choices, [Choice::Recompute, Choice::Weights, Choice::Activations, Choice::OptimizerState]);
    let profile = Profile::cpu(2, Precision::F32);
    let step_ms = |plan: &Plan| {
        1e3 * (profile.entry_seconds(plan, Entry::MicroStep) + profile.entry_seconds(plan, Entry::Update))
    };
    for price in &solution.prices {
        let mut policy = solution.policy.clone();
        match price.choice {
            Choice::Recompute => policy.recompute = LayerSet::none(),
            Choice::Weights => {
                policy.offloaded_weights = LayerSet::none();
                (policy.tables_offloaded, policy.embedding_offloaded) = (false, false);
            }
            Choice::Activations => policy.offloaded_activations = LayerSet::none(),
            _ => policy.optimizer_state = Space::Device,
        }
        let plan = compile(&Request { extent: demands[0].extent, ..request() }, &policy);
        let saved = peak_of(&plan) as i64 - solution.peak_bytes as i64;
        // A packed plan may need slightly more than the bytes in use.
        assert!((saved - price.saved_bytes).abs() <= saved.abs() / 5 + 4096, "{price:?}: {saved}");
        let cost = solution.step_ms - step_ms(&plan);
        assert!((cost - price.cost_ms).abs() < 1e-6, "{price:?}: {cost}");
    }
}

/// Pinned memory has page tables on the GPU. They and the arena use whole granules.
#[test]
fn a_gpu_needs_whole_granules_and_page_tables() {
    let request = Request { device: DeviceKind::Cuda, ..request() };
    let mut plan = compile(&request, &streamed(&request));
    let reserved = plan.reserved_bytes() as u64;
    let rounded = 7 + reserved.next_multiple_of(2 << 20) - reserved;
    let context = Context { device: DeviceKind::Cuda, ..shapes::process(7, 0, 0) };
    for (host_bytes, tables_bytes) in
        [(0, 0), (4096, 2 << 20), (1 << 30, 2 << 20), ((1 << 30) + 512, 4 << 20)]
    {
        plan.host = SpaceSize { persistent_bytes: host_bytes, ..SpaceSize::default() };
        assert_eq!(context.bytes_for(&plan), rounded + tables_bytes, "{host_bytes}");
    }
}

#[test]
fn a_process_needs_memory_for_threads_data_micro_batch_and_disk_buffers() {
    let here = compile(&request(), &Policy::resident(LayerSet::none(), 8));
    let spilled = compile(&request(), &streamed(&request()));
    let overhead = Overhead { fixed_bytes: 7, thread_bytes: 11, step_bytes: 2, margin_bytes: 1000 };
    let context = Context {
        device: DeviceKind::Cpu,
        overhead,
        threads: 3,
        data_bytes: 50,
        token_bytes: 3,
        spill_bytes: 100,
    };
    let steps = |plan: &Plan| plan.entries.iter().map(|entry| entry.steps.len() as u64).sum::<u64>();
    let rest = 7 + 3 * 11 + 50 + 3 * here.extent.tokens as u64 + 1000;
    assert_eq!(context.bytes_for(&here), rest + 2 * steps(&here));
    assert_eq!(context.bytes_for(&spilled), rest + 2 * steps(&spilled) + 100);
}

#[test]
fn equal_steps_are_launched_together() {
    let plan = compile(&request(), &Policy::resident(LayerSet::none(), 128));
    let steps = &plan.entry(Entry::Update).steps;
    let changes = steps.windows(2).filter(|pair| pair[0].op.name() != pair[1].op.name()).count();
    assert!(changes + 10 < steps.len(), "an update is mostly the same for many tensors");
    let free = f64::INFINITY;
    let rates = Rates {
        matmul_flops_per_s: free,
        bf16_matmul_flops_per_s: free,
        weight_gradient_flops_per_s: free,
        attention_flops_per_s: free,
        bytes_per_s: free,
        step_s: 1.0,
        plain_operand_s: 0.0,
        coded_operand_s: 0.0,
    };
    let profile = Profile { rates, ..Profile::cpu(1, Precision::F32) };
    assert_eq!(profile.entry_seconds(&plan, Entry::Update), (changes + 1) as f64);
}

/// A step that first decodes its matrix needs three launches. An entry point with transfers is not recorded as a graph.
#[test]
fn a_gpu_needs_memory_for_the_launches_that_its_graphs_record() {
    let mut plan = compile(&request(), &Policy::resident(LayerSet::none(), 128));
    plan.persistent_bytes = plan.persistent_bytes.next_multiple_of(2 << 20);
    plan.transient_bytes = plan.transient_bytes.next_multiple_of(2 << 20);
    let context = Context { device: DeviceKind::Cuda, ..shapes::process(7, 3, 0) };
    let steps = |entry: &smidgen_ir::EntryPlan| entry.steps.len() as u64;
    let all: u64 = plan.entries.iter().map(steps).sum();
    assert_eq!(context.bytes_for(&plan), 7 + 3 * all);
    let coded = plan.entries.iter_mut().flat_map(|entry| &mut entry.steps).take(4);
    coded.for_each(|step| step.cost.coded_operands = 1.0);
    assert_eq!(context.bytes_for(&plan), 7 + 3 * (all + 2 * 4));
    let of_first = steps(&plan.entries[0]);
    assert!(of_first > 4);
    plan.entries[0].steps[0].op = smidgen_ir::Op::Fetch;
    assert_eq!(context.bytes_for(&plan), 7 + 3 * (all - of_first));
}
