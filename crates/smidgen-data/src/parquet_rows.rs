//! Rows of Parquet tables as JSON: strings, numbers, booleans, lists, structs and maps, nested in any way.
//!
//! Dates and times are the numbers that are stored, decimals the nearest number; bytes are text where they
//! are UTF-8, else null.
//! Read by the record reader of the `parquet` crate, one page of each column at a time.
//! That crate meets some damage with a panic (a failed assertion, an index, an overflow), so it is called
//! behind `catch_unwind`: a damaged file is the world's failure, not ours.
//! Leaves out writing, filters and encrypted files.

use std::cell::Cell;
use std::fs::File;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::{Arc, Once};

use parquet::data_type::Decimal;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::TreeBuilder;
use parquet::record::{Field, Row};
use serde_json::Value as Json;

use super::parquet_pages::{CheckedRowGroup, check_footer};
use super::source::{RowPlace, RowUnit, SourceError};

/// Rows whose values are decoded at once; strings among them still lie in their page.
const ROWS_AT_ONCE: usize = 64;

pub(super) fn read_parquet<E>(
    path: &Path,
    on_row: &mut impl FnMut(RowPlace<'_>, Json) -> Result<(), E>,
) -> Result<(), E>
where
    E: From<SourceError>,
{
    let broken =
        |message: String| E::from(SourceError::BrokenParquet { path: path.display().to_string(), message });
    let open = || {
        File::open(path)
            .map_err(|source| E::from(SourceError::Read { path: path.display().to_string(), source }))
    };
    let (file, headers) = (open()?, Arc::new(open()?));
    check_footer(&headers).map_err(|error| broken(words(error)))?;
    let reader = guarded(|| SerializedFileReader::new(file)).map_err(broken)?;
    if reader.metadata().file_metadata().schema_descr().num_columns() == 0 {
        return Err(broken("it has no columns".to_owned()));
    }
    let mut number = 0;
    for index in 0..reader.num_row_groups() {
        let mut rows = guarded(|| {
            let inner = reader.get_row_group(index)?;
            let group = CheckedRowGroup { inner, file: Arc::clone(&headers) };
            let schema = group.inner.metadata().schema_descr_ptr();
            TreeBuilder::new().with_batch_size(ROWS_AT_ONCE).as_iter(schema, &group)
        })
        .map_err(broken)?;
        loop {
            number += 1;
            let place = RowPlace { file: path, unit: RowUnit::Row, number };
            match guarded(|| rows.next().map(|row| row.map(|row| json_of_row(&row))).transpose()) {
                Ok(Some(row)) => on_row(place, row)?,
                Ok(None) => break,
                Err(message) => {
                    let place = place.to_string();
                    return Err(E::from(SourceError::BrokenParquetRow { place, message }));
                }
            }
        }
        number -= 1;
    }
    Ok(())
}

fn json_of_row(row: &Row) -> Json {
    Json::Object(row.get_column_iter().map(|(name, field)| (name.clone(), json_of(field))).collect())
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

/// Longer complaints hold the data itself.
const MOST_WORDS: usize = 200;

fn words(error: ParquetError) -> String {
    let text = match error {
        ParquetError::General(text) | ParquetError::EOF(text) => text,
        other => other.to_string(),
    };
    match text.starts_with("Error reading BYTE_ARRAY as String") {
        true => "a string is not UTF-8".to_owned(),
        false => text.chars().take(MOST_WORDS).collect(),
    }
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// The result of a call into the crate, a panic there as an error.
///
/// What the call has changed is not used after a panic, which is what `AssertUnwindSafe` promises.
fn guarded<T>(call: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    // The hook belongs to the process: ours is silent for guarded calls of this thread and passes the rest on.
    HOOK.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                previous(info);
            }
        }));
    });
    QUIET.set(true);
    let result = panic::catch_unwind(AssertUnwindSafe(call));
    QUIET.set(false);
    match result {
        Ok(result) => result.map_err(words),
        Err(panic) => {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("damaged data");
            Err(said.lines().next().unwrap_or_default().chars().take(MOST_WORDS).collect())
        }
    }
}
