//! The settings of one group, taken one by one, so that the settings nobody took are known at the end.
//!
//! A value is read as the type that the caller asks for. A value of another type is a mistake in the file, noted with
//! its key and line.
//! A null counts as not set, and so does `auto` where the tool fills in the value itself.

use super::document::{Content, Entry, Node};
use super::mistakes::Mistakes;
use std::cell::RefCell;
use std::collections::HashMap;

/// A group of settings, and which of them were taken.
#[derive(Debug)]
pub struct Fields<'a> {
    /// The path of the group, such as `zero_optimization.`, or empty at the top of the file.
    prefix: String,
    entries: &'a [Entry],
    /// The paths of settings that were taken, and of groups that were entered (false).
    taken: RefCell<HashMap<String, bool>>,
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
    pub fn has(&self, path: &str) -> bool {
        self.get(path).is_some()
    }

    /// Whether the file has one of these keys, even without a value.
    pub fn has_any(&self, paths: &[&str]) -> bool {
        paths.iter().any(|path| self.has(path))
    }

    /// The value of a key, without taking it.
    pub fn get(&self, path: &str) -> Option<&'a Content> {
        let (group, name) = path.rsplit_once('.').unwrap_or(("", path));
        let mut entries = self.entries;
        for outer in group.split('.').filter(|outer| !outer.is_empty()) {
            let entry = entries.iter().find(|entry| entry.name == outer)?;
            let Content::Map(inside) = &entry.value.content else { return None };
            entries = inside;
        }
        entries.iter().find(|entry| entry.name == name).map(|entry| &entry.value.content)
    }

    /// The setting, if it has a value. It counts as taken either way. A name with dots is a path into groups, whose
    /// other settings stay; a value in place of a group is a mistake.
    pub fn take(&self, path: &str) -> Option<Found<'a>> {
        let mut entries = self.entries;
        let mut key = self.prefix.clone();
        for (start, part) in parts(path) {
            let entry = entries.iter().find(|entry| entry.name == part)?;
            let (end, is_last) = (start + part.len(), start + part.len() == path.len());
            self.taken.borrow_mut().insert(path[..end].to_owned(), is_last);
            let found = self.found(entry, &key);
            if *found.content == Content::Null || is_last {
                return (*found.content != Content::Null).then_some(found);
            }
            let Content::Map(inside) = &entry.value.content else {
                return found.wrong("a group of settings");
            };
            (entries, key) = (inside, format!("{}.", found.key));
        }
        None
    }

    /// Takes settings that need neither a line nor a note.
    pub fn skip(&self, paths: &[&str]) {
        paths.iter().for_each(|path| drop(self.take(path)));
    }

    /// The first of several names that has a value; the others stay, so that they are noted, unless they say the same.
    pub fn take_first(&self, paths: &[&str]) -> Option<Found<'a>> {
        let first = paths.iter().find_map(|path| self.take(path))?;
        let same = paths.iter().filter(|path| self.get(path) == Some(first.content));
        same.for_each(|path| drop(self.take(path)));
        Some(first)
    }

    /// A switch that is on; it counts as taken either way.
    pub fn take_on(&self, path: &str) -> Option<Found<'a>> {
        self.take(path).filter(|found| found.boolean() == Some(true))
    }

    /// A setting together with its text.
    pub fn take_text(&self, path: &str) -> Option<(String, Found<'a>)> {
        let found = self.take(path)?;
        Some((found.text()?, found))
    }

    /// The settings inside a setting; a mistake if it is not a group.
    pub fn take_group(&self, path: &str) -> Option<Fields<'a>> {
        self.take(path)?.group()
    }

    /// Settings with a value that were not taken, in the order of the file.
    pub fn rest(&self) -> Vec<Found<'a>> {
        let mut rest = Vec::new();
        self.add_rest(self.entries, "", &self.prefix, &mut rest);
        rest
    }

    fn add_rest(&self, entries: &'a [Entry], path: &str, prefix: &str, rest: &mut Vec<Found<'a>>) {
        for entry in entries {
            let path = format!("{path}{}", entry.name);
            let found = self.found(entry, prefix);
            let taken = self.taken.borrow().get(&path).copied();
            match (taken, &entry.value.content) {
                (Some(true), _) | (_, Content::Null) => {}
                (Some(false), Content::Map(inside)) => {
                    self.add_rest(inside, &format!("{path}."), &format!("{}.", found.key), rest);
                }
                _ => rest.push(found),
            }
        }
    }

    fn found(&self, entry: &'a Entry, prefix: &str) -> Found<'a> {
        Found {
            key: format!("{prefix}{}", entry.shown()),
            line: entry.line,
            content: &entry.value.content,
            mistakes: self.mistakes,
        }
    }
}

/// The names in a path, with their places in it.
fn parts(path: &str) -> impl Iterator<Item = (usize, &str)> {
    path.split('.').scan(0, |start, part| {
        let at = *start;
        *start += part.len() + 1;
        Some((at, part))
    })
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
        number.filter(|number| number.is_finite()).or_else(|| self.wrong("a number"))
    }

    /// A whole number of at least 1.
    pub fn count(&self) -> Option<u64> {
        let whole = self.number()?;
        let is_count = whole.fract() == 0.0 && (1.0..=f64::from(i32::MAX)).contains(&whole);
        if is_count { Some(whole as u64) } else { self.wrong("a whole number of at least 1") }
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
                let words: Option<Vec<String>> = items.iter().map(word).collect();
                words.or_else(|| self.wrong("a list of words"))
            }
            _ => self.wrong("a list of words"),
        }
    }

    /// The elements of a list; any other value alone.
    pub fn each(&self) -> Vec<Found<'a>> {
        let Content::List(items) = self.content else { return vec![self.clone()] };
        let item = |(index, item): (usize, &'a Node)| {
            self.inside(format!("{}.{index}", self.key), item.line, &item.content)
        };
        items.iter().enumerate().map(item).collect()
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
