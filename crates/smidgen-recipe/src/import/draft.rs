//! A recipe being translated: its lines and their sources, what was not carried over and why, what was assumed.
//!
//! Every value goes through the reader of its recipe key. A value that a recipe would refuse is reported as a mistake
//! in the imported file, with that file's key and line.
//! What the settings of other tools mean is in one file per tool; the text is written by `render.rs`.

use super::document::Content;
use super::families::Family;
use super::fields::{Fields, Found};
use super::slices::Slice;
use crate::RecipeErrors;
use crate::keys::find_key;
use crate::reasons::{Reason, reason_for};
use crate::single::{render_override, render_value};
use crate::value::Value;
use std::path::PathBuf;

/// The recipe that a file of another tool becomes, and the notes about it.
#[derive(Debug, Default)]
pub struct Draft {
    /// At most one per key.
    pub lines: Vec<Line>,
    pub left_out: Vec<LeftOut>,
    /// Sentences without a final period.
    pub assumed: Vec<String>,
    /// What keeps the recipe from running, without a final period.
    pub warnings: Vec<String>,
    /// Required keys that the file does not set, and a description of the value that belongs there.
    pub wanted: Vec<(&'static str, String)>,
    pub places: Places,
    /// Models of the file, with the families that their names show.
    pub(crate) families: Vec<(String, &'static Family)>,
    /// The only source of `data.train` and the rows of it that are trained on.
    pub(crate) trained_slice: Option<(String, Slice)>,
}

/// A line of the recipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// `section.name`
    pub key: String,
    /// The value as TOML.
    pub toml: String,
    pub source: Source,
    /// A short comment; may be empty.
    pub remark: String,
    /// False for a line that is written as a comment.
    pub active: bool,
}

/// Where the value of a line comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Settings of the file, with their lines.
    Keys(Vec<(String, usize)>),
    /// The default of this tool.
    DefaultOf(&'static str),
    CommandLine,
}

/// A setting that was not carried over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    pub key: String,
    pub line: usize,
    pub value: String,
    pub why: String,
    /// False for an unknown setting.
    pub is_known: bool,
}

/// The folders that relative paths start from.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// Paths in the imported file are relative to it.
    pub working_directory: PathBuf,
    /// The name of the imported file, which Unsloth Studio names after the model.
    pub file_name: String,
    /// The folder of the imported file, where other configurations that it names are looked for first.
    pub file_folder: PathBuf,
    /// The folder of the recipe, which its paths are relative to: the working directory if the recipe goes to stdout.
    pub recipe_folder: PathBuf,
}

impl Draft {
    pub fn new(places: Places) -> Draft {
        Draft { places, ..Draft::default() }
    }

    /// A line from settings of the file; a value that the recipe refuses is reported at the first of them.
    pub(crate) fn put(&mut self, key: &'static str, value: Value, from: &[&Found<'_>]) {
        self.put_with(key, value, from, "");
    }

    pub(crate) fn put_with(&mut self, key: &'static str, value: Value, from: &[&Found<'_>], remark: &str) {
        match render_value(key, &value, &self.places.prefix()) {
            Ok(toml) => {
                let keys = from.iter().map(|found| (found.key.clone(), found.line)).collect();
                self.set(key, toml, Source::Keys(keys), remark);
            }
            Err(wanted) => {
                let found = from.first().expect("a value comes from a setting");
                found.mistake(format!("`{}` cannot be imported: {wanted}, got {value}", found.key));
            }
        }
    }

    /// A value as TOML; `None` if the key refuses it.
    pub(crate) fn render(&self, key: &str, value: &Value) -> Option<String> {
        render_value(key, value, &self.places.prefix()).ok()
    }

    /// The tool's default, where it differs from the recipe's.
    pub(crate) fn put_default(&mut self, key: &'static str, value: Value, tool: &'static str) {
        // A default that is derived from another setting is out of range only if that setting is, which is reported.
        if let Ok(toml) = render_value(key, &value, &self.places.prefix()) {
            self.set(key, toml, Source::DefaultOf(tool), "");
        }
    }

    /// A line from `section.key=value` on the command line.
    pub fn put_override(&mut self, text: &str) -> Result<(), RecipeErrors> {
        let (key, toml) = render_override(text, &self.places.prefix())?;
        self.set(&key, toml, Source::CommandLine, "");
        Ok(())
    }

    fn set(&mut self, key: &str, toml: String, source: Source, remark: &str) {
        // A single file is written as a string rather than a list.
        let inside = toml.strip_prefix("[\"").and_then(|rest| rest.strip_suffix("\"]"));
        let toml = match inside.filter(|inside| key.starts_with("data.") && !inside.contains('"')) {
            Some(inside) => format!("\"{inside}\""),
            None => toml,
        };
        let rival = rival_of(key);
        self.lines.retain(|line| line.key != key && Some(&line.key) != rival.as_ref());
        let line = Line { key: key.to_owned(), toml, source, remark: remark.to_owned(), active: true };
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

    /// Leaves a setting out if the file has it.
    pub fn leave_out_if_set(&mut self, found: Option<Found<'_>>, why: impl Into<String>) {
        if let Some(found) = found {
            self.leave_out(&found, why);
        }
    }

    /// Notes the settings of a group that were not taken; known settings that are switched off are not mentioned.
    pub fn leave_rest(&mut self, group: &Fields<'_>) {
        for found in group.rest() {
            let Reason { why, is_known } = reason_for(found.name());
            let is_no = matches!(found.content, Content::Text(text) if text == "no" || text == "none");
            if !is_known || (found.is_on() && !is_no) {
                self.leave_out(&found, why);
                let last = self.left_out.last_mut().expect("one was left out just now");
                last.is_known = is_known;
            }
        }
    }

    /// Adds the draft of another file; `name` goes before its keys. Lines that come from settings of this file stay.
    pub fn adopt(&mut self, other: Draft, name: &str) {
        let named = |key: String| format!("{name}{key}");
        for line in other.lines {
            let Source::Keys(keys) = line.source else { continue };
            if self.is_given(&line.key) {
                continue;
            }
            let keys = keys.into_iter().map(|(key, at)| (named(key), at)).collect();
            self.set(&line.key, line.toml, Source::Keys(keys), &line.remark);
        }
        let left = other.left_out.into_iter();
        self.left_out.extend(left.map(|left| LeftOut { key: named(left.key), ..left }));
        other.assumed.into_iter().for_each(|what| self.assume(what));
        other.warnings.into_iter().for_each(|what| self.warn(what));
    }

    /// Whether a setting of the file sets this key, or the key that excludes it.
    pub(crate) fn is_given(&self, key: &str) -> bool {
        let rival = rival_of(key);
        let given = |line: &Line| matches!(line.source, Source::Keys(_));
        self.lines.iter().any(|line| given(line) && (line.key == key || Some(&line.key) == rival.as_ref()))
    }

    pub fn assume(&mut self, what: impl Into<String>) {
        let what = what.into();
        if !self.assumed.contains(&what) {
            self.assumed.push(what);
        }
    }

    pub fn warn(&mut self, what: String) {
        if !self.warnings.contains(&what) {
            self.warnings.push(what);
        }
    }

    pub fn want(&mut self, key: &'static str, what: impl Into<String>) {
        self.wanted.retain(|(known, _)| *known != key);
        self.wanted.push((key, what.into()));
    }
}

/// The key that excludes this one.
fn rival_of(key: &str) -> Option<String> {
    let (section, name) = key.split_once('.')?;
    Some(format!("{section}.{}", find_key(section, name)?.excludes?))
}

impl Places {
    pub fn exists(&self, path: &str) -> bool {
        self.working_directory.join(path).exists()
    }

    /// The paths where a configuration that the file names may be: next to the file, or in the working directory.
    pub fn candidates(&self, path: &str) -> Vec<PathBuf> {
        let mut places = vec![self.file_folder.join(path)];
        let here = self.working_directory.join(path);
        if !places.contains(&here) {
            places.push(here);
        }
        places
    }

    /// The working directory relative to the recipe's folder: what goes before a path of the file.
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
    fn paths_are_relative_to_the_recipe() {
        let seen = |folder: &str, path: &str| {
            let places =
                Places { working_directory: "/w".into(), recipe_folder: folder.into(), ..Places::default() };
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
