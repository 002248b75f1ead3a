//! Host memory that several processes of a machine share, so that offloaded frozen weights exist once per machine.
//!
//! One process creates it and sends the others its address, a path in `/proc`. Once they have opened it, they do not
//! depend on the creator. It has no name in any folder, so nothing is left behind however the processes end, and the
//! size of `/dev/shm` does not limit it.
//! Left out: who is on which machine and who fills it (the program), and pinning it (`cuda/pinned.rs`).

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

#[derive(Debug)]
pub struct SharedHost {
    file: File,
    bytes: usize,
    /// Whether this process fills it.
    is_filler: bool,
}

impl SharedHost {
    /// Creates memory for other processes to open, and allocates all of it now. The caller checks that the machine has
    /// enough: the kernel kills processes before it refuses.
    pub fn create(bytes: usize) -> io::Result<SharedHost> {
        // SAFETY: a constant name; the result is checked.
        let descriptor = unsafe { libc::memfd_create(c"smidgen".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made, and belongs to nobody else.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(bytes as u64)?;
        // SAFETY: a file of this process.
        let code = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) };
        match code {
            0 => Ok(SharedHost { file, bytes, is_filler: true }),
            code => Err(io::Error::from_raw_os_error(code)),
        }
    }

    /// The path under which other processes of the machine can open it, while this value exists.
    pub fn address(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// Opens memory that another process has created.
    pub fn open(address: &str, bytes: usize) -> io::Result<SharedHost> {
        let file = File::options().read(true).write(true).open(address)?;
        let found = file.metadata()?.len();
        if found != bytes as u64 {
            return Err(io::Error::other(format!("`{address}` has {found} bytes, not {bytes}")));
        }
        Ok(SharedHost { file, bytes, is_filler: false })
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_filler(&self) -> bool {
        self.is_filler
    }

    pub fn descriptor(&self) -> c_int {
        self.file.as_raw_fd()
    }

    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset as u64)
    }

    pub fn write_at(&self, offset: usize, from: &[u8]) -> io::Result<()> {
        self.file.write_all_at(from, offset as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn one_value_reads_what_another_wrote() {
        let made = SharedHost::create(3 << 16).unwrap();
        made.write_at(1 << 16, b"weights").unwrap();
        let opened = SharedHost::open(&made.address(), 3 << 16).unwrap();
        assert!(made.is_filler() && !opened.is_filler());
        // The memory outlives the value that created it.
        drop(made);
        let mut bytes = [0; 7];
        opened.read_at(1 << 16, &mut bytes).unwrap();
        assert_eq!(&bytes, b"weights");
    }

    #[test]
    fn another_process_can_open_it_and_it_has_no_name() {
        let made = SharedHost::create(1 << 16).unwrap();
        made.write_at(0, b"one copy").unwrap();
        let read = Command::new("head").args(["-c", "8", &made.address()]).output().unwrap();
        assert_eq!(read.stdout, b"one copy");
        let target = std::fs::read_link(made.address()).unwrap();
        assert!(!target.exists(), "{}", target.display());
    }

    #[test]
    fn memory_of_another_size_is_refused() {
        let made = SharedHost::create(1 << 16).unwrap();
        let error = SharedHost::open(&made.address(), 1 << 17).unwrap_err();
        assert!(error.to_string().contains("has 65536 bytes, not 131072"), "{error}");
        assert!(SharedHost::open("/proc/self/fd/9999", 1).is_err());
    }
}
