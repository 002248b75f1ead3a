//! Layer normalization with a mean, and its gradient; statistics in f32, one row at a time.
//!
//! With m = mean(x), r = 1 / sqrt(mean((x - m)²) + eps), n = (x - m) r and g = dy w the forward pass is y = n w + b, and
//!
//! ```text
//! dx = r (g - mean(g) - n mean(g n))
//! ```
//!
//! m and r are recomputed from x, never stored. Left out: the gradients of the weight (`norm.rs`) and the bias, a sum of
//! rows.

use super::chunk::{Chunk, for_each_row_chunk};
use super::footprint::{assert_disjoint, assert_disjoint_or_same};
use super::simd::{Isa, LANES, for_each_block, kernel, sum_lanes};
use super::view::{DstRows, Src, SrcRows, StoredVector};

/// y = (x - mean) / deviation * weight + bias, row by row. `y` may be `x`.
pub fn layer_norm(x: SrcRows, weight: StoredVector, bias: Option<StoredVector>, eps: f32, y: DstRows) {
    let shape = (x.rows(), x.columns());
    assert_eq!((y.rows(), y.columns()), shape);
    assert!(weight.len() == shape.1 && bias.is_none_or(|bias| bias.len() == shape.1));
    assert_disjoint_or_same("layer_norm", y, [x.into()]);
    for vector in [Some(weight), bias].into_iter().flatten() {
        assert_disjoint("layer_norm", y, [vector.into()]);
    }
    let isa = Isa::current();
    for_each_row_chunk(shape.0, shape.1, |chunk| normalise_rows(isa, x, weight, bias, eps, y, chunk));
}

/// dx of [`layer_norm`], plus `addend` if there is one. `dx` may be `x`, `dy` or `addend`.
pub fn layer_norm_grad(
    x: SrcRows,
    weight: StoredVector,
    eps: f32,
    dy: SrcRows,
    addend: Option<SrcRows>,
    dx: DstRows,
) {
    let shape = (x.rows(), x.columns());
    assert_eq!((dy.rows(), dy.columns()), shape);
    assert_eq!((dx.rows(), dx.columns()), shape);
    assert_eq!(weight.len(), shape.1);
    assert_disjoint_or_same("layer_norm_grad", dx, [x.into(), dy.into()]);
    if let Some(addend) = addend {
        assert_eq!((addend.rows(), addend.columns()), shape);
        assert_disjoint_or_same("layer_norm_grad", dx, [addend.into()]);
    }
    assert_disjoint("layer_norm_grad", dx, [weight.into()]);
    let isa = Isa::current();
    for_each_row_chunk(shape.0, shape.1, |chunk| gradient_rows(isa, [x, dy], weight, eps, addend, dx, chunk));
}

/// Mean, and one over the deviation.
#[inline(always)]
pub(super) fn statistics(x: Src<f32>, eps: f32) -> (f32, f32) {
    let count = x.len() as f32;
    let mut sums = [0.0; LANES];
    for_each_block!(block in x.len() => {
        let lanes = x.lanes(block);
        for lane in 0..LANES {
            sums[lane] += lanes[lane];
        }
    });
    let mean = sum_lanes(sums) / count;
    let mut squares = [0.0; LANES];
    for_each_block!(block in x.len() => {
        let lanes = x.lanes_or(block, mean);
        for lane in 0..LANES {
            let difference = lanes[lane] - mean;
            squares[lane] += difference * difference;
        }
    });
    (mean, 1.0 / (sum_lanes(squares) / count + eps).sqrt())
}

kernel! {
    fn normalise_rows(x: SrcRows, weight: StoredVector, bias: Option<StoredVector>, eps: f32, y: DstRows, chunk: Chunk) {
        for row in chunk.range() {
            let (x, y) = (x.row(row), y.row(row));
            let (mean, inverse) = statistics(x, eps);
            for_each_block!(block in x.len() => {
                let lanes = x.lanes(block);
                let mut out = [0.0; LANES];
                for lane in 0..block.count {
                    let channel = block.start + lane;
                    out[lane] = (lanes[lane] - mean) * inverse * weight.get(channel);
                    out[lane] += bias.map_or(0.0, |bias| bias.get(channel));
                }
                y.set_lanes(block, out);
            });
        }
    }
}

kernel! {
    fn gradient_rows(
        x_and_dy: [SrcRows; 2],
        weight: StoredVector,
        eps: f32,
        addend: Option<SrcRows>,
        dx: DstRows,
        chunk: Chunk,
    ) {
        for row in chunk.range() {
            let ([x, dy], dx) = (x_and_dy.map(|rows| rows.row(row)), dx.row(row));
            let addend = addend.map(|addend| addend.row(row));
            let (mean, inverse) = statistics(x, eps);
            let (mut sums, mut products) = ([0.0; LANES], [0.0; LANES]);
            for_each_block!(block in x.len() => {
                let (lanes, gradient) = (x.lanes(block), dy.lanes(block));
                for lane in 0..block.count {
                    let g = gradient[lane] * weight.get(block.start + lane);
                    sums[lane] += g;
                    products[lane] += g * (lanes[lane] - mean) * inverse;
                }
            });
            let count = x.len() as f32;
            let (mean_g, mean_gn) = (sum_lanes(sums) / count, sum_lanes(products) / count);
            for_each_block!(block in x.len() => {
                let (lanes, gradient) = (x.lanes(block), dy.lanes(block));
                let mut out = [0.0; LANES];
                for lane in 0..block.count {
                    let g = gradient[lane] * weight.get(block.start + lane);
                    let n = (lanes[lane] - mean) * inverse;
                    out[lane] = inverse * (g - mean_g - n * mean_gn);
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
    }
}
