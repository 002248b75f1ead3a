//! Measures the read and write speed of a disk, and the CPU time that transfers take.
//!
//! The page cache must not serve the reads: written data is synced and dropped from the cache first. A slow disk is
//! measured with less data, so that the measurement takes a few seconds on any disk.

use crate::failure::Failure;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskRates {
    pub read_bytes_per_s: f64,
    pub write_bytes_per_s: f64,
    /// CPU seconds per byte read or written, if the system reports them.
    pub busy_s_per_byte: Option<f64>,
}

const PIECE_BYTES: usize = 4 << 20;
const LONGEST: Duration = Duration::from_millis(1500);

/// Measures the disk of an existing folder with at most `most_bytes` bytes.
pub fn measure(folder: &Path, most_bytes: usize) -> Result<DiskRates, Failure> {
    let path = folder.join(format!(".smidgen-{}.disk", std::process::id()));
    let measured = measure_with(&path, most_bytes);
    // Only after a failure: on success the file is already removed.
    let _ = std::fs::remove_file(&path);
    measured.map_err(|error| {
        Failure::disk(error).context(format!("cannot measure the disk of `{}`", folder.display()))
    })
}

fn measure_with(path: &Path, most_bytes: usize) -> io::Result<DiskRates> {
    let mut file = File::options().read(true).write(true).create_new(true).open(path)?;
    std::fs::remove_file(path)?;
    // Not a constant byte, because a file system may compress it.
    let mut piece: Vec<u8> = (0..PIECE_BYTES as u64).map(|index| ((index * index) >> 7) as u8).collect();
    let busy_before = busy_seconds();
    let begin = Instant::now();
    let mut bytes = 0;
    while bytes < most_bytes.max(PIECE_BYTES) && (bytes == 0 || begin.elapsed() < LONGEST) {
        file.write_all(&piece)?;
        bytes += PIECE_BYTES;
    }
    file.sync_data()?;
    let write_s = begin.elapsed().as_secs_f64();
    drop_from_cache(&file);
    file.rewind()?;
    let begin = Instant::now();
    let mut read = 0;
    while read < bytes && (read == 0 || begin.elapsed() < LONGEST) {
        file.read_exact(&mut piece)?;
        read += PIECE_BYTES;
    }
    let read_s = begin.elapsed().as_secs_f64();
    let busy_s = busy_before.zip(busy_seconds()).map(|(before, after)| after - before);
    Ok(DiskRates {
        read_bytes_per_s: read as f64 / read_s,
        write_bytes_per_s: bytes as f64 / write_s,
        busy_s_per_byte: busy_s.map(|seconds| seconds / (bytes + read) as f64),
    })
}

#[cfg(target_os = "linux")]
fn drop_from_cache(file: &File) {
    use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
    // The kernel may ignore this; then the speed of the page cache is measured.
    let _ = posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
}

#[cfg(not(target_os = "linux"))]
fn drop_from_cache(_file: &File) {}

/// CPU seconds of this thread.
fn busy_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let nanoseconds: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(nanoseconds * 1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_rates_and_nothing_stays_behind() {
        let folder = tempfile::tempdir().unwrap();
        let rates = measure(folder.path(), 2 * PIECE_BYTES).unwrap();
        assert!(rates.read_bytes_per_s > 0.0 && rates.write_bytes_per_s > 0.0);
        assert!(rates.busy_s_per_byte.is_none_or(|busy| busy > 0.0 && busy < 1e-6));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let failure = measure(Path::new("/no/such/folder"), PIECE_BYTES).unwrap_err();
        assert!(failure.message.contains("cannot measure the disk of `/no/such/folder`"), "{failure}");
    }
}
