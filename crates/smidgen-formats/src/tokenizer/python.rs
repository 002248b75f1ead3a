//! Functions of Python that chat templates rely on: how values print, `json.dumps`, and `strftime`.
//! Templates are written for Python's Jinja, and models were trained on exactly its output.
//! Left out: the local time zone. Times are in UTC, so they print the same everywhere.

use std::fmt::Write;
use std::io;
use std::time::SystemTime;

use chrono::DateTime;
use chrono::format::{Item, Numeric, StrftimeItems};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter, Serializer};

use super::template_limits::charge;

/// Like `str(value)`: strings unchanged, everything else as in `repr`.
pub(super) fn print(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::String => Ok(value.to_string()),
        _ => repr(value),
    }
}

fn repr(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::None => Ok("None".into()),
        ValueKind::Bool => Ok(if value.is_true() { "True" } else { "False" }.into()),
        ValueKind::String => Ok(quoted(value.as_str().unwrap_or_default())),
        ValueKind::Seq => {
            let items: Vec<String> = value.try_iter()?.map(|item| repr(&item)).collect::<Result<_, _>>()?;
            Ok(format!("[{}]", items.join(", ")))
        }
        ValueKind::Map => {
            let pair = |key: Value| Ok(format!("{}: {}", repr(&key)?, repr(&value.get_item(&key)?)?));
            let pairs: Vec<String> = value.try_iter()?.map(pair).collect::<Result<_, Error>>()?;
            Ok(format!("{{{}}}", pairs.join(", ")))
        }
        _ => Ok(value.to_string()),
    }
}

/// In single quotes, or in double quotes if the text has only single ones.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for sign in text.chars() {
        match sign {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            sign if sign == quote => {
                out.push('\\');
                out.push(sign);
            }
            sign if (sign as u32) < 0x20 || sign as u32 == 0x7f => {
                write!(out, "\\x{:02x}", sign as u32).expect("a string can be written to");
            }
            sign => out.push(sign),
        }
    }
    out.push(quote);
    out
}

/// Like `json.dumps(value, ensure_ascii=False, indent=indent)`.
pub(super) fn json_dumps(value: &Value, indent: Option<usize>) -> Result<String, serde_json::Error> {
    let json = serde_json::to_value(value)?;
    let mut out = Charged(Vec::new());
    match indent {
        Some(indent) => {
            let spaces = vec![b' '; indent];
            json.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(&spaces)))?;
        }
        None => json.serialize(&mut Serializer::with_formatter(&mut out, Spaced(CompactFormatter)))?,
    }
    Ok(String::from_utf8(out.0).expect("JSON of strings is UTF-8"))
}

/// A buffer whose bytes are charged to the template's allowance.
struct Charged(Vec<u8>);

impl io::Write for Charged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        charge(bytes.len()).map_err(io::Error::other)?;
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Compact JSON with a space after every comma and colon.
struct Spaced(CompactFormatter);

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Like `datetime.strftime` with English names, in UTC; `None` if the format has an unknown code.
pub(super) fn strftime(moment: SystemTime, format: &str) -> Option<String> {
    let since = moment.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let moment = DateTime::from_timestamp(since.as_secs() as i64, 0)?;
    // Python's `%f` has six digits, chrono's nine.
    let is_known = |item: &Item<'_>| !matches!(item, Item::Error | Item::Numeric(Numeric::Nanosecond, _));
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    items.iter().all(is_known).then(|| moment.format_with_items(items.iter()).to_string())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use minijinja::value::Serde;
    use serde_json::json;

    use super::*;

    /// Expected texts are from Python: `datetime.fromtimestamp(s, timezone.utc).strftime(f)`.
    #[test]
    fn times_print_as_in_python() {
        let check = |seconds: u64, format: &str, expected: &str| {
            let moment = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(strftime(moment, format).as_deref(), Some(expected));
        };
        check(0, "%d %b %Y", "01 Jan 1970");
        check(1_721_952_000, "%d %b %Y", "26 Jul 2024");
        check(1_709_208_000, "%A, %B %d, %Y %H:%M:%S %j", "Thursday, February 29, 2024 12:00:00 060");
        check(1_735_689_599, "%a %y-%m-%d %I:%M %p %j %%", "Tue 24-12-31 11:59 PM 366 %");
        check(951_782_400, "%F %T", "2000-02-29 00:00:00");
        check(4_107_542_400, "%Y-%m-%d %a", "2100-03-01 Mon");
        assert_eq!(strftime(SystemTime::UNIX_EPOCH, "%Q"), None);
        assert_eq!(strftime(SystemTime::UNIX_EPOCH, "%S.%f"), None);
    }

    /// Expected texts are from Python's `str` and `json.dumps(.., ensure_ascii=False)`.
    #[test]
    fn values_print_as_in_python() {
        let value = Value::from(Serde(json!({"a": [1, 2.5, null, true], "b": "it's\n\"ü\"", "c": {}})));
        assert_eq!(print(&value).unwrap(), r#"{'a': [1, 2.5, None, True], 'b': 'it\'s\n"ü"', 'c': {}}"#);
        assert_eq!(print(&Value::from("it's")).unwrap(), "it's");
        assert_eq!(print(&Value::from(vec!["it's"])).unwrap(), r#"["it's"]"#);
        assert_eq!(
            json_dumps(&value, None).unwrap(),
            r#"{"a": [1, 2.5, null, true], "b": "it's\n\"ü\"", "c": {}}"#
        );
        let indented = Value::from(Serde(json!({"a": [1], "b": []})));
        assert_eq!(json_dumps(&indented, Some(2)).unwrap(), "{\n  \"a\": [\n    1\n  ],\n  \"b\": []\n}");
    }
}
