//! Hints for a refused key, value or line.
//!
//! A hint is given only if it is likely right: names of other trainers first, then the same name in another section,
//! then the nearest spelling.
//! Left out: the decision that something is wrong (`parse.rs`).

use crate::foreign::{foreign_key_hint, foreign_names, foreign_word_hint};
use crate::keys::{KEYS, Key, SECTIONS, find_key};
use crate::sections::Recipe;
use crate::value::{Given, LARGEST_COUNT, Value};
use smidgen_ir::words::nearest;

/// Message and hint for an error of the TOML parser at the text `written`.
pub(crate) fn explain_syntax_error(message: &str, written: &str) -> (String, Option<String>) {
    let is_word = written.starts_with(|c: char| c.is_alphabetic());
    let starts_with_one_of = |starts: &[&str]| starts.iter().any(|start| message.starts_with(start));
    if message == "duplicate key" {
        (format!("`{written}` is set twice"), None)
    } else if ["True", "TRUE", "False", "FALSE"].contains(&written) {
        let hint = format!("write {}", written.to_lowercase());
        (format!("`{written}` is not a value"), Some(hint))
    } else if starts_with_one_of(&["string values must be quoted"]) && written.is_empty() {
        ("a value is missing after the `=`".to_owned(), None)
    } else if starts_with_one_of(&["string values must be quoted"])
        // The parser reports a word that begins like `true`, `inf` or `nan` as a misspelt one of these.
        || (is_word && starts_with_one_of(&["invalid boolean", "invalid float"]))
    {
        ("a string needs quotes".to_owned(), Some(format!("write {written:?}")))
    } else if starts_with_one_of(&[
        "invalid basic string, expected `\"`",
        "invalid literal string, expected `'`",
    ]) {
        ("the string has no closing quote".to_owned(), None)
    } else if starts_with_one_of(&["invalid mantissa", "invalid fraction", "invalid exponent"]) {
        let hint = "a decimal point needs digits on both sides, an exponent needs digits after it".to_owned();
        ("not a number".to_owned(), Some(hint))
    } else if starts_with_one_of(&["invalid unquoted key", "key with no value"]) {
        let hint = "a recipe is TOML: lines of `key = value` below a `[section]`".to_owned();
        (message.to_owned(), Some(hint))
    } else {
        (message.to_owned(), None)
    }
}

/// The hint for an unknown key.
pub(crate) fn suggest_key(section: &str, name: &str) -> Option<String> {
    if let Some(hint) = foreign_key_hint(section, name) {
        return Some(hint.to_owned());
    }
    let plain = name.to_lowercase().replace('-', "_");
    let names_of = |wanted: &str| {
        let wanted = wanted.to_owned();
        KEYS.iter().filter(move |key| key.section == wanted).map(|key| key.name)
    };
    let near_section = nearest(section, SECTIONS).unwrap_or(section);
    let found = find_key(near_section, &plain)
        .or_else(|| KEYS.iter().find(|key| key.name == plain))
        .or_else(|| find_key(near_section, nearest(&plain, names_of(near_section))?))
        .or_else(|| {
            let near = nearest(&plain, KEYS.iter().map(|key| key.name))?;
            KEYS.iter().find(|key| key.name == near)
        });
    match found {
        Some(key) => Some(format!("did you mean `{}`?", key.path())),
        None => {
            let near_abroad = nearest(&plain, foreign_names()).and_then(|near| foreign_key_hint("", near));
            match (near_abroad, SECTIONS.contains(&section)) {
                (Some(hint), _) => Some(hint.to_owned()),
                (None, true) => {
                    Some(format!("`[{section}]` has {}", listed(&names_of(section).collect::<Vec<_>>())))
                }
                (None, false) => None,
            }
        }
    }
}

/// The hint for an override without `=`.
pub(crate) fn suggest_override_key(text: &str) -> Option<String> {
    let (section, name) = text.split_once('.')?;
    find_key(section, name).map(|key| format!("it must be {}", key.accepts.describe()))
}

/// The hint for a refused value.
pub(crate) fn suggest_value(key: &Key, given: &Given<'_>) -> Option<String> {
    let would_take = |value: &Value| (key.set)(&mut Recipe::with_defaults(), &given.with(value)).is_some();
    let word = match given.value {
        Value::Text(word) | Value::Bare(word) => word.clone(),
        Value::List(items) => match items.as_slice() {
            [Value::Text(word)] => word.clone(),
            _ => return None,
        },
        other => other.to_string(),
    };
    if let Some(hint) = foreign_word_hint(&key.path(), &word) {
        return Some(hint.to_owned());
    }
    match given.value {
        Value::Integer(number) if *number > LARGEST_COUNT && would_take(&Value::Integer(LARGEST_COUNT)) => {
            return Some(format!("the largest accepted number is {LARGEST_COUNT}"));
        }
        Value::Float(number) if number.fract() == 0.0 && would_take(&Value::Integer(*number as i128)) => {
            return Some(format!("write it without a decimal point: {}", *number as i128));
        }
        Value::Text(word) if would_take(&Value::Bare(word.clone())) => {
            return Some(format!("write it without quotes: {word}"));
        }
        _ => {}
    }
    if word.contains("://") && key.path() == "model.path" {
        return Some("for a model of Hugging Face write `hf:org/name`".to_owned());
    }
    let near = nearest(&word.to_lowercase().replace('_', "-"), key.accepts.words.iter().copied())?;
    // A hint that repeats the input would not help.
    (near != word).then(|| format!("did you mean `{near}`?"))
}

/// A value for a message, shortened if it is long.
pub(crate) fn abbreviate(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

pub(crate) fn listed(names: &[&str]) -> String {
    format!("`{}`", names.join("`, `"))
}
