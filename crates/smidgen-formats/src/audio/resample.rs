//! Changes the sample rate with a windowed sinc filter.
//!
//! The ratio of the rates is a reduced fraction, so usual rates have few phases, and each has its own exact filter.
//! Odd rates such as 44,101 Hz would have up to 16,000 filters; theirs are interpolated from a few hundred.
//! The filter passes frequencies up to 0.94 of the lower Nyquist frequency and attenuates those above it by
//! at least 90 dB.
//! Left out: streaming; a clip is resampled as a whole.

/// Zero crossings of the filter on each side.
const CROSSINGS: usize = 48;
/// The frequency at which the filter has half of its height, as a fraction of the lower Nyquist frequency.
const CUTOFF: f64 = 0.97;
/// Shape of the Kaiser window.
const BETA: f64 = 9.0;

/// Phases of the filters of usual rates: 640 for 11,025 Hz, fewer for all that are multiples of 25 Hz.
const EXACT_PHASES: u32 = 640;
/// Other rates have this many filters for each zero crossing, and values between two of them are interpolated. The
/// error is below 1e-5 of the signal.
const PHASES_PER_CROSSING: f64 = 512.0;

pub struct Resampler {
    /// Output samples for each `step` input samples.
    phases: u64,
    step: u64,
    /// Samples on each side of a filter's center.
    reach: usize,
    /// Filters for each input sample: one for each phase, or as many as interpolation needs and the next one.
    stored: usize,
    is_exact: bool,
    filters: Vec<f32>, // (stored, 2·reach)
}

impl Resampler {
    pub fn new(from: u32, to: u32) -> Resampler {
        let divisor = gcd(from, to);
        let (phases, step) = (to / divisor, from / divisor);
        // Relative to the input rate.
        let cutoff = CUTOFF * (f64::from(to) / f64::from(from)).min(1.0);
        let reach = (CROSSINGS as f64 / cutoff).ceil() as usize;
        let is_exact = phases <= EXACT_PHASES;
        let (pieces, stored) = if is_exact {
            (phases as usize, phases as usize)
        } else {
            let pieces = (PHASES_PER_CROSSING * cutoff).ceil() as usize;
            (pieces, pieces + 1)
        };
        let mut filters = Vec::with_capacity(stored * 2 * reach);
        for piece in 0..stored {
            let shift = piece as f64 / pieces as f64;
            let mut filter: Vec<f64> = (0..2 * reach)
                .map(|tap| {
                    let distance = tap as f64 - (reach as f64 - 1.0) - shift;
                    cutoff * sinc(cutoff * distance) * kaiser(distance / reach as f64)
                })
                .collect();
            // A constant signal must pass unchanged.
            let sum: f64 = filter.iter().sum();
            filter.iter_mut().for_each(|tap| *tap /= sum);
            filters.extend(filter.iter().map(|tap| *tap as f32));
        }
        Resampler { phases: phases.into(), step: step.into(), reach, stored, is_exact, filters }
    }

    /// Resamples a whole clip. Samples before and after it count as silence.
    pub fn resample(&self, samples: &[f32]) -> Vec<f32> {
        let count = (samples.len() as u64 * self.phases).div_ceil(self.step);
        let at = |out: u64| {
            let place = out * self.step;
            let (base, phase) = ((place / self.phases) as usize, place % self.phases);
            if self.is_exact {
                return self.filtered(samples, base, phase as usize);
            }
            let between = phase as f64 / self.phases as f64 * (self.stored - 1) as f64;
            let (piece, part) = (between as usize, between.fract() as f32);
            let [left, right] = [piece, piece + 1].map(|piece| self.filtered(samples, base, piece));
            left + part * (right - left)
        };
        (0..count).map(at).collect()
    }

    /// The sum of a filter's products with the samples around `base`.
    fn filtered(&self, samples: &[f32], base: usize, filter: usize) -> f32 {
        let width = 2 * self.reach;
        let filter = &self.filters[filter * width..(filter + 1) * width];
        // The first tap meets sample base - reach + 1.
        let skipped = (self.reach - 1).saturating_sub(base);
        let first = base + skipped + 1 - self.reach;
        let taken = &samples[first.min(samples.len())..];
        let products = filter[skipped..].iter().zip(taken).map(|(tap, sample)| tap * sample);
        products.sum::<f32>()
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn sinc(x: f64) -> f64 {
    let angle = std::f64::consts::PI * x;
    if x == 0.0 { 1.0 } else { angle.sin() / angle }
}

/// The Kaiser window, from -1 to 1.
fn kaiser(x: f64) -> f64 {
    if x.abs() >= 1.0 { 0.0 } else { bessel(BETA * (1.0 - x * x).sqrt()) / bessel(BETA) }
}

/// The modified Bessel function of order 0, by its series.
fn bessel(x: f64) -> f64 {
    let (mut term, mut sum, mut index) = (1.0, 1.0, 1.0);
    while term > 1e-17 * sum {
        term *= (0.5 * x / index) * (0.5 * x / index);
        sum += term;
        index += 1.0;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::TAU;

    fn tone(rate: u32, hertz: f64, seconds: f64) -> Vec<f32> {
        let samples = (f64::from(rate) * seconds) as usize;
        (0..samples).map(|index| (TAU * hertz * index as f64 / f64::from(rate)).sin() as f32).collect()
    }

    #[test]
    fn tones_keep_their_frequency_and_their_phase() {
        for rate in [8_000, 11_025, 22_050, 24_000, 44_100, 48_000, 96_000] {
            for hertz in [200.0, 1000.0, 3600.0] {
                let got = Resampler::new(rate, 16_000).resample(&tone(rate, hertz, 0.5));
                let want = tone(16_000, hertz, 0.5);
                assert_eq!(got.len(), want.len(), "{rate} Hz");
                let middle = 1000..7000;
                let error = got[middle.clone()].iter().zip(&want[middle]).map(|(a, b)| (a - b).abs());
                let error = error.fold(0.0, f32::max);
                assert!(error < 2e-4, "{rate} Hz, a tone of {hertz} Hz is off by {error}");
            }
        }
    }

    /// 16,000 exact filters had up to 76 million taps.
    #[test]
    fn odd_rates_have_few_filters_and_the_same_tones() {
        for rate in [1_001, 7_999, 44_101, 47_999, 191_999, 767_999] {
            let resampler = Resampler::new(rate, 16_000);
            assert!(resampler.filters.len() < 60_000, "{rate} Hz: {} taps", resampler.filters.len());
            let hertz = f64::from(rate.min(16_000)) * 0.23;
            let seconds = if rate > 100_000 { 0.1 } else { 0.5 };
            let (got, want) = (resampler.resample(&tone(rate, hertz, seconds)), tone(16_000, hertz, seconds));
            assert!(got.len().abs_diff(want.len()) <= 16, "{rate} Hz: {} {}", got.len(), want.len());
            let middle = got.len() / 3..got.len() / 3 * 2;
            let error = got[middle.clone()].iter().zip(&want[middle]).map(|(a, b)| (a - b).abs());
            let error = error.fold(0.0, f32::max);
            assert!(error < 2e-4, "{rate} Hz, a tone of {hertz} Hz is off by {error}");
        }
    }

    #[test]
    fn frequencies_above_the_new_nyquist_frequency_are_removed() {
        for hertz in [8_400.0, 9_000.0, 15_000.0, 20_000.0] {
            let got = Resampler::new(44_100, 16_000).resample(&tone(44_100, hertz, 0.5));
            let loudest = got[1000..7000].iter().fold(0.0f32, |most, sample| most.max(sample.abs()));
            assert!(loudest < 2e-4, "{hertz} Hz comes through with {loudest}");
        }
    }

    #[test]
    fn lengths_are_exact_also_of_short_clips() {
        for (samples, rate, expected) in
            [(0, 44_100, 0), (1, 44_100, 1), (44_100, 44_100, 16_000), (7, 8_000, 14)]
        {
            assert_eq!(Resampler::new(rate, 16_000).resample(&vec![0.5; samples]).len(), expected);
        }
    }
}
