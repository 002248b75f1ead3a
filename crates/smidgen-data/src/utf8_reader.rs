//! The text of a data file as a stream of bytes that should be UTF-8.
//!
//! Readers of rows check each row, so that a wrong byte costs its row and no other; the text that they get never ends
//! within a character. A byte order mark is skipped, and a file in UTF-16 is refused: half of its lines would look
//! like text. A row has at most `MAX_ROW_BYTES`: otherwise a quote or a bracket that is never closed would read the
//! whole file into memory. Readers of rows call `begin_row` where a row begins.

use std::io::{self, BufRead, Read};
use std::path::Path;

use thiserror::Error;

use crate::compressed::{open_unpacked, packing_error};
use crate::row_place::{RowPlace, RowUnit};
use crate::source_error::{MAX_ROW_BYTES, SourceError};

const BUFFER_BYTES: usize = 64 * 1024;
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";
const UTF16_MARKS: [&[u8]; 2] = [b"\xFF\xFE", b"\xFE\xFF"];

/// Opens a file, decompressed if its name says so.
pub(super) fn open_text(path: &Path) -> Result<Utf8Reader, SourceError> {
    Ok(Utf8Reader::new(open_unpacked(path)?))
}

/// The error of a read from `Utf8Reader`, with the file's name.
pub(super) fn text_error(path: &Path, source: io::Error) -> SourceError {
    match source.get_ref().and_then(|inner| inner.downcast_ref::<TextError>()) {
        Some(&TextError::Utf16 { byte }) => {
            SourceError::NotUtf8 { path: path.display().to_string(), line: 1, column: Some(1), byte }
        }
        Some(&TextError::RowTooLong { line }) => {
            SourceError::RowTooLong { path: path.display().to_string(), line }
        }
        None => packing_error(path, source),
    }
}

#[derive(Debug, Error)]
enum TextError {
    #[error("the file begins with the mark of UTF-16")]
    Utf16 { byte: u8 },
    #[error("the row that reaches line {line} is too long")]
    RowTooLong { line: u64 },
}

/// Calls `on_line` with each line of a file, without the line break at its end.
pub(super) fn for_each_line<E: From<SourceError>>(
    path: &Path,
    mut reader: Utf8Reader,
    mut on_line: impl FnMut(RowPlace<'_>, Result<&str, SourceError>) -> Result<(), E>,
) -> Result<(), E> {
    let (mut line, mut number) = (Vec::new(), 0);
    loop {
        line.clear();
        reader.begin_row();
        if reader.read_until(b'\n', &mut line).map_err(|source| text_error(path, source))? == 0 {
            return Ok(());
        }
        number += 1;
        let before = if number == 1 { reader.mark_bytes } else { 0 };
        let text = text_of(path, &line, number, before).map(|text| text.trim_end_matches(['\r', '\n']));
        on_line(RowPlace { file: path, unit: RowUnit::Line, number }, text)?;
    }
}

/// The text of a row, or the place of its first wrong byte. The row begins at `line`, after `column` bytes of it.
pub(super) fn text_of<'a>(
    path: &Path,
    bytes: &'a [u8],
    mut line: u64,
    mut column: u64,
) -> Result<&'a str, SourceError> {
    std::str::from_utf8(bytes).map_err(|error| {
        let (before, wrong) = bytes.split_at(error.valid_up_to());
        pass(before, &mut line, &mut column);
        let (path, byte) = (path.display().to_string(), wrong[0]);
        SourceError::NotUtf8 { path, line, column: Some(column + 1), byte }
    })
}

pub(super) struct Utf8Reader {
    source: Box<dyn Read>,
    /// `begin..text_end` is text to hand out, `text_end..end` the beginning of an incomplete character.
    buffer: Box<[u8]>,
    begin: usize,
    text_end: usize,
    end: usize,
    /// Line (from 1) at `text_end`.
    line: u64,
    row_bytes: u64,
    started: bool,
    /// Bytes of the byte order mark, which precede the first text in its line.
    mark_bytes: u64,
}

impl Utf8Reader {
    pub fn new(source: Box<dyn Read>) -> Utf8Reader {
        Utf8Reader {
            source,
            buffer: vec![0; BUFFER_BYTES].into(),
            begin: 0,
            text_end: 0,
            end: 0,
            line: 1,
            row_bytes: 0,
            started: false,
            mark_bytes: 0,
        }
    }

    /// What is read from now on belongs to another row.
    /// Bytes of the byte order mark, which precede the first text in its line.
    pub fn mark_bytes(&self) -> u64 {
        self.mark_bytes
    }

    pub fn begin_row(&mut self) {
        self.row_bytes = 0;
    }

    /// Reads until there is text to hand out, or the file ends.
    fn refill(&mut self) -> io::Result<()> {
        self.buffer.copy_within(self.text_end..self.end, 0);
        self.end -= self.text_end;
        (self.begin, self.text_end) = (0, 0);
        while self.begin == self.text_end {
            let count = match self.source.read(&mut self.buffer[self.end..]) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            self.end += count;
            // A character that the end of the file cuts off is handed out incomplete.
            let withheld = if count == 0 { 0 } else { incomplete_bytes(&self.buffer[..self.end]) };
            // A mark is looked for in the first two bytes.
            if !self.started && self.end < 2 && count > 0 {
                continue;
            }
            self.text_end = self.end - withheld;
            if !self.started {
                self.skip_mark()?;
            }
            if count == 0 {
                break;
            }
        }
        let breaks = self.buffer[self.begin..self.text_end].iter().filter(|&&byte| byte == b'\n').count();
        self.line += breaks as u64;
        Ok(())
    }

    /// Skips a byte order mark, which is one character.
    fn skip_mark(&mut self) -> io::Result<()> {
        let text = &self.buffer[..self.text_end];
        if UTF16_MARKS.iter().any(|mark| text.starts_with(mark)) {
            return Err(io::Error::other(TextError::Utf16 { byte: text[0] }));
        }
        if text.starts_with(BYTE_ORDER_MARK) {
            self.begin = BYTE_ORDER_MARK.len();
            self.mark_bytes = BYTE_ORDER_MARK.len() as u64;
        }
        self.started = !text.is_empty();
        Ok(())
    }
}

/// The bytes at the end that begin a character and do not complete it.
fn incomplete_bytes(bytes: &[u8]) -> usize {
    for (count, byte) in (1..4).zip(bytes.iter().rev()) {
        let whole = match byte {
            0xC0..0xE0 => 2,
            0xE0..0xF0 => 3,
            0xF0..0xF8 => 4,
            0x80..0xC0 => continue,
            _ => return 0,
        };
        return if whole > count { count } else { 0 };
    }
    0
}

/// Moves a position past some text; `column` counts the bytes before the position in its line.
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
        if self.begin == self.text_end {
            self.refill()?;
        }
        Ok(&self.buffer[self.begin..self.text_end])
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

    /// The pieces that are handed out, or the error message.
    fn read(bytes: &[u8], at_once: usize) -> Result<Vec<Vec<u8>>, String> {
        let mut reader = Utf8Reader::new(Box::new(Dripping(bytes.to_vec(), at_once)));
        let mut pieces = Vec::new();
        loop {
            let piece =
                reader.fill_buf().map_err(|error| text_error(Path::new("a.txt"), error).to_string())?;
            if piece.is_empty() {
                return Ok(pieces);
            }
            pieces.push(piece.to_vec());
            let count = piece.len();
            reader.consume(count);
        }
    }

    #[test]
    fn text_comes_out_whole_however_it_is_cut() {
        let text = "Grüße, 世界 🦀\n\nEnde";
        for at_once in 1..12 {
            let read = |bytes: &[u8]| -> String {
                let pieces = read(bytes, at_once).unwrap();
                pieces.iter().map(|piece| std::str::from_utf8(piece).unwrap()).collect()
            };
            assert_eq!(read(text.as_bytes()), text);
            assert_eq!(read(format!("\u{FEFF}{text}").as_bytes()), text);
            assert_eq!(read(b""), "");
            assert_eq!(read(b"a"), "a");
        }
    }

    #[test]
    fn wrong_bytes_are_handed_out_and_utf16_is_refused() {
        for at_once in 1..12 {
            for wrong in
                [&b"one\n\xC3\xA4b\xFFc"[..], b"ab\xE4\xB8", b"\xE4\xB8", b"\xC3", b"\x80\xBF\xF8\xC3("]
            {
                assert_eq!(read(wrong, at_once).unwrap().concat(), wrong);
            }
            let said = read(b"\xFF\xFEa\0", at_once).unwrap_err();
            assert_eq!(said, "`a.txt` line 1, byte column 1 is not UTF-8: byte 0xFF");
        }
        let error = text_of(Path::new("a.txt"), b"one\n\xC3\xA4b\xFFc", 7, 2).unwrap_err();
        assert_eq!(error.to_string(), "`a.txt` line 8, byte column 4 is not UTF-8: byte 0xFF");
        let error = text_of(Path::new("a.txt"), b"ab\xE4\xB8", 1, 3).unwrap_err();
        assert_eq!(error.to_string(), "`a.txt` line 1, byte column 6 is not UTF-8: byte 0xE4");
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
