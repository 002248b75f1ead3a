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
    /// YaRN: frequencies that turn often within the original context are kept, those that turn rarely are divided by
    /// `factor`, with a linear ramp over the pairs between. `truncate` rounds the ends of the ramp to whole pairs.
    Yarn {
        factor: f32,
        beta_fast: f32,
        beta_slow: f32,
        original_max_positions: usize,
        truncate: bool,
    },
    /// NTK: theta grows with the length of a sample that is longer than `max_positions`.
    Dynamic {
        factor: f32,
        max_positions: usize,
    },
    /// Gemma 4: the first `rotated_pairs` frequencies, divided by `factor`; the other pairs are not rotated.
    Proportional {
        rotated_pairs: usize,
        factor: f32,
    },
}

/// Frequencies of pair i divided by `(factor·length/original - (factor - 1))^(2i/(dim - 2))` if a sample has more than
/// `original` tokens: the powers of a larger theta.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stretch {
    pub factor: f32,
    pub original: usize,
}

impl Stretch {
    /// The frequency of a pair whose frequency in short samples is `plain`, in f64 as in the kernel for GPUs.
    pub fn frequency(&self, plain: f32, pair: usize, dim: usize, length: usize) -> f32 {
        if length <= self.original || pair == 0 {
            return plain;
        }
        let factor = f64::from(self.factor);
        let growth = factor * length as f64 / self.original as f64 - (factor - 1.0);
        (f64::from(plain) * growth.powf(-((2 * pair) as f64) / (dim as f64 - 2.0))) as f32
    }
}

/// Cosines and sines at position p are multiplied by `1 + beta·ln(1 + floor(p / original))`. A model whose queries grow
/// with the position has a table with it for queries and one without it for keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PositionScale {
    pub beta: f32,
    pub original: usize,
}

impl PositionScale {
    /// In f64 and rounded once, as in the kernel for GPUs.
    pub fn at(&self, position: i32) -> f32 {
        let whole = (f64::from(position) / self.original as f64).floor();
        (1.0 + f64::from(self.beta) * (1.0 + whole).ln()) as f32
    }
}

/// The rotary embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    pub theta: f32,
    /// Channels of a head that are rotated: the first `dim`.
    pub dim: usize,
    pub scaling: RopeScaling,
    /// Cosines and sines are multiplied by this.
    pub attention_scale: f32,
    pub position_scale: Option<PositionScale>,
}

impl RopeSpec {
    /// Plain frequencies for all `dim` channels.
    pub fn plain(theta: f32, dim: usize) -> RopeSpec {
        let scaling = RopeScaling::Default;
        RopeSpec { theta, dim, scaling, attention_scale: 1.0, position_scale: None }
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
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_positions, truncate } => {
                let ends =
                    [beta_fast, beta_slow].map(|turns| self.pair_of_turns(*turns, *original_max_positions));
                let [low, high] = if *truncate { [ends[0].floor(), ends[1].ceil()] } else { ends };
                let (low, high) = (low.max(0.0), high.min(self.dim as f64 - 1.0));
                // As in transformers, a ramp without a length gets one.
                let length = if low == high { high + 0.001 - low } else { high - low };
                let blend = |(pair, power): (usize, f32)| {
                    let kept = 1.0 - ((pair as f32 - low as f32) / length as f32).clamp(0.0, 1.0);
                    1.0 / (factor * power) * (1.0 - kept) + 1.0 / power * kept
                };
                self.powers().enumerate().map(blend).collect()
            }
            RopeScaling::Dynamic { .. } => plain.collect(),
            RopeScaling::Proportional { rotated_pairs, factor } => {
                let rotated = plain.take(*rotated_pairs).map(|frequency| frequency / factor);
                rotated.chain(std::iter::repeat(0.0)).take(self.dim / 2).collect()
            }
        }
    }

    /// The frequencies of long samples and the number of tokens above which a sample is long; `None` if there is no second
    /// list of frequencies.
    pub fn long_frequencies(&self) -> Option<(Vec<f32>, usize)> {
        match &self.scaling {
            RopeScaling::LongRope { long, original_max_positions, .. } => {
                Some((self.divided_frequencies(long), *original_max_positions))
            }
            _ => None,
        }
    }

    /// How frequencies fall with the length of a sample; `None` if they do not.
    pub fn stretch(&self) -> Option<Stretch> {
        match self.scaling {
            RopeScaling::Dynamic { factor, max_positions } => {
                Some(Stretch { factor, original: max_positions })
            }
            _ => None,
        }
    }

    /// The number of tokens above which a sample has other frequencies; `None` if all samples have the same.
    pub fn short_until(&self) -> Option<usize> {
        match self.scaling {
            RopeScaling::LongRope { original_max_positions, .. } => Some(original_max_positions),
            RopeScaling::Dynamic { max_positions, .. } => Some(max_positions),
            _ => None,
        }
    }

    pub fn depends_on_length(&self) -> bool {
        self.short_until().is_some()
    }

    /// The pair that turns `turns` times within `context` positions, as a fraction.
    fn pair_of_turns(&self, turns: f32, context: usize) -> f64 {
        let wavelengths = context as f64 / (f64::from(turns) * std::f64::consts::TAU);
        self.dim as f64 * wavelengths.ln() / (2.0 * f64::from(self.theta).ln())
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
        if let Some(PositionScale { beta, original }) = self.position_scale {
            write!(f, " position scale={beta} from {original}")?;
        }
        match &self.scaling {
            RopeScaling::Default => Ok(()),
            RopeScaling::LongRope { original_max_positions, .. } => {
                write!(f, " longrope from {original_max_positions}")
            }
            RopeScaling::Linear { factor } => write!(f, " linear/{factor}"),
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_positions, truncate } => {
                let ends = if *truncate { " truncated" } else { "" };
                write!(f, " yarn/{factor} {beta_fast}..{beta_slow}{ends} of {original_max_positions}")
            }
            RopeScaling::Dynamic { factor, max_positions } => {
                write!(f, " dynamic/{factor} from {max_positions}")
            }
            RopeScaling::Proportional { rotated_pairs, factor } => {
                write!(f, " proportional/{factor} {rotated_pairs} pairs")
            }
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

    /// Compares frequencies with those of `ROPE_INIT_FUNCTIONS` of transformers 5.23, whose f32 operations differ from
    /// these by a rounding or two.
    fn assert_frequencies(got: &[f32], golden: &[(usize, f32)]) {
        for &(pair, expected) in golden {
            let error = (got[pair] - expected).abs() / expected.max(1e-30);
            assert!(error < 5e-7, "frequency {pair}: got {:e}, expected {expected:e}", got[pair]);
        }
    }

    /// gpt-oss (theta 150000, 64 channels, factor 32, not truncated) and Qwen 3 (theta 1e6, 128 channels, factor 4).
    #[test]
    fn yarn_frequencies() {
        let yarn = |factor, original_max_positions, truncate| RopeScaling::Yarn {
            factor,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_positions,
            truncate,
        };
        let of =
            |scaling, theta, dim| RopeSpec { scaling, ..RopeSpec::plain(theta, dim) }.inverse_frequencies();
        assert_frequencies(
            &of(yarn(32.0, 4096, false), 150_000.0, 64),
            &[
                (0, 1.0),
                (8, 0.050_813_273),
                (9, 0.031_705_696),
                (12, 0.006_794_959_3),
                (15, 0.001_052_602_2),
                (17, 0.000_129_318_7),
                (18, 3.830_881e-5),
                (31, 3.023_511_4e-7),
            ],
        );
        assert_frequencies(
            &of(yarn(4.0, 32_768, true), 1e6, 128),
            &[
                (0, 1.0),
                (23, 0.006_978_306),
                (24, 0.005_375_321_5),
                (30, 0.001_064_361),
                (39, 6.490_394e-5),
                (40, 4.445_698_5e-5),
                (63, 3.102_344_4e-7),
            ],
        );
    }

    /// theta 1e4, 128 channels, factor 2, trained up to 2048 positions; samples of 3000, 4096 and 100 tokens.
    #[test]
    fn dynamic_frequencies() {
        let scaling = RopeScaling::Dynamic { factor: 2.0, max_positions: 2048 };
        let spec = RopeSpec { scaling, ..RopeSpec::plain(1e4, 128) };
        let stretch = spec.stretch().unwrap();
        let of = |length: usize| -> Vec<f32> {
            let plain = spec.inverse_frequencies();
            (0..64).map(|pair| stretch.frequency(plain[pair], pair, 128, length)).collect()
        };
        assert_frequencies(&of(100), &[(0, 1.0), (1, 0.865_964_35), (63, 0.000_115_478_19)]);
        assert_eq!(of(100), of(2048));
        assert_frequencies(
            &of(3000),
            &[(0, 1.0), (1, 0.856_975_6), (16, 0.084_624_36), (63, 5.984_295_8e-5)],
        );
        assert_frequencies(
            &of(4096),
            &[(0, 1.0), (1, 0.850_994_3), (16, 0.075_653_03), (63, 3.849_273_3e-5)],
        );
    }

    /// The full layers of Gemma 4: theta 1e6, heads of 512 channels, a quarter of them rotated.
    #[test]
    fn proportional_frequencies() {
        let scaling = RopeScaling::Proportional { rotated_pairs: 64, factor: 1.0 };
        let got = RopeSpec { scaling, ..RopeSpec::plain(1e6, 512) }.inverse_frequencies();
        assert_eq!(got.len(), 256);
        assert_frequencies(&got, &[(0, 1.0), (1, 0.947_463_5), (32, 0.177_827_94), (63, 0.033_376_247)]);
        assert!(got[64..].iter().all(|frequency| *frequency == 0.0));
        let scaling = RopeScaling::Proportional { rotated_pairs: 2, factor: 4.0 };
        assert_eq!(
            RopeSpec { scaling, ..RopeSpec::plain(1e4, 8) }.inverse_frequencies(),
            [0.25, 0.025, 0.0, 0.0]
        );
    }

    #[test]
    fn queries_grow_at_multiples_of_the_original_context() {
        let scale = PositionScale { beta: 0.1, original: 16 };
        assert_eq!((scale.at(0), scale.at(15)), (1.0, 1.0));
        assert_eq!((scale.at(16), scale.at(31)), (scale.at(16), scale.at(16)));
        assert!((scale.at(40) - 1.109_861_2).abs() < 1e-6);
    }
}
