//! From choices that fit to faster ones that do.
//!
//! Around a point each choice is changed by itself and measured; what several changes take together is predicted as
//! the sum of what each takes alone, in each stretch of the run, since which of them has the peak may change. Counts
//! of layers between two measured ones lie on the line between them. So all mixtures can be looked at, and the few
//! that promise most are measured. Where one takes more than predicted, the next is asked to be that much leaner.
//! The best that was measured is the next point, until none is better.

use crate::attempt::{Attempt, REGIONS, Taken};
use crate::ladder::{Choices, USUAL_WINDOW, Waiting};

/// Points at most, mixtures that are measured around each, and times that one may be corrected.
const MOST_POINTS: usize = 6;
const MOST_MIXTURES: usize = 12;
const MOST_CORRECTIONS: usize = 2;
/// Of the budget: what a prediction may be above it and still be measured.
const TOLERANCE: f64 = 0.003;
/// Of the time of a step: what is less is not worth a measurement.
const LEAST_GAIN: f64 = 1e-3;

/// Looks for faster choices than `point`, which fits; what it finds is among the attempt's candidates. Ends where the
/// effort is spent.
pub fn improve(attempt: &Attempt, mut point: Choices) {
    for _ in 0..MOST_POINTS {
        if attempt.is_spent(1.0) {
            return;
        }
        // Where nothing is streamed the window is free: one that saves is what makes streaming save.
        let streams = point.weights_away > 0 || point.tables_away || point.moments_away;
        let windows = if streams { vec![point.window_layers] } else { vec![USUAL_WINDOW, 1] };
        let around = windows.into_iter().map(|window_layers| Choices { window_layers, ..point });
        let better = around
            .filter(|point| attempt.is_first_time_at(point))
            .filter_map(|point| best_around(attempt, point));
        match better.min_by(|one, other| one.0.total_cmp(&other.0)) {
            Some((_, better)) => point = better,
            None => return,
        }
    }
}

/// One choice made otherwise, and what that adds.
#[derive(Clone, Copy, Debug)]
struct Change {
    choice: Choice,
    bytes: [f64; REGIONS],
    ms: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Choice {
    Recomputed(usize),
    WeightsAway(usize),
    EmbeddingAway(bool),
    TablesAway(bool),
    HeadInPieces(bool),
    Activations(Waiting),
    MomentsAway(bool),
    TileTokens(Option<usize>),
    WindowLayers(usize),
    LossChunk(usize),
}

fn with(choices: Choices, choice: Choice) -> Choices {
    match choice {
        Choice::Recomputed(recomputed) => Choices { recomputed, ..choices },
        Choice::WeightsAway(weights_away) => Choices { weights_away, ..choices },
        Choice::EmbeddingAway(embedding_away) => Choices { embedding_away, ..choices },
        Choice::TileTokens(tile_tokens) => Choices { tile_tokens, ..choices },
        Choice::TablesAway(tables_away) => Choices { tables_away, ..choices },
        Choice::HeadInPieces(head_in_pieces) => Choices { head_in_pieces, ..choices },
        Choice::Activations(activations) => Choices { activations, ..choices },
        Choice::MomentsAway(moments_away) => Choices { moments_away, ..choices },
        Choice::WindowLayers(window_layers) => Choices { window_layers, ..choices },
        Choice::LossChunk(loss_chunk) => Choices { loss_chunk, ..choices },
    }
}

/// The fastest that was found around a point, if it is faster.
fn best_around(attempt: &Attempt, point: Choices) -> Option<(f64, Choices)> {
    let here = attempt.taken(&point);
    let (counts, kinds) = changes(attempt, point, here);
    let groups = products(&kinds);
    let try_all = |tolerance| best_mixture(attempt, point, here, (&counts, groups.clone()), tolerance);
    // A prediction may be a little too large as well; and where all were too small, one change alone may be left.
    try_all(0.0).or_else(|| try_all(TOLERANCE)).or_else(|| {
        let changed = kinds.iter().chain(&counts).flatten().map(|change| with(point, change.choice));
        let measured = changed.filter_map(|choices| Some((attempt.known(&choices)?, choices)));
        let faster = measured.filter(|(taken, _)| attempt.is_within(taken) && is_faster(taken, here.ms));
        faster.map(|(taken, choices)| (taken.ms, choices)).min_by(|one, other| one.0.total_cmp(&other.0))
    })
}

fn is_faster(taken: &Taken, ms: f64) -> bool {
    taken.ms < ms * (1.0 - LEAST_GAIN)
}

/// The best of the mixtures that promise most, if it is faster than the point.
fn best_mixture(
    attempt: &Attempt,
    point: Choices,
    here: Taken,
    (counts, groups): (&[Vec<Change>; 2], Vec<Vec<Change>>),
    tolerance: f64,
) -> Option<(f64, Choices)> {
    let budget_bytes = attempt.budget.device_bytes as f64;
    let room = here.region_bytes.map(|bytes| budget_bytes * (1.0 + tolerance) - bytes as f64);
    let promise = |group: Vec<Change>| Some((fastest_counts(counts, &group, room)?.0, group));
    let mut groups: Vec<(f64, Vec<Change>)> = groups.into_iter().filter_map(promise).collect();
    groups.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut best: Option<(f64, Choices)> = None;
    // What was promised by those that fitted: the same promise again would be kept as little.
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
            let choices = changes.fold(point, |choices, change| with(choices, change.choice));
            let taken = attempt.taken(&choices);
            if attempt.is_within(&taken) {
                promises.push(promised_ms);
                if is_faster(&taken, best_ms) {
                    best = Some((taken.ms, choices));
                }
                break;
            }
            let excess = (taken.bytes as f64 - budget_bytes).max(tolerance * budget_bytes / 2.0).max(1.0);
            room = room.map(|room| room - excess);
        }
    }
    best
}

/// For each kind of choice that is free, the changes from `point`: first the counts of layers, then the rest.
fn changes(attempt: &Attempt, point: Choices, here: Taken) -> ([Vec<Change>; 2], Vec<Vec<Change>>) {
    let (pins, layers) = (attempt.freedom.pins, attempt.freedom.layers);
    let change = |choice: Choice| {
        let taken = attempt.taken(&with(point, choice));
        let bytes = |region: usize| taken.region_bytes[region] as f64 - here.region_bytes[region] as f64;
        Change { choice, bytes: std::array::from_fn(bytes), ms: taken.ms - here.ms }
    };
    let is_free = pins.policy.is_none();
    let axis = |is_free: bool, choices: Vec<Choice>| -> Vec<Change> {
        choices.into_iter().filter(|choice| is_free || with(point, *choice) == point).map(change).collect()
    };
    let between = |is_free: bool, at: usize, choice: fn(usize) -> Choice| {
        let mut counts = vec![at];
        if is_free {
            let beside = [at.saturating_sub(1), (at + 1).min(layers)];
            counts.extend([0, at / 2, beside[0], beside[1], (at + layers).div_ceil(2), layers]);
        }
        counts.sort_unstable();
        counts.dedup();
        let measured: Vec<(usize, Change)> =
            counts.into_iter().map(|count| (count, change(choice(count)))).collect();
        on_lines(&measured, choice)
    };
    let counts = [
        between(is_free && pins.recompute.is_none(), point.recomputed, Choice::Recomputed),
        between(is_free && pins.weights_away.is_none(), point.weights_away, Choice::WeightsAway),
    ];
    let streams = point.weights_away > 0 || point.tables_away || point.moments_away;
    let windows =
        if streams { vec![0, 1, USUAL_WINDOW, 2 * USUAL_WINDOW] } else { vec![point.window_layers] };
    let has_embedding = attempt.freedom.has_own_embedding && !point.tables_away;
    let has_pieces = attempt.freedom.head_pieces > 1 && point.tables_away;
    let mut tiles = vec![None];
    tiles.extend(attempt.freedom.tile(attempt.demand.extent.tokens).map(Some));
    let kinds = vec![
        axis(
            is_free && pins.tables_away.is_none() && has_embedding,
            [false, true].map(Choice::EmbeddingAway).to_vec(),
        ),
        axis(is_free && pins.tile_tokens.is_none(), tiles.into_iter().map(Choice::TileTokens).collect()),
        axis(is_free && pins.tables_away.is_none(), [false, true].map(Choice::TablesAway).to_vec()),
        axis(is_free && has_pieces, [false, true].map(Choice::HeadInPieces).to_vec()),
        axis(
            is_free && pins.activations_away.is_none(),
            [Waiting::None, Waiting::OfRecomputed, Waiting::All].map(Choice::Activations).to_vec(),
        ),
        axis(is_free && pins.moments_away.is_none(), [false, true].map(Choice::MomentsAway).to_vec()),
        axis(is_free, windows.into_iter().map(Choice::WindowLayers).collect()),
        axis(is_free, attempt.chunks.iter().copied().map(Choice::LossChunk).collect()),
    ];
    (counts, kinds.into_iter().filter(|axis| !axis.is_empty()).collect())
}

/// A change for every count from the first to the last of `measured`.
fn on_lines(measured: &[(usize, Change)], choice: fn(usize) -> Choice) -> Vec<Change> {
    let mut all = vec![measured[0].1];
    for pair in measured.windows(2) {
        let ((first, from), (last, to)) = (pair[0], pair[1]);
        all.extend((first + 1..=last).map(|count| {
            let along = (count - first) as f64 / (last - first) as f64;
            let line = |from: f64, to: f64| from + along * (to - from);
            let bytes = std::array::from_fn(|region| line(from.bytes[region], to.bytes[region]));
            Change { choice: choice(count), bytes, ms: line(from.ms, to.ms) }
        }));
    }
    all
}

/// Every way to take one change of each kind.
fn products(kinds: &[Vec<Change>]) -> Vec<Vec<Change>> {
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

/// The counts with which a group is fastest among those that have `room`, as predicted, and the time that all adds.
fn fastest_counts(
    counts: &[Vec<Change>; 2],
    group: &[Change],
    room: [f64; REGIONS],
) -> Option<(f64, [Change; 2])> {
    let rest = |room: [f64; REGIONS], change: &Change| -> [f64; REGIONS] {
        std::array::from_fn(|region| room[region] - change.bytes[region])
    };
    let room = group.iter().fold(room, rest);
    let ms: f64 = group.iter().map(|change| change.ms).sum();
    let mut best: Option<(f64, [Change; 2])> = None;
    for weights in &counts[1] {
        let room = rest(room, weights);
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
