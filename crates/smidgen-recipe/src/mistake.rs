//! All mistakes of a recipe at once, each with its place.
//!
//! The text form is part of the command line's contract: a header line, then one line per mistake in the order of the
//! file, then overrides, then missing keys; a hint is below its mistake. The caller prints the leading `error: `.

use std::fmt;

/// Why a recipe could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadRecipeError {
    #[error("cannot read the recipe `{file}`: {source}")]
    Unreadable {
        /// The path as the caller gave it.
        file: String,
        source: std::io::Error,
    },
    /// The file was read and has mistakes.
    #[error(transparent)]
    Wrong(#[from] RecipeErrors),
}

/// Every mistake of one recipe and its overrides; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecipeErrors {
    /// The path of the recipe as the caller gave it.
    pub file: String,
    /// Sorted: lines, overrides in their order, missing keys in the order of the reference.
    pub mistakes: Vec<Mistake>,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    pub place: Place,
    /// The key as written, `section.key`; empty for a syntax error.
    pub key: String,
    /// What is wrong, in one line.
    pub message: String,
    pub hint: Option<String>,
}

/// Where a mistake is. The order of the variants is the order of the report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A line of the file, counted from 1.
    Line(usize),
    /// Line and column, both from 1, if the file is not TOML.
    LineColumn(usize, usize),
    /// An override, as written.
    Override(String),
    /// Nowhere: a required key is missing, or the recipe was built in code.
    Missing,
}

impl Place {
    /// Lines by number, then everything else in the order in which it was found (the sort is stable).
    pub(crate) fn rank(&self) -> (u8, usize) {
        match self {
            Place::Line(line) | Place::LineColumn(line, _) => (0, *line),
            Place::Override(_) => (1, 0),
            Place::Missing => (2, 0),
        }
    }
}

impl fmt::Display for RecipeErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.mistakes.len();
        let noun = if count == 1 { "mistake" } else { "mistakes" };
        write!(f, "{} has {count} {noun}", self.file)?;
        for mistake in &self.mistakes {
            write!(f, "\n  {mistake}")?;
            if let Some(hint) = &mistake.hint {
                write!(f, "\n    hint: {hint}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Line(line) => write!(f, "line {line}: ")?,
            Place::LineColumn(line, column) => write!(f, "line {line}, column {column}: ")?,
            Place::Override(text) => write!(f, "`{text}`: ")?,
            Place::Missing => {}
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for RecipeErrors {}
