//! A plan that fits and is nearly as fast as the fastest, for tables of many models: a dozen schedules instead of hundreds.
//!
//! What costs least comes first: recomputing layers, then offloading their weights and inputs, then breadth-first order. The
//! fewest layers with which a step fits are found along a line, because bytes are nearly linear in their number. The plan is
//! packed like every other, so it does fit; another one may be faster, which only a whole search finds.

use super::purposes::pins_for;
use super::question::Question;
use super::size::{SearchState, Seen, Size};
use super::solution::Solution;
use super::{ranked, solution};
use crate::arena;
use smidgen_ir::Space;
use smidgen_ir::policy::{LayerSet, Policy};

/// A plan that fits and is nearly as fast as the fastest; `None` if none of the policies that are usually fast or lean does.
/// For one rank.
pub fn solve_quickly(question: &Question) -> Option<Solution> {
    let pins = pins_for(question.purpose, question.pins);
    let question = &Question { pins: &pins, ..*question };
    let state = SearchState::default();
    let sizes: Vec<Size> =
        question.demands.iter().map(|demand| Size::new(question, demand, &state)).collect();
    sizes.iter().for_each(look);
    let mut candidates = ranked(&sizes).into_iter();
    let (size, Seen { policy, .. }) = candidates.find(|(size, seen)| size.packs(&seen.policy))?;
    let plan = arena::plan_memory_unchecked(size.scheduled(&policy));
    Some(solution(size, plan, policy))
}

/// Whether a plan fits that offloads no more than it must, where the host has no room for everything.
pub fn fits_with_little_offloaded(question: &Question) -> bool {
    let pins = pins_for(question.purpose, question.pins);
    let question = &Question { pins: &pins, ..*question };
    let state = SearchState::default();
    question.demands.iter().any(|demand| {
        let size = Size::new(question, demand, &state);
        fewest_layers(&size, OFFLOADED, &with_state(&size, with_inputs(&size)))
    })
}

/// Measures policies from the fastest to the leanest, until one fits that offloads no weights.
fn look(size: &Size) {
    let freedom = &size.freedom;
    let fewest_rows = |policy: Policy| Policy { loss_chunk: freedom.fewest_rows(), ..policy };
    let (resident, recomputed) = (freedom.resident(), freedom.layers.saturating_sub(1));
    if fits(size, &resident) || fewest_layers(size, RECOMPUTED, &fewest_rows(resident.clone())) {
        return;
    }
    let start = freedom.with_count(RECOMPUTED, &fewest_rows(freedom.first()), recomputed);
    for policy in [start, with_inputs(size)] {
        fewest_layers(size, OFFLOADED, &with_state(size, policy));
    }
    if freedom.may_go_breadth_first() {
        fits(size, &freedom.obeyed(fewest_rows(freedom.breadth_first(freedom.layers, 2, 1))));
    }
    fits(size, &freedom.usually_leanest());
}

/// Everything recomputed from offloaded inputs.
fn with_inputs(size: &Size) -> Policy {
    let freedom = &size.freedom;
    let recompute = LayerSet::first(freedom.layers.saturating_sub(1));
    Policy {
        loss_chunk: freedom.fewest_rows(),
        activations: Space::Host,
        offloaded_activations: recompute.clone(),
        recompute,
        ..freedom.first()
    }
}

/// The policy with tables, gradients and optimizer state offloaded if the base is trained.
fn with_state(size: &Size, policy: Policy) -> Policy {
    let trains_base = size.freedom.trains_base;
    let state = if trains_base { Space::Host } else { Space::Device };
    Policy { tables_offloaded: trains_base, optimizer_state: state, gradients: state, ..policy }
}

/// The two numbers of layers that [`super::choices::Freedom::with_count`] sets.
const RECOMPUTED: usize = 0;
const OFFLOADED: usize = 1;

fn fits(size: &Size, policy: &Policy) -> bool {
    size.is_within(&size.measure(policy))
}

/// Measures the policy with the fewest recomputed or offloaded layers whose bytes are within the budget of the device, and
/// returns whether it fits.
fn fewest_layers(size: &Size, which: usize, start: &Policy) -> bool {
    let with = |count: usize| size.freedom.with_count(which, start, count);
    let bytes = |count: usize| size.measure(&with(count)).bytes as f64;
    let budget = size.question.budget.device_bytes as f64;
    let (mut few, mut many) = (0, size.freedom.layers);
    if bytes(few) <= budget || bytes(many) > budget {
        return fits(size, &with(few));
    }
    // The first layer of a kind needs room of its own, so the line starts behind it.
    few = 1;
    for _ in 0..MOST_STEPS {
        let (above, below) = (bytes(few), bytes(many));
        let share = (above - budget) / (above - below);
        let count = few + ((many - few) as f64 * share).ceil() as usize;
        if !(few + 1..many).contains(&count) {
            break;
        }
        if bytes(count) <= budget { many = count } else { few = count }
    }
    fits(size, &with(many))
}

/// Points of a line that are tried.
const MOST_STEPS: usize = 3;
