//! Rows of tables: `.csv` and `.tsv`, whose first row names the columns.
//!
//! The separator is the one of comma, semicolon and tab that the header has most often outside quotes.
//! Every cell becomes a string. Cells may be quoted, with separators, line breaks and doubled quotes inside.
//! A row with more or fewer cells than the header, one that is not UTF-8 and one whose quote is never closed are bad
//! rows; so is every line after such a quote, because it is unknown where the next row begins.
//! A name that is in the header twice is an error.
//! Types and a missing header are not guessed.

use std::collections::HashSet;
use std::io::{self, BufRead, Chain, Read};
use std::path::Path;

use serde_json::{Map, Value as Json};

use crate::json_rows::RowResult;
use crate::row_place::{RowPlace, RowUnit};
use crate::source_error::SourceError;
use crate::utf8_reader::{Utf8Reader, text_error, text_of};

/// Appended to the file's text. It becomes a row of its own unless a quote is still open. Without it an open quote
/// would go unnoticed, because the parser ends a quoted cell at the end of the file.
const END: &str = "\u{1}end of the table\u{1}";

/// The separator of a table by its header. `usual` follows from the file's name and wins if the counts are equal.
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
    // `rev`: of equal counts the first one wins.
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
    let mut table =
        csv::ReaderBuilder::new().has_headers(false).flexible(true).delimiter(separator).from_reader(
            TrackedText { text: reader.chain(end.as_bytes()), chunk: Vec::new(), passed_bytes: 0 },
        );
    let mut record = csv::ByteRecord::new();
    let header_line = match next_record(path, &mut table, &mut record)? {
        None => return Ok(()),
        Some(Record { line, open_cell: None }) => line,
        Some(Record { line, .. }) => {
            let place = RowPlace { file: path, unit: RowUnit::Line, number: line };
            return Err(E::from(SourceError::OpenQuote { place: place.to_string() }));
        }
    };
    let names: Vec<String> = cells_of(path, header_line, &record)?.into_iter().map(str::to_owned).collect();
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
    while let Some(Record { line, open_cell }) = next_record(path, &mut table, &mut record)? {
        let at = |number| RowPlace { file: path, unit: RowUnit::Line, number };
        let place = at(line);
        if let Some(opened) = open_cell {
            on_row(place, Err(SourceError::OpenQuote { place: place.to_string() }))?;
            let cell = record.iter().next_back().unwrap_or_default();
            let lost = (opened..).zip(cell.split(|&byte| byte == b'\n')).skip(1);
            for (number, _) in
                lost.filter(|(_, text)| !text.trim_ascii().is_empty() && *text != END.as_bytes())
            {
                let place = at(number);
                let shown = place.to_string();
                on_row(place, Err(SourceError::AfterOpenQuote { place: shown, opened: line }))?;
            }
            return Ok(());
        }
        if record.len() != names.len() {
            let (cells, columns) = (record.len(), names.len());
            on_row(place, Err(SourceError::RaggedRow { place: place.to_string(), cells, columns }))?;
            continue;
        }
        let row = cells_of(path, line, &record).map(|cells| {
            let cells = cells.into_iter().map(Json::from);
            Json::Object(Map::from_iter(names.iter().cloned().zip(cells)))
        });
        on_row(place, row)?;
    }
    Ok(())
}

/// The cells of a record that begins at `line`.
fn cells_of<'a>(path: &Path, line: u64, record: &'a csv::ByteRecord) -> Result<Vec<&'a str>, SourceError> {
    let mut breaks_before = 0;
    let mut cells = Vec::with_capacity(record.len());
    for cell in record {
        let text = text_of(path, cell, line + breaks_before, 0).map_err(|error| match error {
            SourceError::NotUtf8 { path, line, byte, .. } => {
                SourceError::NotUtf8 { path, line, column: None, byte }
            }
            error => error,
        });
        cells.push(text?);
        breaks_before += breaks_in(cell);
    }
    Ok(cells)
}

fn breaks_in(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|&&byte| byte == b'\n').count() as u64
}

type Table<'a> = csv::Reader<TrackedText<'a>>;

/// The text for the parser. The last chunk is kept so that the end of a record can be looked at.
struct TrackedText<'a> {
    text: Chain<Utf8Reader, &'a [u8]>,
    chunk: Vec<u8>,
    passed_bytes: u64,
}

impl TrackedText<'_> {
    /// The byte before `position`, which is in the last chunk or just before it.
    fn byte_before(&self, position: u64) -> Option<u8> {
        let chunk_start = self.passed_bytes - self.chunk.len() as u64;
        let index = position.checked_sub(chunk_start + 1)?;
        self.chunk.get(index as usize).copied()
    }
}

impl Read for TrackedText<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.text.read(out)?;
        // A record may end with the last byte of the chunk before.
        let last = self.chunk.last().copied();
        self.chunk.clear();
        self.chunk.extend(last);
        self.chunk.extend_from_slice(&out[..count]);
        self.passed_bytes += count as u64;
        Ok(count)
    }
}

/// Where a record begins.
struct Record {
    line: u64,
    /// The line on which its last cell begins, if that cell is quoted and never ends.
    open_cell: Option<u64>,
}

/// The next record, or nothing after the last.
fn next_record(
    path: &Path,
    table: &mut Table<'_>,
    record: &mut csv::ByteRecord,
) -> Result<Option<Record>, SourceError> {
    table.get_mut().text.get_mut().0.begin_row();
    let before = table.position().line();
    match table.read_byte_record(record) {
        Ok(true) => {}
        Ok(false) => return Ok(None),
        Err(error) => return Err(table_error(path, before, error)),
    }
    if record.len() == 1 && &record[0] == END.as_bytes() {
        return Ok(None);
    }
    let last = record.iter().next_back().unwrap_or_default();
    let is_open = last.trim_ascii_end().ends_with(END.as_bytes());
    // The parser's position of a record is before the blank lines that it skips, so the line is counted back from
    // the record's end. If a line ends in `\r\n`, the parser has passed only one of the two characters.
    let end = table.position().clone();
    let ends_a_line = !is_open && table.get_ref().byte_before(end.byte()) == Some(b'\n');
    let line_breaks = breaks_in(record.as_slice());
    let line = end.line().saturating_sub(line_breaks + u64::from(ends_a_line));
    let open_cell = is_open.then(|| line + line_breaks - breaks_in(last));
    Ok(Some(Record { line, open_cell }))
}

/// `line` is where the row begins, or the first of the blank lines before it.
fn table_error(path: &Path, line: u64, error: csv::Error) -> SourceError {
    let said = error.to_string();
    match error.into_kind() {
        csv::ErrorKind::Io(source) => match text_error(path, source) {
            // The line where the row begins, because a quote may be open there, rather than the line where reading
            // ended.
            SourceError::RowTooLong { path, .. } => SourceError::RowTooLong { path, line },
            error => error,
        },
        // Rows of different lengths are allowed and bytes are not checked, so the parser has no other error.
        _ => SourceError::BrokenTable { path: path.display().to_string(), message: said },
    }
}
