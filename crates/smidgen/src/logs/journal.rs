//! The log of a run in every format: `metrics.jsonl`, TensorBoard's event file, and the history for
//! `trainer_state.json`.
//!
//! All get the same rows at the same time. They are on disk before a checkpoint counts as written, and are cut to the
//! checkpoint when a run is resumed, so none of them has gaps or duplicates.
//! The files of a very long run stay small, because not every step has a row (`thinning.rs`). Steps that were evaluated or
//! saved have one, and so has the last.

use super::appended::AppendedFile;
use super::events::{encode_now, open_events};
use super::log_history::{LogHistory, Totals};
use super::metrics::{EvalRow, MetricsRow, open_metrics};
use super::thinning::{DENSE_STEPS, stride};
use crate::failure::Failure;
use crate::plan::disk::with_room;
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// More than the size of one metrics row.
const ROW_BYTES: u64 = 4096;
#[derive(Debug)]
pub struct Journal {
    /// `None` on a rank that does not write.
    files: Option<Files>,
    history: LogHistory,
    /// The newest step, if its row is not written.
    waiting: Option<MetricsRow>,
    dense_steps: u64,
}

#[derive(Debug)]
struct Files {
    folder: PathBuf,
    metrics: AppendedFile,
    events: AppendedFile,
    /// Reused for every row.
    record: Vec<u8>,
}

impl Files {
    fn write(&mut self, row: &impl Serialize) -> Result<(), Failure> {
        self.record.clear();
        serde_json::to_writer(&mut self.record, row).map_err(Failure::disk)?;
        self.record.push(b'\n');
        self.metrics.append(&self.record)?;
        self.record.clear();
        encode_now(&fields(row)?, &mut self.record);
        self.events.append(&self.record)
    }
}

impl Journal {
    /// Continues after `step` (0: from the beginning) in a run folder.
    pub fn resume(folder: &Path, step: u64) -> Result<Journal, Failure> {
        let path = folder.join("metrics.jsonl");
        let metrics = open_metrics(&path, step)?;
        let events = open_events(folder, &path, step)?;
        let history = LogHistory::read(&path, step).map_err(|error| Failure::file("read", &path, error))?;
        let files = Files { folder: folder.to_path_buf(), metrics, events, record: Vec::with_capacity(1024) };
        Ok(Journal { files: Some(files), history, waiting: None, dense_steps: DENSE_STEPS })
    }

    /// Continues the sums of a checkpoint, because a thinned file does not have all their terms.
    pub fn with_totals(mut self, totals: Option<Totals>) -> Journal {
        self.history.totals = totals.unwrap_or(self.history.totals);
        self
    }

    /// The journal of a rank that does not write.
    pub fn unwritten() -> Journal {
        Journal { files: None, history: LogHistory::default(), waiting: None, dense_steps: DENSE_STEPS }
    }

    /// Adds a step. If its row is not kept, it waits: an evaluation, a checkpoint and the end write the newest one.
    pub fn write_step(&mut self, row: &MetricsRow) -> Result<(), Failure> {
        self.history.add(&fields(row)?);
        self.waiting = Some(row.clone());
        // The report counts repeated steps, which are rare.
        let is_kept = row.step.is_multiple_of(stride(row.step, self.dense_steps)) || row.overflows > 0;
        if is_kept { self.write_waiting() } else { Ok(()) }
    }

    pub fn write_evaluation(&mut self, row: &EvalRow) -> Result<(), Failure> {
        self.write_waiting()?;
        self.history.add(&fields(row)?);
        self.write(row)
    }

    fn write_waiting(&mut self) -> Result<(), Failure> {
        self.waiting.take().map_or(Ok(()), |row| self.write(&row))
    }

    fn write(&mut self, row: &impl Serialize) -> Result<(), Failure> {
        let Some(files) = &mut self.files else { return Ok(()) };
        files.write(row).map_err(|failure| with_room(failure, &files.folder, "a row", ROW_BYTES))
    }

    pub fn sync(&mut self) -> Result<(), Failure> {
        self.write_waiting()?;
        let Some(files) = &self.files else { return Ok(()) };
        let synced = files.metrics.sync().and_then(|()| files.events.sync());
        synced.map_err(|failure| with_room(failure, &files.folder, "a row", ROW_BYTES))
    }

    pub fn history(&self) -> &LogHistory {
        &self.history
    }
}

/// A run that fails keeps the row of its last step.
impl Drop for Journal {
    fn drop(&mut self) {
        let _ = self.write_waiting();
    }
}

fn fields(row: &impl Serialize) -> Result<Map<String, Value>, Failure> {
    match serde_json::to_value(row).map_err(Failure::disk)? {
        Value::Object(row) => Ok(row),
        other => unreachable!("a row is an object, not {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::events::tests::steps;
    use super::super::metrics::tests::{eval_row, row, steps_in};
    use super::*;

    fn resume(folder: &Path, step: u64, dense_steps: u64) -> Journal {
        let mut journal = Journal::resume(folder, step).unwrap();
        journal.dense_steps = dense_steps;
        journal
    }

    fn write(journal: &mut Journal, steps: std::ops::RangeInclusive<u64>) {
        steps.for_each(|step| journal.write_step(&row(step)).unwrap());
    }

    /// An evaluation after step 21, a repeated step 23, a checkpoint after step 50, a failure after step 77.
    #[test]
    fn evaluated_saved_repeated_and_last_steps_have_rows() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, metrics) = (folder.path(), folder.path().join("metrics.jsonl"));
        let mut journal = resume(folder, 0, 8);
        write(&mut journal, 1..=21);
        journal.write_evaluation(&eval_row(21)).unwrap();
        write(&mut journal, 22..=22);
        journal.write_step(&MetricsRow { overflows: 1, ..row(23) }).unwrap();
        write(&mut journal, 24..=50);
        journal.sync().unwrap();
        let saved = [1, 2, 3, 4, 5, 6, 7, 8, 16, 21, 21, 23, 32, 48, 50];
        assert_eq!(steps_in(&metrics), saved);
        write(&mut journal, 51..=77);
        drop(journal);
        assert_eq!(steps_in(&metrics), [&saved[..], &[64, 77]].concat());
        assert_eq!(steps(folder), steps_in(&metrics), "TensorBoard");
        let events = || std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).max();
        let before = events();
        drop(resume(folder, 50, 8));
        assert_eq!((steps_in(&metrics), steps(folder)), (saved.to_vec(), saved.to_vec()));
        assert_eq!(events(), before, "the event file was not rebuilt");
    }

    #[test]
    fn a_resumed_thinned_run_has_the_log_of_one_that_was_never_stopped() {
        const DENSE: u64 = 16 * 1024;
        let folder = tempfile::tempdir().unwrap();
        let mut journal = resume(folder.path(), 0, DENSE);
        write(&mut journal, 1..=17_001);
        journal.sync().unwrap();
        let totals = serde_json::to_string(&journal.history.totals).unwrap();
        write(&mut journal, 17_002..=18_000);
        let rows = steps_in(&folder.path().join("metrics.jsonl"));
        assert!(rows.len() < 16_500, "{}", rows.len());
        let logged = |journal: &Journal| journal.history.entries().collect::<Vec<_>>();
        let whole = (logged(&journal), journal.history.totals);
        assert_eq!(whole.1.steps, 18_000);
        drop(journal);
        let mut journal = resume(folder.path(), 17_001, DENSE);
        assert!(journal.history.totals.steps < 17_001, "the rows alone do not have the sums");
        journal = journal.with_totals(serde_json::from_str(&totals).unwrap());
        write(&mut journal, 17_002..=18_000);
        assert_eq!((logged(&journal), journal.history.totals), whole);
    }
}
