//! Reads a range of a tensor into memory and converts the elements if the types differ.
//! Elements of the same type are read directly into the destination. Others go through a small scratch
//! buffer, so a load needs no memory beyond what the plan reserves.
//! F32, BF16 and F16 are converted into each other through F32, which represents all three exactly. Each
//! value is rounded once, to nearest, ties to even; values beyond the largest F16 become infinity.
//! Left out: quantizing, and converting integers.

use smidgen_ir::quant::convert_plain;
use thiserror::Error;

use crate::element::Element;
use crate::safetensors::SafetensorsError;
use crate::tensor_ref::TensorRef;

/// Bytes of the scratch buffer that are used at most; a larger buffer makes no difference.
pub const MAX_PIECE_BYTES: usize = 64 << 10;

#[derive(Debug, Error)]
pub enum LoadError {
    #[error("tensor `{tensor}` in `{}` holds {from}, which cannot be read as {to}", path.display())]
    NoConversion { tensor: String, path: std::path::PathBuf, from: Element, to: Element },
    #[error(transparent)]
    File(#[from] SafetensorsError),
}

/// Fills `destination` with the elements of `tensor` from `first_element` on, as little-endian `to`.
/// `scratch` is used only if the types differ.
///
/// # Panics
/// If the range reaches beyond the tensor, if `destination` ends inside an element, or if `scratch` is needed
/// and is shorter than one element.
pub fn read_tensor_into(
    tensor: &TensorRef,
    first_element: u64,
    to: Element,
    destination: &mut [u8],
    scratch: &mut [u8],
) -> Result<(), LoadError> {
    let from = tensor.element();
    let elements = destination.len() / to.size_bytes();
    assert!(
        destination.len() == elements * to.size_bytes(),
        "{} bytes are not a whole number of {to} elements",
        destination.len()
    );
    assert!(
        (first_element.checked_add(elements as u64)).is_some_and(|end| end <= tensor.elements()),
        "{elements} elements from {first_element} reach beyond the {} of tensor `{}`",
        tensor.elements(),
        tensor.name()
    );
    let mut byte_offset = first_element * from.size_bytes() as u64;
    if from == to {
        return Ok(tensor.read_at(byte_offset, destination)?);
    }
    let (Some(from_dtype), Some(to_dtype)) = (from.dtype(), to.dtype()) else {
        let (tensor, path) = (tensor.name().to_string(), tensor.file_path().to_path_buf());
        return Err(LoadError::NoConversion { tensor, path, from, to });
    };
    let piece_elements = scratch.len().min(MAX_PIECE_BYTES) / from.size_bytes();
    assert!(piece_elements > 0 || elements == 0, "the scratch buffer holds no element");
    for piece in destination.chunks_mut((piece_elements * to.size_bytes()).max(1)) {
        let stored = &mut scratch[..piece.len() / to.size_bytes() * from.size_bytes()];
        tensor.read_at(byte_offset, stored)?;
        byte_offset += stored.len() as u64;
        convert_plain(from_dtype, stored, to_dtype, piece);
    }
    Ok(())
}

/// Whether `read_tensor_into` can read `from` as `to`.
pub fn can_read_as(from: Element, to: Element) -> bool {
    from == to || (from.dtype().is_some() && to.dtype().is_some())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::safetensors::SafetensorsFile;
    use crate::safetensors::write::{TensorSpec, pytorch_metadata, write_safetensors};
    use half::{bf16, f16};

    fn stored(element: Element, data: &[u8]) -> (tempfile::TempDir, TensorRef) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let specs =
            [TensorSpec { name: "x".to_string(), element, shape: vec![data.len() / element.size_bytes()] }];
        write_safetensors(&path, &pytorch_metadata(), &specs, |_, w| w.write_all(data)).unwrap();
        let file = Arc::new(SafetensorsFile::open(&path).unwrap());
        (folder, TensorRef::new(&file, 0))
    }

    fn bits16(bytes: &[u8]) -> Vec<u16> {
        let (pairs, _) = bytes.as_chunks::<2>();
        pairs.iter().map(|&pair| u16::from_le_bytes(pair)).collect()
    }

    fn read_all(tensor: &TensorRef, to: Element, scratch_bytes: usize) -> Vec<u8> {
        let mut destination = vec![0; tensor.elements() as usize * to.size_bytes()];
        read_tensor_into(tensor, 0, to, &mut destination, &mut vec![0; scratch_bytes]).unwrap();
        destination
    }

    #[test]
    fn tensors_of_any_type_are_read_as_stored_without_scratch() {
        let (_folder, tensor) =
            stored(Element::I64, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        let mut one = [0; 8];
        read_tensor_into(&tensor, 1, Element::I64, &mut one, &mut []).unwrap();
        assert_eq!(one, [9, 10, 11, 12, 13, 14, 15, 16]);
    }

    /// Bit patterns worked out by hand: bf16 keeps the upper 16 bits of an f32, f16 has 10 fraction bits.
    #[test]
    fn narrowing_rounds_to_nearest_with_ties_to_even() {
        let inputs = [
            (0x3f80_0000, 0x3f80, 0x3c00), // 1
            (0x3f80_8000, 0x3f80, 0x3c04), // 1 + 2^-8: a bf16 tie, down to even
            (0x3f81_8000, 0x3f82, 0x3c0c), // 1 + 3 * 2^-8: a bf16 tie, up to even
            (0x3f80_8001, 0x3f81, 0x3c04), // just above the tie
            (0x3f80_1000, 0x3f80, 0x3c00), // 1 + 2^-11: an f16 tie, down to even
            (0x3f80_3000, 0x3f80, 0x3c02), // 1 + 3 * 2^-11: an f16 tie, up to even
            (0xbf80_1001, 0xbf80, 0xbc01), // just beyond the f16 tie, negative
            (0x477f_f000, 0x4780, 0x7c00), // 65520: rounds to infinity in f16, to 65536 in bf16
            (0x7f7f_ffff, 0x7f80, 0x7c00), // the largest f32: infinity in both
            (0x3380_0000, 0x3380, 0x0001), // 2^-24: the smallest f16 subnormal
            (0x3300_0000, 0x3300, 0x0000), // 2^-25: a tie, down to zero
            (0x8000_0000, 0x8000, 0x8000), // -0
            (0xff80_0000, 0xff80, 0xfc00), // -infinity
        ];
        let data: Vec<u8> = inputs.iter().flat_map(|i| u32::to_le_bytes(i.0)).collect();
        let (_folder, tensor) = stored(Element::F32, &data);
        let read = |to| bits16(&read_all(&tensor, to, 64));
        assert_eq!(read(Element::Bf16), inputs.map(|i| i.1));
        assert_eq!(read(Element::F16), inputs.map(|i| i.2));
    }

    #[test]
    fn nan_stays_nan_and_is_not_rounded_to_infinity() {
        // The payload is only in the low bits, which a truncation would drop.
        let (_folder, tensor) = stored(Element::F32, &0x7f80_0001_u32.to_le_bytes());
        assert!(bf16::from_bits(bits16(&read_all(&tensor, Element::Bf16, 4))[0]).is_nan());
        assert!(f16::from_bits(bits16(&read_all(&tensor, Element::F16, 4))[0]).is_nan());
    }

    #[test]
    fn every_half_value_widens_exactly_and_comes_back() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for element in [Element::Bf16, Element::F16] {
            let (_folder, tensor) = stored(element, &all);
            let wide = read_all(&tensor, Element::F32, 1 << 20);
            let (_folder, tensor) = stored(Element::F32, &wide);
            let narrow = bits16(&read_all(&tensor, element, 1 << 20));
            for (bits, &back) in (0..=u16::MAX).zip(&narrow) {
                let is_nan = match element {
                    Element::Bf16 => bf16::from_bits(bits).is_nan(),
                    _ => f16::from_bits(bits).is_nan(),
                };
                assert!(is_nan || back == bits, "{element} {bits:#06x} came back as {back:#06x}");
            }
        }
    }

    #[test]
    fn the_two_half_types_convert_with_one_rounding() {
        // bf16 0x3f81 is 1 + 2^-7, exact in f16; f16 0x3c04 is 1 + 2^-8, a tie in bf16.
        let (_folder, tensor) = stored(Element::Bf16, &0x3f81_u16.to_le_bytes());
        assert_eq!(bits16(&read_all(&tensor, Element::F16, 2)), [0x3c08]);
        let (_folder, tensor) = stored(Element::F16, &0x3c04_u16.to_le_bytes());
        assert_eq!(bits16(&read_all(&tensor, Element::Bf16, 2)), [0x3f80]);
    }

    #[test]
    fn the_result_does_not_depend_on_the_size_of_the_pieces() {
        let values: Vec<f32> = (0..50_000).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let (_folder, tensor) = stored(Element::F32, &data);
        let expected: Vec<u16> = values.iter().map(|&v| bf16::from_f32(v).to_bits()).collect();
        for scratch_bytes in [4, 7, 4096, 1 << 20] {
            assert_eq!(bits16(&read_all(&tensor, Element::Bf16, scratch_bytes)), expected);
        }
        let mut pieced = vec![0; 100_000];
        let mut first_element = 0;
        for piece in pieced.chunks_mut(2 * 777) {
            read_tensor_into(&tensor, first_element, Element::Bf16, piece, &mut [0; 512]).unwrap();
            first_element += piece.len() as u64 / 2;
        }
        assert_eq!(bits16(&pieced), expected);
    }

    #[test]
    fn an_empty_range_reads_nothing() {
        let (_folder, tensor) = stored(Element::F32, &[0; 8]);
        read_tensor_into(&tensor, 2, Element::Bf16, &mut [], &mut []).unwrap();
    }

    #[test]
    fn types_without_a_conversion_are_refused() {
        let (_folder, tensor) = stored(Element::I32, &[0; 8]);
        let error = read_tensor_into(&tensor, 0, Element::F32, &mut [0; 8], &mut [0; 8]).unwrap_err();
        let path = tensor.file_path().display().to_string();
        assert_eq!(
            error.to_string(),
            format!("tensor `x` in `{path}` holds I32, which cannot be read as F32")
        );
        let convertible = |element: &&Element| can_read_as(**element, Element::F32);
        let found: Vec<Element> = Element::ALL.iter().filter(convertible).copied().collect();
        assert_eq!(found, [Element::F16, Element::Bf16, Element::F32]);
    }

    #[test]
    #[should_panic(expected = "2 elements from 1 reach beyond the 2 of tensor `x`")]
    fn reading_beyond_the_tensor_panics() {
        let (_folder, tensor) = stored(Element::F32, &[0; 8]);
        let _ = read_tensor_into(&tensor, 1, Element::Bf16, &mut [0; 4], &mut [0; 8]);
    }
}
