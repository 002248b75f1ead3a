//! The logits of a sequence, with or without an adapter, on the CPU.
//!
//! They are computed by a plan, as in training, but nothing is trained. A merge uses them to report its rounding
//! error, and tests compare them with other implementations.
//! Left out: a KV cache. Every call computes the whole sequence.

use crate::failure::Failure;
use crate::session::weights::{leaf, load_weights, read_floats};
use smidgen_compile::names::{input, state};
use smidgen_compile::{Request, compile_logits};
use smidgen_formats::model::Model;
use smidgen_ir::{Entry, Extent};
use smidgen_runtime::{Cpu, Executor};

/// A loaded model.
#[derive(Debug)]
pub struct LogitsRun {
    executor: Executor<Cpu>,
    vocabulary: usize,
}

impl LogitsRun {
    /// Loads the base weights; adapters hold zeros until the caller fills them.
    pub fn load(request: &Request, model: &Model, extent: Extent) -> Result<LogitsRun, Failure> {
        let request = Request { extent, ..request.clone() };
        let device = Cpu::new(request.threads).map_err(Failure::device)?;
        let mut executor = Executor::load(compile_logits(&request), device)?;
        load_weights(&mut executor, model, request.threads)?;
        Ok(LogitsRun { executor, vocabulary: request.spec.vocabulary })
    }

    pub fn executor_mut(&mut self) -> &mut Executor<Cpu> {
        &mut self.executor
    }

    /// Call this after filling the adapters.
    pub fn refresh(&mut self) -> Result<(), Failure> {
        let extent = self.executor.plan().extent;
        self.executor.run(Entry::Refresh, &extent).map_err(Failure::from)
    }

    /// Logits (rows, V) after the tokens at `rows` of one sequence.
    pub fn logits(&mut self, ids: &[u32], rows: &[u32]) -> Result<Vec<f32>, Failure> {
        let extent = Extent { tokens: ids.len(), rows: rows.len(), segments: 1, audio: 0 };
        let positions: Vec<u32> = (0..ids.len() as u32).collect();
        let arrays: [(&str, &[u32]); 4] = [
            (input::IDS, ids),
            (input::POSITIONS, &positions),
            (input::BOUNDARIES, &[0, ids.len() as u32]),
            (input::ROWS, rows),
        ];
        for (name, numbers) in arrays {
            let place = leaf(self.executor.plan(), name);
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            self.executor.write(place, &bytes);
        }
        self.executor.run(Entry::Logits, &extent)?;
        let place = leaf(self.executor.plan(), state::LOGITS);
        Ok(read_floats(&mut self.executor, place, rows.len() * self.vocabulary)?)
    }
}
