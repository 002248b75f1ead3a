//! The settings of one group, taken one by one, so that the settings nobody took are known at the end.
//!
//! A value is read as the type that the caller asks for. A value of another type is a mistake in the file, noted with
//! its key and line.
//! A null counts as not set, and so does `auto` where the tool fills in the value itself.

use super::document::{Content, Entry, Node};
use super::mistakes::Mistakes;
use std::cell::RefCell;
use std::collections::HashSet;

/// A group of settings, and which of them were taken.
#[derive(Debug)]
pub struct Fields<'a> {
    /// The path of the group, such as `zero_optimization.`, or empty at the top of the file.
    prefix: String,
    entries: &'a [Entry],
    taken: RefCell<HashSet<&'a str>>,
    mistakes: &'a Mistakes,
}

/// A setting of the file.
#[derive(Clone, Debug)]
pub struct Found<'a> {
    /// The name with the groups around it, joined by dots.
    pub key: String,
    pub line: usize,
    pub content: &'a Content,
    mistakes: &'a Mistakes,
}

impl<'a> Fields<'a> {
    pub fn of(entries: &'a [Entry], mistakes: &'a Mistakes) -> Fields<'a> {
        Fields { prefix: String::new(), entries, taken: RefCell::default(), mistakes }
    }

    /// Whether the file has this key, even without a value.
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// The value of a key, without taking it.
    pub fn get(&self, name: &str) -> Option<&'a Content> {
        self.entries.iter().find(|entry| entry.name == name).map(|entry| &entry.value.content)
    }

    /// The setting, if it has a value. It counts as taken either way.
    pub fn take(&self, name: &str) -> Option<Found<'a>> {
        let entry = self.entries.iter().find(|entry| entry.name == name)?;
        self.taken.borrow_mut().insert(&entry.name);
        let found = self.found(entry);
        (*found.content != Content::Null).then_some(found)
    }

    /// Takes settings that need neither a line nor a note.
    pub fn skip(&self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.take(name)));
    }

    /// The first of several names for the same setting that has a value; all of them count as taken.
    pub fn take_any(&self, names: &[&str]) -> Option<Found<'a>> {
        let found: Vec<Found<'a>> = names.iter().filter_map(|name| self.take(name)).collect();
        found.into_iter().next()
    }

    /// The first of several names that has a value; the others stay, so that they are noted.
    pub fn take_first(&self, names: &[&str]) -> Option<Found<'a>> {
        names.iter().find_map(|name| self.take(name))
    }

    /// A switch that is on; it counts as taken either way.
    pub fn take_on(&self, name: &str) -> Option<Found<'a>> {
        self.take(name).filter(|found| found.boolean() == Some(true))
    }

    /// The first of several names for the same switch, if it is on.
    pub fn take_any_on(&self, names: &[&str]) -> Option<Found<'a>> {
        self.take_any(names).filter(|found| found.boolean() == Some(true))
    }

    /// Whether the file has one of these keys, even without a value.
    pub fn has_any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.has(name))
    }

    /// A setting together with its text.
    pub fn take_text(&self, name: &str) -> Option<(String, Found<'a>)> {
        let found = self.take(name)?;
        Some((found.text()?, found))
    }

    /// The settings inside a setting; a mistake if it is not a group.
    pub fn take_group(&self, name: &str) -> Option<Fields<'a>> {
        self.take(name)?.group()
    }

    /// Settings with a value that were not taken, in the order of the file.
    pub fn rest(&self) -> Vec<Found<'a>> {
        let taken = self.taken.borrow();
        let rest = self.entries.iter().filter(|entry| !taken.contains(entry.name.as_str()));
        rest.map(|entry| self.found(entry)).filter(|found| *found.content != Content::Null).collect()
    }

    fn found(&self, entry: &'a Entry) -> Found<'a> {
        Found {
            key: format!("{}{}", self.prefix, entry.shown()),
            line: entry.line,
            content: &entry.value.content,
            mistakes: self.mistakes,
        }
    }
}

impl<'a> Found<'a> {
    /// Notes that this setting is wrong.
    pub fn mistake(&self, message: String) {
        self.mistakes.note(self.line, message);
    }

    /// Notes that two settings exclude each other.
    pub fn exclude(&self, other: &Found<'_>) {
        self.mistake(format!("`{}` and `{}` (line {}) cannot both be set", self.key, other.key, other.line));
    }

    /// A value inside this setting, with a key of its own.
    pub fn inside(&self, key: String, line: usize, content: &'a Content) -> Found<'a> {
        Found { key, line, content, mistakes: self.mistakes }
    }

    /// Whether the value is `auto`, which means that it is set elsewhere.
    pub fn is_auto(&self) -> bool {
        matches!(self.content, Content::Text(text) if text == "auto")
    }

    /// Whether the setting is neither null nor false nor empty.
    pub fn is_on(&self) -> bool {
        match self.content {
            Content::Null | Content::Boolean(false) => false,
            Content::Text(text) => !text.is_empty(),
            Content::List(items) => !items.is_empty(),
            Content::Map(entries) => !entries.is_empty(),
            Content::Boolean(true) | Content::Number(_) => true,
        }
    }

    /// The name without the groups around it.
    pub fn name(&self) -> &str {
        self.key.rsplit('.').next().unwrap_or(&self.key)
    }

    pub fn text(&self) -> Option<String> {
        match self.content {
            Content::Text(text) => Some(text.clone()),
            Content::Number(digits) => Some(digits.clone()),
            _ => self.wrong("a word"),
        }
    }

    pub fn number(&self) -> Option<f64> {
        let number = match self.content {
            Content::Number(digits) | Content::Text(digits) => digits.trim().parse::<f64>().ok(),
            _ => None,
        };
        match number.filter(|number| number.is_finite()) {
            Some(number) => Some(number),
            None => self.wrong("a number"),
        }
    }

    /// A whole number of at least 1.
    pub fn count(&self) -> Option<u64> {
        let whole = self.number()?;
        match whole.fract() == 0.0 && (1.0..=f64::from(i32::MAX)).contains(&whole) {
            true => Some(whole as u64),
            false => self.wrong("a whole number of at least 1"),
        }
    }

    pub fn boolean(&self) -> Option<bool> {
        match self.content {
            Content::Boolean(yes) => Some(*yes),
            Content::Text(text) if text == "auto" => None,
            Content::Text(text) if text.eq_ignore_ascii_case("true") => Some(true),
            Content::Text(text) if text.eq_ignore_ascii_case("false") => Some(false),
            _ => self.wrong("true or false"),
        }
    }

    /// A list of words, or one word; words may be separated by commas.
    pub fn words(&self) -> Option<Vec<String>> {
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
                    None => self.wrong("a list of words"),
                }
            }
            _ => self.wrong("a list of words"),
        }
    }

    pub fn items(&self) -> Option<&'a [Node]> {
        match self.content {
            Content::List(items) => Some(items),
            _ => self.wrong("a list"),
        }
    }

    pub fn group(&self) -> Option<Fields<'a>> {
        match self.content {
            Content::Map(entries) => Some(Fields {
                prefix: format!("{}.", self.key),
                entries,
                taken: RefCell::default(),
                mistakes: self.mistakes,
            }),
            _ => self.wrong("a group of settings"),
        }
    }

    fn wrong<T>(&self, wanted: &str) -> Option<T> {
        self.mistake(format!("`{}` must be {wanted}, got {}", self.key, self.content.describe()));
        None
    }
}
