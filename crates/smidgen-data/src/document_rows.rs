//! Documents (`.txt`, `.md`): a file is one row `{"text": ...}`, and a folder is all documents in it.
//!
//! A document without any text is no row. A file that is not UTF-8 is a bad row.
//! Left out: documents of programs for writing and of browsers, which other tools turn into text.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::json_rows::RowResult;
use crate::row_place::{RowPlace, RowUnit};
use crate::source_error::SourceError;
use crate::utf8_reader::{Utf8Reader, text_error, text_of};

/// How names of documents end.
const ENDINGS: [&str; 3] = ["txt", "md", "markdown"];

/// What turns other documents into text, by how their names end.
const CONVERTERS: [(&str, &str); 8] = [
    ("html", "pandoc -t markdown"),
    ("htm", "pandoc -t markdown"),
    ("docx", "pandoc -t markdown"),
    ("odt", "pandoc -t markdown"),
    ("epub", "pandoc -t markdown"),
    ("rst", "pandoc -t markdown"),
    ("tex", "pandoc -t markdown"),
    ("pdf", "pdftotext"),
];

pub(super) fn ending(path: &Path) -> Option<String> {
    path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase)
}

/// The command that turns a document of another kind into text.
pub(super) fn converter(path: &Path) -> Option<&'static str> {
    let ending = ending(path)?;
    CONVERTERS.iter().find(|(of, _)| *of == ending).map(|(_, command)| *command)
}

pub(super) fn read_document<E>(
    path: &Path,
    mut reader: Utf8Reader,
    on_row: &mut impl FnMut(RowPlace<'_>, RowResult) -> Result<(), E>,
) -> Result<(), E>
where
    E: From<SourceError>,
{
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).map_err(|source| text_error(path, source))?;
    let place = RowPlace { file: path, unit: RowUnit::Line, number: 1 };
    match text_of(path, &bytes, 1, reader.mark_bytes()) {
        Ok(text) if text.trim().is_empty() => Ok(()),
        Ok(text) => on_row(place, Ok(json!({"text": text}))),
        Err(error) => on_row(place, Err(error)),
    }
}

/// The documents in a folder and the folders in it, sorted; hidden ones are left out. Rows, and documents that must be
/// converted first, are refused rather than left out.
pub(super) fn documents_in(folder: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let mut documents = Vec::new();
    collect(folder, &mut documents)?;
    if documents.is_empty() {
        return Err(SourceError::Folder { path: folder.display().to_string() });
    }
    documents.sort();
    Ok(documents)
}

fn collect(folder: &Path, documents: &mut Vec<PathBuf>) -> Result<(), SourceError> {
    let unreadable = |source| SourceError::Read { path: folder.display().to_string(), source };
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        // A link to a folder is not followed: it may lead back here.
        if entry.file_type().map_err(unreadable)?.is_dir() {
            collect(&path, documents)?;
            continue;
        }
        let shown = || path.display().to_string();
        match ending(&path).as_deref() {
            Some(ending) if ENDINGS.contains(&ending) => documents.push(path),
            Some("json" | "jsonl" | "ndjson" | "csv" | "tsv" | "parquet") => {
                return Err(SourceError::RowsAmongDocuments { path: shown() });
            }
            // Others are pictures and the like.
            _ => {
                if let Some(command) = converter(&path) {
                    return Err(SourceError::NeedsConverter { path: shown(), command });
                }
            }
        }
    }
    Ok(())
}
