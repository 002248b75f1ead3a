//! Shared code of the tests of the row operations: random numbers, views over vectors, and a harness that runs a
//! body on every instruction set with several thread counts.
//!
//! Compiled for tests only. Left out: reference implementations; each operation has its own.

use super::convert::{Element, f32_to_bf16, f32_to_f16};
use super::counter::uniform;
use super::pool::Pool;
use super::simd::{Isa, with_isa};
use super::view::{Dst, Src, StoredVector};
use smidgen_ir::quant::{self, fp8};
use smidgen_ir::storage::row_scales;
use smidgen_ir::{Block, Code4, DType, Storage};

/// Channel counts below, at and above a block, and a real model's.
pub const COLUMNS: [usize; 5] = [1, 7, 16, 33, 576];

/// `len` numbers in (-2, 2), the same for the same `seed`.
pub fn numbers(seed: u64, len: usize) -> Vec<f32> {
    (0..len as u64).map(|index| uniform(seed, index) * 4.0 - 2.0).collect()
}

pub fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

/// Tests keep the vector alive and untouched while the view is in use.
pub fn src<T: Copy>(values: &[T]) -> Src<T> {
    // SAFETY: see above.
    unsafe { Src::new(values.as_ptr(), values.len()) }
}

/// Tests use the vector only through this view while the view is in use.
pub fn dst<T: Copy>(values: &mut [T]) -> Dst<T> {
    // SAFETY: see above.
    unsafe { Dst::new(values.as_mut_ptr(), values.len()) }
}

/// Encodes `values`; returns the bytes and the values that they decode to.
pub fn stored_bytes(element: Element, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let mut bytes = Vec::new();
    let mut read_back = Vec::new();
    for value in values {
        match element {
            Element::F32 => {
                bytes.extend(value.to_le_bytes());
                read_back.push(*value);
            }
            Element::Bf16 => {
                let bits = f32_to_bf16(*value);
                bytes.extend(bits.to_le_bytes());
                read_back.push(half::bf16::from_bits(bits).to_f32());
            }
            Element::F16 => {
                let bits = f32_to_f16(*value);
                bytes.extend(bits.to_le_bytes());
                read_back.push(half::f16::from_bits(bits).to_f32());
            }
        }
    }
    (bytes, read_back)
}

/// Tests keep `bytes` alive while the view is in use.
pub fn stored(element: Element, bytes: &[u8]) -> StoredVector {
    // SAFETY: see above; the length is in whole elements.
    unsafe { StoredVector::new(bytes.as_ptr(), element, bytes.len() / element.bytes()) }
}

/// Every weight storage whose blocks divide rows of `columns` elements.
pub fn storages_with(columns: usize) -> impl Iterator<Item = Storage> {
    let plain = [DType::F32, DType::Bf16, DType::F16].map(Storage::Plain);
    let codes =
        Code4::ALL.into_iter().flat_map(|code| [false, true].map(|double| Storage::Bnb4 { code, double }));
    let blocks = Block::ALL.into_iter().filter(move |block| columns.is_multiple_of(block.elements()));
    plain
        .into_iter()
        .chain([Storage::Int8Rows, Storage::Fp8Rows, Storage::Fp8Blocks])
        .chain(codes)
        .chain(blocks.map(Storage::Gguf))
}

/// A tensor in any storage with random codes, and scales that keep its numbers finite.
pub fn sane_bytes(storage: Storage, rows: usize, columns: usize) -> Vec<u8> {
    let mut bytes = match storage {
        Storage::Gguf(_) | Storage::Fp8Blocks => vec![0; storage.bytes(rows, columns)],
        _ => return quant::encode(storage, rows, columns, &numbers(1, rows * columns)).expect("an encoder"),
    };
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = (uniform(7, index as u64) * 256.0) as u8;
    }
    if storage == Storage::Fp8Blocks {
        bytes.iter_mut().filter(|byte| **byte & 0x7F == fp8::NAN).for_each(|byte| *byte -= 1);
        for (index, bytes) in bytes[row_scales(rows, columns)..].chunks_exact_mut(4).enumerate() {
            bytes.copy_from_slice(&(uniform(8, index as u64) - 0.5).to_le_bytes());
        }
    }
    if let Storage::Gguf(block) = storage {
        let halves: &[usize] = match block {
            Block::Q4_0
            | Block::Q5_0
            | Block::Q8_0
            | Block::Iq4Nl
            | Block::Iq4Xs
            | Block::Int4By32
            | Block::Int4By128 => &[0],
            Block::Q4_1 | Block::Q5_1 | Block::Q4K | Block::Q5K => &[0, 2],
            Block::Q2K => &[80, 82],
            Block::Q3K => &[108],
            Block::Q6K => &[208],
            Block::Mxfp4 => &[],
        };
        for (index, bytes) in bytes.chunks_exact_mut(block.bytes()).enumerate() {
            match block {
                // Powers of two around 1, and zeros as GPTQ has them.
                Block::Mxfp4 => bytes[0] = 120 + bytes[0] % 10,
                Block::Int4By32 | Block::Int4By128 => bytes[2] %= 17,
                _ => {}
            }
            for offset in halves {
                let scale = uniform(8, (index * 2 + offset % 3) as u64) - 0.5;
                bytes[*offset..][..2].copy_from_slice(&f32_to_f16(scale).to_le_bytes());
            }
        }
    }
    bytes
}

/// The bits of a result, so that -0 differs from 0 and a NaN equals itself.
pub trait Bits {
    fn bits(&self) -> Vec<u64>;
}

impl Bits for Vec<f32> {
    fn bits(&self) -> Vec<u64> {
        self.iter().map(|value| value.to_bits().into()).collect()
    }
}

impl Bits for Vec<u8> {
    fn bits(&self) -> Vec<u64> {
        self.iter().map(|value| u64::from(*value)).collect()
    }
}

impl Bits for f64 {
    fn bits(&self) -> Vec<u64> {
        vec![self.to_bits()]
    }
}

impl<A: Bits, B: Bits> Bits for (A, B) {
    fn bits(&self) -> Vec<u64> {
        [self.0.bits(), self.1.bits()].concat()
    }
}

/// Runs `work` on every instruction set with 1, 2 and 4 threads, asserts that all results are the same bytes, and
/// returns one of them.
pub fn on_every_isa<R: Bits + Send>(work: impl Fn() -> R + Sync) -> R {
    let pools = [1, 2, 4].map(|threads| Pool::new(threads).expect("threads can be started"));
    let mut agreed: Option<R> = None;
    for pool in &pools {
        for isa in Isa::available() {
            let result = pool.enter(|| with_isa(isa, &work));
            match &agreed {
                None => agreed = Some(result),
                Some(first) => assert!(
                    first.bits() == result.bits(),
                    "{isa:?} with {} threads disagrees",
                    pool.threads()
                ),
            }
        }
    }
    agreed.expect("there is a pool and an instruction set")
}

/// Each value within `tolerance` of the expected one, relative to the larger of it and `scale`.
pub fn assert_close(name: &str, got: &[f32], want: &[f64], scale: f64, tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs() / want.abs().max(scale);
        assert!(error <= tolerance, "{name}[{index}]: got {got:e}, want {want:e}, relative error {error:e}");
    }
}

/// The gradient of `function` at `point` by central differences.
pub fn finite_difference(point: &[f64], function: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut moved = point.to_vec();
    (0..point.len())
        .map(|index| {
            moved[index] = point[index] + STEP;
            let above = function(&moved);
            moved[index] = point[index] - STEP;
            let below = function(&moved);
            moved[index] = point[index];
            (above - below) / (2.0 * STEP)
        })
        .collect()
}

pub fn assert_same_bits(name: &str, left: &impl Bits, right: &impl Bits) {
    assert!(left.bits() == right.bits(), "{name}: bytes differ");
}
