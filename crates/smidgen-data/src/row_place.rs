//! Where a row is in its file, for messages.
//!
//! Lines are counted in files that people open in an editor, rows in the others.

use std::fmt;
use std::path::Path;

/// How rows of a file are counted; both from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowUnit {
    /// `.jsonl`, `.csv`, `.txt`: the line in the file where the row begins, blank lines counted.
    Line,
    /// `.json`: the element of the array; `.parquet`: the row of the table.
    Row,
}

impl fmt::Display for RowUnit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            RowUnit::Line => "line",
            RowUnit::Row => "row",
        })
    }
}

/// The place of a row in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPlace<'a> {
    pub file: &'a Path,
    pub unit: RowUnit,
    pub number: u64,
}

impl fmt::Display for RowPlace<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "`{}` {} {}", self.file.display(), self.unit, self.number)
    }
}
