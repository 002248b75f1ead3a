//! Rows of plain text (`.txt`): each line that is not blank is a row `{"text": ...}` of its own.
//!
//! One sample per line is what Hugging Face's `text` loader gives. A text that runs over several lines belongs in a
//! `.jsonl` file with a field `text`.
//! Spaces at either end of a line are kept, the line break is not. A line that is not UTF-8 is a bad row.

use std::io::BufRead;
use std::path::Path;

use serde_json::{Map, Value as Json};

use crate::json_rows::RowResult;
use crate::row_place::{RowPlace, RowUnit};
use crate::source_error::SourceError;
use crate::utf8_reader::{Utf8Reader, text_error, text_of};

pub(super) fn read_text<E>(
    path: &Path,
    mut reader: Utf8Reader,
    on_row: &mut impl FnMut(RowPlace<'_>, RowResult) -> Result<(), E>,
) -> Result<(), E>
where
    E: From<SourceError>,
{
    let (mut line, mut number) = (Vec::new(), 0);
    loop {
        line.clear();
        reader.begin_row();
        if reader.read_until(b'\n', &mut line).map_err(|source| text_error(path, source))? == 0 {
            return Ok(());
        }
        number += 1;
        let place = RowPlace { file: path, unit: RowUnit::Line, number };
        let before = if number == 1 { reader.mark_bytes() } else { 0 };
        let text = match text_of(path, &line, number, before) {
            Ok(text) => text.trim_end_matches(['\r', '\n']),
            Err(error) => {
                on_row(place, Err(error))?;
                continue;
            }
        };
        if text.trim().is_empty() {
            continue;
        }
        on_row(place, Ok(Json::Object(Map::from_iter([("text".to_owned(), Json::from(text))]))))?;
    }
}
