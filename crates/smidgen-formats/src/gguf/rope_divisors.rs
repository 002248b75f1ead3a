//! RoPE scaling of Llama 3 in a GGUF file, which stores divisors of the frequencies instead of the settings.
//! The settings are recovered by computing the divisors of all published settings and comparing, so that a
//! GGUF model gets the config of its original. Other divisors become a `longrope` with these values as both
//! short and long factors and an attention factor of 1, which computes the same angles.
//! Left out: scaling that GGUF describes in its metadata.

use serde_json::{Value, json};

use super::value::shortest_decimal;

/// What converters write for pairs of Gemma 4 that are not rotated.
pub const UNROTATED: f32 = 1e30;
/// All published models use these two values.
const LOW_FREQ_FACTOR: f64 = 1.0;
const HIGH_FREQ_FACTOR: f64 = 4.0;
/// Files hold f32 divisors, computed from f32 frequencies.
const TOLERANCE: f64 = 1e-4;

/// `rope_parameters` for these divisors, without `rope_theta`.
pub(super) fn rope_parameters_of(divisors: &[f32], theta: f64, max_positions: u64) -> Value {
    if divisors.iter().all(|&divisor| divisor == 1.0) {
        return json!({"rope_type": "default"});
    }
    let factor = divisors.iter().copied().fold(1.0_f32, f32::max);
    let matches = |original: &f64| {
        let expected = llama3_divisors(divisors.len(), theta, f64::from(factor), *original);
        expected
            .iter()
            .zip(divisors)
            .all(|(expected, &divisor)| (expected - f64::from(divisor)).abs() <= TOLERANCE * expected)
    };
    // 8192, the usual value, comes first: with few frequencies several settings can match.
    let originals = std::iter::once(13).chain(10..=17).map(|power| f64::from(1 << power));
    match originals.clone().find(matches) {
        Some(original) => json!({
            "rope_type": "llama3",
            "factor": shortest_decimal(factor),
            "low_freq_factor": LOW_FREQ_FACTOR,
            "high_freq_factor": HIGH_FREQ_FACTOR,
            "original_max_position_embeddings": original as u64,
        }),
        None => {
            let factors: Vec<f64> = divisors.iter().map(|&divisor| shortest_decimal(divisor)).collect();
            json!({
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": max_positions,
            })
        }
    }
}

/// The divisor of each frequency: 1 for short wavelengths, `factor` for long ones, interpolated between.
fn llama3_divisors(count: usize, theta: f64, factor: f64, original: f64) -> Vec<f64> {
    let divisor = |channel: usize| {
        let frequency = theta.powf(-(channel as f64) / count as f64);
        let turns = original * frequency / std::f64::consts::TAU;
        if turns > HIGH_FREQ_FACTOR {
            1.0
        } else if turns < LOW_FREQ_FACTOR {
            factor
        } else {
            let smooth = (turns - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..count).map(divisor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divisors(count: usize, factor: f64, original: f64) -> Vec<f32> {
        llama3_divisors(count, 5e5, factor, original).iter().map(|&divisor| divisor as f32).collect()
    }

    /// Published inverse frequencies of Llama 3.1: index 28 is kept, 29 to 34 are blended, 35 is divided by
    /// 8.
    #[test]
    fn the_divisors_are_those_of_llama_3_1() {
        let divisors = llama3_divisors(64, 5e5, 8.0, 8192.0);
        let scaled = |index: usize| 5e5_f64.powf(-(index as f64) / 64.0) / divisors[index];
        for (index, expected) in [
            (28, 0.00321144599),
            (29, 0.00216657076),
            (34, 0.000178507813),
            (35, 9.55621235e-05),
            (63, 3.06892599e-07),
        ] {
            let error = (scaled(index) - expected).abs() / expected;
            assert!(error < 1e-6, "{index}: {} for {expected}", scaled(index));
        }
    }

    #[test]
    fn the_settings_are_recovered() {
        for (count, factor, original) in [(64, 8.0, 8192.0), (32, 32.0, 8192.0), (64, 16.0, 4096.0)] {
            let found = rope_parameters_of(&divisors(count, factor, original), 5e5, 131_072);
            let expected = json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": original as u64,
            });
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn other_divisors_keep_their_values() {
        let found = rope_parameters_of(&[1.0, 1.5, 7.25, 3.0], 1e4, 4096);
        assert_eq!(found["rope_type"], "longrope");
        assert_eq!(found["long_factor"], json!([1.0, 1.5, 7.25, 3.0]));
        assert_eq!(found["long_factor"], found["short_factor"]);
        assert_eq!(found["attention_factor"], json!(1.0));
        assert_eq!(rope_parameters_of(&[1.0; 4], 1e4, 4096), json!({"rope_type": "default"}));
    }
}
