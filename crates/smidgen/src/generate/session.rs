//! A model loaded for generation, used by `smidgen generate` and by evaluations.
//!
//! Opening plans first and then loads, so a generation that does not fit is refused before a weight is read.
//! A batch keeps the slots full: when a text ends, the next prompt takes its slot. The result of a prompt does not
//! depend on the other prompts.
//! Left out: templates and text; a session works with token ids.

use super::decoder::{Decoder, NewTokens, Sound};
use super::sampler::{Sampler, Sampling};
use super::stop::StoppedBy;
use crate::failure::Failure;
use crate::machine::process_memory::read_rss;
use crate::plan::arithmetic::Arithmetic;
use crate::plan::devices::JobDevice;
use crate::plan::generation::{GenerationPlan, Sizes, plan_generation};
use crate::plan::job::check_range;
use crate::plan::model::build_storage;
use crate::session::adapted::build_adapted_request;
use crate::session::adapters::read_adapter;
use crate::session::encoding::encode_numbers;
use crate::session::weights::{leaf, load_weights};
use smidgen_compile::names::input;
use smidgen_compile::{DecodeShape, Request};
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_ir::Entry;
use smidgen_recipe::BaseFormat;
use smidgen_runtime::{AnyDevice, Device, Executor};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// The model to open, and where.
#[derive(Clone, Copy, Debug)]
pub struct Opening<'a> {
    pub model: &'a Model,
    pub adapter: Option<&'a AdapterFile>,
    /// The storage of the base weights.
    pub base: BaseFormat,
    pub place: &'a JobDevice,
    pub arithmetic: Arithmetic,
    /// CPU threads, at least one.
    pub threads: usize,
    pub sizes: Sizes,
}

impl Opening<'_> {
    pub fn request(&self) -> Result<Request, Failure> {
        let request = build_adapted_request(self.model, self.adapter)?;
        check_range(&request.spec.model_type, self.arithmetic)?;
        Ok(Request {
            storage: build_storage(self.base, &request.spec, self.model),
            device: self.place.kind(),
            precision: self.arithmetic.precision(),
            threads: self.threads,
            ..request
        })
    }
}

/// How tokens are chosen and when a text stops.
#[derive(Clone, Debug)]
pub struct Settings {
    pub sampling: Sampling,
    /// Maximum tokens of an answer.
    pub max_new: usize,
    /// Tokens that end a text (`stop::stop_ids`).
    pub stop_ids: BTreeSet<u32>,
}

/// The continuation of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The new tokens, without the stop token.
    pub ids: Vec<u32>,
    pub stopped_by: StoppedBy,
}

/// The times of a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// Tokens of prompts, which are processed in chunks.
    pub prompt_tokens: usize,
    pub prompt_ms: f64,
    /// Tokens that were generated, one by one.
    pub answer_tokens: usize,
    pub answer_ms: f64,
}

impl Timing {
    pub fn prompt_tokens_per_s(&self) -> Option<f64> {
        (self.prompt_ms > 0.0).then(|| self.prompt_tokens as f64 / self.prompt_ms * 1e3)
    }

    pub fn answer_tokens_per_s(&self) -> Option<f64> {
        (self.answer_ms > 0.0).then(|| self.answer_tokens as f64 / self.answer_ms * 1e3)
    }
}

#[derive(Debug)]
pub struct TokenSession {
    executor: Executor<AnyDevice>,
    decoder: Decoder,
    planned_bytes: u64,
}

impl TokenSession {
    /// Plans a model and loads it onto an open device, whose previous content is discarded. Calls `on_plan` with the
    /// plan before loading.
    pub fn open(
        opening: &Opening<'_>,
        device: AnyDevice,
        on_plan: impl FnOnce(&GenerationPlan) -> Result<(), Failure>,
    ) -> Result<TokenSession, Failure> {
        let request = opening.request()?;
        let planned = plan_generation(&request, opening.model, opening.place, &opening.sizes)?;
        if !opening.model.has_weights() {
            let place = opening.model.path().display();
            return Err(Failure::model(format!("`{place}` has a config but no weights")));
        }
        on_plan(&planned)?;
        let GenerationPlan { plan, shape, peak_bytes, .. } = planned;
        let extent = plan.extent;
        let decoder = Decoder::of(&plan, &request.spec, shape);
        let mut executor = Executor::load(plan, device)?;
        load_weights(&mut executor, opening.model, opening.threads)?;
        if let Some(adapter) = opening.adapter {
            read_adapter(&mut executor, &request, adapter.path())?;
        }
        executor.run(Entry::Refresh, &extent)?;
        Ok(TokenSession { executor, decoder, planned_bytes: peak_bytes })
    }

    /// Sets the embeddings (rows, C) that replace the audio token in the prompts that follow.
    pub fn set_audio(&mut self, token: u32, embeddings: &[f32]) {
        let plan = self.executor.plan();
        let ty = &plan.value(leaf(plan, input::AUDIO_ROWS)).ty;
        let dtype = ty.storage.plain().expect("activations are plain numbers");
        let row_bytes = ty.shape.at(&plan.extent).1 * dtype.bytes();
        let sound = Arc::new(Sound { token, rows: encode_numbers(embeddings, dtype), row_bytes });
        for slot in 0..self.decoder.shape().slots {
            self.decoder.set_audio(slot, Some(Arc::clone(&sound)));
        }
    }

    pub fn planned_bytes(&self) -> u64 {
        self.planned_bytes
    }

    /// Peak memory so far, if known: of the GPU, or of the process.
    pub fn measured_bytes(&mut self) -> Option<u64> {
        match self.executor.device_mut() {
            AnyDevice::Cpu(_) => read_rss().map(|memory| memory.peak_bytes),
            AnyDevice::Cuda(cuda) => cuda.memory().map(|memory| memory.peak_bytes),
        }
    }

    /// Returns the device for another session.
    pub fn into_device(self) -> AnyDevice {
        self.executor.into_device()
    }

    pub fn shape(&self) -> DecodeShape {
        self.decoder.shape()
    }

    /// Continues every prompt. Calls `on_token` with the number of the prompt and each token.
    pub fn generate_batch(
        &mut self,
        prompts: &[Vec<u32>],
        settings: &Settings,
        on_token: impl FnMut(usize, u32),
    ) -> Result<Vec<Generated>, Failure> {
        self.continue_prompts(prompts, settings, |_, _, _| Ok(()), on_token)
    }

    /// Continues prompts that each have their own audio.
    pub fn transcribe_batch(
        &mut self,
        prompts: &[Vec<u32>],
        settings: &Settings,
        mut sound_of: impl FnMut(usize) -> Result<Option<Sound>, Failure>,
    ) -> Result<Vec<Generated>, Failure> {
        let begin = |decoder: &mut Decoder, slot: usize, prompt: usize| {
            decoder.set_audio(slot, sound_of(prompt)?.map(Arc::new));
            Ok(())
        };
        self.continue_prompts(prompts, settings, begin, |_, _| {})
    }

    /// Continues every prompt, as many at the same time as slots and cache rows allow.
    ///
    /// The cache is cleared first. A prompt starts when there are rows for it and its longest possible answer, so no
    /// text is stopped by a lack of rows. `begin` is called with the slot and the number of a prompt before it
    /// starts.
    fn continue_prompts(
        &mut self,
        prompts: &[Vec<u32>],
        settings: &Settings,
        mut begin: impl FnMut(&mut Decoder, usize, usize) -> Result<(), Failure>,
        mut on_token: impl FnMut(usize, u32),
    ) -> Result<Vec<Generated>, Failure> {
        let (executor, decoder) = (&mut self.executor, &mut self.decoder);
        decoder.reset();
        let shape = decoder.shape();
        for (index, prompt) in prompts.iter().enumerate() {
            check_prompt(index, prompt, shape)?;
        }
        let needed =
            |prompt: &Vec<u32>| (prompt.len() + settings.max_new).min(shape.positions).min(shape.cache_rows);
        let mut sampler = Sampler::new(settings.sampling);
        let mut done: Vec<Option<Generated>> = prompts.iter().map(|_| None).collect();
        // The sequence in each slot.
        let mut live: Vec<Option<Live>> = (0..shape.slots).map(|_| None).collect();
        let mut reserved = 0;
        let mut next = 0;
        loop {
            for (number, slot) in live.iter_mut().enumerate().filter(|(_, slot)| slot.is_none()) {
                let Some(prompt) = prompts.get(next) else { break };
                if settings.max_new == 0 {
                    done[next] = Some(Generated { ids: vec![], stopped_by: StoppedBy::MaxTokens });
                    next += 1;
                    continue;
                }
                if reserved + needed(prompt) > shape.cache_rows {
                    break;
                }
                reserved += needed(prompt);
                begin(decoder, number, next)?;
                *slot = Some(Live::of(next, prompt));
                next += 1;
            }
            let slots: Vec<usize> = (0..shape.slots).filter(|slot| live[*slot].is_some()).collect();
            if slots.is_empty() && next == prompts.len() {
                break;
            }
            let fed: Vec<NewTokens<'_>> = slots
                .iter()
                .map(|&slot| {
                    let sequence = &live[slot].as_ref().expect("only live slots").sequence;
                    NewTokens { slot, ids: &sequence[decoder.sequence(slot).len()..] }
                })
                .collect();
            let mut chosen: Vec<Option<u32>> = vec![None; slots.len()];
            decoder.feed(executor, &fed, |index, logits| {
                let sequence = live[slots[index]].as_ref().expect("only live slots");
                chosen[index] = sequence.choose(&mut sampler, logits);
            })?;
            for (slot, chosen) in slots.into_iter().zip(chosen) {
                let sequence = live[slot].as_mut().expect("only live slots");
                let chosen = chosen.ok_or_else(|| sequence.nan_logits())?;
                let stopped = sequence.push(chosen, settings, shape.positions.min(shape.cache_rows));
                if !matches!(stopped, Some(StoppedBy::Token(_))) {
                    on_token(sequence.prompt, chosen);
                }
                if let Some(stopped_by) = stopped {
                    let Live { prompt, generated, .. } = live[slot].take().expect("only live slots");
                    reserved -= needed(&prompts[prompt]);
                    decoder.truncate(slot, 0);
                    done[prompt] = Some(Generated { ids: generated, stopped_by });
                }
            }
        }
        Ok(done.into_iter().map(|generated| generated.expect("every prompt was started and ended")).collect())
    }

    /// Continues one sequence. Tokens that the last call left in the cache are not recomputed, so a conversation is
    /// cheap to continue. `on_token` gets each token and returns whether to go on.
    pub fn continue_sequence(
        &mut self,
        ids: &[u32],
        settings: &Settings,
        mut on_token: impl FnMut(u32) -> bool,
    ) -> Result<(Generated, Timing), Failure> {
        let (executor, decoder) = (&mut self.executor, &mut self.decoder);
        check_prompt(0, ids, decoder.shape())?;
        for slot in 1..decoder.slots().count() {
            decoder.truncate(slot, 0);
        }
        let known = decoder.sequence(0).iter().zip(ids).take_while(|(a, b)| a == b).count();
        // The last token is always recomputed, because its logits are needed.
        let known = known.min(ids.len() - 1);
        decoder.truncate(0, known);
        let mut sampler = Sampler::new(settings.sampling);
        let mut live = Live::of(0, ids);
        let mut timing = Timing { prompt_tokens: ids.len() - known, ..Timing::default() };
        let mut new = ids[known..].to_vec();
        loop {
            let started = Instant::now();
            let mut chosen = None;
            let piece = [NewTokens { slot: 0, ids: &new }];
            decoder.feed(executor, &piece, |_, logits| chosen = live.choose(&mut sampler, logits))?;
            let elapsed_ms = started.elapsed().as_secs_f64() * 1e3;
            if live.generated.is_empty() {
                timing.prompt_ms = elapsed_ms
            } else {
                timing.answer_ms += elapsed_ms;
                timing.answer_tokens += 1;
            }
            let chosen = chosen.ok_or_else(|| live.nan_logits())?;
            let mut stopped = live.push(chosen, settings, decoder.shape().positions);
            if !matches!(stopped, Some(StoppedBy::Token(_))) && !on_token(chosen) {
                stopped = stopped.or(Some(StoppedBy::Caller));
            }
            if let Some(stopped_by) = stopped {
                return Ok((Generated { ids: live.generated, stopped_by }, timing));
            }
            new = vec![chosen];
        }
    }

    /// Clears the cache.
    pub fn reset(&mut self) {
        self.decoder.reset();
    }

    pub(super) fn parts(&mut self) -> (&mut Executor<AnyDevice>, &mut Decoder) {
        (&mut self.executor, &mut self.decoder)
    }
}

/// A sequence that is being generated.
struct Live {
    prompt: usize,
    /// Prompt and answer.
    sequence: Vec<u32>,
    generated: Vec<u32>,
}

impl Live {
    fn of(prompt: usize, ids: &[u32]) -> Live {
        Live { prompt, sequence: ids.to_vec(), generated: Vec::new() }
    }

    fn choose(&self, sampler: &mut Sampler, logits: &mut [f32]) -> Option<u32> {
        sampler.choose(logits, &self.sequence, self.generated.len())
    }

    /// Adds a token; returns why the text ends, if it does.
    fn push(&mut self, id: u32, settings: &Settings, positions: usize) -> Option<StoppedBy> {
        if settings.stop_ids.contains(&id) {
            return Some(StoppedBy::Token(id));
        }
        self.sequence.push(id);
        self.generated.push(id);
        if self.generated.len() >= settings.max_new {
            return Some(StoppedBy::MaxTokens);
        }
        // The token itself needs a position before another can follow.
        (self.sequence.len() > positions).then_some(StoppedBy::Context)
    }

    fn nan_logits(&self) -> Failure {
        Failure::model(format!(
            "the logits after token {} of prompt {} are NaN: the weights or the adapter are broken",
            self.sequence.len(),
            self.prompt
        ))
    }
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
#[path = "session_tests.rs"]
mod tests;
