//! The machine that the program runs on: memory and processors.
//!
//! Free memory is the smaller of what the kernel reports and what the container allows. If neither can be read there is
//! no automatic budget, and the recipe has to set one.

use crate::failure::Failure;
use crate::machine::cgroup;
use std::fs::read_to_string;
use std::path::Path;

/// The most threads per core that a recipe may request. Machines with fewer cores than this count as having this many.
const MOST_THREADS_PER_CORE: usize = 16;

/// RAM that a process on this machine, in its container, may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostRam {
    /// Bytes that can be allocated without swapping.
    pub free_bytes: Option<u64>,
    /// Total bytes that this process could use.
    pub total_bytes: Option<u64>,
    /// A container allows less than the machine has.
    pub is_limited: bool,
}

pub fn read_ram() -> HostRam {
    read_ram_below(Path::new("/"))
}

/// Bytes that can be allocated without swapping: the lower of what the kernel and the container report.
pub fn free_memory_bytes() -> Option<u64> {
    read_ram().free_bytes
}

pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get())
}

/// The requested number of threads; 0 is one per core. Far more threads than cores only wait for each other and use
/// memory, so they are refused.
pub fn threads(asked: usize) -> Result<usize, Failure> {
    let cores = processors();
    let most = MOST_THREADS_PER_CORE * cores.max(MOST_THREADS_PER_CORE);
    match asked {
        0 => Ok(cores),
        asked if asked > most => Err(Failure::recipe(format!(
            "`memory.threads = {asked}` is more than {most}, the most for {cores} core{}",
            if cores == 1 { "" } else { "s" }
        ))
        .hint("`memory.threads = 0` uses every core once")),
        asked => Ok(asked),
    }
}

/// How many bytes a process may lock in memory.
pub fn locked_memory_limit() -> Option<LockedLimit> {
    limits_locked(&read_to_string("/proc/self/limits").ok()?)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockedLimit {
    Unlimited,
    Bytes(u64),
}

fn limits_locked(text: &str) -> Option<LockedLimit> {
    let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    Some(match line.split_whitespace().next()? {
        "unlimited" => LockedLimit::Unlimited,
        bytes => LockedLimit::Bytes(bytes.parse().ok()?),
    })
}

/// The name of the processor, or its architecture if that is unknown.
pub fn processor_name() -> String {
    let text = read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpuinfo_name(&text).unwrap_or(std::env::consts::ARCH).to_owned()
}

fn cpuinfo_name(text: &str) -> Option<&str> {
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim()).filter(|name| !name.is_empty())
}

/// The version of NVIDIA's driver, such as 570.86.15, as its kernel module reports it.
pub fn nvidia_release() -> Option<String> {
    release_of(&read_to_string("/proc/driver/nvidia/version").ok()?).map(str::to_owned)
}

fn release_of(text: &str) -> Option<&str> {
    let line = text.lines().find_map(|line| line.strip_prefix("NVRM version:"))?;
    let is_release = |word: &&str| {
        word.contains('.')
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|it| it.is_ascii_digit()))
    };
    line.split_whitespace().find(is_release)
}

/// Whether this is the Windows Subsystem for Linux.
pub fn is_wsl() -> bool {
    read_to_string("/proc/sys/kernel/osrelease").is_ok_and(|text| text.to_lowercase().contains("microsoft"))
}

/// [`read_ram`] with another root folder than `/`, for tests.
fn read_ram_below(root: &Path) -> HostRam {
    let meminfo = read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let container = cgroup::read_allowance(root);
    let total = meminfo_bytes(&meminfo, "MemTotal:");
    let limit = container.map(|container| container.limit_bytes);
    HostRam {
        free_bytes: least(
            meminfo_bytes(&meminfo, "MemAvailable:"),
            container.map(|container| container.free_bytes),
        ),
        total_bytes: least(total, limit),
        is_limited: limit.is_some_and(|limit| total.is_none_or(|total| limit < total)),
    }
}

fn least(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.into_iter().chain(other).min()
}

fn meminfo_bytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::cgroup::test_trees::write_tree;

    const MEMINFO: &str = "MemTotal:       8192 kB\nMemFree:  1 kB\nMemAvailable:   2048 kB\n";

    #[test]
    fn too_many_threads_are_refused() {
        let cores = processors();
        assert_eq!(threads(0).unwrap(), cores);
        assert_eq!(threads(256).unwrap(), 256);
        let refused = threads(1_000_000).unwrap_err();
        assert_eq!(refused.exit_code(), 2);
        assert!(refused.message.contains(&format!(", the most for {cores} core")), "{refused}");
    }

    #[test]
    fn files_of_the_kernel_are_parsed() {
        assert_eq!(meminfo_bytes(MEMINFO, "MemAvailable:"), Some(2 << 20));
        assert_eq!(meminfo_bytes(MEMINFO, "SwapFree:"), None);
        let text = "processor\t: 0\nmodel name\t: Some(R) Processor: 7\nmodel name\t: Another\n";
        assert_eq!(cpuinfo_name(text), Some("Some(R) Processor: 7"));
        assert_eq!(cpuinfo_name("model name :\n"), None);
        let limits =
            |soft: &str| limits_locked(&format!("Limit  Soft\nMax locked memory  {soft}  {soft}  bytes\n"));
        assert_eq!(limits("8388608"), Some(LockedLimit::Bytes(8 << 20)));
        assert_eq!(limits("unlimited"), Some(LockedLimit::Unlimited));
        assert_eq!(limits_locked("Max open files 5 5 files"), None);
        let modules = [
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC version: 12.3.0\n",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (archive@builder)\n",
            "GCC version:  gcc version 11.4.0\n",
        ];
        assert_eq!(modules.map(release_of), [Some("550.54.14"), Some("570.86.15"), None]);
    }

    #[test]
    fn the_lower_limit_of_machine_and_container_counts() {
        let ram = |limit: &str| {
            let root = tempfile::tempdir().unwrap();
            let files = [
                ("proc/meminfo", MEMINFO),
                ("proc/self/cgroup", "0::/job\n"),
                ("sys/fs/cgroup/job/memory.max", limit),
                ("sys/fs/cgroup/job/memory.current", "1048576\n"),
            ];
            write_tree(root.path(), &files);
            read_ram_below(root.path())
        };
        let host = |free: u64, total: u64, is_limited| HostRam {
            free_bytes: Some(free << 20),
            total_bytes: Some(total << 20),
            is_limited,
        };
        assert_eq!(ram("max\n"), host(2, 8, false));
        assert_eq!(ram("2097152\n"), host(1, 2, true));
        // The container has more free than the machine.
        assert_eq!(ram("6291456\n"), host(2, 6, true));
        assert_eq!(ram("99999999999\n"), host(2, 8, false));
        let nowhere = tempfile::tempdir().unwrap();
        assert_eq!(read_ram_below(nowhere.path()), HostRam::default());
    }

    #[test]
    fn the_memory_of_this_machine_is_read() {
        let ram = read_ram();
        assert_eq!(ram.total_bytes.is_some(), Path::new("/proc/meminfo").exists());
        assert!(ram.free_bytes.is_none_or(|free| Some(free) <= ram.total_bytes && free > 0));
    }
}
