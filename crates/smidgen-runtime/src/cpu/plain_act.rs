//! Element-wise operations on one activation: ReLU, SiLU and GELU (erf form) with their gradients, scaling, and adding a
//! bias.
//!
//! Left out: activations with a gate (`act.rs`).

use super::chunk::{CHUNK_ELEMENTS, for_each_chunk, for_each_row};
use super::footprint::{assert_disjoint, assert_disjoint_or_same};
use super::view::{Dst, DstRows, Src, SrcRows, StoredVector};
use smidgen_ir::PlainActivation;

/// y = act(x). `y` may be `x`.
pub fn act(kind: PlainActivation, x: Src<f32>, y: Dst<f32>) {
    map(x, y, |x| value_and_slope(kind, x).0);
}

/// dx = dy * act'(x). `dx` may be `x` or `dy`.
pub fn act_grad(kind: PlainActivation, x: Src<f32>, dy: Src<f32>, dx: Dst<f32>) {
    assert_eq!((x.len(), dy.len()), (dx.len(), dx.len()));
    assert_disjoint_or_same("act_grad", dx, [x.into(), dy.into()]);
    for_each_chunk(x.len(), CHUNK_ELEMENTS, |chunk| {
        for index in chunk.range() {
            dx.set(index, dy.get(index) * value_and_slope(kind, x.get(index)).1);
        }
    });
}

/// y = scale * x. `y` may be `x`.
pub fn scale(scale: f32, x: Src<f32>, y: Dst<f32>) {
    map(x, y, |x| scale * x);
}

/// y = x + bias. `y` may be `x`.
pub fn add_bias(x: SrcRows, bias: StoredVector, y: DstRows) {
    let shape = (x.rows(), x.columns());
    assert_eq!((y.rows(), y.columns()), shape);
    assert_eq!(bias.len(), shape.1);
    assert_disjoint_or_same("add_bias", y, [x.into()]);
    assert_disjoint("add_bias", y, [bias.into()]);
    for_each_row(shape.0, shape.1, |row| {
        let (x, y) = (x.row(row), y.row(row));
        for channel in 0..shape.1 {
            y.set(channel, x.get(channel) + bias.get(channel));
        }
    });
}

fn map(x: Src<f32>, y: Dst<f32>, function: impl Fn(f32) -> f32 + Sync) {
    assert_eq!(x.len(), y.len());
    assert_disjoint_or_same("act", y, [x.into()]);
    for_each_chunk(x.len(), CHUNK_ELEMENTS, |chunk| {
        for index in chunk.range() {
            y.set(index, function(x.get(index)));
        }
    });
}

fn value_and_slope(kind: PlainActivation, x: f32) -> (f32, f32) {
    match kind {
        PlainActivation::Relu if x > 0.0 => (x, 1.0),
        // A comparison with NaN is false, and NaN must not become 0.
        PlainActivation::Relu => (if x.is_nan() { x } else { 0.0 }, 0.0),
        PlainActivation::Silu => {
            let s = 1.0 / (1.0 + (-x).exp());
            (x * s, s + x * s * (1.0 - s))
        }
        PlainActivation::Gelu => {
            let wide = f64::from(x);
            let cdf = 0.5 * (1.0 + error_function(wide * std::f64::consts::FRAC_1_SQRT_2));
            let density = (-0.5 * wide * wide).exp() / (2.0 * std::f64::consts::PI).sqrt();
            ((wide * cdf) as f32, (cdf + wide * density) as f32)
        }
    }
}

/// erf(x) = 2/sqrt(pi) · exp(-x²) · Σ 2ⁿ x²ⁿ⁺¹ / (1·3·…·(2n+1)), whose terms all have the same sign.
fn error_function(x: f64) -> f64 {
    // Beyond this the result rounds to ±1.
    if x.abs() > 6.0 || x.is_nan() {
        return if x.is_nan() { x } else { x.signum() };
    }
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term.abs() > 1e-17 * sum.abs() {
        odd += 2.0;
        term *= 2.0 * x * x / odd;
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the error function to 16 digits, from tables.
    #[test]
    fn the_error_function_is_that_of_tables() {
        let known = [
            (0.0, 0.0),
            (0.1, 0.112_462_916_018_284_9),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (3.5, 0.999_999_256_901_627_7),
        ];
        for (x, expected) in known {
            assert!((error_function(x) - expected).abs() < 1e-14, "{x}");
            assert!((error_function(-x) + expected).abs() < 1e-14, "-{x}");
        }
        assert_eq!((error_function(40.0), error_function(-7.0)), (1.0, -1.0));
        assert!(error_function(f64::NAN).is_nan());
    }

    #[test]
    fn nan_is_kept() {
        for kind in [PlainActivation::Relu, PlainActivation::Silu, PlainActivation::Gelu] {
            assert!(value_and_slope(kind, f32::NAN).0.is_nan(), "{kind:?}");
        }
    }
}
