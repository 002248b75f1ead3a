//! The budget: the fastest policy whose plan fits.
//!
//! Candidates are micro-batch sizes from the whole batch down to the longest sample. At each there are ladders of
//! choices from the fastest to the leanest; the lowest rungs that fit are where the search for mixtures begins
//! (`improve.rs`). Small models have every size searched, large ones those around the best until an effort is spent.
//! Every candidate is scheduled and measured by its own steps, never estimated, and what is returned is packed and
//! checked. Only memory choices are searched: nothing here changes a result.

use crate::attempt::{Attempt, Workshop};
use crate::context::Context;
use crate::improve::improve;
use crate::ladder::{Choices, Freedom};
use crate::lean::{Leanest, leanest};
use crate::model::spec::HEAD;
use crate::profile::Profile;
use crate::question::{Budget, Demand, Pins};
use crate::request::{Away, Policy, Recompute, Request, default_loss_chunk};
use crate::solution::{Choice, Price, Reason, Solution, SolveError, Why};
use crate::stages::compile;
use smidgen_ir::Plan;

/// Plans the request for the fastest of `demands` (largest micro-batch first) under a budget.
pub fn solve(
    request: &Request,
    demands: &[Demand],
    pins: &Pins,
    context: Context,
    budget: Budget,
    profile: &Profile,
) -> Result<Solution, SolveError> {
    assert!(!demands.is_empty(), "solve needs at least one demand");
    let (workshop, freedom) = (Workshop::default(), Freedom::of(request, pins));
    let attempt = |demand: &Demand| {
        let chunks = loss_chunks(&Request { extent: demand.extent, ..request.clone() }, pins);
        Attempt::new(request, demand, freedom.clone(), chunks, (context, budget, profile), &workshop)
    };
    let attempts: Vec<Attempt> = demands.iter().map(attempt).collect();
    if let Some(error) = refused_at_once(&attempts, budget) {
        return Err(error);
    }
    search(&attempts);
    let Some((attempt, policy, plan)) = settle(&attempts) else {
        return Err(refusal(&attempts, budget, leanest_of_all(&attempts, budget.elsewhere_bytes)));
    };
    let prices = prices(attempt, &policy);
    Ok(Solution { prices, ..solution(attempt, plan, policy) })
}

/// What the fastest of all policies takes, which keeps everything on the device, and how long its step is.
pub fn roomiest(request: &Request, demand: &Demand, context: Context, profile: &Profile) -> (u64, f64) {
    let (workshop, pins, budget) = (Workshop::default(), Pins::default(), Budget::device(u64::MAX));
    let chunks = loss_chunks(&Request { extent: demand.extent, ..request.clone() }, &pins);
    let freedom = Freedom::of(request, &pins);
    let attempt = Attempt::new(request, demand, freedom, chunks, (context, budget, profile), &workshop);
    let start = attempt.start();
    let peak_bytes = attempt.packed_peak_bytes(&attempt.freedom.policy(&start), budget);
    (peak_bytes.expect("there is no limit"), attempt.taken(&start).ms)
}

/// What plans by one policy take at sizes of micro-batch, where they fit.
pub fn peaks_by<'a>(
    request: &'a Request,
    policy: &'a Policy,
    context: Context,
    budget: Budget,
) -> impl Fn(&Demand) -> Option<u64> + 'a {
    let workshop = Workshop::default();
    let pins = Pins { policy: Some(policy.clone()), ..Pins::default() };
    // Nobody asks for the time.
    let profile = Profile::cpu(request.threads, request.precision);
    move |demand| {
        let (freedom, chunks) = (Freedom::of(request, &pins), vec![policy.loss_chunk]);
        let attempt = Attempt::new(request, demand, freedom, chunks, (context, budget, &profile), &workshop);
        attempt.packed_peak_bytes(policy, budget)
    }
}

/// Whether any policy fits, which takes less time than finding the fastest: the leanest is looked at.
pub fn can_fit(
    request: &Request,
    demand: &Demand,
    pins: &Pins,
    context: Context,
    budget: Budget,
    profile: &Profile,
) -> bool {
    let (workshop, freedom) = (Workshop::default(), Freedom::of(request, pins));
    let chunks = loss_chunks(&Request { extent: demand.extent, ..request.clone() }, pins);
    let attempt = Attempt::new(request, demand, freedom, chunks, (context, budget, profile), &workshop);
    attempt.packs(&attempt.freedom.policy(&attempt.leanest_choices()))
        || leanest(&attempt, budget.elsewhere_bytes)
            .is_some_and(|least| least.peak_bytes <= budget.device_bytes)
}

/// The error where no search would find anything: neither what keeps everything nor what is mostly leanest may fit, and
/// the leanest plan does not.
fn refused_at_once(attempts: &[Attempt], budget: Budget) -> Option<SolveError> {
    let may_fit = |attempt: &Attempt, choices: &Choices| attempt.is_within(&attempt.taken(choices));
    let (largest, smallest) = (attempts.first()?, attempts.last()?);
    let effort_before = smallest.effort_steps();
    let is_promising = may_fit(largest, &largest.start()) || may_fit(smallest, &smallest.leanest_choices());
    let least = if is_promising { None } else { leanest_of_all(attempts, budget.elsewhere_bytes) };
    // The search has all of its effort.
    smallest.set_effort_steps(effort_before);
    let fits = least.as_ref().is_some_and(|(_, least)| least.peak_bytes <= budget.device_bytes);
    (!is_promising && !fits).then(|| refusal(attempts, budget, least))
}

/// The leanest policy at the size that needs least.
fn leanest_of_all<'a>(
    attempts: &'a [Attempt<'a>],
    most_elsewhere_bytes: u64,
) -> Option<(&'a Attempt<'a>, Leanest)> {
    let smallest = attempts.last()?;
    let has_tiles = |attempt: &Attempt| attempt.freedom.tile(attempt.demand.extent.tokens).is_some();
    let smallest_with_tiles = attempts.iter().rev().find(|attempt| has_tiles(attempt));
    // Where another size has more of everything, it needs more, unless it is worked on in tiles and this is not.
    let may_need_less = |attempt: &&'a Attempt<'a>| {
        attempt.demand == smallest.demand
            || smallest_with_tiles.is_some_and(|with_tiles| attempt.demand == with_tiles.demand)
            || !attempt.demand.extent.contains(&smallest.demand.extent)
    };
    let all = attempts.iter().filter(may_need_less);
    let found = all.filter_map(|attempt| Some((attempt, leanest(attempt, most_elsewhere_bytes)?)));
    found.min_by_key(|(_, least)| least.peak_bytes)
}

/// Measures what promises to be fast. Sizes are looked at from both ends towards the best so far, all of them
/// where the model is small.
fn search(attempts: &[Attempt]) {
    let mut looked_at: Vec<Option<f64>> = vec![None; attempts.len()];
    let mut rungs: Vec<Vec<Choices>> = vec![vec![]; attempts.len()];
    let mut end = attempts.len();
    while let Some(index) = next_size(&looked_at[..end]) {
        let attempt = &attempts[index];
        if attempt.is_spent(SHARE_OF_LADDERS) && looked_at.iter().flatten().count() > 1 {
            break;
        }
        if attempt.is_within(&attempt.taken(&attempt.start())) {
            // A smaller micro-batch that also keeps everything is never faster.
            end = index + 1;
        } else {
            let chunks = [Some(attempt.chunks[0]), attempt.chunks[1..].last().copied()];
            let found = chunks.into_iter().flatten().map(|chunk| attempt.lowest_rungs(chunk));
            rungs[index] = found.into_iter().find(|rungs| !rungs.is_empty()).unwrap_or_default();
        }
        looked_at[index] = Some(fastest_ms(attempt));
    }
    let mut order: Vec<usize> = (0..end).filter(|index| !rungs[*index].is_empty()).collect();
    order.sort_by(|one, other| fastest_ms(&attempts[*one]).total_cmp(&fastest_ms(&attempts[*other])));
    for index in order {
        let attempt = &attempts[index];
        let best_ms = attempts.iter().map(fastest_ms).fold(f64::INFINITY, f64::min);
        let is_hopeless = attempt.taken(&attempt.start()).ms >= best_ms;
        rungs[index].sort_by(|one, other| attempt.taken(one).ms.total_cmp(&attempt.taken(other).ms));
        // The ladders' best, and the first of them with everything away, from where the same is bought back in
        // another order.
        let leaner = Choices {
            weights_away: attempt.freedom.layers,
            tables_away: true,
            moments_away: true,
            window_layers: 1,
            ..rungs[index][0]
        };
        let points = rungs[index].iter().chain([&leaner]).filter(|_| !is_hopeless);
        points
            .filter(|point| attempt.is_within(&attempt.taken(point)))
            .for_each(|point| improve(attempt, *point));
    }
}

/// Of all effort; the rest is for mixtures.
const SHARE_OF_LADDERS: f64 = 0.5;

fn fastest_ms(attempt: &Attempt) -> f64 {
    attempt.candidates().first().map_or(f64::INFINITY, |(_, taken)| taken.ms)
}

/// The size to look at next, if any is left: the ends, then the middle of the widest gap, those beside the best first.
fn next_size(looked_at: &[Option<f64>]) -> Option<usize> {
    let last = looked_at.len() - 1;
    if let Some(end) = [0, last].into_iter().find(|end| looked_at[*end].is_none()) {
        return Some(end);
    }
    let known: Vec<(usize, f64)> =
        looked_at.iter().enumerate().filter_map(|(index, ms)| ms.map(|ms| (index, ms))).collect();
    let (best, _) = known.iter().copied().min_by(|one, other| one.1.total_cmp(&other.1))?;
    let gaps = known.windows(2).map(|pair| (pair[0].0, pair[1].0)).filter(|(from, to)| to - from > 1);
    let widest = gaps.max_by_key(|(from, to)| (*from == best || *to == best, to - from));
    widest.map(|(from, to)| from.midpoint(to))
}

/// The fastest of what was measured that also fits when it is packed, with its plan, through every check.
fn settle<'a>(attempts: &'a [Attempt<'a>]) -> Option<(&'a Attempt<'a>, Policy, Plan)> {
    let of = |attempt: &'a Attempt<'a>| {
        attempt.candidates().into_iter().map(move |(policy, taken)| (taken, attempt, policy))
    };
    let mut all: Vec<_> = attempts.iter().flat_map(of).collect();
    all.sort_by(|one, other| {
        one.0.ms.total_cmp(&other.0.ms).then(one.0.elsewhere_bytes.cmp(&other.0.elsewhere_bytes))
    });
    // Almost always the first fits, so that its plan need not be made twice; of others it is asked first.
    if let Some((_, attempt, policy)) = all.first() {
        let plan = compile(&attempt.request, policy);
        if attempt.holds(&plan) {
            return Some((attempt, policy.clone(), plan));
        }
    }
    let mut others = all.into_iter().skip(1);
    let other = others.find(|(_, attempt, policy)| attempt.packs(policy));
    let found = other.map(|(_, attempt, policy)| (attempt, policy)).or_else(|| {
        let chunks = |attempt: &'a Attempt<'a>| attempt.chunks.iter().map(move |chunk| (attempt, *chunk));
        let mut rungs = attempts.iter().flat_map(chunks);
        rungs.find_map(|(attempt, chunk)| Some((attempt, attempt.lowest_packed(chunk)?)))
    });
    let (attempt, policy) = found.or_else(|| {
        let budget = attempts.first()?.budget;
        let (attempt, least) = leanest_of_all(attempts, budget.elsewhere_bytes)?;
        (least.peak_bytes <= budget.device_bytes).then_some((attempt, least.policy))
    })?;
    let plan = compile(&attempt.request, &policy);
    Some((attempt, policy, plan))
}

/// What is told where nothing fits: the leanest plan. Where it would fit but for what it has elsewhere, that plan.
fn refusal(attempts: &[Attempt], budget: Budget, within: Option<(&Attempt, Leanest)>) -> SolveError {
    let anywhere = match budget.elsewhere_bytes {
        u64::MAX => None,
        _ => leanest_of_all(attempts, u64::MAX),
    };
    let is_short_elsewhere = within.is_none()
        || anywhere.as_ref().is_some_and(|(_, least)| least.peak_bytes <= budget.device_bytes);
    let (attempt, least) =
        anywhere.filter(|_| is_short_elsewhere).or(within).expect("a policy takes something");
    let plan = compile(&attempt.request, &least.policy);
    let leanest = Box::new(solution(attempt, plan, least.policy));
    SolveError { budget_bytes: budget.device_bytes, leanest }
}

/// Rows of logits to try: the usual number, then halves of it down to the fewest.
fn loss_chunks(request: &Request, pins: &Pins) -> Vec<usize> {
    const FEWEST_ROWS: usize = 32;
    if let Some(pinned) = pins.policy.as_ref().map(|policy| policy.loss_chunk).or(pins.loss_chunk) {
        return vec![pinned];
    }
    let usual = default_loss_chunk(request.device, request.spec.vocabulary, request.extent.rows);
    let half = |rows: &usize| (*rows > FEWEST_ROWS).then_some((rows / 2).max(FEWEST_ROWS));
    std::iter::successors(Some(usual), half).collect()
}

fn solution(attempt: &Attempt, plan: Plan, policy: Policy) -> Solution {
    let (peak_bytes, context_bytes) = (attempt.peak_bytes(&plan), attempt.context.bytes_for(&plan));
    let reasons = reasons(attempt, &policy, peak_bytes);
    let step_ms = 1e3 * attempt.step_seconds(&plan);
    let (demand, prices) = (attempt.demand, vec![]);
    Solution { plan, policy, demand, peak_bytes, context_bytes, step_ms, reasons, prices }
}

/// What each choice of a policy saves and costs, before packing.
fn prices(attempt: &Attempt, policy: &Policy) -> Vec<Price> {
    let away = &policy.away;
    let without = |change: Away| Policy { away: change, ..policy.clone() };
    let no_weights = Away { weights: vec![], tables: false, head_pieces: 0, ..away.clone() };
    let choices = [
        (Choice::Recompute, Policy { recompute: Recompute::none(), ..policy.clone() }),
        (Choice::Weights, without(no_weights)),
        (Choice::HeadPieces, without(Away { head_pieces: 0, ..away.clone() })),
        (Choice::Embedding, without(Away { embedding: false, ..away.clone() })),
        (Choice::Activations, without(Away { activations: vec![], ..away.clone() })),
        (Choice::Tiles, Policy { tile_tokens: None, ..policy.clone() }),
        (Choice::OptimizerState, without(Away { moments: false, ..away.clone() })),
    ];
    let taken = attempt.taken_by(policy);
    let price = |(choice, other): (Choice, Policy)| {
        let other = attempt.taken_by(&other);
        let saved_bytes = other.bytes as i64 - taken.bytes as i64;
        Price { choice, saved_bytes, cost_ms: taken.ms - other.ms }
    };
    choices.into_iter().filter(|(choice, _)| is_active(*choice, policy)).map(price).collect()
}

/// Whether a policy makes use of a choice.
fn is_active(choice: Choice, policy: &Policy) -> bool {
    let away = &policy.away;
    match choice {
        Choice::MicroBatch | Choice::LossChunk => true,
        Choice::Recompute => !policy.recompute.layers.is_empty(),
        Choice::Tiles => policy.tile_tokens.is_some(),
        Choice::Weights => !away.weights.is_empty() || away.tables,
        Choice::HeadPieces => away.head_pieces > 1,
        Choice::Embedding => away.embedding,
        Choice::Activations => !away.activations.is_empty(),
        Choice::OptimizerState => away.moments,
    }
}

/// One reason for each choice that a policy makes use of, and for those that every plan has.
fn reasons(attempt: &Attempt, policy: &Policy, peak_bytes: u64) -> Vec<Reason> {
    let (pins, budget_bytes) = (attempt.freedom.pins, attempt.budget.device_bytes);
    let chosen = match peak_bytes <= budget_bytes {
        true => Why::FastestWithin { budget_bytes },
        false => Why::NeedsLeast { peak_bytes },
    };
    let all = [
        (Choice::Recompute, pins.recompute.is_some()),
        (Choice::MicroBatch, false),
        (Choice::LossChunk, pins.loss_chunk.is_some()),
        (Choice::Tiles, pins.tile_tokens.is_some()),
        (Choice::Weights, pins.weights_away.is_some() || pins.tables_away.is_some()),
        (Choice::HeadPieces, false),
        (Choice::Embedding, false),
        (Choice::Activations, pins.activations_away.is_some()),
        (Choice::OptimizerState, pins.moments_away.is_some()),
    ];
    let has_adapter = attempt.request.adapters.iter().any(|module| module.path == HEAD);
    let reason = |(choice, is_pinned): (Choice, bool)| {
        let why = match (choice, is_active(choice, policy)) {
            (Choice::HeadPieces, false) if policy.away.tables && has_adapter => Why::HeadHasAdapter,
            (_, is_active)
                if (is_pinned || pins.policy.is_some()) && (is_active || choice == Choice::Recompute) =>
            {
                Why::Pinned
            }
            (Choice::Recompute, false) if policy.away.activations.is_empty() => Why::Fits,
            (Choice::Recompute, false) | (_, true) => chosen,
            (_, false) => return None,
        };
        Some(Reason { choice, why })
    };
    all.into_iter().filter_map(reason).collect()
}
