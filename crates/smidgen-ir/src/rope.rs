//! Rotary embeddings as data: the frequencies by which a model rotates its queries and keys.
//!
//! The frequencies are computed here, in f32 and in the order of operations that PyTorch uses, because the devices and the
//! tests must agree on them to the last bit. The rotation itself is an operation, with a kernel on each device.

use std::fmt;

/// What changes the plain frequencies `theta^(-2i/dim)`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    Default,
    /// Positions divided by `factor`.
    Linear {
        factor: f32,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, blended between.
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_max_positions: usize,
    },
    /// Phi 3: every frequency divided by its own factor, `short` for a sample of up to
    /// `original_max_positions` tokens, `long` for a longer one.
    LongRope {
        short: Vec<f32>,
        long: Vec<f32>,
        original_max_positions: usize,
    },
}

/// The rotary embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    pub theta: f32,
    /// Channels of a head that are rotated: the first `dim`, in two halves.
    pub dim: usize,
    pub scaling: RopeScaling,
    /// Cosines and sines are multiplied by this.
    pub attention_scale: f32,
}

impl RopeSpec {
    /// Plain frequencies for all `dim` channels.
    pub fn plain(theta: f32, dim: usize) -> RopeSpec {
        RopeSpec { theta, dim, scaling: RopeScaling::Default, attention_scale: 1.0 }
    }

    /// `dim / 2` frequencies: of all samples, or of short samples if they depend on the length.
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        let plain = self.powers().map(|power| 1.0 / power);
        match &self.scaling {
            RopeScaling::Default => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                let context = *original_max_positions as f32;
                let scale = |frequency: f32| {
                    let wavelength = std::f32::consts::TAU / frequency;
                    if wavelength < context / high_freq_factor {
                        frequency
                    } else if wavelength > context / low_freq_factor {
                        frequency / factor
                    } else {
                        let smooth =
                            (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                        (1.0 - smooth) * frequency / factor + smooth * frequency
                    }
                };
                plain.map(scale).collect()
            }
            RopeScaling::LongRope { short, .. } => self.divided_frequencies(short),
        }
    }

    /// The frequencies of long samples and the number of tokens above which a sample is long; `None` if frequencies do not
    /// depend on the length.
    pub fn long_frequencies(&self) -> Option<(Vec<f32>, usize)> {
        match &self.scaling {
            RopeScaling::LongRope { long, original_max_positions, .. } => {
                Some((self.divided_frequencies(long), *original_max_positions))
            }
            _ => None,
        }
    }

    pub fn depends_on_length(&self) -> bool {
        matches!(self.scaling, RopeScaling::LongRope { .. })
    }

    fn powers(&self) -> impl Iterator<Item = f32> + '_ {
        (0..self.dim / 2).map(|i| self.theta.powf((2 * i) as f32 / self.dim as f32))
    }

    fn divided_frequencies(&self, factors: &[f32]) -> Vec<f32> {
        assert_eq!(factors.len(), self.dim / 2, "a factor for each frequency");
        self.powers().zip(factors).map(|(power, factor)| 1.0 / (factor * power)).collect()
    }
}

impl fmt::Display for RopeSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "theta={} dim={}", self.theta, self.dim)?;
        if self.attention_scale != 1.0 {
            write!(f, " scale={}", self.attention_scale)?;
        }
        match &self.scaling {
            RopeScaling::Default => Ok(()),
            RopeScaling::LongRope { original_max_positions, .. } => {
                write!(f, " longrope from {original_max_positions}")
            }
            RopeScaling::Linear { factor } => write!(f, " linear/{factor}"),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                write!(
                    f,
                    " llama3/{factor} {low_freq_factor}..{high_freq_factor} of {original_max_positions}"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Llama 3.1 (theta 5e5, 128 channels, factor 8, original 8192), computed with transformers:
    /// 28 is the last unchanged, 29 to 34 are blended, 35 is the first fully divided.
    #[test]
    fn llama3_frequencies() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        };
        let got = RopeSpec { scaling, ..RopeSpec::plain(5e5, 128) }.inverse_frequencies();
        let golden = [
            (28, 0.003_211_446),
            (29, 0.002_166_570_8),
            (34, 0.000_178_507_8),
            (35, 9.556_212e-5),
            (63, 3.068_926e-7),
        ];
        for (index, expected) in golden {
            let relative = (got[index] - expected).abs() / expected;
            assert!(relative < 1e-5, "frequency {index}: got {}, expected {expected}", got[index]);
        }
    }

    #[test]
    fn linear_frequencies() {
        let spec = |scaling| RopeSpec { scaling, ..RopeSpec::plain(1e4, 8) }.inverse_frequencies();
        assert_eq!(spec(RopeScaling::Default), [1.0, 0.1, 0.01, 0.001]);
        assert_eq!(spec(RopeScaling::Linear { factor: 2.0 }), [0.5, 0.05, 0.005, 0.0005]);
    }
}
