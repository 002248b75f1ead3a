//! The machine that the program runs on: free memory and processors.
//!
//! A container's limit counts as well as what the kernel says is free. Where neither can be read there is
//! no automatic budget, and the recipe has to name one.

use std::fs::read_to_string;

/// Bytes that can be taken without swapping; the lesser of the kernel's and the container's answer.
pub fn free_memory_bytes() -> Option<u64> {
    let available =
        read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_bytes(&text, "MemAvailable:"));
    let container = container_free_bytes(
        read_to_string("/sys/fs/cgroup/memory.max").ok().as_deref(),
        read_to_string("/sys/fs/cgroup/memory.current").ok().as_deref(),
    );
    match (available, container) {
        (Some(available), Some(container)) => Some(available.min(container)),
        (available, container) => available.or(container),
    }
}

pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get())
}

/// All memory of the machine.
pub fn total_memory_bytes() -> Option<u64> {
    meminfo_bytes(&read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

/// What a container may take, where it has a limit.
pub fn container_limit_bytes() -> Option<u64> {
    read_to_string("/sys/fs/cgroup/memory.max").ok()?.trim().parse().ok()
}

/// What a process may lock in memory.
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

/// What the processor calls itself, or its architecture.
pub fn processor_name() -> String {
    let text = read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpuinfo_name(&text).unwrap_or(std::env::consts::ARCH).to_owned()
}

fn cpuinfo_name(text: &str) -> Option<&str> {
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim()).filter(|name| !name.is_empty())
}

fn meminfo_bytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

fn container_free_bytes(max: Option<&str>, current: Option<&str>) -> Option<u64> {
    let limit: u64 = max?.trim().parse().ok()?;
    Some(limit.saturating_sub(current?.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_writes() {
        let text = "MemTotal:       24580124 kB\nMemFree:  1 kB\nMemAvailable:   2048 kB\n";
        assert_eq!(meminfo_bytes(text, "MemAvailable:"), Some(2 << 20));
        assert_eq!(meminfo_bytes(text, "SwapFree:"), None);
        let text = "processor\t: 0\nmodel name\t: Some(R) Processor: 7\nmodel name\t: Another\n";
        assert_eq!(cpuinfo_name(text), Some("Some(R) Processor: 7"));
        assert_eq!(cpuinfo_name("model name :\n"), None);
        let limits =
            |soft: &str| limits_locked(&format!("Limit  Soft\nMax locked memory  {soft}  {soft}  bytes\n"));
        assert_eq!(limits("8388608"), Some(LockedLimit::Bytes(8 << 20)));
        assert_eq!(limits("unlimited"), Some(LockedLimit::Unlimited));
        assert_eq!(limits_locked("Max open files 5 5 files"), None);
        assert_eq!(container_free_bytes(Some("max\n"), Some("5\n")), None);
        assert_eq!(container_free_bytes(Some("1000\n"), Some("400\n")), Some(600));
        assert_eq!(container_free_bytes(Some("100\n"), Some("400\n")), Some(0));
    }
}
