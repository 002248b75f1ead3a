//! One repository in the cache of `huggingface_hub`, in its layout, so that each finds what the other downloaded.
//!
//! `models--org--name/` (for a data set `datasets--org--name/`) holds `blobs/` (files named by their checksum),
//! `snapshots/COMMIT/` (links to blobs under their names) and `refs/` (branch or tag to commit). `.locks/` next to it
//! holds the lock files of blobs.
//! A link is made after its blob is complete, a ref after its snapshot: whatever is visible can be used.

use crate::error::HubError;
use crate::hf_client::RepoKind;
use crate::{Want, environment};
use smidgen_formats::digest::is_hex;
use smidgen_formats::shard_index::read_weight_map;
use smidgen_formats::whole_file::write_whole;
use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

pub const SINGLE_FILE: &str = "model.safetensors";
pub const INDEX_FILE: &str = "model.safetensors.index.json";

pub struct RepoCache {
    root: PathBuf,
    /// `models--org--name` or `datasets--org--name`.
    name: String,
}

impl RepoCache {
    /// `repo` is `org/name`.
    pub fn of(kind: RepoKind, repo: &str) -> Result<RepoCache, HubError> {
        let name = format!("{}--{}", kind.plural(), repo.replace('/', "--"));
        Ok(RepoCache { root: environment::hf_cache()?, name })
    }

    /// The folder of all repositories.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The commit that a branch or a tag pointed to when it was last downloaded; a commit is itself.
    pub fn commit_of(&self, revision: &str) -> Option<String> {
        if is_hex(revision, 40) {
            return Some(revision.to_owned());
        }
        let commit = fs::read_to_string(self.folder().join("refs").join(revision)).ok()?;
        let commit = commit.trim();
        is_hex(commit, 40).then(|| commit.to_owned())
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder().join("snapshots").join(commit)
    }

    pub fn blob(&self, checksum: &str) -> PathBuf {
        self.folder().join("blobs").join(checksum)
    }

    /// Makes the folders that [`RepoCache::lock`] and [`RepoCache::link`] write to.
    pub fn make_folders(&self, commit: &str) -> Result<(), HubError> {
        let locks = self.root.join(".locks").join(&self.name);
        for folder in [self.folder().join("blobs"), self.folder().join("refs"), self.snapshot(commit), locks]
        {
            fs::create_dir_all(&folder).map_err(|error| HubError::not_written(&folder, error))?;
        }
        Ok(())
    }

    /// Waits until no other process downloads the blob. The lock is released when the returned file is closed.
    pub fn lock(&self, checksum: &str, waiting: impl FnOnce()) -> Result<File, HubError> {
        let path = self.root.join(".locks").join(&self.name).join(format!("{checksum}.lock"));
        lock_file(&path, waiting)
    }

    /// Links a blob under its name into a snapshot, replacing an earlier link.
    pub fn link(&self, commit: &str, name: &str, checksum: &str) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(name);
        let depth = 2 + name.matches('/').count();
        let target = format!("{}blobs/{checksum}", "../".repeat(depth));
        let make_link = || -> io::Result<()> {
            let folder = path.parent().unwrap_or(&path);
            fs::create_dir_all(folder)?;
            let temporary = folder.join(format!(".{checksum}.{}.link", std::process::id()));
            let _ = fs::remove_file(&temporary);
            place_link(Path::new(&target), &self.blob(checksum), &temporary)?;
            fs::rename(&temporary, &path).inspect_err(|_| {
                let _ = fs::remove_file(&temporary);
            })
        };
        make_link().map_err(|error| HubError::not_written(&path, error))
    }

    pub fn write_ref(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if revision == commit {
            return Ok(());
        }
        let path = self.folder().join("refs").join(revision);
        let folder = path.parent().unwrap_or(&path);
        fs::create_dir_all(folder).map_err(|error| HubError::not_written(folder, error))?;
        write_whole(&path, |file| file.write_all(commit.as_bytes())).map_err(HubError::disk)
    }

    fn folder(&self) -> PathBuf {
        self.root.join(&self.name)
    }
}

/// Names of the files that are missing from a snapshot. A link to a blob that is not there counts as missing.
pub fn missing_files(snapshot: &Path, want: Want) -> Vec<String> {
    let is_missing = |name: &str| !snapshot.join(name).is_file();
    let mut missing = Vec::new();
    if is_missing("config.json") {
        missing.push("config.json".to_owned());
    }
    if want == Want::Weights && is_missing(SINGLE_FILE) {
        match read_weight_map(&snapshot.join(INDEX_FILE)) {
            Err(_) => missing.push(SINGLE_FILE.to_owned()),
            Ok(map) => {
                let shards: BTreeSet<String> = map.into_values().collect();
                missing.extend(shards.into_iter().filter(|shard| is_missing(shard)));
            }
        }
    }
    missing
}

/// Opens a lock file and locks it; `waiting` is called if another process holds the lock.
pub fn lock_file(path: &Path, waiting: impl FnOnce()) -> Result<File, HubError> {
    let failed = |error: io::Error| HubError::file("lock", path, error);
    let file = File::options().create(true).append(true).open(path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::Error(error)) => Err(failed(error)),
        Err(TryLockError::WouldBlock) => {
            waiting();
            file.lock().map_err(failed)?;
            Ok(file)
        }
    }
}

#[cfg(unix)]
fn place_link(target: &Path, _blob: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

/// Symbolic links need a privilege on other systems: makes a hard link, or else a copy.
#[cfg(not(unix))]
fn place_link(_target: &Path, blob: &Path, link: &Path) -> io::Result<()> {
    fs::hard_link(blob, link).or_else(|_| fs::copy(blob, link).map(drop))
}
