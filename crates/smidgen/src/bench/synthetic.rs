//! Synthetic weights of realistic size, in any storage format.
//!
//! One megabyte of random numbers is repeated: it is generated in no time, and matmuls take as long as with real
//! weights.
//! Codes of quantized formats are random; scales are chosen so that decoded numbers are about 0.02.

use smidgen_ir::quant;
use smidgen_ir::storage::{bnb4_parts, row_scales};
use smidgen_ir::{DType, Storage};
use smidgen_runtime::counter::uniform;
use smidgen_runtime::cpu::convert::{f32_to_bf16, f32_to_f16};

/// Length of the repeated bytes: a multiple of the size of every block and element.
pub const PERIOD: usize = 1 << 20;
/// Typical size of a weight.
const SIZE: f32 = 0.02;

/// The source of the bytes of a tensor.
#[derive(Debug)]
pub struct Synthetic {
    storage: Storage,
    rows: usize,
    columns: usize,
    /// The bytes that are repeated.
    period: Vec<u8>,
}

impl Synthetic {
    pub fn of(storage: Storage, rows: usize, columns: usize) -> Synthetic {
        Synthetic { storage, rows, columns, period: period(storage) }
    }

    /// Fills `piece` with the bytes at `offset` of the tensor.
    pub fn fill(&self, offset: usize, piece: &mut [u8]) {
        let mut done = 0;
        while done < piece.len() {
            let first = (offset + done) % self.period.len();
            let bytes = (self.period.len() - first).min(piece.len() - done);
            piece[done..done + bytes].copy_from_slice(&self.period[first..first + bytes]);
            done += bytes;
        }
        // Scales must be valid numbers.
        let elements = self.rows * self.columns;
        let mut floats = |first: usize, end: usize, value: f32| {
            let bytes = value.to_le_bytes();
            for place in first.max(offset)..end.min(offset + piece.len()) {
                piece[place - offset] = bytes[(place - first) % 4];
            }
        };
        match self.storage {
            Storage::Plain(_) | Storage::Gguf(_) | Storage::Dynamic8 { .. } => {}
            Storage::Int8Rows | Storage::Fp8Rows | Storage::Fp8Blocks => {
                let scale = if self.storage == Storage::Int8Rows { 2.0 * SIZE } else { SIZE / 128.0 };
                let first = row_scales(self.rows, self.columns);
                floats(first, self.storage.bytes(self.rows, self.columns), scale);
            }
            Storage::Bnb4 { double: false, .. } => {
                let parts = bnb4_parts(elements, false);
                floats(parts.scales, parts.end, 2.0 * SIZE);
            }
            Storage::Bnb4 { double: true, .. } => {
                let parts = bnb4_parts(elements, true);
                floats(parts.group_scales, parts.offset, 0.25 * SIZE);
                floats(parts.offset, parts.end, 2.0 * SIZE);
            }
        }
    }
}

fn period(storage: Storage) -> Vec<u8> {
    let number = |index: usize| SIZE * 3.4 * (uniform(7, index as u64) - 0.5);
    match storage {
        Storage::Plain(DType::F32) => (0..PERIOD / 4).flat_map(|index| number(index).to_le_bytes()).collect(),
        Storage::Plain(DType::Bf16) => {
            (0..PERIOD / 2).flat_map(|index| f32_to_bf16(number(index)).to_le_bytes()).collect()
        }
        Storage::Plain(DType::F16) => {
            (0..PERIOD / 2).flat_map(|index| f32_to_f16(number(index)).to_le_bytes()).collect()
        }
        Storage::Gguf(block) if quant::can_encode(storage) => {
            let columns = 1024 * block.elements();
            let values: Vec<f32> = (0..columns).map(number).collect();
            quant::encode(storage, 1, columns, &values).expect("a whole number of blocks")
        }
        // Formats without an encoder: zeros decode to zeros.
        Storage::Gguf(block) => vec![0; 1024 * block.bytes()],
        // Without the two bit patterns of NaN.
        Storage::Fp8Rows | Storage::Fp8Blocks => {
            let byte = |index: usize| (127.0 * uniform(7, index as u64)) as u8 | (index as u8) << 7;
            (0..PERIOD).map(byte).collect()
        }
        Storage::Int8Rows | Storage::Bnb4 { .. } | Storage::Dynamic8 { .. } | Storage::Plain(_) => {
            (0..PERIOD).map(|index| (256.0 * uniform(7, index as u64)) as u8).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smidgen_ir::{Block, Code4};

    /// Decoded numbers are finite, not all equal, and of the size of weights, in every storage and by pieces.
    #[test]
    fn numbers_of_every_storage_are_like_weights() {
        let (rows, columns) = (9, 512);
        let mut storages = vec![Storage::Int8Rows, Storage::Fp8Rows, Storage::Fp8Blocks];
        storages.extend([DType::F32, DType::Bf16, DType::F16].map(Storage::Plain));
        for code in Code4::ALL {
            storages.extend([true, false].map(|double| Storage::Bnb4 { code, double }));
        }
        storages.push(Storage::Gguf(Block::Q8_0));
        for storage in storages {
            let source = Synthetic::of(storage, rows, columns);
            let mut bytes = vec![0; storage.bytes(rows, columns)];
            let half = bytes.len() / 2;
            let (front, back) = bytes.split_at_mut(half);
            source.fill(0, front);
            source.fill(half, back);
            let mut values = vec![0.0; rows * columns];
            quant::decode(storage, rows, columns, &bytes, 0, &mut values);
            let square = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
            let root = (square / values.len() as f64).sqrt();
            assert!((0.005..0.08).contains(&root), "{storage}: numbers of size {root}");
        }
    }
}
