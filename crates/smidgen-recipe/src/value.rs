//! A value before its key gives it a type: in the file it has a type from TOML, in an override it is bare text.
//!
//! The accessors of [`Given`] read bare text as the type that the key asks for: the same `8` is a number for
//! `train.steps` and a name for `output.dir`.
//! An integer is accepted where a float is expected, never the reverse.
//! Dotted keys inside a pattern table are joined again (`layers.0.q_proj = 8` is one pattern), in the order written.
//! Ranges and meanings are in `read.rs` and `keys.rs`.

use std::fmt;
use std::path::Path;

use toml::de::{DeTable, DeValue};

/// The largest count that any key accepts: large enough for every run, small enough that products fit 64 bits.
pub(crate) const LARGEST_COUNT: i128 = i32::MAX as i128;

/// An untyped value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Text(String),
    Integer(i128),
    Float(f64),
    Boolean(bool),
    List(Vec<Value>),
    /// In the order written.
    Table(Vec<(String, Value)>),
    /// A date, or an integer that is too large; no key accepts one.
    Unsupported(String),
    /// From an override; the key decides how it is read.
    Bare(String),
}

/// A value, and the folders that its relative paths start from.
pub(crate) struct Given<'a> {
    pub value: &'a Value,
    pub folder: &'a Path,
    /// `output.dir` is relative to this, in the file and in overrides.
    pub working_directory: &'a Path,
}

impl<'a> Given<'a> {
    /// A part of the value, with the same folders.
    pub fn with<'b>(&'b self, value: &'b Value) -> Given<'b> {
        Given { value, ..*self }
    }

    pub fn text(&self) -> Option<String> {
        match self.value {
            Value::Text(text) => Some(text.clone()),
            Value::Bare(text) => Some(unquote(text)),
            _ => None,
        }
    }

    pub fn integer(&self) -> Option<i128> {
        match self.value {
            Value::Integer(number) => Some(*number),
            Value::Bare(text) => text.replace('_', "").parse().ok(),
            _ => None,
        }
    }

    /// A finite number.
    pub fn number(&self) -> Option<f64> {
        let number = match self.value {
            Value::Integer(number) => *number as f64,
            Value::Float(number) => *number,
            Value::Bare(text) => text.replace('_', "").parse().ok()?,
            _ => return None,
        };
        // Adding zero turns -0.0 into 0.0, so that it is never rendered with a sign.
        number.is_finite().then_some(number + 0.0)
    }

    pub fn boolean(&self) -> Option<bool> {
        match self.value {
            Value::Boolean(yes) => Some(*yes),
            Value::Bare(text) => text.parse().ok(),
            _ => None,
        }
    }

    pub fn list(&self) -> Option<Vec<Value>> {
        match self.value {
            Value::List(items) => Some(items.clone()),
            Value::Bare(text) => {
                let inside = text.strip_prefix('[')?.strip_suffix(']')?;
                let items = split_outside_quotes(inside);
                Some(items.into_iter().map(|item| Value::Bare(item.to_owned())).collect())
            }
            _ => None,
        }
    }

    /// A table of patterns and numbers. Entries are split at the last `=`, because a pattern may contain one.
    pub fn table(&self) -> Option<Vec<(String, Value)>> {
        self.entries(|entry| entry.rsplit_once('='))
    }

    /// A table of plain names and any values.
    pub fn fields(&self) -> Option<Vec<(String, Value)>> {
        self.entries(|entry| entry.split_once('='))
    }

    fn entries(&self, split: fn(&str) -> Option<(&str, &str)>) -> Option<Vec<(String, Value)>> {
        match self.value {
            Value::Table(entries) => Some(entries.clone()),
            Value::Bare(text) => {
                let inside = text.strip_prefix('{')?.strip_suffix('}')?;
                let entries = split_outside_quotes(inside).into_iter().map(|entry| {
                    let (name, value) = split(entry)?;
                    Some((unquote(name.trim()), Value::Bare(value.trim().to_owned())))
                });
                entries.collect()
            }
            _ => None,
        }
    }
}

/// The value of a key as parsed by TOML. Sections are handled by the caller.
pub(crate) fn value_of_toml(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(number) => match i128::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Value::Integer(number),
            Err(_) => Value::Unsupported(number.to_string()),
        },
        DeValue::Float(number) => match number.as_str().parse() {
            Ok(number) => Value::Float(number),
            Err(_) => Value::Unsupported(number.to_string()),
        },
        DeValue::Boolean(yes) => Value::Boolean(*yes),
        DeValue::Datetime(date) => Value::Unsupported(date.to_string()),
        DeValue::Array(items) => {
            Value::List(items.iter().map(|item| value_of_toml(item.get_ref())).collect())
        }
        DeValue::Table(table) => {
            let mut entries = Vec::new();
            flatten(table, "", &mut entries);
            entries.sort_by_key(|(start, _, _)| *start);
            Value::Table(entries.into_iter().map(|(_, name, value)| (name, value)).collect())
        }
    }
}

/// Collects the leaves of a table with their offset in the file, names joined by dots.
fn flatten(table: &DeTable<'_>, prefix: &str, entries: &mut Vec<(usize, String, Value)>) {
    for (name, value) in table.iter() {
        let name = format!("{prefix}{}", name.get_ref());
        match value.get_ref() {
            DeValue::Table(inner) if !inner.is_empty() => flatten(inner, &format!("{name}."), entries),
            leaf => entries.push((value.span().start, name, value_of_toml(leaf))),
        }
    }
}

/// The text inside a pair of quotes if it is a TOML string, else the text unchanged.
fn unquote(text: &str) -> String {
    if !text.starts_with(['"', '\'']) {
        return text.to_owned();
    }
    match DeValue::parse(text) {
        Ok(value) => match value.get_ref() {
            DeValue::String(inside) => inside.to_string(),
            _ => text.to_owned(),
        },
        Err(_) => text.to_owned(),
    }
}

/// The trimmed parts between commas that are outside quotes, brackets and braces.
/// An empty text has no part; a comma at the end adds none.
fn split_outside_quotes(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut start = 0;
    let mut depth = 0usize;
    let mut quote = None;
    for (offset, c) in text.char_indices() {
        match (quote, c) {
            (Some(open), c) if open == c => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[' | '{' | '(') => depth += 1,
            (None, ']' | '}' | ')') => depth = depth.saturating_sub(1),
            (None, ',') if depth == 0 => {
                parts.push(text[start..offset].trim());
                start = offset + 1;
            }
            (None, _) => {}
        }
    }
    let last = text[start..].trim();
    if !last.is_empty() {
        parts.push(last);
    }
    parts
}

/// A count inside a word such as `last:8`. Only digits are accepted: `+5` and ` 5` are typing errors.
pub(crate) fn parse_count_from_zero(text: &str) -> Option<usize> {
    let number: i128 = text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    (number <= LARGEST_COUNT).then_some(number as usize)
}

/// Messages show the value like this.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Text(text) => write!(f, "{text:?}"),
            Value::Integer(number) => write!(f, "{number}"),
            Value::Float(number) => write!(f, "{number:?}"),
            Value::Boolean(yes) => write!(f, "{yes}"),
            Value::List(items) => {
                let items: Vec<String> = items.iter().map(Value::to_string).collect();
                write!(f, "[{}]", items.join(", "))
            }
            Value::Table(entries) => {
                let entries: Vec<String> =
                    entries.iter().map(|(name, value)| format!("{name} = {value}")).collect();
                write!(f, "{{{}}}", entries.join(", "))
            }
            Value::Unsupported(text) => f.write_str(text),
            Value::Bare(text) if text.is_empty() => f.write_str("nothing"),
            Value::Bare(text) => write!(f, "`{text}`"),
        }
    }
}
