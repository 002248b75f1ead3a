//! Mistakes in a file of another tool, collected while it is read.
//!
//! Reading goes on after a mistake, so that all of them are reported at once, each with its line.
//! A mistake that is found twice is reported once.

use std::cell::RefCell;
use std::fmt;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportMistake {
    pub line: usize,
    pub message: String,
}

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

    /// All mistakes, in the order of their lines.
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
