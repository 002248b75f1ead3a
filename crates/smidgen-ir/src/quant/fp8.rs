//! Floats of eight bits (e4m3): a sign, four bits of exponent, three of mantissa, and a scale for each row or square.
//!
//! Encoding uses scales of rows: the largest magnitude of a row becomes 448, the largest number of the format. Numbers are
//! rounded to nearest, ties to even; those below 2⁻⁶ have fewer bits. The format has no infinity. Its NaN, all bits of a
//! magnitude set, is never written.

use super::{largest_magnitude, read_f32};
use crate::storage::{FP8_BLOCK, row_scales};

/// The largest number of the format.
pub const LARGEST: f32 = 448.0;
/// 2¹²⁰: the bias of f32's exponent above that of e4m3.
pub const EXPONENT_SHIFT: f32 = f32::from_bits((127 + 120) << 23);
/// The magnitude bits of NaN.
pub const NAN: u8 = 0x7F;
/// The smallest number with all three bits of mantissa.
const SMALLEST_NORMAL: f32 = 1.0 / 64.0;

/// The number that a byte stands for.
pub fn decode_byte(byte: u8) -> f32 {
    if byte & 0x7F == NAN {
        return f32::NAN;
    }
    let (sign, magnitude) = (u32::from(byte & 0x80) << 24, u32::from(byte & 0x7F) << 20);
    f32::from_bits(sign | magnitude) * EXPONENT_SHIFT
}

/// The nearest byte; magnitudes above 448 become 448, and NaN becomes zero.
pub fn encode_byte(value: f32) -> u8 {
    let magnitude = value.abs().min(LARGEST);
    let code = if value.is_nan() {
        0
    } else if magnitude < SMALLEST_NORMAL {
        // Subnormal codes count multiples of 2⁻⁹. Code 8 is the smallest normal number, which is 8 · 2⁻⁹.
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        let bits = magnitude.to_bits();
        let rounded = bits + 0x7_FFFF + (bits >> 20 & 1);
        ((rounded >> 20) - (120 << 3)) as u8
    };
    code | if value.is_sign_negative() { 0x80 } else { 0 }
}

/// Encodes a row and returns its scale. A row of zeros, or of numbers too small for a scale, becomes zeros.
pub fn encode_row(values: &[f32], codes: &mut [u8]) -> f32 {
    let scale = largest_magnitude(values) * (1.0 / LARGEST);
    let factor = if scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale };
    for (value, code) in values.iter().zip(codes) {
        *code = encode_byte(value * factor);
    }
    scale
}

/// Decodes elements `first..first + target.len()`.
pub fn decode(rows: usize, columns: usize, bytes: &[u8], first: usize, target: &mut [f32]) {
    let scales = row_scales(rows, columns);
    for (element, value) in (first..).zip(target) {
        *value = decode_byte(bytes[element]) * read_f32(bytes, scales + 4 * (element / columns));
    }
}

/// Decodes elements `first..first + target.len()` of a matrix with a scale for each square.
pub fn decode_blocks(rows: usize, columns: usize, bytes: &[u8], first: usize, target: &mut [f32]) {
    let (scales, across) = (row_scales(rows, columns), columns.div_ceil(FP8_BLOCK));
    for (element, value) in (first..).zip(target) {
        let (row, column) = (element / columns, element % columns);
        let square = row / FP8_BLOCK * across + column / FP8_BLOCK;
        *value = decode_byte(bytes[element]) * read_f32(bytes, scales + 4 * square);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All 126 positive numbers ascend, from 2⁻⁹ to 448, and every byte encodes to itself.
    #[test]
    fn every_byte_is_a_number_of_its_own() {
        let positive: Vec<f32> = (0..=0x7E).map(decode_byte).collect();
        assert!(positive.is_sorted_by(|one, other| one < other));
        assert_eq!((positive[1], positive[8], positive[0x7E]), (1.0 / 512.0, 1.0 / 64.0, LARGEST));
        assert_eq!((decode_byte(0x38), decode_byte(0xBC)), (1.0, -1.5));
        for byte in (0..=0x7E).chain(0x80..=0xFE) {
            assert_eq!(encode_byte(decode_byte(byte)), byte);
        }
        assert!([0x7F, 0xFF].map(decode_byte).iter().all(|value| value.is_nan()));
    }

    /// A number between two neighbours goes to the nearer one, and from the middle to the even one.
    #[test]
    fn numbers_round_to_nearest_and_ties_to_even() {
        for low in 0..0x7Eu8 {
            let (below, above) = (decode_byte(low), decode_byte(low + 1));
            let even = low + low % 2;
            let middle = (below + above) / 2.0;
            assert_eq!(encode_byte(middle), even, "between {below} and {above}");
            assert_eq!(encode_byte(middle.next_down()), low);
            assert_eq!(encode_byte(-middle.next_up()), 0x80 | (low + 1));
        }
        assert_eq!([480.0, f32::INFINITY].map(encode_byte), [0x7E; 2]);
        assert_eq!(encode_byte(f32::NAN) & 0x7F, 0);
    }

    #[test]
    fn the_largest_of_a_row_is_kept_and_zeros_stay() {
        let mut codes = [1; 4];
        let scale = encode_row(&[0.5, -7.0, 0.0, 3.5], &mut codes);
        assert_eq!(codes.map(|code| decode_byte(code) * scale), [0.5, -7.0, 0.0, 3.5]);
        assert_eq!(encode_row(&[0.0, -0.0], &mut codes[..2]), 0.0);
        assert_eq!(codes[..2].iter().map(|code| decode_byte(*code)).sum::<f32>(), 0.0);
    }

    /// Two rows of two squares, the last of each with one element.
    #[test]
    fn a_square_has_its_own_scale() {
        let (rows, columns) = (FP8_BLOCK + 1, FP8_BLOCK + 1);
        let mut bytes = vec![encode_byte(2.0); rows * columns];
        for scale in [1.0f32, 10.0, 100.0, 1000.0] {
            bytes.extend(scale.to_le_bytes());
        }
        let mut decoded = vec![0.0; rows * columns];
        decode_blocks(rows, columns, &bytes, 0, &mut decoded);
        let corners = [0, FP8_BLOCK, FP8_BLOCK * columns, FP8_BLOCK * columns + FP8_BLOCK];
        assert_eq!(corners.map(|corner| decoded[corner]), [2.0, 20.0, 200.0, 2000.0]);
        assert_eq!(decoded[FP8_BLOCK - 1], 2.0);
        assert_eq!(decoded[FP8_BLOCK * columns - 1], 20.0);
    }
}
