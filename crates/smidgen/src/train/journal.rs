//! The log of a run in every format: `metrics.jsonl`, TensorBoard's event file, and the history for `trainer_state.json`.
//!
//! The files get the same rows at the same time, are on disk before a checkpoint counts as written, and are cut to the
//! checkpoint when a run is resumed: neither has gaps or duplicates.

use super::events::EventWriter;
use super::log_history::LogHistory;
use super::metrics::{EvalRow, MetricsRow, MetricsWriter};
use crate::failure::Failure;
use serde::Serialize;
use serde_json::Value;
use std::path::Path;

#[derive(Debug)]
pub struct Journal {
    /// `None` on a rank that leaves the writing to another one.
    files: Option<Files>,
    history: LogHistory,
}

#[derive(Debug)]
struct Files {
    metrics: MetricsWriter,
    events: EventWriter,
}

impl Journal {
    /// Continues after `step` (0: from the beginning) in a run folder.
    pub fn resume(folder: &Path, step: u64) -> Result<Journal, Failure> {
        let path = folder.join("metrics.jsonl");
        let (metrics, _) = MetricsWriter::resume(&path, step)?;
        let events = EventWriter::resume(folder, &path, step)?;
        let history = LogHistory::read(&path, step).map_err(|error| Failure::file("read", &path, error))?;
        Ok(Journal { files: Some(Files { metrics, events }), history })
    }

    /// Of a rank that leaves the writing to another one.
    pub fn unwritten() -> Journal {
        Journal { files: None, history: LogHistory::default() }
    }

    pub fn write_step(&mut self, row: &MetricsRow) -> Result<(), Failure> {
        self.files.as_mut().map_or(Ok(()), |files| files.metrics.write_step(row))?;
        self.write_event(row)
    }

    pub fn write_eval(&mut self, row: &EvalRow) -> Result<(), Failure> {
        self.files.as_mut().map_or(Ok(()), |files| files.metrics.write_eval(row))?;
        self.write_event(row)
    }

    pub fn sync(&self) -> Result<(), Failure> {
        let Some(files) = &self.files else { return Ok(()) };
        files.metrics.sync()?;
        files.events.sync()
    }

    pub fn history(&self) -> &LogHistory {
        &self.history
    }

    fn write_event(&mut self, row: &impl Serialize) -> Result<(), Failure> {
        let Some(files) = &mut self.files else { return Ok(()) };
        match serde_json::to_value(row).map_err(Failure::disk)? {
            Value::Object(row) => {
                self.history.add(&row);
                files.events.write_row(&row)
            }
            other => unreachable!("a row is an object, not {other}"),
        }
    }
}
