//! Random numbers for tests, which depend only on the seed; how a storage rounds them; and comparisons with records.
//!
//! Quantized leaves are written as bytes: they are frozen, so no test changes them.

use smidgen_ir::{DType, Storage};
use smidgen_runtime::counter::uniform;
use smidgen_runtime::cpu::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// The content of a leaf that the host writes.
#[derive(Clone, Debug)]
pub enum Content {
    Reals(Vec<f32>),
    Integers(Vec<i32>),
    Keys(Vec<u64>),
    Doubles(Vec<f64>),
    /// In the storage of the leaf.
    Bytes(Vec<u8>),
}

/// `len` numbers in (-1, 1).
pub fn random_reals(seed: u64, len: usize) -> Vec<f32> {
    (0..len as u64).map(|index| uniform(seed, index) * 2.0 - 1.0).collect()
}

pub fn random_integers(seed: u64, len: usize, below: usize) -> Vec<i32> {
    (0..len as u64).map(|index| (uniform(seed, index) * below as f32) as i32).collect()
}

pub fn random_keys(seed: u64, len: usize) -> Vec<u64> {
    (0..len as u64).map(|index| smidgen_runtime::counter::token_key(seed, 1, 0, index)).collect()
}

/// The nearest number that the storage can represent.
pub fn stored(storage: Storage, value: f32) -> f32 {
    match storage {
        Storage::Plain(DType::F32) => value,
        Storage::Plain(DType::Bf16) => bf16_to_f32(f32_to_bf16(value)),
        Storage::Plain(DType::F16) => f16_to_f32(f32_to_f16(value)),
        other => panic!("tests store no reals as {other}"),
    }
}

/// The bytes of a content in a leaf of that storage.
pub fn encode(content: &Content, storage: Storage) -> Vec<u8> {
    match (content, storage) {
        (Content::Reals(values), Storage::Plain(DType::F32)) => {
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        }
        (Content::Reals(values), Storage::Plain(DType::Bf16)) => {
            values.iter().flat_map(|value| f32_to_bf16(*value).to_le_bytes()).collect()
        }
        (Content::Reals(values), Storage::Plain(DType::F16)) => {
            values.iter().flat_map(|value| f32_to_f16(*value).to_le_bytes()).collect()
        }
        (Content::Integers(values), Storage::Plain(DType::I32)) => {
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        }
        (Content::Keys(values), Storage::Plain(DType::U64)) => {
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        }
        (Content::Doubles(values), Storage::Plain(DType::F64)) => {
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        }
        (Content::Bytes(bytes), _) => bytes.clone(),
        (content, storage) => panic!("{content:?} cannot be stored as {storage}"),
    }
}

pub fn decode_reals(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

pub fn decode_doubles(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap())).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Panics with the number of differences and the first of them.
pub fn assert_equal<T: PartialEq + std::fmt::Debug>(name: &str, got: &[T], want: &[T]) {
    assert_eq!(got.len(), want.len(), "{name}");
    let different: Vec<usize> = (0..got.len()).filter(|index| got[*index] != want[*index]).collect();
    if let Some(&first) = different.first() {
        let (got, want) = (&got[first], &want[first]);
        panic!("{name}: {} differ, first [{first}]: got {got:?}, want {want:?}", different.len());
    }
}
