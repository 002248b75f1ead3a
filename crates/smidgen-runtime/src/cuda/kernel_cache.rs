//! The folder of compiled kernels: one file for each kernel file, target, compiler and driver.
//!
//! The cache only saves time. A damaged file counts as missing and is replaced. Another driver has other file names. A
//! folder that cannot be written is reported once, and every run then compiles its kernels.
//! Files end with a hash of their content. The file of matmul algorithms (`cublas.rs`) is in the same folder.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Bytes of the hash at the end of a file.
const HASH_BYTES: usize = 8;

/// A folder of compiled kernels.
#[derive(Debug)]
pub struct KernelCache {
    folder: PathBuf,
    /// The error of the first write that failed.
    failed: OnceLock<String>,
}

impl KernelCache {
    pub fn new(folder: &Path) -> KernelCache {
        KernelCache { folder: folder.to_path_buf(), failed: OnceLock::new() }
    }

    /// The code in a file; `None` if the file is missing or damaged.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        let mut bytes = std::fs::read(self.folder.join(name)).ok()?;
        let (code, stored) = bytes.split_at_checked(bytes.len().checked_sub(HASH_BYTES)?)?;
        let is_whole = !code.is_empty() && stored == hash_bytes(code).to_le_bytes();
        bytes.truncate(bytes.len() - HASH_BYTES);
        is_whole.then_some(bytes)
    }

    /// Writes code with its hash; a failure is kept for [`KernelCache::failure`].
    pub fn write(&self, name: &str, code: &[u8]) {
        let mut bytes = code.to_vec();
        bytes.extend(hash_bytes(code).to_le_bytes());
        if let Err(error) = write_whole(&self.folder.join(name), &bytes) {
            self.failed.get_or_init(|| error.to_string());
        }
    }

    /// The reason why the next run has to compile the kernels again, and a remedy.
    pub fn failure(&self) -> Option<String> {
        let error = self.failed.get()?;
        let folder = self.folder.display();
        Some(format!(
            "compiled kernels cannot be saved in `{folder}` ({error}): every run compiles them again; \
             set `SMIDGEN_CACHE` to a folder that can be written"
        ))
    }
}

/// Writes to a temporary name and renames, so that no process reads half a file. A failure leaves nothing behind.
pub fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().map_or_else(PathBuf::new, Path::to_path_buf);
    std::fs::create_dir_all(&folder)?;
    let temporary = path.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&temporary, bytes).and_then(|()| std::fs::rename(&temporary, path)).inspect_err(|_| {
        let _ = std::fs::remove_file(&temporary);
    })
}

/// FNV-1a over all parts, with a separator after each.
pub fn hash(parts: &[&str]) -> u64 {
    fold(parts.iter().flat_map(|part| part.bytes().chain([0xff])))
}

fn hash_bytes(bytes: &[u8]) -> u64 {
    fold(bytes.iter().copied())
}

fn fold(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn code_is_read_back_and_a_damaged_file_counts_as_missing() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(&folder.path().join("cuda"));
        assert_eq!(cache.read("act.cubin"), None);
        let code: Vec<u8> = (0..=255).collect();
        cache.write("act.cubin", &code);
        assert_eq!((cache.read("act.cubin"), cache.failure()), (Some(code.clone()), None));
        let path = folder.path().join("cuda/act.cubin");
        let whole = std::fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        flipped[100] ^= 1;
        for damaged in [&flipped[..], &whole[..whole.len() - 1], &whole[..HASH_BYTES], &whole[..3], &[]] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(cache.read("act.cubin"), None, "{} bytes", damaged.len());
        }
        cache.write("act.cubin", &code);
        assert_eq!(cache.read("act.cubin"), Some(code));
    }

    /// A file with the folder's name makes writing fail even for root.
    #[test]
    fn a_folder_that_cannot_be_written_is_reported_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("cuda"), "").unwrap();
        let cache = KernelCache::new(&folder.path().join("cuda"));
        cache.write("act.cubin", b"code");
        let failure = cache.failure().unwrap();
        assert!(failure.contains("SMIDGEN_CACHE") && failure.contains("/cuda` ("), "{failure}");
        assert_eq!(cache.read("act.cubin"), None);
    }

    /// `/dev/full` acts like a full disk.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_reported_and_leaves_no_half_file() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(folder.path());
        let part = folder.path().join(format!("act.{}.part", std::process::id()));
        std::os::unix::fs::symlink("/dev/full", &part).unwrap();
        cache.write("act.cubin", b"code");
        let failure = cache.failure().unwrap();
        assert!(failure.contains("No space left"), "{failure}");
        assert_eq!(names(folder.path()), Vec::<String>::new());
    }
}
