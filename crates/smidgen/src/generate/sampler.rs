//! Chooses the next token from its logits: greedy, or by sampling.
//!
//! The order is that of transformers: repetition penalty, temperature, top-k, top-p, with the same edge cases
//! (candidates equal to the k-th largest stay; the candidate that reaches top-p stays). A random number is a function
//! of the seed and the position in the text, so a text does not depend on threads or on other texts in the batch.
//! Ties go to the lowest id. Left out: min-p, typical sampling, penalties by count, and constraints.

use smidgen_runtime::counter;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy: then only the repetition penalty applies.
    pub temperature: f64,
    /// Only this many of the most likely tokens; 0 = all.
    pub top_k: usize,
    /// The fewest most likely tokens whose probabilities sum to this; 1 = all.
    pub top_p: f64,
    /// Logits of tokens that already occurred are divided by this, or multiplied if negative; 1 = no penalty.
    pub repetition_penalty: f64,
    /// Random numbers depend on the seed and the position in the text.
    pub seed: u64,
}

/// Greedy: the most likely token.
impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, repetition_penalty: 1.0, seed: 0 }
    }
}

/// A sampler with its buffers, allocated once.
#[derive(Clone, Debug, Default)]
pub struct Sampler {
    sampling: Sampling,
    candidates: Vec<Candidate>,
}

/// A token that may be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    pub id: u32,
    pub logit: f32,
}

impl Sampler {
    pub fn new(sampling: Sampling) -> Sampler {
        Sampler { sampling, candidates: Vec::new() }
    }

    /// The sampler with other settings, for another text.
    pub fn with(&mut self, sampling: Sampling) -> &mut Sampler {
        self.sampling = sampling;
        self
    }

    /// The next token after the sequence `so_far`; `place` is its number (from 0) in the answer. `None` if all logits
    /// are NaN.
    /// The logits are modified.
    pub fn choose(&mut self, logits: &mut [f32], so_far: &[u32], place: usize) -> Option<u32> {
        if self.sampling.repetition_penalty != 1.0 {
            penalize(logits, so_far, self.sampling.repetition_penalty as f32);
        }
        if self.sampling.temperature == 0.0 {
            return most_likely(logits);
        }
        most_likely(logits)?;
        self.filter(logits);
        let largest = self.candidates.iter().map(|candidate| candidate.logit).fold(f32::MIN, f32::max);
        let weight = |candidate: &Candidate| f64::from(candidate.logit - largest).exp();
        let total: f64 = self.candidates.iter().map(weight).sum();
        let target = total * uniform(self.sampling.seed, place as u64);
        let mut sum = 0.0;
        for candidate in &self.candidates {
            sum += weight(candidate);
            if sum > target {
                return Some(candidate.id);
            }
        }
        self.candidates.last().map(|candidate| candidate.id)
    }

    /// Sets the candidates: temperature, top-k and top-p, sorted by id.
    fn filter(&mut self, logits: &[f32]) {
        let Sampling { temperature, top_k, top_p, .. } = self.sampling;
        let temperature = temperature as f32;
        self.candidates.clear();
        let all = logits.iter().enumerate().filter(|(_, logit)| **logit > f32::NEG_INFINITY);
        self.candidates
            .extend(all.map(|(id, logit)| Candidate { id: id as u32, logit: logit / temperature }));
        if 0 < top_k && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, by_falling_logit);
            let least = self.candidates[top_k - 1].logit;
            self.candidates.retain(|candidate| candidate.logit >= least);
        }
        if top_p < 1.0 {
            self.candidates.sort_unstable_by(by_falling_logit);
            let largest = self.candidates[0].logit;
            let weight = |candidate: &Candidate| f64::from(candidate.logit - largest).exp();
            let total: f64 = self.candidates.iter().map(weight).sum();
            let mut before = 0.0;
            let kept = self.candidates.iter().take_while(|candidate| {
                let keep = before / total < top_p;
                before += weight(candidate);
                keep
            });
            let kept = kept.count().max(1);
            self.candidates.truncate(kept);
        }
        self.candidates.sort_unstable_by_key(|candidate| candidate.id);
    }
}

/// The token with the largest logit; the lowest id of equal ones; `None` if no logit is above -∞.
pub fn most_likely(logits: &[f32]) -> Option<u32> {
    // Sixteen lanes compile to vector instructions. A comparison with NaN is false, so NaN is ignored.
    let larger = |most: f32, logit: f32| if logit > most { logit } else { most };
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = logits.as_chunks::<16>();
    for chunk in chunks {
        for (lane, logit) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, *logit);
        }
    }
    let largest = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |most, logit| larger(most, *logit));
    let place = || logits.iter().position(|logit| *logit == largest);
    (largest > f32::NEG_INFINITY).then(place).flatten().map(|id| id as u32)
}

fn penalize(logits: &mut [f32], so_far: &[u32], penalty: f32) {
    let mut seen: Vec<u32> = so_far.iter().copied().filter(|id| (*id as usize) < logits.len()).collect();
    seen.sort_unstable();
    seen.dedup();
    for id in seen {
        let logit = &mut logits[id as usize];
        *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
    }
}

fn by_falling_logit(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Separates the random numbers of generation from those of dropout, which have the step number in this place.
const STREAM: u64 = u64::MAX;

/// In [0, 1), a multiple of 2^-53.
fn uniform(seed: u64, place: u64) -> f64 {
    (counter::token_key(seed, STREAM, 0, place) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
