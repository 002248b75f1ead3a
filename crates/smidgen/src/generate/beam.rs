//! Beam search, as transformers does it with `num_beams` and no sampling.
//!
//! Each step considers the best 2·B continuations of all beams. Those among the first B that end with a stop token
//! become finished texts with the score Σ log p / length^penalty; the best B others continue. A search ends when
//! there are B finished texts and no live beam can beat the worst of them (`early_stopping = False`), or when the
//! context is full.
//! The length in a score counts the tokens of the answer and the stop token.
//! Beams share the cache rows of their common prefix, so switching parents copies no keys and values.
//! Left out: groups of beams, sampling beams, and penalties.

use super::batch::check_prompt;
use super::decoder::NewTokens;
use super::session::{Generated, TokenSession};
use super::stop::StoppedBy;
use crate::failure::Failure;
use std::cmp::Ordering;
use std::collections::BTreeSet;

#[derive(Clone, Debug)]
pub struct BeamSettings {
    pub beams: usize,
    /// Maximum tokens of an answer.
    pub max_new: usize,
    pub length_penalty: f64,
    pub stop_ids: BTreeSet<u32>,
}

/// An unfinished text.
#[derive(Clone, Debug)]
struct Beam {
    slot: usize,
    answer: Vec<u32>,
    /// Σ log p of the answer.
    score: f64,
}

/// A finished text.
#[derive(Clone, Debug)]
struct Finished {
    answer: Vec<u32>,
    score: f64,
    stopped_by: StoppedBy,
}

/// A candidate continuation of a beam.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Offer {
    beam: usize,
    id: u32,
    score: f64,
}

impl TokenSession {
    /// The best continuation of a prompt. Needs as many slots as beams, and clears all sequences.
    pub fn search_beams(&mut self, prompt: &[u32], settings: &BeamSettings) -> Result<Generated, Failure> {
        let (executor, decoder) = self.parts();
        let count = settings.beams.max(1);
        let shape = decoder.shape();
        check_prompt(0, prompt, shape)?;
        if count > shape.slots {
            return Err(Failure::recipe(format!(
                "{count} beams need {count} slots, the plan has {}",
                shape.slots
            )));
        }
        decoder.reset();
        // Rows for the prompt and, in the worst case, a separate answer for each beam.
        let room = (shape.cache_rows - prompt.len()) / count;
        let room = room.min(shape.positions - prompt.len()) + 1;
        let mut offers = Vec::new();
        let first = [NewTokens { slot: 0, ids: prompt }];
        decoder.feed(executor, &first, |_, logits| offer(logits, 0, 0.0, 2 * count, &mut offers))?;
        let mut beams = vec![Beam { slot: 0, answer: Vec::new(), score: 0.0 }];
        let mut finished: Vec<Finished> = Vec::new();
        for place in 1.. {
            offers.sort_by(best_first);
            offers.truncate(2 * count);
            if offers.is_empty() {
                return Err(Failure::model("the logits are NaN: the weights or the adapter are broken"));
            }
            let mut next: Vec<Beam> = Vec::with_capacity(count);
            for (rank, offered) in offers.iter().enumerate() {
                let mut answer = beams[offered.beam].answer.clone();
                if settings.stop_ids.contains(&offered.id) {
                    if rank < count {
                        let score = offered.score / (place as f64).powf(settings.length_penalty);
                        let stopped_by = StoppedBy::Token(offered.id);
                        keep_best(&mut finished, Finished { answer, score, stopped_by }, count);
                    }
                    continue;
                }
                answer.push(offered.id);
                next.push(Beam { slot: beams[offered.beam].slot, answer, score: offered.score });
                if next.len() == count {
                    break;
                }
            }
            let ended = [(settings.max_new, StoppedBy::MaxTokens), (room, StoppedBy::Context)]
                .into_iter()
                .find(|(limit, _)| place >= *limit);
            if is_done(&finished, &next, place, count, settings.length_penalty) {
                break;
            }
            if let Some((_, stopped_by)) = ended {
                for Beam { answer, score, .. } in next {
                    let score = score / (place as f64).powf(settings.length_penalty);
                    keep_best(&mut finished, Finished { answer, score, stopped_by }, count);
                }
                break;
            }
            let parents: Vec<usize> = next.iter().map(|beam| beam.slot).collect();
            for (beam, slot) in next.iter_mut().zip(slots_of_children(&parents, count)) {
                decoder.share(executor, beam.slot, slot)?;
                beam.slot = slot;
            }
            beams = next;
            offers.clear();
            let last: Vec<[u32; 1]> = beams.iter().map(|beam| [beam.answer[place - 1]]).collect();
            let fed: Vec<NewTokens<'_>> =
                beams.iter().zip(&last).map(|(beam, id)| NewTokens { slot: beam.slot, ids: id }).collect();
            decoder.feed(executor, &fed, |beam, logits| {
                offer(logits, beam, beams[beam].score, 2 * count, &mut offers);
            })?;
        }
        let best =
            finished.into_iter().reduce(|best, next| if next.score > best.score { next } else { best });
        let Finished { answer, stopped_by, .. } = best.expect("a search ends with a finished text");
        Ok(Generated { ids: answer, stopped_by })
    }
}

/// The slots of new beams, from the slots of their parents: the first child keeps its parent's slot, and the others
/// take the slots of beams without children.
fn slots_of_children(parents: &[usize], count: usize) -> Vec<usize> {
    let mut free = (0..count).filter(|slot| !parents.contains(slot));
    let mut kept = BTreeSet::new();
    let slot = |parent: &usize| {
        if kept.insert(*parent) { *parent } else { free.next().expect("no more beams than slots") }
    };
    parents.iter().map(slot).collect()
}

fn is_done(finished: &[Finished], next: &[Beam], place: usize, count: usize, length_penalty: f64) -> bool {
    if finished.len() < count {
        return false;
    }
    let worst = finished.iter().map(|text| text.score).fold(f64::INFINITY, f64::min);
    let best = next.iter().map(|beam| beam.score).fold(f64::NEG_INFINITY, f64::max);
    worst >= best / (place as f64).powf(length_penalty)
}

fn keep_best(finished: &mut Vec<Finished>, text: Finished, count: usize) {
    finished.push(text);
    if finished.len() > count {
        let worst = (0..finished.len()).min_by(|a, b| finished[*a].score.total_cmp(&finished[*b].score));
        finished.remove(worst.expect("there is one"));
    }
}

/// Adds the best `count` continuations of a beam.
fn offer(logits: &[f32], beam: usize, score: f64, count: usize, offers: &mut Vec<Offer>) {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let total: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
    let base = largest + total.ln();
    let mut best: Vec<Offer> = Vec::with_capacity(count + 1);
    for (id, logit) in logits.iter().enumerate() {
        let offer = Offer { beam, id: id as u32, score: score + f64::from(*logit) - base };
        if offer.score.is_nan() || (best.len() == count && best_first(&best[count - 1], &offer).is_lt()) {
            continue;
        }
        let at = best.partition_point(|other| best_first(other, &offer).is_lt());
        best.insert(at, offer);
        best.truncate(count);
    }
    offers.extend(best);
}

/// Sorts by descending score, then by beam, then by token id.
fn best_first(a: &Offer, b: &Offer) -> Ordering {
    b.score.total_cmp(&a.score).then(a.beam.cmp(&b.beam)).then(a.id.cmp(&b.id))
}
