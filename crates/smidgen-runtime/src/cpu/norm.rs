//! Root-mean-square normalisation of rows and its gradients; statistics in f32, one row at a time.
//!
//! With r = 1 / sqrt(mean(x²) + eps) and g = dy w the forward pass is y = x r w, and since
//! dr/dx = -r³ x / C the backward pass is
//!
//! ```text
//! dx = r (g - x r² mean(g x))        dw = sum over rows of dy x r
//! ```
//!
//! r is recomputed from x, never stored. The weight of a norm that subtracts the mean has the same gradient, with x - mean
//! for x. Left out: the rest of that norm (`layer_norm.rs`).

use super::chunk::{CHUNK_COLUMNS, Chunk, for_each_chunk, for_each_row, for_each_row_chunk};
use super::convert::{Element, StoredBf16, StoredElement, StoredF16, StoredF32};
use super::footprint::{assert_disjoint, assert_disjoint_or_same};
use super::layer_norm::statistics;
use super::simd::{Block, Isa, LANES, Lanes, for_each_block, kernel, sum_lanes};
use super::view::{Dst, DstRows, Src, SrcRows, StoredVector};

/// A stored weight, or a weight of 1. In some model families the stored w means a weight of 1 + w.
#[derive(Clone, Copy, Debug)]
pub struct NormWeight {
    pub weight: Option<StoredVector>, // (C)
    pub plus_one: bool,
}

impl NormWeight {
    fn check(self, what: &'static str, columns: usize, output: DstRows) {
        if let Some(weight) = self.weight {
            assert_eq!(weight.len(), columns);
            assert_disjoint(what, output, [weight.into()]);
        }
    }

    fn element(self) -> Element {
        self.weight.map_or(Element::F32, StoredVector::element)
    }
}

/// y = x / rms(x) * weight, row by row. `y` may be `x`.
pub fn rms_norm(x: SrcRows, weight: NormWeight, eps: f32, y: DstRows) {
    let (rows, columns) = (x.rows(), x.columns());
    assert_eq!((y.rows(), y.columns()), (rows, columns));
    assert_disjoint_or_same("rms_norm", y, [x.into()]);
    weight.check("rms_norm", columns, y);
    let isa = Isa::current();
    for_each_row_chunk(rows, columns, |chunk| {
        normalise_rows(isa, x, weight, eps, y, chunk);
    });
}

/// dx = the gradient through `rms_norm`, plus `addend` if there is one. `dx` may be `x`, `dy` or `addend`.
pub fn rms_norm_grad(
    x: SrcRows,
    weight: NormWeight,
    eps: f32,
    dy: SrcRows,
    addend: Option<SrcRows>,
    dx: DstRows,
) {
    let (rows, columns) = (x.rows(), x.columns());
    assert_eq!((dy.rows(), dy.columns()), (rows, columns));
    assert_eq!((dx.rows(), dx.columns()), (rows, columns));
    assert_disjoint_or_same("rms_norm_grad", dx, [x.into(), dy.into()]);
    weight.check("rms_norm_grad", columns, dx);
    if let Some(addend) = addend {
        assert_eq!((addend.rows(), addend.columns()), (rows, columns));
        assert_disjoint_or_same("rms_norm_grad", dx, [addend.into()]);
    }
    let isa = Isa::current();
    for_each_row(rows, columns, |row| {
        let row = GradientRow {
            x: x.row(row),
            dy: dy.row(row),
            addend: addend.map(|addend| addend.row(row)),
            dx: dx.row(row),
        };
        gradient_row(isa, row, weight, eps);
    });
}

/// dw += the gradient of the weight, which is the same with and without `plus_one`; with `centered`, of a layer norm.
/// `scratch` has at least `norm_weight_grad_scratch_len` floats.
pub fn norm_weight_grad(
    x: SrcRows,
    eps: f32,
    centered: bool,
    dy: SrcRows,
    dw: Dst<f32>, // (C)
    scratch: Dst<f32>,
) {
    let (rows, columns) = (x.rows(), x.columns());
    assert_eq!((dy.rows(), dy.columns()), (rows, columns));
    assert_eq!(dw.len(), columns);
    if rows == 0 || columns == 0 {
        return;
    }
    let partials = scratch.part(0, norm_weight_grad_scratch_len(rows, columns)).rows(columns); // (partials, C)
    assert_disjoint("norm_weight_grad", dw, [x.into(), dy.into()]);
    assert_disjoint("norm_weight_grad", partials, [x.into(), dy.into(), dw.into()]);
    let isa = Isa::current();
    for_each_chunk(rows, rows_per_partial(rows), |chunk| {
        weight_partial(isa, x, eps, centered, dy, chunk, partials.row(chunk.index));
    });
    for_each_chunk(columns, CHUNK_COLUMNS, |chunk| {
        let partials = partials.src().column_part(chunk.start, chunk.len);
        add_partials(isa, partials, dw.part(chunk.start, chunk.len));
    });
}

/// Floats that `norm_weight_grad` needs: one row of partial sums per group of rows.
pub fn norm_weight_grad_scratch_len(rows: usize, columns: usize) -> usize {
    rows.div_ceil(rows_per_partial(rows)) * columns
}

/// At most 64 groups, however many rows there are.
fn rows_per_partial(rows: usize) -> usize {
    rows.div_ceil(64).max(32)
}

#[inline(always)]
fn weight_lanes<E: StoredElement>(weight: NormWeight, block: Block) -> Lanes {
    let shift = if weight.plus_one { 1.0 } else { 0.0 };
    let Some(stored) = weight.weight else { return [1.0; LANES] };
    let mut lanes = stored.lanes::<E>(block);
    for value in &mut lanes {
        *value += shift;
    }
    lanes
}

#[inline(always)]
fn inverse_rms(x: Src<f32>, eps: f32) -> f32 {
    let mut squares = [0.0; LANES];
    for_each_block!(block in x.len() => {
        let x = x.lanes(block);
        for lane in 0..LANES {
            squares[lane] += x[lane] * x[lane];
        }
    });
    1.0 / (sum_lanes(squares) / x.len() as f32 + eps).sqrt()
}

kernel! {
    fn normalise_rows(x: SrcRows, weight: NormWeight, eps: f32, y: DstRows, chunk: Chunk) {
        match weight.element() {
            Element::F32 => normalise::<StoredF32>(x, weight, eps, y, chunk),
            Element::Bf16 => normalise::<StoredBf16>(x, weight, eps, y, chunk),
            Element::F16 => normalise::<StoredF16>(x, weight, eps, y, chunk),
        }
    }
}

#[inline(always)]
fn normalise<E: StoredElement>(x: SrcRows, weight: NormWeight, eps: f32, y: DstRows, chunk: Chunk) {
    for row in chunk.range() {
        let (x, y) = (x.row(row), y.row(row));
        let r = inverse_rms(x, eps);
        for_each_block!(block in x.len() => {
            let x = x.lanes(block);
            let w = weight_lanes::<E>(weight, block);
            let mut out = [0.0; LANES];
            for lane in 0..LANES {
                out[lane] = x[lane] * r * w[lane];
            }
            y.set_lanes(block, out);
        });
    }
}

/// The operands of one row of `rms_norm_grad`.
#[derive(Clone, Copy)]
struct GradientRow {
    x: Src<f32>,
    dy: Src<f32>,
    addend: Option<Src<f32>>,
    dx: Dst<f32>,
}

kernel! {
    fn gradient_row(row: GradientRow, weight: NormWeight, eps: f32) {
        match weight.element() {
            Element::F32 => gradient::<StoredF32>(row, weight, eps),
            Element::Bf16 => gradient::<StoredBf16>(row, weight, eps),
            Element::F16 => gradient::<StoredF16>(row, weight, eps),
        }
    }
}

#[inline(always)]
fn gradient<E: StoredElement>(row: GradientRow, weight: NormWeight, eps: f32) {
    let GradientRow { x, dy, addend, dx } = row;
    let mut squares = [0.0; LANES];
    let mut products = [0.0; LANES];
    for_each_block!(block in x.len() => {
        let (x, dy) = (x.lanes(block), dy.lanes(block));
        let w = weight_lanes::<E>(weight, block);
        for lane in 0..LANES {
            squares[lane] += x[lane] * x[lane];
            products[lane] += dy[lane] * w[lane] * x[lane];
        }
    });
    let columns = x.len() as f32;
    let r = 1.0 / (sum_lanes(squares) / columns + eps).sqrt();
    let pull = r * r * (sum_lanes(products) / columns);
    for_each_block!(block in x.len() => {
        let (x, dy) = (x.lanes(block), dy.lanes(block));
        let w = weight_lanes::<E>(weight, block);
        let mut out = [0.0; LANES];
        for lane in 0..LANES {
            out[lane] = r * (dy[lane] * w[lane] - x[lane] * pull);
        }
        if let Some(addend) = addend {
            let addend = addend.lanes(block);
            for lane in 0..LANES {
                out[lane] += addend[lane];
            }
        }
        dx.set_lanes(block, out);
    });
}

kernel! {
    fn weight_partial(x: SrcRows, eps: f32, centered: bool, dy: SrcRows, chunk: Chunk, partial: Dst<f32>) {
        partial.fill_zero();
        for row in chunk.range() {
            let (x, dy) = (x.row(row), dy.row(row));
            let (mean, r) = if centered { statistics(x, eps) } else { (0.0, inverse_rms(x, eps)) };
            for_each_block!(block in x.len() => {
                let (x, dy) = (x.lanes(block), dy.lanes(block));
                let mut sum = partial.lanes(block);
                for lane in 0..LANES {
                    sum[lane] += dy[lane] * ((x[lane] - mean) * r);
                }
                partial.set_lanes(block, sum);
            });
        }
    }
}

kernel! {
    fn add_partials(partials: SrcRows, dw: Dst<f32>) {
        for_each_block!(block in dw.len() => {
            let mut sum = [0.0; LANES];
            for row in 0..partials.rows() {
                let partial = partials.row(row).lanes(block);
                for lane in 0..LANES {
                    sum[lane] += partial[lane];
                }
            }
            let mut out = dw.lanes(block);
            for lane in 0..LANES {
                out[lane] += sum[lane];
            }
            dw.set_lanes(block, out);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    const EPS: f32 = 1e-5;
    const CASES: [(Element, bool); 4] =
        [(Element::F32, false), (Element::F32, true), (Element::Bf16, false), (Element::F16, true)];

    fn reference(x: &[f64], w: &[f64], plus_one: bool) -> Vec<f64> {
        let mut y = Vec::new();
        for x in x.chunks(w.len()) {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / w.len() as f64;
            let r = 1.0 / (mean + f64::from(EPS)).sqrt();
            for (x, w) in x.iter().zip(w) {
                y.push(x * r * (if plus_one { 1.0 + w } else { *w }));
            }
        }
        y
    }

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    #[test]
    fn forward_matches_the_reference_in_and_out_of_place() {
        for columns in COLUMNS {
            for (element, plus_one) in CASES {
                let x = numbers(1, 61 * columns);
                let (bytes, w) = stored_bytes(element, &numbers(2, columns));
                let weight = NormWeight { weight: Some(stored(element, &bytes)), plus_one };
                let y = on_every_isa(|| {
                    let mut y = vec![f32::NAN; x.len()];
                    rms_norm(src(&x).rows(columns), weight, EPS, dst(&mut y).rows(columns));
                    y
                });
                let want = reference(&widened(&x), &widened(&w), plus_one);
                assert_close("y", &y, &want, 0.1, 1e-6);
                let in_place = on_every_isa(|| {
                    let mut y = x.clone();
                    let view = dst(&mut y).rows(columns);
                    rms_norm(view.src(), weight, EPS, view);
                    y
                });
                assert_same_bits("in place", &y, &in_place);
            }
        }
    }

    #[test]
    fn input_gradient_matches_finite_differences() {
        for columns in [1, 7, 16, 33] {
            for (element, plus_one) in CASES {
                let rows = 3;
                let (x, dy) = (numbers(3, rows * columns), numbers(4, rows * columns));
                let (bytes, w) = stored_bytes(element, &numbers(5, columns));
                let weight = NormWeight { weight: Some(stored(element, &bytes)), plus_one };
                let got = on_every_isa(|| {
                    let mut dx = vec![f32::NAN; x.len()];
                    rms_norm_grad(
                        src(&x).rows(columns),
                        weight,
                        EPS,
                        src(&dy).rows(columns),
                        None,
                        dst(&mut dx).rows(columns),
                    );
                    dx
                });
                let (w, dy) = (widened(&w), widened(&dy));
                let want = finite_difference(&widened(&x), |x| dot(&dy, &reference(x, &w, plus_one)));
                assert_close("dx", &got, &want, 1.0, 3e-6);
            }
        }
    }

    #[test]
    fn input_gradient_adds_and_works_in_every_place() {
        for columns in COLUMNS {
            let len = 61 * columns;
            let (x, dy, addend) = (numbers(3, len), numbers(4, len), numbers(6, len));
            let (bytes, _) = stored_bytes(Element::Bf16, &numbers(5, columns));
            let weight = NormWeight { weight: Some(stored(Element::Bf16, &bytes)), plus_one: false };
            // `place`: which of x, dy, addend holds the output; 3 is a separate buffer.
            let run = |place: usize, with_addend: bool| {
                on_every_isa(|| {
                    let mut buffers = [x.clone(), dy.clone(), addend.clone(), vec![f32::NAN; len]];
                    let views = buffers.each_mut().map(|buffer| dst(buffer).rows(columns));
                    let added = with_addend.then_some(views[2].src());
                    rms_norm_grad(views[0].src(), weight, EPS, views[1].src(), added, views[place]);
                    buffers[place].clone()
                })
            };
            let plain = run(3, false);
            let with_addend = run(3, true);
            let want: Vec<f32> = plain.iter().zip(&addend).map(|(dx, a)| dx + a).collect();
            assert_same_bits("addend", &with_addend, &want);
            for place in 0..3 {
                assert_same_bits("in place", &run(place, true), &with_addend);
            }
            for place in 0..2 {
                assert_same_bits("in place", &run(place, false), &plain);
            }
        }
    }

    fn weight_gradient(x: &[f32], dy: &[f32], columns: usize, start: f32) -> Vec<f32> {
        on_every_isa(|| {
            let mut dw = vec![start; columns];
            let len = norm_weight_grad_scratch_len(x.len() / columns, columns);
            let mut scratch = vec![f32::NAN; len];
            norm_weight_grad(
                src(x).rows(columns),
                EPS,
                false,
                src(dy).rows(columns),
                dst(&mut dw),
                dst(&mut scratch),
            );
            dw
        })
    }

    #[test]
    fn weight_gradient_matches_finite_differences() {
        for columns in [1, 7, 16, 33] {
            let (x, dy) = (numbers(7, 70 * columns), numbers(8, 70 * columns));
            let got = weight_gradient(&x, &dy, columns, 0.0);
            let (x, dy, w) = (widened(&x), widened(&dy), widened(&numbers(9, columns)));
            let want = finite_difference(&w, |w| dot(&dy, &reference(&x, w, false)));
            assert_close("dw", &got, &want, 10.0, 1e-6);
        }
    }

    #[test]
    fn weight_gradient_over_many_groups_adds_to_the_present_value() {
        let columns = 65;
        let rows = 64 * 32 + 5;
        let (x, dy) = (numbers(7, rows * columns), numbers(8, rows * columns));
        let got = weight_gradient(&x, &dy, columns, 2.5);
        let mut want = vec![2.5; columns];
        let unit = reference(&widened(&x), &vec![1.0; columns], false);
        for (index, (normalised, dy)) in unit.iter().zip(&dy).enumerate() {
            want[index % columns] += normalised * f64::from(*dy);
        }
        assert_close("dw", &got, &want, 50.0, 1e-6);
        assert!(norm_weight_grad_scratch_len(1 << 20, 10) <= 640);
    }

    #[test]
    fn the_planned_scratch_is_enough_for_every_row_count() {
        for rows in 0..5000 {
            let planned = smidgen_ir::workspace_cpu::norm_partials_floats(rows, 3);
            assert!(norm_weight_grad_scratch_len(rows, 3) <= planned, "{rows} rows");
        }
    }

    #[test]
    #[should_panic(expected = "overlaps")]
    fn an_output_over_the_weight_is_refused() {
        let mut values = numbers(1, 8);
        let view = dst(&mut values);
        // SAFETY: the weight is the same live memory, and is not read: the call must refuse it.
        let weight = unsafe { StoredVector::new(values.as_ptr().cast(), Element::F32, 8) };
        let weight = NormWeight { weight: Some(weight), plus_one: false };
        rms_norm(view.src().rows(8), weight, EPS, view.rows(8));
    }
}
