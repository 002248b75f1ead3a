//! One tensor of a GGUF file, and the numbers and names of the format's tensor types.
//! A file lists the contiguous dimension first; here dimensions are row-major, as everywhere else.
//! Types that are known but not supported are distinguished from unknown numbers.
//! Left out: decoding blocks, which the devices do.

use smidgen_ir::{Block, DType, Storage};

/// One tensor of a file. Its bytes are inside the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    pub name: String,
    /// Row-major: the last dimension is contiguous.
    pub dims: Vec<usize>,
    pub storage: Storage,
    /// The file, counting from 0, of a model that is split over several.
    pub file: usize,
    /// From the start of the file.
    pub file_offset: u64,
    pub bytes: u64,
}

impl GgufTensor {
    /// Elements per row.
    pub fn columns(&self) -> usize {
        self.dims.last().copied().expect("a tensor has 1 to 4 dimensions")
    }

    /// All dimensions but the last, multiplied; 1 for a vector.
    pub fn rows(&self) -> usize {
        self.dims[..self.dims.len() - 1].iter().product()
    }

    pub fn row_bytes(&self) -> u64 {
        self.bytes / self.rows() as u64
    }
}

/// Number and name of each type, and its storage if it is supported.
const TYPES: [(u32, &str, Option<Storage>); 34] = [
    (0, "F32", Some(Storage::Plain(DType::F32))),
    (1, "F16", Some(Storage::Plain(DType::F16))),
    (2, "Q4_0", Some(Storage::Gguf(Block::Q4_0))),
    (3, "Q4_1", Some(Storage::Gguf(Block::Q4_1))),
    (6, "Q5_0", Some(Storage::Gguf(Block::Q5_0))),
    (7, "Q5_1", Some(Storage::Gguf(Block::Q5_1))),
    (8, "Q8_0", Some(Storage::Gguf(Block::Q8_0))),
    (9, "Q8_1", None),
    (10, "Q2_K", Some(Storage::Gguf(Block::Q2K))),
    (11, "Q3_K", Some(Storage::Gguf(Block::Q3K))),
    (12, "Q4_K", Some(Storage::Gguf(Block::Q4K))),
    (13, "Q5_K", Some(Storage::Gguf(Block::Q5K))),
    (14, "Q6_K", Some(Storage::Gguf(Block::Q6K))),
    (15, "Q8_K", None),
    (16, "IQ2_XXS", None),
    (17, "IQ2_XS", None),
    (18, "IQ3_XXS", None),
    (19, "IQ1_S", None),
    (20, "IQ4_NL", Some(Storage::Gguf(Block::Iq4Nl))),
    (21, "IQ3_S", None),
    (22, "IQ2_S", None),
    (23, "IQ4_XS", Some(Storage::Gguf(Block::Iq4Xs))),
    (24, "I8", None),
    (25, "I16", None),
    (26, "I32", None),
    (27, "I64", None),
    (28, "F64", None),
    (29, "IQ1_M", None),
    (30, "BF16", Some(Storage::Plain(DType::Bf16))),
    (34, "TQ1_0", None),
    (35, "TQ2_0", None),
    (39, "MXFP4", Some(Storage::Gguf(Block::Mxfp4))),
    (40, "NVFP4", None),
    (41, "Q1_0", None),
];

/// The name of a type, and its storage if it is supported.
pub fn tensor_type(number: u32) -> Option<(&'static str, Option<Storage>)> {
    TYPES.iter().find(|(known, ..)| *known == number).map(|&(_, name, storage)| (name, storage))
}

/// The number and name of the type that a storage has in a file; `None` if GGUF has no such type.
pub fn type_of_storage(storage: Storage) -> Option<(u32, &'static str)> {
    TYPES.iter().find(|(.., known)| *known == Some(storage)).map(|&(number, name, _)| (number, name))
}

pub(super) fn supported_types() -> String {
    let supported = TYPES.iter().filter(|(.., storage)| storage.is_some());
    supported.map(|&(_, name, _)| name).collect::<Vec<_>>().join(", ")
}

/// Elements and bytes of a block, or of one element of a plain type. Rows consist of whole pieces.
pub(super) fn piece_of(storage: Storage) -> (u64, u64) {
    match storage {
        Storage::Gguf(block) => (block.elements() as u64, block.bytes() as u64),
        Storage::Plain(dtype) => (1, dtype.bytes() as u64),
        Storage::Int8Rows
        | Storage::Fp8Rows
        | Storage::Fp8Blocks
        | Storage::Bnb4 { .. }
        | Storage::Dynamic8 { .. } => {
            unreachable!("{storage} is not a storage of GGUF files")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_has_its_number_in_the_format() {
        for block in Block::ALL.into_iter().filter(|block| !block.name().starts_with("int4")) {
            let (number, name) = type_of_storage(Storage::Gguf(block)).unwrap();
            assert_eq!(name.to_lowercase(), block.name());
            assert_eq!(tensor_type(number), Some((name, Some(Storage::Gguf(block)))));
        }
        assert_eq!(type_of_storage(Storage::Plain(DType::Bf16)), Some((30, "BF16")));
        assert_eq!(type_of_storage(Storage::Int8Rows), None);
        assert_eq!(tensor_type(16), Some(("IQ2_XXS", None)));
        assert_eq!(tensor_type(4), None);
    }

    #[test]
    fn rows_and_columns() {
        let tensor = |dims: &[usize], bytes| GgufTensor {
            name: "x".into(),
            dims: dims.to_vec(),
            storage: Storage::F32,
            file: 0,
            file_offset: 0,
            bytes,
        };
        let matrix = tensor(&[3, 8], 96);
        assert_eq!((matrix.rows(), matrix.columns(), matrix.row_bytes()), (3, 8, 32));
        let vector = tensor(&[8], 32);
        assert_eq!((vector.rows(), vector.columns(), vector.row_bytes()), (1, 8, 32));
    }
}
