//! Points in breadth-first order, for runs that fetch weights or train what is offloaded.
//!
//! There a weight crosses the link twice per step, however many micro-batches the step has. All that can be offloaded is at
//! first; of the sizes at which that fits, the fastest few get back to the device what has room: optimizer state with
//! gradients, then weights, then embedding and head. Both is tried, updates on the device and on the host.

use crate::attempt::{Attempt, Measured};
use crate::choices::{Offload, Point, USUAL_WINDOW};

/// Sizes at which something is brought back to the device.
const MOST_FILLED: usize = 2;

/// Measures points in breadth-first order; what fits is among the candidates of its attempt.
pub fn search_breadth_first(attempts: &[Attempt]) {
    let freedom = &attempts[0].freedom;
    if !freedom.may_go_breadth_first() {
        return;
    }
    let candidates = attempts.iter().flat_map(Attempt::candidates);
    let fastest = candidates.min_by(|one, other| one.measured.ms.total_cmp(&other.measured.ms));
    // Where nothing streams, nothing is gained.
    if fastest.is_some_and(|fastest| !fastest.policy.streams()) {
        return;
    }
    let mut found: Vec<(&Attempt, Point, Measured)> = attempts
        .iter()
        .flat_map(|attempt| {
            of_lap_sizes(attempt).into_iter().map(move |(point, measured)| (attempt, point, measured))
        })
        .collect();
    found.sort_by(|one, other| one.2.ms.total_cmp(&other.2.ms));
    for (attempt, point, _) in found.into_iter().take(MOST_FILLED) {
        for updates_on_host in [false, true] {
            fill(attempt, Point { updates_on_host, ..point });
        }
    }
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
    let activations = [Offload::None].into_iter().chain(quarters).chain([Offload::All]);
    for window_layers in [USUAL_WINDOW, 0] {
        for activations in activations.clone() {
            for loss_chunk in freedom.largest_and_smallest_chunk() {
                let first = freedom.breadth_first(activations, window_layers).with_laps(lap_size);
                let point = Point { loss_chunk, ..first };
                for tables in if point.tables { vec![true] } else { vec![false, true] } {
                    let point = Point { tables, ..point };
                    let measured = attempt.measure(&point);
                    if attempt.is_within(&measured) {
                        return Some((point, measured));
                    }
                }
            }
        }
    }
    None
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
