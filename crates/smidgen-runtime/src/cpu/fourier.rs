//! LS-LoRA's bounded nonlinearity after B: a constant, a tanh and one Fourier pair, with its gradients.
//!
//! A module has four coefficients a0 to a3 and one sigma. With zz = h Bᵀ, z = scale zz, s = |sigma| + 1e-6,
//! u = tanh(z / s), n = sin(pi u) and c = cos(pi u) it computes y = base + a0 + a1 u + a2 n + a3 c. With
//! slope = (a1 + pi a2 c - pi a3 n) (1 - u²) the gradients are
//!
//! ```text
//! dz = dy slope / s        da = sums of dy (1, u, n, c)        dsigma = -sign(sigma) sum of dz z / s
//! ```
//!
//! The sums run over all elements in f64: first inside groups of rows, then over the groups in order.
//! Left out: the factor `scale` in the gradient of zz, which the caller's next matmuls apply.

use super::chunk::{Chunk, for_each_chunk, for_each_row_chunk};
use super::footprint::{assert_disjoint, assert_disjoint_or_same};
use super::simd::{Isa, LANES, Lanes, for_each_block, kernel, sin_cos_pi_lanes, sum_wide_lanes, tanh_lanes};
use super::view::{Dst, DstRows, Src, SrcRows};
use smidgen_ir::workspace_cpu::fourier_partials;
use std::f32::consts::PI;

/// The parameters of one module, and the scale of its low-rank matmul.
#[derive(Clone, Copy, Debug)]
pub struct FourierModule {
    pub coefficients: Src<f32>, // (4)
    pub sigma: Src<f32>,        // (1)
    pub scale: f32,
}

/// The initial coefficients, and the target of the regulariser: y = base + u.
pub const NEUTRAL_COEFFICIENTS: [f32; 4] = [0.0, 1.0, 0.0, 0.0];

/// y = base + a0 + a1 u + a2 n + a3 c. `y` may be `base` or `zz`.
pub fn fourier(
    base: SrcRows, // (T, N)
    zz: SrcRows,   // (T, N)
    module: FourierModule,
    y: DstRows, // (T, N)
) {
    let shape = (zz.rows(), zz.columns());
    assert_eq!((base.rows(), base.columns()), shape);
    assert_eq!((y.rows(), y.columns()), shape);
    assert_disjoint_or_same("fourier", y, [base.into(), zz.into()]);
    assert_disjoint("fourier", y, [module.coefficients.into(), module.sigma.into()]);
    let terms = Terms::of(module);
    let isa = Isa::current();
    for_each_row_chunk(shape.0, shape.1, |chunk| {
        activate_rows(isa, base, zz, terms, y, chunk);
    });
}

/// dz = the gradient of z = scale zz; the gradients of the coefficients and of sigma are added to their buffers.
/// `dz` may be `zz` or `dy`; `sums` has at least `fourier_partials` elements.
pub fn fourier_grad(
    zz: SrcRows, // (T, N)
    module: FourierModule,
    dy: SrcRows, // (T, N)
    dz: DstRows, // (T, N)
    sums: Dst<f64>,
    dcoefficients: Dst<f32>, // (4)
    dsigma: Dst<f32>,        // (1)
) {
    let (rows, columns) = (zz.rows(), zz.columns());
    assert_eq!((dy.rows(), dy.columns()), (rows, columns));
    assert_eq!((dz.rows(), dz.columns()), (rows, columns));
    assert_eq!((dcoefficients.len(), dsigma.len()), (4, 1));
    if rows == 0 || columns == 0 {
        return;
    }
    let sums = sums.part(0, fourier_partials(rows, columns));
    let FourierModule { coefficients, sigma, .. } = module;
    assert_disjoint_or_same("fourier_grad", dz, [zz.into(), dy.into()]);
    assert_disjoint("fourier_grad", dz, [coefficients.into(), sigma.into()]);
    let read = [zz.into(), dy.into(), dz.into(), coefficients.into(), sigma.into()];
    assert_disjoint("fourier_grad", sums, read);
    assert_disjoint("fourier_grad", dcoefficients, read);
    assert_disjoint("fourier_grad", dsigma, read);
    assert_disjoint("fourier_grad", sums, [dcoefficients.into(), dsigma.into()]);
    assert_disjoint("fourier_grad", dcoefficients, [dsigma.into()]);

    let terms = Terms::of(module);
    let isa = Isa::current();
    let rows_per_group = rows.div_ceil(sums.len() / SUMS);
    for_each_chunk(rows, rows_per_group, |chunk| {
        let group = gradient_rows(isa, zz, dy, terms, dz, chunk);
        for (index, sum) in group.into_iter().enumerate() {
            sums.set(chunk.index * SUMS + index, sum);
        }
    });
    let mut totals = [0.0; SUMS];
    for group in 0..rows.div_ceil(rows_per_group) {
        for (index, total) in totals.iter_mut().enumerate() {
            *total += sums.src().get(group * SUMS + index);
        }
    }
    for (index, total) in totals[..4].iter().enumerate() {
        let before = f64::from(dcoefficients.src().get(index));
        dcoefficients.set(index, (before + total) as f32);
    }
    let before = f64::from(dsigma.src().get(0));
    dsigma.set(0, (before - sign(sigma.get(0)) * totals[4]) as f32);
}

/// The regulariser weight * sum (a - neutral)²: adds its gradient, times the scale of `dcoefficients`, and returns
/// its unscaled value. For a mean over M modules, weight = strength / (4 M).
pub fn fourier_reg(
    coefficients: SrcRows, // (M, 4)
    weight: f64,
    scale: f64,
    dcoefficients: DstRows, // (M, 4)
) -> f64 {
    assert_eq!(coefficients.columns(), 4);
    assert_eq!((dcoefficients.rows(), dcoefficients.columns()), (coefficients.rows(), 4));
    assert_disjoint("fourier_reg", dcoefficients, [coefficients.into()]);
    let mut sum = 0.0;
    for module in 0..coefficients.rows() {
        let (a, da) = (coefficients.row(module), dcoefficients.row(module));
        for (index, neutral) in NEUTRAL_COEFFICIENTS.into_iter().enumerate() {
            let difference = f64::from(a.get(index)) - f64::from(neutral);
            sum += difference * difference;
            da.set(index, (f64::from(da.src().get(index)) + scale * (2.0 * weight * difference)) as f32);
        }
    }
    weight * sum
}

/// Sums of the backward pass: dy, dy u, dy n, dy c, dz z / s.
const SUMS: usize = 5;

/// Keeps the divisor away from zero; added in f32, as in the reference implementation.
const SIGMA_FLOOR: f32 = 1e-6;

/// The derivative of the absolute value, 0 at 0 as in PyTorch.
fn sign(sigma: f32) -> f64 {
    if sigma == 0.0 { 0.0 } else { f64::from(sigma.signum()) }
}

#[derive(Clone, Copy)]
struct Terms {
    coefficients: [f32; 4],
    /// scale / s
    gain: f32,
    inverse_s: f32,
}

impl Terms {
    fn of(module: FourierModule) -> Terms {
        assert_eq!((module.coefficients.len(), module.sigma.len()), (4, 1));
        let s = f64::from(module.sigma.get(0).abs() + SIGMA_FLOOR);
        Terms {
            coefficients: std::array::from_fn(|index| module.coefficients.get(index)),
            gain: (f64::from(module.scale) / s) as f32,
            inverse_s: (1.0 / s) as f32,
        }
    }
}

#[inline(always)]
fn times(mut lanes: Lanes, factor: f32) -> Lanes {
    for value in &mut lanes {
        *value *= factor;
    }
    lanes
}

kernel! {
    fn activate_rows(base: SrcRows, zz: SrcRows, terms: Terms, y: DstRows, chunk: Chunk) {
        let [a0, a1, a2, a3] = terms.coefficients;
        for row in chunk.range() {
            let (base, zz, y) = (base.row(row), zz.row(row), y.row(row));
            for_each_block!(block in zz.len() => {
                let base = base.lanes(block);
                let u = tanh_lanes(times(zz.lanes(block), terms.gain));
                let (n, c) = sin_cos_pi_lanes(u);
                let mut out = [0.0; LANES];
                for lane in 0..LANES {
                    out[lane] = base[lane] + (a0 + a1 * u[lane] + a2 * n[lane] + a3 * c[lane]);
                }
                y.set_lanes(block, out);
            });
        }
    }
}

kernel! {
    fn gradient_rows(zz: SrcRows, dy: SrcRows, terms: Terms, dz: DstRows, chunk: Chunk) -> [f64; SUMS] {
        let [_, a1, a2, a3] = terms.coefficients;
        let mut sums = [[0.0_f64; LANES]; SUMS];
        for row in chunk.range() {
            let (zz, dy, dz) = (zz.row(row), dy.row(row), dz.row(row));
            for_each_block!(block in zz.len() => {
                let dy = dy.lanes(block);
                let x = times(zz.lanes(block), terms.gain);
                let u = tanh_lanes(x);
                let (n, c) = sin_cos_pi_lanes(u);
                let mut out = [0.0; LANES];
                for lane in 0..LANES {
                    let outer = a1 + PI * a2 * c[lane] - PI * a3 * n[lane];
                    let inner = (1.0 - u[lane]) * (1.0 + u[lane]) * terms.inverse_s;
                    out[lane] = dy[lane] * outer * inner;
                }
                // Padding lanes have dy = 0, so they add nothing.
                for lane in 0..LANES {
                    let wide = f64::from(dy[lane]);
                    sums[0][lane] += wide;
                    sums[1][lane] += wide * f64::from(u[lane]);
                    sums[2][lane] += wide * f64::from(n[lane]);
                    sums[3][lane] += wide * f64::from(c[lane]);
                    sums[4][lane] += f64::from(out[lane]) * f64::from(x[lane]);
                }
                dz.set_lanes(block, out);
            });
        }
        let mut totals = [0.0; SUMS];
        for index in 0..SUMS {
            totals[index] = sum_wide_lanes(sums[index]);
        }
        totals
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    const COEFFICIENTS: [f32; 4] = [0.3, 1.2, -0.7, 0.4];
    const SCALE: f32 = 1.75;
    const SIGMAS: [f32; 3] = [1.0, 0.6, -1.5];

    /// Tests keep both arrays alive while the module is in use.
    fn module(coefficients: &[f32; 4], sigma: &[f32; 1]) -> FourierModule {
        FourierModule { coefficients: src(coefficients), sigma: src(sigma), scale: SCALE }
    }

    fn phi(zz: f64, a: &[f64], sigma: f64) -> f64 {
        let u = (f64::from(SCALE) * zz / (sigma.abs() + 1e-6)).tanh();
        let angle = std::f64::consts::PI * u;
        a[0] + a[1] * u + a[2] * angle.sin() + a[3] * angle.cos()
    }

    struct Gradients {
        dz: Vec<f32>,
        dcoefficients: Vec<f32>,
        dsigma: Vec<f32>,
    }

    /// `place`: which of zz and dy holds dz; 2 is a separate buffer.
    fn gradients(zz: &[f32], dy: &[f32], columns: usize, sigma: f32, start: f32, place: usize) -> Gradients {
        let (dz, (dcoefficients, dsigma)) = on_every_isa(|| {
            let mut buffers = [zz.to_vec(), dy.to_vec(), vec![f32::NAN; zz.len()]];
            let views = buffers.each_mut().map(|buffer| dst(buffer).rows(columns));
            let mut sums = vec![f64::NAN; fourier_partials(zz.len() / columns, columns)];
            let (mut dcoefficients, mut dsigma) = (vec![start; 4], vec![start]);
            let sigma = [sigma];
            fourier_grad(
                views[0].src(),
                module(&COEFFICIENTS, &sigma),
                views[1].src(),
                views[place],
                dst(&mut sums),
                dst(&mut dcoefficients),
                dst(&mut dsigma),
            );
            (buffers[place].clone(), (dcoefficients, dsigma))
        });
        Gradients { dz, dcoefficients, dsigma }
    }

    #[test]
    fn forward_matches_the_reference_in_and_out_of_place() {
        for columns in COLUMNS {
            for sigma in SIGMAS {
                let (base, zz) = (numbers(1, 61 * columns), numbers(2, 61 * columns));
                // `place`: which of base and zz holds the output; 2 is a separate buffer.
                let run = |place: usize| {
                    on_every_isa(|| {
                        let mut buffers = [base.clone(), zz.clone(), vec![f32::NAN; zz.len()]];
                        let views = buffers.each_mut().map(|buffer| dst(buffer).rows(columns));
                        let sigma = [sigma];
                        let module = module(&COEFFICIENTS, &sigma);
                        fourier(views[0].src(), views[1].src(), module, views[place]);
                        buffers[place].clone()
                    })
                };
                let y = run(2);
                let a = widened(&COEFFICIENTS);
                let value =
                    |(base, zz): (&f32, &f32)| f64::from(*base) + phi(f64::from(*zz), &a, f64::from(sigma));
                let want: Vec<f64> = base.iter().zip(&zz).map(value).collect();
                assert_close("y", &y, &want, 1.0, 1e-6);
                assert_same_bits("in base", &run(0), &y);
                assert_same_bits("in zz", &run(1), &y);
            }
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        for columns in [1, 7, 16, 33] {
            for sigma in SIGMAS {
                let (zz, dy) = (numbers(2, 3 * columns), numbers(3, 3 * columns));
                let got = gradients(&zz, &dy, columns, sigma, 0.0, 2);
                let (zz, dy, a) = (widened(&zz), widened(&dy), widened(&COEFFICIENTS));
                let sigma = f64::from(sigma);
                let loss = |zz: &[f64], a: &[f64], sigma: f64| -> f64 {
                    zz.iter().zip(&dy).map(|(zz, dy)| dy * phi(*zz, a, sigma)).sum()
                };
                let mut want = finite_difference(&zz, |zz| loss(zz, &a, sigma));
                for value in &mut want {
                    *value /= f64::from(SCALE);
                }
                assert_close("dz", &got.dz, &want, 1.0, 3e-6);
                let want = finite_difference(&a, |a| loss(&zz, a, sigma));
                assert_close("dcoefficients", &got.dcoefficients, &want, 1.0, 1e-6);
                let want = finite_difference(&[sigma], |sigma| loss(&zz, &a, sigma[0]));
                assert_close("dsigma", &got.dsigma, &want, 1.0, 3e-6);
            }
        }
    }

    #[test]
    fn gradients_work_in_every_place() {
        for columns in COLUMNS {
            let (zz, dy) = (numbers(2, 61 * columns), numbers(3, 61 * columns));
            let run = |place| {
                let Gradients { dz, dcoefficients, dsigma } = gradients(&zz, &dy, columns, 0.6, 0.5, place);
                (dz, (dcoefficients, dsigma))
            };
            let out_of_place = run(2);
            assert_same_bits("in zz", &run(0), &out_of_place);
            assert_same_bits("in dy", &run(1), &out_of_place);
        }
    }

    #[test]
    fn sums_over_many_groups_add_to_the_present_value() {
        let (rows, columns) = (517, 576);
        assert!(fourier_partials(rows, columns) > 10 * SUMS);
        let (zz, dy) = (numbers(2, rows * columns), numbers(3, rows * columns));
        let got = gradients(&zz, &dy, columns, -1.5, 2.5, 2);
        let mut want = [2.5; SUMS];
        let s = 1.5 + 1e-6;
        for ((zz, dy), dz) in zz.iter().zip(&dy).zip(&got.dz) {
            let (zz, dy) = (f64::from(*zz), f64::from(*dy));
            let x = f64::from(SCALE) * zz / s;
            let angle = std::f64::consts::PI * x.tanh();
            want[0] += dy;
            want[1] += dy * x.tanh();
            want[2] += dy * angle.sin();
            want[3] += dy * angle.cos();
            want[4] += f64::from(*dz) * x;
        }
        assert_close("dcoefficients", &got.dcoefficients, &want[..4], 50.0, 1e-6);
        assert_close("dsigma", &got.dsigma, &want[4..], 50.0, 1e-6);
    }

    #[test]
    fn partial_sums_are_bounded_and_grow_with_the_rows() {
        for columns in [1, 16, 576, 40_000] {
            let mut before = 0;
            for rows in 0..3000 {
                let partials = fourier_partials(rows, columns);
                assert!(partials >= before && partials.is_multiple_of(SUMS), "{rows} rows");
                before = partials;
            }
        }
        assert!(fourier_partials(1 << 20, 1 << 16) <= 512 * SUMS);
    }

    #[test]
    fn training_starts_at_the_base_and_both_constants_move_alike() {
        let (base, dy, zz) = (numbers(1, 5 * 33), numbers(3, 5 * 33), vec![0.0; 5 * 33]);
        let mut y = vec![f32::NAN; base.len()];
        let neutral = module(&NEUTRAL_COEFFICIENTS, &[1.0]);
        fourier(src(&base).rows(33), src(&zz).rows(33), neutral, dst(&mut y).rows(33));
        assert_same_bits("y", &y, &base);
        let got = gradients(&zz, &dy, 33, 1.0, 0.0, 2);
        let da = got.dcoefficients;
        assert_eq!((da[0].to_bits(), da[1], da[2]), (da[3].to_bits(), 0.0, 0.0));
        assert_ne!(da[0], 0.0);
        assert_eq!(got.dsigma, [0.0]);
    }

    #[test]
    fn saturation_is_flat_a_sigma_of_zero_is_finite_and_nan_is_kept() {
        let got = gradients(&[1e30, -1e30, 40.0, -40.0], &[1.0; 4], 4, 1.0, 0.0, 2);
        assert_eq!((got.dz, got.dsigma), (vec![0.0; 4], vec![0.0]));
        let zz = [1e-7_f32, -3e-7, 0.0, 1.0];
        let got = gradients(&zz, &[1.0; 4], 4, 0.0, 0.0, 2);
        assert!(got.dz.iter().chain(&got.dcoefficients).all(|value| value.is_finite()));
        assert_eq!(got.dsigma, [0.0]);
        let got = gradients(&[0.0, f32::NAN], &[1.0, 1.0], 2, 1.0, 0.0, 2);
        assert!(got.dz[0].is_finite() && got.dz[1].is_nan() && got.dsigma[0].is_nan());
    }

    #[test]
    fn no_rows_change_nothing() {
        let got = gradients(&[], &[], 7, 1.0, 0.5, 2);
        assert_eq!((got.dcoefficients, got.dsigma), (vec![0.5; 4], vec![0.5]));
    }

    #[test]
    fn the_regulariser_matches_finite_differences() {
        let (coefficients, weight) = (numbers(1, 3 * 4), 0.01 / 12.0);
        let mut dcoefficients = vec![0.25; 12];
        let got = fourier_reg(src(&coefficients).rows(4), weight, 1.0, dst(&mut dcoefficients).rows(4));
        let loss = |a: &[f64]| -> f64 {
            let difference = |(index, a): (usize, &f64)| if index % 4 == 1 { a - 1.0 } else { *a };
            weight * a.iter().enumerate().map(difference).map(|value| value * value).sum::<f64>()
        };
        let a = widened(&coefficients);
        assert!((got - loss(&a)).abs() < 1e-15, "{got:e}");
        let want: Vec<f64> = finite_difference(&a, loss).iter().map(|slope| 0.25 + slope).collect();
        assert_close("dcoefficients", &dcoefficients, &want, 0.25, 1e-7);
        let mut untouched = vec![0.0; 4];
        let neutral = src(&NEUTRAL_COEFFICIENTS).rows(4);
        assert_eq!(fourier_reg(neutral, 1.0, 1.0, dst(&mut untouched).rows(4)), 0.0);
        assert_eq!(untouched, [0.0; 4]);
    }

    #[test]
    #[should_panic(expected = "without being the same view")]
    fn a_shifted_output_is_refused() {
        let (base, mut zz) = (numbers(1, 8), numbers(2, 9));
        let view = dst(&mut zz);
        let module = module(&COEFFICIENTS, &[1.0]);
        fourier(src(&base).rows(8), view.src().part(0, 8).rows(8), module, view.part(1, 8).rows(8));
    }
}
