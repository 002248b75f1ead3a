//! Storage formats: element types, quantized weights and 8-bit optimizer state, with their exact sizes.
//!
//! A format is one enum variant. Sizes count everything that a format stores (codes, scales, nested scales, offsets): a
//! plan that forgets the scales is wrong by several percent. Decoders are part of the devices.

use std::fmt;

/// The type of a plain element.
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

/// A block format: `elements` numbers of one row in `bytes` bytes. All but the last two are those of GGUF files, in which
/// other files' blocks are read too: MXFP4 as gpt-oss is published, with the bytes in another order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Block {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    /// Codes of four bits are indices of a table of sixteen numbers.
    Iq4Nl,
    /// As `Iq4Nl`, 256 with a small scale for each 32 of them.
    Iq4Xs,
    /// A power of two in a byte (e8m0), then codes of four bits: a sign, two bits of exponent and one of mantissa (e2m1).
    Mxfp4,
    /// GPTQ and AWQ: a scale in f16, a whole number in a byte that is subtracted from codes, a byte of zeros, and codes of
    /// four bits, element 2i high and element 2i + 1 low; 32 or 128 elements.
    Int4By32,
    Int4By128,
}

impl Block {
    pub const ALL: [Block; 15] = [
        Block::Q4_0,
        Block::Q4_1,
        Block::Q5_0,
        Block::Q5_1,
        Block::Q8_0,
        Block::Q2K,
        Block::Q3K,
        Block::Q4K,
        Block::Q5K,
        Block::Q6K,
        Block::Iq4Nl,
        Block::Iq4Xs,
        Block::Mxfp4,
        Block::Int4By32,
        Block::Int4By128,
    ];

    /// Elements and bytes.
    const fn sizes(self) -> (usize, usize) {
        match self {
            Block::Q4_0 | Block::Iq4Nl => (32, 18),
            Block::Q4_1 | Block::Int4By32 => (32, 20),
            Block::Q5_0 => (32, 22),
            Block::Q5_1 => (32, 24),
            Block::Q8_0 => (32, 34),
            Block::Mxfp4 => (32, 17),
            Block::Int4By128 => (128, 68),
            Block::Q2K => (256, 84),
            Block::Q3K => (256, 110),
            Block::Q4K => (256, 144),
            Block::Q5K => (256, 176),
            Block::Q6K => (256, 210),
            Block::Iq4Xs => (256, 136),
        }
    }

    pub const fn elements(self) -> usize {
        self.sizes().0
    }

    pub const fn bytes(self) -> usize {
        self.sizes().1
    }

    pub const fn name(self) -> &'static str {
        match self {
            Block::Q4_0 => "q4_0",
            Block::Q4_1 => "q4_1",
            Block::Q5_0 => "q5_0",
            Block::Q5_1 => "q5_1",
            Block::Q8_0 => "q8_0",
            Block::Q2K => "q2_k",
            Block::Q3K => "q3_k",
            Block::Q4K => "q4_k",
            Block::Q5K => "q5_k",
            Block::Q6K => "q6_k",
            Block::Iq4Nl => "iq4_nl",
            Block::Iq4Xs => "iq4_xs",
            Block::Mxfp4 => "mxfp4",
            Block::Int4By32 => "int4-32",
            Block::Int4By128 => "int4-128",
        }
    }
}

/// The meaning of the sixteen codes of bitsandbytes' 4-bit formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code4 {
    /// Quantiles of the normal distribution.
    Nf4,
    /// A sign, two bits of exponent, one of mantissa.
    Fp4,
}

impl Code4 {
    pub const ALL: [Code4; 2] = [Code4::Nf4, Code4::Fp4];
}

/// The format that a value is stored in. Numbers of several bytes are little-endian, and nothing inside is aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Storage {
    /// One element after the other.
    Plain(DType),
    /// Signed bytes row by row, then an f32 for each row, its largest magnitude: an element is
    /// byte · (largest · 1/127). [`row_scales`] says where the second part begins.
    Int8Rows,
    /// Floats of eight bits row by row, a sign, four bits of exponent and three of mantissa (e4m3), then an f32 for each
    /// row, its scale: an element is float · scale. [`row_scales`] says where the second part begins.
    Fp8Rows,
    /// The same floats, then an f32 for each square of [`FP8_BLOCK`] by [`FP8_BLOCK`] elements, those of one row of squares
    /// after the other; squares at the right and lower edge may be smaller. An element is float · scale.
    Fp8Blocks,
    /// 4-bit codes over the flattened tensor, two per byte, the first in the high nibble; then the scale of each block of
    /// [`BNB4_BLOCK`] elements; blocks continue from one row to the next. An element is code · scale. Scales are f32; with
    /// `double` they are a byte each, then an f32 for each group of [`BNB4_GROUP`] scales, then one f32 offset: a scale is
    /// map\[byte\] · group + offset. [`bnb4_parts`] says where the parts begin.
    Bnb4 { code: Code4, double: bool },
    /// Blocks row by row, as in a GGUF file. A row is a whole number of blocks.
    Gguf(Block),
    /// An optimizer's moment: an f32 for each block of [`DYNAMIC8_BLOCK`] elements of the flattened tensor, its
    /// largest magnitude; then a byte for each element, the index into a map of 256 numbers in -1..=1, or in 0..=1 if not
    /// `signed`. An element is map\[byte\] · largest. [`dynamic8_codes`] says where the bytes begin. Zero bytes alone
    /// decode to zeros.
    Dynamic8 { signed: bool },
}

/// Elements that share a scale in [`Storage::Dynamic8`].
pub const DYNAMIC8_BLOCK: usize = 256;

/// Offset of the bytes of the elements in [`Storage::Dynamic8`].
pub const fn dynamic8_codes(elements: usize) -> usize {
    4 * elements.div_ceil(DYNAMIC8_BLOCK)
}

/// Side of the squares that share a scale in [`Storage::Fp8Blocks`].
pub const FP8_BLOCK: usize = 128;

/// Elements that share a scale in [`Storage::Bnb4`].
pub const BNB4_BLOCK: usize = 64;
/// Scales that share a scale in [`Storage::Bnb4`] with `double`.
pub const BNB4_GROUP: usize = 256;

/// Offset of the scales in bytes: those of rows in [`Storage::Int8Rows`] and [`Storage::Fp8Rows`], those of squares in
/// [`Storage::Fp8Blocks`].
pub const fn row_scales(rows: usize, columns: usize) -> usize {
    rows * columns
}

/// Offsets of the parts of a tensor in [`Storage::Bnb4`], in bytes. Codes are the first part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bnb4Parts {
    /// How many blocks there are.
    pub blocks: usize,
    /// One scale per block.
    pub scales: usize,
    /// One f32 per group; this part and `offset` exist only if scales are bytes.
    pub group_scales: usize,
    pub offset: usize,
    pub end: usize,
}

pub const fn bnb4_parts(elements: usize, double: bool) -> Bnb4Parts {
    let blocks = elements.div_ceil(BNB4_BLOCK);
    let scales = elements.div_ceil(2);
    if double {
        let group_scales = scales + blocks;
        let offset = group_scales + 4 * blocks.div_ceil(BNB4_GROUP);
        Bnb4Parts { blocks, scales, group_scales, offset, end: offset + 4 }
    } else {
        let end = scales + 4 * blocks;
        Bnb4Parts { blocks, scales, group_scales: end, offset: end, end }
    }
}

impl Storage {
    pub const F32: Storage = Storage::Plain(DType::F32);

    /// Bytes of a matrix of `rows` by `columns`.
    pub fn bytes(self, rows: usize, columns: usize) -> usize {
        let elements = rows * columns;
        match self {
            Storage::Plain(dtype) => elements * dtype.bytes(),
            Storage::Int8Rows | Storage::Fp8Rows => row_scales(rows, columns) + 4 * rows,
            Storage::Fp8Blocks => {
                let squares = rows.div_ceil(FP8_BLOCK) * columns.div_ceil(FP8_BLOCK);
                row_scales(rows, columns) + 4 * squares
            }
            Storage::Bnb4 { double, .. } => bnb4_parts(elements, double).end,
            Storage::Gguf(block) => rows * columns.div_ceil(block.elements()) * block.bytes(),
            Storage::Dynamic8 { .. } => dynamic8_codes(elements) + elements,
        }
    }

    /// The element type, if elements can be addressed one by one.
    pub fn plain(self) -> Option<DType> {
        match self {
            Storage::Plain(dtype) => Some(dtype),
            _ => None,
        }
    }

    /// Whether the bytes of a row are contiguous, so that some rows of a matrix are a matrix too.
    pub fn has_contiguous_rows(self) -> bool {
        matches!(self, Storage::Plain(_) | Storage::Gguf(_))
    }

    /// Whether a kernel can read this as a matrix of real numbers.
    pub fn is_real(self) -> bool {
        !matches!(self, Storage::Plain(DType::I32 | DType::U64 | DType::F64) | Storage::Dynamic8 { .. })
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Storage::Plain(dtype) => dtype.fmt(f),
            Storage::Int8Rows => f.write_str("int8"),
            Storage::Fp8Rows => f.write_str("fp8"),
            Storage::Fp8Blocks => f.write_str("fp8-blocks"),
            Storage::Bnb4 { code, double } => f.write_str(match (code, double) {
                (Code4::Nf4, true) => "nf4",
                (Code4::Nf4, false) => "nf4-single",
                (Code4::Fp4, true) => "fp4",
                (Code4::Fp4, false) => "fp4-single",
            }),
            Storage::Gguf(block) => f.write_str(block.name()),
            Storage::Dynamic8 { signed } => {
                f.write_str(if *signed { "dynamic8" } else { "dynamic8-unsigned" })
            }
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
        assert_eq!(Storage::Fp8Rows.bytes(3, 5), 15 + 12);
        assert_eq!(Storage::Fp8Blocks.bytes(129, 256), 129 * 256 + 4 * 2 * 2);
    }

    /// A byte per element and an f32 per block; the last block is short.
    #[test]
    fn dynamic8_sizes() {
        for signed in [true, false] {
            let bytes = |rows, columns| Storage::Dynamic8 { signed }.bytes(rows, columns);
            assert_eq!(bytes(16, 256), 4096 + 4 * 16);
            assert_eq!(bytes(1, 5000), 5000 + 4 * 20);
            assert_eq!(bytes(0, 7), 0);
        }
        assert_eq!(dynamic8_codes(5000), 80);
    }

    /// 4.5 bits per parameter, or 4.127 with double quantization (0.5 + 1/64 + 4/(64*256) bytes).
    #[test]
    fn bnb4_sizes() {
        for code in Code4::ALL {
            let bytes = |double, rows, columns| Storage::Bnb4 { code, double }.bytes(rows, columns);
            let bits = |double| 8.0 * bytes(double, 18944, 3584) as f64 / (18944.0 * 3584.0);
            assert!((bits(false) - 4.5).abs() < 1e-3, "{}", bits(false));
            assert!((bits(true) - 4.127).abs() < 1e-3, "{}", bits(true));
            // 99 elements: 50 bytes of codes; two blocks, the second one short.
            assert_eq!(bytes(false, 9, 11), 50 + 8);
            assert_eq!(bytes(true, 9, 11), 50 + 2 + 4 + 4);
        }
    }

    #[test]
    fn bnb4_parts_follow_each_other() {
        // 257 blocks: two groups.
        let parts = bnb4_parts(256 * 64 + 1, true);
        let expected = Bnb4Parts { blocks: 257, scales: 8193, group_scales: 8450, offset: 8458, end: 8462 };
        assert_eq!(parts, expected);
    }

    #[test]
    fn names_of_4_bit_storages() {
        let names =
            Code4::ALL.map(|code| [true, false].map(|double| Storage::Bnb4 { code, double }.to_string()));
        assert_eq!(names, [["nf4", "nf4-single"], ["fp4", "fp4-single"]]);
    }

    /// Bits per weight as llama.cpp states them, and those of GPTQ with a scale and a number in 32 bits.
    #[test]
    fn gguf_sizes() {
        let bits: Vec<f64> =
            Block::ALL.iter().map(|b| 8.0 * b.bytes() as f64 / b.elements() as f64).collect();
        let of_gguf = [4.5, 5.0, 5.5, 6.0, 8.5, 2.625, 3.4375, 4.5, 5.5, 6.5625, 4.5, 4.25, 4.25];
        assert_eq!(bits, [of_gguf.as_slice(), &[5.0, 4.25]].concat());
        assert_eq!(Storage::Gguf(Block::Q8_0).bytes(2, 64), 2 * 2 * 34);
    }
}
