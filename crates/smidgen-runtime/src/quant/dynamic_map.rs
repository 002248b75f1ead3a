//! The signed 8-bit dynamic map of bitsandbytes, which quantizes the scales of 4-bit storages.
//!
//! For e = 0..=6 the 2^e midpoints of 2^e + 1 boundaries spaced equally on [0.1, 1], times 10^(e - 6),
//! with both signs; and 0 and 1. Values are rounded as torch rounds them, where `linspace` is a fused
//! multiply-add from the nearer end; files that carry the map carry exactly these floats.
//! Encoding follows the library's CPU path, which norms by the reciprocal and looks up on a grid of 2^16
//! points: beside the nearest code once or twice in a thousand, near zero by up to four codes.

use super::largest_magnitude;

/// Ascending; entry 127 is 0, entry 255 is 1.
pub static SIGNED_MAP: [f32; 256] = signed_map();

const GRID: u32 = 65536;

const fn signed_map() -> [f32; 256] {
    const POWERS: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut map = [0.0; 256];
    map[255] = 1.0;
    let mut place = 0;
    let mut exponent = 0;
    while exponent < 7 {
        let items = 1 << exponent;
        let mut item = 0;
        while item < items {
            let middle = (boundary(item, items) + boundary(item + 1, items)) / 2.0;
            let value = POWERS[exponent] * middle;
            map[128 + place] = value;
            map[126 - place] = -value;
            place += 1;
            item += 1;
        }
        exponent += 1;
    }
    map
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
    fn ends_and_equal_values() {
        let mut codes = [9; 4];
        // The lowest entry is -0.993, and -1 takes it.
        assert_eq!(encode_group(&[-2.0, 2.0, 1.0, -1.0], &mut codes), 2.0);
        assert_eq!(codes[..2], [0, 255]);
        assert_eq!(encode_group(&[0.0; 4], &mut codes), 0.0);
        assert_eq!(codes, [0; 4]);
    }
}
