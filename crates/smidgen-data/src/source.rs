//! Data files on disk: which files a recipe names, what they are, and their rows one at a time.
//!
//! A pattern is a path that may hold `*` and `?` in any of its parts; matches are sorted so that the
//! order of samples never depends on the file system.
//! What a file is, its name says: `.json`, `.jsonl` or `.ndjson` (`json_rows.rs`), `.csv` or `.tsv`
//! (`csv_rows.rs`), `.txt` (`text_rows.rs`), `.parquet` (`parquet_rows.rs`); all but the last also as `.gz` and
//! `.zst` (`compressed.rs`). All are streamed: memory is one row (of Parquet one page a column), whatever
//! the file's size, and every mistake is reported with its place.
//! Leaves out what a row means.

use std::fs;
use std::path::{Component, Path, PathBuf};

use serde_json::Value as Json;

use crate::csv_rows::read_table;
use crate::json_rows::{read_array, read_lines};
use crate::parquet_rows::read_parquet;
pub use crate::row_place::{RowPlace, RowUnit};
use crate::source_error::Compression;
pub use crate::source_error::SourceError;
use crate::text_rows::read_text;
use crate::utf8_reader::open_text;

/// Where rows come from.
#[derive(Clone, Copy, Debug)]
pub enum RowSource<'a> {
    Files(&'a [PathBuf]),
    /// Rows that the caller holds, in one place whose name stands in messages where a file's path would.
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
    /// What [`RowPlace::file`] may be, in order.
    pub fn files(self) -> &'a [PathBuf] {
        match self {
            RowSource::Files(files) => files,
            RowSource::Memory { name, .. } => std::slice::from_ref(name),
        }
    }

    /// Calls `on_row` for each row of one of its files, in order.
    pub fn read_json_rows<E: From<SourceError>>(
        self,
        file: &Path,
        mut on_row: impl FnMut(RowPlace<'_>, Json) -> Result<(), E>,
    ) -> Result<(), E> {
        match self {
            RowSource::Files(_) => read_json_rows(file, on_row),
            RowSource::Memory { rows, .. } => (1..).zip(rows).try_for_each(|(number, row)| {
                on_row(RowPlace { file, unit: RowUnit::Row, number }, row.clone())
            }),
        }
    }
}

/// The files that `patterns` name, relative to `folder`, in the order of the list and sorted within a pattern.
///
/// A path that exists as written is taken as it is. A pattern adds only files that are not there yet,
/// so overlapping patterns do not repeat rows; naming a file twice does.
pub fn find_files<P: AsRef<str>>(patterns: &[P], folder: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let mut files = Vec::new();
    for pattern in patterns {
        let pattern = pattern.as_ref();
        let written = folder.join(pattern);
        if written.exists() {
            files.push(written);
            continue;
        }
        let mut matches = match_pattern(pattern, folder)?;
        if matches.is_empty() {
            return Err(SourceError::NoMatch { pattern: pattern.to_owned() });
        }
        matches.sort();
        for path in matches {
            if !files.contains(&path) {
                files.push(path);
            }
        }
    }
    Ok(files)
}

/// Calls `on_row` for each row of a file, in order: an object with a field for each column, in a file of JSON
/// whatever stands there.
pub fn read_json_rows<E>(
    path: &Path,
    mut on_row: impl FnMut(RowPlace<'_>, Json) -> Result<(), E>,
) -> Result<(), E>
where
    E: From<SourceError>,
{
    match file_kind(path)? {
        FileKind::JsonLines => read_lines(path, open_text(path)?, &mut on_row),
        FileKind::JsonArray => read_array(path, open_text(path)?, &mut on_row),
        FileKind::Table { separator } => read_table(path, separator, open_text(path)?, &mut on_row),
        FileKind::Text => read_text(path, open_text(path)?, &mut on_row),
        FileKind::Parquet => read_parquet(path, &mut on_row),
    }
}

/// How a file holds its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    JsonArray,
    JsonLines,
    Table { separator: u8 },
    Text,
    Parquet,
}

/// What a file is by its name; a folder or a file that is not there is an error already.
pub fn file_kind(path: &Path) -> Result<FileKind, SourceError> {
    let shown = || path.display().to_string();
    let metadata = fs::metadata(path).map_err(|source| SourceError::Read { path: shown(), source })?;
    if metadata.is_dir() {
        return Err(SourceError::Folder { path: shown() });
    }
    let compression = Compression::of(path);
    let inner = match compression {
        Compression::None => path.to_path_buf(),
        Compression::Gzip | Compression::Zstd => path.with_extension(""),
    };
    let extension = inner.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase);
    match (extension.as_deref(), compression) {
        (Some("json"), _) => Ok(FileKind::JsonArray),
        (Some("jsonl" | "ndjson"), _) => Ok(FileKind::JsonLines),
        (Some("csv"), _) => Ok(FileKind::Table { separator: b',' }),
        (Some("tsv"), _) => Ok(FileKind::Table { separator: b'\t' }),
        (Some("txt"), _) => Ok(FileKind::Text),
        (Some("parquet"), Compression::None) => Ok(FileKind::Parquet),
        (Some("parquet"), _) => Err(SourceError::CompressedParquet { path: shown(), compression }),
        _ => Err(SourceError::UnknownExtension { path: shown() }),
    }
}

fn match_pattern(pattern: &str, folder: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let parts: Vec<Component<'_>> = Path::new(pattern).components().collect();
    let mut found = vec![folder.to_path_buf()];
    for (index, part) in parts.iter().enumerate() {
        let name = part.as_os_str().to_string_lossy();
        if name.contains("**") {
            return Err(SourceError::RecursivePattern { pattern: pattern.to_owned() });
        }
        let is_last = index + 1 == parts.len();
        if !name.contains(['*', '?']) {
            for path in &mut found {
                path.push(part);
            }
            found.retain(|path| path.exists());
            continue;
        }
        let mut next = Vec::new();
        for parent in &found {
            // A file, or a folder that cannot be listed, matches nothing below it.
            let Ok(entries) = fs::read_dir(parent) else {
                continue;
            };
            for entry in entries {
                let entry = entry
                    .map_err(|source| SourceError::Read { path: parent.display().to_string(), source })?;
                let Some(entry_name) = entry.file_name().to_str().map(str::to_owned) else {
                    continue;
                };
                // As in a shell, a wildcard does not match the dot of a hidden file.
                let hidden = entry_name.starts_with('.') && !name.starts_with('.');
                let path = entry.path();
                if !hidden
                    && wildcard_match(&name, &entry_name)
                    && (if is_last { path.is_file() } else { path.is_dir() })
                {
                    next.push(path);
                }
            }
        }
        found = next;
    }
    Ok(found)
}

/// `*` is any run of characters, `?` is one. On a mismatch only the last `*` is widened, which is enough.
fn wildcard_match(pattern: &str, name: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    let (mut p, mut n) = (0, 0);
    let mut last_star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                last_star = Some((p, n));
                p += 1;
            }
            Some(&character) if character == '?' || character == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match last_star {
                Some((star, covered)) => {
                    last_star = Some((star, covered + 1));
                    p = star + 1;
                    n = covered + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&character| character == '*')
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
    fn wildcards_match_as_in_a_shell() {
        for (pattern, name, expected) in [
            ("*.jsonl", "a.jsonl", true),
            ("*.jsonl", "a.json", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-b-b-d", false),
            ("part-??.json", "part-01.json", true),
            ("part-??.json", "part-1.json", false),
            ("*", "", true),
            ("?", "ä", true),
            ("", "a", false),
        ] {
            assert_eq!(wildcard_match(pattern, name), expected, "{pattern} {name}");
        }
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
        // The list keeps its order; what a pattern finds again is not repeated, what is named again is.
        assert_eq!(names(&["b/2.jsonl", "b/*", "b/2.jsonl"]), ["b/2.jsonl", "b/1.jsonl", "b/2.jsonl"]);
        let absolute = folder.path().join("b/*").to_string_lossy().into_owned();
        let found = find_files(&[absolute], Path::new("/")).unwrap();
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn no_match_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let error = find_files(&["*.jsonl"], folder.path()).unwrap_err();
        assert_eq!(error.to_string(), "no file matches `*.jsonl`");
        let error = find_files(&["gone.jsonl"], folder.path()).unwrap_err();
        assert_eq!(error.to_string(), "no file matches `gone.jsonl`");
        let error = find_files(&["**/a.jsonl"], folder.path()).unwrap_err();
        assert!(matches!(error, SourceError::RecursivePattern { .. }));
    }
}
