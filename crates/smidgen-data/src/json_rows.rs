//! Rows of JSON: one value per line (`.jsonl`, `.ndjson`), or the elements of one array (`.json`).
//!
//! The beginning of a file decides as well as its name: an array of objects may be named `.jsonl`, lines may be
//! named `.json`, and the array may be the only value of an object, as in `{"data": [...]}`.
//! The array is cut into its elements by brackets and quotes alone, and each element is then parsed like a line, so
//! only one row is in memory. The parser finds what is not JSON; its message gets the position in the file.
//! A line or an element that is not UTF-8 is a bad row.

use std::io::BufRead;
use std::path::Path;

use serde_json::Value as Json;

use crate::row_place::{RowPlace, RowUnit};
use crate::source_error::SourceError;
use crate::utf8_reader::{Utf8Reader, for_each_line, pass, text_error, text_of};

/// Columns that hold lists of objects: an object that begins with one of them is a row, not a wrapper of rows.
const COLUMNS_OF_OBJECTS: [&str; 9] = [
    "messages",
    "conversations",
    "conversation",
    "prompt",
    "completion",
    "response",
    "tools",
    "history",
    "choices",
];

/// Whether a file has one row per line, by its beginning. `named_lines`: its name says `.jsonl`, else `.json`.
pub(super) fn has_lines(path: &Path, reader: Utf8Reader, named_lines: bool) -> Result<bool, SourceError> {
    let mut cursor = Cursor { path, reader, line: 1, column: 0 };
    let at_object = |cursor: &mut Cursor<'_>| Ok(matches!(cursor.next_sign()?, Some('{' | ']')));
    match (cursor.next_sign()?, named_lines) {
        (Some('['), true) => {
            cursor.step();
            Ok(!at_object(&mut cursor)?)
        }
        (Some('{'), false) => match cursor.take_wrapper()? {
            Some(key) if !COLUMNS_OF_OBJECTS.contains(&key.as_str()) => Ok(!at_object(&mut cursor)?),
            _ => Ok(true),
        },
        _ => Ok(named_lines),
    }
}

/// A row, or what is wrong with it.
pub type RowResult = Result<Json, SourceError>;

pub(super) fn read_lines<E>(
    path: &Path,
    reader: Utf8Reader,
    on_row: &mut impl FnMut(RowPlace<'_>, RowResult) -> Result<(), E>,
) -> Result<(), E>
where
    E: From<SourceError>,
{
    for_each_line(path, reader, |place, text| {
        let text = match text {
            Ok(text) => text.trim_ascii_end(),
            Err(error) => return on_row(place, Err(error)),
        };
        if text.is_empty() {
            return Ok(());
        }
        match serde_json::from_str(text) {
            Ok(row) => on_row(place, Ok(row)),
            // The lines after it belong to the same array.
            Err(_) if text.trim_ascii_start().starts_with('[') => {
                Err(E::from(SourceError::ArrayInLines { place: place.to_string() }))
            }
            Err(error) => {
                // The parser counts the columns that it has passed, so 0 for a mistake in the first.
                let at = format!("{place}, column {}", error.column().max(1));
                on_row(place, Err(SourceError::BrokenJson { place: at, message: message_of(&error) }))
            }
        }
    })
}

pub(super) fn read_array<E>(
    path: &Path,
    reader: Utf8Reader,
    on_row: &mut impl FnMut(RowPlace<'_>, RowResult) -> Result<(), E>,
) -> Result<(), E>
where
    E: From<SourceError>,
{
    let mut cursor = Cursor { path, reader, line: 1, column: 0 };
    let not_an_array = |found| SourceError::NotAnArray { path: path.display().to_string(), found };
    let mut wrapper = None;
    match cursor.next_sign()? {
        Some('[') => cursor.step(),
        Some('{') => wrapper = Some(cursor.take_wrapper()?.ok_or_else(|| not_an_array('{'))?),
        Some(found) => return Err(E::from(not_an_array(found))),
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
        let text = match text_of(path, &element, line, column) {
            Ok(text) => text,
            // Wrong bytes within strings leave the brackets as they are.
            Err(error) if complete.is_ok() && matches!(cursor.next_sign()?, Some(',' | ']')) => {
                on_row(place, Err(error))?;
                match cursor.next_sign()? {
                    Some(',') => cursor.step(),
                    _ => break,
                }
                continue;
            }
            Err(error) => return Err(E::from(error)),
        };
        match (serde_json::from_str(text), complete) {
            (Ok(row), Ok(())) => on_row(place, Ok(row))?,
            // A broken element that has an end leaves the others readable.
            (Err(error), Ok(())) if matches!(cursor.next_sign()?, Some(',' | ']')) => {
                on_row(place, Err(element_error(place, line, column, error)))?;
            }
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
    if let Some(key) = wrapper {
        match cursor.next_sign()? {
            Some('}') => cursor.step(),
            Some(_) => {
                return Err(E::from(SourceError::MoreThanAnArray { path: path.display().to_string(), key }));
            }
            None => return Err(E::from(cursor.broken(number.max(1), "EOF while parsing an object"))),
        }
    }
    match cursor.next_sign()? {
        None => Ok(()),
        Some(_) => Err(E::from(cursor.broken(number.max(1), "trailing characters"))),
    }
}

/// A key that wraps the rows is not longer.
const LONGEST_KEY_BYTES: usize = 256;

/// A position in the text of an array.
struct Cursor<'a> {
    path: &'a Path,
    reader: Utf8Reader,
    /// The line of the next byte, from 1.
    line: u64,
    /// Bytes before the next byte in its line.
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
            let found = text[spaces..]
                .utf8_chunks()
                .next()
                .map(|chunk| chunk.valid().chars().next().unwrap_or(char::REPLACEMENT_CHARACTER));
            pass(&text[..spaces], &mut self.line, &mut self.column);
            self.reader.consume(spaces);
            if found.is_some() {
                return Ok(found);
            }
        }
    }

    /// Passes the character that `next_sign` returned: one byte, and not a line break.
    fn step(&mut self) {
        self.column += 1;
        self.reader.consume(1);
    }

    /// Passes `{"key": [` and returns the key; `None` where the text is something else.
    fn take_wrapper(&mut self) -> Result<Option<String>, SourceError> {
        self.step();
        let mut key = Vec::new();
        let Some('"') = self.next_sign()? else { return Ok(None) };
        self.step();
        loop {
            match self.next_byte()? {
                Some(b'"') => break,
                Some(byte) if byte != b'\\' && byte != b'\n' && key.len() < LONGEST_KEY_BYTES => {
                    key.push(byte)
                }
                _ => return Ok(None),
            }
        }
        for expected in [':', '['] {
            match self.next_sign()? {
                Some(found) if found == expected => self.step(),
                _ => return Ok(None),
            }
        }
        Ok(String::from_utf8(key).ok())
    }

    fn next_byte(&mut self) -> Result<Option<u8>, SourceError> {
        let text = self.reader.fill_buf().map_err(|source| text_error(self.path, source))?;
        let byte = text.first().copied();
        if byte.is_some() {
            self.step();
        }
        Ok(byte)
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
        // The parser saw only the element, so to it the rest of the array is trailing.
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
