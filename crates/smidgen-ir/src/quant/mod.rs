//! Quantized storages, element by element: reference decoders and encoders, the same on every device.
//!
//! Scalar and safe: devices have fast decoders of their own, which must give the same bits, and loaders
//! encode once. 4-bit and int8 codes are those of bitsandbytes on the CPU, blocks are ggml's, fp8 is e4m3.
//! Tensors are read by range and written piece by piece, so that a caller never needs all f32 at once.
//! Left out: encoders of fp8 with scales of squares and of most blocks, which only occur in files.

pub mod blocks;
pub mod bnb4;
pub mod cascade_sum;
pub mod dynamic_map;
pub mod fp8;
pub mod int8;
pub mod k_blocks;
pub mod nearest_code;

use crate::storage::{BNB4_BLOCK, DYNAMIC8_BLOCK, bnb4_parts, row_scales};
use crate::{Block, DType, Storage};
use bnb4::ScalePart;
use half::{bf16, f16};
use thiserror::Error;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum QuantError {
    #[error("nothing encodes weights as {storage}")]
    NoEncoder { storage: Storage },
    #[error("rows of {columns} elements cannot be stored as {storage}, whose blocks hold {block}")]
    Columns { storage: Storage, columns: usize, block: usize },
}

/// Decodes elements `first..first + target.len()` of a tensor, counted row by row.
pub fn decode(storage: Storage, rows: usize, columns: usize, bytes: &[u8], first: usize, target: &mut [f32]) {
    assert_eq!(bytes.len(), storage.bytes(rows, columns), "bytes of ({rows}, {columns}) in {storage}");
    assert!(first + target.len() <= rows * columns, "elements of ({rows}, {columns})");
    match storage {
        Storage::Plain(dtype) => {
            let width = dtype.bytes();
            for (at, value) in target.iter_mut().enumerate() {
                *value = decode_plain(dtype, &bytes[(first + at) * width..][..width]);
            }
        }
        Storage::Int8Rows => int8::decode(rows, columns, bytes, first, target),
        Storage::Fp8Rows => fp8::decode(rows, columns, bytes, first, target),
        Storage::Fp8Blocks => fp8::decode_blocks(rows, columns, bytes, first, target),
        Storage::Bnb4 { code, double } => bnb4::decode(code, double, rows * columns, bytes, first, target),
        Storage::Gguf(block) => blocks::decode(block, bytes, first, target),
        Storage::Dynamic8 { signed } => dynamic_map::decode(signed, rows * columns, bytes, first, target),
    }
}

fn decode_plain(dtype: DType, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (DType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        _ => unreachable!("{dtype} holds no weights"),
    }
}

/// Converts all of `source` into `target` among f32, bf16 and f16, through f32, which holds all three exactly; each
/// value is rounded once, to nearest, ties to even.
pub fn convert_plain(from: DType, source: &[u8], to: DType, target: &mut [u8]) {
    assert_eq!(source.len() * to.bytes(), target.len() * from.bytes(), "elements of {from} and of {to}");
    let elements = source.chunks_exact(from.bytes()).zip(target.chunks_exact_mut(to.bytes()));
    match (from, to) {
        // Spelled out because these become vector loops, and whole models pass through them.
        (DType::Bf16, DType::F32) => elements.for_each(|(two, four)| {
            four.copy_from_slice(&[0, 0, two[0], two[1]]);
        }),
        (DType::F16, DType::F32) => elements.for_each(|(two, four)| {
            four.copy_from_slice(&f16::from_le_bytes([two[0], two[1]]).to_f32().to_le_bytes());
        }),
        (DType::F32, DType::Bf16) => elements.for_each(|(four, two)| {
            let value = f32::from_le_bytes([four[0], four[1], four[2], four[3]]);
            two.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
        }),
        (from, to) if from == to => target.copy_from_slice(source),
        (from, to) => elements.for_each(|(one, other)| encode_plain(to, decode_plain(from, one), other)),
    }
}

/// Whether [`Encoding`] writes this storage.
pub fn can_encode(storage: Storage) -> bool {
    matches!(
        storage,
        Storage::Plain(DType::F32 | DType::Bf16 | DType::F16)
            | Storage::Int8Rows
            | Storage::Fp8Rows
            | Storage::Bnb4 { .. }
            | Storage::Gguf(Block::Q8_0 | Block::Q4K | Block::Q5K | Block::Q6K)
    )
}

/// Encodes a whole tensor.
pub fn encode(storage: Storage, rows: usize, columns: usize, values: &[f32]) -> Result<Vec<u8>, QuantError> {
    let mut bytes = vec![0; storage.bytes(rows, columns)];
    let mut encoding = Encoding::begin(storage, rows, columns, &mut bytes)?;
    for part in &mut encoding.parts(rows.max(1)) {
        part.append(values);
    }
    encoding.finish();
    Ok(bytes)
}

/// A tensor that is being encoded into `bytes`. Its parts can be encoded at the same time.
#[derive(Debug)]
pub struct Encoding<'a> {
    storage: Storage,
    rows: usize,
    columns: usize,
    bytes: &'a mut [u8],
    /// One per block of `Bnb4`, one per row of `Int8Rows` and `Fp8Rows`; written to `bytes` when all are known.
    scales: Vec<f32>,
}

impl<'a> Encoding<'a> {
    /// `bytes` are those of the whole tensor; their contents are ignored.
    pub fn begin(
        storage: Storage,
        rows: usize,
        columns: usize,
        bytes: &'a mut [u8],
    ) -> Result<Encoding<'a>, QuantError> {
        if !can_encode(storage) {
            return Err(QuantError::NoEncoder { storage });
        }
        if let Storage::Gguf(block) = storage
            && !columns.is_multiple_of(block.elements())
        {
            return Err(QuantError::Columns { storage, columns, block: block.elements() });
        }
        assert_eq!(bytes.len(), storage.bytes(rows, columns), "bytes of ({rows}, {columns}) in {storage}");
        let scales = vec![0.0; held_scales(storage, rows, columns)];
        Ok(Encoding { storage, rows, columns, bytes, scales })
    }

    /// Pieces must be multiples of this many elements, except the last.
    pub fn piece_elements(&self) -> usize {
        match self.storage {
            Storage::Plain(_) => 1,
            Storage::Int8Rows | Storage::Fp8Rows => self.columns.max(1),
            Storage::Bnb4 { .. } => BNB4_BLOCK,
            Storage::Gguf(block) => block.elements(),
            Storage::Dynamic8 { .. } => DYNAMIC8_BLOCK,
            Storage::Fp8Blocks => unreachable!("`begin` refuses {}", self.storage),
        }
    }

    /// The tensor in parts of `rows` rows each, the last one shorter.
    pub fn parts(&mut self, rows: usize) -> Vec<EncodingPart<'_>> {
        let (storage, all, unit) = (self.storage, self.rows * self.columns, self.piece_elements());
        let elements = rows * self.columns;
        assert!(
            elements >= all || elements.is_multiple_of(unit),
            "parts of {elements} elements, not of {unit}"
        );
        let (mut codes, mut scales): (&mut [u8], &mut [f32]) = (self.bytes, &mut self.scales);
        let firsts = (0..all).step_by(elements.max(1));
        let parts = firsts.map(|first| {
            let elements = elements.min(all - first);
            let own_codes =
                codes.split_off_mut(..code_bytes(storage, elements)).expect("the codes of every part");
            let own_scales = scales.split_off_mut(..elements.div_ceil(unit).min(scales.len()));
            EncodingPart {
                storage,
                unit,
                codes: own_codes,
                scales: own_scales.expect("its scales"),
                done: 0,
                elements,
            }
        });
        parts.collect()
    }

    /// Writes what depends on the whole tensor, once every part is complete.
    pub fn finish(mut self) {
        self.scales(usize::MAX).into_iter().for_each(ScalePart::encode);
    }

    /// Does the work of [`Encoding::finish`] in parts of this many groups of scales, which can be encoded in parallel.
    /// Scales that need no encoding are written here, and the list is empty.
    pub fn scales(&mut self, groups: usize) -> Vec<ScalePart<'_>> {
        let elements = self.rows * self.columns;
        let plain_scales = match self.storage {
            Storage::Bnb4 { double: true, .. } => {
                return bnb4::scale_parts(&self.scales, groups, elements, self.bytes);
            }
            Storage::Bnb4 { double: false, .. } => bnb4_parts(elements, false).scales,
            Storage::Int8Rows | Storage::Fp8Rows => row_scales(self.rows, self.columns),
            Storage::Plain(_) | Storage::Gguf(_) | Storage::Dynamic8 { .. } | Storage::Fp8Blocks => {
                return vec![];
            }
        };
        for (scale, target) in self.scales.iter().zip(self.bytes[plain_scales..].chunks_exact_mut(4)) {
            target.copy_from_slice(&scale.to_le_bytes());
        }
        vec![]
    }
}

/// Scales that an encoding holds until it is finished.
pub fn held_scales(storage: Storage, rows: usize, columns: usize) -> usize {
    match storage {
        Storage::Int8Rows | Storage::Fp8Rows => rows,
        Storage::Bnb4 { .. } => (rows * columns).div_ceil(BNB4_BLOCK),
        Storage::Plain(_) | Storage::Gguf(_) | Storage::Dynamic8 { .. } | Storage::Fp8Blocks => 0,
    }
}

/// Bytes of the codes of some elements, without their scales.
fn code_bytes(storage: Storage, elements: usize) -> usize {
    match storage {
        Storage::Plain(dtype) => elements * dtype.bytes(),
        Storage::Int8Rows | Storage::Fp8Rows | Storage::Fp8Blocks | Storage::Dynamic8 { .. } => elements,
        Storage::Bnb4 { .. } => elements.div_ceil(2),
        Storage::Gguf(block) => elements / block.elements() * block.bytes(),
    }
}

/// Some rows of a tensor that is being encoded.
#[derive(Debug)]
pub struct EncodingPart<'a> {
    storage: Storage,
    /// Elements that share a scale, or that a block holds.
    unit: usize,
    codes: &'a mut [u8],
    scales: &'a mut [f32],
    done: usize,
    elements: usize,
}

impl EncodingPart<'_> {
    /// The next elements of the part, row by row.
    pub fn append(&mut self, values: &[f32]) {
        let (first, unit) = (self.done, self.unit);
        self.done += values.len();
        assert!(self.done <= self.elements, "{} elements of {}", self.done, self.elements);
        assert!(
            self.done == self.elements || values.len().is_multiple_of(unit),
            "a piece of {} elements is not a multiple of {unit}",
            values.len(),
        );
        let codes = &mut self.codes[code_bytes(self.storage, first)..];
        let scales = self.scales.iter_mut().skip(first / unit);
        match self.storage {
            Storage::Plain(dtype) => {
                for (value, target) in values.iter().zip(codes.chunks_exact_mut(dtype.bytes())) {
                    encode_plain(dtype, *value, target);
                }
            }
            Storage::Int8Rows | Storage::Fp8Rows => {
                let encode_row =
                    if self.storage == Storage::Fp8Rows { fp8::encode_row } else { int8::encode_row };
                for ((row, codes), scale) in values.chunks(unit).zip(codes.chunks_mut(unit)).zip(scales) {
                    *scale = encode_row(row, codes);
                }
            }
            Storage::Bnb4 { code, .. } => {
                for ((block, codes), scale) in values.chunks(unit).zip(codes.chunks_mut(unit / 2)).zip(scales)
                {
                    *scale = bnb4::encode_block(code, block, codes);
                }
            }
            Storage::Gguf(block) => {
                let encode = match block {
                    Block::Q4K => k_blocks::encode_q4_k,
                    Block::Q5K => k_blocks::encode_q5_k,
                    Block::Q6K => k_blocks::encode_q6_k,
                    _ => blocks::encode_q8_0,
                };
                for (values, target) in values.chunks_exact(unit).zip(codes.chunks_exact_mut(block.bytes())) {
                    encode(values, target);
                }
            }
            Storage::Dynamic8 { .. } | Storage::Fp8Blocks => unreachable!("`begin` refuses {}", self.storage),
        }
    }
}

fn encode_plain(dtype: DType, value: f32, target: &mut [u8]) {
    match dtype {
        DType::F32 => target.copy_from_slice(&value.to_le_bytes()),
        DType::Bf16 => target.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        DType::F16 => target.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        DType::F64 | DType::I32 | DType::U64 => unreachable!("{dtype} holds no weights"),
    }
}

/// The largest magnitude, or NaN if a value is NaN. The bits of magnitudes order like the magnitudes, with NaN on top, and
/// a maximum of integers can be vectorized.
fn largest_magnitude(values: &[f32]) -> f32 {
    f32::from_bits(values.iter().map(|value| value.abs().to_bits()).max().unwrap_or(0))
}

fn read_f32(bytes: &[u8], offset: usize) -> f32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[offset..offset + 4]);
    f32::from_le_bytes(four)
}

fn read_f16(bytes: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([bytes[offset], bytes[offset + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Code4;

    fn values(len: usize) -> Vec<f32> {
        // A multiplicative hash spreads the indices over -0.5 to 0.5.
        (0..len as u32)
            .map(|index| index.wrapping_mul(2_654_435_769) as f32 / u32::MAX as f32 - 0.5)
            .collect()
    }

    fn encodable() -> Vec<Storage> {
        let mut storages = vec![Storage::Int8Rows, Storage::Fp8Rows, Storage::Gguf(Block::Q8_0)];
        storages.extend([DType::F32, DType::Bf16, DType::F16].map(Storage::Plain));
        for code in Code4::ALL {
            storages.extend([false, true].map(|double| Storage::Bnb4 { code, double }));
        }
        storages
    }

    #[test]
    fn pieces_give_the_bytes_of_the_whole() {
        let (rows, columns) = (37, 96);
        let values = values(rows * columns);
        for storage in encodable() {
            let whole = encode(storage, rows, columns, &values).unwrap();
            let mut bytes = vec![0xAA; whole.len()];
            let mut encoding = Encoding::begin(storage, rows, columns, &mut bytes).unwrap();
            // 2 rows of 96 elements are 3 blocks of 64; the last part and its last piece are short.
            let (part, piece) = (10 * columns, 3 * encoding.piece_elements());
            for (part, values) in encoding.parts(10).iter_mut().zip(values.chunks(part)) {
                values.chunks(piece).for_each(|piece| part.append(piece));
            }
            encoding.finish();
            assert!(bytes == whole, "{storage}");
        }
    }

    #[test]
    fn any_range_decodes_as_the_whole_does() {
        let (rows, columns) = (5, 256);
        let all = rows * columns;
        let mut storages: Vec<Storage> = Block::ALL.map(Storage::Gguf).to_vec();
        storages.push(Storage::Fp8Blocks);
        storages.extend(encodable());
        for storage in storages {
            let len = storage.bytes(rows, columns);
            // Any bytes decode to something; 0x3c keeps scales finite.
            let bytes: Vec<u8> =
                (0..len).map(|at| if at % 2 == 1 { 0x3c } else { (at * 37) as u8 }).collect();
            let mut whole = vec![0.0; all];
            decode(storage, rows, columns, &bytes, 0, &mut whole);
            for (first, count) in [(0, 1), (1, 70), (63, 2), (255, 258), (all - 33, 33), (all, 0)] {
                let mut part = vec![0.0; count];
                decode(storage, rows, columns, &bytes, first, &mut part);
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
                assert_eq!(bits(&part), bits(&whole[first..first + count]), "{storage} from {first}");
            }
        }
    }

    #[test]
    fn what_cannot_be_encoded_is_refused_by_name() {
        let error = encode(Storage::Gguf(Block::Q3K), 1, 256, &[0.0; 256]).unwrap_err();
        assert_eq!(error.to_string(), "nothing encodes weights as q3_k");
        let error = encode(Storage::Gguf(Block::Q8_0), 1, 40, &[0.0; 40]).unwrap_err();
        assert_eq!(error.to_string(), "rows of 40 elements cannot be stored as q8_0, whose blocks hold 32");
    }
}
