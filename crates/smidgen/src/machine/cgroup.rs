//! Memory limits of containers: the limits of this process's control groups, and what is free within them.
//!
//! Groups are nested and every ancestor's limit applies, so the smallest remainder counts. Both versions are read: 2
//! (`memory.max`, `memory.high`) and 1 (`memory.limit_in_bytes`). Inactive file pages count as free, because the kernel
//! drops them first. Everything is read below a root folder, which is `/` outside of tests.
//! Left out: swap, which plans never use.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    pub limit_bytes: u64,
    /// Free within the limit.
    pub free_bytes: u64,
}

/// The smallest limit and the smallest remainder of the groups of this process; `None` if no group has a limit.
pub fn read_allowance(root: &Path) -> Option<Allowance> {
    let groups = read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounted = root.join("sys/fs/cgroup");
    let mut least: Option<Allowance> = None;
    for line in groups.lines() {
        let Some((mount, files, path)) = place_of(line, &mounted) else { continue };
        for folder in folder_and_ancestors(&mount, path) {
            let Some(found) = read_group(&folder, files) else { continue };
            least = Some(least.map_or(found, |least| Allowance {
                limit_bytes: least.limit_bytes.min(found.limit_bytes),
                free_bytes: least.free_bytes.min(found.free_bytes),
            }));
        }
    }
    least
}

/// The names of the files of a version of control groups.
#[derive(Clone, Copy)]
struct Files {
    limits: &'static [&'static str],
    usage: &'static str,
    /// The line of `memory.stat` with the pages of files that were not used lately.
    reclaimable: &'static str,
}

const VERSION_2: Files =
    Files { limits: &["memory.max", "memory.high"], usage: "memory.current", reclaimable: "inactive_file" };
const VERSION_1: Files = Files {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};

/// The mount, the files and the path of the group in a line of `/proc/self/cgroup` (`ID:CONTROLLERS:PATH`), if it
/// limits memory.
fn place_of<'a>(line: &'a str, mounted: &Path) -> Option<(PathBuf, Files, &'a str)> {
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    match controllers {
        "" => Some((mounted.to_path_buf(), VERSION_2, path)),
        names if names.split(',').any(|name| name == "memory") => {
            Some((mounted.join("memory"), VERSION_1, path))
        }
        _ => None,
    }
}

/// The folders from a group up to the mount. In a container the path may be that of the machine, so that only the mount
/// exists.
fn folder_and_ancestors(mount: &Path, path: &str) -> Vec<PathBuf> {
    let names: Vec<&str> = path.split('/').filter(|name| !["", ".", ".."].contains(name)).collect();
    (0..=names.len()).rev().map(|depth| mount.join(names[..depth].join("/"))).collect()
}

/// `None` if the group does not exist or has no limit. The root group of version 1 has a limit that nothing reaches.
fn read_group(folder: &Path, files: Files) -> Option<Allowance> {
    let number = |name: &str| read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let limit_bytes = files.limits.iter().filter_map(|name| number(name)).min()?;
    let stat = read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let used = number(files.usage)?.saturating_sub(stat_bytes(&stat, files.reclaimable).unwrap_or(0));
    Some(Allowance { limit_bytes, free_bytes: limit_bytes.saturating_sub(used) })
}

fn stat_bytes(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
pub mod test_trees {
    use std::path::Path;

    /// Writes files below a folder.
    pub fn write_tree(root: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::test_trees::write_tree;
    use super::*;

    fn allowance(files: &[(&str, &str)]) -> Option<(u64, u64)> {
        let root = tempfile::tempdir().unwrap();
        write_tree(root.path(), files);
        read_allowance(root.path()).map(|found| (found.limit_bytes, found.free_bytes))
    }

    #[test]
    fn the_smallest_remainder_of_all_ancestors_counts() {
        let nested = [
            ("proc/self/cgroup", "0::/a/b/c\n"),
            ("sys/fs/cgroup/a/b/c/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/c/memory.current", "50\n"),
            // Leaves 1000 - 400.
            ("sys/fs/cgroup/a/b/memory.max", "1000\n"),
            ("sys/fs/cgroup/a/b/memory.current", "400\n"),
            // A smaller limit, and less in use: leaves 900 - 100.
            ("sys/fs/cgroup/a/memory.max", "900\n"),
            ("sys/fs/cgroup/a/memory.current", "100\n"),
        ];
        assert_eq!(allowance(&nested), Some((900, 600)));
    }

    #[test]
    fn pages_that_the_kernel_would_drop_are_free() {
        let stat = "anon 100\nfile 300\ninactive_anon 7\ninactive_file 250\nactive_file 50\n";
        let group = [
            ("proc/self/cgroup", "0::/job\n"),
            ("sys/fs/cgroup/job/memory.max", "1000\n"),
            ("sys/fs/cgroup/job/memory.current", "400\n"),
            ("sys/fs/cgroup/job/memory.stat", stat),
        ];
        assert_eq!(allowance(&group), Some((1000, 850)));
        let mut more = group.to_vec();
        // Above `memory.high` the kernel slows the group down.
        more.push(("sys/fs/cgroup/job/memory.high", "700\n"));
        assert_eq!(allowance(&more), Some((700, 550)));
    }

    #[test]
    fn a_container_sees_its_own_group_as_the_mount() {
        for path in ["/", "/docker/0a1b2c", "/../../outside"] {
            let line = format!("0::{path}\n");
            let group = [
                ("proc/self/cgroup", line.as_str()),
                ("sys/fs/cgroup/memory.max", "1000\n"),
                ("sys/fs/cgroup/memory.current", "400\n"),
            ];
            assert_eq!(allowance(&group), Some((1000, 600)), "{path}");
        }
    }

    #[test]
    fn version_1_has_other_names() {
        let groups = [
            ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/x/y\n1:cpuset:/z\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "4000\n"),
            ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "2000\n"),
            ("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "1900\n"),
            ("sys/fs/cgroup/memory/x/memory.stat", "inactive_file 5\ntotal_inactive_file 400\n"),
            ("sys/fs/cgroup/memory/x/y/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/x/y/memory.usage_in_bytes", "100\n"),
        ];
        assert_eq!(allowance(&groups), Some((1000, 500)));
    }

    #[test]
    fn a_group_without_a_limit_is_ignored() {
        assert_eq!(allowance(&[]), None);
        assert_eq!(allowance(&[("proc/self/cgroup", "0::/a\n1:cpu:/\nnonsense\n")]), None);
        let unlimited = [
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.current", "5\n"),
        ];
        assert_eq!(allowance(&unlimited), None);
        // More is in use than the limit.
        let over = [
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "100\n"),
            ("sys/fs/cgroup/memory.current", "400\n"),
        ];
        assert_eq!(allowance(&over), Some((100, 0)));
    }
}
