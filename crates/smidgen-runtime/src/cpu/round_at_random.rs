//! Stochastic rounding of f32 to bf16: a number is rounded up or down at random, so that updates which are too small for
//! bf16 are kept on average.
//!
//! The random bits of an element follow from seed, optimizer step, tensor, row and column (`counter.rs`). So they do not
//! depend on threads or on the division into pieces, and are the same after a resume.

use super::chunk::{CHUNK_ELEMENTS, Chunk, for_each_chunk};
use super::counter::{channel_bits, token_key};
use super::footprint::assert_disjoint;
use super::view::{Dst, Src};
use smidgen_ir::RandomPlace;

/// Rounds rows of `columns` floats. `step` counts from 1.
pub fn round_at_random(from: Src<f32>, columns: usize, to: Dst<u16>, place: &RandomPlace, step: u64) {
    assert_eq!(from.len(), to.len());
    assert_disjoint("round_at_random", to, [from.into()]);
    for_each_chunk(from.len(), CHUNK_ELEMENTS, |Chunk { start, len, .. }| {
        let mut at = start;
        while at < start + len {
            let (row, first) = (at / columns, at % columns);
            let count = (columns - first).min(start + len - at);
            let key = token_key(place.seed, step, place.tensor, place.first_row + row as u64);
            for column in 0..count {
                let bits = channel_bits(key, (first + column) as u32);
                to.set(at + column, round_up_with(from.get(at + column), bits));
            }
            at += count;
        }
    });
}

/// Rounds away from zero with a probability equal to the fraction of the way to the next bf16, else towards zero. The
/// upper half of `bits` decides.
pub fn round_up_with(number: f32, bits: u32) -> u16 {
    const NOT_FINITE: u32 = 0x7F80_0000;
    let number_bits = number.to_bits();
    if number_bits & NOT_FINITE == NOT_FINITE {
        // A NaN must keep a mantissa bit, or it would become an infinity.
        return (number_bits >> 16) as u16 | u16::from(number.is_nan());
    }
    (number_bits.wrapping_add(bits >> 16) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::super::testing::{dst, src};
    use super::*;
    use half::bf16;

    fn rounded(numbers: &[f32], columns: usize, place: RandomPlace, step: u64) -> Vec<u16> {
        let mut out = vec![0u16; numbers.len()];
        round_at_random(src(numbers), columns, dst(&mut out), &place, step);
        out
    }

    const PLACE: RandomPlace = RandomPlace { seed: 42, tensor: 3, first_row: 0 };

    #[test]
    fn bf16_numbers_stay_unchanged() {
        let numbers: Vec<f32> =
            [0.0, -0.0, 1.0, -2.5, 1e-40, f32::INFINITY].map(|number| bf16::from_f32(number).to_f32()).into();
        let expected: Vec<u16> = numbers.iter().map(|number| bf16::from_f32(*number).to_bits()).collect();
        for step in 1..50 {
            assert_eq!(rounded(&numbers, 3, PLACE, step), expected);
        }
        assert!(bf16::from_bits(round_up_with(f32::NAN, 0)).is_nan());
    }

    #[test]
    fn the_mean_is_kept() {
        // A quarter of the way from 1 to the next bf16.
        let number = 1.0 + 0.25 / 128.0;
        let numbers = vec![number; 1 << 16];
        let sum: f64 =
            rounded(&numbers, 256, PLACE, 7).iter().map(|bits| bf16::from_bits(*bits).to_f64()).sum();
        let mean = sum / numbers.len() as f64;
        assert!((mean - f64::from(number)).abs() < 0.01 / 128.0, "{mean}");
    }

    #[test]
    fn pieces_of_rows_get_the_bits_of_their_place() {
        let numbers: Vec<f32> = (0..96).map(|index| 1.0 + index as f32 / 3000.0).collect();
        let whole = rounded(&numbers, 8, PLACE, 5);
        let behind = RandomPlace { first_row: 4, ..PLACE };
        assert_eq!(rounded(&numbers[32..], 8, behind, 5), whole[32..]);
        assert_ne!(rounded(&numbers, 8, PLACE, 6), whole);
        assert_ne!(rounded(&numbers, 8, RandomPlace { tensor: 4, ..PLACE }, 5), whole);
    }
}
