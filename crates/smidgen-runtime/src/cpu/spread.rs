//! Rows of tokens copied to the experts that they chose, and the rows of experts summed for their tokens.
//!
//! Every row is written by one task, and a sum is in the order of a token's choices, so nothing depends on threads.

use super::chunk::for_each_row;
use super::footprint::assert_disjoint;
use super::simd::{Isa, LANES, for_each_block, kernel, sum_lanes};
use super::view::{Dst, DstRows, Src, SrcRows};

/// y[places[t, j]] = weights[t, j] · x[t].
pub fn spread_rows(x: SrcRows, places: Src<i32>, weights: Option<SrcRows>, y: DstRows) {
    assert_disjoint("spread_rows", y, [x.into()]);
    let (isa, chosen) = (Isa::current(), y.rows().checked_div(x.rows()).unwrap_or(0));
    for_each_row(x.rows(), chosen * x.columns(), |token| {
        for choice in 0..chosen {
            let weight = weights.map_or(1.0, |weights| weights.row(token).get(choice));
            let place = places.get(token * chosen + choice) as usize;
            scaled_row(isa, x.row(token), weight, y.row(place));
        }
    });
}

/// y[t] = Σ_j weights[t, j] · x[places[t, j]].
pub fn combine_rows(x: SrcRows, places: Src<i32>, weights: Option<SrcRows>, y: DstRows) {
    assert_disjoint("combine_rows", y, [x.into()]);
    let (isa, chosen) = (Isa::current(), x.rows().checked_div(y.rows()).unwrap_or(0));
    for_each_row(y.rows(), chosen * y.columns(), |token| {
        let row = y.row(token);
        row.fill_zero();
        for choice in 0..chosen {
            let weight = weights.map_or(1.0, |weights| weights.row(token).get(choice));
            add_scaled(isa, x.row(places.get(token * chosen + choice) as usize), weight, row);
        }
    });
}

/// y[t, j] = a[places[t, j]] · b[t].
pub fn row_dots(a: SrcRows, b: SrcRows, places: Src<i32>, y: DstRows) {
    let (isa, chosen) = (Isa::current(), y.columns());
    for_each_row(b.rows(), chosen * b.columns(), |token| {
        for choice in 0..chosen {
            let place = places.get(token * chosen + choice) as usize;
            y.row(token).set(choice, dot(isa, a.row(place), b.row(token)));
        }
    });
}

kernel! {
    fn scaled_row(x: Src<f32>, scale: f32, y: Dst<f32>) {
        for_each_block!(block in y.len() => {
            let x = x.lanes(block);
            let mut scaled = [0.0; LANES];
            for lane in 0..LANES {
                scaled[lane] = scale * x[lane];
            }
            y.set_lanes(block, scaled);
        });
    }
}

kernel! {
    fn add_scaled(x: Src<f32>, scale: f32, y: Dst<f32>) {
        for_each_block!(block in y.len() => {
            let (x, y_now) = (x.lanes(block), y.lanes(block));
            let mut sum = [0.0; LANES];
            for lane in 0..LANES {
                sum[lane] = y_now[lane] + scale * x[lane];
            }
            y.set_lanes(block, sum);
        });
    }
}

kernel! {
    fn dot(a: Src<f32>, b: Src<f32>) -> f32 {
        let mut sums = [0.0; LANES];
        for_each_block!(block in a.len() => {
            let (a, b) = (a.lanes(block), b.lanes(block));
            for lane in 0..LANES {
                sums[lane] += a[lane] * b[lane];
            }
        });
        sum_lanes(sums)
    }
}
