//! The search in breadth-first order, for runs that fetch weights or train offloaded ones.
//!
//! In this order a weight crosses the link twice per step, however many micro-batches the step has. The search first
//! offloads everything that can be. At the fastest few sizes that fit, it then brings back what has room: optimizer state
//! with gradients, then weights, then embedding and head. It tries updates on the device and on the host.

use super::choices::USUAL_WINDOW;
use super::size::{Measured, Size};
use smidgen_ir::Space;
use smidgen_ir::policy::{LayerSet, Policy};

/// Most policies from which something is brought back to the device.
const MOST_FILLED: usize = 2;
/// After this many policies that fit, smaller sizes are skipped: larger micro-batches use a device better.
const ENOUGH: usize = 6;

/// Measures policies in breadth-first order. Those that fit become candidates of their sizes.
pub fn search_breadth_first(sizes: &[Size]) {
    let freedom = &sizes[0].freedom;
    if !freedom.may_go_breadth_first() {
        return;
    }
    let candidates = sizes.iter().flat_map(Size::candidates);
    let fastest = candidates.min_by(|one, other| one.measured.ms.total_cmp(&other.measured.ms));
    // If nothing streams, this order gains nothing.
    if fastest.as_ref().is_some_and(|fastest| !fastest.policy.streams()) {
        return;
    }
    let best_ms = fastest.map_or(f64::INFINITY, |fastest| fastest.measured.ms);
    let mut found: Vec<(&Size, Policy, Measured)> = Vec::new();
    for size in sizes.iter().filter(|size| may_be_faster(size, best_ms)) {
        found.extend(of_lap_sizes(size).into_iter().map(|(policy, measured)| (size, policy, measured)));
        if found.len() >= ENOUGH {
            break;
        }
    }
    found.sort_by(|one, other| one.2.ms.total_cmp(&other.2.ms));
    for (size, policy, _) in found.into_iter().take(MOST_FILLED) {
        for updates in [Space::Device, Space::Host] {
            fill(size, size.freedom.obeyed(Policy { updates, ..policy.clone() }));
        }
    }
}

/// Whether the order may be faster at one size: several micro-batches share the fetched weights, or weights are trained;
/// and with everything on the device, regardless of the budget, a step takes less time than the fastest so far.
fn may_be_faster(size: &Size, best_ms: f64) -> bool {
    let freedom = &size.freedom;
    let resident = Policy {
        offloaded_weights: LayerSet::none(),
        tables_offloaded: false,
        optimizer_state: Space::Device,
        gradients: Space::Device,
        ..freedom.breadth_first(0, USUAL_WINDOW, 1)
    };
    (size.demand.micro_steps > 1.0 || freedom.trains_base)
        && size.measure(&freedom.obeyed(resident)).ms < best_ms
}

/// The first policy that fits for each number of layers per lap. Larger laps are skipped once all inputs stay on the device.
fn of_lap_sizes(size: &Size) -> Vec<(Policy, Measured)> {
    let mut found = Vec::new();
    for per_lap in size.freedom.lap_sizes() {
        let first = first_that_fits(size, per_lap);
        let keeps_all = first.as_ref().is_some_and(|(policy, _)| !policy.offloads_activations());
        found.extend(first);
        if keeps_all {
            break;
        }
    }
    found
}

/// The first policy that fits at one size: with the usual window if there is room for it, because transfers then overlap
/// with computation, and with as few offloaded inputs of layers as possible.
fn first_that_fits(size: &Size, per_lap: usize) -> Option<(Policy, Measured)> {
    let freedom = &size.freedom;
    let layers = freedom.layers;
    let inputs: Vec<usize> = [0, 1, 2, 3, 4].map(|part| (part * layers).div_ceil(4)).to_vec();
    let mut chunks = vec![freedom.chunks()[0], freedom.fewest_rows()];
    chunks.dedup();
    let with = |inputs: usize, window: usize| freedom.breadth_first(inputs, window, per_lap);
    // Offloading more inputs never needs more device memory, so the search below can bisect.
    let is_too_large = |inputs: usize, window: usize| {
        let loss_chunk = freedom.fewest_rows();
        let leanest = Policy { loss_chunk, tables_offloaded: true, ..with(inputs, window) };
        size.measure(&freedom.obeyed(leanest)).bytes > size.question.budget.device_bytes
    };
    let mut windows = [USUAL_WINDOW, 0].into_iter().filter(|_| !is_too_large(layers, 0));
    windows.find_map(|window| {
        let first = inputs.partition_point(|inputs| is_too_large(*inputs, window));
        let policies = inputs[first..].iter().flat_map(|inputs| {
            let first = with(*inputs, window);
            let tables = if first.tables_offloaded { vec![true] } else { vec![false, true] };
            let chunks =
                chunks.iter().map(move |loss_chunk| Policy { loss_chunk: *loss_chunk, ..first.clone() });
            chunks.flat_map(move |policy| {
                let with = move |tables_offloaded| Policy { tables_offloaded, ..policy.clone() };
                tables.clone().into_iter().map(with)
            })
        });
        let mut measured = policies.map(|policy| {
            let policy = freedom.obeyed(policy);
            let measured = size.measure(&policy);
            (policy, measured)
        });
        measured.find(|(_, measured)| size.is_within(measured))
    })
}

/// Brings back to the device what has room there and makes the step faster.
fn fill(size: &Size, mut policy: Policy) {
    let freedom = &size.freedom;
    let layers = freedom.layers;
    let fits = |policy: &Policy| size.is_within(&size.measure(policy));
    let ms = |policy: &Policy| size.measure(policy).ms;
    let keep_if_faster = |policy: &mut Policy, other: Policy| {
        if ms(&other) < ms(policy) {
            *policy = other;
        }
    };
    if policy.optimizer_state != Space::Device || policy.gradients != Space::Device {
        let with = |resident: usize| {
            let offloaded =
                if resident > 0 { LayerSet::spread(layers - resident, layers) } else { LayerSet::none() };
            let offloaded_moments = offloaded.clone();
            freedom.obeyed(Policy { offloaded_moments, offloaded_gradients: offloaded, ..policy.clone() })
        };
        let other = with(most_that(layers - 1, |resident| fits(&with(resident))));
        keep_if_faster(&mut policy, other);
    }
    let with = |resident: usize| freedom.with_count(1, &policy, layers - resident);
    let other = with(most_that(layers, |resident| fits(&with(resident))));
    keep_if_faster(&mut policy, other);
    if policy.tables_offloaded {
        size.measure(&freedom.obeyed(Policy {
            tables_offloaded: false,
            embedding_offloaded: true,
            ..policy
        }));
    }
}

/// The largest number up to `most` for which `holds`, which is true up to some number and false above.
fn most_that(most: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if holds(middle) { low = middle } else { high = middle - 1 }
    }
    low
}
