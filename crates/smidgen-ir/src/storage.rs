//! How numbers lie in memory: element types and the storage formats of frozen weights.
//!
//! A format is one enum variant with an exact size; the decoders live with the devices.
//! Sizes count everything that a format needs beside the codes themselves (scales, nested scales,
//! offsets), because a plan that forgets them is wrong by several percent.

use std::fmt;

/// An element that operations compute or count with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    Bf16,
    F16,
    F64,
    I32,
    U64,
}

impl DType {
    pub const fn bytes(self) -> usize {
        match self {
            DType::Bf16 | DType::F16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::U64 => 8,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::F64 => "f64",
            DType::I32 => "i32",
            DType::U64 => "u64",
        })
    }
}

/// A GGUF block format: `elements` numbers of one row in `bytes` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Block {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl Block {
    pub const ALL: [Block; 8] =
        [Block::Q4_0, Block::Q4_1, Block::Q5_0, Block::Q5_1, Block::Q8_0, Block::Q4K, Block::Q5K, Block::Q6K];

    pub const fn elements(self) -> usize {
        match self {
            Block::Q4_0 | Block::Q4_1 | Block::Q5_0 | Block::Q5_1 | Block::Q8_0 => 32,
            Block::Q4K | Block::Q5K | Block::Q6K => 256,
        }
    }

    pub const fn bytes(self) -> usize {
        match self {
            Block::Q4_0 => 18,
            Block::Q4_1 => 20,
            Block::Q5_0 => 22,
            Block::Q5_1 => 24,
            Block::Q8_0 => 34,
            Block::Q4K => 144,
            Block::Q5K => 176,
            Block::Q6K => 210,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Block::Q4_0 => "q4_0",
            Block::Q4_1 => "q4_1",
            Block::Q5_0 => "q5_0",
            Block::Q5_1 => "q5_1",
            Block::Q8_0 => "q8_0",
            Block::Q4K => "q4_k",
            Block::Q5K => "q5_k",
            Block::Q6K => "q6_k",
        }
    }
}

/// How the elements of a value lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Storage {
    /// One element after the other.
    Plain(DType),
    /// One signed byte an element and one f32 scale a row.
    Int8Rows,
    /// 4-bit codes in blocks of 64 with an f32 scale each; with `double`, the scales are bytes in
    /// groups of 256 with an f32 scale each, and one f32 offset a tensor.
    Nf4 { double: bool },
    /// GGUF blocks along each row.
    Gguf(Block),
}

const NF4_BLOCK: usize = 64;
const NF4_GROUP: usize = 256;

impl Storage {
    pub const F32: Storage = Storage::Plain(DType::F32);

    /// Bytes of a matrix of `rows` by `columns`.
    pub fn bytes(self, rows: usize, columns: usize) -> usize {
        let elements = rows * columns;
        match self {
            Storage::Plain(dtype) => elements * dtype.bytes(),
            Storage::Int8Rows => elements + 4 * rows,
            Storage::Nf4 { double } => {
                let blocks = elements.div_ceil(NF4_BLOCK);
                let scales = if double { blocks + 4 * blocks.div_ceil(NF4_GROUP) + 4 } else { 4 * blocks };
                elements.div_ceil(2) + scales
            }
            Storage::Gguf(block) => rows * columns.div_ceil(block.elements()) * block.bytes(),
        }
    }

    /// The element type, where elements can be addressed one by one.
    pub fn plain(self) -> Option<DType> {
        match self {
            Storage::Plain(dtype) => Some(dtype),
            Storage::Int8Rows | Storage::Nf4 { .. } | Storage::Gguf(_) => None,
        }
    }

    /// Whether a row's bytes lie together, so that some rows of a matrix are a matrix of their own.
    pub fn rows_lie_together(self) -> bool {
        match self {
            Storage::Plain(_) | Storage::Gguf(_) => true,
            Storage::Int8Rows | Storage::Nf4 { .. } => false,
        }
    }

    /// Whether a kernel can read this as a matrix of real numbers.
    pub fn is_real(self) -> bool {
        !matches!(self, Storage::Plain(DType::I32 | DType::U64 | DType::F64))
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Storage::Plain(dtype) => dtype.fmt(f),
            Storage::Int8Rows => f.write_str("int8"),
            Storage::Nf4 { double: true } => f.write_str("nf4"),
            Storage::Nf4 { double: false } => f.write_str("nf4-single"),
            Storage::Gguf(block) => f.write_str(block.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_sizes() {
        assert_eq!(Storage::F32.bytes(3, 5), 60);
        assert_eq!(Storage::Plain(DType::Bf16).bytes(3, 5), 30);
        assert_eq!(Storage::Int8Rows.bytes(3, 5), 15 + 12);
    }

    /// 4.5 bits a parameter plain, 4.127 with double quantization (0.5 + 1/64 + 4/(64*256) bytes).
    #[test]
    fn nf4_sizes() {
        let bits = |double| 8.0 * Storage::Nf4 { double }.bytes(18944, 3584) as f64 / (18944.0 * 3584.0);
        assert!((bits(false) - 4.5).abs() < 1e-3, "{}", bits(false));
        assert!((bits(true) - 4.127).abs() < 1e-3, "{}", bits(true));
        // 100 elements: 50 bytes of codes; two blocks, the second one short.
        assert_eq!(Storage::Nf4 { double: false }.bytes(10, 10), 50 + 8);
        assert_eq!(Storage::Nf4 { double: true }.bytes(10, 10), 50 + 2 + 4 + 4);
    }

    /// Bits a weight as llama.cpp names them: 4.5, 5, 5.5, 6, 8.5, 4.5, 5.5, 6.5625.
    #[test]
    fn gguf_sizes() {
        let bits: Vec<f64> =
            Block::ALL.iter().map(|b| 8.0 * b.bytes() as f64 / b.elements() as f64).collect();
        assert_eq!(bits, [4.5, 5.0, 5.5, 6.0, 8.5, 4.5, 5.5, 6.5625]);
        assert_eq!(Storage::Gguf(Block::Q8_0).bytes(2, 64), 2 * 2 * 34);
    }
}
