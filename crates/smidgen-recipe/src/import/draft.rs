//! A recipe in the making: its lines with where each came from, what was left out and why, what was assumed.
//!
//! Every value goes through the reader of its key, so that what the parser would refuse is a mistake of the foreign
//! file, reported with that file's key and line.
//! Left out: what the keys of other tools mean (`deepspeed.rs` and the files beside it), and the text (`render.rs`).

use super::document::Content;
use super::fields::{Fields, Found};
use super::reasons::{Reason, reason_for};
use crate::RecipeErrors;
use crate::single::{key_places, render_override, render_value};
use crate::value::Value;
use std::path::PathBuf;

/// What becomes of a file of another tool.
#[derive(Debug, Default)]
pub struct Draft {
    /// At most one for each key.
    pub lines: Vec<Line>,
    pub left_out: Vec<LeftOut>,
    /// Whole sentences without their period.
    pub assumed: Vec<String>,
    /// What to write at a required key that the file does not give.
    pub wanted: Vec<(&'static str, String)>,
    pub mistakes: Vec<ImportMistake>,
    pub places: Places,
}

/// A line of the recipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// `section.name`
    pub key: String,
    /// The value.
    pub toml: String,
    pub origin: Origin,
    /// What else to know, in few words; empty for nothing.
    pub remark: String,
    /// In force; else written as a comment.
    pub active: bool,
}

/// Where a line comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Keys of the file, with their lines.
    Keys(Vec<(String, usize)>),
    /// What this tool takes where nothing is written.
    DefaultOf(&'static str),
    CommandLine,
}

/// A key that has no line in the recipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    pub key: String,
    pub line: usize,
    pub value: String,
    pub why: String,
    /// False for a setting that nobody here has heard of.
    pub is_known: bool,
}

/// What is wrong with the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportMistake {
    pub line: usize,
    pub message: String,
}

/// What paths of the file are relative to, and where the recipe will lie.
#[derive(Clone, Debug, Default)]
pub struct Places {
    pub working_directory: PathBuf,
    /// The working directory too where the recipe goes to stdout.
    pub recipe_folder: PathBuf,
}

impl Draft {
    pub fn new(places: Places) -> Draft {
        Draft { places, ..Draft::default() }
    }

    /// A line from keys of the file; the first of them is blamed for a value that the recipe does not take.
    pub(crate) fn put(&mut self, key: &'static str, value: Value, from: &[&Found<'_>]) {
        self.put_with(key, value, from, "");
    }

    pub(crate) fn put_with(&mut self, key: &'static str, value: Value, from: &[&Found<'_>], remark: &str) {
        match render_value(key, &value, &self.places.prefix()) {
            Ok(toml) => {
                let keys = from.iter().map(|found| (found.key.clone(), found.line)).collect();
                self.set(key, toml, Origin::Keys(keys), remark);
            }
            Err(wanted) => {
                let (name, line) = from.first().map_or((key, 1), |found| (&*found.key, found.line));
                self.mistake(line, format!("`{name}` cannot be said here: {wanted}, got {value}"));
            }
        }
    }

    /// What the tool would have taken, where it is not what a recipe takes.
    pub(crate) fn put_default(&mut self, key: &'static str, value: Value, tool: &'static str) {
        let toml = render_value(key, &value, &self.places.prefix()).expect("defaults of tools are in range");
        self.set(key, toml, Origin::DefaultOf(tool), "");
    }

    /// A line from `section.key=value` on the command line.
    pub fn put_override(&mut self, text: &str) -> Result<(), RecipeErrors> {
        let (key, toml) = render_override(text, &self.places.prefix())?;
        self.set(&key, toml, Origin::CommandLine, "");
        Ok(())
    }

    fn set(&mut self, key: &str, toml: String, origin: Origin, remark: &str) {
        // One file is a string, as people write it.
        let one = toml.strip_prefix("[\"").and_then(|rest| rest.strip_suffix("\"]"));
        let toml = match one.filter(|inside| key.starts_with("data.") && !inside.contains('"')) {
            Some(inside) => format!("\"{inside}\""),
            None => toml,
        };
        let place = key_places().find(|place| place.path() == key);
        let rival = place.and_then(|place| Some(format!("{}.{}", place.section, place.excludes?)));
        self.lines.retain(|line| line.key != key && Some(&line.key) != rival.as_ref());
        let line = Line { key: key.to_owned(), toml, origin, remark: remark.to_owned(), active: true };
        self.lines.push(line);
    }

    pub fn line(&self, key: &str) -> Option<&Line> {
        self.lines.iter().find(|line| line.key == key)
    }

    pub fn has(&self, key: &str) -> bool {
        self.line(key).is_some_and(|line| line.active)
    }

    pub fn leave_out(&mut self, found: &Found<'_>, why: impl Into<String>) {
        self.left_out.push(LeftOut {
            key: found.key.clone(),
            line: found.line,
            value: found.content.describe(),
            why: why.into(),
            is_known: true,
        });
    }

    /// Everything of a group that was not taken, by its name; what is switched off needs no word.
    pub fn leave_rest(&mut self, group: &Fields<'_>) {
        for found in group.rest() {
            let Reason { why, is_known } = reason_for(found.name());
            let says_no = matches!(found.content, Content::Text(text) if text == "no" || text == "none");
            if !is_known || (found.is_on() && !says_no) {
                self.leave_out(&found, why);
                let last = self.left_out.last_mut().expect("one was left out just now");
                last.is_known = is_known;
            }
        }
    }

    pub fn assume(&mut self, what: impl Into<String>) {
        let what = what.into();
        if !self.assumed.contains(&what) {
            self.assumed.push(what);
        }
    }

    pub fn want(&mut self, key: &'static str, what: impl Into<String>) {
        self.wanted.retain(|(known, _)| *known != key);
        self.wanted.push((key, what.into()));
    }

    pub fn mistake(&mut self, line: usize, message: String) {
        self.mistakes.push(ImportMistake { line, message });
    }
}

impl Places {
    pub fn exists(&self, path: &str) -> bool {
        self.working_directory.join(path).exists()
    }

    /// The working directory as the recipe sees it, which paths of the file start from.
    fn prefix(&self) -> PathBuf {
        match self.recipe_folder.strip_prefix(&self.working_directory) {
            Ok(below) => below.components().map(|_| "..").collect(),
            Err(_) => self.working_directory.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_seen_from_the_recipe() {
        let seen = |folder: &str, path: &str| {
            let places = Places { working_directory: "/w".into(), recipe_folder: folder.into() };
            let mut draft = Draft::new(places);
            draft.put_override(&format!("data.train={path}")).unwrap();
            draft.line("data.train").unwrap().toml.clone()
        };
        assert_eq!(seen("/w", "a/b.json"), "\"a/b.json\"");
        assert_eq!(seen("/w/recipes", "./a/b.json"), "\"../a/b.json\"");
        assert_eq!(seen("/w/x/y", "[a.json, b.json]"), "[\"../../a.json\", \"../../b.json\"]");
        assert_eq!(seen("/elsewhere", "b.json"), "\"/w/b.json\"");
        assert_eq!(seen("/elsewhere", "/data/b.json"), "\"/data/b.json\"");
    }
}
