//! What can be wrong with a data file: the message, the place in the file, and a hint.
//!
//! What can be wrong with the fields of a row is in `format_error.rs`.

use std::fmt;
use std::io;
use std::path::Path;

use smidgen_ir::grouped_digits::Grouped;
use thiserror::Error;

/// A row may have this many bytes: far more than any sample (some ten million tokens of text), far less than the memory
/// of a machine.
pub const MAX_ROW_BYTES: u64 = 16 << 20;

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// The compression that a file's name says.
    pub fn of(path: &Path) -> Compression {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some(extension) if extension.eq_ignore_ascii_case("gz") => Compression::Gzip,
            Some(extension) if extension.eq_ignore_ascii_case("zst") => Compression::Zstd,
            _ => Compression::None,
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Compression::None => "plain",
            Compression::Gzip => "gzip",
            Compression::Zstd => "zstd",
        })
    }
}

/// What can be wrong with a data file, apart from the fields of its rows.
#[derive(Debug, Error)]
pub enum SourceError {
    #[error("no file matches `{pattern}`")]
    NoMatch { pattern: String },
    #[error("`{pattern}` is not a pattern: {message}")]
    Pattern { pattern: String, message: &'static str },
    #[error("cannot read `{path}`: {source}")]
    Read { path: String, source: io::Error },
    #[error("`{path}` is a device, a pipe or a socket, not a file")]
    NotAFile { path: String },
    #[error("`{path}` is a folder without documents (`.txt`, `.md`)")]
    Folder { path: String },
    #[error(
        "`{path}` is none of `.json`, `.jsonl`, `.ndjson`, `.csv`, `.tsv`, `.txt`, `.md`, `.parquet`, plain or as `.gz` or `.zst`"
    )]
    UnknownExtension { path: String },
    #[error("`{path}` is a document of another kind than `.txt` and `.md`")]
    NeedsConverter { path: String, command: &'static str },
    #[error("`{path}` has rows, and a folder is read as documents (`.txt`, `.md`)")]
    RowsAmongDocuments { path: String },
    #[error("`{path}` is a Parquet file inside {compression}")]
    CompressedParquet { path: String, compression: Compression },
    #[error("`{path}` ends in the middle of its {compression} data")]
    CutOff { path: String, compression: Compression },
    #[error("`{path}` is damaged {compression} data: {message}")]
    Damaged { path: String, compression: Compression, message: String },
    #[error("`{path}` line {line}{} is not UTF-8: byte 0x{byte:02X}", shown_column(column))]
    NotUtf8 { path: String, line: u64, column: Option<u64>, byte: u8 },
    #[error("`{path}` line {line}: the row is longer than {} MiB", MAX_ROW_BYTES >> 20)]
    RowTooLong { path: String, line: u64 },
    #[error("`{path}` does not hold a JSON array: it starts with `{found}`")]
    NotAnArray { path: String, found: char },
    #[error("`{path}` begins with an object whose `{key}` is a list, and has more after that list")]
    MoreThanAnArray { path: String, key: String },
    #[error("{place} starts an array, but a `.jsonl` file holds one object per line")]
    ArrayInLines { place: String },
    #[error("{place}: broken JSON: {message}")]
    BrokenJson { place: String, message: String },
    #[error("{place} has {cells} cells, the header has {columns}")]
    RaggedRow { place: String, cells: usize, columns: usize },
    #[error("{place}: the header has the column `{name}` twice")]
    DuplicateColumn { place: String, name: String },
    #[error("{place}: a quote that opens in this row is never closed")]
    OpenQuote { place: String },
    #[error("{place} is lost: it comes after a quote that opens in line {opened} and is never closed")]
    AfterOpenQuote { place: String, opened: u64 },
    #[error("`{path}`: {message}")]
    BrokenTable { path: String, message: String },
    #[error("`{path}` is not a valid Parquet file: {message}")]
    BrokenParquet { path: String, message: String },
    #[error(
        "`{path}` claims {} rows in {} bytes; a file of this size may have {}", Grouped(*rows), Grouped(*file_bytes),
        Grouped(*most)
    )]
    TooManyRows { path: String, rows: u64, file_bytes: u64, most: u64 },
    #[error("{place} cannot be read: {message}")]
    BrokenParquetRow { place: String, message: String },
}

/// The parser returns cells of tables without their quotes, so the column of a byte in a cell is unknown.
fn shown_column(column: &Option<u64>) -> String {
    column.map(|column| format!(", byte column {column}")).unwrap_or_default()
}

impl SourceError {
    /// Whether the error concerns one row only, so that other rows can still be used if a reader passes it on as a row.
    pub(crate) fn is_of_one_row(&self) -> bool {
        matches!(
            self,
            SourceError::BrokenJson { .. }
                | SourceError::RaggedRow { .. }
                | SourceError::NotUtf8 { .. }
                | SourceError::OpenQuote { .. }
                | SourceError::AfterOpenQuote { .. }
                | SourceError::BrokenParquetRow { .. }
        )
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            SourceError::NoMatch { pattern } if pattern.contains(',') => {
                let folder = Path::new(pattern).parent().map(|folder| format!("{}/", folder.display()));
                let names = folder.and_then(|folder| pattern.strip_prefix(&folder)).unwrap_or(pattern);
                return Some(format!("write several files as a list: `[{names}]`"));
            }
            SourceError::NoMatch { .. } => {
                "paths in a recipe are relative to the recipe, those on the command line to the working directory"
            }
            SourceError::Pattern { .. } => {
                "`*`, `?`, `[a-z]` and `**` (any folders) have a meaning in a pattern"
            }
            SourceError::NotAFile { .. } => {
                "a data file is read more than once: write the rows into a regular file"
            }
            SourceError::Folder { path } => {
                let pattern = Path::new(path).join("*.jsonl");
                return Some(format!("name its files by a pattern, such as `{}`", pattern.display()));
            }
            SourceError::NeedsConverter { path, command } => {
                return Some(format!("`{command} {path}` makes text of it"));
            }
            SourceError::RowsAmongDocuments { path } => {
                let folder = Path::new(path).parent().unwrap_or(Path::new(""));
                let (rows, documents) = (folder.join("*.jsonl"), folder.join("**/*.md"));
                return Some(format!(
                    "name what is meant by a pattern, such as `{}` or `{}`",
                    rows.display(),
                    documents.display()
                ));
            }
            SourceError::UnknownExtension { .. } => "write the rows as `.jsonl`, one object per line",
            SourceError::CompressedParquet { .. } => {
                "decompress the file first: Parquet has its own compression and is not read from front to back"
            }
            SourceError::CutOff { .. } | SourceError::Damaged { .. } => {
                "the file may be half written or half downloaded: download it again"
            }
            SourceError::NotUtf8 { .. } => "save the file as UTF-8",
            SourceError::RowTooLong { .. } => {
                "an unclosed quote or bracket makes the rows after it part of the row"
            }
            SourceError::NotAnArray { .. } => {
                "a `.json` file is an array of objects, `{\"data\": [...]}`, or one object per line"
            }
            SourceError::MoreThanAnArray { .. } => {
                "an object around the rows has one key only; if the file has one object per line, name it `.jsonl`"
            }
            SourceError::ArrayInLines { .. } => "if the file is one array, name it `.json`",
            SourceError::RaggedRow { .. } => {
                "quote a cell that holds the separator or a line break, and double the quotes inside it"
            }
            SourceError::DuplicateColumn { .. } => "give every column its own name",
            SourceError::OpenQuote { .. } | SourceError::AfterOpenQuote { .. } => {
                "close the quote, or double a quote that belongs to the text"
            }
            SourceError::TooManyRows { .. } => {
                "rows that take less than a byte are copies: write each once, and raise `train.epochs` or the source's \
                 `weight`"
            }
            SourceError::BrokenParquet { .. } | SourceError::BrokenParquetRow { .. } => {
                "the file may be damaged or half written: write it again, or write its rows as `.jsonl`"
            }
            SourceError::Read { .. } | SourceError::BrokenJson { .. } | SourceError::BrokenTable { .. } => {
                return None;
            }
        };
        Some(hint.to_owned())
    }
}
