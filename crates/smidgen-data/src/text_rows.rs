//! Rows of plain text (`.txt`): each line that is not blank is a row `{"text": ...}`.
//!
//! One sample per line is what Hugging Face's `text` loader gives. A text that runs over several lines belongs in a
//! `.jsonl` file with a field `text`.
//! Spaces at either end of a line are kept, the line break is not. A line that is not UTF-8 is a bad row.

use std::path::Path;

use serde_json::json;

use crate::json_rows::RowResult;
use crate::row_place::RowPlace;
use crate::source_error::SourceError;
use crate::utf8_reader::{Utf8Reader, for_each_line};

pub(super) fn read_text<E>(
    path: &Path,
    reader: Utf8Reader,
    on_row: &mut impl FnMut(RowPlace<'_>, RowResult) -> Result<(), E>,
) -> Result<(), E>
where
    E: From<SourceError>,
{
    for_each_line(path, reader, |place, text| match text {
        Ok(text) if text.trim().is_empty() => Ok(()),
        Ok(text) => on_row(place, Ok(json!({"text": text}))),
        Err(error) => on_row(place, Err(error)),
    })
}
