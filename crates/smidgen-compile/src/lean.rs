//! The least that any policy needs at one size of micro-batch.
//!
//! The search begins with points that offload and recompute what they can. From there one choice after the other is
//! varied, and what needs less is kept, until nothing does. On the way schedules are compared; in the end plans: of all
//! points seen, those whose schedule needs less than the leanest plan so far are packed; a few in breadth-first order are
//! among them. Budgets play no part, so the size that is stated where nothing fits is one that fits where it is the budget.

use crate::attempt::{Attempt, HEAD_REGION, OTHER_REGION, STEPS_OF_SMALL};
use crate::choices::{Freedom, Offload, Point};
use crate::counts::COUNTS;
use crate::question::Budget;
use smidgen_ir::policy::Policy;

/// A policy, and what its plan needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Leanest {
    pub policy: Policy,
    pub peak_bytes: u64,
}

/// The leanest policy that offloads at most this many bytes; none where every policy offloads more.
pub fn leanest(attempt: &Attempt, most_offloaded_bytes: u64) -> Option<Leanest> {
    let bytes = |point: &Point| {
        let measured = attempt.measure(point);
        if measured.offloaded_bytes <= most_offloaded_bytes { measured.bytes } else { u64::MAX }
    };
    let effort_before = attempt.effort_steps();
    let first = attempt.freedom.leanest();
    let measured = attempt.measure(&first);
    // Where not everything can be offloaded, the search also has to find what is.
    let is_small = measured.steps <= STEPS_OF_SMALL || measured.offloaded_bytes > most_offloaded_bytes;
    let variants = attempt.freedom.variants_of_activations(first);
    let all_offloaded = variants.into_iter().min_by_key(bytes).expect("there is a variant");
    descend(attempt, all_offloaded, is_small, bytes);
    if is_small {
        let starts = attempt.freedom.little_offloaded();
        starts.into_iter().for_each(|start| descend(attempt, start, is_small, bytes));
    }
    measure_breadth_first(attempt);
    attempt.set_effort_steps(effort_before);
    let mut seen = attempt.seen_within(most_offloaded_bytes);
    seen.sort_by(|(_, one), (_, other)| one.bytes.cmp(&other.bytes).then(one.ms.total_cmp(&other.ms)));
    let Budget { local_ranks, .. } = attempt.question.budget;
    let within = Budget { device_bytes: u64::MAX, offload_bytes: most_offloaded_bytes, local_ranks };
    let mut best: Option<Leanest> = None;
    for (policy, measured) in seen {
        if best.as_ref().is_some_and(|best| best.peak_bytes <= measured.bytes) {
            break;
        }
        let Some(peak_bytes) = attempt.packed_peak_bytes(&policy, within) else { continue };
        if best.as_ref().is_none_or(|best| peak_bytes < best.peak_bytes) {
            best = Some(Leanest { policy, peak_bytes });
        }
    }
    best
}

/// Adds points in breadth-first order with all that can be offloaded.
fn measure_breadth_first(attempt: &Attempt) {
    let freedom = &attempt.freedom;
    if !freedom.may_go_breadth_first() {
        return;
    }
    for loss_chunk in freedom.largest_and_smallest_chunk() {
        for activations in [Offload::None, Offload::All] {
            let point = Point { loss_chunk, tables: true, ..freedom.breadth_first(activations, 0) };
            for size in freedom.lap_sizes() {
                attempt.measure(&point.with_laps(size));
            }
        }
    }
}

/// Varies one choice after the other, as long as that needs less.
fn descend(attempt: &Attempt, start: Point, is_small: bool, bytes: impl Fn(&Point) -> u64) {
    let freedom = &attempt.freedom;
    let (mut point, mut least) = (start, bytes(&start));
    loop {
        let before = point;
        let mut try_point = |other: Point, point: &mut Point| {
            let needed = bytes(&other);
            let is_less = needed < least;
            if is_less {
                (*point, least) = (other, needed);
            }
            is_less
        };
        for axis in 0..if is_small { Freedom::AXES } else { Freedom::AXES_OF_LARGE } {
            // The usual chunk of the loss needs no more than a small one, unless the loss has the peak, and is faster.
            let chunks = match attempt.measure(&point).peak_region() {
                HEAD_REGION | OTHER_REGION => freedom.chunks(),
                _ => &freedom.chunks()[..1],
            };
            for other in freedom.lean_variants(axis, point, chunks) {
                try_point(other, &mut point);
            }
        }
        for count in COUNTS.iter().take(if is_small { 2 } else { 1 }) {
            for is_upwards in [false, true] {
                // The bytes change along counts in straight stretches: strides grow as long as they fall.
                let mut stride = 1;
                loop {
                    let at = count.at(point);
                    let next = match is_upwards {
                        true => (at + stride).min(freedom.layers),
                        false => at.saturating_sub(stride),
                    };
                    match next != at && try_point(count.with(point, next), &mut point) {
                        true => stride *= 2,
                        false if stride > 1 => stride = 1,
                        false => break,
                    }
                }
            }
        }
        if point == before {
            return;
        }
    }
}
