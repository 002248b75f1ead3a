//! Tests of the vector `exp` and `tanh`, and of their extremes, on every instruction set of the machine.
//!
//! They are in a separate file because `on_each_isa!` only works in a sibling of `isa.rs`.
//! Left out: the other methods of the lane types, which the tests of matmuls and attention exercise.

use super::isa::{Isa, Lanes, exp, on_each_isa, tanh};

type Function = fn(f64) -> f64;

on_each_isa! {
    unsafe fn exp_row(row: *mut f32, count: usize) = exp_row_with;
}
on_each_isa! {
    unsafe fn tanh_row(row: *mut f32, count: usize) = tanh_row_with;
}

#[inline(always)]
unsafe fn exp_row_with<V: Lanes>(row: *mut f32, count: usize) {
    for at in (0..count).step_by(V::WIDTH) {
        // SAFETY: the tests give rows of whole vectors.
        unsafe { exp(V::load(row.add(at))).store(row.add(at)) }
    }
}

#[inline(always)]
unsafe fn tanh_row_with<V: Lanes>(row: *mut f32, count: usize) {
    for at in (0..count).step_by(V::WIDTH) {
        // SAFETY: the tests give rows of whole vectors.
        unsafe { tanh(V::load(row.add(at))).store(row.add(at)) }
    }
}

/// The largest error relative to the true value, over evenly spaced arguments.
fn largest_error(run: unsafe fn(Isa, *mut f32, usize), isa: Isa, truth: Function, range: (f32, f32)) -> f64 {
    let count = 1 << 18;
    let step = (range.1 - range.0) / count as f32;
    let arguments: Vec<f32> = (0..count).map(|i| range.0 + i as f32 * step).collect();
    let mut values = arguments.clone();
    // SAFETY: the instruction set is supported and the row is a whole number of vectors.
    unsafe { run(isa, values.as_mut_ptr(), count) };
    let errors = arguments.iter().zip(&values).map(|(&x, &y)| {
        let want = truth(f64::from(x));
        if want == 0.0 {
            return f64::from(y).abs();
        }
        ((f64::from(y) - want) / want).abs()
    });
    errors.fold(0.0, f64::max)
}

#[test]
fn exp_and_tanh_are_close_on_every_isa() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let error = largest_error(exp_row, isa, f64::exp, (-87.0, 88.0));
        assert!(error < 1.2e-7, "exp {error:e} on {isa:?}");
        for range in [(-12.0, 12.0), (-0.7, 0.7), (-1e-3, 1e-3)] {
            let error = largest_error(tanh_row, isa, f64::tanh, range);
            assert!(error < 3e-7, "tanh {error:e} on {isa:?} in {range:?}");
        }
    }
}

#[test]
fn exp_of_extremes() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let mut row = [0.0; 16];
        row[..9].copy_from_slice(&[-inf, -200.0, -104.5, 89.0, inf, nan, 0.0, -95.0, -87.32]);
        // SAFETY: the instruction set is supported and the row is a whole number of vectors.
        unsafe { exp_row(isa, row.as_mut_ptr(), 16) };
        assert_eq!(row[..5], [0.0, 0.0, 0.0, inf, inf], "{isa:?}");
        assert!(row[5].is_nan(), "{isa:?}");
        assert_eq!(row[6], 1.0, "{isa:?}");
        assert_eq!(row[7], 0.0, "{isa:?}");
        assert!(row[8] >= f32::MIN_POSITIVE && row[8] < 1.2e-38, "{isa:?}");
    }
}
