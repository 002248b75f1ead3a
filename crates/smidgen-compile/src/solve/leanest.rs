//! The least memory that any policy needs at one size of micro-batch.
//!
//! The search starts from points that offload and recompute as much as possible. It varies one choice after the other and
//! keeps what needs less memory, until nothing does; a few points in breadth-first order are added. Schedules are compared
//! first. Then the measured policies are packed, as long as a schedule needs less than the leanest plan so far. The device
//! budget plays no part, so a run fits if its budget is raised to the size that a refusal states.

use super::descent::descend;
use super::question::Budget;
use super::size::{Seen, Size};
use smidgen_ir::policy::Policy;

/// For plans of at most this many steps every choice is tried. In larger ones everything that can be offloaded is, since
/// that saves far more memory than a transfer needs.
const STEPS_OF_SMALL: usize = 6_000;

/// The leanest policy and the peak of its plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Leanest {
    pub policy: Policy,
    pub peak_bytes: u64,
}

/// The leanest policy that offloads at most this many bytes; `None` if every policy offloads more.
pub fn leanest(size: &Size, most_offloaded_bytes: u64) -> Option<Leanest> {
    let bytes = |policy: &Policy| {
        let measured = size.measure(policy);
        if measured.offloaded_bytes <= most_offloaded_bytes { measured.bytes as f64 } else { f64::INFINITY }
    };
    let effort_before = size.effort_steps();
    let first = size.freedom.usually_leanest();
    let measured = size.measure(&first);
    // If not everything can be offloaded, the search must also find out what is.
    let is_small = measured.steps <= STEPS_OF_SMALL || measured.offloaded_bytes > most_offloaded_bytes;
    let variants = size.freedom.variants_of_activations(&first);
    let all_offloaded = variants.into_iter().min_by(|one, other| bytes(one).total_cmp(&bytes(other)));
    let all_offloaded = all_offloaded.unwrap_or(first);
    descend(size, all_offloaded, is_small, bytes);
    if is_small {
        let starts = size.freedom.little_offloaded();
        starts.into_iter().for_each(|start| descend(size, start, is_small, bytes));
    }
    measure_breadth_first(size);
    size.set_effort_steps(effort_before);
    let mut seen = size.seen_within(most_offloaded_bytes);
    seen.sort_by(|one, other| {
        let (one, other) = (one.measured, other.measured);
        one.bytes.cmp(&other.bytes).then(one.ms.total_cmp(&other.ms))
    });
    let Budget { local_ranks, .. } = size.question.budget;
    let within = Budget { device_bytes: u64::MAX, offload_bytes: most_offloaded_bytes, local_ranks };
    let mut best: Option<Leanest> = None;
    for Seen { policy, measured } in seen {
        if best.as_ref().is_some_and(|best| best.peak_bytes <= measured.bytes) {
            break;
        }
        let Some(peak_bytes) = size.packed_peak_bytes(&policy, within) else { continue };
        if best.as_ref().is_none_or(|best| peak_bytes < best.peak_bytes) {
            best = Some(Leanest { policy, peak_bytes });
        }
    }
    best
}

/// Measures policies in breadth-first order that offload as much as possible.
fn measure_breadth_first(size: &Size) {
    let freedom = &size.freedom;
    if !freedom.may_go_breadth_first() {
        return;
    }
    for loss_chunk in [freedom.chunks()[0], freedom.fewest_rows()] {
        for inputs in [0, freedom.layers] {
            for per_lap in freedom.lap_sizes() {
                let first = freedom.breadth_first(inputs, 0, per_lap);
                size.measure(&freedom.obeyed(Policy { loss_chunk, tables_offloaded: true, ..first }));
            }
        }
    }
}
