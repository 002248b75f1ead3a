//! Times generation: sequences of a given length get one more token per step.
//!
//! A step does what `generate` does: write the new tokens, run `decode`, read the logits, choose the most likely token.
//! The weights are synthetic, so the tokens are meaningless, and there is no adapter.
//! The profile runs one step operation by operation and waits after each, so its sum is more than the time of a step.

use super::timing::{Times, fill_synthetic, sum_by_name};
use crate::failure::Failure;
use crate::generate::decoder::{Decoder, NewTokens};
use crate::generate::sampler::most_likely;
use smidgen_compile::names::state;
use smidgen_compile::{DecodeShape, DecoderSpec};
use smidgen_ir::{Entry, Extent, LeafKind, Op, Plan, ValueId};
use smidgen_runtime::{Device, Executor, counter};
use std::collections::BTreeSet;
use std::time::Instant;

/// The sizes of the measured generation.
#[derive(Clone, Copy, Debug)]
pub struct Decoding {
    /// Number of sequences; each gets one token per step.
    pub sequences: usize,
    /// Prompt tokens of each sequence.
    pub tokens: usize,
    pub warm_up: usize,
    pub steps: usize,
}

impl Decoding {
    /// Tokens of a sequence after the last step.
    pub fn context(&self) -> usize {
        self.tokens + self.warm_up + self.steps
    }
}

/// A loaded plan for generation with synthetic weights.
#[derive(Debug)]
pub struct DecodeBench<D> {
    pub executor: Executor<D>,
    decoder: Decoder,
    decoding: Decoding,
    vocabulary: usize,
}

impl<D: Device> DecodeBench<D> {
    pub fn load(
        plan: Plan,
        device: D,
        spec: &DecoderSpec,
        shape: DecodeShape,
        decoding: Decoding,
    ) -> Result<DecodeBench<D>, Failure> {
        let decoder = Decoder::of(&plan, spec, shape);
        let mut executor = Executor::load(plan, device)?;
        fill_synthetic(&mut executor, LeafKind::Weight)?;
        let extent = executor.plan().extent;
        executor.run(Entry::Refresh, &extent)?;
        Ok(DecodeBench { executor, decoder, decoding, vocabulary: spec.vocabulary })
    }

    /// Feeds the prompts and times the steps after them. Also returns the tokens per second of the prompts.
    pub fn time(&mut self, begin: Instant) -> Result<(Times, f64), Failure> {
        let Decoding { sequences, tokens, warm_up, steps } = self.decoding;
        let mut times = Times::loaded(begin);
        let id = |place: usize| (counter::uniform(3, place as u64) * (self.vocabulary - 1) as f32) as u32;
        let mut new: Vec<Vec<u32>> = (0..sequences)
            .map(|sequence| (0..tokens).map(|token| id(sequence * tokens + token)).collect())
            .collect();
        // The first pass includes one-time work, so it is not timed.
        self.step(&new)?;
        self.decoder.reset();
        let started = Instant::now();
        new = self.step(&new)?;
        let prompt_s = started.elapsed().as_secs_f64();
        times.add_steps(begin, warm_up, steps, || {
            new = self.step(&new)?;
            Ok(())
        })?;
        Ok((times, (sequences * tokens) as f64 / prompt_s))
    }

    /// Feeds new tokens to every sequence; returns the most likely next one of each.
    fn step(&mut self, new: &[Vec<u32>]) -> Result<Vec<Vec<u32>>, Failure> {
        let fed: Vec<NewTokens<'_>> =
            new.iter().enumerate().map(|(slot, ids)| NewTokens { slot, ids }).collect();
        let mut chosen = vec![Vec::new(); new.len()];
        self.decoder.feed(&mut self.executor, &fed, |index, logits| {
            chosen[index].push(most_likely(logits).unwrap_or_default());
        })?;
        Ok(chosen)
    }

    /// Times each operation of one step, waiting after each: (operation, milliseconds, count).
    pub fn profile(&mut self) -> Result<Vec<(String, f64, usize)>, Failure> {
        let sequences = self.decoding.sequences;
        let extent = Extent { tokens: sequences, rows: sequences, segments: 0, audio: 0 };
        let mut times = Vec::new();
        for index in 0..self.executor.plan().entry(Entry::Decode).steps.len() {
            let name = self.executor.plan().entry(Entry::Decode).steps[index].op.name().to_lowercase();
            self.wait()?;
            let started = Instant::now();
            self.executor.run_step(Entry::Decode, index, &extent)?;
            self.wait()?;
            times.push((name, started.elapsed().as_secs_f64() * 1e3));
        }
        Ok(sum_by_name(times))
    }

    /// Waits for the device, by reading a result.
    fn wait(&mut self) -> Result<(), Failure> {
        let logits =
            self.executor.plan().leaf_named(state::DECODED_LOGITS).expect("a plan for generation has logits");
        self.executor.read(logits, &mut [0; 4])?;
        Ok(())
    }
}

/// Bytes of weights that a step reads: all except the embedding table, of which it only reads some rows.
pub fn bytes_per_step(plan: &Plan) -> usize {
    let steps = plan.entry(Entry::Decode).steps.iter();
    let read: BTreeSet<ValueId> = steps
        .filter(|step| !matches!(step.op, Op::Embed { .. }))
        .flat_map(|step| step.inputs.iter().map(|id| plan.value(*id).role.whole(*id)))
        .collect();
    let weights = plan.leaves(LeafKind::Weight).filter(|(id, _)| read.contains(id));
    weights.map(|(_, value)| value.ty.bytes(&plan.extent)).sum()
}
