//! Element types of stored weights and the conversions between them, rounding to nearest even.
//!
//! The scalar conversions have no branch, so that loops over them vectorise.
//! A NaN becomes a quiet NaN; overflow to f16 becomes an infinity, as in IEEE 754.
//! Left out: quantised block formats.

use super::simd::{Isa, kernel};

/// How a stored number is laid out, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    F32,
    Bf16,
    F16,
}

impl Element {
    #[inline(always)]
    pub const fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 | Element::F16 => 2,
        }
    }
}

/// An element type as a type, for code compiled once per element type.
pub trait StoredElement {
    const ELEMENT: Element;
    const ZERO: Self::Bits;
    type Bits: Copy;

    fn widen(bits: Self::Bits) -> f32;
}

pub struct StoredF32;
pub struct StoredBf16;
pub struct StoredF16;

impl StoredElement for StoredF32 {
    const ELEMENT: Element = Element::F32;
    const ZERO: f32 = 0.0;
    type Bits = f32;

    #[inline(always)]
    fn widen(bits: f32) -> f32 {
        bits
    }
}

impl StoredElement for StoredBf16 {
    const ELEMENT: Element = Element::Bf16;
    const ZERO: u16 = 0;
    type Bits = u16;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        bf16_to_f32(bits)
    }
}

impl StoredElement for StoredF16 {
    const ELEMENT: Element = Element::F16;
    const ZERO: u16 = 0;
    type Bits = u16;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f16_to_f32(bits)
    }
}

/// Converts all of `src` into `dst`; both hold the same number of whole elements and need no alignment.
/// Conversion between the 16-bit types goes through f32, which holds both exactly.
pub fn convert_slice(from: Element, src: &[u8], to: Element, dst: &mut [u8]) {
    let count = src.len() / from.bytes();
    assert!(
        src.len() == count * from.bytes() && dst.len() == count * to.bytes(),
        "`convert_slice`: {} bytes of {from:?} do not fill {} bytes of {to:?}",
        src.len(),
        dst.len()
    );
    convert(Isa::current(), from, src, to, dst);
}

kernel! {
    fn convert(from: Element, src: &[u8], to: Element, dst: &mut [u8]) {
        match (from, to) {
            (Element::F32, Element::Bf16) => narrow::<false>(src, dst),
            (Element::F32, Element::F16) => narrow::<true>(src, dst),
            (Element::Bf16, Element::F32) => widen::<false>(src, dst),
            (Element::F16, Element::F32) => widen::<true>(src, dst),
            (Element::Bf16, Element::F16) => recode::<true>(src, dst),
            (Element::F16, Element::Bf16) => recode::<false>(src, dst),
            (Element::F32, Element::F32)
            | (Element::Bf16, Element::Bf16)
            | (Element::F16, Element::F16) => dst.copy_from_slice(src),
        }
    }
}

#[inline(always)]
fn narrow<const TO_F16: bool>(src: &[u8], dst: &mut [u8]) {
    for (four, two) in src.as_chunks().0.iter().zip(dst.as_chunks_mut().0) {
        *two = encode::<TO_F16>(f32::from_le_bytes(*four));
    }
}

#[inline(always)]
fn widen<const FROM_F16: bool>(src: &[u8], dst: &mut [u8]) {
    for (two, four) in src.as_chunks().0.iter().zip(dst.as_chunks_mut().0) {
        *four = decode::<FROM_F16>(*two).to_le_bytes();
    }
}

#[inline(always)]
fn recode<const TO_F16: bool>(src: &[u8], dst: &mut [u8]) {
    for (two, out) in src.as_chunks().0.iter().zip(dst.as_chunks_mut().0) {
        let value = if TO_F16 { decode::<false>(*two) } else { decode::<true>(*two) };
        *out = encode::<TO_F16>(value);
    }
}

#[inline(always)]
fn encode<const F16: bool>(value: f32) -> [u8; 2] {
    if F16 { f32_to_f16(value).to_le_bytes() } else { f32_to_bf16(value).to_le_bytes() }
}

#[inline(always)]
fn decode<const F16: bool>(bytes: [u8; 2]) -> f32 {
    if F16 { f16_to_f32(u16::from_le_bytes(bytes)) } else { bf16_to_f32(u16::from_le_bytes(bytes)) }
}

#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    // Half a unit, less one unless the kept part is odd: ties go to even.
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1));
    let quiet_nan = bits | 0x0040_0000;
    let kept = if value.is_nan() { quiet_nan } else { rounded };
    (kept >> 16) as u16
}

#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7FFF) << 13;
    // Read with f32's exponent bias the number is 2^112 too small, subnormals included.
    let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let quiet = if bits & 0x03FF != 0 { 0x0040_0000 } else { 0 };
    let special = magnitude | 0x7F80_0000 | quiet;
    let is_special = bits & 0x7C00 == 0x7C00;
    let value = if is_special { special } else { scaled.to_bits() };
    f32::from_bits(value | sign)
}

#[inline(always)]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    // Normal results: move the exponent bias, add half a unit less one (plus one when odd), cut.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0x0FFF + odd) >> 13;
    // Subnormal results: the addition to 1/2 shifts and rounds; its low mantissa bits are the answer.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
    const OVERFLOW: u32 = (127 + 16) << 23;
    let finite = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
    let nan = 0x7E00 | (magnitude >> 13) & 0x03FF;
    let bounded = if magnitude >= OVERFLOW { 0x7C00 } else { finite };
    let result = if magnitude > 0x7F80_0000 { nan } else { bounded };
    result as u16 | sign
}

#[cfg(test)]
mod tests {
    use super::super::testing::on_every_isa;
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_16_bit_pattern_widens_as_in_half() {
        for bits in 0..=u16::MAX {
            let want = f16::from_bits(bits).to_f32();
            assert_eq!(f16_to_f32(bits).to_bits(), want.to_bits(), "f16 {bits:#06x}");
            let want = bf16::from_bits(bits).to_f32();
            let got = bf16_to_f32(bits);
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "bf16 {bits:#06x}");
        }
    }

    /// Every sign and exponent, with mantissas at, next to and between the rounding boundaries.
    fn telling_floats() -> impl Iterator<Item = f32> {
        (0..512_u32).flat_map(|sign_and_exponent| {
            let edges = (0..24).flat_map(|shift| {
                let one = 1_u32 << shift;
                [one, one.wrapping_sub(1), one + 1, one | 0x2000, one | 0x1_0000, one | 0x3000]
            });
            let spread = (0..200_u32).map(|k| k.wrapping_mul(0x9E37_79B9) >> 9);
            edges
                .chain(spread)
                .chain([0, 0x7F_FFFF])
                .map(move |mantissa| f32::from_bits(sign_and_exponent << 23 | mantissa & 0x7F_FFFF))
        })
    }

    #[test]
    fn f32_narrows_as_in_half() {
        for value in telling_floats() {
            let (got, want) = (f32_to_f16(value), f16::from_f32_const(value));
            assert!(
                got == want.to_bits() || (f16::from_bits(got).is_nan() && want.is_nan()),
                "f16 of {value:e} ({:#x}): {got:#x}, want {want:?}",
                value.to_bits()
            );
            let (got, want) = (f32_to_bf16(value), bf16::from_f32(value));
            assert!(
                got == want.to_bits() || (bf16::from_bits(got).is_nan() && want.is_nan()),
                "bf16 of {value:e}: {got:#x}, want {want:?}"
            );
        }
    }

    #[test]
    fn slices_convert_like_scalars_between_all_types() {
        let count = 16_384 + 37;
        let values: Vec<f32> = telling_floats().step_by(7).take(count).collect();
        let encode = |element: Element, value: f32| match element {
            Element::F32 => value.to_le_bytes().to_vec(),
            Element::Bf16 => f32_to_bf16(value).to_le_bytes().to_vec(),
            Element::F16 => f32_to_f16(value).to_le_bytes().to_vec(),
        };
        let decode = |element: Element, bytes: &[u8]| match element {
            Element::F32 => f32::from_le_bytes(bytes.try_into().unwrap()),
            Element::Bf16 => bf16_to_f32(u16::from_le_bytes(bytes.try_into().unwrap())),
            Element::F16 => f16_to_f32(u16::from_le_bytes(bytes.try_into().unwrap())),
        };
        let all = [Element::F32, Element::Bf16, Element::F16];
        for (from, to) in all.iter().flat_map(|a| all.iter().map(move |b| (*a, *b))) {
            let src: Vec<u8> = values.iter().flat_map(|value| encode(from, *value)).collect();
            let want: Vec<u8> = src
                .chunks(from.bytes())
                .flat_map(|bytes| if from == to { bytes.to_vec() } else { encode(to, decode(from, bytes)) })
                .collect();
            let got = on_every_isa(|| {
                let mut dst = vec![0; values.len() * to.bytes()];
                convert_slice(from, &src, to, &mut dst);
                dst
            });
            assert!(got == want, "{from:?} to {to:?}");
        }
    }

    #[test]
    #[should_panic(expected = "do not fill")]
    fn a_wrong_length_is_refused() {
        convert_slice(Element::F32, &[0; 8], Element::F16, &mut [0; 6]);
    }
}
