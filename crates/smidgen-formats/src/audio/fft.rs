//! The Fourier transform of 512 real numbers, in f64.
//!
//! In place, radix 2, with bit-reversed input. Left out: other sizes.

use std::f64::consts::TAU;

pub const POINTS: usize = 512;
/// Frequencies in the transform of a real signal.
pub const BINS: usize = POINTS / 2 + 1;

pub struct Fft {
    /// exp(-2πi·k/512).
    twiddles: Vec<(f64, f64)>,
    values: Vec<(f64, f64)>,
}

impl Fft {
    pub fn new() -> Fft {
        let twiddle = |k: usize| (-TAU * k as f64 / POINTS as f64).sin_cos();
        let twiddles = (0..POINTS / 2).map(twiddle).map(|(sine, cosine)| (cosine, sine));
        Fft { twiddles: twiddles.collect(), values: vec![(0.0, 0.0); POINTS] }
    }

    /// Returns the first [`BINS`] values of the transform of up to 512 numbers, which are padded with zeros.
    pub fn transform(&mut self, signal: impl Iterator<Item = f64>) -> &[(f64, f64)] {
        let reversed = |index: usize| index.reverse_bits() >> (usize::BITS - POINTS.trailing_zeros());
        self.values.fill((0.0, 0.0));
        for (index, number) in signal.take(POINTS).enumerate() {
            self.values[reversed(index)].0 = number;
        }
        let mut half = 1;
        while half < POINTS {
            let stride = POINTS / (2 * half);
            for block in self.values.chunks_exact_mut(2 * half) {
                let (even, odd) = block.split_at_mut(half);
                for (index, (even, odd)) in even.iter_mut().zip(odd).enumerate() {
                    let twiddle = self.twiddles[index * stride];
                    let rotated =
                        (odd.0 * twiddle.0 - odd.1 * twiddle.1, odd.0 * twiddle.1 + odd.1 * twiddle.0);
                    *odd = (even.0 - rotated.0, even.1 - rotated.1);
                    *even = (even.0 + rotated.0, even.1 + rotated.1);
                }
            }
            half *= 2;
        }
        &self.values[..BINS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_transform_agrees_with_its_definition() {
        let signal: Vec<f64> = (0..400).map(|index| ((index * index) as f64 * 0.37).sin()).collect();
        let mut fft = Fft::new();
        let got = fft.transform(signal.iter().copied()).to_vec();
        for bin in [0, 1, 2, 77, 128, 255, 256] {
            let mut want = (0.0, 0.0);
            for (index, number) in signal.iter().enumerate() {
                let (sine, cosine) = (-TAU * (bin * index % POINTS) as f64 / POINTS as f64).sin_cos();
                want = (want.0 + number * cosine, want.1 + number * sine);
            }
            assert!((got[bin].0 - want.0).abs() < 1e-10 && (got[bin].1 - want.1).abs() < 1e-10, "bin {bin}");
        }
    }
}
