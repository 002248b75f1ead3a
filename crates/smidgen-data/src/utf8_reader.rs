//! The text of a data file as a stream that is known to be UTF-8.
//!
//! Checking here, below every format, gives each of them the line and the byte column of a wrong byte.
//! A byte order mark is skipped. A row is held to `MAX_ROW_BYTES`: a quote or a bracket that is never closed
//! would otherwise take the whole file into memory.
//! Leaves out where rows begin: readers of rows call `begin_row`.

use std::io::{self, BufRead, Read};
use std::path::Path;

use thiserror::Error;

use crate::compressed::{open_unpacked, packing_error};
use crate::source_error::{MAX_ROW_BYTES, SourceError};

const BUFFER_BYTES: usize = 64 * 1024;
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Opens a file, decompressed if its name says so.
pub(super) fn open_text(path: &Path) -> Result<Utf8Reader, SourceError> {
    Ok(Utf8Reader::new(open_unpacked(path)?))
}

/// The error of a read from `Utf8Reader`, with the file's name.
pub(super) fn text_error(path: &Path, source: io::Error) -> SourceError {
    match source.get_ref().and_then(|inner| inner.downcast_ref::<TextError>()) {
        Some(&TextError::NotUtf8 { line, column, byte }) => {
            SourceError::NotUtf8 { path: path.display().to_string(), line, column, byte }
        }
        Some(&TextError::RowTooLong { line }) => {
            SourceError::RowTooLong { path: path.display().to_string(), line }
        }
        None => packing_error(path, source),
    }
}

#[derive(Debug, Error)]
enum TextError {
    #[error("line {line}, byte column {column} is not UTF-8")]
    NotUtf8 { line: u64, column: u64, byte: u8 },
    #[error("the row that reaches line {line} is too long")]
    RowTooLong { line: u64 },
}

pub(super) struct Utf8Reader {
    source: Box<dyn Read>,
    /// `begin..valid_end` is text to hand out, `valid_end..end` the beginning of an incomplete character.
    buffer: Box<[u8]>,
    begin: usize,
    valid_end: usize,
    end: usize,
    /// Line (from 1) and bytes within it, at `valid_end`.
    line: u64,
    column: u64,
    row_bytes: u64,
    started: bool,
    /// The byte after `valid_end` is wrong; reported after the text before it has been read.
    wrong: bool,
}

impl Utf8Reader {
    pub fn new(source: Box<dyn Read>) -> Utf8Reader {
        Utf8Reader {
            source,
            buffer: vec![0; BUFFER_BYTES].into(),
            begin: 0,
            valid_end: 0,
            end: 0,
            line: 1,
            column: 0,
            row_bytes: 0,
            started: false,
            wrong: false,
        }
    }

    /// What is read from now on belongs to another row.
    pub fn begin_row(&mut self) {
        self.row_bytes = 0;
    }

    fn not_utf8(&self) -> io::Error {
        let byte = self.buffer[self.valid_end];
        io::Error::other(TextError::NotUtf8 { line: self.line, column: self.column + 1, byte })
    }

    /// Reads until there is text to hand out, a wrong byte, or nothing more.
    fn refill(&mut self) -> io::Result<()> {
        self.buffer.copy_within(self.valid_end..self.end, 0);
        self.end -= self.valid_end;
        (self.begin, self.valid_end) = (0, 0);
        while self.begin == self.valid_end && !self.wrong {
            let count = match self.source.read(&mut self.buffer[self.end..]) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if count == 0 {
                self.wrong = self.end > self.valid_end;
                return Ok(());
            }
            self.end += count;
            // Before the first text only a byte order mark can have been passed, so `valid_end` is where text begins.
            let checked_from = self.valid_end;
            match std::str::from_utf8(&self.buffer[checked_from..self.end]) {
                Ok(_) => self.valid_end = self.end,
                Err(error) => {
                    self.valid_end += error.valid_up_to();
                    self.wrong = error.error_len().is_some();
                }
            }
            pass(&self.buffer[checked_from..self.valid_end], &mut self.line, &mut self.column);
            if !self.started && self.valid_end > 0 {
                self.started = true;
                if self.buffer[..self.valid_end].starts_with(BYTE_ORDER_MARK) {
                    self.begin = BYTE_ORDER_MARK.len();
                }
            }
        }
        Ok(())
    }
}

/// Moves a position past some text: the line, and the bytes before the position in it.
pub(super) fn pass(text: &[u8], line: &mut u64, column: &mut u64) {
    match text.iter().rposition(|&byte| byte == b'\n') {
        Some(last) => {
            *line += text.iter().filter(|&&byte| byte == b'\n').count() as u64;
            *column = (text.len() - last - 1) as u64;
        }
        None => *column += text.len() as u64,
    }
}

impl BufRead for Utf8Reader {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.row_bytes > MAX_ROW_BYTES {
            return Err(io::Error::other(TextError::RowTooLong { line: self.line }));
        }
        if self.begin == self.valid_end && !self.wrong {
            self.refill()?;
        }
        if self.begin == self.valid_end && self.wrong {
            return Err(self.not_utf8());
        }
        Ok(&self.buffer[self.begin..self.valid_end])
    }

    fn consume(&mut self, bytes: usize) {
        self.begin += bytes;
        self.row_bytes += bytes as u64;
    }
}

impl Read for Utf8Reader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let text = self.fill_buf()?;
        let count = text.len().min(out.len());
        out[..count].copy_from_slice(&text[..count]);
        self.consume(count);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands out a few bytes at a time, so that characters are cut anywhere.
    struct Dripping(Vec<u8>, usize);

    impl Read for Dripping {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let count = self.1.min(self.0.len()).min(out.len());
            out[..count].copy_from_slice(&self.0[..count]);
            self.0.drain(..count);
            Ok(count)
        }
    }

    fn read(bytes: &[u8], at_once: usize) -> Result<String, (String, String)> {
        let mut reader = Utf8Reader::new(Box::new(Dripping(bytes.to_vec(), at_once)));
        let mut text = Vec::new();
        match reader.read_to_end(&mut text) {
            Ok(_) => Ok(String::from_utf8(text).unwrap()),
            Err(error) => {
                let said = text_error(Path::new("a.txt"), error).to_string();
                Err((String::from_utf8(text).unwrap(), said))
            }
        }
    }

    #[test]
    fn text_comes_out_whole_however_it_is_cut() {
        let text = "Grüße, 世界 🦀\n\nEnde";
        for at_once in 1..12 {
            assert_eq!(read(text.as_bytes(), at_once).unwrap(), text);
            assert_eq!(read(format!("\u{FEFF}{text}").as_bytes(), at_once).unwrap(), text);
            assert_eq!(read(b"", at_once).unwrap(), "");
        }
    }

    #[test]
    fn a_wrong_byte_is_named_after_the_text_before_it() {
        for at_once in 1..12 {
            let (before, said) = read(b"one\n\xC3\xA4b\xFFc", at_once).unwrap_err();
            assert_eq!(before, "one\näb");
            assert_eq!(said, "`a.txt` line 2, byte column 4 is not UTF-8: byte 0xFF");
            let (_, said) = read(b"ab\xE4\xB8", at_once).unwrap_err();
            assert_eq!(said, "`a.txt` line 1, byte column 3 is not UTF-8: byte 0xE4");
            let (_, said) = read(b"\xFF\xFEa\0", at_once).unwrap_err();
            assert_eq!(said, "`a.txt` line 1, byte column 1 is not UTF-8: byte 0xFF");
        }
    }

    #[test]
    fn a_row_has_a_limit_and_rows_together_have_none() {
        let mut reader = Utf8Reader::new(Box::new(io::repeat(b'x')));
        let mut row = Vec::new();
        for _ in 0..3 {
            reader.begin_row();
            row.clear();
            (&mut reader).take(MAX_ROW_BYTES / 2).read_to_end(&mut row).unwrap();
        }
        row.clear();
        let error = reader.read_to_end(&mut row).unwrap_err();
        assert!(row.len() as u64 <= MAX_ROW_BYTES, "{}", row.len());
        assert_eq!(
            text_error(Path::new("a.csv"), error).to_string(),
            "`a.csv` line 1: the row is longer than 16 MiB"
        );
    }
}
