//! Points in breadth-first order, for runs that fetch weights or train what is offloaded.
//!
//! There a weight crosses the link twice per step, however many micro-batches the step has. All that can be offloaded is at
//! first; of the sizes at which that fits, the fastest few get back to the device what has room: optimizer state with
//! gradients, then weights, then embedding and head. Both is tried, updates on the device and on the host.

use crate::attempt::{Attempt, Measured};
use crate::choices::{Offload, Point, USUAL_WINDOW};
use smidgen_ir::policy::Order;

/// Sizes at which something is brought back to the device.
const MOST_FILLED: usize = 2;
/// Points that fit, after which smaller sizes are not looked at: larger micro-batches keep a device busier.
const ENOUGH: usize = 6;

/// Measures points in breadth-first order; what fits is among the candidates of its attempt.
pub fn search_breadth_first(attempts: &[Attempt]) {
    let freedom = &attempts[0].freedom;
    if !freedom.may_go_breadth_first() {
        return;
    }
    let candidates = attempts.iter().flat_map(Attempt::candidates);
    let fastest = candidates.min_by(|one, other| one.measured.ms.total_cmp(&other.measured.ms));
    // Where nothing streams, nothing is gained.
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

/// Whether the order could pay at one size: the same weights serve several micro-batches, or are trained; and with
/// everything on the device, budget aside, a step takes less than the fastest so far.
fn may_be_faster(attempt: &Attempt, best_ms: f64) -> bool {
    let freedom = &attempt.freedom;
    let resident = Point { order: Order::Breadth, recomputed: freedom.layers, ..freedom.start() };
    (attempt.demand.micro_steps > 1.0 || freedom.trains_base)
        && attempt.measure(&resident.with_laps(1)).ms < best_ms
}

/// The first point that fits for each number of layers per lap; no more layers where all inputs stay on the device.
fn of_lap_sizes(attempt: &Attempt) -> Vec<(Point, Measured)> {
    let mut found = Vec::new();
    for size in attempt.freedom.lap_sizes() {
        let first = leanest_first(attempt, size);
        let keeps_all = first.as_ref().is_some_and(|(point, _)| point.activations == Offload::None);
        found.extend(first);
        if keeps_all {
            break;
        }
    }
    found
}

/// The first point at one size that fits: inputs of layers on the device if there is room for them, and a window that
/// lets transfers overlap with computation if there is room for that.
fn leanest_first(attempt: &Attempt, lap_size: usize) -> Option<(Point, Measured)> {
    let freedom = &attempt.freedom;
    let quarters = [1, 2, 3].map(|part| Offload::Some((part * freedom.layers).div_ceil(4)));
    let activations: Vec<Offload> =
        [Offload::None].into_iter().chain(quarters).chain([Offload::All]).collect();
    let chunks = freedom.largest_and_smallest_chunk();
    let with = |activations, window| freedom.breadth_first(activations, window).with_laps(lap_size);
    // The more inputs are offloaded, the less is on the device.
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

/// Brings back to the device what has room and makes the step faster.
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

/// The largest number up to `most` with a property that holds from 0 on up to some number.
fn most_that(most: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if holds(middle) { low = middle } else { high = middle - 1 }
    }
    low
}
