//! Errors about the bytes of a GGUF file, with the numbers and, where there is one, a remedy.
//! Left out: errors that all formats share (`open_file`), errors about what the metadata means
//! (`model_problem`, the tokenizer), and errors about writing.

use thiserror::Error;

use super::tensor::supported_types;
use super::value::MetadataProblem;
use crate::open_file::{FileProblem, InFile};
use smidgen_ir::grouped_digits::Grouped;

pub type GgufError = InFile<GgufProblem>;

#[derive(Debug, Error)]
pub enum GgufProblem {
    #[error(transparent)]
    File(#[from] FileProblem),
    #[error(transparent)]
    Metadata(#[from] MetadataProblem),
    #[error("this is file {number} of {count} of a split model; name the first one{}", first.as_ref().map(|name| format!(", `{name}`")).unwrap_or_default())]
    NotTheFirst { number: u64, count: u64, first: Option<String> },
    #[error(
        "this is the first of {count} files of a split model, and its name does not end with `{expected}`, by which the others would be found"
    )]
    SplitName { count: u64, expected: String },
    #[error("`{name}` beside it, a file of the same model: {problem}")]
    InPart { name: String, problem: Box<GgufProblem> },
    #[error("the metadata does not say that it is file {number} of {count} of a split model")]
    OtherSplit { number: u64, count: u64 },
    #[error("the files of the split model have {got} tensors, and `split.tensors.count` is {expected}")]
    SplitTensors { expected: u64, got: usize },
    #[error(
        "the file is truncated: {what} needs {} bytes at {}, the file has {}; download it again",
        Grouped(*needed_bytes), Grouped(*at), Grouped(*file_bytes)
    )]
    HeaderBeyondFile { what: String, needed_bytes: u64, at: u64, file_bytes: u64 },
    #[error("this is not a GGUF file: it starts with {starts_with:02x?}, not with `GGUF`")]
    NotGguf { starts_with: [u8; 4] },
    #[error(
        "the file is big-endian, only little-endian GGUF is supported; download or convert it as little-endian"
    )]
    BigEndian,
    #[error("the file has GGUF version {version}; versions 2 and 3 are supported, convert the model again")]
    Version { version: u32 },
    #[error(
        "the file claims {} {what}, at least {} bytes, and has {} left; it is damaged",
        Grouped(*count), least_bytes.map_or("2^64".to_string(), |bytes| Grouped(bytes).to_string()),
        Grouped(*left_bytes)
    )]
    CountBeyondFile { what: String, count: u64, least_bytes: Option<u64>, left_bytes: u64 },
    #[error("{what} at {} is not UTF-8 text", Grouped(*at))]
    NotUtf8 { what: String, at: u64 },
    #[error("metadata key `{key}` is in the header twice")]
    DuplicateKey { key: String },
    #[error("metadata key `{key}` has the unknown value type {number} (known: 0 to 12)")]
    UnknownValueType { key: String, number: u32 },
    #[error("metadata key `{key}` is an array of arrays, which is not supported")]
    NestedArray { key: String },
    #[error("metadata key `{key}` is a bool with the byte {byte}, not 0 or 1")]
    NotABool { key: String, byte: u8 },
    #[error("`general.alignment` is {got}, not a power of two from 8 to 2^30")]
    Alignment { got: String },
    #[error("tensor `{tensor}` has {dimensions} dimensions; 1 to 4 are allowed")]
    Dimensions { tensor: String, dimensions: u32 },
    #[error("tensor `{tensor}` of dimensions {dims:?} has no elements")]
    Empty { tensor: String, dims: Vec<u64> },
    #[error("tensor `{tensor}` of dimensions {dims:?} takes more than 2^64 bytes")]
    TooLarge { tensor: String, dims: Vec<u64> },
    #[error("tensor `{tensor}` has the unknown type {number} (supported: {supported})", supported = supported_types())]
    UnknownTensorType { tensor: String, number: u32 },
    #[error(
        "tensor `{tensor}` has the type {name} ({number}), which is not supported (supported: {supported})",
        supported = supported_types()
    )]
    UnsupportedTensorType { tensor: String, name: &'static str, number: u32 },
    #[error(
        "tensor `{tensor}` has rows of {columns} elements, not a multiple of the {name} block size {block}"
    )]
    PartialBlock { tensor: String, columns: u64, block: u64, name: &'static str },
    #[error("tensor `{tensor}` begins at {}, which is not a multiple of the alignment {alignment}", Grouped(*offset))]
    Unaligned { tensor: String, offset: u64, alignment: u64 },
    #[error(
        "tensor `{tensor}` begins at {} inside tensor `{other}`, which ends at {}", Grouped(*offset), Grouped(*other_end)
    )]
    Overlap { tensor: String, offset: u64, other: String, other_end: u64 },
    #[error("tensor `{tensor}` begins at {} and has {} bytes, so it ends beyond 2^64", Grouped(*offset), Grouped(*bytes))]
    OffsetOverflow { tensor: String, offset: u64, bytes: u64 },
}
