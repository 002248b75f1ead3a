//! Passes data between the loop and the device: inputs in, the report of a step out.
//!
//! Elements are copied through a small buffer in little-endian order. Nothing is allocated.

use crate::failure::Failure;
use smidgen_compile::names::{input, state};
use smidgen_data::micro_batch::MicroBatch;
use smidgen_ir::{Objective, Plan, ValueId};
use smidgen_runtime::{Device, DeviceError, Executor, counter};

/// The slots of the two reads that run in the background.
const REPORT_SLOT: usize = 0;
const REG_LOSS_SLOT: usize = 1;

/// The leaves that the loop writes and reads.
#[derive(Debug)]
pub struct Feed {
    ids: ValueId,
    positions: ValueId,
    boundaries: ValueId,
    rows: ValueId,
    labels: ValueId,
    dropout_keys: Option<ValueId>,
    dropout_row_keys: Option<ValueId>,
    dropout_audio_keys: Option<ValueId>,
    /// Only in a plan with audio.
    audio_rows: Option<ValueId>,
    audio_targets: Option<ValueId>,
    /// Only in a plan with an audio encoder.
    audio_marks: Option<ValueId>,
    loss_weight: ValueId,
    /// Only in a plan that trains.
    hyper: Option<ValueId>,
    report: Option<ValueId>,
    reg_loss: Option<ValueId>,
    eval_loss: ValueId,
    row_losses: Option<ValueId>,
    /// Only in a plan with an objective.
    sequence_rows: Option<ValueId>,
    sequences: Option<ValueId>,
    rows_before: Option<ValueId>,
    figures: Option<ValueId>,
    seed: u64,
}

/// The report of `update` about a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    pub loss: f64,
    /// The regularizer's loss, which is not part of `loss`.
    pub reg_loss: Option<f64>,
    /// The gradient norm before clipping.
    pub grad_norm: f64,
    /// Whether loss and norm are finite. If not, the update changed nothing.
    pub finite: bool,
}

impl Feed {
    pub fn of(plan: &Plan, seed: u64) -> Feed {
        let leaf = |name: &str| plan.leaf_named(name).unwrap_or_else(|| panic!("the plan has no `{name}`"));
        Feed {
            ids: leaf(input::IDS),
            positions: leaf(input::POSITIONS),
            boundaries: leaf(input::BOUNDARIES),
            rows: leaf(input::ROWS),
            labels: leaf(input::LABELS),
            dropout_keys: plan.leaf_named(input::DROPOUT_KEYS),
            dropout_row_keys: plan.leaf_named(input::DROPOUT_ROW_KEYS),
            dropout_audio_keys: plan.leaf_named(input::DROPOUT_AUDIO_KEYS),
            audio_rows: plan.leaf_named(input::AUDIO_ROWS),
            audio_targets: plan.leaf_named(input::AUDIO_TARGETS),
            audio_marks: plan.leaf_named(input::AUDIO_MARKS),
            loss_weight: leaf(input::LOSS_WEIGHT),
            hyper: plan.leaf_named(input::HYPER),
            report: plan.leaf_named(state::REPORT),
            reg_loss: plan.leaf_named(state::REG_LOSS),
            eval_loss: leaf(state::EVAL_LOSS),
            row_losses: plan.leaf_named(state::ROW_LOSSES),
            sequence_rows: plan.leaf_named(input::SEQUENCE_ROWS),
            sequences: plan.leaf_named(input::SEQUENCES),
            rows_before: plan.leaf_named(input::ROWS_BEFORE),
            figures: plan.leaf_named(state::FIGURES),
            seed,
        }
    }

    /// Writes the packed arrays of a micro-batch, and its dropout keys at `step` (from 0).
    pub fn write_micro_batch<D: Device>(
        &self,
        executor: &mut Executor<D>,
        batch: &MicroBatch,
        step: u64,
    ) -> Result<(), Failure> {
        let arrays = [
            (self.ids, &batch.ids),
            (self.positions, &batch.positions),
            (self.boundaries, &batch.segments),
            (self.rows, &batch.rows),
            (self.labels, &batch.labels),
        ];
        for (id, numbers) in arrays {
            write_elements(executor, id, numbers.iter().map(|number| number.to_le_bytes()));
        }
        let key = |token: usize| {
            let (sample, position) = (batch.sample_of_token[token], batch.positions[token]);
            counter::token_key(self.seed, step, u64::from(sample), position as u64).to_le_bytes()
        };
        if let Some(id) = self.dropout_keys {
            write_elements(executor, id, (0..batch.positions.len()).map(key));
        }
        if let Some(id) = self.dropout_row_keys {
            write_elements(executor, id, batch.rows.iter().map(|row| key(*row as usize)));
        }
        if let (Some(first_rows), Some(sequences)) = (self.sequence_rows, self.sequences) {
            write_elements(executor, first_rows, batch.first_rows().map(i32::to_le_bytes));
            // Samples without numbers count nothing.
            let numbers = Objective::SEQUENCE_COLUMNS * batch.segments.len();
            let given = batch.numbers.iter().copied().chain(std::iter::repeat(0.0)).take(numbers);
            write_elements(executor, sequences, given.map(f64::to_le_bytes));
        }
        if let Some(before) = self.rows_before {
            let given = batch.before.iter().copied().chain(std::iter::repeat(f32::NAN));
            let given = given.take(Objective::BEFORE_COLUMNS * batch.rows.len());
            write_elements(executor, before, given.map(f32::to_le_bytes));
        }
        self.write_audio(executor, batch, step)
    }

    /// Writes the audio rows of a micro-batch, from the cache of encoded clips.
    fn write_audio<D: Device>(
        &self,
        executor: &mut Executor<D>,
        batch: &MicroBatch,
        step: u64,
    ) -> Result<(), Failure> {
        let (Some(rows), Some(targets)) = (self.audio_rows, self.audio_targets) else { return Ok(()) };
        write_elements(executor, targets, batch.audio_targets.iter().map(|row| row.to_le_bytes()));
        if let Some(id) = self.audio_marks {
            write_elements(executor, id, batch.audio_marks.iter().map(|mark| mark.to_le_bytes()));
        }
        if let Some(id) = self.dropout_audio_keys {
            write_elements(executor, id, audio_keys(self.seed, step, batch));
        }
        let Some(store) = &batch.clip_store else { return Ok(()) };
        let row_bytes = store.row_bytes();
        let mut piece = [0u8; 4096];
        for (index, &(clip, first_row)) in batch.clips.iter().enumerate() {
            let end_row =
                batch.clips.get(index + 1).map_or(batch.audio_targets.len(), |next| next.1 as usize);
            let (start, own) = (first_row as usize * row_bytes, store.rows(clip) * row_bytes);
            let filled = (end_row - first_row as usize) * row_bytes;
            for offset in (0..own).step_by(piece.len()) {
                let piece = &mut piece[..4096.min(own - offset)];
                store.read_encoded(clip, offset, piece).map_err(Failure::disk)?;
                executor.write_at(rows, start + offset, piece);
            }
            for offset in (own..filled).step_by(piece.len()) {
                let zeros = [0u8; 4096];
                executor.write_at(rows, start + offset, &zeros[..4096.min(filled - offset)]);
            }
        }
        Ok(())
    }

    /// Sets the weight of the loss: 1 / supervised tokens of the whole step, or 1 if an objective divides.
    pub fn write_loss_weight<D: Device>(&self, executor: &mut Executor<D>, weight: f64) {
        executor.write(self.loss_weight, &weight.to_le_bytes());
    }

    /// Sets the learning rate, the number (from 1) and the loss scale of the next update.
    pub fn write_hyper<D: Device>(&self, executor: &mut Executor<D>, lr: f64, update: u64, loss_scale: f64) {
        let hyper = self.hyper.expect("only a plan that trains has updates");
        write_elements(executor, hyper, [lr, update as f64, loss_scale].map(f64::to_le_bytes).into_iter());
    }

    /// Starts to copy the report of the last update to the host.
    pub fn begin_report<D: Device>(&self, executor: &mut Executor<D>) -> Result<(), DeviceError> {
        let report = self.report.expect("only a plan that trains has a report");
        executor.begin_read(REPORT_SLOT, report, 32)?;
        self.reg_loss.map_or(Ok(()), |id| executor.begin_read(REG_LOSS_SLOT, id, 8))
    }

    /// Waits for the report whose copy was started.
    pub fn finish_report<D: Device>(&self, executor: &mut Executor<D>) -> Result<StepReport, DeviceError> {
        let report = self.report.expect("only a plan that trains has a report");
        let mut bytes = [0u8; 32];
        executor.finish_read(REPORT_SLOT, report, &mut bytes)?;
        let [loss, grad_norm, _, finite] = [0, 8, 16, 24]
            .map(|first| f64::from_le_bytes(bytes[first..first + 8].try_into().expect("eight bytes")));
        let mut reg_loss = None;
        if let Some(id) = self.reg_loss {
            let mut bytes = [0u8; 8];
            executor.finish_read(REG_LOSS_SLOT, id, &mut bytes)?;
            reg_loss = Some(f64::from_le_bytes(bytes));
        }
        Ok(StepReport { loss, reg_loss, grad_norm, finite: finite == 1.0 })
    }

    /// Copies the report of the last update and waits for it.
    pub fn read_report<D: Device>(&self, executor: &mut Executor<D>) -> Result<StepReport, DeviceError> {
        self.begin_report(executor)?;
        self.finish_report(executor)
    }

    pub fn clear_eval_loss<D: Device>(&self, executor: &mut Executor<D>) {
        executor.write(self.eval_loss, &0f64.to_le_bytes());
    }

    /// Summed NLL since the last clear, times the loss weight.
    pub fn read_eval_loss<D: Device>(&self, executor: &mut Executor<D>) -> Result<f64, DeviceError> {
        let mut bytes = [0u8; 8];
        executor.read_at(self.eval_loss, 0, &mut bytes)?;
        Ok(f64::from_le_bytes(bytes))
    }

    /// Clears the sums that an objective reports.
    pub fn clear_figures<D: Device>(&self, executor: &mut Executor<D>) {
        if let Some(figures) = self.figures {
            executor.write(figures, &[0; 8 * Objective::FIGURES]);
        }
    }

    /// The sums since the last clear; zeros without an objective.
    pub fn read_figures<D: Device>(
        &self,
        executor: &mut Executor<D>,
    ) -> Result<[f64; Objective::FIGURES], DeviceError> {
        let mut bytes = [0u8; 8 * Objective::FIGURES];
        if let Some(figures) = self.figures {
            executor.read_at(figures, 0, &mut bytes)?;
        }
        let sums = bytes.as_chunks::<8>().0;
        Ok(std::array::from_fn(|index| f64::from_le_bytes(sums[index])))
    }

    /// Calls `take` with the negative log-likelihood of each of the first `rows` supervised rows of the last `eval`.
    /// Reads many at a time, because every read waits for the GPU.
    pub fn read_row_losses<D: Device>(
        &self,
        executor: &mut Executor<D>,
        rows: usize,
        mut take: impl FnMut(f32),
    ) -> Result<(), DeviceError> {
        let losses = self.row_losses.expect("the plan was asked for the losses of rows");
        let mut piece = [0u8; 4096];
        for first in (0..4 * rows).step_by(piece.len()) {
            let piece = &mut piece[..4096.min(4 * rows - first)];
            executor.read_at(losses, first, piece)?;
            piece.as_chunks::<4>().0.iter().for_each(|four| take(f32::from_le_bytes(*four)));
        }
        Ok(())
    }
}

/// The dropout keys of audio rows: keys of the sample, at positions that no token has.
fn audio_keys(seed: u64, step: u64, batch: &MicroBatch) -> impl Iterator<Item = [u8; 8]> {
    const BEHIND_ALL_TOKENS: u64 = 1 << 32;
    batch.clips.iter().enumerate().flat_map(move |(index, &(_, first))| {
        let end = batch.clips.get(index + 1).map_or(batch.audio_targets.len(), |next| next.1 as usize);
        // The first token that a clip replaces tells its sample.
        let target = batch.audio_targets[first as usize] as usize;
        let (sample, position) = (batch.sample_of_token[target], batch.positions[target] as u64);
        (0..(end - first as usize) as u64).map(move |row| {
            let place = BEHIND_ALL_TOKENS + position + row;
            counter::token_key(seed, step, u64::from(sample), place).to_le_bytes()
        })
    })
}

fn write_elements<D: Device, const N: usize>(
    executor: &mut Executor<D>,
    id: ValueId,
    elements: impl Iterator<Item = [u8; N]>,
) {
    let mut piece = [0u8; 4096];
    let (mut offset, mut filled) = (0, 0);
    for element in elements {
        piece[filled..filled + N].copy_from_slice(&element);
        filled += N;
        if filled + N > piece.len() {
            executor.write_at(id, offset, &piece[..filled]);
            offset += filled;
            filled = 0;
        }
    }
    executor.write_at(id, offset, &piece[..filled]);
}
