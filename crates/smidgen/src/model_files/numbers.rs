//! f32 and the element types of a file: reading widens, writing rounds once.
//!
//! Left out: quantized formats, which `original.rs` decodes.

use crate::failure::Failure;
use smidgen_formats::element::Element;
use smidgen_formats::tensor_ref::TensorRef;
use smidgen_runtime::cpu::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 32 << 10;

/// Reads elements of a tensor of F32, BF16 or F16, starting at `first_element`.
pub fn read_f32(tensor: &TensorRef, first_element: u64, destination: &mut [f32]) -> Result<(), Failure> {
    let element = tensor.element();
    let mut piece = [0u8; PIECE_BYTES];
    let mut byte_offset = first_element * element.size_bytes() as u64;
    for values in destination.chunks_mut(PIECE_BYTES / element.size_bytes()) {
        let bytes = &mut piece[..values.len() * element.size_bytes()];
        tensor.read_at(byte_offset, bytes).map_err(Failure::model)?;
        byte_offset += bytes.len() as u64;
        widen_into(bytes, element, values);
    }
    Ok(())
}

/// Converts F32, BF16 or F16 to f32; callers have refused other types.
pub fn widen_into(bytes: &[u8], element: Element, values: &mut [f32]) {
    match element {
        Element::F32 => widen(bytes, values, f32::from_le_bytes),
        Element::Bf16 => widen(bytes, values, |two| bf16_to_f32(u16::from_le_bytes(two))),
        Element::F16 => widen(bytes, values, |two| f16_to_f32(u16::from_le_bytes(two))),
        other => unreachable!("a tensor of type {other} has to be refused before"),
    }
}

#[inline(always)]
fn widen<const N: usize>(bytes: &[u8], values: &mut [f32], value_of: impl Fn([u8; N]) -> f32) {
    for (stored, value) in bytes.as_chunks::<N>().0.iter().zip(values) {
        *value = value_of(*stored);
    }
}

/// Writes values as little-endian `element`, each rounded once: to nearest, ties to even.
pub fn round_into(values: &[f32], element: Element, bytes: &mut [u8]) {
    match element {
        Element::F32 => narrow(values, bytes, f32::to_le_bytes),
        Element::Bf16 => narrow(values, bytes, |value| f32_to_bf16(value).to_le_bytes()),
        Element::F16 => narrow(values, bytes, |value| f32_to_f16(value).to_le_bytes()),
        other => unreachable!("nothing is rounded to {other}"),
    }
}

#[inline(always)]
fn narrow<const N: usize>(values: &[f32], bytes: &mut [u8], bytes_of: impl Fn(f32) -> [u8; N]) {
    for (value, stored) in values.iter().zip(bytes.as_chunks_mut::<N>().0) {
        *stored = bytes_of(*value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_nearest_even() {
        let values = [1.0, 1.0 + 1.0 / 256.0, 65520.0];
        let mut bytes = [0; 6];
        round_into(&values, Element::Bf16, &mut bytes);
        assert_eq!(bytes, [0x80, 0x3f, 0x80, 0x3f, 0x80, 0x47]);
        round_into(&values, Element::F16, &mut bytes);
        assert_eq!(bytes, [0x00, 0x3c, 0x04, 0x3c, 0x00, 0x7c]);
    }
}
