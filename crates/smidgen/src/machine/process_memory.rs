//! Memory of this process as the kernel counts it.
//!
//! Read from `/proc/self/status`: counters are read, never reset.
//! Left out: memory of a device, and the free memory of the machine (`host.rs`).

use std::fs::File;
use std::io::Read;

/// Memory of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    pub rss_bytes: u64,
    pub peak_bytes: u64,
    /// The part of `rss_bytes` that is not page cache.
    pub anonymous_bytes: u64,
}

/// Resident memory and its peak as the kernel counts them; `None` without `/proc`.
pub fn read_rss() -> Option<HostMemory> {
    // Both lines are in the first kilobyte; the rest may be long on machines with many processors.
    let mut buffer = [0u8; 4096];
    let mut file = File::open("/proc/self/status").ok()?;
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..]).ok()? {
            0 => break,
            read => filled += read,
        }
    }
    parse_status(&buffer[..filled])
}

fn parse_status(status: &[u8]) -> Option<HostMemory> {
    let bytes_of = |name: &str| -> Option<u64> {
        status.split(|&byte| byte == b'\n').find_map(|line| {
            let value = line.strip_prefix(name.as_bytes())?;
            let value = std::str::from_utf8(value).ok()?.trim();
            let kibibytes: u64 = value.strip_suffix("kB")?.trim_end().parse().ok()?;
            Some(kibibytes * 1024)
        })
    };
    let (rss_bytes, peak_bytes) = (bytes_of("VmRSS:")?, bytes_of("VmHWM:")?);
    Some(HostMemory { rss_bytes, peak_bytes, anonymous_bytes: bytes_of("RssAnon:").unwrap_or(rss_bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn memory_is_read_from_the_kernels_text() {
        let status = b"Name:\tx\nVmPeak:\t  900 kB\nVmHWM:\t  512 kB\nVmRSS:\t  256 kB\nThreads:\t1\n";
        let memory =
            HostMemory { rss_bytes: 256 * 1024, peak_bytes: 512 * 1024, anonymous_bytes: 256 * 1024 };
        assert_eq!(parse_status(status), Some(memory));
        let status = b"VmHWM:\t  512 kB\nVmRSS:\t  256 kB\nRssAnon:\t  200 kB\nRssFile:\t   56 kB\n";
        assert_eq!(parse_status(status), Some(HostMemory { anonymous_bytes: 200 * 1024, ..memory }));
        assert_eq!(parse_status(b"Name:\tx\nVmRSS:\t1 kB\n"), None);
        let now = read_rss();
        assert_eq!(now.is_some(), Path::new("/proc/self/status").exists());
        if let Some(memory) = now {
            assert!(memory.rss_bytes > 100 * 1024);
            assert!(memory.peak_bytes > 100 * 1024);
        }
    }
}
