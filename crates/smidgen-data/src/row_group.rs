//! Rows in groups, so that the clips of a group can be decoded on several threads (`clip_row.rs`).
//!
//! Order, results and errors are the same as for rows that are read one by one: an error of the reading is returned
//! after the rows before it were passed on.

use std::path::PathBuf;

use crate::example::ExampleRow;
use crate::format::{FormatError, RowReading, read_examples};
use crate::row_place::{RowPlace, RowUnit};

/// A row of a group, or what is wrong with it, with its place.
pub struct HeldRow {
    pub file: PathBuf,
    pub unit: RowUnit,
    pub number: u64,
    pub row: Result<ExampleRow, FormatError>,
}

/// Calls `on_group` with all rows in order, `size` at a time.
pub fn read_groups<E: From<FormatError>>(
    reading: RowReading<'_>,
    size: usize,
    mut on_group: impl FnMut(Vec<HeldRow>) -> Result<(), E>,
) -> Result<(), E> {
    let mut held = Vec::new();
    let mut failed = false;
    let read = read_examples(reading, |place, row| {
        let RowPlace { file, unit, number } = place;
        held.push(HeldRow { file: file.to_path_buf(), unit, number, row });
        if held.len() >= size {
            on_group(std::mem::take(&mut held)).inspect_err(|_| failed = true)
        } else {
            Ok(())
        }
    });
    if !failed && !held.is_empty() {
        on_group(held)?;
    }
    read
}
