//! bitsandbytes' int8 weights: a signed byte per element, and the largest magnitude of each row.
//!
//! The library rounds a model's weights to f16 before it quantizes them; to get the same bytes, do so first. Decoding is
//! that of its backward pass, byte · (largest · 1/127); its `int8_vectorwise_dequant` computes (byte · largest) · 1/127,
//! which differs in the last bit for three of ten elements.

use super::{largest_magnitude, read_f32};
use crate::storage::row_scales;

/// 1/127 in f32.
pub const ONE_127TH: f32 = 1.0 / 127.0;

/// Encodes a row and returns its largest magnitude. A row of zeros becomes zeros.
pub fn encode_row(values: &[f32], codes: &mut [u8]) -> f32 {
    let largest = largest_magnitude(values);
    let factor = 127.0 / largest;
    // Adding 1.5 · 2^23 leaves no bits below one, so the sum is rounded to even. A row of zeros gives 0 · ∞ = NaN, which
    // becomes 0.
    const ROUNDER: f32 = 12_582_912.0;
    for (value, code) in values.iter().zip(codes) {
        *code = (value * factor + ROUNDER - ROUNDER) as i8 as u8;
    }
    largest
}

/// Decodes elements `first..first + target.len()`.
pub fn decode(rows: usize, columns: usize, bytes: &[u8], first: usize, target: &mut [f32]) {
    let scales = row_scales(rows, columns);
    for (element, value) in (first..).zip(target) {
        let largest = read_f32(bytes, scales + 4 * (element / columns));
        *value = f32::from(bytes[element] as i8) * (largest * ONE_127TH);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_round_to_even_and_zeros_stay() {
        let mut codes = [0; 5];
        assert_eq!(encode_row(&[-127.0, 0.5, 1.5, -2.5, 126.5], &mut codes), 127.0);
        assert_eq!(codes.map(|code| code as i8), [-127, 0, 2, -2, 126]);
        assert_eq!(encode_row(&[0.0, -0.0], &mut codes[..2]), 0.0);
        assert_eq!(codes[..2], [0, 0]);
    }

    #[test]
    fn a_row_has_its_own_scale() {
        let mut bytes = vec![127, 0x81, 1, 0xFF];
        bytes.extend(2.0f32.to_le_bytes());
        bytes.extend(254.0f32.to_le_bytes());
        let mut decoded = [0.0; 3];
        decode(2, 2, &bytes, 1, &mut decoded);
        assert_eq!(decoded, [-127.0 * (2.0 * ONE_127TH), 254.0 * ONE_127TH, -(254.0 * ONE_127TH)]);
        // The constant in the source of bitsandbytes.
        assert_eq!(f64::from(ONE_127TH), 7.874_015_718_698_502e-3);
    }
}
