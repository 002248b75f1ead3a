//! The least memory that any policy needs at one size of micro-batch.
//!
//! The search starts from points that offload and recompute as much as possible. It varies one choice after the other and
//! keeps what needs less memory, until nothing does; a few points in breadth-first order are added. Schedules are compared
//! first. Then the measured policies are packed, as long as a schedule needs less than the leanest plan so far. The device
//! budget plays no part, so a run fits if its budget is raised to the size that a refusal states.

use crate::attempt::{Attempt, HEAD_REGION, OTHER_REGION, STEPS_OF_SMALL, Seen};
use crate::choices::{Freedom, Offload, Point};
use crate::counts::COUNTS;
use crate::question::Budget;
use smidgen_ir::policy::Policy;

/// The leanest policy and the peak of its plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Leanest {
    pub policy: Policy,
    /// The point of the policy, if it was measured as one.
    pub point: Option<Point>,
    pub peak_bytes: u64,
}

/// The leanest policy that offloads at most this many bytes; `None` if every policy offloads more.
pub fn leanest(attempt: &Attempt, most_offloaded_bytes: u64) -> Option<Leanest> {
    let bytes = |point: &Point| {
        let measured = attempt.measure(point);
        if measured.offloaded_bytes <= most_offloaded_bytes { measured.bytes } else { u64::MAX }
    };
    let effort_before = attempt.effort_steps();
    let first = attempt.freedom.leanest();
    let measured = attempt.measure(&first);
    // If not everything can be offloaded, the search must also find out what is.
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
    seen.sort_by(|one, other| {
        let (one, other) = (one.measured, other.measured);
        one.bytes.cmp(&other.bytes).then(one.ms.total_cmp(&other.ms))
    });
    let Budget { local_ranks, .. } = attempt.question.budget;
    let within = Budget { device_bytes: u64::MAX, offload_bytes: most_offloaded_bytes, local_ranks };
    let mut best: Option<Leanest> = None;
    for Seen { policy, point, measured } in seen {
        if best.as_ref().is_some_and(|best| best.peak_bytes <= measured.bytes) {
            break;
        }
        let Some(peak_bytes) = attempt.packed_peak_bytes(&policy, within) else { continue };
        if best.as_ref().is_none_or(|best| peak_bytes < best.peak_bytes) {
            best = Some(Leanest { policy, point, peak_bytes });
        }
    }
    best
}

/// Measures points in breadth-first order that offload as much as possible.
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

/// Varies one choice after the other, as long as that reduces the bytes.
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
            // Unless the peak is in the loss, the usual chunk needs no more than a smaller one, and is faster.
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
                // Bytes are piecewise linear in the count, so the stride doubles as long as they fall.
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
