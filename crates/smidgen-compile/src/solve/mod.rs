//! The solver: the fastest policy whose plan fits the budget, for training, evaluation and generation alike.
//!
//! A table says what a layer of each class of equal layers needs if it is kept, recomputed, offloaded or both (`table.rs`).
//! For each size of micro-batch and each combination of the choices for all layers (`choices.rs`) the search tries sets of
//! recomputed and of offloaded layers, with the weights of the fewest layers offloaded with which they fit. A set is skipped
//! if the busiest of computation, copies in and copies out takes too long; else they are simulated (`lanes.rs`). The best
//! prediction is scheduled and corrects those of its kind, until none is better than what was found (`search.rs`).
//! Breadth-first order is searched by schedules (`breadth.rs`). Then the same search finds a plan that is about as fast, and
//! moves and offloads less. It is packed; if it does not fit, the search goes on with room for packing. If nothing fits, one
//! choice after the other is varied for the fewest bytes (`leanest.rs`). No result changes.

mod breadth;
pub mod choices;
mod descent;
pub mod fitting;
mod lanes;
mod leanest;
pub mod offloaded_weights;
mod purposes;
pub mod question;
mod quick;
mod rows;
mod search;
mod size;
pub mod solution;
mod table;

use self::breadth::search_breadth_first;
use self::leanest::{Leanest, leanest};
use self::purposes::{choices_of, pins_for};
use self::question::{Budget, Demand, Question};
pub use self::quick::{fits_with_little_offloaded, solve_quickly};
pub use self::search::AS_FAST;
use self::search::{Aim, Search};
use self::size::{Measured, SearchState, Seen, Size};
use self::solution::{Price, Reason, Solution, SolveError, Why};
use self::table::Table;
use crate::model::spec::HEAD;
use crate::request::Purpose;
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
    let size = |demand: &Demand| Size::new(question, demand, &state);
    let sizes: Vec<Size> = question.demands.iter().map(size).collect();
    if let Some(error) = refused_early(&sizes, question.budget) {
        return Err(error);
    }
    // A smaller micro-batch that also keeps everything is never faster.
    let keeps_all = sizes[0].is_within(&sizes[0].measure(&sizes[0].freedom.resident()));
    let table = if keeps_all { None } else { Some(Table::of(&sizes)) };
    let mut search = table.as_ref().map(|table| Search::of(&sizes, table));
    let best = search_and_choose(&sizes, search.as_mut());
    let Some(Chosen { size, policy, plan }) = best else {
        let least = leanest_of_all(&sizes, question.budget.offload_bytes);
        return Err(refusal(&sizes, question.budget, least));
    };
    let prices = prices(size, &policy);
    Ok(Solution { prices, ..solution(size, plan, policy) })
}

/// The best policy whose packed plan fits. If the first one needs too much when it is packed, the search goes on and leaves
/// room for what packing added.
fn search_and_choose<'a>(sizes: &'a [Size<'a>], mut search: Option<&mut Search>) -> Option<Chosen<'a>> {
    for turn in 0..MOST_SEARCHES {
        if let Some(search) = &mut search {
            search.run(Aim::Fastest);
            if turn == 0 && sizes[0].question.purpose == Purpose::Training {
                search_breadth_first(sizes);
            }
            if let Some(fastest) = fastest_of(sizes).filter(|fastest| fastest.offloaded_bytes > 0) {
                search.run(Aim::LeastMoved { fastest });
            }
        }
        let leaves_room =
            |measured: &Measured| search.as_ref().is_none_or(|search| search.leaves_room(measured));
        let mut candidates = ranked(sizes).into_iter();
        let first = candidates.find(|(_, seen)| leaves_room(&seen.measured));
        let Some((size, Seen { policy, measured })) = first else { break };
        if size.packs(&policy) {
            return Some(Chosen { size, plan: size.compile(&policy), policy });
        }
        if let Some(search) = &mut search {
            search.leave_for_packing(size.measure(&policy).bytes.saturating_sub(measured.bytes));
        }
    }
    let mut others = ranked(sizes).into_iter();
    let other = others.find(|(size, seen)| size.packs(&seen.policy)).map(|(size, seen)| (size, seen.policy));
    let (size, policy) = other.or_else(|| {
        let budget = sizes.first()?.question.budget;
        let (size, least) = leanest_of_all(sizes, budget.offload_bytes)?;
        (least.peak_bytes <= budget.device_bytes).then_some((size, least.policy))
    })?;
    Some(Chosen { size, plan: size.compile(&policy), policy })
}

/// The fastest candidate of all sizes.
fn fastest_of(sizes: &[Size]) -> Option<Measured> {
    let candidates = sizes.iter().flat_map(Size::candidates).map(|seen| seen.measured);
    candidates.min_by(|one, other| one.ms.total_cmp(&other.ms))
}

/// Peak bytes and milliseconds per step of the smallest plan that keeps everything on the device and takes at most
/// `most_ms`, regardless of pins and budget.
pub fn smallest_resident(question: &Question, most_ms: f64) -> Option<(u64, f64)> {
    let (state, budget) = (SearchState::default(), Budget::device(u64::MAX));
    let pins = pins_for(question.purpose, &Pins::default());
    let open = Question { pins: &pins, budget, ..*question };
    question.demands.iter().rev().find_map(|demand| {
        let size = Size::new(&open, demand, &state);
        let start = size.freedom.resident();
        let ms = size.measure(&start).ms;
        let peak_bytes = || size.packed_peak_bytes(&start, budget);
        (ms <= most_ms).then(peak_bytes).flatten().map(|peak_bytes| (peak_bytes, ms))
    })
}

/// The error if a search would find nothing: neither the fastest nor the usually leanest point may fit, and the leanest
/// plan does not.
fn refused_early(sizes: &[Size], budget: Budget) -> Option<SolveError> {
    let (largest, smallest) = (sizes.first()?, sizes.last()?);
    let effort_before = smallest.effort_steps();
    let is_promising = largest.is_within(&largest.measure(&largest.freedom.resident()))
        || smallest.is_within(&smallest.measure(&smallest.freedom.usually_leanest()));
    let least = if is_promising { None } else { leanest_of_all(sizes, budget.offload_bytes) };
    // This does not count towards the effort of the search.
    smallest.set_effort_steps(effort_before);
    let fits = least.as_ref().is_some_and(|(_, least)| least.peak_bytes <= budget.device_bytes);
    (!is_promising && !fits).then(|| refusal(sizes, budget, least))
}

/// The leanest policy of all sizes, with its size.
fn leanest_of_all<'a>(sizes: &'a [Size<'a>], most_offloaded_bytes: u64) -> Option<(&'a Size<'a>, Leanest)> {
    let smallest = sizes.last()?;
    let smallest_with_tiles = sizes.iter().rev().find(|size| size.freedom.tile().is_some());
    // A size that contains the smallest needs more, unless it can be tiled and the smallest cannot.
    let may_need_less = |size: &&'a Size<'a>| {
        size.demand == smallest.demand
            || smallest_with_tiles.is_some_and(|with_tiles| size.demand == with_tiles.demand)
            || !size.demand.extent.contains(&smallest.demand.extent)
    };
    let all = sizes.iter().filter(may_need_less);
    let found = all.filter_map(|size| Some((size, leanest(size, most_offloaded_bytes)?)));
    found.min_by_key(|(_, least)| least.peak_bytes)
}

/// Most searches that are made because the best plan of the one before did not fit when it was packed.
const MOST_SEARCHES: usize = 3;

/// A plan that fits.
struct Chosen<'a> {
    size: &'a Size<'a>,
    policy: Policy,
    plan: Plan,
}

/// Every measured policy that may fit: first those that are about as fast as the fastest, by the bytes that they transfer
/// per step and offload, both as shares of the fastest's; then the rest by their time.
fn ranked<'a>(sizes: &'a [Size<'a>]) -> Vec<(&'a Size<'a>, Seen)> {
    let of = |size: &'a Size<'a>| size.candidates().into_iter().map(move |seen| (size, seen));
    let mut all: Vec<_> = sizes.iter().flat_map(of).collect();
    all.sort_by(|(_, one), (_, other)| one.measured.ms.total_cmp(&other.measured.ms));
    let Some(fastest) = all.first().map(|(_, seen)| seen.measured) else { return all };
    let as_fast = all.partition_point(|(_, seen)| seen.measured.ms <= AS_FAST * fastest.ms);
    let aim = Aim::LeastMoved { fastest };
    let burden = |seen: &Seen| aim.of(&seen.measured).unwrap_or(f64::INFINITY);
    all[..as_fast].sort_by(|(_, one), (_, other)| {
        burden(one).total_cmp(&burden(other)).then(one.measured.ms.total_cmp(&other.measured.ms))
    });
    all
}

/// The error if nothing fits. It carries the leanest plan `within` the limit for offloading, or the leanest of all if that
/// would fit without the limit.
fn refusal(sizes: &[Size], budget: Budget, within: Option<(&Size, Leanest)>) -> SolveError {
    let unlimited = match budget.offload_bytes {
        u64::MAX => None,
        _ => leanest_of_all(sizes, u64::MAX),
    };
    let is_offload_short = within.is_none()
        || unlimited.as_ref().is_some_and(|(_, least)| least.peak_bytes <= budget.device_bytes);
    let (size, least) =
        unlimited.filter(|_| is_offload_short).or(within).expect("without a limit there is a leanest policy");
    let plan = size.compile(&least.policy);
    let leanest = Box::new(solution(size, plan, least.policy));
    SolveError { budget_bytes: budget.device_bytes, leanest }
}

fn solution(size: &Size, plan: Plan, policy: Policy) -> Solution {
    let (peak_bytes, context_bytes) = (size.peak_bytes(&plan), size.question.context.bytes_for(&plan));
    let reasons = reasons(size, &policy, peak_bytes);
    let step_ms = 1e3 * size.step_seconds(&plan);
    let (demand, prices) = (size.demand, vec![]);
    Solution { plan, policy, demand, peak_bytes, context_bytes, step_ms, reasons, prices }
}

/// What each choice of a policy saves and costs, compared by schedules.
fn prices(size: &Size, policy: &Policy) -> Vec<Price> {
    let measured = size.measure(policy);
    let price = |choice: Choice| {
        let other = size.measure(&policy.without(choice)?);
        let saved_bytes = other.bytes as i64 - measured.bytes as i64;
        Some(Price { choice, saved_bytes, cost_ms: measured.ms - other.ms })
    };
    choices_of(size.question.purpose).filter_map(price).collect()
}

/// The reasons for the choices that a policy uses, and for those that every plan has.
fn reasons(size: &Size, policy: &Policy, peak_bytes: u64) -> Vec<Reason> {
    let (pins, budget_bytes) = (size.question.pins, size.question.budget.device_bytes);
    let chosen = match peak_bytes <= budget_bytes {
        true => Why::FastestWithin { budget_bytes },
        false => Why::NeedsLeast { peak_bytes },
    };
    let has_adapter = size.request.adapters.iter().any(|module| module.path == HEAD);
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
    choices_of(size.question.purpose).filter_map(reason).collect()
}
