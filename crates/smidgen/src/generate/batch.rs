//! Sequences that are generated together and enter and leave at any time.
//!
//! Each has its own settings and random numbers, so its tokens do not depend on the others. A sequence enters if the cache
//! has rows for it and its longest possible answer, so none is stopped by a lack of rows.
//! Used for lists of prompts (`session.rs`) and by the server, whose requests come and go.

use super::decoder::{Decoder, NewTokens};
use super::sampler::{Sampler, Sampling};
use super::stop::StoppedBy;
use crate::failure::Failure;
use smidgen_compile::DecodeShape;
use smidgen_runtime::{Device, Executor};
use std::collections::BTreeSet;

/// How tokens are chosen and when a text stops.
#[derive(Clone, Debug)]
pub struct Settings {
    pub sampling: Sampling,
    /// Maximum tokens of an answer.
    pub max_new: usize,
    /// Tokens that end a text (`stop::stop_ids`).
    pub stop_ids: BTreeSet<u32>,
}

/// A sequence to continue.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// The caller's number for it.
    pub number: usize,
    pub ids: Vec<u32>,
    pub settings: Settings,
    /// How many of the most likely tokens to report with each chosen one; `None` reports no probabilities.
    pub top: Option<usize>,
}

/// A new token of a sequence, or its end.
#[derive(Clone, Debug, PartialEq)]
pub struct News {
    pub number: usize,
    /// `None` if the sequence ended with a stop token.
    pub token: Option<u32>,
    pub probabilities: Option<Probabilities>,
    pub stopped: Option<StoppedBy>,
}

/// Natural logarithms of probabilities, before temperature and filters.
#[derive(Clone, Debug, PartialEq)]
pub struct Probabilities {
    pub chosen: f32,
    /// The most likely tokens, the most likely first.
    pub top: Vec<(u32, f32)>,
}

#[derive(Debug)]
pub struct Batch {
    /// The sequence in each slot.
    running: Vec<Option<Running>>,
    reserved_rows: usize,
    sampler: Sampler,
    shape: DecodeShape,
}

#[derive(Debug)]
struct Running {
    prompt: Prompt,
    /// Prompt and answer.
    sequence: Vec<u32>,
    generated: usize,
}

impl Batch {
    /// An empty batch. The decoder must have no sequences.
    pub fn new(shape: DecodeShape) -> Batch {
        let running = (0..shape.slots).map(|_| None).collect();
        Batch { running, reserved_rows: 0, sampler: Sampler::default(), shape }
    }

    pub fn is_empty(&self) -> bool {
        self.running.iter().all(Option::is_none)
    }

    /// The slot that a prompt would enter; `None` if it has to wait.
    pub fn room(&self, prompt: &Prompt) -> Option<usize> {
        let has_rows = self.reserved_rows + self.rows(prompt) <= self.shape.cache_rows;
        self.running.iter().position(Option::is_none).filter(|_| has_rows)
    }

    /// Rows of the cache for a prompt and its longest answer.
    fn rows(&self, prompt: &Prompt) -> usize {
        (prompt.ids.len() + prompt.settings.max_new).min(self.shape.positions).min(self.shape.cache_rows)
    }

    /// Enters a prompt into the slot that [`Batch::room`] returned.
    pub fn enter(&mut self, slot: usize, prompt: Prompt) -> Result<(), Failure> {
        check_prompt(prompt.number, &prompt.ids, self.shape)?;
        self.reserved_rows += self.rows(&prompt);
        let sequence = prompt.ids.clone();
        self.running[slot] = Some(Running { prompt, sequence, generated: 0 });
        Ok(())
    }

    /// Enters a prompt that may have the tokens of a sequence in the batch, whose rows of the cache are then shared.
    /// Returns the prompt if that sequence is not computed yet: it enters after the next step.
    fn enter_shared<D: Device>(
        &mut self,
        executor: &mut Executor<D>,
        decoder: &mut Decoder,
        slot: usize,
        prompt: Prompt,
    ) -> Result<Option<Prompt>, Failure> {
        let is_same = |running: &Option<Running>| {
            running.as_ref().is_some_and(|running| running.prompt.ids == prompt.ids)
        };
        // The last token is always computed, because its logits are needed.
        let shared = prompt.ids.len().saturating_sub(1);
        let same: Vec<usize> = (0..self.running.len()).filter(|slot| is_same(&self.running[*slot])).collect();
        let computed = same.iter().find(|slot| decoder.sequence(**slot).len() > shared);
        match computed {
            Some(from) if shared > 0 => {
                decoder.share(executor, *from, slot)?;
                decoder.truncate(slot, shared);
            }
            None if shared > 0 && !same.is_empty() => return Ok(Some(prompt)),
            _ => {}
        }
        self.enter(slot, prompt).map(|()| None)
    }

    /// Removes a sequence before its end.
    pub fn remove(&mut self, decoder: &mut Decoder, number: usize) {
        let is_it = |running: &Option<Running>| running.as_ref().is_some_and(|it| it.prompt.number == number);
        if let Some(slot) = self.running.iter().position(is_it) {
            self.leave(decoder, slot);
        }
    }

    fn leave(&mut self, decoder: &mut Decoder, slot: usize) {
        if let Some(running) = self.running[slot].take() {
            self.reserved_rows -= self.rows(&running.prompt);
            decoder.truncate(slot, 0);
        }
    }

    /// One more token of every sequence. Sequences that end leave the batch.
    pub fn step<D: Device>(
        &mut self,
        executor: &mut Executor<D>,
        decoder: &mut Decoder,
    ) -> Result<Vec<News>, Failure> {
        let slots: Vec<usize> = (0..self.shape.slots).filter(|slot| self.running[*slot].is_some()).collect();
        let (running, sampler) = (&self.running, &mut self.sampler);
        let in_slot = |slot: usize| running[slot].as_ref().expect("only slots with a sequence");
        let new: Vec<NewTokens<'_>> = slots
            .iter()
            .map(|&slot| NewTokens { slot, ids: &in_slot(slot).sequence[decoder.sequence(slot).len()..] })
            .collect();
        let mut chosen: Vec<Option<(u32, Option<Probabilities>)>> = vec![None; slots.len()];
        decoder.feed(executor, &new, |index, logits| {
            let Running { prompt, sequence, generated } = in_slot(slots[index]);
            // The sampler changes the logits.
            let unchanged = prompt.top.map(|_| logits.to_vec());
            let token = sampler.with(prompt.settings.sampling).choose(logits, sequence, *generated);
            chosen[index] = token.map(|token| {
                let counted = unchanged.as_deref().zip(prompt.top);
                (token, counted.map(|(logits, top)| probabilities(logits, token, top)))
            });
        })?;
        let mut news = Vec::with_capacity(slots.len());
        for (slot, chosen) in slots.into_iter().zip(chosen) {
            let running = self.running[slot].as_mut().expect("only slots with a sequence");
            let (token, probabilities) = chosen.ok_or_else(|| running.nan_logits())?;
            let stopped = running.push(token, self.shape.positions.min(self.shape.cache_rows));
            let number = running.prompt.number;
            let token = Some(token).filter(|_| !matches!(stopped, Some(StoppedBy::Token(_))));
            news.push(News { number, token, probabilities, stopped });
            if stopped.is_some() {
                self.leave(decoder, slot);
            }
        }
        Ok(news)
    }
}

/// Continues every prompt, as many at the same time as slots and cache rows allow, after the cache was cleared.
///
/// A prompt starts when there are rows for it and its longest possible answer, so no text is stopped by a lack of rows.
/// `begin` is called with the slot and the number of a prompt before it starts; `on_news` returns whether its sequence goes
/// on. With `shares`, prompts with the same tokens are computed once while one of them is in the batch.
pub fn continue_all<D: Device>(
    executor: &mut Executor<D>,
    decoder: &mut Decoder,
    prompts: impl Iterator<Item = Prompt>,
    shares: bool,
    begin: &mut dyn FnMut(&mut Decoder, usize, usize) -> Result<(), Failure>,
    mut on_news: impl FnMut(&News) -> Result<bool, Failure>,
) -> Result<(), Failure> {
    decoder.reset();
    let shares = shares && decoder.keeps_every_position();
    let mut waiting = prompts.peekable();
    let mut batch = Batch::new(decoder.shape());
    let mut held: Option<Prompt> = None;
    while waiting.peek().is_some() || held.is_some() || !batch.is_empty() {
        while let Some(slot) = held.as_ref().or(waiting.peek()).and_then(|prompt| batch.room(prompt)) {
            let Some(prompt) = held.take().or_else(|| waiting.next()) else { break };
            begin(decoder, slot, prompt.number)?;
            if shares {
                held = batch.enter_shared(executor, decoder, slot, prompt)?;
            } else {
                batch.enter(slot, prompt)?;
            }
            if held.is_some() {
                break;
            }
        }
        for news in batch.step(executor, decoder)? {
            if !on_news(&news)? && news.stopped.is_none() {
                batch.remove(decoder, news.number);
            }
        }
    }
    Ok(())
}

impl Running {
    /// Adds a token; returns why the text ends, if it does.
    fn push(&mut self, id: u32, positions: usize) -> Option<StoppedBy> {
        if self.prompt.settings.stop_ids.contains(&id) {
            return Some(StoppedBy::Token(id));
        }
        self.sequence.push(id);
        self.generated += 1;
        if self.generated >= self.prompt.settings.max_new {
            return Some(StoppedBy::MaxTokens);
        }
        // The token itself needs a position before another can follow.
        (self.sequence.len() > positions).then_some(StoppedBy::Context)
    }

    fn nan_logits(&self) -> Failure {
        Failure::model(format!(
            "the logits after token {} of prompt {} are NaN: the weights or the adapter are broken",
            self.sequence.len(),
            self.prompt.number
        ))
    }
}

fn probabilities(logits: &[f32], chosen: u32, top: usize) -> Probabilities {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
    let shift = f64::from(largest) + total.ln();
    let of = |id: u32| (f64::from(logits[id as usize]) - shift) as f32;
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let falling = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let top = top.min(ids.len());
    if 0 < top && top < ids.len() {
        ids.select_nth_unstable_by(top - 1, falling);
    }
    ids.truncate(top);
    ids.sort_unstable_by(falling);
    Probabilities { chosen: of(chosen), top: ids.into_iter().map(|id| (id, of(id))).collect() }
}

pub(super) fn check_prompt(index: usize, ids: &[u32], shape: DecodeShape) -> Result<(), Failure> {
    let room = shape.positions.min(shape.cache_rows);
    match ids.len() {
        0 => Err(Failure::data(format!("prompt {index} has no tokens"))),
        tokens if tokens > room => {
            Err(Failure::data(format!("prompt {index} has {tokens} tokens, the context holds {room}"))
                .hint(format!("set `--context {}` or more", tokens + 1)))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_those_of_the_softmax() {
        let logits = [1.0f32.ln(), 3.0f32.ln(), 4.0f32.ln(), 0.0f32.ln()];
        let found = probabilities(&logits, 1, 2);
        let near = |one: f32, other: f32| (one - other).abs() < 1e-6;
        assert!(near(found.chosen, (3.0f32 / 8.0).ln()), "{found:?}");
        assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2, 1]);
        assert!(near(found.top[0].1, 0.5f32.ln()) && near(found.top[1].1, found.chosen), "{found:?}");
        assert_eq!(probabilities(&logits, 2, 0).top, []);
        assert_eq!(probabilities(&logits, 2, 9).top.len(), 4);
    }
}
