//! Finds the CUDA libraries: the driver, cuBLASLt and NVRTC.
//!
//! The program must also start on machines without them, so nothing is linked. The search order is the loader's path,
//! the toolkit in `CUDA_HOME` or `CUDA_PATH`, `/usr/local/cuda`, and the folders of NVIDIA's pip packages. A library
//! outside the loader's path is opened by its full path; later lookups by its short name then find it.

use crate::device::DeviceError;
use crate::python_roots::{begins, entries, nvidia_folders};
use std::ffi::{CString, OsStr};
use std::path::{Path, PathBuf};

/// A library that is needed, and where it was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Library {
    pub what: &'static str,
    /// The start of the file name.
    pub file: &'static str,
    pub found: Option<PathBuf>,
    /// What to do if it is missing.
    pub remedy: &'static str,
}

const DRIVER: (&str, &str, &str) = ("driver", "libcuda.so", "install the NVIDIA driver");
const NEEDED: [(&str, &str, &str); 3] = [
    // NVRTC opens this library itself, by its short name.
    ("NVRTC's built-ins", "libnvrtc-builtins.so", "pip install nvidia-cuda-nvrtc"),
    ("NVRTC", "libnvrtc.so", "pip install nvidia-cuda-nvrtc, or install the CUDA toolkit"),
    ("cuBLASLt", "libcublasLt.so", "pip install nvidia-cublas, or install the CUDA toolkit"),
];

/// Finds every library and opens those outside the loader's path. The driver comes first.
pub fn find() -> Vec<Library> {
    let mut folders = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = std::env::var_os(variable) {
            folders
                .extend(["lib64", "lib", "targets/x86_64-linux/lib"].map(|part| Path::new(&home).join(part)));
        }
    }
    folders.push(PathBuf::from("/usr/local/cuda/lib64"));
    folders.extend(nvidia_folders());
    let (what, file, remedy) = DRIVER;
    let mut libraries = vec![Library { what, file, found: open_by_name(file, &["1"]), remedy }];
    for (what, file, remedy) in NEEDED {
        let found = open_by_name(file, &["13", "12"]).or_else(|| open_in(&folders, file));
        libraries.push(Library { what, file, found, remedy });
    }
    libraries
}

/// Finds and opens every library; the first missing one is an error.
pub fn require() -> Result<(), DeviceError> {
    match find().into_iter().find(|library| library.found.is_none()) {
        None => Ok(()),
        Some(Library { what, file, remedy, .. }) => Err(DeviceError::Library { what, file, remedy }),
    }
}

fn open_by_name(file: &str, versions: &[&str]) -> Option<PathBuf> {
    let names =
        std::iter::once(file.to_owned()).chain(versions.iter().map(|version| format!("{file}.{version}")));
    names.map(PathBuf::from).find(|name| open(name))
}

fn open_in(folders: &[PathBuf], file: &str) -> Option<PathBuf> {
    let files = folders.iter().flat_map(|folder| entries(folder));
    let mut matching: Vec<PathBuf> = files.filter(|path| begins(path, file)).collect();
    // The newest major version comes first; within a version, the order of the folders stays.
    matching.sort_by_key(|path| std::cmp::Reverse(major_version(path, file)));
    matching.into_iter().find(|path| open(path))
}

fn major_version(path: &Path, file: &str) -> u32 {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let version = name.strip_prefix(file).unwrap_or_default().trim_start_matches('.');
    version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0)
}

/// Opens a library for the whole process; it stays open.
fn open(path: &Path) -> bool {
    let Ok(name) = CString::new(path.as_os_str().as_encoded_bytes()) else { return false };
    // SAFETY: a name that ends with zero; libraries of the CUDA toolkit may be initialized at any time.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    !handle.is_null()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_names() {
        let version = |name: &str| major_version(Path::new(name), "libnvrtc.so");
        assert_eq!(version("lib/libnvrtc.so.13"), 13);
        assert_eq!(version("lib/libnvrtc.so.12.8.93"), 12);
        assert_eq!(version("lib/libnvrtc.so"), 0);
    }

    #[test]
    fn a_library_that_is_not_there_is_not_found() {
        assert_eq!(open_by_name("libthere-is-no-such-thing.so", &["1"]), None);
        assert_eq!(open_in(&[PathBuf::from("/nowhere")], "libnvrtc.so"), None);
    }
}
