//! Everything that can be wrong with a safetensors file, with the numbers and, where there is one, the remedy.
//! The file's path stands in the error around it, which is the same for every problem.
//! Left out: problems of a folder of files, and of writing.

use std::io;

use thiserror::Error;

use crate::element::Element;
use smidgen_ir::grouped_digits::Grouped;

/// The length prefix of the header.
pub const PREFIX_BYTES: u64 = 8;
/// The limit of the safetensors library.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

#[derive(Debug, Error)]
pub enum SafetensorsProblem {
    #[error("it could not be opened: {0}")]
    Open(io::Error),
    #[error("it is not a file")]
    NotAFile,
    #[error("the header could not be read: {0}")]
    ReadHeader(io::Error),
    #[error(
        "reading {} bytes at offset {} of tensor `{tensor}` failed: {source}", Grouped(*bytes), Grouped(*byte_offset)
    )]
    ReadTensor { tensor: String, byte_offset: u64, bytes: u64, source: io::Error },
    #[error("the file is truncated: {} of at least 8 bytes; download it again", Grouped(*file_bytes))]
    NoPrefix { file_bytes: u64 },
    #[error(
        "this is a Git LFS pointer and not the weights; run `git lfs pull` in its folder, or download the file itself"
    )]
    LfsPointer,
    #[error(
        "the header claims {} bytes, the limit is {}; this is not a safetensors file, or it is damaged",
        Grouped(*header_bytes), Grouped(MAX_HEADER_BYTES)
    )]
    HeaderTooLong { header_bytes: u64 },
    #[error(
        "the file is truncated: {} of at least {} bytes, the header alone has {}; download it again",
        Grouped(*file_bytes), Grouped(PREFIX_BYTES + header_bytes), Grouped(*header_bytes)
    )]
    HeaderBeyondFile { header_bytes: u64, file_bytes: u64 },
    #[error("the header is not UTF-8 text: the byte at {} is wrong", Grouped(*at))]
    HeaderNotUtf8 { at: u64 },
    #[error("the header is not a JSON object: it starts with {starts_with:?}, not '{{'")]
    HeaderNotObject { starts_with: Option<char> },
    #[error("the header is not the JSON it should be: {0}")]
    HeaderNotJson(serde_json::Error),
    #[error("the header's `__metadata__` is not a map of strings: {0}")]
    MetadataNotStrings(serde_json::Error),
    #[error("`__metadata__` stands twice in the header")]
    DuplicateMetadata,
    #[error("tensor `{tensor}` stands twice in the header")]
    DuplicateName { tensor: String },
    #[error("the header's entry for tensor `{tensor}` is not what it should be: {source}")]
    BadEntry { tensor: String, source: serde_json::Error },
    #[error("tensor `{tensor}` has the unknown element type `{dtype}`; known are {known}", known = known_elements())]
    UnknownElement { tensor: String, dtype: String },
    #[error("tensor `{tensor}` of shape {shape:?} and type {element} has more bytes than can be counted")]
    ShapeOverflow { tensor: String, shape: Vec<usize>, element: Element },
    #[error(
        "tensor `{tensor}` begins at {} and ends before it, at {}", Grouped(*begin), Grouped(*end)
    )]
    OffsetsReversed { tensor: String, begin: u64, end: u64 },
    #[error(
        "tensor `{tensor}` of shape {shape:?} and type {element} needs {} bytes, its offsets {}..{} hold {}",
        Grouped(*needed_bytes), Grouped(*begin), Grouped(*end), Grouped(end - begin)
    )]
    SizeMismatch {
        tensor: String,
        shape: Vec<usize>,
        element: Element,
        needed_bytes: u64,
        begin: u64,
        end: u64,
    },
    #[error(
        "tensor `{tensor}` begins at {} inside tensor `{other}`, which ends at {}", Grouped(*begin), Grouped(*other_end)
    )]
    Overlap { tensor: String, begin: u64, other: String, other_end: u64 },
    #[error(
        "the bytes {}..{} before tensor `{tensor}` belong to no tensor", Grouped(*hole_begin), Grouped(*begin)
    )]
    Hole { tensor: String, hole_begin: u64, begin: u64 },
    #[error(
        "the file is truncated: {} of {} bytes, tensor `{tensor}` is incomplete; download it again",
        Grouped(*file_bytes), Grouped(*needed_bytes)
    )]
    Truncated { tensor: String, file_bytes: u64, needed_bytes: u64 },
    #[error(
        "the file has {} bytes but its tensors end at {}; it is damaged, download it again",
        Grouped(*file_bytes), Grouped(*needed_bytes)
    )]
    TrailingBytes { file_bytes: u64, needed_bytes: u64 },
}

fn known_elements() -> String {
    let names: Vec<&str> = Element::ALL.iter().map(|element| element.name()).collect();
    names.join(", ")
}
