//! Sampling gives the same candidates as transformers, and its draws depend only on seed and position.
//!
//! `fixtures/sampling/cases.json` is recorded by the script next to it.

use super::*;
use serde_json::Value as Json;

fn cases() -> Vec<Json> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/sampling/cases.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn floats(case: &Json, key: &str) -> Vec<f64> {
    case[key].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

#[test]
fn candidates_and_probabilities_are_those_of_transformers() {
    for (number, case) in cases().iter().enumerate() {
        let mut logits: Vec<f32> = floats(case, "logits").iter().map(|logit| *logit as f32).collect();
        let seen: Vec<u32> = floats(case, "seen").iter().map(|id| *id as u32).collect();
        let sampling = Sampling {
            temperature: case["temperature"].as_f64().unwrap(),
            top_k: case["top_k"].as_u64().unwrap() as usize,
            top_p: case["top_p"].as_f64().unwrap(),
            repetition_penalty: case["repetition_penalty"].as_f64().unwrap(),
            seed: 0,
        };
        let mut sampler = Sampler::new(sampling);
        sampler.choose(&mut logits, &seen, 0).unwrap();
        let total: f64 = sampler.candidates.iter().map(|candidate| f64::from(candidate.logit).exp()).sum();
        let mut got = vec![0.0; logits.len()];
        for candidate in &sampler.candidates {
            got[candidate.id as usize] = f64::from(candidate.logit).exp() / total;
        }
        for (id, (got, want)) in got.iter().zip(floats(case, "probabilities")).enumerate() {
            assert_eq!(*got == 0.0, want == 0.0, "case {number}: token {id} is kept or not");
            assert!((got - want).abs() < 1e-5, "case {number}, token {id}: {got} or {want}");
        }
    }
}

#[test]
fn equal_logits_go_to_the_lowest_id() {
    let mut logits = [1.0, 7.0, f32::NAN, 7.0, 2.0];
    assert_eq!(most_likely(&logits), Some(1));
    assert_eq!(Sampler::new(Sampling::default()).choose(&mut logits, &[], 5), Some(1));
    let one = Sampling { temperature: 1.0, top_p: 0.1, ..Sampling::default() };
    assert_eq!(Sampler::new(one).choose(&mut [1.0, 7.0, 7.0], &[], 0), Some(1));
}

#[test]
fn nothing_is_chosen_without_finite_logits() {
    for temperature in [0.0, 1.0] {
        let mut sampler = Sampler::new(Sampling { temperature, ..Sampling::default() });
        assert_eq!(sampler.choose(&mut [f32::NAN, f32::NAN], &[], 0), None);
        assert_eq!(sampler.choose(&mut [f32::NEG_INFINITY; 3], &[], 0), None);
    }
}

/// The frequencies of ten thousand draws are within four standard errors of the probabilities.
#[test]
fn draws_follow_the_probabilities() {
    let logits = [0.0f32, 1.0, 2.0, -1.0];
    let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    let mut sampler = Sampler::new(Sampling { temperature: 1.0, seed: 9, ..Sampling::default() });
    let mut counts = [0usize; 4];
    const DRAWS: usize = 10_000;
    for place in 0..DRAWS {
        counts[sampler.choose(&mut logits.clone(), &[], place).unwrap() as usize] += 1;
    }
    for (logit, count) in logits.iter().zip(counts) {
        let p = f64::from(*logit).exp() / total;
        let error = 4.0 * (p * (1.0 - p) / DRAWS as f64).sqrt();
        assert!((count as f64 / DRAWS as f64 - p).abs() < error, "{count} of {DRAWS} at {p}");
    }
}

/// The same seed must give the same text with every version.
#[test]
fn draws_are_pinned() {
    let draw = |seed: u64, place: usize| {
        let mut sampler = Sampler::new(Sampling { temperature: 1.0, seed, ..Sampling::default() });
        sampler.choose(&mut vec![0.0; 1000], &[], place).unwrap()
    };
    let draws = [draw(0, 0), draw(0, 1), draw(1, 0), draw(42, 7), draw(u64::MAX, 999)];
    assert_eq!(draws, [353, 128, 169, 438, 958]);
}
