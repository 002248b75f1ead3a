//! Changes that would make a run fit: for each kind the smallest one, found by planning it.
//!
//! Removing pins comes first, because it changes no result. Changes of results come after, and say so. The same
//! searches answer `smidgen fit`.

use crate::plan::conditions::Conditions;
use crate::plan::demand::DemandShape;
use crate::plan::job::Job;
use crate::plan::model;
use crate::plan::trained_choice::{chosen_tensors, store_trained};
use crate::rows::data::Data;
use smidgen_compile::request::{Master, Moments};
use smidgen_compile::{Demand, Request, Solution, largest};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{Choice, DeviceKind, Extent, Pins, Storage};
use smidgen_recipe::{BaseFormat, Layers};
use std::collections::HashMap;

/// One line per change that would fit alone, with the memory that the run would need.
pub fn advise(job: &Job, conditions: &Conditions, leanest: &Solution) -> Vec<String> {
    let mut advice = Vec::new();
    let mut offer = |change: &str, consequence: &str, peak_bytes: Option<u64>| {
        let words = |bytes| format!("{change} would need {}{consequence}", format_bytes(bytes));
        advice.extend(peak_bytes.map(words));
    };
    let search = Search::of(conditions, leanest);
    let demands = DemandShape::of(job, None).map(|shape| shape.demands).unwrap_or_default();
    for (key, free) in unpinned(&conditions.pins) {
        // Not by `search`: its conditions may pin everything to the leanest policy, which followed from the pins.
        let conditions = Conditions { pins: free, ..conditions.clone() };
        let peak_bytes = conditions.solve(&job.request, &demands).ok().map(|solution| solution.peak_bytes);
        offer(&format!("`{key} = \"auto\"`"), "", peak_bytes);
    }
    if job.recipe.memory.pins.sets(Choice::MicroBatch) {
        let demands = DemandShape::unpinned(job).map(|shape| shape.demands).unwrap_or_default();
        offer("`memory.micro_tokens = \"auto\"`", "", search.peak_bytes(&job.request, &demands));
    }
    let sample = |tokens: usize| match &job.data {
        Data::Rows(_) => one_sample(tokens, leanest.demand.extent.segments),
        Data::Assumed { .. } => {
            let extent = Extent { tokens, rows: tokens - 1, segments: 1, audio: 0 };
            let micro_steps = leanest.demand.micro_steps;
            let samples = micro_steps.ceil() as usize;
            let step =
                Extent { tokens: samples * tokens, rows: samples * extent.rows, segments: samples, audio: 0 };
            Demand { micro_tokens: tokens, extent, step, micro_steps }
        }
    };
    let fitting = search.conditions.fitting(&job.request);
    let fits = |eighth: usize, look| fitting.fits(&sample(8 * eighth), look);
    let tokens = largest(leanest.demand.extent.tokens / 8, fits).map_or(0, |most| 8 * most);
    if tokens >= 16 {
        let change = format!("`data.max_tokens = {tokens}` with `memory.micro_tokens = {tokens}`");
        let peak_bytes = search.peak_bytes(&job.request, &[sample(tokens)]);
        offer(&change, "; shorter samples change results", peak_bytes);
    }
    if let Some(smallest) = demands.last().filter(|_| !job.request.adapters.is_empty()) {
        let fits = |rank: usize, look| fitting.fits_with(&with_rank(&job.request, rank), smallest, look);
        let rank = job.recipe.adapter.rank;
        if let Some(rank) = largest(rank - 1, fits).filter(|_| job.recipe.adapter.rank_pattern.is_empty()) {
            let peak_bytes = search.peak_bytes(&with_rank(&job.request, rank), &demands);
            offer(&format!("`adapter.rank = {rank}`"), " and changes results", peak_bytes);
        }
    }
    if let Some(smallest) = demands.last() {
        let most = match job.recipe.adapter.layers {
            _ if !job.request.adapters.is_empty() => 0,
            Layers::All => job.request.spec.layers.len(),
            Layers::Last(count) => count - 1,
            Layers::List(_) => 0,
        };
        let with = |count: usize| with_last_layers(job, count);
        let fits = |count: usize, look| {
            with(count).is_some_and(|request| fitting.fits_with(&request, smallest, look))
        };
        if let Some(count) = largest(most, fits) {
            let peak_bytes = with(count).and_then(|request| search.peak_bytes(&request, &demands));
            offer(&format!("`adapter.layers = \"last:{count}\"`"), " and changes results", peak_bytes);
        }
    }
    if job.request.optimizer.moments == Moments::F32 {
        let mut request = job.request.clone();
        request.optimizer.moments = Moments::Bits8;
        let change = "`train.optimizer = \"adamw-8bit\"`";
        offer(change, " and changes results", search.peak_bytes(&request, &demands));
    }
    if job.request.optimizer.master == Master::F32 && job.request.adapters.is_empty() {
        let mut request = job.request.clone();
        request.optimizer.master = Master::Bf16 { seed: job.recipe.train.seed };
        let Request { storage, spec, trained, optimizer, .. } = &mut request;
        store_trained(storage, spec, trained, optimizer.master);
        let change = "`train.master = \"bf16\"`";
        offer(change, " and changes results", search.peak_bytes(&request, &demands));
    }
    for base in [BaseFormat::Bf16, BaseFormat::Nf4] {
        let mut storage = model::build_storage(base, &job.request.spec, &job.model);
        let request = &job.request;
        store_trained(&mut storage, &request.spec, &request.trained, request.optimizer.master);
        if stored_bytes(&job.request, &storage) < stored_bytes(&job.request, &job.request.storage) {
            let smaller = Request { storage, ..job.request.clone() };
            let change = format!("`model.base = \"{base}\"`");
            offer(&change, " and changes results", search.peak_bytes(&smaller, &demands));
        }
    }
    let host_bytes = leanest.offloaded_bytes(job.world.local.of);
    let is_host_short =
        host_bytes > conditions.budget.offload_bytes && job.request.device == DeviceKind::Cuda;
    if leanest.peak_bytes <= conditions.budget.device_bytes && is_host_short {
        let enough = host_bytes.div_ceil(1 << 20);
        advice.push(format!("`memory.host_budget = \"{enough}MiB\"` is enough"));
    }
    if leanest.peak_bytes > conditions.budget.device_bytes {
        let least = leanest.peak_bytes.div_ceil(1 << 20);
        advice.push(format!("`memory.budget = \"{least}MiB\"` is the least that fits"));
    }
    advice
}

/// The job's request if it trained only this many of the last layers; `None` if that selects no weight.
fn with_last_layers(job: &Job, count: usize) -> Option<Request> {
    let mut recipe = job.recipe.clone();
    recipe.adapter.layers = Layers::Last(count);
    let spec = &job.request.spec;
    let trained = chosen_tensors(&recipe, spec).ok()?;
    let mut storage = model::build_storage(recipe.model.storage(), spec, &job.model);
    store_trained(&mut storage, spec, &trained, job.request.optimizer.master);
    Some(Request { storage, trained, ..job.request.clone() })
}

/// Plans with more steps take long to search, so only the leanest policy is tried.
const STEPS_OF_LARGE: usize = 6_000;

/// Decides whether a change would fit: with the solver, or for large models with one policy.
struct Search {
    /// For a large model every choice is pinned to the leanest policy of the request that did not fit. It is almost the
    /// leanest for a similar request too.
    conditions: Conditions,
    is_large: bool,
}

impl Search {
    fn of(conditions: &Conditions, leanest: &Solution) -> Search {
        let steps: usize = leanest.plan.entries.iter().map(|entry| entry.steps.len()).sum();
        let is_large = steps > STEPS_OF_LARGE;
        let pins = if is_large { Pins::from(leanest.policy.clone()) } else { conditions.pins.clone() };
        Search { conditions: Conditions { pins, ..conditions.clone() }, is_large }
    }

    /// The memory that the request would need; `None` if it does not fit.
    fn peak_bytes(&self, request: &Request, demands: &[Demand]) -> Option<u64> {
        if self.is_large {
            self.conditions.fitting(request).usual_peak_bytes(demands.last()?)
        } else {
            Some(self.conditions.solve(request, demands).ok()?.peak_bytes)
        }
    }
}

/// The keys that pin a choice to the device, each with the pins that remain without it.
fn unpinned(pins: &Pins) -> Vec<(&'static str, Pins)> {
    let keys = [
        ("memory.recompute", Choice::Recompute),
        ("memory.activations", Choice::Activations),
        ("memory.weights", Choice::Weights),
        ("memory.optimizer_state", Choice::OptimizerState),
    ];
    let pinned = keys.into_iter().filter(|(_, choice)| pins.keep_on_device(*choice));
    pinned.map(|(key, choice)| (key, pins.without_pin(choice))).collect()
}

/// A micro-batch of one sample, all of it supervised.
fn one_sample(tokens: usize, segments: usize) -> Demand {
    let extent = Extent { tokens, rows: tokens, segments, audio: 0 };
    Demand { micro_tokens: tokens, extent, step: extent, micro_steps: 1.0 }
}

/// The request with adapters of another rank.
pub fn with_rank(request: &Request, rank: usize) -> Request {
    let mut request = request.clone();
    request.adapters.iter_mut().for_each(|module| module.rank = rank);
    request
}

fn stored_bytes(request: &Request, storage: &HashMap<String, Storage>) -> usize {
    let sizes = request.spec.tensors().into_iter().map(|tensor| {
        let (rows, columns) = tensor.shape.at(&Extent::default());
        storage[&tensor.name].bytes(rows, columns)
    });
    sizes.sum()
}
