//! Random numbers as pure functions of where they are used, so there is no state to save and no order to keep.
//! The backward pass, or a resumed run, recomputes a dropout mask from the same keys.
//!
//! 64-bit mixing is the finalizer of SplitMix64 (Steele, Lea, Flood 2014, with Stafford's constants);
//! 32-bit mixing uses the constants Wellons found by search ("lowbias32", 2018).
//! Checkpoints rely on these values: they must never change, and a test pins them.
//! Left out: cryptographic strength.

/// The key of one token. It does not depend on the thread, the batch layout or the machine.
pub fn token_key(seed: u64, step: u64, sample: u64, position: u64) -> u64 {
    let key = absorb(0, seed);
    let key = absorb(key, step);
    let key = absorb(key, sample);
    absorb(key, position)
}

/// The `index`-th number of `key`'s sequence, in [0, 1), a multiple of 2^-24.
pub fn uniform(key: u64, index: u64) -> f32 {
    (absorb(key, index) >> 40) as f32 * (1.0 / 16_777_216.0)
}

/// The key of one row of one tensor.
pub fn row_key(token_key: u64, tensor: u32) -> u64 {
    absorb(token_key, u64::from(tensor))
}

/// 32 random bits for one channel of a row. Uses only 32-bit arithmetic, which vectorises on every instruction set.
#[inline(always)]
pub fn channel_bits(row_key: u64, channel: u32) -> u32 {
    let low = row_key as u32;
    let high = (row_key >> 32) as u32;
    mix_32(mix_32(channel ^ low) ^ high)
}

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

fn absorb(key: u64, value: u64) -> u64 {
    // The added constant keeps all-zero arguments away from the mixer's fixed point at zero.
    mix_64(mix_64(value.wrapping_add(GOLDEN)) ^ key.wrapping_add(GOLDEN))
}

fn mix_64(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[inline(always)]
fn mix_32(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
    x ^ (x >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_values() {
        assert_eq!(token_key(0, 0, 0, 0), 0x2EC2_D802_8324_A300);
        assert_eq!(token_key(1, 2, 3, 4), 0xF597_3F2E_F643_5893);
        assert_eq!(token_key(u64::MAX, 1 << 40, 77, 8191), 0x633A_579F_AAA5_909B);
        assert_eq!(row_key(5, 6), 0x26FA_2C8C_588E_F360);
        assert_eq!(channel_bits(0x0123_4567_89AB_CDEF, 42), 0x158D_A692);
        assert_eq!(uniform(7, 0), 5089935.0 / 16_777_216.0);
        assert_eq!(uniform(7, 1_000_000), 16240156.0 / 16_777_216.0);
    }

    #[test]
    fn every_argument_moves_half_of_the_bits() {
        let reference = [11_u64, 12, 13, 14];
        let key = |a: [u64; 4]| token_key(a[0], a[1], a[2], a[3]);
        for argument in 0..4 {
            let mut flips = 0;
            for bit in 0..64 {
                let mut changed = reference;
                changed[argument] ^= 1 << bit;
                flips += (key(reference) ^ key(changed)).count_ones();
            }
            // 64 * 64 fair bits: mean 2048, standard deviation 32.
            assert!((1888..2208).contains(&flips), "argument {argument}: {flips}");
        }
    }

    #[test]
    fn arguments_do_not_commute() {
        assert_ne!(token_key(1, 2, 3, 4), token_key(2, 1, 3, 4));
        assert_ne!(token_key(1, 2, 3, 4), token_key(1, 3, 2, 4));
        assert_ne!(token_key(1, 2, 3, 4), token_key(1, 2, 4, 3));
    }

    #[test]
    fn uniform_fills_the_interval_evenly() {
        const DRAWS: u64 = 160_000;
        let mut counts = [0_i64; 16];
        for index in 0..DRAWS {
            let value = uniform(3, index);
            assert!((0.0..1.0).contains(&value));
            counts[(value * 16.0) as usize] += 1;
        }
        // Chi-squared with 15 degrees of freedom; 50 is beyond the 0.002 % tail.
        let expected = (DRAWS / 16) as f64;
        let chi: f64 = counts.iter().map(|count| (*count as f64 - expected).powi(2) / expected).sum();
        assert!(chi < 50.0, "chi-squared {chi}");
    }

    /// The fraction of equal bits between two streams, which is 1/2 for unrelated ones.
    fn agreement(stream: impl Fn(u32) -> (u32, u32)) -> f64 {
        const DRAWS: u32 = 50_000;
        let equal: u32 = (0..DRAWS)
            .map(|channel| {
                let (a, b) = stream(channel);
                (!(a ^ b)).count_ones()
            })
            .sum();
        f64::from(equal) / (f64::from(DRAWS) * 32.0)
    }

    #[test]
    fn neighbouring_channels_tokens_and_tensors_are_unrelated() {
        let key = |position, tensor| row_key(token_key(1, 0, 0, position), tensor);
        let here = key(0, 0);
        let pairs: [(&str, f64); 4] = [
            ("channel", agreement(|c| (channel_bits(here, c), channel_bits(here, c + 1)))),
            ("16 channels on", agreement(|c| (channel_bits(here, c), channel_bits(here, c + 16)))),
            ("token", agreement(|c| (channel_bits(here, c), channel_bits(key(1, 0), c)))),
            ("tensor", agreement(|c| (channel_bits(here, c), channel_bits(key(0, 1), c)))),
        ];
        for (name, agreement) in pairs {
            // Standard deviation 0.0004.
            assert!((agreement - 0.5).abs() < 0.002, "{name}: {agreement}");
        }
    }
}
