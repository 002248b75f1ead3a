//! Data files on disk: which files a recipe names, and their rows one at a time.
//!
//! A pattern is a path that may hold `*` and `?` in any of its parts; matches are sorted so that the
//! order of samples never depends on the file system.
//! Rows come from `.jsonl` (a JSON value a line) and `.json` (one array). Both are streamed: memory is
//! one row, whatever the file's size, and every mistake is reported with its place.
//! Leaves out what a row means, and every other file format.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Component, Path, PathBuf};

use serde::de::{DeserializeOwned, DeserializeSeed, Error as _, SeqAccess, Visitor};
use serde_json::error::Category;
use thiserror::Error;

/// What can be wrong with a data file before its rows are looked at.
#[derive(Debug, Error)]
pub enum SourceError {
    #[error("no file matches `{pattern}`")]
    NoMatch { pattern: String },
    #[error("`{pattern}` holds `**`, which is not understood")]
    RecursivePattern { pattern: String },
    #[error("cannot read `{path}`: {source}")]
    Read { path: String, source: io::Error },
    #[error("`{path}` is neither a `.json` nor a `.jsonl` file")]
    UnknownExtension { path: String },
    #[error("`{path}` does not hold a JSON array: it starts with `{found}`")]
    NotAnArray { path: String, found: char },
    #[error("{place} starts an array, but a `.jsonl` file holds one object a line")]
    ArrayInLines { place: String },
    #[error("{place}: broken JSON: {message}")]
    BrokenJson { place: String, message: String },
    #[error("{place}: {message}")]
    WrongType { place: String, message: String },
}

impl SourceError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            SourceError::NoMatch { .. } => {
                "paths in a recipe are relative to the recipe, those on the command line to the working directory"
            }
            SourceError::RecursivePattern { .. } => {
                "use one `*` for each folder level, or list several patterns"
            }
            SourceError::UnknownExtension { .. } => "write the rows as `.jsonl`, one object a line",
            SourceError::NotAnArray { .. } => {
                "a file with one object a line is named `.jsonl`; a `.json` file is one array of objects"
            }
            SourceError::ArrayInLines { .. } => "a file that is one array is named `.json`",
            SourceError::Read { .. } | SourceError::BrokenJson { .. } | SourceError::WrongType { .. } => {
                return None;
            }
        };
        Some(hint.to_owned())
    }
}

/// How rows of a file are counted; both from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowUnit {
    /// `.jsonl`: the line in the file, blank lines counted.
    Line,
    /// `.json`: the element of the array.
    Row,
}

/// Where a row stands on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPlace<'a> {
    pub file: &'a Path,
    pub unit: RowUnit,
    pub number: u64,
}

impl fmt::Display for RowPlace<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = match self.unit {
            RowUnit::Line => "line",
            RowUnit::Row => "row",
        };
        write!(out, "`{}` {unit} {}", self.file.display(), self.number)
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

/// Calls `on_row` for each row of a `.json` or `.jsonl` file, in order.
pub fn read_rows<T, E>(path: &Path, mut on_row: impl FnMut(RowPlace<'_>, T) -> Result<(), E>) -> Result<(), E>
where
    T: DeserializeOwned,
    E: From<SourceError>,
{
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("jsonl") => read_lines(path, open(path)?, &mut on_row),
        Some("json") => read_array(path, open(path)?, &mut on_row),
        _ => Err(E::from(SourceError::UnknownExtension { path: path.display().to_string() })),
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
            let Ok(entries) = std::fs::read_dir(parent) else {
                continue;
            };
            for entry in entries {
                let entry = entry.map_err(|source| read_error(parent, source))?;
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

fn read_error(path: &Path, source: io::Error) -> SourceError {
    SourceError::Read { path: path.display().to_string(), source }
}

fn open(path: &Path) -> Result<BufReader<File>, SourceError> {
    let file = File::open(path).map_err(|source| read_error(path, source))?;
    let mut reader = BufReader::with_capacity(64 * 1024, file);
    let start = reader.fill_buf().map_err(|source| read_error(path, source))?;
    if start.starts_with(b"\xEF\xBB\xBF") {
        reader.consume(3);
    }
    Ok(reader)
}

fn read_lines<T, E>(
    path: &Path,
    mut reader: BufReader<File>,
    on_row: &mut impl FnMut(RowPlace<'_>, T) -> Result<(), E>,
) -> Result<(), E>
where
    T: DeserializeOwned,
    E: From<SourceError>,
{
    let mut line = Vec::new();
    let mut number = 0;
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).map_err(|source| read_error(path, source))?;
        if read == 0 {
            return Ok(());
        }
        number += 1;
        let text = line.trim_ascii_end();
        if text.is_empty() {
            continue;
        }
        let place = RowPlace { file: path, unit: RowUnit::Line, number };
        match serde_json::from_slice(text) {
            Ok(row) => on_row(place, row)?,
            Err(_) if text.trim_ascii_start().starts_with(b"[") => {
                return Err(E::from(SourceError::ArrayInLines { place: place.to_string() }));
            }
            Err(error) => return Err(E::from(json_error(place, error))),
        }
    }
}

fn read_array<T, E>(
    path: &Path,
    mut reader: BufReader<File>,
    on_row: &mut impl FnMut(RowPlace<'_>, T) -> Result<(), E>,
) -> Result<(), E>
where
    T: DeserializeOwned,
    E: From<SourceError>,
{
    // Only what is buffered is looked at, so that lines and columns still count from the file's start.
    let buffered = reader.fill_buf().map_err(|source| read_error(path, source))?;
    let first = buffered.iter().find(|byte| !byte.is_ascii_whitespace());
    if let Some(&found) = first.filter(|&&byte| byte != b'[') {
        return Err(E::from(SourceError::NotAnArray {
            path: path.display().to_string(),
            found: char::from(found),
        }));
    }
    let mut rows = ArrayRows { path, number: 0, on_row, stopped: None, row: std::marker::PhantomData };
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    let result = (&mut rows).deserialize(&mut deserializer).and_then(|()| deserializer.end());
    match (result, rows.stopped) {
        (Ok(()), _) => Ok(()),
        (Err(_), Some(stopped)) => Err(stopped),
        (Err(error), None) => {
            let place = RowPlace { file: path, unit: RowUnit::Row, number: rows.number.max(1) };
            Err(E::from(json_error(place, error)))
        }
    }
}

/// Hands each element of an array to a callback instead of collecting them.
struct ArrayRows<'a, T, E, F> {
    path: &'a Path,
    /// The row being read, from 1.
    number: u64,
    on_row: &'a mut F,
    /// The callback's own error: serde's error type cannot carry it.
    stopped: Option<E>,
    row: std::marker::PhantomData<T>,
}

impl<'de, T, E, F> DeserializeSeed<'de> for &mut ArrayRows<'_, T, E, F>
where
    T: DeserializeOwned,
    F: FnMut(RowPlace<'_>, T) -> Result<(), E>,
{
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T, E, F> Visitor<'de> for &mut ArrayRows<'_, T, E, F>
where
    T: DeserializeOwned,
    F: FnMut(RowPlace<'_>, T) -> Result<(), E>,
{
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an array of rows")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut rows: A) -> Result<(), A::Error> {
        loop {
            self.number += 1;
            let Some(row) = rows.next_element()? else {
                self.number -= 1;
                return Ok(());
            };
            let place = RowPlace { file: self.path, unit: RowUnit::Row, number: self.number };
            if let Err(stopped) = (self.on_row)(place, row) {
                self.stopped = Some(stopped);
                return Err(A::Error::custom("stopped"));
            }
        }
    }
}

fn json_error(place: RowPlace<'_>, error: serde_json::Error) -> SourceError {
    let text = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    let message = text.strip_suffix(&position).unwrap_or(&text).to_owned();
    let file = place.file;
    // serde_json counts the columns it has passed, none for a mistake in the first.
    let column = error.column().max(1);
    let place = match place.unit {
        RowUnit::Line => format!("{place}, column {column}"),
        RowUnit::Row => format!("{place} (line {}, column {column})", error.line()),
    };
    match error.classify() {
        Category::Io => read_error(file, io::Error::from(error)),
        Category::Data => SourceError::WrongType { place, message },
        Category::Syntax | Category::Eof => SourceError::BrokenJson { place, message },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    fn rows(path: &Path) -> Result<Vec<(u64, Vec<i64>)>, SourceError> {
        let mut all = Vec::new();
        read_rows(path, |place, row: Vec<i64>| {
            all.push((place.number, row));
            Ok::<(), SourceError>(())
        })?;
        Ok(all)
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

    #[test]
    fn both_formats_give_the_same_rows() {
        let folder = tempfile::tempdir().unwrap();
        let lines = write(folder.path(), "a.jsonl", "\u{feff}[1,2]\r\n\n  \n[3]");
        let array = write(folder.path(), "a.json", "\u{feff} [ [1,2],\n [3] ]\n");
        assert_eq!(rows(&lines).unwrap(), [(1, vec![1, 2]), (4, vec![3])]);
        assert_eq!(rows(&array).unwrap(), [(1, vec![1, 2]), (2, vec![3])]);
        let empty = write(folder.path(), "e.json", "[]");
        assert_eq!(rows(&empty).unwrap(), []);
    }

    #[test]
    fn mistakes_carry_line_and_column() {
        let folder = tempfile::tempdir().unwrap();
        let said = |name: &str, text: &str| -> String {
            let path = write(folder.path(), name, text);
            let message = rows(&path).unwrap_err().to_string();
            message.replace(&format!("{}/", folder.path().display()), "")
        };
        assert_eq!(
            said("a.jsonl", "[1]\n\n  1 2\n"),
            "`a.jsonl` line 3, column 3: invalid type: integer `1`, expected a sequence"
        );
        assert_eq!(
            said("a.jsonl", "[1]\n\nnul\n"),
            "`a.jsonl` line 3, column 3: broken JSON: EOF while parsing a value"
        );
        assert_eq!(
            said("a.json", "[[1],\n [2, \"x\"]]"),
            "`a.json` row 2 (line 2, column 8): invalid type: string \"x\", expected i64"
        );
        assert_eq!(
            said("a.json", "[[1],\n [2"),
            "`a.json` row 2 (line 2, column 3): broken JSON: EOF while parsing a list"
        );
        assert_eq!(
            said("a.json", "[[1]] x"),
            "`a.json` row 1 (line 1, column 7): broken JSON: trailing characters"
        );
        assert_eq!(said("a.json", "{\"a\": 1}\n"), "`a.json` does not hold a JSON array: it starts with `{`");
        assert_eq!(
            said("a.jsonl", "[\n[1]]"),
            "`a.jsonl` line 1 starts an array, but a `.jsonl` file holds one object a line"
        );
        assert_eq!(said("a.csv", ""), "`a.csv` is neither a `.json` nor a `.jsonl` file");
        let error = rows(&folder.path().join("gone.json")).unwrap_err();
        assert!(matches!(error, SourceError::Read { .. }));
    }

    #[test]
    fn the_callback_stops_the_reading_with_its_own_error() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [("a.json", "[[1],[2],[3]]"), ("a.jsonl", "[1]\n[2]\n[3]\n")] {
            let path = write(folder.path(), name, text);
            let mut seen = 0;
            let result = read_rows(&path, |place, _: Vec<i64>| {
                seen += 1;
                match place.number {
                    2 => anyhow::bail!("enough"),
                    _ => Ok(()),
                }
            });
            assert_eq!(result.unwrap_err().to_string(), "enough");
            assert_eq!(seen, 2);
        }
    }
}
