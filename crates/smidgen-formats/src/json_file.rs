//! Reads small JSON files (`config.json`, an index, an adapter's config) with a size limit.
//! Parsed JSON takes many times its size on disk, so a wrong or malicious file could otherwise fill the
//! memory.
//! Left out: what the JSON means.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};
use thiserror::Error;

use smidgen_ir::grouped_digits::Grouped;

use crate::links::{OpenInsideError, open_inside};

/// Configs have a few KiB. Parsed into a `serde_json::Value`, they can take more than a hundred times as
/// much.
pub const MAX_CONFIG_BYTES: u64 = 1_000_000;
/// Gemma 3 lists thousands of reserved tokens in more than a megabyte.
pub const MAX_TOKENIZER_CONFIG_BYTES: u64 = 8_000_000;
/// A weight map has about 100 bytes per tensor, and the largest mixtures of experts have about 200,000
/// tensors.
pub const MAX_INDEX_BYTES: u64 = 100_000_000;

#[derive(Debug, Error)]
pub enum JsonFileError {
    #[error("`{}` could not be read: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("`{}` is not a file", path.display())]
    NotAFile { path: PathBuf },
    #[error(
        "`{}` is a link to `{}`, outside its folder; replace it with the file itself", path.display(), target.display()
    )]
    LinkOut { path: PathBuf, target: PathBuf },
    #[error(
        "`{}` has {} bytes, more than the {} allowed for it",
        path.display(), Grouped(*file_bytes), Grouped(*max_bytes)
    )]
    TooLarge { path: PathBuf, file_bytes: u64, max_bytes: u64 },
    #[error("`{}` is not the expected JSON: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
}

pub fn read_json_file<T: DeserializeOwned>(path: &Path, max_bytes: u64) -> Result<T, JsonFileError> {
    parse_json(path, &read_bytes(path, max_bytes)?)
}

/// Reads a file of at most `max_bytes`, which must be in its folder: see [`open_inside`].
pub fn read_bytes(path: &Path, max_bytes: u64) -> Result<Vec<u8>, JsonFileError> {
    let path_buf = || path.to_path_buf();
    let file = open_inside(path).map_err(|error| match error {
        OpenInsideError::Open(source) => JsonFileError::Read { path: path_buf(), source },
        OpenInsideError::NotAFile => JsonFileError::NotAFile { path: path_buf() },
        OpenInsideError::LinkOut { target } => JsonFileError::LinkOut { path: path_buf(), target },
    })?;
    read_opened(file, path, max_bytes)
}

/// Reads a file that the user chose: a link may lead anywhere.
pub fn read_chosen_bytes(path: &Path, max_bytes: u64) -> Result<Vec<u8>, JsonFileError> {
    let unreadable = |source| JsonFileError::Read { path: path.to_path_buf(), source };
    // Checked before opening, because opening a pipe would wait for a writer.
    if !fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(JsonFileError::NotAFile { path: path.to_path_buf() });
    }
    read_opened(File::open(path).map_err(unreadable)?, path, max_bytes)
}

fn read_opened(file: File, path: &Path, max_bytes: u64) -> Result<Vec<u8>, JsonFileError> {
    let unreadable = |source| JsonFileError::Read { path: path.to_path_buf(), source };
    let file_bytes = file.metadata().map_err(unreadable)?.len();
    if file_bytes > max_bytes {
        return Err(JsonFileError::TooLarge { path: path.to_path_buf(), file_bytes, max_bytes });
    }
    let mut bytes = Vec::with_capacity(file_bytes as usize);
    file.take(max_bytes).read_to_end(&mut bytes).map_err(unreadable)?;
    Ok(bytes)
}

/// Parses JSON; `path` is for the error message.
pub fn parse_json<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, JsonFileError> {
    serde_json::from_slice(bytes).map_err(|source| JsonFileError::Json { path: path.to_path_buf(), source })
}

/// The entries of a JSON object in file order, repeated keys included; serde's maps lose both.
pub struct Entries<T>(pub Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Entries<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Entries<T>, D::Error> {
        struct Collect<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Collect<T> {
            type Value = Entries<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<T>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Collect(PhantomData))
    }
}

impl<T> From<Entries<T>> for Vec<(String, T)> {
    fn from(entries: Entries<T>) -> Vec<(String, T)> {
        entries.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &Path, expected: &str) {
        let error = read_json_file::<serde_json::Value>(path, 1_000).unwrap_err();
        assert_eq!(error.to_string(), expected.replace("PATH", &path.display().to_string()));
    }

    #[test]
    fn each_failure_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        check(folder.path(), "`PATH` is not a file");
        let path = folder.path().join("config.json");
        check(&path, "`PATH` could not be read: No such file or directory (os error 2)");
        fs::write(&path, "{\n\"a\": }").unwrap();
        check(&path, "`PATH` is not the expected JSON: expected value at line 2 column 6");
        File::create(&path).unwrap().set_len(1_001).unwrap();
        check(&path, "`PATH` has 1,001 bytes, more than the 1,000 allowed for it");
    }
}
