//! The least that any policy takes at one size of micro-batch.
//!
//! Choices that send away and compute again what they can are where it begins; from there one choice after the other
//! is made otherwise, and what takes less stays, until none does. What is alive decides on the way, and in the end the
//! plan: of all that was seen, those of which less is alive than the leanest plan takes are packed. Budgets play no part,
//! so that what is stated where nothing fits is what fits where it is the budget.

use crate::attempt::{Attempt, HEAD_REGION, OTHER_REGION, STEPS_OF_SMALL};
use crate::ladder::{Choices, Waiting};
use crate::question::Budget;
use crate::request::Policy;

/// A policy, and what its plan takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Leanest {
    pub policy: Policy,
    pub peak_bytes: u64,
}

/// The leanest policy that has at most so much elsewhere; none where every policy has more.
pub fn leanest(attempt: &Attempt, most_elsewhere_bytes: u64) -> Option<Leanest> {
    let bytes = |choices: &Choices| {
        let taken = attempt.taken(choices);
        if taken.elsewhere_bytes <= most_elsewhere_bytes { taken.bytes } else { u64::MAX }
    };
    let effort_before = attempt.effort_steps();
    let first = attempt.leanest_choices();
    let taken = attempt.taken(&first);
    // Where not everything can be away, what is has to be found too.
    let is_small = taken.steps <= STEPS_OF_SMALL || taken.elsewhere_bytes > most_elsewhere_bytes;
    let all_away = ways_of_activations(attempt, first).into_iter().min_by_key(bytes).expect("there is a way");
    descend(attempt, all_away, is_small, bytes);
    if is_small {
        little_away(attempt).into_iter().for_each(|start| descend(attempt, start, is_small, bytes));
    }
    attempt.set_effort_steps(effort_before);
    let mut seen = attempt.seen_within(most_elsewhere_bytes);
    seen.sort_by(|(_, one), (_, other)| one.bytes.cmp(&other.bytes).then(one.ms.total_cmp(&other.ms)));
    let within = Budget { device_bytes: u64::MAX, elsewhere_bytes: most_elsewhere_bytes };
    let mut best: Option<Leanest> = None;
    for (policy, taken) in seen {
        if best.as_ref().is_some_and(|best| best.peak_bytes <= taken.bytes) {
            break;
        }
        let Some(peak_bytes) = attempt.packed_peak_bytes(&policy, within) else { continue };
        if best.as_ref().is_none_or(|best| peak_bytes < best.peak_bytes) {
            best = Some(Leanest { policy, peak_bytes });
        }
    }
    best
}

/// Everything away, and activations computed again, away, or both, for all tokens at once or for some.
fn ways_of_activations(attempt: &Attempt, first: Choices) -> Vec<Choices> {
    let layers = attempt.freedom.layers;
    let recomputed = [layers, layers.saturating_sub(1), 0];
    let mut all = Vec::new();
    for tile_tokens in [first.tile_tokens, None] {
        for activations in [Waiting::OfRecomputed, Waiting::All] {
            all.extend(recomputed.map(|recomputed| Choices {
                recomputed,
                activations,
                tile_tokens,
                ..first
            }));
        }
    }
    // Nothing computed again and nothing away is what the others are leaner than.
    all.retain(|choices| choices.recomputed > 0 || choices.activations == Waiting::All);
    all
}

/// For models so small that transfers take more than they save.
fn little_away(attempt: &Attempt) -> Vec<Choices> {
    let freedom = &attempt.freedom;
    let fewest_rows = *attempt.chunks.last().expect("there is a chunk of logits");
    let here = Choices { recomputed: freedom.layers.saturating_sub(1), ..freedom.start(fewest_rows) };
    let weights = Choices { weights_away: freedom.layers, window_layers: 0, ..here };
    vec![here, Choices { embedding_away: freedom.has_own_embedding, ..here }, weights]
}

/// Makes one choice after the other otherwise, as long as that takes less.
fn descend(attempt: &Attempt, start: Choices, is_small: bool, bytes: impl Fn(&Choices) -> u64) {
    let layers = attempt.freedom.layers;
    let (mut point, mut least) = (start, bytes(&start));
    loop {
        let before = point;
        let mut try_choices = |other: Choices, point: &mut Choices| {
            let taken = bytes(&other);
            let is_less = taken < least;
            if is_less {
                (*point, least) = (other, taken);
            }
            is_less
        };
        for axis in AXES.iter().take(if is_small { AXES.len() } else { AXES_OF_LARGE }) {
            for other in axis(attempt, &point) {
                try_choices(other, &mut point);
            }
        }
        for count in COUNTS.iter().take(if is_small { 2 } else { 1 }) {
            for is_upwards in [false, true] {
                // What is alive changes along counts in straight stretches: longer steps as long as it falls.
                let mut stride = 1;
                loop {
                    let at = *count(&mut point.clone());
                    let next = if is_upwards { (at + stride).min(layers) } else { at.saturating_sub(stride) };
                    let mut other = point;
                    *count(&mut other) = next;
                    match next != at && try_choices(other, &mut point) {
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

/// Numbers of layers that are chosen.
const COUNTS: [fn(&mut Choices) -> &mut usize; 2] =
    [|choices| &mut choices.recomputed, |choices| &mut choices.weights_away];

type Axis = fn(&Attempt, &Choices) -> Vec<Choices>;

/// For each kind of choice, the others that there are; of counts of layers, the ends. In large models what is decided
/// is left out: everything is away, and the ways of activations were looked at.
const AXES_OF_LARGE: usize = 2;
const AXES: [Axis; 8] = [
    |attempt, point| {
        let embedding_away = attempt.freedom.has_own_embedding;
        let tables = Choices { tables_away: true, head_in_pieces: false, embedding_away: false, ..*point };
        let here = Choices { tables_away: false, ..tables };
        let pieces = Choices { head_in_pieces: attempt.freedom.head_pieces > 1, ..tables };
        vec![tables, pieces, here, Choices { embedding_away, ..here }]
    },
    // As many rows of logits as usual take no more, unless the loss has the peak, and are faster.
    |attempt, point| {
        let chunks = match attempt.taken(point).peak_region() {
            HEAD_REGION | OTHER_REGION => &attempt.chunks[..],
            _ => &attempt.chunks[..1],
        };
        chunks.iter().map(|chunk| Choices { loss_chunk: *chunk, ..*point }).collect()
    },
    |attempt, point| {
        let layers = attempt.freedom.layers;
        let counts = [layers, layers.saturating_sub(1), point.recomputed / 2, 0];
        counts.map(|recomputed| Choices { recomputed, ..*point }).to_vec()
    },
    |_, point| {
        let all = [Waiting::None, Waiting::OfRecomputed, Waiting::All];
        all.map(|activations| Choices { activations, ..*point }).to_vec()
    },
    |attempt, point| {
        [attempt.freedom.layers, 0].map(|weights_away| Choices { weights_away, ..*point }).to_vec()
    },
    |_, point| [false, true].map(|moments_away| Choices { moments_away, ..*point }).to_vec(),
    |attempt, point| {
        let tile = attempt.freedom.tile(attempt.demand.extent.tokens);
        [None, tile].map(|tile_tokens| Choices { tile_tokens, ..*point }).to_vec()
    },
    |_, point| [0, 1].map(|window_layers| Choices { window_layers, ..*point }).to_vec(),
];
