//! DoRA's gain per output channel, and the row norms that it divides by.
//!
//! DoRA writes the adapted weight as W' = m (W + s B A) / |W + s B A|, with one magnitude m and one norm per
//! output channel. So with z = x (W + s B A)ᵀ, the output is z with scaled columns. The backward pass treats the
//! norm as a constant, as PEFT does:
//!
//! ```text
//! y = z (m / norm) + bias        dz = dy (m / norm)        dm = sum over rows of dy z / norm
//! ```
//!
//! Left out: the matrix W + s B A, and a guard against a row of zeros. Its norm is 0, and the division gives infinity
//! or NaN, as in PEFT.

use super::chunk::{CHUNK_COLUMNS, Chunk, for_each_chunk, for_each_row, for_each_row_chunk};
use super::footprint::{assert_disjoint, assert_disjoint_or_same};
use super::simd::{Isa, LANES, for_each_block, kernel, sum_wide_lanes};
use super::view::{Dst, DstRows, Src, SrcRows};

/// y = z (magnitude / norm) + bias. `y` may be `z`. Without a bias the same function computes dz from dy.
pub fn scale_columns(
    z: SrcRows,             // (T, N)
    magnitude: Src<f32>,    // (N)
    norm: Src<f32>,         // (N)
    bias: Option<Src<f32>>, // (N)
    y: DstRows,             // (T, N)
) {
    let (rows, columns) = (z.rows(), z.columns());
    assert_eq!((y.rows(), y.columns()), (rows, columns));
    assert_eq!((magnitude.len(), norm.len()), (columns, columns));
    assert_disjoint_or_same("scale_columns", y, [z.into()]);
    assert_disjoint("scale_columns", y, [magnitude.into(), norm.into()]);
    if let Some(bias) = bias {
        assert_eq!(bias.len(), columns);
        assert_disjoint("scale_columns", y, [bias.into()]);
    }
    let isa = Isa::current();
    for_each_row_chunk(rows, columns, |chunk| {
        scale_rows(isa, z, magnitude, norm, bias, y, chunk);
    });
}

/// dmagnitude += the sum over rows of dy z, divided by norm. Tasks split columns; rows are summed in order.
pub fn magnitude_grad(
    dy: SrcRows,          // (T, N)
    z: SrcRows,           // (T, N)
    norm: Src<f32>,       // (N)
    dmagnitude: Dst<f32>, // (N)
) {
    let columns = dy.columns();
    assert_eq!((z.rows(), z.columns()), (dy.rows(), columns));
    assert_eq!((norm.len(), dmagnitude.len()), (columns, columns));
    assert_disjoint("magnitude_grad", dmagnitude, [dy.into(), z.into(), norm.into()]);
    let isa = Isa::current();
    for_each_chunk(columns, CHUNK_COLUMNS, |chunk| {
        let Chunk { start, len, .. } = chunk;
        let (dy, z) = (dy.column_part(start, len), z.column_part(start, len));
        sum_products(isa, dy, z, norm.part(start, len), dmagnitude.part(start, len));
    });
}

/// norms = the L2 norm of every row, summed in f64. A row of zeros has norm 0.
pub fn row_norms(
    block: SrcRows,  // (rows, K)
    norms: Dst<f32>, // (rows)
) {
    assert_eq!(norms.len(), block.rows());
    assert_disjoint("row_norms", norms, [block.into()]);
    let isa = Isa::current();
    for_each_row(block.rows(), block.columns(), |row| {
        norms.set(row, squares(isa, block.row(row)).sqrt() as f32);
    });
}

kernel! {
    fn scale_rows(
        z: SrcRows,
        magnitude: Src<f32>,
        norm: Src<f32>,
        bias: Option<Src<f32>>,
        y: DstRows,
        chunk: Chunk,
    ) {
        for row in chunk.range() {
            let (z, y) = (z.row(row), y.row(row));
            for_each_block!(block in z.len() => {
                let (z, magnitude) = (z.lanes(block), magnitude.lanes(block));
                let norm = norm.lanes_or(block, 1.0);
                let mut out = [0.0; LANES];
                for lane in 0..LANES {
                    out[lane] = z[lane] * (magnitude[lane] / norm[lane]);
                }
                if let Some(bias) = bias {
                    let bias = bias.lanes(block);
                    for lane in 0..LANES {
                        out[lane] += bias[lane];
                    }
                }
                y.set_lanes(block, out);
            });
        }
    }
}

/// Rows that are summed in f32 before the sum is added to an f64 total.
const ROWS_PER_SUM: usize = 128;

kernel! {
    fn sum_products(dy: SrcRows, z: SrcRows, norm: Src<f32>, dmagnitude: Dst<f32>) {
        let mut totals = [[0.0_f64; LANES]; CHUNK_COLUMNS / LANES];
        for first_row in (0..dy.rows()).step_by(ROWS_PER_SUM) {
            let mut sums = [[0.0_f32; LANES]; CHUNK_COLUMNS / LANES];
            for row in first_row..(first_row + ROWS_PER_SUM).min(dy.rows()) {
                let (dy, z) = (dy.row(row), z.row(row));
                for_each_block!(block in dy.len() => {
                    let (dy, z) = (dy.lanes(block), z.lanes(block));
                    let sum = &mut sums[block.start / LANES];
                    for lane in 0..LANES {
                        sum[lane] += dy[lane] * z[lane];
                    }
                });
            }
            for (total, sum) in totals.iter_mut().zip(&sums) {
                for lane in 0..LANES {
                    total[lane] += f64::from(sum[lane]);
                }
            }
        }
        for_each_block!(block in dmagnitude.len() => {
            let mut out = dmagnitude.lanes(block);
            let norm = norm.lanes_or(block, 1.0);
            let total = totals[block.start / LANES];
            for lane in 0..LANES {
                out[lane] = (f64::from(out[lane]) + total[lane] / f64::from(norm[lane])) as f32;
            }
            dmagnitude.set_lanes(block, out);
        });
    }
}

kernel! {
    /// The sum of x², in f64.
    pub(super) fn squares(x: Src<f32>) -> f64 {
        let mut sums = [0.0_f64; LANES];
        for_each_block!(block in x.len() => {
            let x = x.lanes(block);
            for lane in 0..LANES {
                let wide = f64::from(x[lane]);
                sums[lane] += wide * wide;
            }
        });
        sum_wide_lanes(sums)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    fn norms(columns: usize) -> Vec<f32> {
        numbers(5, columns).iter().map(|value| value.abs() + 0.25).collect()
    }

    fn reference(z: &[f64], magnitude: &[f64], norm: &[f64], bias: &[f64]) -> Vec<f64> {
        let columns = norm.len();
        let y = |(index, z): (usize, &f64)| {
            let column = index % columns;
            z * magnitude[column] / norm[column] + bias[column]
        };
        z.iter().enumerate().map(y).collect()
    }

    fn scaled(z: &[f32], magnitude: &[f32], norm: &[f32], bias: Option<&[f32]>, in_place: bool) -> Vec<f32> {
        on_every_isa(|| {
            let mut y = if in_place { z.to_vec() } else { vec![f32::NAN; z.len()] };
            let view = dst(&mut y);
            let input = if in_place { view.src() } else { src(z) };
            scale_columns(
                input.rows(norm.len()),
                src(magnitude),
                src(norm),
                bias.map(src),
                view.rows(norm.len()),
            );
            y
        })
    }

    fn magnitude_gradient(dy: &[f32], z: &[f32], norm: &[f32], start: f32) -> Vec<f32> {
        on_every_isa(|| {
            let mut dmagnitude = vec![start; norm.len()];
            let (dy, z) = (src(dy).rows(norm.len()), src(z).rows(norm.len()));
            magnitude_grad(dy, z, src(norm), dst(&mut dmagnitude));
            dmagnitude
        })
    }

    #[test]
    fn scaling_matches_the_reference_in_and_out_of_place() {
        for columns in COLUMNS {
            let (z, norm) = (numbers(1, 61 * columns), norms(columns));
            let (magnitude, bias) = (numbers(2, columns), numbers(3, columns));
            for bias in [None, Some(bias.as_slice())] {
                let y = scaled(&z, &magnitude, &norm, bias, false);
                let added = bias.map_or(vec![0.0; columns], widened);
                let want = reference(&widened(&z), &widened(&magnitude), &widened(&norm), &added);
                assert_close("y", &y, &want, 1.0, 1e-6);
                assert_same_bits("in place", &scaled(&z, &magnitude, &norm, bias, true), &y);
            }
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        for columns in [1, 7, 16, 33, 70] {
            let (z, dy) = (numbers(1, 5 * columns), numbers(4, 5 * columns));
            let (magnitude, norm) = (numbers(2, columns), norms(columns));
            let dz = scaled(&dy, &magnitude, &norm, None, false);
            let dmagnitude = magnitude_gradient(&dy, &z, &norm, 0.0);
            let (z, dy) = (widened(&z), widened(&dy));
            let (magnitude, norm) = (widened(&magnitude), widened(&norm));
            let bias = vec![0.5; columns];
            let loss = |z: &[f64], magnitude: &[f64]| -> f64 {
                reference(z, magnitude, &norm, &bias).iter().zip(&dy).map(|(y, dy)| y * dy).sum()
            };
            let want = finite_difference(&z, |z| loss(z, &magnitude));
            assert_close("dz", &dz, &want, 1.0, 1e-6);
            let want = finite_difference(&magnitude, |magnitude| loss(&z, magnitude));
            assert_close("dmagnitude", &dmagnitude, &want, 1.0, 1e-6);
        }
    }

    #[test]
    fn the_magnitude_gradient_adds_many_rows_to_the_present_value() {
        for columns in COLUMNS {
            let rows = 3 * ROWS_PER_SUM + 17;
            let (z, dy) = (numbers(1, rows * columns), numbers(4, rows * columns));
            let norm = norms(columns);
            let got = magnitude_gradient(&dy, &z, &norm, 0.25);
            let mut want = vec![0.25; columns];
            for (index, (z, dy)) in z.iter().zip(&dy).enumerate() {
                let column = index % columns;
                want[column] += f64::from(*z) * f64::from(*dy) / f64::from(norm[column]);
            }
            assert_close("dmagnitude", &got, &want, 20.0, 2e-6);
        }
    }

    #[test]
    fn norms_match_the_reference() {
        for columns in [1, 7, 16, 33, 576, 20_000] {
            let rows = if columns > 1000 { 3 } else { 61 };
            let block = numbers(1, rows * columns);
            let got = on_every_isa(|| {
                let mut norms = vec![f32::NAN; rows];
                row_norms(src(&block).rows(columns), dst(&mut norms));
                norms
            });
            let norm = |row: &[f32]| row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let want: Vec<f64> = block.chunks(columns).map(norm).collect();
            assert_close("norm", &got, &want, 1e-30, 6e-8);
        }
    }

    #[test]
    fn a_row_of_zeros_gives_nan() {
        let mut norms = [f32::NAN; 2];
        row_norms(src(&[0.0, -0.0, 3.0, 4.0]).rows(2), dst(&mut norms));
        assert_eq!(norms, [0.0, 5.0]);
        let y = scaled(&[1.0, 1.0], &[0.0, 5.0], &norms, None, false);
        assert!(y[0].is_nan());
        assert_eq!(y[1], 1.0);
    }

    #[test]
    fn large_rows_do_not_overflow() {
        let mut norms = [0.0];
        row_norms(src(&[3e30, 4e30]).rows(2), dst(&mut norms));
        assert_eq!(norms, [5e30]);
    }

    #[test]
    #[should_panic(expected = "overlaps")]
    fn an_output_over_the_norms_is_refused() {
        let (z, magnitude) = (numbers(1, 8), numbers(2, 8));
        let mut norm = norms(8);
        let view = dst(&mut norm);
        scale_columns(src(&z).rows(8), src(&magnitude), view.src(), None, view.rows(8));
    }
}
