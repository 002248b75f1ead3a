//! Compares the merged model with base + adapter: the logits of one fixed sequence, computed by both.
//!
//! Each model is computed in its stored format, so the difference is rounding: of B·A into the weights, and of decoded
//! weights into the element type. The two models are in memory one after the other, never together.

use crate::failure::Failure;
use crate::model_files::original::OriginalModel;
use crate::plan::model::read_decoder;
use crate::session::adapted::logits_of;
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_runtime::counter;
use std::path::Path;

/// Tokens of the sequence; fewer if the model has fewer positions.
const TOKENS: usize = 64;
const SEED: u64 = 64;

/// The differences of all logits at all tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitsDifference {
    /// The largest absolute difference.
    pub max: f64,
    /// The mean absolute difference.
    pub mean: f64,
    /// The norm of the difference divided by the norm of the logits.
    pub relative: f64,
    /// Tokens of the compared sequence.
    pub tokens: usize,
}

/// Compares base + adapter with the merged model in `merged`.
pub fn compare_logits(
    original: &OriginalModel,
    adapter: &AdapterFile,
    merged: &Path,
) -> Result<LogitsDifference, Failure> {
    let spec = read_decoder(original.model())?;
    let ids = fixed_ids(spec.vocabulary, TOKENS.min(spec.max_positions));
    let before = logits_of(original.model(), Some(adapter), &ids)?;
    let merged = Model::open_folder(merged).map_err(Failure::model)?;
    let after = logits_of(&merged, None, &ids)?;
    Ok(difference(&before, &after, ids.len()))
}

/// Token ids that are the same on every machine.
fn fixed_ids(vocabulary: usize, count: usize) -> Vec<u32> {
    let key = counter::token_key(SEED, 0, 0, 0);
    let id = |index: u64| (f64::from(counter::uniform(key, index)) * vocabulary as f64) as u32;
    (0..count as u64).map(id).collect()
}

fn difference(before: &[f32], after: &[f32], tokens: usize) -> LogitsDifference {
    let (mut max, mut sum, mut squares, mut length) = (0f64, 0f64, 0f64, 0f64);
    for (&before, &after) in before.iter().zip(after) {
        let (before, distance) = (f64::from(before), (f64::from(before) - f64::from(after)).abs());
        // `max` would ignore a NaN distance.
        max = if distance > max || distance.is_nan() { distance } else { max };
        sum += distance;
        squares += distance * distance;
        length += before * before;
    }
    let relative = if squares == 0.0 { 0.0 } else { (squares / length).sqrt() };
    LogitsDifference { max, mean: sum / before.len() as f64, relative, tokens }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_counted_over_all_logits() {
        let found = difference(&[3.0, 0.0, -4.0, 0.0], &[3.0, 0.5, -4.0, 0.0], 2);
        assert_eq!(found, LogitsDifference { max: 0.5, mean: 0.125, relative: 0.1, tokens: 2 });
        let none = difference(&[0.0; 3], &[0.0; 3], 1);
        assert_eq!((none.max, none.relative), (0.0, 0.0));
        assert!(difference(&[f32::NAN, 1.0], &[1.0, 1.0], 1).max.is_nan());
    }

    #[test]
    fn the_sequence_is_fixed_and_inside_the_vocabulary() {
        let ids = fixed_ids(211, 64);
        assert_eq!(ids, fixed_ids(211, 64));
        assert!(ids.iter().all(|id| *id < 211));
        let distinct: std::collections::BTreeSet<u32> = ids.iter().copied().collect();
        assert!(distinct.len() > 40, "{distinct:?}");
        assert_eq!(fixed_ids(2, 64).iter().filter(|id| **id > 1).count(), 0);
    }
}
