//! The 8-bit dynamic maps of bitsandbytes: the signed one quantizes the scales of 4-bit storages and first
//! moments, the unsigned one second moments.
//!
//! For e = 0..=6 the signed map has the 2^e midpoints of 2^e + 1 boundaries spaced equally on [0.1, 1], times 10^(e - 6),
//! with both signs; and 0 and 1. The unsigned map has twice as many midpoints. Values are rounded like torch's, whose
//! `linspace` is a fused multiply-add from the nearer end; files that contain the map contain exactly these floats.
//! Encoding of scales follows the library's CPU path, which multiplies by the reciprocal of the largest magnitude and looks
//! up on a grid of 2^16 points: it misses the nearest code once or twice in a thousand, near zero by up to four codes.
//! Moments are encoded by `nearest_code.rs`.

use super::largest_magnitude;
use crate::storage::{DYNAMIC8_BLOCK, dynamic8_codes};

/// Ascending; entry 127 is 0, entry 255 is 1.
pub static SIGNED_MAP: [f32; 256] = signed_map();

/// Ascending from 0 to 1.
pub static UNSIGNED_MAP: [f32; 256] = unsigned_map();

const GRID: u32 = 65536;

pub(super) const fn signed_map() -> [f32; 256] {
    let positive: [f32; 127] = midpoints(1);
    let mut map = [0.0; 256];
    let mut place = 0;
    while place < 127 {
        map[128 + place] = positive[place];
        map[126 - place] = -positive[place];
        place += 1;
    }
    map[255] = 1.0;
    map
}

pub(super) const fn unsigned_map() -> [f32; 256] {
    let positive: [f32; 254] = midpoints(2);
    let mut map = [0.0; 256];
    let mut place = 0;
    while place < 254 {
        map[1 + place] = positive[place];
        place += 1;
    }
    map[255] = 1.0;
    map
}

/// The midpoints of all decades, ascending, with `coarsest` of them in the lowest decade.
const fn midpoints<const COUNT: usize>(coarsest: usize) -> [f32; COUNT] {
    const POWERS: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut values = [0.0; COUNT];
    let mut place = 0;
    let mut exponent = 0;
    while exponent < POWERS.len() {
        let items = coarsest << exponent;
        let mut item = 0;
        while item < items {
            let middle = (boundary(item, items) + boundary(item + 1, items)) / 2.0;
            values[place] = POWERS[exponent] * middle;
            place += 1;
            item += 1;
        }
        exponent += 1;
    }
    assert!(place == COUNT);
    values
}

/// Point `index` of `intervals` on [0.1, 1]. The product is exact in f64, so this rounds as a fused
/// multiply-add in f32 does.
const fn boundary(index: usize, intervals: usize) -> f32 {
    const BEGIN: f32 = 0.1;
    const END: f32 = 1.0;
    let step = ((END - BEGIN) / intervals as f32) as f64;
    if index < intervals.div_ceil(2) {
        (BEGIN as f64 + step * index as f64) as f32
    } else {
        (END as f64 - step * (intervals - index) as f64) as f32
    }
}

/// Elements `first..first + target.len()` of a tensor in [`crate::Storage::Dynamic8`].
pub fn decode(signed: bool, elements: usize, bytes: &[u8], first: usize, target: &mut [f32]) {
    let map = if signed { &SIGNED_MAP } else { &UNSIGNED_MAP };
    let (scales, codes) = bytes.split_at(dynamic8_codes(elements));
    let (scales, _) = scales.as_chunks::<4>();
    for (at, value) in target.iter_mut().enumerate() {
        let element = first + at;
        *value = map[usize::from(codes[element])] * f32::from_le_bytes(scales[element / DYNAMIC8_BLOCK]);
    }
}

/// Encodes values that share a scale and returns that scale, their largest magnitude.
pub fn encode_group(values: &[f32], codes: &mut [u8]) -> f32 {
    let largest = largest_magnitude(values);
    if largest == 0.0 {
        codes.fill(0);
        return largest;
    }
    let reciprocal = 1.0 / largest;
    for (value, code) in values.iter().zip(codes) {
        *code = encode(value * reciprocal);
    }
    largest
}

/// The code of a number in -1..=1.
fn encode(normed: f32) -> u8 {
    let last = (GRID - 1) as f32;
    let point = ((normed + 1.0) * (0.5 * last) + 0.5) as u32;
    let on_grid = point.min(GRID - 1) as f32 * (2.0 / last) - 1.0;
    let (mut low, mut high) = (0, 255);
    while low < high {
        let middle = (low + high) / 2;
        let threshold = (SIGNED_MAP[middle] + SIGNED_MAP[middle + 1]) / 2.0;
        if on_grid > threshold {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_ascends_and_has_its_landmarks() {
        assert!(SIGNED_MAP.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(SIGNED_MAP[..3], [-0.992_968_74, -0.978_906_3, -0.964_843_75]);
        assert_eq!(SIGNED_MAP[127], 0.0);
        for (code, value) in [(125, -3.25e-6), (126, -5.5e-7), (128, 5.5e-7), (129, 3.25e-6)] {
            assert!((f64::from(SIGNED_MAP[code]) / value - 1.0).abs() < 1e-6, "{code}: {}", SIGNED_MAP[code]);
        }
        assert_eq!(SIGNED_MAP[255], 1.0);
    }

    #[test]
    fn the_unsigned_map_ascends_and_has_its_landmarks() {
        assert!(UNSIGNED_MAP.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!((UNSIGNED_MAP[0], UNSIGNED_MAP[255]), (0.0, 1.0));
        for (code, value) in
            [(1, 3.25e-7), (2, 7.75e-7), (3, 2.125e-6), (253, 0.989_453_1), (254, 0.996_484_4)]
        {
            let got = UNSIGNED_MAP[code];
            assert!((f64::from(got) / value - 1.0).abs() < 1e-6, "{code}: {got}");
        }
    }

    #[test]
    fn ends_and_equal_values() {
        let mut codes = [9; 4];
        // The lowest entry is -0.993, so -1 gets its code.
        assert_eq!(encode_group(&[-2.0, 2.0, 1.0, -1.0], &mut codes), 2.0);
        assert_eq!(codes[..2], [0, 255]);
        assert_eq!(encode_group(&[0.0; 4], &mut codes), 0.0);
        assert_eq!(codes, [0; 4]);
    }
}
