//! The standard ABI of MPI 5.0: handles, constants, and the functions that are used.
//!
//! In every implementation the library with this ABI is called `libmpi_abi.so.1`, and its handles have the values below.
//! Functions that end in `_c` take 64-bit counts, so no call has to be split.
//! Left out: functions that this program does not call.

use super::CommError;
use super::functions::functions;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// Handles are opaque pointers; predefined ones are small numbers.
pub type Handle = usize;

pub const COMM_WORLD: Handle = 0x101;
pub const COMM_SELF: Handle = 0x102;
pub const ERRORS_RETURN: Handle = 0x143;
pub const BYTE: Handle = 0x247;
pub const IN_PLACE: *const c_void = std::ptr::without_provenance(1);
pub const SUCCESS: c_int = 0;
pub const THREAD_SERIALIZED: c_int = 2048;
pub const MAX_ERROR_STRING: usize = 512;
pub const MAX_LIBRARY_VERSION_STRING: usize = 8192;

/// `MPI_Count` and `MPI_Aint` on every 64-bit system.
pub type Count = i64;
pub type Aint = isize;

functions! {
    abi_get_version = "MPI_Abi_get_version" (*mut c_int, *mut c_int) -> c_int;
    get_library_version = "MPI_Get_library_version" (*mut c_char, *mut c_int) -> c_int;
    init_thread = "MPI_Init_thread" (*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int;
    finalize = "MPI_Finalize" () -> c_int;
    comm_rank = "MPI_Comm_rank" (Handle, *mut c_int) -> c_int;
    comm_size = "MPI_Comm_size" (Handle, *mut c_int) -> c_int;
    comm_set_errhandler = "MPI_Comm_set_errhandler" (Handle, Handle) -> c_int;
    error_string = "MPI_Error_string" (c_int, *mut c_char, *mut c_int) -> c_int;
    barrier = "MPI_Barrier" (Handle) -> c_int;
    bcast = "MPI_Bcast_c" (*mut c_void, Count, Handle, c_int, Handle) -> c_int;
    allgather = "MPI_Allgather_c" (*const c_void, Count, Handle, *mut c_void, Count, Handle, Handle) -> c_int;
    allgatherv = "MPI_Allgatherv_c"
        (*const c_void, Count, Handle, *mut c_void, *const Count, *const Aint, Handle, Handle) -> c_int;
    alltoallv = "MPI_Alltoallv_c"
        (*const c_void, *const Count, *const Aint, Handle, *mut c_void, *const Count, *const Aint, Handle, Handle) -> c_int;
}

impl Abi {
    /// Opens a library by its path, or by its name on the loader's path.
    pub fn open(path: &Path) -> Result<Abi, CommError> {
        // SAFETY: the initializers of an MPI library need nothing from this process.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library =
            library.map_err(|error| CommError::Open { path: path.to_owned(), why: error.to_string() })?;
        let abi = Abi::resolve(library, path)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both numbers are writable; the call is allowed before MPI is initialized.
        let status = unsafe { (abi.abi_get_version)(&mut major, &mut minor) };
        if status != SUCCESS || major != 1 {
            return Err(CommError::AbiVersion { path: path.to_owned(), major, minor });
        }
        Ok(abi)
    }

    /// The implementation and its version, such as `MPICH 5.0.2`.
    pub fn version(&self) -> String {
        let mut text = vec![0; MAX_LIBRARY_VERSION_STRING];
        let mut length = 0;
        // SAFETY: the buffer has the size that the standard requires; the call is allowed before MPI is initialized.
        unsafe { (self.get_library_version)(text.as_mut_ptr().cast(), &mut length) };
        short_version(&text_of(&text, length))
    }

    /// The text of an error code.
    pub fn describe(&self, code: c_int) -> String {
        let mut text = vec![0; MAX_ERROR_STRING];
        let mut length = 0;
        // SAFETY: the buffer has the size that the standard requires.
        let status = unsafe { (self.error_string)(code, text.as_mut_ptr().cast(), &mut length) };
        match status {
            SUCCESS => text_of(&text, length),
            _ => format!("error code {code}"),
        }
    }
}

impl std::fmt::Debug for Abi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Abi").field("path", &self.path).finish_non_exhaustive()
    }
}

/// The first `length` bytes as one line of text.
fn text_of(bytes: &[u8], length: c_int) -> String {
    let length = usize::try_from(length).unwrap_or(0).min(bytes.len());
    let text = String::from_utf8_lossy(&bytes[..length]);
    let lines = text.lines().map(|line| line.trim_matches(['\0', ' ', '\t']));
    lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// The name and version from the text of `MPI_Get_library_version`, which can be a page long.
fn short_version(text: &str) -> String {
    let first = text.split("; ").next().unwrap_or_default();
    match first.strip_prefix("MPICH Version:") {
        Some(version) => format!("MPICH {}", version.trim()),
        None => first.split(" for ").next().unwrap_or_default().replace("(R)", "").replace(" Library", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_short() {
        assert_eq!(short_version("MPICH Version:      5.0.2; MPICH ABI: 18:2:6"), "MPICH 5.0.2");
        assert_eq!(short_version("Intel(R) MPI Library 2021.19 for Linux* OS"), "Intel MPI 2021.19");
        assert_eq!(short_version(""), "");
    }

    #[test]
    fn texts_have_one_line() {
        assert_eq!(text_of(b"a\t\n\n b\0", 6), "a; b");
        assert_eq!(text_of(b"abc", -1), "");
    }
}
