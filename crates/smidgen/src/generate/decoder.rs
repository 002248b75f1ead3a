//! Feeds tokens to a plan's entry point `decode` and reads logits; used by every kind of generation.
//!
//! It works on any executor whose plan has that entry point, also on one that trains. New tokens of several sequences
//! are computed in one run, up to the plan's limit, so prompts are processed in large chunks and sequences advance
//! together.
//! The logits of a sequence do not depend on the other sequences of the batch.
//! LongRoPE rotates all tokens of a sequence with one of two lists of frequencies, chosen by its length, as in
//! transformers. A sequence that grows over the limit, or is truncated below it, is recomputed from the beginning; so is a
//! truncated sequence of a model with recurrent layers, whose states are those after the last token only.
//! Left out: choosing tokens (`sampler.rs`, `beam.rs`).

use super::slots::Slots;
use smidgen_compile::leaves::state_name;
use smidgen_compile::names::{input, state};
use smidgen_compile::{DecodeShape, DecoderSpec};
use smidgen_ir::{Entry, Extent, Plan, RopeSpec, ValueId};
use smidgen_runtime::{Device, DeviceError, Executor};
use std::sync::Arc;

/// Tokens to append to the sequence of a slot.
#[derive(Clone, Copy, Debug)]
pub struct NewTokens<'a> {
    pub slot: usize,
    /// At least one token.
    pub ids: &'a [u32],
}

#[derive(Debug)]
pub struct Decoder {
    leaves: Leaves,
    shape: DecodeShape,
    vocabulary: usize,
    /// The longest sequence for which LongRoPE uses its short list.
    short_until: Option<usize>,
    /// Whether the cached keys of a slot were rotated with the long list.
    is_long: Vec<bool>,
    slots: Slots,
    sequences: Vec<Vec<u32>>,
    /// The audio of each slot's prompt.
    sounds: Vec<Option<Arc<Sound>>>,
    /// Buffers for one row of logits.
    bytes: Vec<u8>,
    logits: Vec<f32>,
}

/// The embeddings of the clips of a prompt, in the order of its audio tokens.
#[derive(Debug)]
pub struct Sound {
    /// The audio token whose embeddings are replaced.
    pub token: u32,
    /// The embeddings, in the type of activations.
    pub rows: Vec<u8>,
    pub row_bytes: usize,
}

#[derive(Debug)]
struct Leaves {
    ids: ValueId,
    positions: ValueId,
    slots: ValueId,
    lengths: Option<ValueId>,
    rows: ValueId,
    table: ValueId,
    logits: ValueId,
    /// Audio rows and the positions of the tokens that they replace; only in a plan with audio.
    audio: Option<[ValueId; 2]>,
    /// States of recurrent layers, with the bytes of a slot's row.
    states: Vec<(ValueId, usize)>,
}

/// One token of a run.
#[derive(Clone, Copy)]
struct FedToken {
    id: u32,
    slot: usize,
    position: usize,
    /// Length of the sequence after everything is fed.
    length: usize,
}

impl Decoder {
    /// `plan` was compiled with `decode: Some(shape)`.
    pub fn of(plan: &Plan, spec: &DecoderSpec, shape: DecodeShape) -> Decoder {
        let leaf = |name: &str| plan.leaf_named(name).unwrap_or_else(|| panic!("the plan has no `{name}`"));
        let short_until = spec.ropes.iter().find_map(RopeSpec::short_until);
        Decoder {
            leaves: Leaves {
                ids: leaf(input::IDS),
                positions: leaf(input::POSITIONS),
                slots: leaf(input::SLOTS),
                lengths: plan.leaf_named(input::LENGTHS),
                rows: leaf(input::ROWS),
                table: leaf(input::CACHE_TABLE),
                logits: leaf(state::DECODED_LOGITS),
                audio: plan
                    .leaf_named(input::AUDIO_ROWS)
                    .zip(plan.leaf_named(input::AUDIO_TARGETS))
                    .map(<[_; 2]>::from),
                states: spec
                    .recurrents()
                    .flat_map(|(layer, recurrent)| {
                        let states = recurrent.states(spec.hidden).into_iter();
                        states.map(move |(name, floats)| (leaf(&state_name(layer, name)), 4 * floats))
                    })
                    .collect(),
            },
            shape,
            vocabulary: spec.vocabulary,
            short_until,
            is_long: vec![false; shape.slots],
            slots: Slots::new(shape.slots, shape.positions, shape.cache_rows),
            sequences: vec![Vec::new(); shape.slots],
            sounds: vec![None; shape.slots],
            bytes: vec![0; 4 * spec.vocabulary],
            logits: vec![0.0; spec.vocabulary],
        }
    }

    /// Sets the audio of a slot's next prompt.
    pub fn set_audio(&mut self, slot: usize, sound: Option<Arc<Sound>>) {
        assert!(self.leaves.audio.is_some() || sound.is_none(), "the plan has no audio");
        self.sounds[slot] = sound;
    }

    pub fn shape(&self) -> DecodeShape {
        self.shape
    }

    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// The tokens of a slot.
    pub fn sequence(&self, slot: usize) -> &[u32] {
        &self.sequences[slot]
    }

    /// Whether a shorter sequence needs no recomputing; states of recurrent layers are those after the last token only.
    pub fn keeps_every_position(&self) -> bool {
        self.leaves.states.is_empty()
    }

    /// Clears all sequences. Required if another entry point has run since the last generation, because it overwrites
    /// the cache.
    pub fn reset(&mut self) {
        for slot in 0..self.slots.count() {
            self.truncate(slot, 0);
        }
    }

    /// Keeps the first `length` tokens of a slot's sequence.
    pub fn truncate(&mut self, slot: usize, length: usize) {
        // The states before the last token are gone.
        let is_shorter = length < self.slots.length(slot);
        let kept = if is_shorter && !self.keeps_every_position() { 0 } else { length };
        self.slots.truncate(slot, kept);
        self.sequences[slot].truncate(length);
    }

    /// Gives slot `to` the sequence of `from`. Row numbers are copied, and states of recurrent layers.
    pub fn share<D: Device>(
        &mut self,
        executor: &mut Executor<D>,
        from: usize,
        to: usize,
    ) -> Result<(), DeviceError> {
        if from == to {
            return Ok(());
        }
        for (state, row_bytes) in &self.leaves.states {
            let mut bytes = vec![0; *row_bytes];
            executor.read_at(*state, from * row_bytes, &mut bytes)?;
            executor.write_at(*state, to * row_bytes, &bytes);
        }
        self.slots.share(from, to);
        self.is_long[to] = self.is_long[from];
        self.sounds[to] = self.sounds[from].clone();
        let mut sequence = std::mem::take(&mut self.sequences[to]);
        sequence.clone_from(&self.sequences[from]);
        self.sequences[to] = sequence;
        self.write_table(executor, to, 0);
        Ok(())
    }

    /// Appends tokens to sequences. Calls `on_logits` with the logits after the last new token of each and its index
    /// in `new`. A slot must not occur twice, and there must be free rows and positions.
    pub fn feed<D: Device>(
        &mut self,
        executor: &mut Executor<D>,
        new: &[NewTokens<'_>],
        mut on_logits: impl FnMut(usize, &mut [f32]),
    ) -> Result<(), DeviceError> {
        let mut tokens: Vec<FedToken> = Vec::with_capacity(self.shape.new_tokens);
        // Tokens of the run whose logits are needed, and the index in `new` of each.
        let mut asked: Vec<(i32, usize)> = Vec::new();
        for (index, new) in new.iter().enumerate() {
            assert!(!new.ids.is_empty(), "slot {} gets no tokens", new.slot);
            let first = self.append(executor, new);
            let length = self.sequences[new.slot].len();
            for position in first..length {
                let id = self.sequences[new.slot][position];
                tokens.push(FedToken { id, slot: new.slot, position, length });
                if position + 1 == length {
                    asked.push((tokens.len() as i32 - 1, index));
                }
                if tokens.len() == self.shape.new_tokens {
                    self.run(executor, &mut tokens, &mut asked, &mut on_logits)?;
                }
            }
        }
        self.run(executor, &mut tokens, &mut asked, &mut on_logits)
    }

    /// Assigns cache rows to new tokens. Returns the first position that has to be computed.
    fn append<D: Device>(&mut self, executor: &mut Executor<D>, new: &NewTokens<'_>) -> usize {
        let slot = new.slot;
        self.sequences[slot].extend(new.ids);
        let length = self.sequences[slot].len();
        let is_long = self.short_until.is_some_and(|limit| limit < length);
        if std::mem::replace(&mut self.is_long[slot], is_long) != is_long {
            self.slots.truncate(slot, 0);
        }
        let first = self.slots.length(slot);
        self.slots.extend(slot, length - first);
        self.write_table(executor, slot, first);
        first
    }

    fn write_table<D: Device>(&self, executor: &mut Executor<D>, slot: usize, first: usize) {
        let rows = self.slots.rows(slot, first..self.slots.length(slot));
        let bytes: Vec<u8> = rows.iter().flat_map(|row| row.to_le_bytes()).collect();
        executor.write_at(self.leaves.table, 4 * (slot * self.shape.positions + first), &bytes);
    }

    /// The tokens of a run that audio replaces, each with its row.
    fn audio_tokens(&self, tokens: &[FedToken]) -> Vec<(usize, usize)> {
        let replaced = tokens.iter().enumerate().filter_map(|(index, place)| {
            let Sound { token, rows, row_bytes } = self.sounds[place.slot].as_deref()?;
            let before = &self.sequences[place.slot][..place.position];
            let row = before.iter().filter(|id| *id == token).count();
            // The model may write the audio token itself, beyond the rows of the prompt's audio.
            (place.id == *token && (row + 1) * row_bytes <= rows.len()).then_some((index, row))
        });
        replaced.collect()
    }

    fn run<D: Device>(
        &mut self,
        executor: &mut Executor<D>,
        tokens: &mut Vec<FedToken>,
        asked: &mut Vec<(i32, usize)>,
        on_logits: &mut impl FnMut(usize, &mut [f32]),
    ) -> Result<(), DeviceError> {
        if tokens.is_empty() {
            return Ok(());
        }
        let mut write = |leaf: ValueId, integers: &mut dyn Iterator<Item = i32>| {
            let bytes: Vec<u8> = integers.flat_map(i32::to_le_bytes).collect();
            executor.write(leaf, &bytes);
        };
        let leaves = &self.leaves;
        write(leaves.ids, &mut tokens.iter().map(|token| token.id as i32));
        write(leaves.positions, &mut tokens.iter().map(|token| token.position as i32));
        write(leaves.slots, &mut tokens.iter().map(|token| token.slot as i32));
        if let Some(lengths) = leaves.lengths {
            write(lengths, &mut tokens.iter().map(|token| token.length as i32));
        }
        write(leaves.rows, &mut asked.iter().map(|(row, _)| *row));
        let replaced = self.audio_tokens(tokens);
        if let Some([rows, targets]) = leaves.audio {
            write(targets, &mut replaced.iter().map(|(token, _)| *token as i32));
            for (place, (token, row)) in replaced.iter().enumerate() {
                let sound = self.sounds[tokens[*token].slot]
                    .as_ref()
                    .expect("only tokens of a slot with audio are replaced");
                let bytes = &sound.rows[row * sound.row_bytes..(row + 1) * sound.row_bytes];
                executor.write_at(rows, place * sound.row_bytes, bytes);
            }
        }
        let (rows, audio) = (asked.len(), replaced.len());
        let extent = Extent { tokens: tokens.len(), rows, segments: 0, audio };
        executor.run(Entry::Decode, &extent)?;
        for (row, (_, index)) in asked.iter().enumerate() {
            executor.read_at(leaves.logits, 4 * row * self.vocabulary, &mut self.bytes)?;
            for (logit, bytes) in self.logits.iter_mut().zip(self.bytes.as_chunks::<4>().0) {
                *logit = f32::from_le_bytes(*bytes);
            }
            on_logits(*index, &mut self.logits);
        }
        tokens.clear();
        asked.clear();
        Ok(())
    }
}
