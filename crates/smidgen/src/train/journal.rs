//! The log of a run in every format: `metrics.jsonl`, TensorBoard's event file, and the history for
//! `trainer_state.json`.
//!
//! All get the same rows at the same time. They are on disk before a checkpoint counts as written, and are cut to the
//! checkpoint when a run is resumed, so none of them has gaps or duplicates.

use super::events::EventWriter;
use super::log_history::LogHistory;
use super::metrics::MetricsWriter;
use crate::failure::Failure;
use crate::plan::disk::with_room;
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// More than the size of one metrics row.
const ROW_BYTES: u64 = 4096;

#[derive(Debug)]
pub struct Journal {
    /// `None` on a rank that does not write.
    files: Option<Files>,
    history: LogHistory,
}

#[derive(Debug)]
struct Files {
    folder: PathBuf,
    metrics: MetricsWriter,
    events: EventWriter,
}

impl Journal {
    /// Continues after `step` (0: from the beginning) in a run folder.
    pub fn resume(folder: &Path, step: u64) -> Result<Journal, Failure> {
        let path = folder.join("metrics.jsonl");
        let metrics = MetricsWriter::resume(&path, step)?;
        let events = EventWriter::resume(folder, &path, step)?;
        let history = LogHistory::read(&path, step).map_err(|error| Failure::file("read", &path, error))?;
        Ok(Journal { files: Some(Files { folder: folder.to_path_buf(), metrics, events }), history })
    }

    /// The journal of a rank that does not write.
    pub fn unwritten() -> Journal {
        Journal { files: None, history: LogHistory::default() }
    }

    /// Writes a `MetricsRow` or an `EvalRow`.
    pub fn write_row(&mut self, row: &impl Serialize) -> Result<(), Failure> {
        let Some(files) = &mut self.files else { return Ok(()) };
        let mut write = || {
            files.metrics.write_row(row)?;
            match serde_json::to_value(row).map_err(Failure::disk)? {
                Value::Object(row) => {
                    self.history.add(&row);
                    files.events.write_row(&row)
                }
                other => unreachable!("a row is an object, not {other}"),
            }
        };
        write().map_err(|failure| with_room(failure, &files.folder, "a row", ROW_BYTES))
    }

    pub fn sync(&self) -> Result<(), Failure> {
        let Some(files) = &self.files else { return Ok(()) };
        let synced = files.metrics.sync().and_then(|()| files.events.sync());
        synced.map_err(|failure| with_room(failure, &files.folder, "a row", ROW_BYTES))
    }

    pub fn history(&self) -> &LogHistory {
        &self.history
    }
}
