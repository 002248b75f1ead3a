//! A writer that refuses NaN and infinity, so that they never get into a saved tensor.
//!
//! Otherwise they would be noticed only when the file is used. Checking the exponents takes little time
//! compared with writing to disk.

use crate::element::Element;
use std::io::{self, Write};
use thiserror::Error;

/// A tensor has a NaN or an infinity.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("tensor `{tensor}` is not finite: element {element} is {value}")]
pub struct NotFinite {
    pub tensor: String,
    /// Position in the tensor.
    pub element: u64,
    /// `NaN`, `inf` or `-inf`.
    pub value: String,
}

/// Position and value of the first NaN or infinity among little-endian elements. Integers are always finite.
pub fn first_not_finite(element: Element, bytes: &[u8]) -> Option<(usize, f64)> {
    let found = match element {
        Element::F32 => position::<4>(bytes, |word| (u32::from_le_bytes(word) >> 16) as u16, 0x7f80),
        Element::Bf16 => position::<2>(bytes, u16::from_le_bytes, 0x7f80),
        Element::F16 => position::<2>(bytes, u16::from_le_bytes, 0x7c00),
        _ => None,
    }?;
    let size = element.size_bytes();
    let bytes = &bytes[found * size..][..size];
    let value = match element {
        Element::F32 => f64::from(f32::from_le_bytes(bytes.try_into().ok()?)),
        Element::Bf16 => half::bf16::from_le_bytes(bytes.try_into().ok()?).to_f64(),
        _ => half::f16::from_le_bytes(bytes.try_into().ok()?).to_f64(),
    };
    Some((found, value))
}

/// Position of the first element whose exponent bits, which are in the upper 16 bits, are all ones.
#[inline(always)]
fn position<const N: usize>(bytes: &[u8], upper: impl Fn([u8; N]) -> u16, exponent: u16) -> Option<usize> {
    const AT_ONCE: usize = 256;
    let (elements, _) = bytes.as_chunks::<N>();
    let is_not_finite = |element: &[u8; N]| upper(*element) & exponent == exponent;
    // The loop over a block has no branch, so the compiler vectorizes it.
    let block = (elements.chunks(AT_ONCE))
        .position(|block| block.iter().fold(false, |any, element| any | is_not_finite(element)))?;
    elements[block * AT_ONCE..].iter().position(is_not_finite).map(|place| block * AT_ONCE + place)
}

/// Passes the bytes of one tensor on and fails at the first number that is not finite. Each write must have
/// whole elements.
pub struct FiniteWriter<'a> {
    out: &'a mut dyn Write,
    tensor: &'a str,
    element: Element,
    written: u64,
}

impl<'a> FiniteWriter<'a> {
    pub fn new(out: &'a mut dyn Write, tensor: &'a str, element: Element) -> FiniteWriter<'a> {
        FiniteWriter { out, tensor, element, written: 0 }
    }
}

impl Write for FiniteWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let size = self.element.size_bytes();
        debug_assert!(bytes.len().is_multiple_of(size), "{} bytes of {}", bytes.len(), self.element);
        if let Some((place, value)) = first_not_finite(self.element, bytes) {
            let element = self.written / size as u64 + place as u64;
            let (tensor, value) = (self.tensor.to_owned(), value.to_string());
            return Err(io::Error::other(NotFinite { tensor, element, value }));
        }
        self.out.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_16_bit_number_is_classified_correctly() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_le_bytes();
            let found = |element| first_not_finite(element, &bytes).is_some();
            assert_eq!(found(Element::Bf16), !bf16::from_bits(bits).is_finite(), "{bits:#x}");
            assert_eq!(found(Element::F16), !f16::from_bits(bits).is_finite(), "{bits:#x}");
        }
        for bits in
            [0, 0x7f7f_ffff, 0x7f80_0000, 0x7f80_0001, 0xff80_0000, 0xffff_ffff, 0x3f80_0000, 0x007f_ffff]
        {
            let is_finite = f32::from_bits(bits).is_finite();
            assert_eq!(first_not_finite(Element::F32, &bits.to_le_bytes()).is_none(), is_finite, "{bits:#x}");
        }
        assert_eq!(first_not_finite(Element::U8, &[0xff; 64]), None);
    }

    #[test]
    fn the_error_names_the_first_position() {
        let mut numbers = vec![1.0f32; 1000];
        (numbers[700], numbers[900]) = (f32::NEG_INFINITY, f32::NAN);
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        assert_eq!(first_not_finite(Element::F32, &bytes), Some((700, f64::NEG_INFINITY)));
        let mut written = Vec::new();
        let mut writer = FiniteWriter::new(&mut written, "a", Element::F32);
        let error = bytes.chunks(64).try_for_each(|piece| writer.write_all(piece)).unwrap_err();
        assert_eq!(error.to_string(), "tensor `a` is not finite: element 700 is -inf");
        assert!(error.get_ref().unwrap().is::<NotFinite>());
        assert!(written.len() <= 4 * 700);
    }
}
