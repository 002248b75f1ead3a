//! Rows of JSON: one value per line (`.jsonl`, `.ndjson`), or the elements of one array (`.json`).
//!
//! The array is cut into its elements by brackets and quotes alone, and each element is then parsed like a line, so
//! only one row is in memory. What is not JSON is left to the parser, and its message gets the position in the file.
//! Leaves out what a row means.

use std::io::BufRead;
use std::path::Path;

use serde_json::Value as Json;

use crate::row_place::{RowPlace, RowUnit};
use crate::source_error::SourceError;
use crate::utf8_reader::{Utf8Reader, pass, text_error};

pub(super) fn read_lines<E>(
    path: &Path,
    mut reader: Utf8Reader,
    on_row: &mut impl FnMut(RowPlace<'_>, Json) -> Result<(), E>,
) -> Result<(), E>
where
    E: From<SourceError>,
{
    let mut line = Vec::new();
    let mut number = 0;
    loop {
        line.clear();
        reader.begin_row();
        let read = reader.read_until(b'\n', &mut line).map_err(|source| text_error(path, source))?;
        if read == 0 {
            return Ok(());
        }
        number += 1;
        let text = line.trim_ascii_end();
        if text.is_empty() {
            continue;
        }
        let place = RowPlace { file: path, unit: RowUnit::Line, number };
        match serde_json::from_slice(text) {
            Ok(row) => on_row(place, row)?,
            Err(_) if text.trim_ascii_start().starts_with(b"[") => {
                return Err(E::from(SourceError::ArrayInLines { place: place.to_string() }));
            }
            Err(error) => {
                // The parser counts the columns it has passed, none for a mistake in the first.
                let place = format!("{place}, column {}", error.column().max(1));
                return Err(E::from(SourceError::BrokenJson { place, message: message_of(&error) }));
            }
        }
    }
}

pub(super) fn read_array<E>(
    path: &Path,
    reader: Utf8Reader,
    on_row: &mut impl FnMut(RowPlace<'_>, Json) -> Result<(), E>,
) -> Result<(), E>
where
    E: From<SourceError>,
{
    let mut cursor = Cursor { path, reader, line: 1, column: 0 };
    match cursor.next_sign()? {
        Some('[') => cursor.step(),
        Some(found) => {
            return Err(E::from(SourceError::NotAnArray { path: path.display().to_string(), found }));
        }
        None => return Err(E::from(cursor.broken(1, "EOF while parsing a value"))),
    }
    let mut element = Vec::new();
    let mut number = 0;
    loop {
        match cursor.next_sign()? {
            Some(']') if number == 0 => break,
            Some(']') => return Err(E::from(cursor.broken(number, "trailing comma"))),
            Some(',') => return Err(E::from(cursor.broken(number + 1, "expected value"))),
            Some(_) => {}
            None => return Err(E::from(cursor.broken(number.max(1), "EOF while parsing a list"))),
        }
        number += 1;
        let place = RowPlace { file: path, unit: RowUnit::Row, number };
        let (line, column) = (cursor.line, cursor.column);
        let complete = cursor.take_element(&mut element);
        match (serde_json::from_slice(&element), complete) {
            (Ok(row), Ok(())) => on_row(place, row)?,
            // What broke the element explains why it has no end.
            (Err(error), Ok(()) | Err(SourceError::RowTooLong { .. })) => {
                return Err(E::from(element_error(place, line, column, error)));
            }
            (_, Err(error)) => return Err(E::from(error)),
        }
        match cursor.next_sign()? {
            Some(',') => cursor.step(),
            Some(']') => break,
            Some(_) => return Err(E::from(cursor.broken(number, "expected `,` or `]`"))),
            None => return Err(E::from(cursor.broken(number, "EOF while parsing a list"))),
        }
    }
    cursor.step();
    match cursor.next_sign()? {
        None => Ok(()),
        Some(_) => Err(E::from(cursor.broken(number.max(1), "trailing characters"))),
    }
}

/// A place in the text of an array.
struct Cursor<'a> {
    path: &'a Path,
    reader: Utf8Reader,
    /// Of the next byte, from 1.
    line: u64,
    /// Bytes before it in the line.
    column: u64,
}

impl Cursor<'_> {
    /// The next character that is not a space, without passing it.
    fn next_sign(&mut self) -> Result<Option<char>, SourceError> {
        self.reader.begin_row();
        loop {
            let text = self.reader.fill_buf().map_err(|source| text_error(self.path, source))?;
            if text.is_empty() {
                return Ok(None);
            }
            let spaces = text.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let found = text[spaces..].utf8_chunks().next().and_then(|chunk| chunk.valid().chars().next());
            pass(&text[..spaces], &mut self.line, &mut self.column);
            self.reader.consume(spaces);
            if found.is_some() {
                return Ok(found);
            }
        }
    }

    /// Passes the one-byte character, not a line break, that `next_sign` has seen.
    fn step(&mut self) {
        self.column += 1;
        self.reader.consume(1);
    }

    /// Collects one element: up to the comma or bracket that ends it, or to the end of the file.
    fn take_element(&mut self, element: &mut Vec<u8>) -> Result<(), SourceError> {
        element.clear();
        let (mut depth, mut in_string, mut escaped) = (0_u32, false, false);
        loop {
            let text = self.reader.fill_buf().map_err(|source| text_error(self.path, source))?;
            if text.is_empty() {
                return Ok(());
            }
            let end = text.iter().position(|&byte| {
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' if in_string => escaped = true,
                    b'"' => in_string = !in_string,
                    _ if in_string => {}
                    b'[' | b'{' => depth += 1,
                    b']' | b'}' | b',' if depth == 0 => return true,
                    b']' | b'}' => depth -= 1,
                    _ => {}
                }
                false
            });
            let count = end.unwrap_or(text.len());
            element.extend_from_slice(&text[..count]);
            pass(&text[..count], &mut self.line, &mut self.column);
            self.reader.consume(count);
            if end.is_some() {
                return Ok(());
            }
        }
    }

    fn broken(&self, number: u64, message: &str) -> SourceError {
        let place = RowPlace { file: self.path, unit: RowUnit::Row, number };
        SourceError::BrokenJson {
            place: format!("{place} (line {}, column {})", self.line, self.column + 1),
            message: message.to_owned(),
        }
    }
}

/// The error of an element that begins at `line`, after `column` bytes of it.
fn element_error(place: RowPlace<'_>, line: u64, column: u64, error: serde_json::Error) -> SourceError {
    let error_column = error.column().max(1) as u64;
    let column = match error.line() {
        0 | 1 => column + error_column,
        _ => error_column,
    };
    let line = line + (error.line() as u64).saturating_sub(1);
    let place = format!("{place} (line {line}, column {column})");
    let message = match message_of(&error) {
        // To the parser the element is the whole text.
        message if message == "trailing characters" => "expected `,` or `]`".to_owned(),
        message => message,
    };
    SourceError::BrokenJson { place, message }
}

/// The parser's message without its own position.
fn message_of(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&position).unwrap_or(&text).to_owned()
}
