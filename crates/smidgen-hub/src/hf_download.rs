//! Downloads files of one commit into the cache: resumable, checked, and visible only when complete.
//!
//! Bytes are written to `CHECKSUM.smidgen.incomplete` next to the blob and stay there when a download stops
//! early, for the next attempt or the next run. Size and checksum are those that the hub states; a file
//! that does not match is deleted, and downloaded again if part of it came from an earlier run.
//! Two processes never write one file: they take the same lock as `huggingface_hub`.

use crate::Access;
use crate::error::HubError;
use crate::hf_cache::RepoCache;
use crate::hf_client::{Content, HubClient, Listing, RemoteFile, Repo, RequestError};
use crate::progress::Progress;
use smidgen_formats::digest::Hasher;
use smidgen_formats::whole_file::{folder_of, sync_folder};
use smidgen_ir::bytes::format_bytes;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

/// Failed attempts in a row after which a download is given up.
const ATTEMPTS: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// An attempt that downloaded at least this much does not count as failed.
const PROGRESS_BYTES: u64 = 1 << 20;
const BUFFER_BYTES: usize = 256 << 10;

/// Calls the hub until it succeeds, fails for good, or has failed too often. A failed call also returns how many bytes
/// it downloaded.
pub fn retry<T>(
    progress: &dyn Progress,
    what: &str,
    mut call: impl FnMut() -> Result<T, (RequestError, u64)>,
) -> Result<T, HubError> {
    let (mut failed, mut all_gained_bytes) = (0, 0);
    loop {
        let (error, gained_bytes) = match call() {
            Ok(done) => return Ok(done),
            Err((RequestError::Final(error) | RequestError::NoRevision(error), _)) => return Err(error),
            Err((RequestError::Temporary(error), gained_bytes)) => (error, gained_bytes),
        };
        all_gained_bytes += gained_bytes;
        failed = if gained_bytes >= PROGRESS_BYTES { 1 } else { failed + 1 };
        if failed == ATTEMPTS {
            let remedy = match all_gained_bytes {
                0 => {
                    "check the network, the proxy and `HF_ENDPOINT`; with `HF_HUB_OFFLINE=1` only what is cached is used"
                }
                _ => "run the same command again: it continues where the download stopped",
            };
            return Err(error.context(format!("cannot download {what}")).hint(remedy));
        }
        progress.warn(&format!("{error}; attempt {} of {ATTEMPTS}", failed + 1));
        sleep(FIRST_PAUSE * (1 << (failed - 1)));
    }
}

/// A download of files of one commit into the cache.
pub struct Download<'a> {
    pub client: &'a HubClient,
    pub cache: &'a RepoCache,
    pub repo: Repo<'a>,
    /// The name that messages give to the download.
    pub shown: &'a dyn std::fmt::Display,
    pub listing: &'a Listing,
    pub access: &'a Access,
}

impl Download<'_> {
    /// Downloads missing files, then links all of them and records the revision.
    pub fn place(&self, files: &[&RemoteFile]) -> Result<(), HubError> {
        let commit = &self.listing.commit;
        self.cache.make_folders(commit)?;
        let is_missing =
            |file: &&&RemoteFile| !is_complete(&self.cache.blob(file.checksum.hex()), file.bytes);
        let missing: Vec<&RemoteFile> = files.iter().filter(is_missing).copied().collect();
        if !missing.is_empty() {
            let total_bytes = missing.iter().map(|file| file.bytes).sum();
            let progress = self.access.start_progress(total_bytes);
            progress.say(&format!(
                "downloading `{}` at {}: {} files, {}",
                self.shown,
                &commit[..7],
                missing.len(),
                format_bytes(total_bytes)
            ));
            for file in missing {
                self.fetch_blob(file, &*progress)?;
            }
        }
        for file in files {
            self.cache.link(commit, &file.name, file.checksum.hex())?;
        }
        self.cache.write_ref(self.repo.revision, commit)
    }

    /// Makes sure that the blob of a file is in the cache, whose folders exist.
    pub fn fetch_blob(&self, file: &RemoteFile, progress: &dyn Progress) -> Result<(), HubError> {
        let blob = self.cache.blob(file.checksum.hex());
        progress.begin_file(&file.name);
        let waiting = || progress.say(&format!("waiting for another process that downloads `{}`", file.name));
        // The lock is held until the function returns.
        let _lock = self.cache.lock(file.checksum.hex(), waiting)?;
        if is_complete(&blob, file.bytes) {
            progress.advance(file.bytes);
            return Ok(());
        }
        let path = blob.with_file_name(format!("{}.smidgen.incomplete", file.checksum.hex()));
        let mut partial = Partial::open(&path, file).map_err(|error| HubError::not_written(&path, error))?;
        progress.advance(partial.length);
        let mut has_earlier_bytes = partial.length > 0;
        loop {
            retry(progress, &format!("`{}` of `hf:{}`", file.name, self.repo.name), || {
                let before = partial.length;
                let ended = self.continue_file(file, &mut partial, progress);
                ended.map_err(|error| (error, partial.length.saturating_sub(before)))
            })?;
            let found = std::mem::replace(&mut partial.hasher, Hasher::sha256()).finish_hex();
            if found == file.checksum.hex() {
                break;
            }
            progress.go_back(partial.length);
            partial.restart(file).map_err(|error| HubError::not_written(&path, error))?;
            if !has_earlier_bytes {
                drop(partial);
                let _ = fs::remove_file(&path);
                return Err(HubError::network(format!(
                    "`{}` of `hf:{}` arrived damaged: its {} is {found}, the hub says {}",
                    file.name,
                    self.repo.name,
                    file.checksum.kind(),
                    file.checksum.hex()
                ))
                .hint("it was deleted; the same command downloads it again"));
            }
            progress.warn(&format!("the earlier part of `{}` is damaged: downloading it again", file.name));
            has_earlier_bytes = false;
        }
        let placed = partial.file.sync_all().and_then(|()| fs::rename(&path, &blob));
        placed.map_err(|error| HubError::not_written(&blob, error))?;
        sync_folder(folder_of(&blob)).map_err(HubError::disk)?;
        progress.end_file(&file.name, file.bytes);
        Ok(())
    }

    /// Requests the missing part and writes it, until the file is complete or the connection ends.
    fn continue_file(
        &self,
        file: &RemoteFile,
        partial: &mut Partial,
        progress: &dyn Progress,
    ) -> Result<(), RequestError> {
        let not_written = |partial: &Partial, error: io::Error| {
            let error = HubError::not_written(&partial.path, error);
            let (there, all) = (format_bytes(partial.length), format_bytes(file.bytes));
            RequestError::Final(error.detail(format!("{there} of {all} of `{}` downloaded", file.name)))
        };
        if partial.length == file.bytes {
            return Ok(());
        }
        let Content { offset, mut reader } =
            self.client.open(&self.repo, &self.listing.commit, file, partial.length)?;
        if offset < partial.length {
            progress.go_back(partial.length);
            partial.restart(file).map_err(|error| not_written(partial, error))?;
        }
        let broke_off = |partial: &Partial| {
            format!("the download of `{}` broke off after {}", file.name, format_bytes(partial.length))
        };
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let missing_bytes = file.bytes - partial.length;
            let count = match reader.read(&mut buffer) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let error = HubError::network(error).context(broke_off(partial));
                    return Err(RequestError::Temporary(error));
                }
            };
            if count == 0 && missing_bytes == 0 {
                return Ok(());
            }
            if count == 0 {
                return Err(RequestError::Temporary(HubError::network(broke_off(partial))));
            }
            if count as u64 > missing_bytes {
                let (name, bytes) = (&file.name, file.bytes);
                let message = format!("`{name}` is longer than the {bytes} bytes that the hub states");
                let _ = partial.restart(file);
                return Err(RequestError::Final(HubError::network(message)));
            }
            partial.append(&buffer[..count]).map_err(|error| not_written(partial, error))?;
            progress.advance(count as u64);
        }
    }
}

/// Whether a blob exists. Its name is its checksum, which was verified before it got that name.
fn is_complete(blob: &Path, bytes: u64) -> bool {
    blob.metadata().is_ok_and(|found| found.is_file() && found.len() == bytes)
}

/// A partly downloaded file: its bytes so far and their hash.
struct Partial {
    path: PathBuf,
    file: File,
    length: u64,
    hasher: Hasher,
}

impl Partial {
    fn open(path: &Path, remote: &RemoteFile) -> io::Result<Partial> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        let hasher = remote.checksum.hasher(remote.bytes);
        let mut partial = Partial { path: path.to_path_buf(), file, length: 0, hasher };
        if partial.file.metadata()?.len() > remote.bytes {
            partial.restart(remote)?;
        }
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let count = partial.file.read(&mut buffer)?;
            if count == 0 {
                return Ok(partial);
            }
            partial.hasher.update(&buffer[..count]);
            partial.length += count as u64;
        }
    }

    fn restart(&mut self, remote: &RemoteFile) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.length = 0;
        self.hasher = remote.checksum.hasher(remote.bytes);
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        // A failed write can leave bytes that are not in the hash.
        let written = self.file.write_all(bytes);
        if written.is_err() {
            let _ = self.file.set_len(self.length);
        }
        written?;
        self.hasher.update(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }
}
