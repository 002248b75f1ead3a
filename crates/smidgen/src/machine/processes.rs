//! Processes on this machine: which use the most memory, and which have a device file open.
//!
//! Read from Linux's `/proc`; on other systems no process is found. Inside a container only its own processes are
//! visible, and the kernel may hide the open files of other users.

use std::fs::{read_dir, read_link, read_to_string};
use std::path::{Path, PathBuf};

/// A process and its resident memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resident {
    pub process: u32,
    pub name: String,
    pub bytes: u64,
}

/// The processes with the most resident memory, without this one.
pub fn largest(count: usize) -> Vec<Resident> {
    largest_below(Path::new("/"), count, std::process::id())
}

/// The processes that have a file open, without this one.
pub fn having_open(file: &Path) -> Vec<u32> {
    having_open_below(Path::new("/"), file, std::process::id())
}

pub fn name_of(process: u32) -> Option<String> {
    let name = read_to_string(format!("/proc/{process}/comm")).ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// Folders of the processes, by their numbers.
fn processes(root: &Path) -> Vec<(u32, PathBuf)> {
    let entries = read_dir(root.join("proc")).into_iter().flatten().flatten();
    let numbered =
        entries.filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())));
    numbered.collect()
}

fn largest_below(root: &Path, count: usize, own: u32) -> Vec<Resident> {
    let resident = |(process, folder): (u32, PathBuf)| {
        let (name, bytes) = name_and_memory(&read_to_string(folder.join("status")).ok()?)?;
        Some(Resident { process, name, bytes })
    };
    let mut found: Vec<Resident> =
        processes(root).into_iter().filter(|(process, _)| *process != own).filter_map(resident).collect();
    found.sort_by_key(|resident| (std::cmp::Reverse(resident.bytes), resident.process));
    found.truncate(count);
    found
}

/// Name and resident bytes in a `status` file; `None` for threads of the kernel, which have no memory of their own.
fn name_and_memory(status: &str) -> Option<(String, u64)> {
    let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let kibibytes: u64 = value("VmRSS:")?.strip_suffix("kB")?.trim().parse().ok()?;
    Some((value("Name:")?.to_owned(), 1024 * kibibytes))
}

fn having_open_below(root: &Path, file: &Path, own: u32) -> Vec<u32> {
    let has_open = |folder: &Path| {
        let links = read_dir(folder.join("fd")).into_iter().flatten().flatten();
        links.into_iter().any(|link| read_link(link.path()).is_ok_and(|target| target == file))
    };
    let mut found: Vec<u32> = processes(root)
        .into_iter()
        .filter(|(process, folder)| *process != own && has_open(folder))
        .map(|(process, _)| process)
        .collect();
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::cgroup::test_trees::write_tree;

    #[test]
    fn the_largest_come_first() {
        let root = tempfile::tempdir().unwrap();
        let status =
            |name: &str, kib: u64| format!("Name:\t{name}\nState:\tR\nVmRSS:\t  {kib} kB\nThreads:\t1\n");
        let (small, large, own) = (status("shell", 4), status("python 3", 2048), status("smidgen", 9999));
        let files = [
            ("proc/12/status", &*small),
            ("proc/7/status", &*large),
            ("proc/8/status", &*large),
            ("proc/99/status", &*own),
            // A kernel thread, a process that just ended, and a folder that is not a process.
            ("proc/2/status", "Name:\tkthreadd\n"),
            ("proc/3/comm", "gone\n"),
            ("proc/self/status", &*large),
        ];
        write_tree(root.path(), &files);
        let of = |process, name: &str, kib: u64| Resident { process, name: name.into(), bytes: kib << 10 };
        assert_eq!(
            largest_below(root.path(), 9, 99),
            [of(7, "python 3", 2048), of(8, "python 3", 2048), of(12, "shell", 4)]
        );
        assert_eq!(largest_below(root.path(), 1, 99), [of(7, "python 3", 2048)]);
        assert_eq!(largest_below(&root.path().join("nowhere"), 9, 99), []);
    }

    #[cfg(unix)]
    #[test]
    fn open_files_are_found() {
        let root = tempfile::tempdir().unwrap();
        for (process, target) in
            [(7, "/dev/nvidia0"), (5, "/dev/nvidia0"), (8, "/dev/nvidia1"), (9, "/dev/nvidia0")]
        {
            let folder = root.path().join(format!("proc/{process}/fd"));
            std::fs::create_dir_all(&folder).unwrap();
            std::os::unix::fs::symlink("/dev/null", folder.join("0")).unwrap();
            std::os::unix::fs::symlink(target, folder.join("3")).unwrap();
        }
        assert_eq!(having_open_below(root.path(), Path::new("/dev/nvidia0"), 9), [5, 7]);
        assert_eq!(having_open_below(root.path(), Path::new("/dev/nvidia7"), 9), [] as [u32; 0]);
    }

    /// This process certainly exists, so it must be found when no process is left out.
    #[test]
    fn this_process_is_found() {
        let own = std::process::id();
        let seen = largest_below(Path::new("/"), usize::MAX, 0).into_iter().find(|it| it.process == own);
        assert_eq!(seen.is_some(), Path::new("/proc/self/status").exists());
        assert!(seen.is_none_or(|it| it.bytes > 0 && Some(it.name) == name_of(own)));
    }
}
