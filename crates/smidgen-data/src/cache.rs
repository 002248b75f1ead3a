//! The cache of tokenized data sets.
//!
//! A cached set is named by the SHA-256 of everything that determines it: the bytes of the data files and of the
//! tokenizer, the template, and the keys of the recipe that matter. Content is hashed rather than names and times: a
//! file that was copied or touched is still the same, and one that was changed within a second is not. Hashing 2 GB
//! takes a second or two, a small part of the time that tokenizing would.
//! Entries are written whole or not at all, and are checked when they are read; two processes that write the same
//! entry write the same bytes. Everything in the folder may be deleted at any time.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use smidgen_formats::digest::Hasher;
use smidgen_formats::folder_files::is_tokenizer_file;
use smidgen_formats::model::Model;

/// Must change whenever the same input would give different tokens or a different file.
const VERSION: &str = "smidgen tokenized data 5";

/// Hashes what determines a set.
pub struct CacheKey {
    hasher: Hasher,
}

impl Default for CacheKey {
    fn default() -> CacheKey {
        let mut key = CacheKey { hasher: Hasher::sha256() };
        key.add("version", VERSION.as_bytes());
        key
    }
}

impl CacheKey {
    /// Adds a named part. Its length is hashed too, so that parts cannot run into each other.
    pub fn add(&mut self, name: &str, bytes: &[u8]) {
        self.hasher.update(format!("{name} {}\n", bytes.len()).as_bytes());
        self.hasher.update(bytes);
    }

    /// Adds the bytes of data files, and their extensions, which decide how they are read.
    pub fn add_files(&mut self, files: &[PathBuf]) -> Result<(), (PathBuf, io::Error)> {
        for path in files {
            let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
            let ending = name.split_once('.').map_or("", |(_, ending)| ending);
            self.add("file", ending.as_bytes());
            self.add_file(path).map_err(|error| (path.clone(), error))?;
        }
        Ok(())
    }

    /// Adds the files of a model's tokenizer.
    pub fn add_tokenizer(&mut self, model: &Model) -> Result<(), (PathBuf, io::Error)> {
        match model {
            Model::Folder { folder, .. } => {
                let folder = folder.path();
                let unread = |error| (folder.to_path_buf(), error);
                let mut paths = Vec::new();
                for entry in fs::read_dir(folder).map_err(unread)? {
                    let entry = entry.map_err(unread)?;
                    let is_part = entry.file_name().to_str().is_some_and(is_tokenizer_file);
                    if is_part && entry.path().is_file() {
                        paths.push(entry.path());
                    }
                }
                paths.sort();
                for path in paths {
                    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    self.add("tokenizer file", name.as_bytes());
                    self.add_file(&path).map_err(|error| (path, error))?;
                }
                Ok(())
            }
            // The vocabulary comes before the weights.
            Model::Gguf { file, .. } => {
                let head = File::open(file.path()).map(|opened| opened.take(file.data_offset()));
                let added = head.and_then(|head| self.add_reader(head));
                added.map_err(|error| (file.path().to_path_buf(), error))
            }
        }
    }

    pub fn finish(self) -> String {
        self.hasher.finish_hex()
    }

    fn add_file(&mut self, path: &Path) -> io::Result<()> {
        self.add_reader(File::open(path)?)
    }

    fn add_reader(&mut self, mut reader: impl Read) -> io::Result<()> {
        let total = io::copy(&mut reader, &mut self.hasher)?;
        self.hasher.update(format!("\n{total} bytes\n").as_bytes());
        Ok(())
    }
}

/// The path of a cached set; `None` if the cache's folder cannot be created.
pub fn cache_file(cache: &Path, key: &str) -> Option<PathBuf> {
    let folder = cache.join("tokens");
    fs::create_dir_all(&folder).ok()?;
    Some(folder.join(format!("{key}.tokens")))
}
