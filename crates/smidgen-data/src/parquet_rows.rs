//! Rows of Parquet tables as JSON: strings, numbers, booleans, lists, structs and maps, nested in any way.
//!
//! Dates and times become the numbers that are stored, decimals the nearest number, bytes a string if they are UTF-8,
//! else null; `bytes` next to a `path`, as the hub stores audio and images, become base64.
//! The `parquet` crate's record reader decodes them, one page of each column at a time, within the limits of
//! `parquet_limits.rs`. It panics on some damage (an assertion, an index, an overflow), so it is called inside
//! `catch_unwind`: a damaged file is an error of the file, not of this program. After a damaged page the rest of its
//! row group is lost, because columns no longer agree on the row; the next group is readable again.
//! Encrypted files are not supported.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use parquet::data_type::Decimal;
use parquet::errors::ParquetError;
use parquet::file::metadata::{FooterTail, ParquetMetaData, ParquetMetaDataReader};
use parquet::record::reader::TreeBuilder;
use parquet::record::{Field, Row};
use serde_json::Value as Json;
use smidgen_formats::audio::{BYTES_PREFIX, to_base64};

use crate::json_rows::RowResult;
use crate::parquet_limits::{LimitedRowGroup, check_lists, check_schema, most_rows};
use crate::row_place::{RowPlace, RowUnit};
use crate::source_error::SourceError;

/// Rows whose values are decoded at once; strings stay in their page until then.
const ROWS_AT_ONCE: usize = 64;
/// Lost rows of one file; by default writers make row groups of at most a million rows.
const MOST_LOST_ROWS: u64 = 1 << 24;

pub(super) fn read_parquet<E>(
    path: &Path,
    on_row: &mut impl FnMut(RowPlace<'_>, RowResult) -> Result<(), E>,
) -> Result<(), E>
where
    E: From<SourceError>,
{
    let broken =
        |message: String| E::from(SourceError::BrokenParquet { path: path.display().to_string(), message });
    let file = File::open(path)
        .map_err(|source| E::from(SourceError::Read { path: path.display().to_string(), source }))?;
    let file = Arc::new(file);
    let metadata = caught(|| read_metadata(&file)).map_err(broken)?;
    if metadata.file_metadata().schema_descr().num_columns() == 0 {
        return Err(broken("it has no columns".to_owned()));
    }
    let file_bytes = file.metadata().map_or(u64::MAX, |found| found.len());
    let claimed =
        metadata.row_groups().iter().map(|group| u64::try_from(group.num_rows()).unwrap_or_default());
    let rows = claimed.fold(0u64, u64::saturating_add);
    if rows > most_rows(file_bytes) {
        let (path, most) = (path.display().to_string(), most_rows(file_bytes));
        return Err(SourceError::TooManyRows { path, rows, file_bytes, most }.into());
    }
    let (mut before, mut lost_rows) = (0, 0);
    for metadata in metadata.row_groups() {
        let rows_of_group = u64::try_from(metadata.num_rows()).unwrap_or_default();
        let at = |row: u64| RowPlace { file: path, unit: RowUnit::Row, number: before + row + 1 };
        let group = LimitedRowGroup { file: &file, metadata };
        let mut read = 0;
        let tree = TreeBuilder::new().with_batch_size(ROWS_AT_ONCE);
        let damage = match caught(|| tree.as_iter(metadata.schema_descr_ptr(), &group)) {
            Err(message) => Some(message),
            Ok(mut rows) => loop {
                match caught(|| rows.next().map(|row| row.map(|row| json_of_row(&row))).transpose()) {
                    Ok(Some(row)) => on_row(at(read), Ok(row))?,
                    Ok(None) => break None,
                    Err(message) => break Some(message),
                }
                read += 1;
            },
        };
        if let Some(message) = damage {
            // A damaged footer may promise any number of rows.
            let lost = rows_of_group.saturating_sub(read).max(1);
            lost_rows += lost.min(MOST_LOST_ROWS + 1);
            if lost_rows > MOST_LOST_ROWS {
                let place = at(read).to_string();
                return Err(E::from(SourceError::BrokenParquetRow { place, message }));
            }
            for row in read..read + lost {
                let (place, message) = (at(row).to_string(), message.clone());
                on_row(at(row), Err(SourceError::BrokenParquetRow { place, message }))?;
            }
            read += lost;
        }
        before += read;
    }
    Ok(())
}

/// The footer comes before its own size and the format's name, which take 8 bytes.
fn read_metadata(file: &File) -> Result<ParquetMetaData, ParquetError> {
    let too_short = || ParquetError::EOF("the file is too short".to_owned());
    let file_bytes = file.metadata()?.len();
    let tail_at = file_bytes.checked_sub(8).ok_or_else(too_short)?;
    let mut tail = [0; 8];
    file.read_exact_at(&mut tail, tail_at)?;
    let footer_bytes = FooterTail::try_new(&tail)?.metadata_length();
    let footer_at = tail_at.checked_sub(footer_bytes as u64).ok_or_else(too_short)?;
    let mut footer = vec![0; footer_bytes];
    file.read_exact_at(&mut footer, footer_at)?;
    check_schema(&footer)?;
    let metadata = ParquetMetaDataReader::decode_metadata(&footer)?;
    check_lists(metadata.row_groups(), file_bytes)?;
    Ok(metadata)
}

fn json_of_row(row: &Row) -> Json {
    // Audio or an image, as the hub stores it. Its bytes are never text, even if they happen to be UTF-8.
    let is_file = row.get_column_iter().any(|(name, _)| name == "path");
    let value = |name: &str, field: &Field| match field {
        Field::Bytes(bytes) if is_file && name == "bytes" => {
            Json::from(format!("{BYTES_PREFIX}{}", to_base64(bytes.data())))
        }
        field => json_of(field),
    };
    Json::Object(row.get_column_iter().map(|(name, field)| (name.clone(), value(name, field))).collect())
}

fn json_of(field: &Field) -> Json {
    match field {
        Field::Null => Json::Null,
        Field::Bool(value) => Json::from(*value),
        Field::Byte(value) => Json::from(*value),
        Field::Short(value) => Json::from(*value),
        Field::Int(value) | Field::Date(value) | Field::TimeMillis(value) => Json::from(*value),
        Field::Long(value)
        | Field::TimeMicros(value)
        | Field::TimestampMillis(value)
        | Field::TimestampMicros(value) => Json::from(*value),
        Field::UByte(value) => Json::from(*value),
        Field::UShort(value) => Json::from(*value),
        Field::UInt(value) => Json::from(*value),
        Field::ULong(value) => Json::from(*value),
        Field::Float16(value) => Json::from(f64::from(*value)),
        Field::Float(value) => Json::from(*value),
        Field::Double(value) => Json::from(*value),
        Field::Decimal(value) => json_of_decimal(value),
        Field::Str(text) => Json::from(text.as_str()),
        Field::Bytes(bytes) => std::str::from_utf8(bytes.data()).map_or(Json::Null, Json::from),
        Field::Group(row) => json_of_row(row),
        Field::ListInternal(list) => list.elements().iter().map(json_of).collect(),
        Field::MapInternal(map) => {
            let key_of = |key| match json_of(key) {
                Json::String(key) => key,
                other => other.to_string(),
            };
            Json::Object(map.entries().iter().map(|(key, value)| (key_of(key), json_of(value))).collect())
        }
    }
}

fn json_of_decimal(value: &Decimal) -> Json {
    let bytes = value.data();
    let sign = bytes.first().map_or(0, |&byte| byte as i8);
    let digits = bytes.iter().skip(1).fold(f64::from(sign), |high, &byte| high * 256.0 + f64::from(byte));
    Json::from(digits / 10_f64.powi(value.scale()))
}

/// Longer messages hold the data itself.
const MAX_MESSAGE_CHARS: usize = 200;

/// The result of a call into the crate, with a panic as an error.
///
/// What the call has changed is not used after a panic, which is what `AssertUnwindSafe` promises.
fn caught<T>(call: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    let message = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(ParquetError::General(text) | ParquetError::EOF(text))) => text,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "it is damaged".to_owned(),
    };
    Err(if message.starts_with("Error reading BYTE_ARRAY as String") {
        "a string is not UTF-8".to_owned()
    } else {
        message.chars().take(MAX_MESSAGE_CHARS).collect()
    })
}
