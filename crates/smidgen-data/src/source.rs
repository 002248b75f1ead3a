//! Data files on disk: which files a recipe names, which kind they are, and their rows one at a time.
//!
//! A path that does not exist is a pattern (`*`, `?`, `[a-z]`, `**`); matches are sorted so that the order of samples
//! never depends on the file system.
//! The extension says what a file is: `.json`, `.jsonl` or `.ndjson` (`json_rows.rs`, which distinguishes lines from
//! arrays by their beginning), `.csv` or `.tsv` (`csv_rows.rs`, which detects the separator in the header), `.txt` or
//! `.md` (`document_rows.rs`), `.parquet` (`parquet_rows.rs`); all except the last also as `.gz` and `.zst`
//! (`compressed.rs`). A folder is the documents in it.
//! All are streamed: only one row is in memory (for Parquet, one page per column), whatever the file's size, and every
//! error has its place. What a row means is decided in `format.rs`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use crate::csv_rows::{read_table, table_separator};
use crate::document_rows::{converter, documents_in, ending, read_document};
pub use crate::json_rows::RowResult;
use crate::json_rows::{has_lines, read_array, read_lines};
use crate::parquet_rows::read_parquet;
pub use crate::row_place::{RowPlace, RowUnit};
use crate::source_error::Compression;
pub use crate::source_error::SourceError;
use crate::utf8_reader::open_text;

/// Where rows come from.
#[derive(Clone, Copy, Debug)]
pub enum RowSource<'a> {
    Files(&'a [PathBuf]),
    /// Rows that the caller holds; `name` takes the place of a file's path in messages.
    Memory {
        name: &'a PathBuf,
        rows: &'a [Json],
    },
}

impl<'a, F: AsRef<[PathBuf]> + ?Sized> From<&'a F> for RowSource<'a> {
    fn from(files: &'a F) -> RowSource<'a> {
        RowSource::Files(files.as_ref())
    }
}

impl<'a> RowSource<'a> {
    /// The values of [`RowPlace::file`], in order.
    pub fn files(self) -> &'a [PathBuf] {
        match self {
            RowSource::Files(files) => files,
            RowSource::Memory { name, .. } => std::slice::from_ref(name),
        }
    }

    /// Calls `on_row` for each row of one of its files, in order, broken rows included.
    pub fn read_rows<E: From<SourceError>>(
        self,
        file: &Path,
        mut on_row: impl FnMut(RowPlace<'_>, RowResult) -> Result<(), E>,
    ) -> Result<(), E> {
        match self {
            RowSource::Files(_) => read_rows(file, on_row),
            RowSource::Memory { rows, .. } => (1..).zip(rows).try_for_each(|(number, row)| {
                on_row(RowPlace { file, unit: RowUnit::Row, number }, Ok(row.clone()))
            }),
        }
    }
}

/// The files that `patterns` name, relative to `folder`, in the order of the list and sorted within a pattern.
///
/// A path that exists as written is taken literally; a folder stands for the documents in it. A pattern adds only files that are not in the list yet, so
/// overlapping patterns do not repeat rows; naming a file twice does.
pub fn find_files<P: AsRef<str>>(patterns: &[P], folder: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let mut files = Vec::new();
    for pattern in patterns {
        let pattern = pattern.as_ref();
        let written = folder.join(pattern);
        if written.is_dir() {
            files.extend(documents_in(&written)?);
            continue;
        }
        if written.exists() {
            files.push(written);
            continue;
        }
        let matches = match_pattern(pattern, folder)?;
        if matches.is_empty() {
            return Err(SourceError::NoMatch { pattern: pattern.to_owned() });
        }
        for path in matches {
            if !files.contains(&path) {
                files.push(path);
            }
        }
    }
    Ok(files)
}

/// Calls `on_row` for each row of a file, in order: an object with a field for each column, or any value of a JSON
/// file. The first broken row is an error.
pub fn read_json_rows<E: From<SourceError>>(
    path: &Path,
    mut on_row: impl FnMut(RowPlace<'_>, Json) -> Result<(), E>,
) -> Result<(), E> {
    read_rows(path, |place, row| on_row(place, row?))
}

/// Like [`read_json_rows`], but a broken row after which others can still be read is passed to `on_row` too.
pub fn read_rows<E: From<SourceError>>(
    path: &Path,
    mut on_row: impl FnMut(RowPlace<'_>, RowResult) -> Result<(), E>,
) -> Result<(), E> {
    let kind = file_kind(path)?;
    match kind {
        FileKind::JsonLines | FileKind::JsonArray => {
            if has_lines(path, open_text(path)?, kind == FileKind::JsonLines)? {
                read_lines(path, open_text(path)?, &mut on_row)
            } else {
                read_array(path, open_text(path)?, &mut on_row)
            }
        }
        FileKind::Table { separator } => {
            let separator = table_separator(path, open_text(path)?, separator)?;
            read_table(path, separator, open_text(path)?, &mut on_row)
        }
        FileKind::Document => read_document(path, open_text(path)?, &mut on_row),
        FileKind::Parquet => read_parquet(path, &mut on_row),
    }
}

/// How a file holds its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    JsonArray,
    JsonLines,
    Table { separator: u8 },
    Document,
    Parquet,
}

/// The kind of a file by its name; a folder or a missing file is an error.
pub fn file_kind(path: &Path) -> Result<FileKind, SourceError> {
    let shown = || path.display().to_string();
    let metadata = fs::metadata(path).map_err(|source| SourceError::Read { path: shown(), source })?;
    if metadata.is_dir() {
        return Err(SourceError::Folder { path: shown() });
    }
    if !metadata.is_file() {
        return Err(SourceError::NotAFile { path: shown() });
    }
    let compression = Compression::of(path);
    let inner = match compression {
        Compression::None => path.to_path_buf(),
        Compression::Gzip | Compression::Zstd => path.with_extension(""),
    };
    let extension = ending(&inner);
    match (extension.as_deref(), compression) {
        (Some("json"), _) => Ok(FileKind::JsonArray),
        (Some("jsonl" | "ndjson"), _) => Ok(FileKind::JsonLines),
        (Some("csv"), _) => Ok(FileKind::Table { separator: b',' }),
        (Some("tsv"), _) => Ok(FileKind::Table { separator: b'\t' }),
        (Some("txt" | "md" | "markdown"), _) => Ok(FileKind::Document),
        (Some("parquet"), Compression::None) => Ok(FileKind::Parquet),
        (Some("parquet"), _) => Err(SourceError::CompressedParquet { path: shown(), compression }),
        _ => Err(match converter(path) {
            Some(command) => SourceError::NeedsConverter { path: shown(), command },
            None => SourceError::UnknownExtension { path: shown() },
        }),
    }
}

/// The files that a pattern matches, sorted. The part of the pattern that exists on disk is taken literally: a `[` in
/// the name of a real folder is only a character.
fn match_pattern(pattern: &str, folder: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let written = folder.join(pattern);
    let existing = written.ancestors().find(|path| path.exists()).unwrap_or(Path::new(""));
    let rest = written.strip_prefix(existing).unwrap_or(&written);
    let globbed = Path::new(&glob::Pattern::escape(&existing.to_string_lossy())).join(rest);
    let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
    let found = glob::glob_with(&globbed.to_string_lossy(), options)
        .map_err(|error| SourceError::Pattern { pattern: pattern.to_owned(), message: error.msg })?;
    // A folder that cannot be listed matches nothing.
    let mut files: Vec<PathBuf> = found.filter_map(Result::ok).filter(|path| path.is_file()).collect();
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn patterns_are_sorted_and_reach_into_folders() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b/2.jsonl", "b/1.jsonl", "a/3.jsonl", "a/.hidden.jsonl", "a/x.txt"] {
            write(folder.path(), name, "");
        }
        let names = |patterns: &[&str]| -> Vec<String> {
            find_files(patterns, folder.path())
                .unwrap()
                .iter()
                .map(|path| path.strip_prefix(folder.path()).unwrap().to_string_lossy().into_owned())
                .collect()
        };
        assert_eq!(names(&["*/*.jsonl"]), ["a/3.jsonl", "b/1.jsonl", "b/2.jsonl"]);
        assert_eq!(names(&["?/3.jsonl"]), ["a/3.jsonl"]);
        assert_eq!(names(&["b/[1-9].jsonl"]), ["b/1.jsonl", "b/2.jsonl"]);
        assert_eq!(names(&["**/[!1].jsonl"]), ["a/3.jsonl", "b/2.jsonl"]);
        // The list keeps its order; what a pattern finds again is not repeated, what is named again is.
        assert_eq!(names(&["b/2.jsonl", "b/*", "b/2.jsonl"]), ["b/2.jsonl", "b/1.jsonl", "b/2.jsonl"]);
        let absolute = folder.path().join("b/*").to_string_lossy().into_owned();
        let found = find_files(&[absolute], Path::new("/")).unwrap();
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn what_exists_is_taken_literally() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["[1] *?/a.jsonl", "[1] *?/b[2].jsonl", "1 xy/c.jsonl"] {
            write(folder.path(), name, "");
        }
        let count = |pattern: &str| find_files(&[pattern], folder.path()).unwrap().len();
        assert_eq!(count("[1] *?/*.jsonl"), 2);
        assert_eq!(count("[1] *?/b[2].jsonl"), 1);
        assert_eq!(count("[1-9] *?/*.jsonl"), 1);
    }

    #[test]
    fn no_match_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let error = find_files(&["*.jsonl"], folder.path()).unwrap_err();
        assert_eq!(error.to_string(), "no file matches `*.jsonl`");
        let error = find_files(&["gone.jsonl"], folder.path()).unwrap_err();
        assert_eq!(error.to_string(), "no file matches `gone.jsonl`");
        let error = find_files(&["a**/b.jsonl"], folder.path()).unwrap_err();
        assert!(error.to_string().starts_with("`a**/b.jsonl` is not a pattern: "), "{error}");
    }
}
