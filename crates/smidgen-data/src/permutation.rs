//! Permutations that depend only on a seed and an epoch, so that a resumed run gets the same ones.
//!
//! Checkpoints depend on them: they must never change, and a test pins them.

/// Fisher-Yates from a counter: swap i takes draw i of the stream that (seed, epoch) names.
/// The high half of a 128-bit product bounds a draw, with a bias of at most samples / 2^64.
pub(super) fn shuffle(order: &mut [u32], seed: u64, epoch: u64) {
    let key = splitmix64(splitmix64(seed) ^ epoch);
    for i in (1..order.len() as u64).rev() {
        let draw = splitmix64(key.wrapping_add(i.wrapping_mul(GOLDEN_GAMMA)));
        let j = (u128::from(draw) * u128::from(i + 1)) >> 64;
        order.swap(i as usize, j as usize);
    }
}

/// Fills `order` with the numbers below `samples`: in the order of an epoch, or without `shuffled` in ascending order.
pub(super) fn permute(order: &mut Vec<u32>, samples: u32, seed: u64, epoch: u64, shuffled: bool) {
    order.clear();
    order.extend(0..samples);
    if shuffled {
        shuffle(order, seed, epoch);
    }
}

/// The seed of one of several streams of random numbers.
pub(super) fn seed_of_stream(seed: u64, stream: u64) -> u64 {
    splitmix64(splitmix64(seed).wrapping_add(stream.wrapping_mul(GOLDEN_GAMMA)))
}

const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): the output for state `x`.
fn splitmix64(x: u64) -> u64 {
    let z = x.wrapping_add(GOLDEN_GAMMA);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permutation(samples: u32, seed: u64, epoch: u64, shuffle: bool) -> Vec<u32> {
        let mut order = Vec::new();
        permute(&mut order, samples, seed, epoch, shuffle);
        order
    }

    /// The values come from a second implementation of the description above `shuffle`, in Python.
    #[test]
    fn permutations_are_pinned() {
        // State 0 of the published generator.
        assert_eq!(splitmix64(0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(permutation(10, 42, 0, true), [3, 5, 6, 9, 8, 1, 0, 2, 7, 4]);
        assert_eq!(permutation(10, 42, 1, true), [5, 0, 1, 9, 3, 6, 7, 4, 8, 2]);
        assert_eq!(permutation(10, 42, 2, true), [9, 5, 1, 2, 7, 8, 3, 0, 4, 6]);
        assert_eq!(permutation(10, 43, 0, true), [5, 1, 0, 7, 3, 2, 9, 8, 4, 6]);
        let large = permutation(100_000, 42, 7, true);
        assert_eq!(large[..4], [96144, 107, 93551, 95834]);
        assert_eq!(large[99_996..], [32045, 62578, 78088, 20103]);
        assert_eq!(permutation(4, 42, 9, false), [0, 1, 2, 3]);
        assert_eq!(permutation(1, 42, 0, true), [0]);
    }

    #[test]
    fn every_position_is_about_equally_likely() {
        let mut counts = [[0u32; 4]; 4];
        for epoch in 0..4000 {
            for (position, sample) in permutation(4, 1, epoch, true).into_iter().enumerate() {
                counts[position][sample as usize] += 1;
            }
        }
        // 1000 expected, standard deviation 27: six of them on either side.
        let all = counts.as_flattened();
        assert!(all.iter().all(|count| (836..=1164).contains(count)), "{counts:?}");
    }
}
