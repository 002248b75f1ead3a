//! Rows that cannot be used: counted per file and per fault, and reported together.
//!
//! Two faults are the same if their messages differ only in numbers. Memory is bounded: a file has a limited number
//! of faults with a limited number of places each, and bad rows of files beyond the first few are only counted.
//! What can be wrong with a row is in `format_error.rs`, `token_row.rs` and `encode_error.rs`.

use std::path::PathBuf;

use smidgen_ir::words::OnBadRow;

use crate::format_error::FormatError;
use crate::prepare_error::PrepareError;
use crate::row_place::{RowPlace, RowUnit};
use crate::source_error::SourceError;

const MOST_FILES: usize = 16;
const MOST_FAULTS: usize = 16;
const MOST_PLACES: usize = 5;
const LONGEST_FAULT: usize = 120;
const OTHER_FAULTS: &str = "other faults";

/// Counts of all rows that were read from a source, and the bad ones among them.
#[derive(Debug, Default)]
pub struct BadRows {
    files: Vec<BadFile>,
    /// Bad rows of files that are not listed.
    in_other_files: u64,
    rows: u64,
    bad: u64,
    first: Option<PrepareError>,
}

#[derive(Debug)]
struct BadFile {
    path: PathBuf,
    unit: RowUnit,
    rows: u64,
    bad: u64,
    faults: Vec<Fault>,
}

#[derive(Debug)]
struct Fault {
    what: String,
    rows: u64,
    places: Vec<u64>,
}

impl BadRows {
    /// Counts a row, in the order of the rows.
    pub fn count(&mut self, place: RowPlace<'_>) {
        self.rows += 1;
        if self.files.last().is_none_or(|file| file.path != place.file) {
            if self.files.len() == MOST_FILES {
                self.drop_a_file();
            }
            let path = place.file.to_path_buf();
            self.files.push(BadFile { path, unit: place.unit, rows: 0, bad: 0, faults: Vec::new() });
        }
        if let Some(file) = self.files.last_mut() {
            file.rows += 1;
        }
    }

    /// Notes what is wrong with the row that was counted last. Returns an error that is not about one row.
    pub fn note(&mut self, place: RowPlace<'_>, error: PrepareError) -> Result<(), PrepareError> {
        if !error.is_of_one_row() {
            return Err(error);
        }
        let what = fault_of(place, &error);
        self.bad += 1;
        if let Some(file) = self.files.last_mut() {
            file.note(what, place.number);
        }
        self.first.get_or_insert(error);
        Ok(())
    }

    /// Removes a file without bad rows if there is one, else the last file.
    fn drop_a_file(&mut self) {
        let clean = self.files.iter().position(|file| file.bad == 0);
        let file = self.files.remove(clean.unwrap_or(self.files.len() - 1));
        self.in_other_files += file.bad;
    }

    /// The error to report if `error` ended the reading: with the bad rows before it, unless it explains them.
    pub fn error_with_bad_rows(self, error: PrepareError, on_bad_row: OnBadRow) -> PrepareError {
        let explains = matches!(error, PrepareError::Format(FormatError::NoColumn { .. }));
        if on_bad_row != OnBadRow::Error || self.bad == 0 || explains {
            return error;
        }
        let is_about_file = matches!(&error, PrepareError::Format(FormatError::Source(_)));
        match self.finish(on_bad_row) {
            Err(PrepareError::BadRows { report, first, .. }) if is_about_file => {
                let report = format!("{report}\n  reading ended there: {error}");
                PrepareError::BadRows { report, first, all: false }
            }
            Err(first) if is_about_file => {
                let report = format!("{first}\n  reading ended after it: {error}");
                PrepareError::BadRows { report, first: Box::new(first), all: false }
            }
            Err(bad) => bad,
            Ok(_) => error,
        }
    }

    /// What was skipped, one line per file. An error if bad rows are refused, or if all rows are bad.
    pub fn finish(self, on_bad_row: OnBadRow) -> Result<Vec<String>, PrepareError> {
        let Some(first) = self.first else { return Ok(Vec::new()) };
        if on_bad_row == OnBadRow::Error && self.bad == 1 {
            return Err(first);
        }
        let bad_files = || self.files.iter().filter(|file| file.bad > 0);
        if on_bad_row == OnBadRow::Skip && self.bad < self.rows {
            let mut lines: Vec<String> = bad_files().map(BadFile::skipped).collect();
            if self.in_other_files > 0 {
                let noun = if self.in_other_files == 1 { "row" } else { "rows" };
                lines.push(format!("{} {noun} of other files skipped", self.in_other_files));
            }
            return Ok(lines);
        }
        let mut report = match (self.bad, self.rows) {
            (1, 1) => "the only row is bad".to_owned(),
            (bad, rows) if bad == rows => format!("all {rows} rows are bad"),
            (bad, rows) => format!("{bad} of {rows} rows are bad"),
        };
        for file in bad_files() {
            report.push_str(&format!("\n{}", file.report()));
        }
        if self.in_other_files > 0 {
            report.push_str(&format!("\n  {} in other files", self.in_other_files));
        }
        Err(PrepareError::BadRows { report, first: Box::new(first), all: self.bad == self.rows })
    }
}

impl BadFile {
    fn note(&mut self, what: String, number: u64) {
        self.bad += 1;
        let index_of = |what: &str| self.faults.iter().position(|fault| fault.what == what);
        let (index, what) = match index_of(&what) {
            None if self.faults.len() + 1 >= MOST_FAULTS => (index_of(OTHER_FAULTS), OTHER_FAULTS.to_owned()),
            index => (index, what),
        };
        let index = index.unwrap_or_else(|| {
            self.faults.push(Fault { what, rows: 0, places: Vec::new() });
            self.faults.len() - 1
        });
        let fault = &mut self.faults[index];
        fault.rows += 1;
        if fault.places.len() < MOST_PLACES {
            fault.places.push(number);
        }
    }

    fn report(&self) -> String {
        let mut text = format!("  `{}`: {} of {} rows", self.path.display(), self.bad, self.rows);
        for fault in &self.faults {
            let (rows, what) = (fault.rows, &fault.what);
            let noun = if rows == 1 { "row" } else { "rows" };
            text.push_str(&format!("\n    {rows} {noun}: {what} ({})", fault.shown(self.unit)));
        }
        text
    }

    fn skipped(&self) -> String {
        let faults = self.faults.iter().map(|fault| {
            let Fault { what, rows, .. } = fault;
            format!("{rows} × {what} ({})", fault.shown(self.unit))
        });
        let faults = faults.collect::<Vec<_>>().join("; ");
        format!("`{}`: {} of {} rows skipped: {faults}", self.path.display(), self.bad, self.rows)
    }
}

impl Fault {
    /// "lines 3, 17, 20, ...".
    fn shown(&self, unit: RowUnit) -> String {
        let places: Vec<String> = self.places.iter().map(u64::to_string).collect();
        let plural = if self.rows == 1 { "" } else { "s" };
        let more = if self.rows > self.places.len() as u64 { ", ..." } else { "" };
        format!("{unit}{plural} {}{more}", places.join(", "))
    }
}

/// The message without its place, and with every number as `N`.
fn fault_of(place: RowPlace<'_>, error: &PrepareError) -> String {
    // Wrong bytes in different places are the same fault.
    if let PrepareError::Format(FormatError::Source(SourceError::NotUtf8 { .. })) = error {
        return "is not UTF-8".to_owned();
    }
    let message = error.to_string();
    let rest =
        message.strip_prefix(&place.to_string()).unwrap_or(&message).trim_start_matches([' ', ',', ':']);
    let mut what = String::new();
    let mut in_number = false;
    for sign in rest.lines().next().unwrap_or_default().chars().take(LONGEST_FAULT) {
        if !sign.is_ascii_digit() {
            what.push(sign);
        } else if !in_number {
            what.push('N');
        }
        in_number = sign.is_ascii_digit();
    }
    for position in ["column N: ", "(line N, column N): "] {
        if let Some(rest) = what.strip_prefix(position) {
            return rest.to_owned();
        }
    }
    what
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn empty(place: RowPlace<'_>, field: &str) -> PrepareError {
        FormatError::Empty { place: place.to_string(), field: field.to_owned() }.into()
    }

    fn bad_rows(files: u64, rows: u64, faults: u64) -> BadRows {
        let mut bad = BadRows::default();
        for file in 0..files {
            let name = format!("{file}.jsonl");
            for number in 1..=rows {
                let place = RowPlace { file: Path::new(&name), unit: RowUnit::Line, number };
                bad.count(place);
                if number > 1 {
                    let field = char::from(b'a' + (number % faults) as u8);
                    bad.note(place, empty(place, &format!("f{field}[{number}]"))).unwrap();
                }
            }
        }
        bad
    }

    #[test]
    fn all_bad_rows_are_in_one_report() {
        let error = bad_rows(1, 10, 2).finish(OnBadRow::Error).unwrap_err();
        assert_eq!(
            error.to_string(),
            "9 of 10 rows are bad\n  `0.jsonl`: 9 of 10 rows\n    \
             5 rows: `fa[N]` is empty (lines 2, 4, 6, 8, 10)\n    \
             4 rows: `fb[N]` is empty (lines 3, 5, 7, 9)"
        );
        let lines = bad_rows(1, 14, 1).finish(OnBadRow::Skip).unwrap();
        assert_eq!(
            lines,
            ["`0.jsonl`: 13 of 14 rows skipped: 13 × `fa[N]` is empty (lines 2, 3, 4, 5, 6, ...)"]
        );
    }

    #[test]
    fn one_bad_row_has_its_own_message_and_only_bad_rows_are_an_error() {
        let error = bad_rows(1, 2, 2).finish(OnBadRow::Error).unwrap_err();
        assert_eq!(error.to_string(), "`0.jsonl` line 2: `fa[2]` is empty");
        let mut bad = BadRows::default();
        let place = RowPlace { file: Path::new("a.csv"), unit: RowUnit::Line, number: 2 };
        bad.count(place);
        bad.note(place, empty(place, "text")).unwrap();
        let error = bad.finish(OnBadRow::Skip).unwrap_err();
        assert!(error.to_string().starts_with("the only row is bad\n"), "{error}");
    }

    #[test]
    fn a_report_is_short_however_many_rows_are_bad() {
        let error = bad_rows(40, 200, 26).finish(OnBadRow::Error).unwrap_err().to_string();
        assert!(error.starts_with("7960 of 8000 rows are bad\n"), "{error}");
        assert!(error.contains("other faults (lines ") && error.contains(" in other files"), "{error}");
        assert!(error.lines().count() <= 2 + MOST_FILES * (1 + MOST_FAULTS), "{error}");
    }
}
