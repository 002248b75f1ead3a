//! Starts from a point that fits and finds faster points that fit.
//!
//! Around a point each choice is varied alone and measured. The bytes of several changes together (a mixture) are predicted
//! as the sum of their single effects, separately for each region of the run, because a change may move the peak to another
//! region. Between two measured numbers of layers the effect is interpolated. So all mixtures can be compared, and the most
//! promising ones are measured. If one needs more than predicted, the next must be leaner by the difference.
//! The best measured point becomes the next starting point, until none is better.

use crate::attempt::{Attempt, Measured, REGIONS};
use crate::choices::{Axis, Copy, Freedom, Offload, Point};
use crate::counts::{COUNTS, Count};

/// Most starting points of one call of [`improve`].
const MOST_POINTS: usize = 6;
/// Most mixtures that are measured around each point.
const MOST_MIXTURES: usize = 12;
/// Most times that a mixture is made leaner after it did not fit.
const MOST_CORRECTIONS: usize = 2;
/// Share of the budget by which a prediction may exceed it and still be measured.
const TOLERANCE: f64 = 0.003;
/// Share of the step time below which a gain is not worth a measurement.
const LEAST_GAIN: f64 = 1e-3;

/// Searches for points that are faster than `point`, which fits. What it finds becomes a candidate of the attempt. Stops
/// when the effort is spent.
pub fn improve(attempt: &Attempt, mut point: Point) {
    for _ in 0..MOST_POINTS {
        if attempt.is_spent(1.0) {
            return;
        }
        // If nothing is streamed, every window gives the same plan. Varying choices around a small one shows what streaming
        // can save.
        let around = point.windows().into_iter().map(|window_layers| point.with_window(window_layers));
        let better = around
            .filter(|point| attempt.is_first_time_at(point))
            .filter_map(|point| best_around(attempt, point));
        match better.min_by(|one, other| one.0.total_cmp(&other.0)) {
            Some((_, better)) => point = better,
            None => return,
        }
    }
}

/// Searches for points that offload less than `point`, which fits, and take at most `most_ms`.
pub fn offload_less(attempt: &Attempt, mut point: Point, most_ms: f64) {
    let is_as_good = |other: &Point| {
        let measured = attempt.measure(other);
        attempt.is_within(&measured) && measured.ms <= most_ms
    };
    for choice in attempt.freedom.less_offloaded(point) {
        // The point itself is the last of them.
        let (mut low, mut high) = (0, choice.points.len() - 1);
        while low < high {
            let middle = low.midpoint(high);
            let mut other = point;
            (choice.copy)(&mut other, &choice.points[middle]);
            if is_as_good(&other) { high = middle } else { low = middle + 1 }
        }
        (choice.copy)(&mut point, &choice.points[low]);
    }
}

/// A change of one choice, and the bytes and time that it adds.
#[derive(Clone, Copy, Debug)]
struct Change {
    copy: Copy,
    point: Point,
    bytes: [f64; REGIONS],
    ms: f64,
}

fn with(mut point: Point, change: &Change) -> Point {
    (change.copy)(&mut point, &change.point);
    point
}

/// The fastest point found around another one, with its time, if it is faster.
fn best_around(attempt: &Attempt, point: Point) -> Option<(f64, Point)> {
    let here = attempt.measure(&point);
    let (counts, kinds) = changes(attempt, point, here);
    let groups = combinations(&kinds);
    let try_all = |tolerance| best_mixture(attempt, point, here, (&counts, groups.clone()), tolerance);
    // Predictions may be slightly too large, so the second try tolerates a small excess. If all were too small, a single
    // change may still be faster.
    try_all(0.0).or_else(|| try_all(TOLERANCE)).or_else(|| {
        let changed = kinds.iter().chain(&counts).flatten().map(|change| with(point, change));
        let measured = changed.filter_map(|other| Some((attempt.known(&other)?, other)));
        let faster =
            measured.filter(|(measured, _)| attempt.is_within(measured) && is_faster(measured, here.ms));
        faster.map(|(measured, other)| (measured.ms, other)).min_by(|one, other| one.0.total_cmp(&other.0))
    })
}

fn is_faster(measured: &Measured, ms: f64) -> bool {
    measured.ms < ms * (1.0 - LEAST_GAIN)
}

/// The best of the most promising mixtures, if it is faster than the point.
fn best_mixture(
    attempt: &Attempt,
    point: Point,
    here: Measured,
    (counts, groups): (&[Vec<Change>; 2], Vec<Vec<Change>>),
    tolerance: f64,
) -> Option<(f64, Point)> {
    let budget_bytes = attempt.room_bytes() as f64;
    let room = here.region_bytes.map(|bytes| budget_bytes * (1.0 + tolerance) - bytes as f64);
    let promise = |group: Vec<Change>| Some((fastest_counts(counts, &group, room)?.0, group));
    let mut groups: Vec<(f64, Vec<Change>)> = groups.into_iter().filter_map(promise).collect();
    groups.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut best: Option<(f64, Point)> = None;
    // Predicted times of mixtures that fit. A mixture with the same prediction would not be faster than they are.
    let mut promises: Vec<f64> = Vec::new();
    let mut tried = 0;
    for (promised_ms, group) in groups {
        let best_ms = best.map_or(here.ms, |(ms, _)| ms);
        if tried == MOST_MIXTURES || here.ms + promised_ms > best_ms * (1.0 - LEAST_GAIN) {
            break;
        }
        if promises.iter().any(|ms| (ms - promised_ms).abs() < LEAST_GAIN * here.ms) {
            continue;
        }
        tried += 1;
        let mut room = room;
        for _ in 0..=MOST_CORRECTIONS {
            let Some((ms, counted)) = fastest_counts(counts, &group, room) else { break };
            if here.ms + ms > best_ms || attempt.is_spent(1.0) {
                break;
            }
            let changes = group.iter().chain(&counted);
            let other = changes.fold(point, with);
            let measured = attempt.measure(&other);
            if attempt.is_within(&measured) {
                promises.push(promised_ms);
                if is_faster(&measured, best_ms) {
                    best = Some((measured.ms, other));
                }
                break;
            }
            let excess = (measured.bytes as f64 - budget_bytes).max(tolerance * budget_bytes / 2.0).max(1.0);
            room = room.map(|room| room - excess);
        }
    }
    best
}

/// The changes from `point` for each open choice: first those of the numbers of layers, then the others.
fn changes(attempt: &Attempt, point: Point, here: Measured) -> ([Vec<Change>; 2], Vec<Vec<Change>>) {
    let freedom = &attempt.freedom;
    let change = |copy: Copy, other: Point| {
        let measured = attempt.measure(&other);
        let bytes = |region: usize| measured.region_bytes[region] as f64 - here.region_bytes[region] as f64;
        Change { copy, point: other, bytes: std::array::from_fn(bytes), ms: measured.ms - here.ms }
    };
    let between = |count: Count| {
        let (at, layers) = (count.at(point), freedom.layers);
        let mut counts = vec![at];
        if count.is_open(freedom.pins) {
            let next_to = [at.saturating_sub(1), (at + 1).min(layers)];
            counts.extend([0, at / 2, next_to[0], next_to[1], (at + layers).div_ceil(2), layers]);
        }
        counts.sort_unstable();
        counts.dedup();
        let measured: Vec<(usize, Change)> = counts
            .into_iter()
            .map(|number| (number, change(count.copy, count.with(point, number))))
            .collect();
        interpolated(&measured, point, count)
    };
    let counts = COUNTS.map(between);
    let axis = |axis: Axis| axis.points.into_iter().map(|other| change(axis.copy, other)).collect();
    (counts, freedom.axes(point).into_iter().map(axis).collect())
}

/// A change for every number of layers between the first and the last of `measured`.
fn interpolated(measured: &[(usize, Change)], point: Point, count: Count) -> Vec<Change> {
    let mut all = vec![measured[0].1];
    for pair in measured.windows(2) {
        let ((first, from), (last, to)) = (pair[0], pair[1]);
        all.extend((first + 1..=last).map(|number| {
            let along = (number - first) as f64 / (last - first) as f64;
            let line = |from: f64, to: f64| from + along * (to - from);
            let bytes = std::array::from_fn(|region| line(from.bytes[region], to.bytes[region]));
            Change { copy: count.copy, point: count.with(point, number), bytes, ms: line(from.ms, to.ms) }
        }));
    }
    all
}

/// Every combination of one change of each kind.
fn combinations(kinds: &[Vec<Change>]) -> Vec<Vec<Change>> {
    let mut all: Vec<Vec<Change>> = vec![vec![]];
    for kind in kinds {
        let longer = |group: &Vec<Change>| {
            let group = group.clone();
            kind.iter()
                .map(move |change| group.iter().copied().chain([*change]).collect())
                .collect::<Vec<_>>()
        };
        all = all.iter().flat_map(longer).collect();
    }
    all
}

/// The numbers of layers with which a group of changes is predicted to be fastest, among those that fit into `room`; and
/// the time that group and counts add.
fn fastest_counts(
    counts: &[Vec<Change>; 2],
    group: &[Change],
    room: [f64; REGIONS],
) -> Option<(f64, [Change; 2])> {
    let room_after = |room: [f64; REGIONS], change: &Change| -> [f64; REGIONS] {
        std::array::from_fn(|region| room[region] - change.bytes[region])
    };
    let room = group.iter().fold(room, room_after);
    let ms: f64 = group.iter().map(|change| change.ms).sum();
    let mut best: Option<(f64, [Change; 2])> = None;
    for weights in &counts[1] {
        let room = room_after(room, weights);
        for recompute in &counts[0] {
            let total_ms = ms + recompute.ms + weights.ms;
            let fits = || recompute.bytes.iter().zip(room).all(|(bytes, room)| *bytes <= room);
            if best.is_none_or(|(best_ms, _)| total_ms < best_ms) && fits() {
                best = Some((total_ms, [*recompute, *weights]));
            }
        }
    }
    best
}

/// How a search for points that offload less varies a point.
impl Freedom<'_> {
    /// For each choice that offloads something, points from no offloading to what the point itself offloads.
    pub fn less_offloaded(&self, point: Point) -> Vec<Axis> {
        let weights = (0..=point.weights).map(|weights| Point { weights, ..point }).collect();
        let most = match point.activations {
            Offload::None | Offload::OfRecomputed => 0,
            Offload::Some(count) => count,
            Offload::All => self.layers,
        };
        let some = (0..most).map(|count| match count {
            0 => Offload::None,
            count => Offload::Some(count),
        });
        let activations = some.chain([point.activations]).map(|activations| Point { activations, ..point });
        let resident = Point { tables: false, split_head: false, ..point };
        let tables = [resident, Point { embedding: self.has_own_embedding, ..resident }, point];
        let moments = [Point { optimizer_state: false, ..point }, point];
        let gradients = [Point { gradients: false, ..point }, point];
        let axis = |copy: Copy, points: Vec<Point>| Axis { copy, points };
        vec![
            axis(|to, from| to.weights = from.weights, weights),
            axis(|to, from| to.activations = from.activations, activations.collect()),
            axis(
                |to, from| {
                    (to.tables, to.split_head, to.embedding) = (from.tables, from.split_head, from.embedding)
                },
                tables.to_vec(),
            ),
            axis(|to, from| to.optimizer_state = from.optimizer_state, moments.to_vec()),
            axis(|to, from| to.gradients = from.gradients, gradients.to_vec()),
        ]
    }
}
