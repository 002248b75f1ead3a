//! One repository in the cache of `huggingface_hub`, in its layout, so that each finds what the other downloaded.
//!
//! `models--org--name/` (of a data set `datasets--org--name/`) holds `blobs/` (files under their checksum), `snapshots/COMMIT/` (links to blobs
//! under their names) and `refs/` (branch or tag to commit); `.locks/` next to it guards the blobs.
//! A link is made after its blob is complete, a ref after its snapshot: whatever is visible can be used.

use super::{Want, environment};
use crate::failure::Failure;
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
    pub fn of(repo: &str) -> Result<RepoCache, Failure> {
        RepoCache::named("models", repo)
    }

    pub fn of_dataset(repo: &str) -> Result<RepoCache, Failure> {
        RepoCache::named("datasets", repo)
    }

    fn named(kind: &str, repo: &str) -> Result<RepoCache, Failure> {
        let name = format!("{kind}--{}", repo.replace('/', "--"));
        Ok(RepoCache { root: environment::hf_cache()?, name })
    }

    /// The folder of all repositories.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The commit of a branch, a tag or a commit when it was last downloaded.
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

    pub fn make_folders(&self, commit: &str) -> Result<(), Failure> {
        let locks = self.root.join(".locks").join(&self.name);
        for folder in [self.folder().join("blobs"), self.folder().join("refs"), self.snapshot(commit), locks]
        {
            fs::create_dir_all(&folder).map_err(|error| not_written(&folder, error))?;
        }
        Ok(())
    }

    /// Waits until no other process downloads the blob. The lock is released when the returned file is closed.
    pub fn lock(&self, checksum: &str, waiting: impl FnOnce()) -> Result<File, Failure> {
        let path = self.root.join(".locks").join(&self.name).join(format!("{checksum}.lock"));
        lock_file(&path, waiting)
    }

    /// Links a blob under its name into a snapshot, replacing an earlier link.
    pub fn link(&self, commit: &str, name: &str, checksum: &str) -> Result<(), Failure> {
        let path = self.snapshot(commit).join(name);
        let depth = 2 + name.matches('/').count();
        let target = format!("{}blobs/{checksum}", "../".repeat(depth));
        let made = || -> io::Result<()> {
            let folder = path.parent().unwrap_or(&path);
            fs::create_dir_all(folder)?;
            let temporary = folder.join(format!(".{checksum}.{}.link", std::process::id()));
            let _ = fs::remove_file(&temporary);
            place_link(Path::new(&target), &self.blob(checksum), &temporary)?;
            fs::rename(&temporary, &path).inspect_err(|_| {
                let _ = fs::remove_file(&temporary);
            })
        };
        made().map_err(|error| not_written(&path, error))
    }

    pub fn write_ref(&self, revision: &str, commit: &str) -> Result<(), Failure> {
        if revision == commit {
            return Ok(());
        }
        let path = self.folder().join("refs").join(revision);
        let folder = path.parent().unwrap_or(&path);
        fs::create_dir_all(folder).map_err(|error| not_written(folder, error))?;
        write_whole(&path, |file| file.write_all(commit.as_bytes())).map_err(Failure::disk)
    }

    fn folder(&self) -> PathBuf {
        self.root.join(&self.name)
    }
}

/// Names of the files that a snapshot lacks to be usable; a partial file counts as missing.
pub fn lacking_files(snapshot: &Path, want: Want) -> Vec<String> {
    let lacks = |name: &str| !snapshot.join(name).is_file();
    let mut lacking = Vec::new();
    if lacks("config.json") {
        lacking.push("config.json".to_owned());
    }
    if want == Want::Weights && lacks(SINGLE_FILE) {
        match read_weight_map(&snapshot.join(INDEX_FILE)) {
            Err(_) => lacking.push(SINGLE_FILE.to_owned()),
            Ok(map) => {
                let shards: BTreeSet<String> = map.into_values().collect();
                lacking.extend(shards.into_iter().filter(|shard| lacks(shard)));
            }
        }
    }
    lacking
}

/// Opens a lock file and locks it; `waiting` is called if another process holds the lock.
pub fn lock_file(path: &Path, waiting: impl FnOnce()) -> Result<File, Failure> {
    let refused = |error: io::Error| Failure::file("lock", path, error);
    let file = File::options().create(true).append(true).open(path).map_err(refused)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::Error(error)) => Err(refused(error)),
        Err(TryLockError::WouldBlock) => {
            waiting();
            file.lock().map_err(refused)?;
            Ok(file)
        }
    }
}

pub fn not_written(path: &Path, error: io::Error) -> Failure {
    let kind = error.kind();
    let failure = Failure::file("write", path, error);
    match kind {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            failure.hint("free some space, or set `HF_HOME` and `SMIDGEN_CACHE` to a larger disk")
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            failure.hint("set `HF_HOME` and `SMIDGEN_CACHE` to writable folders")
        }
        _ => failure,
    }
}

#[cfg(unix)]
fn place_link(target: &Path, _blob: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

/// Symbolic links need a privilege on other systems: a hard link, or a copy.
#[cfg(not(unix))]
fn place_link(_target: &Path, blob: &Path, link: &Path) -> io::Result<()> {
    fs::hard_link(blob, link).or_else(|_| fs::copy(blob, link).map(drop))
}
