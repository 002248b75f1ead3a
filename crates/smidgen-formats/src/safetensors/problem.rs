//! Errors about the contents of a safetensors file, with the numbers and, where there is one, a remedy.
//! Each is wrapped in an error with the path of the file (`InFile`).
//! Left out: errors that all formats share (`open_file`), and errors about a folder of files or about
//! writing.

use ::safetensors::Dtype;
use thiserror::Error;

use crate::element::Element;
use crate::open_file::FileProblem;
use smidgen_ir::grouped_digits::Grouped;

/// Size of the header's length prefix.
pub const PREFIX_BYTES: u64 = 8;
/// The safetensors library has the same limit.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

#[derive(Debug, Error)]
pub enum SafetensorsProblem {
    #[error(transparent)]
    File(#[from] FileProblem),
    #[error(
        "the file is truncated: {} of at least {} bytes; download it again", Grouped(*file_bytes), Grouped(*needed_bytes)
    )]
    HeaderBeyondFile { file_bytes: u64, needed_bytes: u64 },
    #[error(
        "the header claims {} bytes, the limit is {}; this is not a safetensors file, or it is damaged",
        Grouped(*header_bytes), Grouped(MAX_HEADER_BYTES)
    )]
    HeaderTooLong { header_bytes: u64 },
    #[error("the header is not the expected JSON: {0}")]
    HeaderNotJson(serde_json::Error),
    #[error("the header's entry `{name}` is invalid: {source}")]
    BadEntry { name: String, source: serde_json::Error },
    #[error("tensor `{tensor}` has the element type {dtype}, which is not supported")]
    UnsupportedElement { tensor: String, dtype: Dtype },
    #[error(
        "tensor `{tensor}` of shape {shape:?} and type {element} does not fit its offsets {}..{}",
        Grouped(*begin), Grouped(*end)
    )]
    Size { tensor: String, shape: Vec<usize>, element: Element, begin: u64, end: u64 },
    #[error(
        "tensor `{tensor}` begins at {}, the tensors before it end at {}", Grouped(*begin), Grouped(*previous_end)
    )]
    NotContiguous { tensor: String, begin: u64, previous_end: u64 },
    #[error(
        "the file has {} bytes but its tensors end at {}; it is damaged, download it again",
        Grouped(*file_bytes), Grouped(*needed_bytes)
    )]
    TrailingBytes { file_bytes: u64, needed_bytes: u64 },
}
