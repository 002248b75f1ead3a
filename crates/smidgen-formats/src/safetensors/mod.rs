//! A safetensors file opened for reads by offset: the header is read and checked, the data stays on disk.
//! Everything in the header is checked before it is used (`header`).
//! Left out: memory mapping, writing (`write`), and converting elements (`load`).

mod header;
pub mod problem;
pub mod write;

use std::collections::BTreeMap;
use std::path::Path;

pub use header::TensorEntry;
use header::{Header, parse_header};
pub use problem::SafetensorsProblem;
use problem::{MAX_HEADER_BYTES, PREFIX_BYTES};

use crate::open_file::{FileProblem, InFile, LFS_BEGINNING, OpenFile};

pub type SafetensorsError = InFile<SafetensorsProblem>;

#[derive(Debug)]
pub struct SafetensorsFile {
    file: OpenFile,
    tensors: Vec<TensorEntry>,
    /// Positions in `tensors`, sorted by the tensors' names.
    by_name: Vec<usize>,
    metadata: BTreeMap<String, String>,
}

impl SafetensorsFile {
    /// Reads and checks the header; no tensor data is read.
    pub fn open(path: &Path) -> Result<SafetensorsFile, SafetensorsError> {
        open_checked(path).map_err(|problem| InFile { path: path.to_path_buf(), problem })
    }

    pub fn path(&self) -> &Path {
        &self.file.path
    }

    pub fn file_bytes(&self) -> u64 {
        self.file.bytes
    }

    /// The header's `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// The position in `tensors()` of the tensor with this name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.by_name
            .binary_search_by(|&position| self.tensors[position].name.as_str().cmp(name))
            .ok()
            .map(|found| self.by_name[found])
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.position(name).map(|position| &self.tensors[position])
    }

    /// Fills `destination` from `byte_offset` of a tensor of this file.
    ///
    /// # Panics
    /// If the range reaches beyond the tensor.
    pub fn read_at(
        &self,
        tensor: &TensorEntry,
        byte_offset: u64,
        destination: &mut [u8],
    ) -> Result<(), SafetensorsError> {
        self.file.read_tensor((&tensor.name, tensor.file_offset, tensor.bytes), byte_offset, destination)
    }
}

fn open_checked(path: &Path) -> Result<SafetensorsFile, SafetensorsProblem> {
    let file = OpenFile::open_inside(path)?;
    let check_size = |needed_bytes: u64| {
        if file.bytes < needed_bytes {
            Err(SafetensorsProblem::HeaderBeyondFile { file_bytes: file.bytes, needed_bytes })
        } else {
            Ok(())
        }
    };
    check_size(PREFIX_BYTES)?;
    let mut prefix = [0; PREFIX_BYTES as usize];
    file.read_header(0, &mut prefix)?;
    if &prefix == LFS_BEGINNING {
        return Err(FileProblem::LfsPointer.into());
    }
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(SafetensorsProblem::HeaderTooLong { header_bytes });
    }
    check_size(PREFIX_BYTES + header_bytes)?;
    let mut json = vec![0; header_bytes as usize];
    file.read_header(PREFIX_BYTES, &mut json)?;
    let Header { tensors, metadata } = parse_header(&json, file.bytes)?;
    let mut by_name: Vec<usize> = (0..tensors.len()).collect();
    by_name.sort_unstable_by(|&left, &right| tensors[left].name.cmp(&tensors[right].name));
    Ok(SafetensorsFile { file, tensors, by_name, metadata })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};

    fn file_bytes_of(json: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    const TWO: &str = r#"{"y":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"x":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}}"#;

    fn open_bytes(bytes: &[u8]) -> Result<SafetensorsFile, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        fs::write(&path, bytes).unwrap();
        SafetensorsFile::open(&path).map_err(|error| {
            let text = error.to_string();
            let start = format!("`{}`: ", path.display());
            text.strip_prefix(&start).expect("the error names the file").to_string()
        })
    }

    #[test]
    fn tensors_are_found_by_name_and_read_by_range() {
        let file = open_bytes(&file_bytes_of(TWO, b"yyabc")).unwrap();
        let names: Vec<&str> = file.tensors().iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["y", "x"]);
        let x = file.tensor("x").unwrap();
        assert_eq!(file.position("x"), Some(1));
        assert_eq!(file.tensor("z"), None);
        let mut two = [0; 2];
        file.read_at(x, 1, &mut two).unwrap();
        assert_eq!(&two, b"bc");
        file.read_at(x, 3, &mut []).unwrap();
    }

    #[test]
    #[should_panic(expected = "the range of 2 bytes at 2 reaches beyond the 3 bytes of tensor `x`")]
    fn reading_beyond_the_tensor_panics() {
        let file = open_bytes(&file_bytes_of(TWO, b"yyabc")).unwrap();
        let _ = file.read_at(file.tensor("x").unwrap(), 2, &mut [0; 2]);
    }

    #[test]
    fn a_file_that_shrinks_after_opening_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let bytes = file_bytes_of(TWO, b"yyabc");
        fs::write(&path, &bytes).unwrap();
        let file = SafetensorsFile::open(&path).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(bytes.len() as u64 - 1).unwrap();
        let error = file.read_at(file.tensor("x").unwrap(), 0, &mut [0; 3]).unwrap_err();
        assert_eq!(
            error.problem.to_string(),
            "reading 3 bytes at offset 0 of tensor `x` failed: failed to fill whole buffer"
        );
    }

    #[test]
    fn wrong_header_lengths_are_refused_before_anything_is_allocated() {
        let refused = |bytes: &[u8]| open_bytes(bytes).expect_err("refused");
        assert_eq!(refused(b"1234567"), "the file is truncated: 7 of at least 8 bytes; download it again");
        let mut bytes = file_bytes_of(TWO, b"yyabc");
        bytes.truncate(50);
        assert_eq!(
            refused(&bytes),
            format!("the file is truncated: 50 of at least {} bytes; download it again", 8 + TWO.len())
        );
        bytes[..8].copy_from_slice(&100_000_001_u64.to_le_bytes());
        assert_eq!(
            refused(&bytes),
            "the header claims 100,000,001 bytes, the limit is 100,000,000; \
             this is not a safetensors file, or it is damaged"
        );
        bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(refused(&bytes).starts_with("the header claims 18,446,744,073,709,551,615 bytes"));
        assert!(
            refused(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
                .starts_with("this is a Git LFS pointer and not the weights; run `git lfs pull`")
        );
    }

    #[test]
    fn errors_in_the_header_have_the_path() {
        assert_eq!(
            open_bytes(&file_bytes_of("{}", b"tail")).err().unwrap(),
            "the file has 14 bytes but its tensors end at 10; it is damaged, download it again"
        );
    }

    #[test]
    fn a_missing_file_and_a_folder_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let error = SafetensorsFile::open(&folder.path().join("no")).unwrap_err();
        assert!(matches!(error.problem, SafetensorsProblem::File(FileProblem::Open(_))));
        let error = SafetensorsFile::open(folder.path()).unwrap_err();
        assert!(matches!(error.problem, SafetensorsProblem::File(FileProblem::NotAFile)));
    }
}
