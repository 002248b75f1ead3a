//! How fast a disk is written and read, and what that takes of the processor.
//!
//! The system's cache must not answer in the disk's place: what was written is synced, and dropped from the cache before
//! it is read. A slow disk is measured with less, so that it takes seconds in any case.

use crate::failure::Failure;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskRates {
    pub read_bytes_per_s: f64,
    pub write_bytes_per_s: f64,
    /// Of one processor, for each byte that goes either way, where the system tells.
    pub busy_s_per_byte: Option<f64>,
}

const PIECE_BYTES: usize = 4 << 20;
const LONGEST: Duration = Duration::from_millis(1500);

/// Measures the disk of a folder, which must be there, with at most so many bytes.
pub fn measure(folder: &Path, most_bytes: usize) -> Result<DiskRates, Failure> {
    let path = folder.join(format!(".smidgen-{}.disk", std::process::id()));
    let measured = measure_with(&path, most_bytes);
    // Unlinked already where all went well.
    let _ = std::fs::remove_file(&path);
    measured.map_err(|error| {
        Failure::disk(error).context(format!("the disk of `{}` could not be measured", folder.display()))
    })
}

fn measure_with(path: &Path, most_bytes: usize) -> io::Result<DiskRates> {
    let mut file = File::options().read(true).write(true).create_new(true).open(path)?;
    std::fs::remove_file(path)?;
    // Not a constant byte, which a file system may compress.
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
    // A hint; a file system without it shows the speed of memory.
    let _ = posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
}

#[cfg(not(target_os = "linux"))]
fn drop_from_cache(_file: &File) {}

/// Seconds that this thread has spent on a processor.
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
        assert!(failure.message.contains("`/no/such/folder` could not be measured"), "{failure}");
    }
}
