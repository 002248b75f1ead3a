//! What is wrong with a file of another tool, collected while it is read.
//!
//! Reading goes on after a mistake, so that all of them are reported at once, each with its line.
//! A setting that is asked for twice is reported once.

use std::cell::RefCell;
use std::fmt;

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportMistake {
    pub line: usize,
    pub message: String,
}

/// Everything that is wrong so far.
#[derive(Debug, Default)]
pub struct Mistakes(RefCell<Vec<ImportMistake>>);

impl Mistakes {
    pub fn note(&self, line: usize, message: String) {
        let mistake = ImportMistake { line, message };
        let mut mistakes = self.0.borrow_mut();
        if !mistakes.contains(&mistake) {
            mistakes.push(mistake);
        }
    }

    /// By line.
    pub fn sorted(self) -> Vec<ImportMistake> {
        let mut mistakes = self.0.into_inner();
        mistakes.sort_by_key(|mistake| mistake.line);
        mistakes
    }
}

impl fmt::Display for ImportMistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}
