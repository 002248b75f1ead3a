//! Functions of Python that chat templates rely on: how values print, `json.dumps`, and `strftime`.
//! Templates are written for Python's Jinja, and models were trained on exactly its output.
//! Left out: the local time zone. Times are in UTC, so they print the same everywhere.

use std::fmt::Write;
use std::sync::LazyLock;
use std::time::SystemTime;

use chrono::DateTime;
use chrono::format::{Item, Numeric, StrftimeItems};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};
use regex::Regex;
use serde_json::Value as Json;

use super::python_types::{is_method, is_type};
use super::template_allowance::{charge, refused};

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
        ValueKind::Number => Ok(number(value)),
        ValueKind::String => Ok(quoted(value.as_str().unwrap_or_default())),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<String> = value.try_iter()?.map(|item| repr(&item)).collect::<Result<_, _>>()?;
            let all = items.join(", ");
            Ok(match (is_type(value, "::Tuple"), items.len()) {
                (true, 1) => format!("({all},)"),
                (true, _) => format!("({all})"),
                (false, _) => format!("[{all}]"),
            })
        }
        ValueKind::Map => {
            let pair = |key: Value| Ok(format!("{}: {}", repr(&key)?, repr(&value.get_item(&key)?)?));
            let pairs: Vec<String> = value.try_iter()?.map(pair).collect::<Result<_, Error>>()?;
            Ok(format!("{{{}}}", pairs.join(", ")))
        }
        _ if is_method(value) => Err(refused("it prints a method of a dict that it does not call")),
        _ => Ok(value.to_string()),
    }
}

/// Like `repr` of a Python number: floats have an exponent below 1e-4 and from 1e16 on.
fn number(value: &Value) -> String {
    let float = match (value.is_integer(), f64::try_from(value.clone())) {
        (false, Ok(float)) if float.is_finite() => float,
        _ => return value.to_string(),
    };
    let exact = format!("{float:e}");
    let (digits, exponent) = exact.split_once('e').unwrap_or((&exact, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if float == 0.0 || (-4..16).contains(&exponent) {
        value.to_string()
    } else {
        format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
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
            sign if is_printable(sign) => out.push(sign),
            sign => {
                let code = sign as u32;
                match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                }
                .expect("a string can be written to");
            }
        }
    }
    out.push(quote);
    out
}

/// Like `str.isprintable`: neither a control or format character nor unassigned, and no space but the usual one.
fn is_printable(sign: char) -> bool {
    static OTHERS: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"^[\p{C}\p{Z}]$").expect("the expression is valid"));
    match sign {
        ' '..='~' => true,
        '\0'..='\u{7f}' => false,
        sign => !OTHERS.is_match(sign.encode_utf8(&mut [0; 4])),
    }
}

/// The options of `json.dumps`.
#[derive(Debug, Default)]
pub(super) struct JsonOptions {
    pub ensure_ascii: bool,
    /// What a level is indented by; without it everything is on one line.
    pub indent: Option<String>,
    /// Between values, and after a key.
    pub separators: Option<(String, String)>,
    pub sort_keys: bool,
}

/// Like `json.dumps`. What is written is charged to the template's allowance.
pub(super) fn json_dumps(value: &Value, options: &JsonOptions) -> Result<String, Error> {
    let separators = match (&options.separators, &options.indent) {
        (Some((item, key)), _) => (item.as_str(), key.as_str()),
        (None, Some(_)) => (",", ": "),
        (None, None) => (", ", ": "),
    };
    let mut writer = JsonWriter { out: String::new(), options, separators };
    writer.write(value, 0)?;
    Ok(writer.out)
}

struct JsonWriter<'a> {
    out: String,
    options: &'a JsonOptions,
    separators: (&'a str, &'a str),
}

impl JsonWriter<'_> {
    fn push(&mut self, text: &str) -> Result<(), Error> {
        charge(text.len())?;
        self.out.push_str(text);
        Ok(())
    }

    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.push("null"),
            ValueKind::Bool => self.push(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.push(&number(value)),
            ValueKind::String => self.write_text(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_all('[', ']', depth, items.iter(), |writer, item| writer.write(item, depth + 1))
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.options.sort_keys {
                    keys.sort();
                }
                self.write_all('{', '}', depth, keys.iter(), |writer, key| {
                    match key.kind() {
                        ValueKind::String => writer.write(key, depth)?,
                        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                            writer.push("\"")?;
                            writer.write(key, depth)?;
                            writer.push("\"")?;
                        }
                        _ => return Err(refused("a key of a map in `tojson` is a list or a map")),
                    }
                    let separator = writer.separators.1;
                    writer.push(separator)?;
                    writer.write(&value.get_item(key)?, depth + 1)
                })
            }
            ValueKind::Undefined => Err(refused("`tojson` of a value that is not defined")),
            _ => Err(refused("`tojson` of a value that is not data")),
        }
    }

    fn write_all<'v>(
        &mut self,
        begin: char,
        end: char,
        depth: usize,
        items: impl ExactSizeIterator<Item = &'v Value>,
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let is_empty = items.len() == 0;
        self.push(begin.encode_utf8(&mut [0; 4]))?;
        for (index, item) in items.enumerate() {
            if index > 0 {
                let separator = self.separators.0;
                self.push(separator)?;
            }
            self.write_line(depth + 1)?;
            write(self, item)?;
        }
        if !is_empty {
            self.write_line(depth)?;
        }
        self.push(end.encode_utf8(&mut [0; 4]))
    }

    /// A new line, if there is an indentation.
    fn write_line(&mut self, depth: usize) -> Result<(), Error> {
        match &self.options.indent {
            Some(indent) => {
                charge(indent.len().saturating_mul(depth))?;
                self.push(&format!("\n{}", indent.repeat(depth)))
            }
            None => Ok(()),
        }
    }

    fn write_text(&mut self, text: &str) -> Result<(), Error> {
        let quoted = Json::from(text).to_string();
        let is_plain = |sign: char| sign < '\x7f';
        if !self.options.ensure_ascii || quoted.chars().all(is_plain) {
            self.push(&quoted)
        } else {
            let mut out = String::with_capacity(quoted.len());
            for sign in quoted.chars() {
                if is_plain(sign) {
                    out.push(sign)
                } else {
                    for unit in sign.encode_utf16(&mut [0; 2]) {
                        write!(out, "\\u{unit:04x}").expect("a string can be written to");
                    }
                }
            }
            self.push(&out)
        }
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
            json_dumps(&value, &JsonOptions::default()).unwrap(),
            r#"{"a": [1, 2.5, null, true], "b": "it's\n\"ü\"", "c": {}}"#
        );
        let indented = Value::from(Serde(json!({"a": [1], "b": []})));
        let by_two = JsonOptions { indent: Some("  ".to_owned()), ..JsonOptions::default() };
        assert_eq!(json_dumps(&indented, &by_two).unwrap(), "{\n  \"a\": [\n    1\n  ],\n  \"b\": []\n}");
    }
}
