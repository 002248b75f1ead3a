//! Where pip installs packages: the folders above `bin` and `lib` of every Python environment that can be found.
//!
//! NVIDIA's libraries, NCCL and MPI all come as pip packages, so every search for a library ends here. The active
//! environment comes first, then each `python3` on PATH, the user's folder, and the system's.
//! Left out: asking Python itself, which takes longer than the rest of the start.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Folders that have `bin`, `lib` and `lib/python3.*/site-packages` in them. Some may not exist.
pub fn python_roots() -> Vec<PathBuf> {
    let mut roots = Vec::new();
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        roots.extend(std::env::var_os(variable).map(PathBuf::from));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_python = |folder: &PathBuf| folder.join("python3").exists();
    roots.extend(
        std::env::split_paths(&path).filter(is_python).filter_map(|bin| Some(bin.parent()?.to_path_buf())),
    );
    roots.extend(std::env::var_os("HOME").map(|home| Path::new(&home).join(".local")));
    roots.extend(["/usr", "/usr/local"].map(PathBuf::from));
    let mut seen = std::collections::HashSet::new();
    roots.retain(|root| seen.insert(root.clone()));
    roots
}

/// `nvidia/*/lib` of every Python environment.
pub fn nvidia_folders() -> Vec<PathBuf> {
    let mut packages = Vec::new();
    for root in python_roots() {
        for version in entries(&root.join("lib")).filter(|path| begins(path, "python3")) {
            packages.extend(["site-packages", "dist-packages"].map(|part| version.join(part).join("nvidia")));
        }
    }
    packages.iter().flat_map(|package| entries(package)).map(|package| package.join("lib")).collect()
}

/// The paths in a folder, sorted; none if it cannot be read.
pub fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    paths.sort();
    paths.into_iter()
}

/// Whether the file name of a path starts with `with`.
pub fn begins(path: &Path, with: &str) -> bool {
    path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(with))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_are_distinct_and_include_the_system() {
        let roots = python_roots();
        assert!(roots.contains(&PathBuf::from("/usr")));
        let distinct: std::collections::HashSet<&PathBuf> = roots.iter().collect();
        assert_eq!(distinct.len(), roots.len());
    }
}
