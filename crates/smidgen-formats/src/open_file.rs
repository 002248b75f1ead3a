//! A model file opened for reads by offset, and the errors that all formats share.
//! Reads use `pread`, so many threads can share one open file and nothing is mapped into memory.
//! Left out: the header, which each format reads and checks itself.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

use smidgen_ir::grouped_digits::Grouped;

use crate::links::{OpenInsideError, open_inside};

/// A problem with the path of its file.
#[derive(Debug, Error)]
#[error("`{}`: {problem}", path.display())]
pub struct InFile<P> {
    pub path: PathBuf,
    #[source]
    pub problem: P,
}

/// Errors of model files of any format.
#[derive(Debug, Error)]
pub enum FileProblem {
    #[error("it could not be opened: {0}")]
    Open(io::Error),
    #[error("it is not a file")]
    NotAFile,
    #[error("it is a link to `{}`, outside its folder; replace it with the file itself", target.display())]
    LinkOut { target: PathBuf },
    #[error("the header could not be read: {0}")]
    ReadHeader(io::Error),
    #[error(
        "reading {} bytes at offset {} of tensor `{tensor}` failed: {source}", Grouped(*bytes), Grouped(*byte_offset)
    )]
    ReadTensor { tensor: String, byte_offset: u64, bytes: u64, source: io::Error },
    #[error(
        "this is a Git LFS pointer and not the weights; run `git lfs pull` in its folder, or download the file itself"
    )]
    LfsPointer,
    #[error("tensor `{tensor}` is in the header twice")]
    DuplicateTensor { tensor: String },
    #[error(
        "the file is truncated: {} of at least {} bytes, tensor `{tensor}` is incomplete; download it again",
        Grouped(*file_bytes), Grouped(*needed_bytes)
    )]
    Truncated { tensor: String, file_bytes: u64, needed_bytes: u64 },
}

/// The first bytes of a Git LFS pointer.
pub(crate) const LFS_BEGINNING: &[u8; 8] = b"version ";

#[derive(Debug)]
pub(crate) struct OpenFile {
    pub path: PathBuf,
    file: File,
    pub bytes: u64,
}

impl OpenFile {
    /// Opens a file that the user chose.
    pub fn open(path: &Path) -> Result<OpenFile, FileProblem> {
        // Checked before opening, because opening a pipe would wait for a writer.
        if !fs::metadata(path).map_err(FileProblem::Open)?.is_file() {
            return Err(FileProblem::NotAFile);
        }
        OpenFile::of(path, File::open(path).map_err(FileProblem::Open)?)
    }

    /// Opens a file of a folder, which it must not leave.
    pub fn open_inside(path: &Path) -> Result<OpenFile, FileProblem> {
        let file = open_inside(path).map_err(|error| match error {
            OpenInsideError::Open(error) => FileProblem::Open(error),
            OpenInsideError::NotAFile => FileProblem::NotAFile,
            OpenInsideError::LinkOut { target } => FileProblem::LinkOut { target },
        })?;
        OpenFile::of(path, file)
    }

    fn of(path: &Path, file: File) -> Result<OpenFile, FileProblem> {
        let bytes = file.metadata().map_err(FileProblem::Open)?.len();
        Ok(OpenFile { path: path.to_path_buf(), file, bytes })
    }

    /// Fills `destination` from `offset` of the file.
    pub fn read_header(&self, offset: u64, destination: &mut [u8]) -> Result<(), FileProblem> {
        self.file.read_exact_at(destination, offset).map_err(FileProblem::ReadHeader)
    }

    /// Fills `destination` from `byte_offset` of a tensor, which is given by its name, file offset and size.
    ///
    /// # Panics
    /// If the range reaches beyond the tensor.
    pub fn read_tensor<P: From<FileProblem>>(
        &self,
        (name, file_offset, tensor_bytes): (&str, u64, u64),
        byte_offset: u64,
        destination: &mut [u8],
    ) -> Result<(), InFile<P>> {
        let bytes = destination.len() as u64;
        assert!(
            byte_offset.checked_add(bytes).is_some_and(|end| end <= tensor_bytes),
            "the range of {bytes} bytes at {byte_offset} reaches beyond the {tensor_bytes} bytes of tensor `{name}`",
        );
        self.file.read_exact_at(destination, file_offset + byte_offset).map_err(|source| {
            let tensor = name.to_string();
            let problem = FileProblem::ReadTensor { tensor, byte_offset, bytes, source }.into();
            InFile { path: self.path.clone(), problem }
        })
    }
}

/// A name that occurs twice, if any.
pub(crate) fn first_duplicate<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}
