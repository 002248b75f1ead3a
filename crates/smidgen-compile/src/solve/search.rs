//! The search: the table proposes, schedules decide.
//!
//! A proposal is a size, one combination of the choices for all layers, and one kind of offloaded activations; the table
//! gives its best sets of layers. The best proposal is scheduled. What the schedule needs more or less than predicted
//! corrects the predictions of the same kind, and the next best is scheduled, until no prediction is better than what was
//! found.

use super::choices::{Freedom, with_activations};
use super::descent::descend_to_fastest;
use super::rows::{Activations, Rows};
use super::size::{Measured, Size};
use super::table::{AtSize, Needs, Outside, Predicted, Table, Weights};
use smidgen_ir::Space;
use smidgen_ir::policy::{LayerSet, Policy};

/// Up to this ratio of their times, two plans count as equally fast, and the one that transfers and offloads less is
/// preferred.
pub const AS_FAST: f64 = 1.03;
/// The share of the bytes that a plan must save for each part of the time that it takes longer: a fifth for a hundredth.
const SHARE_PER_SLOWDOWN: f64 = 20.0;
/// Most policies that are scheduled in one search once one fits, and until then.
const MOST_SCHEDULED: usize = 16;
const MOST_WITHOUT_SUCCESS: usize = 32;
/// In models with few layers, where a launch or a granule of memory counts as much as a layer, predictions are only good
/// enough to say in which order to schedule. They may be wrong by these shares, and this many steps may be scheduled.
const WRONG_TIME: f64 = 0.75;
const WRONG_BYTES: f64 = 0.05;
const MOST_STEPS_OF_SMALL: usize = 50_000;
/// Most times that one proposal is corrected.
const MOST_CORRECTIONS: usize = 3;
/// Share of the score below which a gain is not worth a schedule.
const LEAST_GAIN: f64 = 1e-4;
/// How much better than predicted a policy may be: without any schedule of its kind, and with one at another size.
const UNKNOWN_KIND: f64 = 0.98;
const UNKNOWN_SIZE: f64 = 0.995;
/// Proposals above this many times the best score are dropped: no correction was ever larger.
const HOPELESS: f64 = 1.15;
const HOPELESS_IN_SMALL: f64 = 1.35;
/// In models with at most this many layers every set of layers is tried. In larger ones sets are the first layers, or spread.
const MOST_LAYERS_WITH_ALL_SETS: usize = 6;
/// Most numbers of layers with offloaded activations that are tried.
const MOST_COUNTS: usize = 32;

/// Which policy is best, among those that fit.
#[derive(Clone, Copy, Debug)]
pub enum Aim {
    Fastest,
    /// The fewest bytes transferred and offloaded, as shares of those of the fastest, among those that are as fast.
    LeastMoved {
        fastest: Measured,
    },
}

impl Aim {
    /// Lower is better; `None` if a policy that takes so long is out of the question.
    pub fn score(&self, ms: f64, moved_bytes: f64, offloaded_bytes: f64) -> Option<f64> {
        match self {
            Aim::Fastest => Some(ms),
            Aim::LeastMoved { fastest } if ms > AS_FAST * fastest.ms => None,
            Aim::LeastMoved { fastest } => {
                let moved = moved_bytes / fastest.moved_bytes.max(1.0);
                let offloaded = offloaded_bytes / fastest.offloaded_bytes.max(1) as f64;
                Some((moved + offloaded) / 2.0 + SHARE_PER_SLOWDOWN * (ms / fastest.ms - 1.0).max(0.0))
            }
        }
    }

    pub fn of(&self, measured: &Measured) -> Option<f64> {
        self.score(measured.ms, measured.moved_bytes, measured.offloaded_bytes as f64)
    }
}

/// Which activations are offloaded. The errors of predictions are alike within a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    None,
    /// The inputs of recomputed layers.
    Inputs,
    All,
    Some,
}

/// The sets of layers that are tried.
struct Sets {
    activations: Vec<(Kind, Activations)>,
    /// Layers with offloaded weights, for a head on the device and for an offloaded one.
    weights: [Vec<Weights>; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    size: usize,
    is_tiled: bool,
    kind: Kind,
    combination: usize,
}

struct Proposal {
    key: Key,
    best: Best,
    corrections: usize,
    /// How many errors were known when it was predicted.
    errors: usize,
}

/// The best sets of layers of a proposal.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Best {
    activations: usize,
    weights: usize,
    predicted: Predicted,
    score: f64,
}

/// What a schedule needed, compared with its prediction.
struct Correction {
    key: Key,
    bytes: f64,
    ms_ratio: f64,
}

pub struct Search<'a> {
    sizes: &'a [Size<'a>],
    table: &'a Table<'a>,
    sets: Sets,
    /// For each size: combinations of the choices for all layers, and what activations need.
    combinations: Vec<Vec<Policy>>,
    needs: Vec<Vec<Needs>>,
    /// For each size that fits with tiles alone.
    tiled: Vec<Option<(Rows, Vec<Needs>)>>,
    corrections: Vec<Correction>,
    is_small: bool,
    /// Bytes of the budget that proposals leave free, because packed plans may need more than their schedules.
    packing_bytes: f64,
}

impl<'a> Search<'a> {
    pub fn of(sizes: &'a [Size<'a>], table: &'a Table<'a>) -> Search<'a> {
        let sets = Sets::of(&sizes[0].freedom, table);
        let needs = |at: AtSize| sets.activations.iter().map(|(_, own)| at.needs(own)).collect();
        let needs = (0..sizes.len()).map(|size| needs(table.at(size))).collect();
        Search {
            sizes,
            table,
            combinations: sizes.iter().map(|size| size.freedom.combinations()).collect(),
            needs,
            tiled: sizes.iter().map(|_| None).collect(),
            corrections: Vec::new(),
            is_small: sizes[0].freedom.layers <= MOST_LAYERS_WITH_ALL_SETS,
            packing_bytes: 0.0,
            sets,
        }
    }

    /// From now on proposals leave this many bytes of the budget free.
    pub fn leave_for_packing(&mut self, bytes: u64) {
        self.packing_bytes = self.packing_bytes.max(bytes as f64);
    }

    /// Whether a schedule leaves that many bytes free.
    pub fn leaves_room(&self, measured: &Measured) -> bool {
        let budget_bytes = self.sizes[0].question.budget.device_bytes as f64;
        measured.bytes as f64 + self.packing_bytes <= budget_bytes
    }

    /// Schedules the policies that may be best. Those that fit become candidates of their sizes.
    pub fn run(&mut self, aim: Aim) {
        let mut proposals = self.proposals(aim);
        let mut scheduled = 0;
        let mut best_score = self.best_measured(aim);
        while let Some((next, promise)) = self.best_of(&proposals) {
            let Proposal { key, best, corrections, errors } = proposals.swap_remove(next);
            if promise >= best_score * (1.0 - LEAST_GAIN) {
                break;
            }
            if errors < self.corrections.len() {
                proposals.extend(self.proposal(key, aim, f64::INFINITY, corrections));
                continue;
            }
            if self.is_enough(scheduled, best_score) {
                break;
            }
            scheduled += 1;
            let measured = self.sizes[key.size].measure(&self.policy(key, &best));
            let (bytes, ms_ratio) = self.correction_of(key);
            let unscaled_ms = best.predicted.ms / ms_ratio;
            self.corrections.push(Correction {
                key,
                bytes: measured.bytes as f64 - (best.predicted.bytes - bytes),
                ms_ratio: measured.ms / unscaled_ms,
            });
            if self.sizes[key.size].is_within(&measured) && self.leaves_room(&measured) {
                best_score = aim.of(&measured).map_or(best_score, |score| best_score.min(score));
            }
            let again = self.proposal(key, aim, f64::INFINITY, corrections + 1);
            let is_other = |again: &Proposal| {
                (again.best.activations, again.best.weights) != (best.activations, best.weights)
            };
            proposals.extend(again.filter(is_other).filter(|_| corrections < MOST_CORRECTIONS));
        }
        if self.is_small && matches!(aim, Aim::Fastest) {
            let fits =
                |size: &Size, measured: &Measured| size.is_within(measured) && self.leaves_room(measured);
            descend_to_fastest(self.sizes, fits);
        }
    }

    /// Whether enough policies were scheduled, after this many.
    fn is_enough(&self, scheduled: usize, best_score: f64) -> bool {
        if self.is_small {
            return self.sizes[0].effort_steps() > MOST_STEPS_OF_SMALL;
        }
        let most = if best_score < f64::INFINITY { MOST_SCHEDULED } else { MOST_WITHOUT_SUCCESS };
        scheduled >= most || (scheduled >= MOST_SCHEDULED / 2 && self.sizes[0].is_spent())
    }

    /// The best score of all candidates so far.
    fn best_measured(&self, aim: Aim) -> f64 {
        let candidates = self.sizes.iter().flat_map(Size::candidates).map(|seen| seen.measured);
        let with_room = candidates.filter(|measured| self.leaves_room(measured));
        with_room.filter_map(|measured| aim.of(&measured)).fold(f64::INFINITY, f64::min)
    }

    /// The best proposal for every size, combination and kind that is predicted to fit.
    fn proposals(&mut self, aim: Aim) -> Vec<Proposal> {
        let mut found: Vec<Proposal> = Vec::new();
        let mut below = match aim {
            Aim::Fastest => f64::INFINITY,
            Aim::LeastMoved { .. } => self.best_measured(aim) / UNKNOWN_KIND,
        };
        let hopeless = if self.is_small { HOPELESS_IN_SMALL } else { HOPELESS };
        for size in 0..self.sizes.len() {
            for is_tiled in [false, true] {
                let fits = found.iter().any(|proposal| proposal.key.size == size);
                if is_tiled && (fits || !self.may_tile(size)) {
                    continue;
                }
                for combination in 0..self.combinations[size].len() {
                    for kind in [Kind::None, Kind::Inputs, Kind::All, Kind::Some] {
                        let key = Key { size, is_tiled, kind, combination };
                        let Some(proposal) = self.proposal(key, aim, below, 0) else { continue };
                        if matches!(aim, Aim::Fastest) {
                            below = below.min(hopeless * proposal.best.score);
                        }
                        found.push(proposal);
                    }
                }
            }
        }
        found.retain(|proposal| proposal.best.score < below);
        found
    }

    /// Whether tiles are open at a size; then makes its table with tiles.
    fn may_tile(&mut self, size: usize) -> bool {
        let freedom = &self.sizes[size].freedom;
        if freedom.tile().is_none() || freedom.pins.tile_tokens.is_some() {
            return false;
        }
        if self.tiled[size].is_none() {
            let rows = self.table.tiled(size);
            let at = self.table.with_rows(size, &rows);
            let needs = self.sets.activations.iter().map(|(_, own)| at.needs(own)).collect();
            self.tiled[size] = Some((rows, needs));
        }
        true
    }

    /// The proposal that promises most, and what it promises.
    fn best_of(&self, proposals: &[Proposal]) -> Option<(usize, f64)> {
        let promises = proposals.iter().map(|proposal| {
            if self.is_small && !self.is_corrected(proposal.key) {
                return WRONG_TIME * proposal.best.score;
            }
            let mut known = self.corrections.iter().filter(|own| self.are_alike(own.key, proposal.key));
            let trust = match known.next() {
                None => UNKNOWN_KIND,
                Some(first) => {
                    let is_here = |own: &Correction| own.key.size == proposal.key.size;
                    if is_here(first) || known.any(is_here) { 1.0 } else { UNKNOWN_SIZE }
                }
            };
            trust * proposal.best.score
        });
        promises.enumerate().min_by(|one, other| one.1.total_cmp(&other.1))
    }

    fn is_corrected(&self, key: Key) -> bool {
        self.corrections.iter().any(|own| own.key == key)
    }

    /// Whether the errors of two proposals are alike.
    fn are_alike(&self, one: Key, other: Key) -> bool {
        let gradients = |key: Key| self.combinations[key.size][key.combination].gradients;
        one.kind == other.kind && gradients(one) == gradients(other)
    }

    /// What the errors of schedules so far say about a proposal: bytes to add, and a factor of the time. Errors of the same
    /// proposal come first, then those of the same kind and size, then of the same kind, whose bytes grow with the tokens.
    fn correction_of(&self, key: Key) -> (f64, f64) {
        let is_alike = |own: Key| self.are_alike(own, key);
        let latest = |is_of: &dyn Fn(Key) -> bool| self.corrections.iter().rfind(|own| is_of(own.key));
        let found = latest(&|own| own == key)
            .or_else(|| latest(&|own| is_alike(own) && own.size == key.size))
            .or_else(|| latest(&is_alike));
        let tokens = |size: usize| self.sizes[size].request.extent.tokens as f64;
        found.map_or((0.0, 1.0), |own| (own.bytes * tokens(key.size) / tokens(own.key.size), own.ms_ratio))
    }

    /// The sets of layers with the best score below `below`, by corrected predictions.
    fn proposal(&self, key: Key, aim: Aim, mut below: f64, corrections: usize) -> Option<Proposal> {
        let Key { size, is_tiled, kind, combination } = key;
        let policy = &self.combinations[size][combination];
        let (at, needs) = match &self.tiled[size] {
            Some((rows, needs)) if is_tiled => (self.table.with_rows(size, rows), needs),
            _ => (self.table.at(size), &self.needs[size]),
        };
        let outside = at.outside(policy);
        let (wrong_bytes, ms_ratio) = self.correction_of(key);
        let budget = self.sizes[size].question.budget;
        let may_be_wrong = if self.is_small && !self.is_corrected(key) { WRONG_BYTES } else { 0.0 };
        let room_bytes = (1.0 + may_be_wrong) * budget.device_bytes as f64 - self.packing_bytes - wrong_bytes;
        let weights = &self.sets.weights[usize::from(policy.tables_offloaded)];
        let mut best: Option<Best> = None;
        for (index, (own, activations)) in self.sets.activations.iter().enumerate() {
            let needs = &needs[index];
            if *own != kind || is_above(&aim, ms_ratio * at.busiest_ms(&outside, needs, 0.0), 0.0, 0.0, below)
            {
                continue;
            }
            let Some((chosen, bytes)) = fewest_weights(&at, &outside, needs, weights, room_bytes) else {
                continue;
            };
            let chosen_weights = &weights[chosen];
            let offloaded_bytes = at.offloaded_bytes(&outside, needs, chosen_weights);
            let moved_bytes = at.moved_bytes(&outside, needs, chosen_weights);
            let busiest_ms = ms_ratio * at.busiest_ms(&outside, needs, chosen_weights.bytes);
            if offloaded_bytes > budget.offload_bytes as f64
                || is_above(&aim, busiest_ms, moved_bytes, offloaded_bytes, below)
            {
                continue;
            }
            let ms = ms_ratio * at.ms(policy, &outside, activations, chosen_weights);
            let Some(score) = aim.score(ms, moved_bytes, offloaded_bytes).filter(|score| *score < below)
            else {
                continue;
            };
            below = score;
            let predicted = Predicted { bytes: bytes + wrong_bytes, ms };
            best = Some(Best { activations: index, weights: chosen, predicted, score });
        }
        best.map(|best| Proposal { key, best, corrections, errors: self.corrections.len() })
    }

    fn policy(&self, key: Key, best: &Best) -> Policy {
        let first = self.combinations[key.size][key.combination].clone();
        let Activations { recompute, offloaded, .. } = self.sets.activations[best.activations].1.clone();
        let offloaded_weights =
            self.sets.weights[usize::from(first.tables_offloaded)][best.weights].layers.clone();
        let freedom = &self.sizes[key.size].freedom;
        let tile_tokens = if key.is_tiled { freedom.tile() } else { None };
        freedom.obeyed(with_activations(
            Policy { recompute, offloaded_weights, tile_tokens, ..first },
            offloaded,
        ))
    }
}

/// Whether the score of a policy that takes at least `ms` cannot be below `below`.
fn is_above(aim: &Aim, ms: f64, moved_bytes: f64, offloaded_bytes: f64, below: f64) -> bool {
    aim.score(ms, moved_bytes, offloaded_bytes).is_none_or(|score| score >= below)
}

/// The layers whose weights must be offloaded at least, and the bytes that the policy then needs.
fn fewest_weights(
    at: &AtSize,
    outside: &Outside,
    needs: &Needs,
    weights: &[Weights],
    room_bytes: f64,
) -> Option<(usize, f64)> {
    let resident_bytes = at.bytes(outside, needs, outside.streams);
    if weights[0].layers.is_empty() && resident_bytes <= room_bytes {
        return Some((0, resident_bytes));
    }
    let streaming_bytes = at.bytes(outside, needs, true);
    let is_too_large = |own: &Weights| own.layers.is_empty() || streaming_bytes - own.bytes > room_bytes;
    let fewest = weights.partition_point(is_too_large);
    weights.get(fewest).map(|own| (fewest, streaming_bytes - own.bytes))
}

impl Sets {
    fn of(freedom: &Freedom, table: &Table) -> Sets {
        let layers = freedom.layers;
        let pins = freedom.pins;
        let resident = freedom.resident();
        let recomputed = match &pins.recompute {
            Some(_) => vec![resident.recompute],
            None if layers <= MOST_LAYERS_WITH_ALL_SETS => subsets(layers),
            None => {
                let first = (0..=layers).map(LayerSet::first);
                let cheapest = table.cheapest_to_recompute().into_iter().flat_map(|order| {
                    (1..layers).map(|count| order[..count].iter().copied().collect()).collect::<Vec<_>>()
                });
                first.chain(cheapest).collect()
            }
        };
        let is_open = pins.offloaded_activations.is_none() && pins.activations != Some(Space::Device);
        let counts = (1..layers).step_by(layers.div_ceil(MOST_COUNTS));
        let spread: Vec<LayerSet> = counts.map(|count| LayerSet::spread(count, layers)).collect();
        let mut activations = Vec::new();
        for recompute in recomputed {
            let mut add = |kind, offloaded| {
                activations.push((kind, Activations::of(recompute.clone(), offloaded, layers)));
            };
            if !is_open {
                add(Kind::None, resident.offloaded_activations.clone());
                continue;
            }
            add(Kind::None, LayerSet::none());
            if !recompute.is_empty() {
                add(Kind::Inputs, recompute.clone());
            }
            add(Kind::All, LayerSet::all(layers));
            spread.iter().for_each(|offloaded| add(Kind::Some, offloaded.clone()));
        }
        let weights = [false, true].map(|tables_offloaded| {
            let pinned = Policy { tables_offloaded, ..freedom.first() };
            table.weights(match freedom.may_offload_weights() {
                false => vec![freedom.obeyed(pinned).offloaded_weights],
                true if layers <= MOST_LAYERS_WITH_ALL_SETS => subsets(layers),
                true => (0..=layers).map(|count| freedom.spread_weights(count, tables_offloaded)).collect(),
            })
        });
        Sets { activations, weights }
    }
}

fn subsets(layers: usize) -> Vec<LayerSet> {
    let set = |bits: usize| (0..layers).filter(|layer| bits >> layer & 1 == 1).collect();
    (0..1usize << layers).map(set).collect()
}
