//! Log-mel features as Phi-4-multimodal expects them: 80 bins every 10 ms.
//!
//! Frames have 25 ms without padding; an incomplete last frame is dropped. Steps per frame: pre-emphasis,
//! where the first sample is its own predecessor; a symmetric Hamming window; squared magnitudes of a
//! 512-point FFT; triangular filters on the mel scale from 0 to 7690 Hz; and the logarithm of the energy,
//! which is clamped to at least 1.
//! Left out: normalization by a checkpoint's mean and deviation, which its encoder does.

use super::fft::{BINS, Fft, POINTS};

/// Samples per second of the input of models.
pub const SAMPLE_RATE: usize = 16_000;
pub const MEL_BINS: usize = 80;
pub const FRAME_SAMPLES: usize = 400;
pub const HOP_SAMPLES: usize = 160;
const EMPHASIS: f64 = 0.97;
/// Samples are scaled to the range of 16-bit integers.
const FULL_SCALE: f64 = 32768.0;
const HIGHEST_HERTZ: f64 = 7690.0;

/// The number of frames of a clip.
pub fn frame_count(samples: usize) -> usize {
    samples.checked_sub(FRAME_SAMPLES).map_or(0, |rest| rest / HOP_SAMPLES + 1)
}

/// Window, filters and scratch memory, for any number of clips.
pub struct LogMel {
    window: Vec<f64>,
    /// For each filter its first frequency and its weights from there on.
    filters: Vec<(usize, Vec<f64>)>,
    fft: Fft,
    power: Vec<f64>,
}

impl Default for LogMel {
    fn default() -> LogMel {
        let turn = std::f64::consts::TAU / (FRAME_SAMPLES - 1) as f64;
        let window = (0..FRAME_SAMPLES).map(|index| 0.54 - 0.46 * (turn * index as f64).cos()).collect();
        LogMel { window, filters: mel_filters(), fft: Fft::new(), power: vec![0.0; BINS] }
    }
}

impl LogMel {
    /// Appends the features of a clip, frame by frame.
    pub fn append(&mut self, samples: &[f32], features: &mut Vec<f32>) {
        for frame in 0..frame_count(samples.len()) {
            let frame = &samples[frame * HOP_SAMPLES..][..FRAME_SAMPLES];
            let previous = std::iter::once(&frame[0]).chain(frame);
            let signal = frame.iter().zip(previous).zip(&self.window).map(|((sample, previous), window)| {
                (f64::from(*sample) - EMPHASIS * f64::from(*previous)) * FULL_SCALE * window
            });
            let spectrum = self.fft.transform(signal);
            for (power, (real, imaginary)) in self.power.iter_mut().zip(spectrum) {
                *power = real * real + imaginary * imaginary;
            }
            features.extend(self.filters.iter().map(|(first, weights)| {
                let energy = weights.iter().zip(&self.power[*first..]).map(|(weight, power)| weight * power);
                energy.sum::<f64>().max(1.0).ln() as f32
            }));
        }
    }
}

fn mel(hertz: f64) -> f64 {
    1127.0 * (1.0 + hertz / 700.0).ln()
}

fn mel_filters() -> Vec<(usize, Vec<f64>)> {
    let width = mel(HIGHEST_HERTZ) / (MEL_BINS + 1) as f64;
    let of_bin: Vec<f64> =
        (0..BINS).map(|bin| mel(bin as f64 * SAMPLE_RATE as f64 / POINTS as f64)).collect();
    let filter = |index: usize| {
        let center = width * (index + 1) as f64;
        let weights = of_bin.iter().map(|mel| (1.0 - (mel - center).abs() / width).max(0.0));
        let weights: Vec<f64> = weights.collect();
        let first = weights.iter().position(|weight| *weight > 0.0).unwrap_or(0);
        let end = weights.iter().rposition(|weight| *weight > 0.0).map_or(first, |last| last + 1);
        (first, weights[first..end].to_vec())
    };
    (0..MEL_BINS).map(filter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_whole() {
        let counts = [0, 399, 400, 559, 560, 16_000].map(frame_count);
        assert_eq!(counts, [0, 0, 1, 1, 2, 98]);
    }

    #[test]
    fn a_tone_is_loudest_in_its_bin_and_silence_gives_zeros() {
        let tone = |hertz: f64| -> Vec<f32> {
            let angle = |index: usize| std::f64::consts::TAU * hertz * index as f64 / 16_000.0;
            (0..1600).map(|index| angle(index).sin() as f32).collect()
        };
        let mut log_mel = LogMel::default();
        for hertz in [440.0, 1000.0, 5000.0] {
            let mut features = Vec::new();
            log_mel.append(&tone(hertz), &mut features);
            assert_eq!(features.len(), frame_count(1600) * MEL_BINS);
            let frame = &features[2 * MEL_BINS..3 * MEL_BINS];
            let loudest = (0..MEL_BINS).max_by(|a, b| frame[*a].total_cmp(&frame[*b])).unwrap();
            let expected = mel(hertz) / mel(HIGHEST_HERTZ) * 81.0 - 1.0;
            assert!((loudest as f64 - expected).abs() <= 1.0, "{hertz} Hz in bin {loudest}, not {expected}");
        }
        let mut silent = Vec::new();
        log_mel.append(&[0.0; 400], &mut silent);
        assert_eq!(silent, [0.0; MEL_BINS]);
    }
}
