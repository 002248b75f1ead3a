//! Claims of a Parquet file, held to its size before the `parquet` crate believes them.
//!
//! The crate reserves what a page header says a page unpacks to, what a dictionary says it holds and what a
//! schema says it nests, before it looks at the bytes; a few damaged ones would take all memory, or end the
//! process. So the footer's schema and each page's header are walked here first.
//! Thrift's compact protocol is read as <https://github.com/apache/thrift/blob/master/doc/specs> describes it,
//! the fields as `parquet.thrift` of the format numbers them.
//! Leaves out everything else in a header: the crate checks that itself.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::sync::Arc;

use parquet::basic::{Compression, Encoding};
use parquet::bloom_filter::Sbbf;
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::RowGroupReader;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;

/// Levels of nesting in a schema: the crate descends by recursion.
const MAX_DEPTH: usize = 32;
/// A page may unpack to this much whatever its packed size: writers aim at pages of a megabyte.
const FREE_PAGE_BYTES: u64 = 1 << 20;
/// Runs take no space, so a page may hold this many values in any number of bytes.
const FREE_PAGE_VALUES: u64 = 1 << 20;
const VALUES_PER_PAGE_BYTE: u64 = 1024;

/// Holds the schema in a file's footer to its own length. What is no footer at all is left to the crate.
pub(super) fn check_footer(file: &File) -> Result<()> {
    let mut file = file;
    let file_bytes = file.seek(SeekFrom::End(0))?;
    if file_bytes < 12 {
        return Ok(());
    }
    file.seek(SeekFrom::Start(file_bytes - 8))?;
    let mut tail = [0; 4];
    file.read_exact(&mut tail)?;
    let footer_bytes = u64::from(u32::from_le_bytes(tail));
    let Some(start) = (file_bytes - 8).checked_sub(footer_bytes) else {
        return Ok(());
    };
    file.seek(SeekFrom::Start(start))?;
    let mut footer = Thrift { source: BufReader::new(file).take(footer_bytes), passed_bytes: 0 };
    let mut id = 0;
    while let Some((kind, next)) = footer.field(id)? {
        id = next;
        match (id, kind) {
            // `FileMetaData.schema`, in which every group comes before its children.
            (2, LIST) => return check_schema(&mut footer),
            _ => footer.skip(kind, 0)?,
        }
    }
    Ok(())
}

fn check_schema(footer: &mut Thrift<impl Read>) -> Result<()> {
    let (kind, elements) = footer.list()?;
    if kind != STRUCT {
        return Err(claim("the schema is not a list of elements".to_owned()));
    }
    // Children still to come, of each group around the element.
    let mut open: Vec<u64> = Vec::new();
    for _ in 0..elements {
        let (mut children, mut id) = (0, 0);
        while let Some((kind, next)) = footer.field(id)? {
            id = next;
            match (id, kind) {
                (5, I32) => children = footer.signed()?,
                _ => footer.skip(kind, 0)?,
            }
        }
        let children = u64::try_from(children).unwrap_or(u64::MAX);
        if children > elements {
            return Err(claim(format!("a group of {children} fields in a schema of {elements}")));
        }
        while open.last() == Some(&0) {
            open.pop();
        }
        if let Some(left) = open.last_mut() {
            *left -= 1;
        }
        if children > 0 {
            open.push(children);
        }
        if open.len() > MAX_DEPTH {
            return Err(claim(format!("the schema nests deeper than {MAX_DEPTH} levels")));
        }
    }
    Ok(())
}

fn claim(message: String) -> ParquetError {
    ParquetError::General(message)
}

/// A row group whose pages are checked before they are read.
pub(super) struct CheckedRowGroup<'a> {
    pub inner: Box<dyn RowGroupReader + 'a>,
    /// Opened for the checks alone: the inner reader moves its own file's position.
    pub file: Arc<File>,
}

impl RowGroupReader for CheckedRowGroup<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.inner.metadata()
    }

    fn num_columns(&self) -> usize {
        self.inner.num_columns()
    }

    fn get_column_page_reader(&self, index: usize) -> Result<Box<dyn PageReader>> {
        let column = self.inner.metadata().column(index);
        let (offset, left_bytes) = column.byte_range();
        let (file_bytes, codec) = (self.file.metadata()?.len(), column.compression());
        if offset.checked_add(left_bytes).is_none_or(|end| end > file_bytes) {
            return Err(claim(format!(
                "a column of {left_bytes} bytes at {offset} in a file of {file_bytes}"
            )));
        }
        let inner = self.inner.get_column_page_reader(index)?;
        let levels = [column.column_descr().max_rep_level() > 0, column.column_descr().max_def_level() > 0];
        let levels = levels.into_iter().filter(|&stored| stored).count();
        Ok(Box::new(CheckedPages { inner, file: Arc::clone(&self.file), offset, left_bytes, codec, levels }))
    }

    fn get_column_bloom_filter(&self, index: usize) -> Option<&Sbbf> {
        self.inner.get_column_bloom_filter(index)
    }

    fn get_row_iter(&self, projection: Option<Type>) -> Result<RowIter<'_>> {
        self.inner.get_row_iter(projection)
    }
}

struct CheckedPages {
    inner: Box<dyn PageReader>,
    file: Arc<File>,
    /// Of the next page's header.
    offset: u64,
    left_bytes: u64,
    codec: Compression,
    /// How many of the two kinds of levels stand before a page's values.
    levels: usize,
}

impl CheckedPages {
    /// Checks the header of the next page and moves behind that page, as the inner reader will.
    fn check_next_header(&mut self) -> Result<()> {
        loop {
            if self.left_bytes == 0 {
                return Ok(());
            }
            let mut file = &*self.file;
            file.seek(SeekFrom::Start(self.offset))?;
            let header = read_page_header(BufReader::with_capacity(1024, file).take(self.left_bytes))?;
            let PageClaims { header_bytes, packed_bytes, .. } = header;
            let page_bytes = header_bytes.saturating_add(packed_bytes);
            if page_bytes > self.left_bytes {
                return Err(claim(format!(
                    "a page of {page_bytes} bytes where {} are left",
                    self.left_bytes
                )));
            }
            self.offset += page_bytes;
            self.left_bytes -= page_bytes;
            let unpacked_bytes = match largest_ratio(self.codec) {
                None => packed_bytes,
                Some(ratio) => {
                    let limit = FREE_PAGE_BYTES + ratio * packed_bytes;
                    if header.unpacked_bytes > limit {
                        return Err(claim(format!(
                            "a page of {packed_bytes} bytes says that it unpacks to {}",
                            header.unpacked_bytes
                        )));
                    }
                    header.unpacked_bytes
                }
            };
            let most_values = match header.kind {
                // Every entry takes a byte at least.
                PageKind::Dictionary => unpacked_bytes,
                PageKind::Data => FREE_PAGE_VALUES + VALUES_PER_PAGE_BYTE * unpacked_bytes,
                PageKind::Other => u64::MAX,
            };
            if header.values > most_values {
                return Err(claim(format!(
                    "a page of {unpacked_bytes} bytes says that it holds {} values",
                    header.values
                )));
            }
            if header.kind != PageKind::Other {
                return Ok(());
            }
        }
    }

    /// Lengths of strings that are stored as differences say how many they are.
    fn check_encoding(&self, page: &Page) -> Result<()> {
        let mut values = match page {
            Page::DictionaryPage { .. } => return Ok(()),
            Page::DataPageV2 { buf, def_levels_byte_len, rep_levels_byte_len, .. } => {
                let levels = u64::from(*def_levels_byte_len) + u64::from(*rep_levels_byte_len);
                buf.get(levels as usize..).unwrap_or_default()
            }
            Page::DataPage { buf, .. } => {
                let mut rest = &buf[..];
                for _ in 0..self.levels {
                    let Some((length, levels)) = rest.split_first_chunk::<4>() else { break };
                    rest = levels.get(u32::from_le_bytes(*length) as usize..).unwrap_or_default();
                }
                rest
            }
        };
        match page.encoding() {
            Encoding::DELTA_LENGTH_BYTE_ARRAY => {
                let mut counts = Thrift { source: &mut values, passed_bytes: 0 };
                let (_block, _parts, lengths) = (counts.unsigned()?, counts.unsigned()?, counts.unsigned()?);
                match lengths > u64::from(page.num_values()) {
                    true => Err(claim(format!("{lengths} lengths for {} values", page.num_values()))),
                    false => Ok(()),
                }
            }
            // The second of its two lists begins where the first, which has to be decoded for that, ends.
            Encoding::DELTA_BYTE_ARRAY => {
                Err(claim("strings in the encoding DELTA_BYTE_ARRAY are not understood".to_owned()))
            }
            _ => Ok(()),
        }
    }
}

impl PageReader for CheckedPages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        self.check_next_header()?;
        let page = self.inner.get_next_page()?;
        if let Some(page) = &page {
            self.check_encoding(page)?;
        }
        Ok(page)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.inner.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.check_next_header()?;
        self.inner.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> Result<bool> {
        self.inner.at_record_boundary()
    }
}

impl Iterator for CheckedPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Result<Page>> {
        self.get_next_page().transpose()
    }
}

/// Bytes that one packed byte can become at most; nothing where pages are stored as they are.
fn largest_ratio(codec: Compression) -> Option<u64> {
    match codec {
        Compression::UNCOMPRESSED => None,
        // A copy of 64 bytes takes three.
        Compression::SNAPPY => Some(22),
        Compression::LZ4 | Compression::LZ4_RAW | Compression::LZO => Some(256),
        // A match of 258 bytes takes two bits.
        Compression::GZIP(_) => Some(1032),
        // A block of 128 KiB takes four bytes.
        Compression::ZSTD(_) | Compression::BROTLI(_) => Some(1 << 15),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PageKind {
    Data,
    Dictionary,
    Other,
}

/// What a page header says of its page.
struct PageClaims {
    header_bytes: u64,
    kind: PageKind,
    unpacked_bytes: u64,
    packed_bytes: u64,
    values: u64,
}

fn read_page_header(source: impl Read) -> Result<PageClaims> {
    let mut header = Thrift { source, passed_bytes: 0 };
    let (mut kind, mut unpacked_bytes, mut packed_bytes, mut values) = (-1, -1, -1, 0);
    let mut id = 0;
    while let Some((field, next)) = header.field(id)? {
        id = next;
        match (id, field) {
            (1, I32) => kind = header.signed()?,
            (2, I32) => unpacked_bytes = header.signed()?,
            (3, I32) => packed_bytes = header.signed()?,
            // The headers of the kinds of page, which all begin with a number of values.
            (5 | 7 | 8, STRUCT) => {
                let mut inner = 0;
                while let Some((field, next)) = header.field(inner)? {
                    inner = next;
                    match (inner, field) {
                        (1, I32) => values = header.signed()?.max(values),
                        _ => header.skip(field, 0)?,
                    }
                }
            }
            _ => header.skip(field, 0)?,
        }
    }
    let count = |number: i64| u64::try_from(number).map_err(|_| claim("broken page header".to_owned()));
    Ok(PageClaims {
        header_bytes: header.passed_bytes,
        kind: match kind {
            0 | 3 => PageKind::Data,
            2 => PageKind::Dictionary,
            _ => PageKind::Other,
        },
        unpacked_bytes: count(unpacked_bytes)?,
        packed_bytes: count(packed_bytes)?,
        values: count(values)?,
    })
}

const I32: u8 = 5;
const LIST: u8 = 9;
const STRUCT: u8 = 12;

/// A walk over Thrift's compact protocol.
struct Thrift<R> {
    source: R,
    passed_bytes: u64,
}

impl<R: Read> Thrift<R> {
    /// Kind and id of the next field after `previous`, nothing at the end of a struct.
    fn field(&mut self, previous: i64) -> io::Result<Option<(u8, i64)>> {
        let byte = self.byte()?;
        Ok(match (byte & 0x0F, byte >> 4) {
            (0, _) => None,
            (kind, 0) => Some((kind, self.signed()?)),
            (kind, step) => Some((kind, previous.saturating_add(i64::from(step)))),
        })
    }

    /// Kind and number of the elements of a list.
    fn list(&mut self) -> io::Result<(u8, u64)> {
        let byte = self.byte()?;
        let count = match byte >> 4 {
            15 => self.unsigned()?,
            count => u64::from(count),
        };
        Ok((byte & 0x0F, count))
    }

    fn skip(&mut self, kind: u8, depth: usize) -> io::Result<()> {
        if depth > MAX_DEPTH {
            return Err(io::Error::other("a header nests too deep"));
        }
        match kind {
            // Of a field, where the kind is the value.
            1 | 2 => Ok(()),
            3 => self.pass(1),
            4..=6 => self.unsigned().map(drop),
            7 => self.pass(8),
            8 => {
                let length = self.unsigned()?;
                self.pass(length)
            }
            9 | 10 => {
                let (kind, count) = self.list()?;
                for _ in 0..count {
                    self.skip_element(kind, depth + 1)?;
                }
                Ok(())
            }
            11 => {
                let count = self.unsigned()?;
                let kinds = if count > 0 { self.byte()? } else { 0 };
                for _ in 0..count {
                    self.skip_element(kinds >> 4, depth + 1)?;
                    self.skip_element(kinds & 0x0F, depth + 1)?;
                }
                Ok(())
            }
            STRUCT => {
                while let Some((kind, _)) = self.field(0)? {
                    self.skip(kind, depth + 1)?;
                }
                Ok(())
            }
            13 => self.pass(16),
            kind => Err(io::Error::other(format!("a header has a field of the unknown kind {kind}"))),
        }
    }

    /// An element takes a byte at least, so that a count ends with the bytes.
    fn skip_element(&mut self, kind: u8, depth: usize) -> io::Result<()> {
        match kind {
            1 | 2 => self.pass(1),
            _ => self.skip(kind, depth),
        }
    }

    fn signed(&mut self) -> io::Result<i64> {
        let number = self.unsigned()?;
        Ok((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    fn unsigned(&mut self) -> io::Result<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(io::Error::other("a header has a number of more than 64 bits"))
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.source.read_exact(&mut byte)?;
        self.passed_bytes += 1;
        Ok(byte[0])
    }

    fn pass(&mut self, bytes: u64) -> io::Result<()> {
        let passed = io::copy(&mut (&mut self.source).take(bytes), &mut io::sink())?;
        self.passed_bytes += passed;
        match passed == bytes {
            true => Ok(()),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::source::{SourceError, read_json_rows};
    use super::read_page_header;
    use std::path::Path;

    fn fixture(name: &str) -> Vec<u8> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/data");
        std::fs::read(folder.join(name)).unwrap()
    }

    fn said(bytes: &[u8]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        std::fs::write(&path, bytes).unwrap();
        let error = read_json_rows(&path, |_, _| Ok::<(), SourceError>(())).unwrap_err();
        error.to_string().split_once("file: ").unwrap().1.to_owned()
    }

    /// A field of 32 bits that follows the one before it.
    fn number(value: i32) -> Vec<u8> {
        let mut zigzag = ((value << 1) ^ (value >> 31)) as u32;
        let mut bytes = vec![0x15];
        while zigzag >= 0x80 {
            bytes.push(zigzag as u8 | 0x80);
            zigzag >>= 7;
        }
        bytes.push(zigzag as u8);
        bytes
    }

    /// The file with another header before its first page, a dictionary; the page gets shorter by as much.
    fn with_header(file: &[u8], unpacked_bytes: i32, values: i32) -> Vec<u8> {
        let old = read_page_header(&file[4..]).unwrap();
        let page_end = 4 + (old.header_bytes + old.packed_bytes) as usize;
        let header = |packed_bytes: i32| {
            let sizes = [number(2), number(unpacked_bytes), number(packed_bytes)].concat();
            [sizes, vec![0x4C], number(values), number(0), vec![0, 0]].concat()
        };
        let packed_bytes = page_end - 4 - header(0).len();
        let header = header(packed_bytes as i32);
        let data = &file[page_end - packed_bytes..];
        assert_eq!(header.len() + data.len() + 4, file.len());
        [&file[..4], &header, data].concat()
    }

    #[test]
    fn claims_of_page_headers_are_not_believed() {
        let file = fixture("chat_snappy.parquet");
        let said_unpacked = said(&with_header(&file, i32::MAX, 3));
        assert!(said_unpacked.ends_with(" bytes says that it unpacks to 2147483647"), "{said_unpacked}");
        let said_values = said(&with_header(&file, 30, i32::MAX));
        assert_eq!(said_values, "a page of 30 bytes says that it holds 2147483647 values");
        let said_negative = said(&with_header(&file, -1, 3));
        assert_eq!(said_negative, "broken page header");
    }

    fn with_schema(elements: u8, children: i32) -> Vec<u8> {
        let element = [vec![0x48, 1, b'a'], number(children), vec![0]].concat();
        let schema =
            [number(2), vec![0x19, 0xFC, elements], element.repeat(elements.into()), vec![0]].concat();
        let footer_bytes = (schema.len() as u32).to_le_bytes();
        [&b"PAR1"[..], &schema, &footer_bytes, b"PAR1"].concat()
    }

    #[test]
    fn claims_of_schemas_are_not_believed() {
        assert_eq!(said(&with_schema(1, i32::MAX)), "a group of 2147483647 fields in a schema of 1");
        assert_eq!(said(&with_schema(100, 1)), "the schema nests deeper than 32 levels");
        assert!(said(&with_schema(2, -1)).starts_with("a group of 18446744073709551615 fields"));
    }

    #[test]
    fn claims_of_encodings_are_not_believed() {
        let mut file = fixture("text_delta_length.parquet");
        // Values of a block, parts of a block, values.
        let counts = file.windows(4).position(|bytes| bytes == [0x80, 0x01, 0x04, 0x03]).unwrap();
        file[counts + 3] = 0x7F;
        assert_eq!(said(&file), "127 lengths for 3 values");
    }
}
