//! Checks a gradient against central differences of the function.
//!
//! The function runs in f32 as in training, so rounding and the curvature over a step are both errors. Rounding dominates
//! short steps and curvature dominates long ones, so the best of several steps counts: a wrong gradient is wrong for all
//! of them. The function is evaluated at two points that the storage can represent, so a step is never lost in rounding.

use crate::numbers::{random_reals, stored};
use smidgen_ir::{DType, Storage};

/// Number of elements that are moved one by one; random directions cover the others.
const ELEMENTS: usize = 16;
const DIRECTIONS: u64 = 2;
/// Step lengths to try, as multiples of the usual one.
const STEP_FACTORS: [f32; 4] = [1.0, 0.3, 3.0, 0.1];

/// Checks `gradient` at `point` against `function`, with errors relative to the gradient's own scale.
pub fn check_gradient(
    name: &str,
    point: &[f32],
    storage: Storage,
    gradient: &[f32],
    tolerance: f64,
    mut function: impl FnMut(&[f32]) -> f64,
) {
    assert_eq!(point.len(), gradient.len(), "{name}: one derivative per element");
    assert!(gradient.iter().all(|value| value.is_finite()), "{name}: {gradient:?}");
    let squares: f64 = gradient.iter().map(|value| f64::from(*value).powi(2)).sum();
    let typical = (squares / gradient.len() as f64).sqrt();
    assert!(typical > 0.0, "{name}: the gradient is zero everywhere, which proves nothing");
    for (what, steps) in steps(point.len(), storage) {
        let mut tried = Vec::new();
        let agrees = STEP_FACTORS.into_iter().any(|factor| {
            let steps: Vec<f32> = steps.iter().map(|step| factor * step).collect();
            let compared = compare_over(point, storage, &steps, gradient, typical, &mut function);
            tried.extend(compared);
            compared.is_some_and(|compared| compared.error <= tolerance)
        });
        assert!(agrees, "{name}, {what}: {tried:?}");
    }
}

#[derive(Clone, Copy, Debug)]
#[expect(dead_code, reason = "both changes are only shown in messages")]
struct Compared {
    error: f64,
    function_changes_by: f64,
    gradient_says: f64,
}

/// Compares over one step; `None` if the storage cannot represent it.
fn compare_over(
    point: &[f32],
    storage: Storage,
    steps: &[f32],
    gradient: &[f32],
    typical: f64,
    function: &mut impl FnMut(&[f32]) -> f64,
) -> Option<Compared> {
    let moved = |sign: f32| -> Vec<f32> {
        point.iter().zip(steps).map(|(value, step)| stored(storage, value + sign * step)).collect()
    };
    let (above, below) = (moved(1.0), moved(-1.0));
    let mut predicted = 0.0;
    let (mut scale, mut longest) = (0.0, 0.0f64);
    for ((above, below), slope) in above.iter().zip(&below).zip(gradient) {
        let distance = f64::from(*above) - f64::from(*below);
        let change = distance * f64::from(*slope);
        predicted += change;
        scale += change * change;
        longest = longest.max(distance.abs());
    }
    if longest == 0.0 {
        return None;
    }
    let actual = function(&above) - function(&below);
    let error = (actual - predicted).abs() / scale.sqrt().max(longest * typical);
    Some(Compared { error, function_changes_by: actual, gradient_says: predicted })
}

/// Steps of some single elements, and of all elements in random directions.
fn steps(len: usize, storage: Storage) -> Vec<(String, Vec<f32>)> {
    let single = match storage {
        Storage::Plain(DType::F32) => 1e-2,
        _ => 0.05,
    };
    let together = match storage {
        Storage::Plain(DType::F32) => 3e-2 / (len as f32).sqrt(),
        // Several units in the last place of bf16 for numbers below 1.
        _ => 0.015,
    };
    let mut steps = Vec::new();
    let stride = len.div_ceil(ELEMENTS);
    for element in (0..len).step_by(stride) {
        // Varies the column of a matrix.
        let element = (element + element / stride % stride).min(len - 1);
        let mut step = vec![0.0; len];
        step[element] = single;
        steps.push((format!("element {element}"), step));
    }
    for direction in 0..DIRECTIONS {
        let signs = random_reals(0x5eed + direction, len);
        let step = signs.iter().map(|sign| together.copysign(*sign)).collect();
        steps.push((format!("direction {direction}"), step));
    }
    steps
}
