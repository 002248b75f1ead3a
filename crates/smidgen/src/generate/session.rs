//! A model loaded for generation, used by `smidgen generate` and by evaluations.
//!
//! Opening plans first and then loads, so a generation that does not fit is refused before a weight is read.
//! A batch keeps the slots full: when a text ends, the next prompt takes its slot. The result of a prompt does not
//! depend on the other prompts.
//! Left out: templates and text; a session works with token ids.

pub use super::batch::Settings;
use super::batch::{News, Prompt, check_prompt, continue_all};
use super::decoder::{Decoder, NewTokens, Sound};
use super::sampler::Sampler;
use super::stop::StoppedBy;
use crate::failure::Failure;
use crate::machine::process_memory::read_rss;
use crate::plan::arithmetic::Arithmetic;
use crate::plan::devices::JobDevice;
use crate::plan::generation::{GenerationPlan, Sizes, plan_generation};
use crate::plan::job::check_range;
use crate::plan::model::build_storage;
use crate::session::adapted::build_adapted_request;
use crate::session::adapters::{clear_adapters, read_adapter};
use crate::session::encoding::encode_numbers;
use crate::session::weights::{leaf, load_weights};
use smidgen_compile::names::input;
use smidgen_compile::{DecodeShape, Request};
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_ir::Entry;
use smidgen_recipe::BaseFormat;
use smidgen_runtime::{AnyDevice, Device, Executor};
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
        for (index, prompt) in prompts.iter().enumerate() {
            check_prompt(index, prompt, decoder.shape())?;
        }
        let nothing = Generated { ids: vec![], stopped_by: StoppedBy::MaxTokens };
        let mut done = vec![nothing; prompts.len()];
        let prompts = prompts.iter().enumerate().filter(|_| settings.max_new > 0);
        let prompt = |(number, ids): (usize, &Vec<u32>)| Prompt {
            number,
            ids: ids.clone(),
            settings: settings.clone(),
            top: None,
        };
        let on_news = |News { number, token, stopped, .. }: &News| {
            if let Some(token) = token {
                done[*number].ids.push(*token);
                on_token(*number, *token);
            }
            if let Some(stopped_by) = stopped {
                done[*number].stopped_by = *stopped_by;
            }
            Ok(true)
        };
        // Prompts with the same tokens may have different audio.
        continue_all(executor, decoder, prompts.map(prompt), false, &mut begin, on_news)?;
        Ok(done)
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
        let mut live = Live { sequence: ids.to_vec(), generated: Vec::new() };
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

    /// Replaces the adapter by one with the same modules, or by none. The cache is cleared.
    pub fn load_adapter(&mut self, request: &Request, adapter: Option<&AdapterFile>) -> Result<(), Failure> {
        match adapter {
            Some(adapter) => read_adapter(&mut self.executor, request, adapter.path())?,
            None => clear_adapters(&mut self.executor, request)?,
        }
        let extent = self.executor.plan().extent;
        self.executor.run(Entry::Refresh, &extent)?;
        self.reset();
        Ok(())
    }

    pub fn parts(&mut self) -> (&mut Executor<AnyDevice>, &mut Decoder) {
        (&mut self.executor, &mut self.decoder)
    }
}

/// A sequence that is being generated.
struct Live {
    /// Prompt and answer.
    sequence: Vec<u32>,
    generated: Vec<u32>,
}

impl Live {
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
            "the logits after token {} are NaN: the weights or the adapter are broken",
            self.sequence.len()
        ))
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
