//! The functions of NCCL that are used, and where its library is found.
//!
//! `cudarc` binds NCCL too, but opens it by names that do not include `libnccl.so.2`, the only one in NVIDIA's pip
//! packages. So the library is found and opened here: on the loader's path, in the usual folders, in pip's folders.
//! Values and signatures are those of NCCL 2; they have not changed since 2.4.
//! Left out: functions that this program does not call.

use super::CommError;
use super::functions::functions;
use crate::python_roots::nvidia_folders;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const LIBRARY: &str = "libnccl.so.2";
const REMEDY: &str =
    "`pip install nvidia-nccl-cu13` (or `-cu12` for a CUDA 12 driver), or install NCCL's package";

pub const SUCCESS: c_int = 0;
pub const IN_PROGRESS: c_int = 7;
pub const UINT8: c_int = 1;
pub const FLOAT32: c_int = 7;
pub const FLOAT64: c_int = 8;
pub const SUM: c_int = 0;

/// A communicator.
pub type Handle = *mut c_void;
/// A CUDA stream (`CUstream`).
pub type Stream = *mut c_void;

/// Passed by value, as C does.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

functions! {
    get_version = "ncclGetVersion" (*mut c_int) -> c_int;
    get_unique_id = "ncclGetUniqueId" (*mut UniqueId) -> c_int;
    comm_init_rank = "ncclCommInitRank" (*mut Handle, c_int, UniqueId, c_int) -> c_int;
    comm_destroy = "ncclCommDestroy" (Handle) -> c_int;
    comm_abort = "ncclCommAbort" (Handle) -> c_int;
    comm_get_async_error = "ncclCommGetAsyncError" (Handle, *mut c_int) -> c_int;
    get_error_string = "ncclGetErrorString" (c_int) -> *const c_char;
    get_last_error = "ncclGetLastError" (Handle) -> *const c_char;
    group_start = "ncclGroupStart" () -> c_int;
    group_end = "ncclGroupEnd" () -> c_int;
    all_reduce = "ncclAllReduce"
        (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> c_int;
    reduce = "ncclReduce"
        (*const c_void, *mut c_void, usize, c_int, c_int, c_int, Handle, Stream) -> c_int;
    reduce_scatter = "ncclReduceScatter"
        (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> c_int;
    all_gather = "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Handle, Stream) -> c_int;
    broadcast = "ncclBroadcast"
        (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> c_int;
}

impl Abi {
    /// The library, opened at the first call. It stays open.
    pub fn get() -> Result<&'static Abi, CommError> {
        static OPENED: OnceLock<Result<Abi, CommError>> = OnceLock::new();
        OPENED.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// The version, such as `2.28.9`.
    pub fn version(&self) -> String {
        let mut version = 0;
        // SAFETY: `version` is writable.
        let code = unsafe { (self.get_version)(&mut version) };
        if code == SUCCESS { version_text(version) } else { "of unknown version".to_owned() }
    }

    /// The text of an error code, with the last error of the communicator, or of the process if there is none.
    pub fn describe(&self, code: c_int, handle: Handle) -> String {
        // SAFETY: both return constant or empty text that lives as long as the library, for any code and for a
        // communicator that exists or none.
        let (text, last) = unsafe { ((self.get_error_string)(code), (self.get_last_error)(handle)) };
        let read = |text: *const c_char| {
            if text.is_null() {
                return String::new();
            }
            // SAFETY: not null, and a C string.
            unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
        };
        match (read(text), read(last)) {
            (text, last) if last.is_empty() => text,
            (text, last) => format!("{text} ({last})"),
        }
    }
}

impl std::fmt::Debug for Abi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Abi").field("path", &self.path).finish_non_exhaustive()
    }
}

fn open() -> Result<Abi, CommError> {
    let usual = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib"];
    let folders = usual.map(PathBuf::from).into_iter().chain(nvidia_folders());
    let files = folders.map(|folder| folder.join(LIBRARY)).filter(|path| path.exists());
    let mut why = None;
    for path in std::iter::once(PathBuf::from(LIBRARY)).chain(files) {
        // SAFETY: the initializers of NCCL need nothing from this process.
        match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => return Abi::resolve(library, &path),
            // A file that exists but cannot be opened explains more than a name that was not found.
            Err(error) if path.is_absolute() => {
                why = why.or(Some(CommError::Open { path, why: error.to_string() }));
            }
            Err(_) => {}
        }
    }
    Err(why.unwrap_or(CommError::Missing { what: "NCCL", file: LIBRARY, remedy: REMEDY }))
}

/// Versions are 1000 * major + 100 * minor + patch up to 2.8, and 10000 * major + 100 * minor + patch since.
fn version_text(version: c_int) -> String {
    let base = if version < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", version / base, version % base / 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_written_as_nvidia_does() {
        assert_eq!(version_text(22_809), "2.28.9");
        assert_eq!(version_text(2_708), "2.7.8");
        assert_eq!(version_text(23_001), "2.30.1");
    }

    #[test]
    fn nccl_is_opened_or_its_absence_has_a_remedy() {
        match Abi::get() {
            Ok(abi) => assert!(abi.version().starts_with("2."), "{abi:?}"),
            Err(error) => {
                assert!(error.remedy().is_some() || matches!(error, CommError::Open { .. }), "{error}")
            }
        }
    }
}
