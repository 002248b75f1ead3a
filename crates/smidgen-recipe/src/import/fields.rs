//! The settings of one group, taken one by one; what nobody took is known at the end.
//!
//! A value is read by the type that is asked for. One of another type is a mistake of the file, noted in the draft
//! with its key and line; reading goes on, so that all mistakes are reported at once.
//! A value that is null, or `auto` where a tool fills it in itself, is as good as not written.

use super::document::{Content, Entry, Node};
use super::draft::Draft;
use std::cell::RefCell;
use std::collections::HashSet;

/// A group of settings and what was taken of it.
#[derive(Debug)]
pub struct Fields<'a> {
    /// `zero_optimization.` or nothing.
    prefix: String,
    entries: &'a [Entry],
    taken: RefCell<HashSet<&'a str>>,
}

/// A setting that is there.
#[derive(Clone, Debug)]
pub struct Found<'a> {
    /// With the groups around it, joined by points.
    pub key: String,
    pub line: usize,
    pub content: &'a Content,
}

impl<'a> Fields<'a> {
    pub fn of(entries: &'a [Entry]) -> Fields<'a> {
        Fields { prefix: String::new(), entries, taken: RefCell::default() }
    }

    /// Whether the key is written at all.
    pub fn has(&self, name: &str) -> bool {
        self.entries.iter().any(|entry| entry.name == name)
    }

    /// What is written at a key, without taking it.
    pub fn get(&self, name: &str) -> Option<&'a Content> {
        self.entries.iter().find(|entry| entry.name == name).map(|entry| &entry.value.content)
    }

    /// The setting, if it is there and says something. It counts as taken either way.
    pub fn take(&self, name: &str) -> Option<Found<'a>> {
        let entry = self.entries.iter().find(|entry| entry.name == name)?;
        self.taken.borrow_mut().insert(&entry.name);
        let found = self.found(entry);
        (*found.content != Content::Null).then_some(found)
    }

    /// The first of several names for the same thing that says something; all of them count as taken.
    pub fn take_any(&self, names: &[&str]) -> Option<Found<'a>> {
        let found: Vec<Found<'a>> = names.iter().filter_map(|name| self.take(name)).collect();
        found.into_iter().next()
    }

    /// The settings inside a setting; one that is no group is a mistake.
    pub fn take_group(&self, name: &str, draft: &mut Draft) -> Option<Fields<'a>> {
        self.take(name)?.group(draft)
    }

    /// What nobody took and says something, in the order written.
    pub fn rest(&self) -> Vec<Found<'a>> {
        let taken = self.taken.borrow();
        let rest = self.entries.iter().filter(|entry| !taken.contains(entry.name.as_str()));
        rest.map(|entry| self.found(entry)).filter(|found| *found.content != Content::Null).collect()
    }

    fn found(&self, entry: &'a Entry) -> Found<'a> {
        Found {
            key: format!("{}{}", self.prefix, entry.name),
            line: entry.line,
            content: &entry.value.content,
        }
    }
}

impl<'a> Found<'a> {
    /// `auto`: somebody else says it.
    pub fn is_auto(&self) -> bool {
        matches!(self.content, Content::Text(text) if text == "auto")
    }

    /// Whether the setting says something: neither null nor false, and not empty.
    pub fn is_on(&self) -> bool {
        match self.content {
            Content::Null | Content::Boolean(false) => false,
            Content::Text(text) => !text.is_empty(),
            Content::List(items) => !items.is_empty(),
            Content::Map(entries) => !entries.is_empty(),
            Content::Boolean(true) | Content::Number(_) => true,
        }
    }

    /// The last of the names in `key`.
    pub fn name(&self) -> &str {
        self.key.rsplit('.').next().unwrap_or(&self.key)
    }

    pub fn text(&self, draft: &mut Draft) -> Option<String> {
        match self.content {
            Content::Text(text) => Some(text.clone()),
            Content::Number(digits) => Some(digits.clone()),
            _ => self.wrong("a word", draft),
        }
    }

    pub fn number(&self, draft: &mut Draft) -> Option<f64> {
        let number = match self.content {
            Content::Number(digits) | Content::Text(digits) => digits.trim().parse::<f64>().ok(),
            _ => None,
        };
        match number.filter(|number| number.is_finite()) {
            Some(number) => Some(number),
            None => self.wrong("a number", draft),
        }
    }

    /// A whole number of at least 1.
    pub fn count(&self, draft: &mut Draft) -> Option<u64> {
        let whole = self.number(draft)?;
        match whole.fract() == 0.0 && (1.0..=f64::from(i32::MAX)).contains(&whole) {
            true => Some(whole as u64),
            false => self.wrong("a whole number of at least 1", draft),
        }
    }

    pub fn boolean(&self, draft: &mut Draft) -> Option<bool> {
        match self.content {
            Content::Boolean(yes) => Some(*yes),
            Content::Text(text) if text == "auto" => None,
            Content::Text(text) if text.eq_ignore_ascii_case("true") => Some(true),
            Content::Text(text) if text.eq_ignore_ascii_case("false") => Some(false),
            _ => self.wrong("true or false", draft),
        }
    }

    /// A list of words, or one word; words may be separated by commas.
    pub fn words(&self, draft: &mut Draft) -> Option<Vec<String>> {
        let split = |text: &str| -> Vec<String> {
            text.split(',').map(|word| word.trim().to_owned()).filter(|word| !word.is_empty()).collect()
        };
        match self.content {
            Content::Text(text) => Some(split(text)),
            Content::List(items) => {
                let word = |item: &Node| match &item.content {
                    Content::Text(text) => Some(text.clone()),
                    _ => None,
                };
                match items.iter().map(word).collect() {
                    Some(words) => Some(words),
                    None => self.wrong("a list of words", draft),
                }
            }
            _ => self.wrong("a list of words", draft),
        }
    }

    pub fn items(&self, draft: &mut Draft) -> Option<&'a [Node]> {
        match self.content {
            Content::List(items) => Some(items),
            _ => self.wrong("a list", draft),
        }
    }

    pub fn group(&self, draft: &mut Draft) -> Option<Fields<'a>> {
        match self.content {
            Content::Map(entries) => {
                Some(Fields { prefix: format!("{}.", self.key), entries, taken: RefCell::default() })
            }
            _ => self.wrong("a group of settings", draft),
        }
    }

    fn wrong<T>(&self, wanted: &str, draft: &mut Draft) -> Option<T> {
        draft.mistake(self.line, format!("`{}` must be {wanted}, got {}", self.key, self.content.describe()));
        None
    }
}
