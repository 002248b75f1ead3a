//! The search in breadth-first order, for runs that fetch weights or train offloaded ones.
//!
//! In this order a weight crosses the link twice per step, however many micro-batches the step has. The search first
//! offloads everything that can be. At the fastest few sizes that fit, it then brings back what has room: optimizer state
//! with gradients, then weights, then embedding and head. It tries updates on the device and on the host.

use crate::attempt::{Attempt, Measured};
use crate::choices::{Offload, Point, USUAL_WINDOW};
use smidgen_ir::policy::Order;

/// Most points from which something is brought back to the device.
const MOST_FILLED: usize = 2;
/// After this many points that fit, smaller sizes are skipped: larger micro-batches use a device better.
const ENOUGH: usize = 6;

/// Measures points in breadth-first order. Those that fit become candidates of their attempts.
pub fn search_breadth_first(attempts: &[Attempt]) {
    let freedom = &attempts[0].freedom;
    if !freedom.may_go_breadth_first() {
        return;
    }
    let candidates = attempts.iter().flat_map(Attempt::candidates);
    let fastest = candidates.min_by(|one, other| one.measured.ms.total_cmp(&other.measured.ms));
    // If nothing streams, this order gains nothing.
    if fastest.as_ref().is_some_and(|fastest| !fastest.policy.streams()) {
        return;
    }
    let best_ms = fastest.map_or(f64::INFINITY, |fastest| fastest.measured.ms);
    let mut found: Vec<(&Attempt, Point, Measured)> = Vec::new();
    for attempt in attempts.iter().filter(|attempt| may_be_faster(attempt, best_ms)) {
        found.extend(of_lap_sizes(attempt).into_iter().map(|(point, measured)| (attempt, point, measured)));
        if found.len() >= ENOUGH {
            break;
        }
    }
    found.sort_by(|one, other| one.2.ms.total_cmp(&other.2.ms));
    for (attempt, point, _) in found.into_iter().take(MOST_FILLED) {
        for updates_on_host in [false, true] {
            fill(attempt, Point { updates_on_host, ..point });
        }
    }
}

/// Whether the order may be faster at one size: several micro-batches share the fetched weights, or weights are trained;
/// and with everything on the device, regardless of the budget, a step takes less time than the fastest so far.
fn may_be_faster(attempt: &Attempt, best_ms: f64) -> bool {
    let freedom = &attempt.freedom;
    let resident = Point { order: Order::Breadth, recomputed: freedom.layers, ..freedom.start() };
    (attempt.demand.micro_steps > 1.0 || freedom.trains_base)
        && attempt.measure(&resident.with_laps(1)).ms < best_ms
}

/// The first point that fits for each number of layers per lap. Larger laps are skipped once all inputs stay on the device.
fn of_lap_sizes(attempt: &Attempt) -> Vec<(Point, Measured)> {
    let mut found = Vec::new();
    for size in attempt.freedom.lap_sizes() {
        let first = first_that_fits(attempt, size);
        let keeps_all = first.as_ref().is_some_and(|(point, _)| point.activations == Offload::None);
        found.extend(first);
        if keeps_all {
            break;
        }
    }
    found
}

/// The first point that fits at one size: with the usual window if there is room for it, because transfers then overlap
/// with computation, and with as few offloaded inputs of layers as possible.
fn first_that_fits(attempt: &Attempt, lap_size: usize) -> Option<(Point, Measured)> {
    let freedom = &attempt.freedom;
    let quarters = [1, 2, 3].map(|part| Offload::Some((part * freedom.layers).div_ceil(4)));
    let activations: Vec<Offload> =
        [Offload::None].into_iter().chain(quarters).chain([Offload::All]).collect();
    let chunks = freedom.largest_and_smallest_chunk();
    let with = |activations, window| freedom.breadth_first(activations, window).with_laps(lap_size);
    // Offloading more inputs never needs more device memory, so the search below can bisect.
    let is_too_large = |activations: Offload, window: usize| {
        let loss_chunk = chunks[chunks.len() - 1];
        let leanest = Point { loss_chunk, tables: true, ..with(activations, window) };
        attempt.measure(&leanest).bytes > attempt.room_bytes()
    };
    let mut windows = [USUAL_WINDOW, 0].into_iter().filter(|_| !is_too_large(Offload::All, 0));
    windows.find_map(|window| {
        let first = activations.partition_point(|activations| is_too_large(*activations, window));
        let points = activations[first..].iter().flat_map(|activations| {
            let first = with(*activations, window);
            let tables = if first.tables { vec![true] } else { vec![false, true] };
            let chunks = chunks.iter().map(move |loss_chunk| Point { loss_chunk: *loss_chunk, ..first });
            chunks.flat_map(move |point| {
                tables.clone().into_iter().map(move |tables| Point { tables, ..point })
            })
        });
        let mut measured = points.map(|point| (point, attempt.measure(&point)));
        measured.find(|(_, measured)| attempt.is_within(measured))
    })
}

/// Brings back to the device what has room there and makes the step faster.
fn fill(attempt: &Attempt, mut point: Point) {
    let layers = attempt.freedom.layers;
    let fits = |point: &Point| attempt.is_within(&attempt.measure(point));
    let ms = |point: &Point| attempt.measure(point).ms;
    if point.optimizer_state || point.gradients {
        let most = most_that(layers - 1, |resident_state| fits(&Point { resident_state, ..point }));
        let other = Point { resident_state: most, ..point };
        if ms(&other) < ms(&point) {
            point = other;
        }
    }
    let most = most_that(layers, |resident| fits(&Point { weights: layers - resident, ..point }));
    let other = Point { weights: layers - most, ..point };
    if ms(&other) < ms(&point) {
        point = other;
    }
    if point.tables {
        attempt.measure(&Point { tables: false, embedding: attempt.freedom.has_own_embedding, ..point });
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
