//! Limits on what a Parquet file can make the process allocate.
//!
//! The `parquet` crate allocates what a file claims before it looks at the data: the children of a schema group,
//! the size of a decompressed page, the entries of a dictionary. It also descends into a schema by recursion.
//! Here the schema is checked before the crate sees it, and pages are read as stored and decompressed into a
//! bounded buffer, so that a damaged or hostile file ends in an error. `docs/decisions/parquet.md` has the reasons.
//! Everything that cannot allocate is checked by the crate itself.

use std::fs::File;
use std::io::Read;
use std::sync::Arc;

use parquet::basic::{Compression, Encoding};
use parquet::bloom_filter::Sbbf;
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::RowGroupReader;
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;
use polars_parquet_format::thrift;
use polars_parquet_format::thrift::protocol::{TCompactInputProtocol, TInputProtocol, TType};
use smidgen_ir::grouped_digits::Grouped;

/// Levels of nesting in a schema.
const MAX_DEPTH: usize = 32;
/// A page may decompress to this size, whatever its stored size. Writers aim at 1 MiB.
const FREE_PAGE_BYTES: usize = 16 << 20;
/// Above it, a page may decompress to this multiple of its stored size ...
const MAX_RATIO: usize = 256;
/// ... and never to more than this.
const MAX_PAGE_BYTES: usize = 1 << 30;
/// A column of lists may have this many values in a row group, whatever its size. There must be a limit because runs of
/// equal values take no space, so one row could claim any number of values.
const FREE_VALUES: u64 = 16 << 20;
const VALUES_PER_BYTE: u64 = 16;
/// A file may have this many rows whatever its size, and one more for each of its bytes: equal rows take no space, so
/// a small file could claim days of work. Rows to train on differ, and take more than a byte.
const FREE_ROWS: u64 = 1 << 20;

fn refused(message: String) -> ParquetError {
    ParquetError::General(message)
}

/// The most rows that a file of this size may have.
pub(super) fn most_rows(file_bytes: u64) -> u64 {
    FREE_ROWS.saturating_add(file_bytes)
}

/// Refuses a file that claims far more values of lists than its size can hold.
pub(super) fn check_lists(groups: &[RowGroupMetaData], file_bytes: u64) -> Result<()> {
    let count = |number: i64| u64::try_from(number).unwrap_or_default();
    let most_values = FREE_VALUES.saturating_add(VALUES_PER_BYTE.saturating_mul(file_bytes));
    for column in 0..groups.first().map_or(0, RowGroupMetaData::num_columns) {
        let columns =
            groups.iter().filter(|group| column < group.num_columns()).map(|group| group.column(column));
        let lists = columns.filter(|column| column.column_descr().max_rep_level() > 0);
        let values = lists.fold(0u64, |sum, column| sum.saturating_add(count(column.num_values())));
        if values > most_values {
            let (values, file_bytes) = (Grouped(values), Grouped(file_bytes));
            return Err(refused(format!(
                "a column of lists claims {values} values in a file of {file_bytes} bytes"
            )));
        }
    }
    Ok(())
}

/// Refuses a schema whose groups claim more children than it has elements, or that nests too deeply.
pub(super) fn check_schema(footer: &[u8]) -> Result<()> {
    let children = schema_children(footer).map_err(|error| refused(error.to_string()))?;
    // For each group around the element, its children that are still to come.
    let mut open: Vec<i32> = Vec::new();
    for &count in &children {
        if count < 0 || count as usize > children.len() {
            return Err(refused(format!("a group of {count} fields in a schema of {}", children.len())));
        }
        while open.pop_if(|left| *left == 0).is_some() {}
        if let Some(left) = open.last_mut() {
            *left -= 1;
        }
        open.extend((count > 0).then_some(count));
        if open.len() > MAX_DEPTH {
            return Err(refused(format!("the schema nests deeper than {MAX_DEPTH} levels")));
        }
    }
    Ok(())
}

/// `num_children` of each element of `FileMetaData.schema`, in which a group comes before its children.
fn schema_children(footer: &[u8]) -> thrift::Result<Vec<i32>> {
    let mut input = TCompactInputProtocol::new(footer, 16 * footer.len());
    let mut children = Vec::new();
    for_each_field(&mut input, |input, id, kind| {
        if (id, kind) != (2, TType::List) {
            return skip(input, kind, 0);
        }
        for _ in 0..input.read_list_begin()?.size {
            let mut count = 0;
            for_each_field(input, |input, id, kind| match (id, kind) {
                (5, TType::I32) => input.read_i32().map(|number| count = number),
                _ => skip(input, kind, 0),
            })?;
            children.push(count);
        }
        Ok(())
    })?;
    Ok(children)
}

/// Calls `on_field` with the id and type of each field of a struct, to read or skip it.
fn for_each_field<P: TInputProtocol>(
    input: &mut P,
    mut on_field: impl FnMut(&mut P, i16, TType) -> thrift::Result<()>,
) -> thrift::Result<()> {
    input.read_struct_begin()?;
    loop {
        let field = input.read_field_begin()?;
        if field.field_type == TType::Stop {
            return input.read_struct_end();
        }
        on_field(input, field.id.unwrap_or_default(), field.field_type)?;
    }
}

/// The protocol's own `skip` requires strings to be UTF-8, but statistics hold any bytes.
fn skip<P: TInputProtocol>(input: &mut P, kind: TType, depth: usize) -> thrift::Result<()> {
    match kind {
        TType::String => input.read_bytes().map(drop),
        TType::Struct if depth < MAX_DEPTH => {
            for_each_field(input, |input, _, kind| skip(input, kind, depth + 1))
        }
        TType::List if depth < MAX_DEPTH => {
            let list = input.read_list_begin()?;
            (0..list.size).try_for_each(|_| skip(input, list.element_type, depth + 1))
        }
        kind => input.skip(kind),
    }
}

/// A row group whose pages are checked by the limits.
pub(super) struct LimitedRowGroup<'a> {
    pub file: &'a Arc<File>,
    pub metadata: &'a RowGroupMetaData,
}

impl RowGroupReader for LimitedRowGroup<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.metadata
    }

    fn num_columns(&self) -> usize {
        self.metadata.num_columns()
    }

    fn get_column_page_reader(&self, index: usize) -> Result<Box<dyn PageReader>> {
        let column = self.metadata.column(index);
        let offset = column.dictionary_page_offset().unwrap_or(column.data_page_offset());
        let (bytes, file_bytes) = (column.compressed_size(), self.file.metadata()?.len());
        if offset < 0 || bytes < 0 || (offset as u64).saturating_add(bytes as u64) > file_bytes {
            return Err(refused(format!("a column of {bytes} bytes at {offset} in a file of {file_bytes}")));
        }
        let stored = column.clone().into_builder().set_compression(Compression::UNCOMPRESSED).build()?;
        let rows = usize::try_from(self.metadata.num_rows())?;
        let levels = [column.column_descr().max_rep_level(), column.column_descr().max_def_level()];
        Ok(Box::new(LimitedPages {
            stored: SerializedPageReader::new(Arc::clone(self.file), &stored, rows, None)?,
            limits: Limits {
                compression: column.compression(),
                has_levels: levels.map(|level| level > 0),
                max_values: u64::try_from(column.num_values())?,
                values: 0,
                bytes: 0,
            },
        }))
    }

    fn get_column_bloom_filter(&self, _index: usize) -> Option<&Sbbf> {
        None
    }

    fn get_row_iter(&self, projection: Option<Type>) -> Result<RowIter<'_>> {
        RowIter::from_row_group(projection, self)
    }
}

struct LimitedPages {
    /// Hands out pages as they are stored, compressed or not.
    stored: SerializedPageReader<File>,
    limits: Limits,
}

/// The limits of the pages of one column, and the counts so far.
struct Limits {
    compression: Compression,
    /// Whether repetition and definition levels come before a page's values.
    has_levels: [bool; 2],
    /// The number of values according to the footer.
    max_values: u64,
    /// Values and decompressed bytes of the data pages so far.
    values: u64,
    bytes: u64,
}

impl Limits {
    fn decompress(&self, page: &mut Page) -> Result<()> {
        let (buf, level_bytes) = match page {
            Page::DictionaryPage { buf, .. } | Page::DataPage { buf, .. } => (buf, 0),
            Page::DataPageV2 { is_compressed: false, .. } => return Ok(()),
            // The levels of such a page are never compressed.
            Page::DataPageV2 {
                buf,
                def_levels_byte_len: definition,
                rep_levels_byte_len: repetition,
                ..
            } => (buf, *definition as usize + *repetition as usize),
        };
        let Some((levels, stored)) = buf.split_at_checked(level_bytes) else {
            return Err(refused(format!("{level_bytes} bytes of levels in a page of {}", buf.len())));
        };
        if self.compression != Compression::UNCOMPRESSED && !stored.is_empty() {
            let mut decompressed = decompress(self.compression, stored)?;
            decompressed.splice(0..0, levels.iter().copied());
            *buf = decompressed.into();
        }
        Ok(())
    }

    fn check_values(&mut self, page: &Page) -> Result<()> {
        let (bytes, values) = (page.buffer().len() as u64, u64::from(page.num_values()));
        if page.is_dictionary_page() {
            // An entry takes at least one byte.
            let claim = format!("a dictionary of {bytes} bytes claims {values} entries");
            return if values > bytes { Err(refused(claim)) } else { Ok(()) };
        }
        self.values += values;
        self.bytes += bytes;
        if self.values > self.max_values {
            let (found, expected) = (self.values, self.max_values);
            return Err(refused(format!("pages claim {found} values, the footer {expected}")));
        }
        let [has_lists, _] = self.has_levels;
        if has_lists && self.values > FREE_VALUES + VALUES_PER_BYTE * self.bytes {
            return Err(refused(format!("a column of {} bytes claims {} values", self.bytes, self.values)));
        }
        match page.encoding() {
            Encoding::DELTA_LENGTH_BYTE_ARRAY => match delta_count(self.values_of(page)) {
                Some(lengths) if lengths > values => {
                    Err(refused(format!("{lengths} lengths for {values} strings")))
                }
                _ => Ok(()),
            },
            // It has two lists of lengths, and the second begins where the decoded first ends.
            Encoding::DELTA_BYTE_ARRAY => {
                Err(refused("strings in the encoding DELTA_BYTE_ARRAY are not supported".to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// The bytes after the levels; empty if the levels claim more bytes than there are.
    fn values_of<'a>(&self, page: &'a Page) -> &'a [u8] {
        let mut rest = &page.buffer()[..];
        let mut skip = |bytes: usize| rest = rest.get(bytes..).unwrap_or_default();
        match page {
            Page::DictionaryPage { .. } => {}
            Page::DataPageV2 { def_levels_byte_len, rep_levels_byte_len, .. } => {
                skip(*def_levels_byte_len as usize);
                skip(*rep_levels_byte_len as usize);
            }
            Page::DataPage { .. } => {
                for _ in self.has_levels.into_iter().filter(|&stored| stored) {
                    if let Some((length, levels)) = rest.split_first_chunk() {
                        rest = levels.get(u32::from_le_bytes(*length) as usize..).unwrap_or_default();
                    }
                }
            }
        }
        rest
    }
}

impl PageReader for LimitedPages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let Some(mut page) = self.stored.get_next_page()? else { return Ok(None) };
        self.limits.decompress(&mut page)?;
        self.limits.check_values(&page)?;
        Ok(Some(page))
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.stored.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.stored.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> Result<bool> {
        self.stored.at_record_boundary()
    }
}

impl Iterator for LimitedPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Result<Page>> {
        self.get_next_page().transpose()
    }
}

fn decompress(compression: Compression, stored: &[u8]) -> Result<Vec<u8>> {
    let limit = FREE_PAGE_BYTES.saturating_add(MAX_RATIO.saturating_mul(stored.len())).min(MAX_PAGE_BYTES);
    let too_large = || refused(format!("a page of {} bytes decompresses to more than {limit}", stored.len()));
    let broken = |error: &dyn std::fmt::Display| refused(format!("a page cannot be decompressed: {error}"));
    let stream: Box<dyn Read + '_> = match compression {
        Compression::SNAPPY => {
            let bytes = snap::raw::decompress_len(stored).map_err(|error| broken(&error))?;
            if bytes > limit {
                return Err(too_large());
            }
            return snap::raw::Decoder::new().decompress_vec(stored).map_err(|error| broken(&error));
        }
        Compression::LZ4_RAW => {
            // The block does not state its decompressed size, which is at most 255 times the stored one. Memory that
            // the result does not need is never touched.
            let room = limit.min(stored.len().saturating_mul(255).saturating_add(64));
            let mut decompressed =
                lz4_flex::block::decompress(stored, room).map_err(|error| broken(&error))?;
            decompressed.shrink_to_fit();
            return Ok(decompressed);
        }
        Compression::GZIP(_) => Box::new(flate2::bufread::MultiGzDecoder::new(stored)),
        Compression::ZSTD(_) => {
            Box::new(zstd::stream::read::Decoder::with_buffer(stored).map_err(|error| broken(&error))?)
        }
        Compression::BROTLI(_) => Box::new(brotli_decompressor::Decompressor::new(stored, 4 << 10)),
        Compression::LZ4 | Compression::LZO | Compression::UNCOMPRESSED => {
            return Err(refused(format!("pages compressed with {compression} are not supported")));
        }
    };
    let mut decompressed = Vec::new();
    stream.take(limit as u64 + 1).read_to_end(&mut decompressed).map_err(|error| broken(&error))?;
    if decompressed.len() > limit { Err(too_large()) } else { Ok(decompressed) }
}

/// How many numbers a delta-encoded list claims: the third of the counts that it begins with.
fn delta_count(mut bytes: &[u8]) -> Option<u64> {
    let mut number = || {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = *bytes.split_off_first()?;
            number |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    };
    let (_block, _parts, count) = (number()?, number()?, number()?);
    Some(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::basic::{GzipLevel, ZstdLevel};

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

    /// The fields of a footer up to its schema, in which every element has that many children.
    fn schema(elements: u8, children: i32) -> Vec<u8> {
        let element = [vec![0x48, 1, b'a'], number(children), vec![0]].concat();
        [number(2), vec![0x19, 0xFC, elements], element.repeat(elements.into())].concat()
    }

    fn said(footer: Vec<u8>) -> String {
        check_schema(&footer).unwrap_err().to_string().split_once(": ").unwrap().1.to_owned()
    }

    #[test]
    fn claims_of_schemas_are_not_believed() {
        let end = vec![0];
        assert!(check_schema(&[schema(3, 1), end.clone()].concat()).is_ok());
        assert_eq!(
            said([schema(1, i32::MAX), end.clone()].concat()),
            "a group of 2147483647 fields in a schema of 1"
        );
        assert_eq!(said([schema(100, 1), end.clone()].concat()), "the schema nests deeper than 32 levels");
        assert_eq!(said([schema(2, -1), end.clone()].concat()), "a group of -1 fields in a schema of 2");
        // A second schema would replace the first: field 2 again, by its number.
        let again = [vec![0x09, 4, 0xFC, 1, 0x48, 1, b'a'], number(i32::MAX), vec![0]].concat();
        assert!(said([schema(1, 0), again, end].concat()).starts_with("a group of 2147483647 fields"));
    }

    fn limits(compression: Compression) -> Limits {
        Limits { compression, has_levels: [true, true], max_values: u64::MAX, values: 0, bytes: 0 }
    }

    fn dictionary(bytes: &[u8], num_values: u32) -> Page {
        Page::DictionaryPage {
            buf: bytes.to_vec().into(),
            num_values,
            encoding: Encoding::PLAIN,
            is_sorted: false,
        }
    }

    fn data(bytes: &[u8], num_values: u32, encoding: Encoding) -> Page {
        Page::DataPageV2 {
            buf: bytes.to_vec().into(),
            num_values,
            encoding,
            num_nulls: 0,
            num_rows: 1,
            def_levels_byte_len: 1,
            rep_levels_byte_len: 2,
            is_compressed: true,
            statistics: None,
        }
    }

    #[test]
    fn pages_decompress_to_a_limit() {
        let zeros = |bytes: usize| std::io::repeat(0).take(bytes as u64);
        let gzip = |bytes| {
            let mut packed = Vec::new();
            flate2::bufread::GzEncoder::new(
                std::io::BufReader::new(zeros(bytes)),
                flate2::Compression::best(),
            )
            .read_to_end(&mut packed)
            .unwrap();
            packed
        };
        let (gzip_codec, zstd_codec) =
            (Compression::GZIP(GzipLevel::default()), Compression::ZSTD(ZstdLevel::default()));
        assert_eq!(decompress(gzip_codec, &gzip(1 << 20)).unwrap().len(), 1 << 20);
        for (codec, packed) in [
            (gzip_codec, gzip(64 << 20)),
            (zstd_codec, zstd::encode_all(zeros(64 << 20), 3).unwrap()),
            // The size that a snappy block claims, and no data.
            (Compression::SNAPPY, vec![0xFF, 0xFF, 0xFF, 0xFF, 0x0F]),
        ] {
            let error = decompress(codec, &packed).unwrap_err().to_string();
            assert!(error.contains(" bytes decompresses to more than "), "{codec}: {error}");
        }
        let error = decompress(Compression::LZ4_RAW, &[0xFF; 99]).unwrap_err().to_string();
        assert!(error.contains("a page cannot be decompressed: "), "{error}");
        let error = decompress(Compression::LZ4, &[]).unwrap_err().to_string();
        assert!(error.ends_with("pages compressed with LZ4 are not supported"), "{error}");
    }

    #[test]
    fn levels_are_not_compressed() {
        let mut page = data(
            &[&[1, 2, 3][..], &zstd::encode_all(&b"values"[..], 3).unwrap()].concat(),
            1,
            Encoding::PLAIN,
        );
        limits(Compression::ZSTD(ZstdLevel::default())).decompress(&mut page).unwrap();
        assert_eq!(&page.buffer()[..], b"\x01\x02\x03values");
        let error = limits(Compression::SNAPPY).decompress(&mut data(b"ab", 1, Encoding::PLAIN)).unwrap_err();
        assert!(error.to_string().ends_with("3 bytes of levels in a page of 2"), "{error}");
    }

    #[test]
    fn claims_of_pages_are_not_believed() {
        let mut limits = limits(Compression::UNCOMPRESSED);
        let mut said = |page: Page| limits.check_values(&page).map_err(|error| error.to_string());
        assert_eq!(said(dictionary(b"12345678", 8)), Ok(()));
        assert!(
            said(dictionary(b"12345678", 9))
                .unwrap_err()
                .ends_with("a dictionary of 8 bytes claims 9 entries")
        );
        // Three bytes of levels; values of a block, parts of a block, values.
        let lengths = [0, 0, 0, 0x80, 0x01, 0x04, 0x7F];
        let delta = Encoding::DELTA_LENGTH_BYTE_ARRAY;
        assert_eq!(said(data(&lengths, 127, delta)), Ok(()));
        assert!(said(data(&lengths, 126, delta)).unwrap_err().ends_with("127 lengths for 126 strings"));
        assert!(said(data(&[0; 8], 1 << 25, Encoding::PLAIN)).unwrap_err().contains("22 bytes claims"));
        limits.max_values = 5;
        limits.values = 0;
        let error = limits.check_values(&data(b"12345678", 6, Encoding::PLAIN)).unwrap_err();
        assert!(error.to_string().ends_with("pages claim 6 values, the footer 5"), "{error}");
    }
}
