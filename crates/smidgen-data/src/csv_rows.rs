//! Rows of tables: `.csv` and `.tsv`, whose first row names the columns.
//!
//! The header says what separates cells: the one of comma, semicolon and tab that it has most often outside quotes.
//! Every cell becomes a string. Cells may be quoted, with separators, line breaks and doubled quotes inside.
//! A row with more or fewer cells than the header, a name that is in the header twice and a quote that is
//! never closed are errors with their line.
//! Leaves out guessing: types, and a missing header.

use std::collections::HashSet;
use std::io::{self, BufRead, Chain, Read};
use std::path::Path;

use serde_json::{Map, Value as Json};

use crate::json_rows::RowResult;
use crate::row_place::{RowPlace, RowUnit};
use crate::source_error::SourceError;
use crate::utf8_reader::{Utf8Reader, text_error};

/// Read after the file's last byte. It becomes a row of its own unless a quote is still open: the parser silently
/// takes the end of the file as the end of a quoted cell.
const END: &str = "\u{1}end of the table\u{1}";

/// The separator of a table by its header; `usual` is that of the file's name, and wins where the counts are equal.
pub(super) fn table_separator(path: &Path, mut reader: Utf8Reader, usual: u8) -> Result<u8, SourceError> {
    let mut counts = [(usual, 0_u32), (b',', 0), (b';', 0), (b'\t', 0)];
    let (mut in_quotes, mut has_text) = (false, false);
    'header: loop {
        let text = reader.fill_buf().map_err(|source| text_error(path, source))?;
        for &byte in text {
            match byte {
                b'"' => in_quotes = !in_quotes,
                _ if in_quotes => {}
                // Blank lines before the header are skipped.
                b'\n' | b'\r' if has_text => break 'header,
                b'\n' | b'\r' => {}
                _ => {
                    let of_byte = counts.iter_mut().filter(|(separator, _)| *separator == byte);
                    of_byte.for_each(|(_, count)| *count += 1);
                }
            }
            has_text |= !matches!(byte, b'\n' | b'\r');
        }
        let passed = text.len();
        if passed == 0 {
            break;
        }
        reader.consume(passed);
    }
    // The first of the largest.
    Ok(counts.into_iter().rev().max_by_key(|(_, count)| *count).map_or(usual, |(separator, _)| separator))
}

pub(super) fn read_table<E>(
    path: &Path,
    separator: u8,
    reader: Utf8Reader,
    on_row: &mut impl FnMut(RowPlace<'_>, RowResult) -> Result<(), E>,
) -> Result<(), E>
where
    E: From<SourceError>,
{
    let end = format!("\n{END}\n");
    let mut table = csv::ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .delimiter(separator)
        .from_reader(Watched { text: reader.chain(end.as_bytes()), chunk: Vec::new(), passed_bytes: 0 });
    let mut record = csv::StringRecord::new();
    let Some(header_line) = next_record(path, &mut table, &mut record)? else {
        return Ok(());
    };
    let names: Vec<String> = record.iter().map(str::to_owned).collect();
    let mut seen = HashSet::new();
    for name in &names {
        if !seen.insert(name) {
            let place = RowPlace { file: path, unit: RowUnit::Line, number: header_line };
            return Err(E::from(SourceError::DuplicateColumn {
                place: place.to_string(),
                name: name.clone(),
            }));
        }
    }
    while let Some(number) = next_record(path, &mut table, &mut record)? {
        let place = RowPlace { file: path, unit: RowUnit::Line, number };
        if record.len() != names.len() {
            let (cells, columns) = (record.len(), names.len());
            on_row(place, Err(SourceError::RaggedRow { place: place.to_string(), cells, columns }))?;
            continue;
        }
        let cells = record.iter().map(|cell| Json::String(cell.to_owned()));
        on_row(place, Ok(Json::Object(Map::from_iter(names.iter().cloned().zip(cells)))))?;
    }
    Ok(())
}

type Table<'a> = csv::Reader<Watched<'a>>;

/// The text for the parser; the last piece is kept to look at a record's end.
struct Watched<'a> {
    text: Chain<Utf8Reader, &'a [u8]>,
    chunk: Vec<u8>,
    passed_bytes: u64,
}

impl Watched<'_> {
    /// The byte before `position`, which is in the last piece or just before it.
    fn byte_before(&self, position: u64) -> Option<u8> {
        let chunk_start = self.passed_bytes - self.chunk.len() as u64;
        let index = position.checked_sub(chunk_start + 1)?;
        self.chunk.get(index as usize).copied()
    }
}

impl Read for Watched<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.text.read(out)?;
        // The record before may end with the piece before.
        let last = self.chunk.last().copied();
        self.chunk.clear();
        self.chunk.extend(last);
        self.chunk.extend_from_slice(&out[..count]);
        self.passed_bytes += count as u64;
        Ok(count)
    }
}

/// The line on which the next record begins, or nothing after the last.
fn next_record(
    path: &Path,
    table: &mut Table<'_>,
    record: &mut csv::StringRecord,
) -> Result<Option<u64>, SourceError> {
    table.get_mut().text.get_mut().0.begin_row();
    match table.read_record(record) {
        Ok(true) => {}
        Ok(false) => return Ok(None),
        Err(error) => return Err(table_error(path, error)),
    }
    if record.len() == 1 && &record[0] == END {
        return Ok(None);
    }
    let is_open = record.iter().next_back().is_some_and(|cell| cell.trim_end().ends_with(END));
    // The parser's position of a record is before the blank lines that it skips, so the line is counted back from
    // the record's end. Of the two characters that may end a line the parser has passed one.
    let end = table.position().clone();
    let ends_a_line = !is_open && table.get_ref().byte_before(end.byte()) == Some(b'\n');
    let line_breaks = record.as_slice().bytes().filter(|&byte| byte == b'\n').count() as u64;
    let line = end.line().saturating_sub(line_breaks + u64::from(ends_a_line));
    if is_open {
        let place = RowPlace { file: path, unit: RowUnit::Line, number: line };
        return Err(SourceError::OpenQuote { place: place.to_string() });
    }
    Ok(Some(line))
}

fn table_error(path: &Path, error: csv::Error) -> SourceError {
    let said = error.to_string();
    match error.into_kind() {
        csv::ErrorKind::Io(source) => text_error(path, source),
        // Lengths may differ, and the text is UTF-8: the parser has no other error.
        _ => SourceError::BrokenTable { path: path.display().to_string(), message: said },
    }
}
