//! What would fit where nothing does: the smallest change of each kind, each computed by planning it.
//!
//! Choices that were pinned come first, since letting them go changes no result; then what does change results, and
//! says so. The same searches answer `smidgen fit`.

use crate::bytes::format_bytes;
use crate::job::{self, Job};
use crate::planning::{DemandShape, Terms};
use crate::recipe::{BaseFormat, Layers, MicroTokens};
use crate::trained_choice::{train_in_f32, with_last_layers};
use smidgen_compile::options::Moments;
use smidgen_compile::{Demand, Pins, Request, Solution};
use smidgen_ir::{Extent, Storage};
use std::collections::HashMap;

/// The smallest changes that would fit, each planned with the rest of the recipe as it is.
pub fn advise(job: &Job, terms: &Terms, leanest: &Solution) -> Vec<String> {
    let mut advice = Vec::new();
    let mut offer = |change: &str, consequence: &str, solution: Option<Solution>| {
        let words = |solution: Solution| {
            format!("{change} would need {}{consequence}", format_bytes(solution.peak_bytes))
        };
        advice.extend(solution.map(words));
    };
    let demands = DemandShape::of(job, None).map(|shape| shape.demands).unwrap_or_default();
    for (key, free) in unpinned(job, &terms.pins) {
        let solution = Terms { pins: free, ..terms.clone() }.solve(&job.request, &demands).ok();
        offer(&format!("`{key} = \"auto\"`"), "", solution);
    }
    if job.recipe.memory.micro_tokens != MicroTokens::Auto {
        let demands = DemandShape::unpinned(job).map(|shape| shape.demands).unwrap_or_default();
        offer("`memory.micro_tokens = \"auto\"`", "", terms.solve(&job.request, &demands).ok());
    }
    let segments = leanest.demand.extent.segments;
    let fits = |tokens: usize| terms.can_fit(&job.request, &one_sample(tokens, segments));
    let tokens =
        largest(leanest.demand.extent.tokens / 8, |eighth| fits(8 * eighth)).map_or(0, |most| 8 * most);
    if tokens >= 16 {
        let change = format!("`data.max_tokens = {tokens}` with `memory.micro_tokens = {tokens}`");
        let solution = terms.solve(&job.request, &[one_sample(tokens, segments)]).ok();
        offer(&change, "; shorter samples change results", solution);
    }
    if let Some(smallest) = demands.last().filter(|_| job.request.trained.is_empty()) {
        let fits = |rank: usize| terms.can_fit(&with_rank(&job.request, rank), smallest);
        let rank = job.recipe.adapter.rank;
        if let Some(rank) = largest(rank - 1, fits).filter(|_| job.recipe.adapter.rank_pattern.is_empty()) {
            let solution = terms.solve(&with_rank(&job.request, rank), &demands).ok();
            offer(&format!("`adapter.rank = {rank}`"), " and changes results", solution);
        }
    }
    if let Some(smallest) = demands.last() {
        let most = match job.recipe.adapter.layers {
            _ if job.request.trained.is_empty() => 0,
            Layers::All => job.request.spec.layers,
            Layers::Last(count) => count - 1,
            Layers::List(_) => 0,
        };
        let with = |count: usize| with_last_layers(job, count);
        let fits = |count: usize| with(count).is_some_and(|request| terms.can_fit(&request, smallest));
        if let Some(count) = largest(most, fits) {
            let solution = with(count).and_then(|request| terms.solve(&request, &demands).ok());
            offer(&format!("`adapter.layers = \"last:{count}\"`"), " and changes results", solution);
        }
    }
    if job.request.optimizer.moments == Moments::F32 {
        let mut request = job.request.clone();
        request.optimizer.moments = Moments::Bits8;
        let change = "`train.optimizer = \"adamw-8bit\"`";
        offer(change, " and changes results", terms.solve(&request, &demands).ok());
    }
    for base in [BaseFormat::Bf16, BaseFormat::Nf4] {
        let mut storage = job::build_storage(base, &job.request.spec, &job.model);
        train_in_f32(&mut storage, &job.request.trained);
        if stored_bytes(&job.request, &storage) < stored_bytes(&job.request, &job.request.storage) {
            let smaller = Request { storage, ..job.request.clone() };
            let change = format!("`model.base = \"{base}\"`");
            offer(&change, " and changes results", terms.solve(&smaller, &demands).ok());
        }
    }
    if leanest.peak_bytes > terms.budget.device_bytes {
        let least = leanest.peak_bytes.div_ceil(1 << 20);
        advice.push(format!("`memory.budget = \"{least}MiB\"` is the least that fits"));
    }
    advice
}

/// The keys that pin a choice to more memory, and the pins without each.
fn unpinned(job: &Job, pins: &Pins) -> Vec<(&'static str, Pins)> {
    let layers = job.request.spec.layers;
    let choices = [
        ("memory.recompute", pins.recompute.is_some(), Pins { recompute: None, ..pins.clone() }),
        (
            "memory.activations",
            pins.activations_away == Some(false),
            Pins { activations_away: None, ..pins.clone() },
        ),
        (
            "memory.weights",
            pins.weights_away.is_some_and(|count| count < layers),
            Pins { weights_away: None, tables_away: None, ..pins.clone() },
        ),
        (
            "memory.optimizer_state",
            pins.moments_away == Some(false),
            Pins { moments_away: None, ..pins.clone() },
        ),
    ];
    let pinned = choices.into_iter().filter(|(_, is_pinned, _)| *is_pinned);
    pinned.map(|(key, _, free)| (key, free)).collect()
}

/// A micro-batch of one sample, all of it supervised.
pub fn one_sample(tokens: usize, segments: usize) -> Demand {
    let extent = Extent { tokens, rows: tokens, segments };
    Demand { micro_tokens: tokens, extent, micro_steps: 1.0 }
}

/// The request with adapters of another rank.
pub fn with_rank(request: &Request, rank: usize) -> Request {
    let mut request = request.clone();
    request.adapters.iter_mut().for_each(|module| module.rank = rank);
    request
}

/// The largest number from 1 to `most` that fits, if any does; what fits at one fits at all below.
pub fn largest(most: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    let (mut low, mut high) = (0, most + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    (low > 0).then_some(low)
}

fn stored_bytes(request: &Request, storage: &HashMap<String, Storage>) -> usize {
    let sizes = request.spec.tensors().into_iter().map(|tensor| {
        let (rows, columns) = tensor.shape.at(&Extent::default());
        storage[&tensor.name].bytes(rows, columns)
    });
    sizes.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_that_fits_is_found() {
        for most in 0..20 {
            for limit in 0..25 {
                let want = most.min(limit);
                assert_eq!(largest(most, |number| number <= limit), (want > 0).then_some(want));
            }
        }
    }
}
