//! The nearest entry of a dynamic map, as the optimizer kernels of bitsandbytes find it.
//!
//! They run a binary search down to an entry of even index and compare with the midpoint to the neighbour on the
//! side of the number, so a number exactly between two entries gets the even one. Here a table of limits includes that
//! rule, and a second table, indexed by the leading bits of the number, says where to start.
//! Left out: numbers outside -1..=1, which get the code at that end; and the library's CPU path, which is in
//! `dynamic_map.rs` and does not always find the nearest code.

use super::dynamic_map::{signed_map, unsigned_map};

/// A number belongs to code c when it is above the limits before c and not above limit c.
static SIGNED_LIMITS: [f32; 255] = limits(&signed_map());
static UNSIGNED_LIMITS: [f32; 255] = limits(&unsigned_map());

/// Code of the smallest number in each bucket of magnitudes.
static POSITIVE_STARTS: [u8; BUCKETS] = positive_starts(&limits(&signed_map()));
static NEGATIVE_STARTS: [u8; BUCKETS] = negative_starts(&limits(&signed_map()));
static UNSIGNED_STARTS: [u8; BUCKETS] = positive_starts(&limits(&unsigned_map()));

/// There are 64 buckets per power of two. The first and last are open: there are no limits below 2^-24 and no numbers
/// above 1.
const KEY_SHIFT: u32 = 17;
const FIRST_KEY: u32 = (127 - 24) << 6;
const LAST_KEY: u32 = 127 << 6;
const BUCKETS: usize = (LAST_KEY - FIRST_KEY + 1) as usize;

/// The code in the signed map of a number in -1..=1.
#[inline(always)]
pub fn nearest_signed(number: f32) -> u8 {
    let bucket = bucket_of(number);
    let start = if number < 0.0 { NEGATIVE_STARTS[bucket] } else { POSITIVE_STARTS[bucket] };
    walk_up(&SIGNED_LIMITS, start, number)
}

/// The code in the unsigned map of a number in 0..=1.
#[inline(always)]
pub fn nearest_unsigned(number: f32) -> u8 {
    walk_up(&UNSIGNED_LIMITS, UNSIGNED_STARTS[bucket_of(number)], number)
}

#[inline(always)]
fn bucket_of(number: f32) -> usize {
    let key = (number.to_bits() & 0x7fff_ffff) >> KEY_SHIFT;
    (key.clamp(FIRST_KEY, LAST_KEY) - FIRST_KEY) as usize
}

#[inline(always)]
fn walk_up(limits: &[f32; 255], start: u8, number: f32) -> u8 {
    let mut code = usize::from(start);
    while code < limits.len() && number > limits[code] {
        code += 1;
    }
    code as u8
}

const fn limits(map: &[f32; 256]) -> [f32; 255] {
    let mut limits = [0.0; 255];
    let mut code = 0;
    while code < 255 {
        let midpoint = (map[code] + map[code + 1]) * 0.5;
        // A number on the midpoint gets the even code.
        limits[code] = if code % 2 == 0 { midpoint } else { midpoint.next_down() };
        code += 1;
    }
    limits
}

/// The smallest magnitude of a bucket.
const fn lower_edge(bucket: usize) -> f32 {
    if bucket == 0 { 0.0 } else { f32::from_bits((FIRST_KEY + bucket as u32) << KEY_SHIFT) }
}

const fn positive_starts(limits: &[f32; 255]) -> [u8; BUCKETS] {
    let mut starts = [0; BUCKETS];
    let (mut bucket, mut code) = (0, 0);
    while bucket < BUCKETS {
        while code < 255 && lower_edge(bucket) > limits[code] {
            code += 1;
        }
        starts[bucket] = code as u8;
        bucket += 1;
    }
    starts
}

/// The smallest number of a negative bucket has its largest magnitude.
const fn negative_starts(limits: &[f32; 255]) -> [u8; BUCKETS] {
    let mut starts = [0; BUCKETS];
    let (mut bucket, mut code) = (BUCKETS - 1, 0);
    // The last bucket begins with code 0.
    while bucket > 0 {
        bucket -= 1;
        while code < 255 && -lower_edge(bucket + 1) > limits[code] {
            code += 1;
        }
        starts[bucket] = code as u8;
    }
    starts
}

#[cfg(test)]
mod tests {
    use super::super::dynamic_map::{SIGNED_MAP, UNSIGNED_MAP};
    use super::*;

    /// The binary search of the library's kernel, step by step.
    fn searched(map: &[f32; 256], number: f32) -> u8 {
        let (mut below, mut above, mut place) = (0_usize, 255_usize, 127_usize);
        for step in [64, 32, 16, 8, 4, 2, 1] {
            if number > map[place] {
                below = place;
                place += step;
            } else {
                above = place;
                place -= step;
            }
        }
        let code = if number > map[place] {
            if number > (map[above] + map[place]) * 0.5 { above } else { place }
        } else if number < (map[below] + map[place]) * 0.5 {
            below
        } else {
            place
        };
        code as u8
    }

    /// Tests every entry, every midpoint and their neighbouring floats, every edge of a bucket, and a fine grid.
    #[test]
    fn codes_are_those_of_the_search() {
        let mut numbers = vec![0.0, -0.0, 1.0, -1.0, f32::MIN_POSITIVE, 1e-45, -1e-45];
        for map in [&SIGNED_MAP, &UNSIGNED_MAP] {
            for pair in map.windows(2) {
                for value in [pair[0], pair[1], (pair[0] + pair[1]) * 0.5] {
                    numbers.extend([value.next_down(), value, value.next_up()]);
                }
            }
        }
        numbers.extend((0..BUCKETS).flat_map(|bucket| {
            let edge = lower_edge(bucket);
            [edge, edge.next_down(), -edge, -edge.next_down()]
        }));
        numbers.extend((0..=200_000).map(|point| point as f32 / 100_000.0 - 1.0));
        numbers.retain(|number| (-1.0..=1.0).contains(number));
        for number in numbers {
            assert_eq!(nearest_signed(number), searched(&SIGNED_MAP, number), "{number:e}");
            let positive = number.abs();
            assert_eq!(nearest_unsigned(positive), searched(&UNSIGNED_MAP, positive), "{positive:e}");
        }
    }

    #[test]
    fn a_number_in_the_middle_gets_the_even_code() {
        for code in [3_usize, 4, 200, 201] {
            let middle = (SIGNED_MAP[code] + SIGNED_MAP[code + 1]) * 0.5;
            assert_eq!(nearest_signed(middle) % 2, 0, "{code}");
            assert!(code.abs_diff(usize::from(nearest_signed(middle))) <= 1, "{code}");
        }
    }
}
