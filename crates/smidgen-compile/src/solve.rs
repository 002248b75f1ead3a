//! The solver: the fastest policy whose plan fits the budget, for training, evaluation and generation alike.
//!
//! Candidates are micro-batch sizes from the whole batch down to the longest sample. At each size a policy is described by
//! a point (`choices.rs`). Sketches (`sketch.rs`) rank the points of all sizes; the best are measured, and the search for
//! mixtures starts from them (`improve.rs`). If effort is left, or if there are no sketches, it also starts from the lowest
//! rungs that fit of ladders of points (`ladder.rs`). Sketches only say where to search: every candidate is scheduled and
//! measured, and the returned plan is packed and checked. Only memory choices are searched, so no result changes.

use crate::attempt::{Attempt, Measured, SearchState, Seen};
use crate::breadth_search::search_breadth_first;
use crate::choices::Point;
use crate::improve::{improve, offload_less};
use crate::lean::{Leanest, leanest};
use crate::model::spec::HEAD;
use crate::propose::propose;
use crate::purposes::{choices_of, pins_for};
use crate::question::{Budget, Demand, Question};
use crate::request::Purpose;
use crate::sketch::Sketches;
use crate::solution::{Price, Reason, Solution, SolveError, Why};
use smidgen_ir::policy::{Pins, Policy, Sharding};
use smidgen_ir::{Choice, Plan, Rank};

/// The fastest plan that fits, or as the error the leanest plan if none fits.
///
/// With several ranks, what is divided over them is one more choice. Each alternative is solved separately, from the one
/// that divides least, until a plan saves no memory at all.
pub fn solve(question: &Question) -> Result<Solution, SolveError> {
    let choices = shardings(question.purpose, question.request.rank, question.pins);
    let mut best: Option<Result<Solution, SolveError>> = None;
    for sharding in choices {
        let pins = sharded_pins(question, sharding);
        let found = solve_one(&Question { pins: &pins, ..*question });
        let saves_nothing = found.as_ref().is_ok_and(|found| found.policy.saves_nothing());
        best = Some(match (best, found) {
            (None, found) => found,
            (Some(Ok(best)), Ok(found)) if found.step_ms * AS_FAST < best.step_ms => Ok(found),
            (Some(Err(_)), Ok(found)) => Ok(found),
            (Some(Err(best)), Err(found)) if found.leanest.peak_bytes < best.leanest.peak_bytes => Err(found),
            (Some(best), _) => best,
        });
        if saves_nothing {
            break;
        }
    }
    best.expect("there is an alternative")
}

/// The alternatives for what to divide over ranks, the one that divides least first.
pub(crate) fn shardings(purpose: Purpose, rank: Rank, pins: &Pins) -> Vec<Sharding> {
    match (rank.is_only(), pins.sharding, purpose) {
        (true, ..) => vec![Sharding::None],
        (_, Some(pinned), _) => vec![pinned],
        (_, None, Purpose::Training) => Sharding::ALL.to_vec(),
        (_, None, _) => vec![Sharding::None, Sharding::Weights],
    }
}

/// The pins of a question with one alternative. If a user pins that weights are divided, all of them are.
pub(crate) fn sharded_pins(question: &Question, sharding: Sharding) -> Pins {
    let all_weights = question.pins.sharding == Some(Sharding::Weights) && !question.request.rank.is_only();
    question.pins.with_divided(sharding, all_weights)
}

fn solve_one(question: &Question) -> Result<Solution, SolveError> {
    assert!(!question.demands.is_empty(), "a question has at least one demand");
    let pins = pins_for(question.purpose, question.pins);
    let question = &Question { pins: &pins, ..*question };
    let state = SearchState::default();
    let attempt = |demand: &Demand| Attempt::new(question, demand, &state);
    let attempts: Vec<Attempt> = question.demands.iter().map(attempt).collect();
    if let Some(error) = refused_early(&attempts, question.budget) {
        return Err(error);
    }
    let sketches = if question.purpose == Purpose::Training { Sketches::of(&attempts) } else { None };
    let ms = |chosen: &Option<Chosen>| chosen.as_ref().map_or(f64::INFINITY, Chosen::step_ms);
    let mut best: Option<Chosen> = None;
    for _ in 0..MOST_SEARCHES {
        let (found, packing_bytes) = search_and_choose(&attempts, sketches.as_ref());
        if ms(&found) < ms(&best) {
            best = found;
        }
        attempts.iter().for_each(|attempt| attempt.leave_for_packing(packing_bytes));
        if packing_bytes == 0 {
            break;
        }
    }
    let Some(Chosen { attempt, policy, plan }) = best else {
        let least = leanest_of_all(&attempts, question.budget.offload_bytes);
        return Err(refusal(&attempts, question.budget, least));
    };
    let prices = prices(attempt, &policy);
    Ok(Solution { prices, ..solution(attempt, plan, policy) })
}

/// The result of one search. Also returns how many bytes packing adds to the fastest schedule, if its packed plan does not
/// fit and the chosen plan is much slower; 0 otherwise.
fn search_and_choose<'a>(
    attempts: &'a [Attempt<'a>],
    sketches: Option<&Sketches>,
) -> (Option<Chosen<'a>>, u64) {
    search(attempts, sketches);
    let best_ms = attempts.iter().map(Attempt::fastest_ms).fold(f64::INFINITY, f64::min);
    lessen(attempts, best_ms);
    let (chosen, packing_bytes) = choose(attempts);
    let is_slow = |chosen: &Option<Chosen>| {
        chosen.as_ref().is_none_or(|chosen| chosen.step_ms() > MUCH_SLOWER * best_ms)
    };
    if packing_bytes == 0 || is_slow(&chosen) {
        return (chosen, packing_bytes);
    }
    // The point that offloads least does not fit when it is packed, and the next one may offload far more.
    attempts.iter().for_each(|attempt| attempt.leave_for_packing(packing_bytes));
    lessen(attempts, best_ms);
    let (lessened, _) = choose(attempts);
    (if is_slow(&lessened) { chosen } else { lessened }, 0)
}

/// Searches for points that offload less than the first of the ranked ones, and are about as fast.
fn lessen(attempts: &[Attempt], best_ms: f64) {
    for _ in 0..MOST_LESSENED {
        let first = ranked(attempts).into_iter().next();
        let Some((attempt, Seen { policy, point: Some(point), .. })) = first else { break };
        offload_less(attempt, point, AS_FAST * best_ms);
        if ranked(attempts).first().is_none_or(|(_, first)| first.policy == policy) {
            break;
        }
    }
}

/// Peak bytes and milliseconds per step of the smallest plan that keeps everything on the device and takes at most
/// `most_ms`, regardless of pins and budget.
pub fn smallest_resident(question: &Question, most_ms: f64) -> Option<(u64, f64)> {
    let (state, budget) = (SearchState::default(), Budget::device(u64::MAX));
    let pins = pins_for(question.purpose, &Pins::default());
    let open = Question { pins: &pins, budget, ..*question };
    question.demands.iter().rev().find_map(|demand| {
        let attempt = Attempt::new(&open, demand, &state);
        let start = attempt.freedom.start();
        let ms = attempt.measure(&start).ms;
        let peak_bytes = || attempt.packed_peak_bytes(&attempt.freedom.policy(&start), budget);
        (ms <= most_ms).then(peak_bytes).flatten().map(|peak_bytes| (peak_bytes, ms))
    })
}

/// The error if a search would find nothing: neither the fastest nor the usually leanest point may fit, and the leanest
/// plan does not.
fn refused_early(attempts: &[Attempt], budget: Budget) -> Option<SolveError> {
    let (largest, smallest) = (attempts.first()?, attempts.last()?);
    let effort_before = smallest.effort_steps();
    let is_promising = largest.is_within(&largest.measure(&largest.freedom.start()))
        || smallest.is_within(&smallest.measure(&smallest.freedom.leanest()));
    let least = if is_promising { None } else { leanest_of_all(attempts, budget.offload_bytes) };
    // This does not count towards the effort of the search.
    smallest.set_effort_steps(effort_before);
    let fits = least.as_ref().is_some_and(|(_, least)| least.peak_bytes <= budget.device_bytes);
    (!is_promising && !fits).then(|| refusal(attempts, budget, least))
}

/// The leanest policy of all sizes, with its size.
fn leanest_of_all<'a>(
    attempts: &'a [Attempt<'a>],
    most_offloaded_bytes: u64,
) -> Option<(&'a Attempt<'a>, Leanest)> {
    let smallest = attempts.last()?;
    let smallest_with_tiles = attempts.iter().rev().find(|attempt| attempt.freedom.has_tiles());
    // A size that contains the smallest needs more, unless it can be tiled and the smallest cannot.
    let may_need_less = |attempt: &&'a Attempt<'a>| {
        attempt.demand == smallest.demand
            || smallest_with_tiles.is_some_and(|with_tiles| attempt.demand == with_tiles.demand)
            || !attempt.demand.extent.contains(&smallest.demand.extent)
    };
    let all = attempts.iter().filter(may_need_less);
    let found = all.filter_map(|attempt| Some((attempt, leanest(attempt, most_offloaded_bytes)?)));
    found.min_by_key(|(_, least)| least.peak_bytes)
}

/// Measures the points that are likely to be fast and to fit.
fn search(attempts: &[Attempt], sketches: Option<&Sketches>) {
    let found = sketches.map(|sketches| propose(attempts, sketches)).unwrap_or_default();
    let mut improved: Vec<usize> = Vec::new();
    for (size, point, _) in &found {
        if improved.len() < MOST_PROPOSED && !improved.contains(size) {
            improve(&attempts[*size], *point);
            improved.push(*size);
        }
    }
    if found.is_empty() || !attempts[0].is_spent(SHARE_OF_LADDERS) {
        search_ladders(attempts);
    }
    if attempts[0].question.purpose == Purpose::Training {
        search_breadth_first(attempts);
    }
}

/// Searches ladders size by size, from both ends towards the best so far, and mixtures around the rungs that fit.
fn search_ladders(attempts: &[Attempt]) {
    // The fastest candidate of each size that was searched.
    let mut fastest_ms: Vec<Option<f64>> = vec![None; attempts.len()];
    let mut rungs: Vec<Vec<Point>> = vec![vec![]; attempts.len()];
    let mut end = attempts.len();
    while let Some(index) = next_size(&fastest_ms[..end]) {
        let attempt = &attempts[index];
        if attempt.is_spent(SHARE_OF_LADDERS) && fastest_ms.iter().flatten().count() > 1 {
            break;
        }
        if attempt.is_within(&attempt.measure(&attempt.freedom.start())) {
            // A smaller micro-batch that also keeps everything is never faster.
            end = index + 1;
        } else {
            let chunks = attempt.freedom.largest_and_smallest_chunk();
            let found = chunks.into_iter().map(|chunk| attempt.lowest_rungs(chunk));
            rungs[index] = found.into_iter().find(|rungs| !rungs.is_empty()).unwrap_or_default();
        }
        fastest_ms[index] = Some(attempt.fastest_ms());
    }
    let mut order: Vec<usize> = (0..end).filter(|index| !rungs[*index].is_empty()).collect();
    order.sort_by(|one, other| attempts[*one].fastest_ms().total_cmp(&attempts[*other].fastest_ms()));
    for index in order {
        let attempt = &attempts[index];
        let best_ms = attempts.iter().map(Attempt::fastest_ms).fold(f64::INFINITY, f64::min);
        let is_hopeless = attempt.measure(&attempt.freedom.start()).ms >= best_ms;
        rungs[index].sort_by(|one, other| attempt.measure(one).ms.total_cmp(&attempt.measure(other).ms));
        // Starts from the lowest rungs, and from the fastest of them with everything streamed.
        let streamed = attempt.freedom.all_streamed(rungs[index][0]);
        let points = rungs[index].iter().chain([&streamed]).filter(|_| !is_hopeless);
        points
            .filter(|point| attempt.is_within(&attempt.measure(point)))
            .for_each(|point| improve(attempt, *point));
    }
}

/// Most sizes at which mixtures are searched around a proposed point.
const MOST_PROPOSED: usize = 3;
/// Share of the effort that ladders may use; the rest is for mixtures.
const SHARE_OF_LADDERS: f64 = 0.5;

/// The size to search next, if any is left: first the ends, then the middle of the widest gap, preferring gaps next to the
/// best size.
fn next_size(fastest_ms: &[Option<f64>]) -> Option<usize> {
    let last = fastest_ms.len() - 1;
    if let Some(end) = [0, last].into_iter().find(|end| fastest_ms[*end].is_none()) {
        return Some(end);
    }
    let known: Vec<(usize, f64)> =
        fastest_ms.iter().enumerate().filter_map(|(index, ms)| ms.map(|ms| (index, ms))).collect();
    let (best, _) = known.iter().copied().min_by(|one, other| one.1.total_cmp(&other.1))?;
    let gaps = known.windows(2).map(|pair| (pair[0].0, pair[1].0)).filter(|(from, to)| to - from > 1);
    let widest = gaps.max_by_key(|(from, to)| (*from == best || *to == best, to - from));
    widest.map(|(from, to)| from.midpoint(to))
}

/// Up to this ratio of their times, two plans count as equally fast, and the one that transfers and offloads less is
/// preferred.
pub const AS_FAST: f64 = 1.03;
/// Above this ratio to the time of the fastest schedule, a plan is worth another search that leaves room for packing.
const MUCH_SLOWER: f64 = AS_FAST + 0.01;
const MOST_SEARCHES: usize = 3;
/// Most points from which a search for less offloading starts: the result of one may be worse than another point.
const MOST_LESSENED: usize = 3;

/// A plan that fits.
struct Chosen<'a> {
    attempt: &'a Attempt<'a>,
    policy: Policy,
    plan: Plan,
}

impl Chosen<'_> {
    fn step_ms(&self) -> f64 {
        1e3 * self.attempt.step_seconds(&self.plan)
    }
}

/// Every measured policy that may fit: first those that are about as fast as the fastest, by the bytes that they transfer
/// per step and offload, both as shares of the fastest's; then the rest by their time.
fn ranked<'a>(attempts: &'a [Attempt<'a>]) -> Vec<(&'a Attempt<'a>, Seen)> {
    let of = |attempt: &'a Attempt<'a>| attempt.candidates().into_iter().map(move |seen| (attempt, seen));
    let mut all: Vec<_> = attempts.iter().flat_map(of).collect();
    all.sort_by(|(_, one), (_, other)| one.measured.ms.total_cmp(&other.measured.ms));
    let Some(fastest) = all.first().map(|(_, seen)| seen.measured) else { return all };
    let as_fast = all.partition_point(|(_, seen)| seen.measured.ms <= AS_FAST * fastest.ms);
    let burden = |measured: &Measured| {
        let offloaded = measured.offloaded_bytes as f64 / fastest.offloaded_bytes.max(1) as f64;
        measured.moved_bytes / fastest.moved_bytes.max(1.0) + offloaded
    };
    all[..as_fast].sort_by(|(_, one), (_, other)| {
        let (one, other) = (one.measured, other.measured);
        burden(&one).total_cmp(&burden(&other)).then(one.ms.total_cmp(&other.ms))
    });
    all
}

/// The first of the ranked policies whose packed plan fits. Also returns how many bytes packing adds to the very first one,
/// if that does not fit.
fn choose<'a>(attempts: &'a [Attempt<'a>]) -> (Option<Chosen<'a>>, u64) {
    let all = ranked(attempts);
    let mut packing_bytes = 0;
    // The first almost always fits, so it is compiled right away; the others are packed before they are compiled.
    if let Some((attempt, seen)) = all.first() {
        let plan = attempt.compile(&seen.policy);
        if attempt.holds(&plan) {
            return (Some(Chosen { attempt, policy: seen.policy.clone(), plan }), 0);
        }
        packing_bytes = attempt.peak_bytes(&plan).saturating_sub(seen.measured.bytes);
    }
    let mut others = all.into_iter().skip(1);
    let other = others.find(|(attempt, seen)| attempt.packs(&seen.policy));
    let found = other.map(|(attempt, seen)| (attempt, seen.policy)).or_else(|| {
        let chunks =
            |attempt: &'a Attempt<'a>| attempt.freedom.chunks().iter().map(move |chunk| (attempt, *chunk));
        let mut rungs = attempts.iter().flat_map(chunks);
        rungs.find_map(|(attempt, chunk)| Some((attempt, attempt.lowest_packed(chunk)?)))
    });
    let found = found.or_else(|| {
        let budget = attempts.first()?.question.budget;
        let (attempt, least) = leanest_of_all(attempts, budget.offload_bytes)?;
        (least.peak_bytes <= budget.device_bytes).then_some((attempt, least.policy))
    });
    let chosen = found.map(|(attempt, policy)| Chosen { attempt, plan: attempt.compile(&policy), policy });
    (chosen, packing_bytes)
}

/// The error if nothing fits. It carries the leanest plan `within` the limit for offloading, or the leanest of all if that
/// would fit without the limit.
fn refusal(attempts: &[Attempt], budget: Budget, within: Option<(&Attempt, Leanest)>) -> SolveError {
    let unlimited = match budget.offload_bytes {
        u64::MAX => None,
        _ => leanest_of_all(attempts, u64::MAX),
    };
    let is_offload_short = within.is_none()
        || unlimited.as_ref().is_some_and(|(_, least)| least.peak_bytes <= budget.device_bytes);
    let (attempt, least) =
        unlimited.filter(|_| is_offload_short).or(within).expect("without a limit there is a leanest policy");
    let plan = attempt.compile(&least.policy);
    let leanest = Box::new(solution(attempt, plan, least.policy));
    SolveError { budget_bytes: budget.device_bytes, leanest }
}

fn solution(attempt: &Attempt, plan: Plan, policy: Policy) -> Solution {
    let (peak_bytes, context_bytes) = (attempt.peak_bytes(&plan), attempt.question.context.bytes_for(&plan));
    let reasons = reasons(attempt, &policy, peak_bytes);
    let step_ms = 1e3 * attempt.step_seconds(&plan);
    let (demand, prices) = (attempt.demand, vec![]);
    Solution { plan, policy, demand, peak_bytes, context_bytes, step_ms, reasons, prices }
}

/// What each choice of a policy saves and costs, compared by schedules.
fn prices(attempt: &Attempt, policy: &Policy) -> Vec<Price> {
    let measured = attempt.measure_policy(policy);
    let price = |choice: Choice| {
        let other = attempt.measure_policy(&policy.without(choice)?);
        let saved_bytes = other.bytes as i64 - measured.bytes as i64;
        Some(Price { choice, saved_bytes, cost_ms: measured.ms - other.ms })
    };
    choices_of(attempt.question.purpose).filter_map(price).collect()
}

/// The reasons for the choices that a policy uses, and for those that every plan has.
fn reasons(attempt: &Attempt, policy: &Policy, peak_bytes: u64) -> Vec<Reason> {
    let (pins, budget_bytes) = (attempt.question.pins, attempt.question.budget.device_bytes);
    let chosen = match peak_bytes <= budget_bytes {
        true => Why::FastestWithin { budget_bytes },
        false => Why::NeedsLeast { peak_bytes },
    };
    let has_adapter = attempt.request.adapters.iter().any(|module| module.path == HEAD);
    let reason = |choice: Choice| {
        let why = match (choice, policy.without(choice).is_some()) {
            (Choice::HeadPieces, false) if policy.offloads_table(false, true) && has_adapter => {
                Why::HeadHasAdapter
            }
            (Choice::Recompute | Choice::MicroBatch | Choice::LossChunk, _) | (_, true)
                if pins.is_pinned(choice) =>
            {
                Why::Pinned
            }
            (Choice::Recompute, false) if !policy.offloads_activations() => Why::Fits,
            (Choice::Recompute | Choice::MicroBatch | Choice::LossChunk, _) | (_, true) => chosen,
            (_, false) => return None,
        };
        Some(Reason { choice, why })
    };
    choices_of(attempt.question.purpose).filter_map(reason).collect()
}
