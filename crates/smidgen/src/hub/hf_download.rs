//! Downloads one file of the hub into the cache: resumable, checked, and visible only when complete.
//!
//! Bytes are written to `CHECKSUM.smidgen.incomplete` next to the blob and stay there when a download stops
//! early, for the next attempt or the next run. Size and checksum are those that the hub states; a file
//! that does not match is deleted, and downloaded again if part of it came from an earlier run.
//! Two processes never write one file: the lock is the one that `huggingface_hub` takes.

use super::hf_cache::{RepoCache, not_written};
use super::hf_client::{Content, HubClient, RemoteFile, Repo, Trouble};
use super::meter::Meter;
use crate::console::colour::WARNING;
use crate::failure::Failure;
use smidgen_formats::digest::Hasher;
use smidgen_formats::whole_file::{folder_of, sync_folder};
use smidgen_ir::bytes::format_bytes;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

/// Attempts in a row that download next to nothing.
const ATTEMPTS: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// An attempt that downloaded at least this much does not count as failed.
const PROGRESS_BYTES: u64 = 1 << 20;
const BUFFER_BYTES: usize = 256 << 10;

/// Calls the hub until it succeeds or fails for good.
pub fn persist<T>(
    meter: &Meter,
    what: &str,
    mut call: impl FnMut() -> Result<T, (Trouble, u64)>,
) -> Result<T, Failure> {
    let mut failed = 0;
    loop {
        let (failure, gained_bytes) = match call() {
            Ok(done) => return Ok(done),
            Err((Trouble::Final(failure) | Trouble::NoRevision(failure), _)) => return Err(failure),
            Err((Trouble::Passing(failure), gained_bytes)) => (failure, gained_bytes),
        };
        failed = if gained_bytes >= PROGRESS_BYTES { 1 } else { failed + 1 };
        if failed == ATTEMPTS {
            return Err(failure
                .context(format!("cannot download {what}"))
                .hint("run the same command again: it continues where the download stopped"));
        }
        meter.say(&format!("{WARNING} {}; attempt {} of {ATTEMPTS}", failure.message, failed + 1));
        sleep(FIRST_PAUSE * (1 << (failed - 1)));
    }
}

/// Makes sure that the blob of a file is in the cache.
pub fn fetch_blob(
    client: &HubClient,
    cache: &RepoCache,
    repo: &Repo<'_>,
    commit: &str,
    file: &RemoteFile,
    meter: &Meter,
) -> Result<(), Failure> {
    let blob = cache.blob(file.checksum.hex());
    meter.begin(&file.name);
    let waiting = || meter.say(&format!("waiting for another process that downloads `{}`", file.name));
    // The lock is held until the function returns.
    let _lock = cache.lock(file.checksum.hex(), waiting)?;
    if is_whole(&blob, file.bytes) {
        meter.advance(file.bytes);
        return Ok(());
    }
    let path = blob.with_file_name(format!("{}.smidgen.incomplete", file.checksum.hex()));
    let mut partial = Partial::open(&path, file).map_err(|error| not_written(&path, error))?;
    meter.advance(partial.length);
    let mut old_bytes = partial.length;
    loop {
        persist(meter, &format!("`{}` of `hf:{}`", file.name, repo.name), || {
            let before = partial.length;
            let ended = continue_file(client, repo, commit, file, &mut partial, meter);
            ended.map_err(|trouble| (trouble, partial.length.saturating_sub(before)))
        })?;
        let found = std::mem::replace(&mut partial.hasher, Hasher::sha256()).finish_hex();
        if found == file.checksum.hex() {
            break;
        }
        meter.go_back(partial.length);
        partial.restart(file).map_err(|error| not_written(&path, error))?;
        if old_bytes == 0 {
            drop(partial);
            let _ = fs::remove_file(&path);
            return Err(Failure::network(format!(
                "`{}` of `hf:{}` arrived damaged: its {} is {found}, the hub says {}",
                file.name,
                repo.name,
                file.checksum.kind(),
                file.checksum.hex()
            ))
            .hint("it was deleted; the same command downloads it again"));
        }
        meter.say(&format!("{WARNING} the earlier part of `{}` is damaged: downloading it again", file.name));
        old_bytes = 0;
    }
    let placed = partial.file.sync_all().and_then(|()| fs::rename(&path, &blob));
    placed.map_err(|error| not_written(&blob, error))?;
    sync_folder(folder_of(&blob)).map_err(Failure::disk)?;
    meter.end(&file.name, file.bytes);
    Ok(())
}

/// Whether a blob exists. Its name is its checksum, which was verified before it got that name.
pub fn is_whole(blob: &Path, bytes: u64) -> bool {
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

/// Requests the missing part and writes it, until the file is complete or the connection ends.
fn continue_file(
    client: &HubClient,
    repo: &Repo<'_>,
    commit: &str,
    file: &RemoteFile,
    partial: &mut Partial,
    meter: &Meter,
) -> Result<(), Trouble> {
    let unwritable = |partial: &Partial, error: io::Error| {
        let failure = not_written(&partial.path, error);
        let (there, all) = (format_bytes(partial.length), format_bytes(file.bytes));
        Trouble::Final(failure.detail(format!("{there} of {all} of `{}` downloaded", file.name)))
    };
    if partial.length == file.bytes {
        return Ok(());
    }
    let Content { offset, mut reader } = client.open(repo, commit, file, partial.length)?;
    if offset < partial.length {
        meter.go_back(partial.length);
        partial.restart(file).map_err(|error| unwritable(partial, error))?;
    }
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let missing_bytes = file.bytes - partial.length;
        let count = match reader.read(&mut buffer) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                let there = format_bytes(partial.length);
                return Err(Trouble::Passing(
                    Failure::network(error)
                        .context(format!("the download of `{}` broke off after {there}", file.name)),
                ));
            }
        };
        if count == 0 && missing_bytes == 0 {
            return Ok(());
        }
        if count == 0 {
            let there = format_bytes(partial.length);
            let message = format!("the download of `{}` broke off after {there}", file.name);
            return Err(Trouble::Passing(Failure::network(message)));
        }
        if count as u64 > missing_bytes {
            let (name, bytes) = (&file.name, file.bytes);
            let message = format!("`{name}` is longer than the {bytes} bytes that the hub states");
            let _ = partial.restart(file);
            return Err(Trouble::Final(Failure::network(message)));
        }
        partial.append(&buffer[..count]).map_err(|error| unwritable(partial, error))?;
        meter.advance(count as u64);
    }
}
