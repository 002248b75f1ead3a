//! Operations that move, add or drop elements: add, zero, sums of rows and of all elements, row gather and scatter,
//! dropout.
//!
//! Dropout stores no mask: whether an element is kept is a pure function of its token's key, the tensor's
//! number and the channel (see `counter`), so the backward pass is the same call on the gradient.
//! Left out: anything with weights.

use super::chunk::{CHUNK_COLUMNS, CHUNK_ELEMENTS, Chunk, for_each_chunk, for_each_row, for_each_row_chunk};
use super::counter::{channel_bits, row_key};
use super::footprint::{assert_disjoint, assert_disjoint_or_same};
use super::simd::{Isa, LANES, for_each_block, kernel, sum_lanes};
use super::view::{Dst, DstRows, Src, SrcRows, StoredVector};
use smidgen_ir::HeadPart;

/// y = a + scale * b. `y` may be `a` or `b`.
pub fn add(a: Src<f32>, b: Src<f32>, scale: f32, y: Dst<f32>) {
    assert_eq!((a.len(), b.len()), (y.len(), y.len()));
    assert_disjoint_or_same("add", y, [a.into(), b.into()]);
    let isa = Isa::current();
    for_each_chunk(y.len(), CHUNK_ELEMENTS, |chunk| {
        let Chunk { start, len, .. } = chunk;
        add_chunk(isa, a.part(start, len), b.part(start, len), scale, y.part(start, len));
    });
}

/// y = the columns of x from `first` on.
pub fn slice_columns(x: SrcRows, first: usize, y: DstRows) {
    assert_eq!(x.rows(), y.rows());
    assert_disjoint("slice_columns", y, [x.into()]);
    for_each_row(y.rows(), y.columns(), |row| {
        y.row(row).copy_from(x.row(row).part(first, y.columns()));
    });
}

/// The columns of y from `first` on become x; `end` is where the part before ends, and the columns between are zero.
pub fn place_columns(x: SrcRows, (end, first): (usize, usize), y: DstRows) {
    assert_eq!(x.rows(), y.rows());
    assert_disjoint("place_columns", y, [x.into()]);
    for_each_row(y.rows(), y.columns(), |row| {
        let y = y.row(row);
        y.part(end, first - end).fill_zero();
        y.part(first, x.columns()).copy_from(x.row(row));
    });
}

/// Each head of y becomes the columns `from` on of a head of x, at `to`; `end` is where the part before ends, and the
/// columns between are zero. x has as many heads as y, or one for all of them, or several whose sum is the one head of y.
pub fn place_heads(x: SrcRows, part: &HeadPart, end: usize, y: DstRows, heads: usize) {
    assert_eq!(x.rows(), y.rows());
    assert_disjoint("place_heads", y, [x.into()]);
    let (x_width, y_width) = (x.columns() / part.heads, y.columns() / heads);
    let summed = if heads == 1 { part.heads } else { 1 };
    for_each_row(y.rows(), y.columns(), |row| {
        let (x, y) = (x.row(row), y.row(row));
        let of_head = |head: usize| x.part(head * x_width + part.from, part.columns);
        for head in 0..heads {
            let y = y.part(head * y_width, y_width);
            y.part(end, part.to - end).fill_zero();
            let y = y.part(part.to, part.columns);
            y.copy_from(of_head(if part.heads == 1 { 0 } else { head }));
            for other in (1..summed).map(of_head) {
                (0..part.columns).for_each(|at| y.set(at, y.src().get(at) + other.get(at)));
            }
        }
    });
}

/// y = s * x, where each number of s is that of several neighbouring channels. `y` may be `x`.
pub fn scale_by(x: SrcRows, s: StoredVector, y: DstRows) {
    assert_eq!((x.rows(), x.columns()), (y.rows(), y.columns()));
    assert_disjoint_or_same("scale_by", y, [x.into()]);
    let (isa, width) = (Isa::current(), x.columns() / s.len());
    for_each_row(x.rows(), x.columns(), |row| {
        for factor in 0..s.len() {
            let first = factor * width;
            scale_row(isa, s.get(factor), x.row(row).part(first, width), y.row(row).part(first, width));
        }
    });
}

kernel! {
    fn scale_row(factor: f32, x: Src<f32>, y: Dst<f32>) {
        for_each_block!(block in x.len() => {
            let mut lanes = x.lanes(block);
            for lane in 0..LANES {
                lanes[lane] *= factor;
            }
            y.set_lanes(block, lanes);
        });
    }
}

/// ds += the sums of x * dy over the rows and the channels of each factor. `scratch` has at least a float for each row.
pub fn scale_by_grad(x: SrcRows, dy: SrcRows, ds: Dst<f32>, scratch: Dst<f32>) {
    assert_eq!((x.rows(), x.columns()), (dy.rows(), dy.columns()));
    if ds.len() > 1 {
        let (isa, width) = (Isa::current(), x.columns() / ds.len());
        for_each_chunk(ds.len(), 1, |chunk| {
            let (x, dy) =
                (x.column_part(chunk.start * width, width), dy.column_part(chunk.start * width, width));
            let sum: f64 = (0..x.rows()).map(|row| f64::from(dot_row(isa, x.row(row), dy.row(row)))).sum();
            ds.set(chunk.start, ds.src().get(chunk.start) + sum as f32);
        });
        return;
    }
    let products = scratch.part(0, x.rows());
    assert_disjoint("scale_by_grad", products, [x.into(), dy.into(), ds.into()]);
    let isa = Isa::current();
    for_each_row(x.rows(), x.columns(), |row| products.set(row, dot_row(isa, x.row(row), dy.row(row))));
    let sum: f64 = (0..x.rows()).map(|row| f64::from(products.src().get(row))).sum();
    ds.set(0, ds.src().get(0) + sum as f32);
}

/// y = 0.
pub fn zero(y: Dst<f32>) {
    for_each_chunk(y.len(), CHUNK_ELEMENTS, |chunk| {
        y.part(chunk.start, chunk.len).fill_zero();
    });
}

/// db += the sum of the rows of dy. Tasks split columns; rows are summed in order.
pub fn bias_grad(
    dy: SrcRows,  // (T, N)
    db: Dst<f32>, // (N)
) {
    assert_eq!(db.len(), dy.columns());
    assert_disjoint("bias_grad", db, [dy.into()]);
    let isa = Isa::current();
    for_each_chunk(dy.columns(), CHUNK_COLUMNS, |chunk| {
        let Chunk { start, len, .. } = chunk;
        sum_columns(isa, dy.column_part(start, len), db.part(start, len));
    });
}

/// y[r] = x[rows[r]].
pub fn gather_rows(
    x: SrcRows,     // (T, C)
    rows: Src<i32>, // (R)
    y: DstRows,     // (R, C)
) {
    assert_eq!((y.rows(), y.columns()), (rows.len(), x.columns()));
    assert_disjoint("gather_rows", y, [x.into(), rows.into()]);
    for_each_row(y.rows(), y.columns(), |row| {
        y.row(row).copy_from(x.row(row_index(rows, row)));
    });
}

/// y = x, with row a of `audio` (zeros without `audio`) in row rows[a]; negative rows are skipped. `y` may be `x`.
pub fn place_rows(
    x: SrcRows,             // (T, C)
    rows: Src<i32>,         // (A)
    audio: Option<SrcRows>, // (A, C)
    y: DstRows,             // (T, C)
) {
    assert_eq!((y.rows(), y.columns()), (x.rows(), x.columns()));
    assert_disjoint_or_same("place_rows", y, [x.into()]);
    if let Some(audio) = audio {
        assert_eq!((audio.rows(), audio.columns()), (rows.len(), x.columns()));
        assert_disjoint("place_rows", y, [audio.into()]);
    }
    for_each_row(y.rows(), y.columns(), |row| {
        y.row(row).copy_from(x.row(row));
    });
    for_each_row(rows.len(), y.columns(), |row| {
        let Ok(target) = usize::try_from(rows.get(row)) else { return };
        match audio {
            Some(audio) => y.row(target).copy_from(audio.row(row)),
            None => y.row(target).fill_zero(),
        }
    });
}

/// y[a] = x[rows[a]], or zero where rows[a] is negative.
pub fn take_rows(
    x: SrcRows,     // (T, C)
    rows: Src<i32>, // (A)
    y: DstRows,     // (A, C)
) {
    assert_eq!((y.rows(), y.columns()), (rows.len(), x.columns()));
    assert_disjoint("take_rows", y, [x.into(), rows.into()]);
    for_each_row(y.rows(), y.columns(), |row| match usize::try_from(rows.get(row)) {
        Ok(source) => y.row(row).copy_from(x.row(source)),
        Err(_) => y.row(row).fill_zero(),
    });
}

/// dx[rows[r]] = dy[r] and every other row of dx is zero; `rows` ascends strictly.
pub fn scatter_rows(
    dy: SrcRows,    // (R, C)
    rows: Src<i32>, // (R)
    dx: DstRows,    // (T, C)
) {
    assert_eq!((dy.rows(), dy.columns()), (rows.len(), dx.columns()));
    assert_disjoint("scatter_rows", dx, [dy.into(), rows.into()]);
    for row in 0..rows.len() {
        let here = row_index(rows, row);
        assert!(
            here < dx.rows() && (row == 0 || row_index(rows, row - 1) < here),
            "`scatter_rows`: row {here} at {row} is out of order or outside {} rows",
            dx.rows()
        );
    }
    for_each_row_chunk(dx.rows(), dx.columns(), |chunk| {
        let mut next = first_not_below(rows, chunk.start);
        for row in chunk.range() {
            if next < rows.len() && row_index(rows, next) == row {
                dx.row(row).copy_from(dy.row(next));
                next += 1;
            } else {
                dx.row(row).fill_zero();
            }
        }
    });
}

/// y = x / (1 - p) for kept elements, 0 for dropped ones; a copy if p is 0. With `rest`, y is x minus that.
/// `y` may be `x`. An element is dropped with probability p, rounded down to a multiple of 2^-32.
pub fn dropout(
    x: SrcRows,     // (T, C)
    keys: Src<u64>, // (T)
    tensor: u32,
    p: f32,
    rest: bool,
    y: DstRows, // (T, C)
) {
    assert!((0.0..1.0).contains(&p), "`dropout`: probability {p} is not in [0, 1)");
    assert_eq!((y.rows(), y.columns()), (x.rows(), x.columns()));
    assert_eq!(keys.len(), x.rows());
    assert_disjoint_or_same("dropout", y, [x.into()]);
    assert_disjoint("dropout", y, [keys.into()]);
    let isa = Isa::current();
    for_each_row(x.rows(), x.columns(), |row| match (p == 0.0, rest) {
        (true, false) => y.row(row).copy_from(x.row(row)),
        (true, true) => y.row(row).fill_zero(),
        (false, _) => {
            let key = row_key(keys.get(row), tensor);
            drop_row(isa, x.row(row), key, p, rest, y.row(row));
        }
    });
}

fn row_index(rows: Src<i32>, position: usize) -> usize {
    let row = rows.get(position);
    usize::try_from(row).unwrap_or_else(|_| panic!("row {row} at {position} is negative"))
}

/// The first position in the ascending `rows` whose value is at least `row`.
fn first_not_below(rows: Src<i32>, row: usize) -> usize {
    let (mut low, mut high) = (0, rows.len());
    while low < high {
        let middle = low + (high - low) / 2;
        if row_index(rows, middle) < row { low = middle + 1 } else { high = middle }
    }
    low
}

kernel! {
    fn add_chunk(a: Src<f32>, b: Src<f32>, scale: f32, y: Dst<f32>) {
        for_each_block!(block in y.len() => {
            let (a, b) = (a.lanes(block), b.lanes(block));
            let mut sum = [0.0; LANES];
            for lane in 0..LANES {
                sum[lane] = a[lane] + scale * b[lane];
            }
            y.set_lanes(block, sum);
        });
    }
}

kernel! {
    fn dot_row(a: Src<f32>, b: Src<f32>) -> f32 {
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

/// Rows whose sum is added to the total at once. Summing in two levels bounds the rounding error.
const ROWS_PER_SUM: usize = 128;

kernel! {
    fn sum_columns(dy: SrcRows, db: Dst<f32>) {
        let mut totals = [[0.0; LANES]; CHUNK_COLUMNS / LANES];
        for first_row in (0..dy.rows()).step_by(ROWS_PER_SUM) {
            let mut sums = [[0.0; LANES]; CHUNK_COLUMNS / LANES];
            for row in first_row..(first_row + ROWS_PER_SUM).min(dy.rows()) {
                let dy = dy.row(row);
                for_each_block!(block in dy.len() => {
                    let dy = dy.lanes(block);
                    let sum = &mut sums[block.start / LANES];
                    for lane in 0..LANES {
                        sum[lane] += dy[lane];
                    }
                });
            }
            for (total, sum) in totals.iter_mut().zip(&sums) {
                for lane in 0..LANES {
                    total[lane] += sum[lane];
                }
            }
        }
        for_each_block!(block in db.len() => {
            let mut out = db.lanes(block);
            let total = totals[block.start / LANES];
            for lane in 0..LANES {
                out[lane] += total[lane];
            }
            db.set_lanes(block, out);
        });
    }
}

kernel! {
    fn drop_row(x: Src<f32>, key: u64, p: f32, rest: bool, y: Dst<f32>) {
        let threshold = (f64::from(p) * 4_294_967_296.0) as u32;
        let scale = (1.0 / (1.0 - f64::from(p))) as f32;
        for_each_block!(block in x.len() => {
            let x = x.lanes(block);
            let mut out = [0.0; LANES];
            for lane in 0..LANES {
                let bits = channel_bits(key, block.start as u32 + lane as u32);
                let kept = if bits >= threshold { x[lane] * scale } else { 0.0 };
                out[lane] = if rest { x[lane] - kept } else { kept };
            }
            y.set_lanes(block, out);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::counter::token_key;
    use super::super::testing::*;
    use super::*;

    #[test]
    fn add_matches_and_works_in_place() {
        for len in [1, 7, 16, 33, 3 * CHUNK_ELEMENTS + 5] {
            let (a, b) = (numbers(1, len), numbers(2, len));
            let run = |place: usize, scale: f32| {
                on_every_isa(|| {
                    let mut buffers = [a.clone(), b.clone(), vec![f32::NAN; len]];
                    let views = buffers.each_mut().map(|buffer| dst(buffer));
                    add(views[0].src(), views[1].src(), scale, views[place]);
                    buffers[place].clone()
                })
            };
            for scale in [1.0, 0.22] {
                let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + scale * b).collect();
                for place in 0..3 {
                    assert_same_bits("sum", &run(place, scale), &want);
                }
            }
        }
    }

    #[test]
    fn zero_writes_all_and_no_more() {
        let mut y = numbers(1, 2 * CHUNK_ELEMENTS + 9);
        let last = y.len() - 1;
        zero(dst(&mut y[..last]));
        assert!(y[..last].iter().all(|value| value.to_bits() == 0));
        assert_ne!(y[last], 0.0);
    }

    #[test]
    fn bias_gradient_adds_the_rows() {
        for columns in COLUMNS {
            let rows = 3 * ROWS_PER_SUM + 17;
            let dy = numbers(1, rows * columns);
            let got = on_every_isa(|| {
                let mut db = vec![0.25; columns];
                bias_grad(src(&dy).rows(columns), dst(&mut db));
                db
            });
            let want: Vec<f64> = (0..columns)
                .map(|column| {
                    let values = dy.iter().skip(column).step_by(columns);
                    0.25 + values.map(|value| f64::from(*value)).sum::<f64>()
                })
                .collect();
            assert_close("db", &got, &want, 20.0, 5e-6);
            // The loss sum(dy * (x + b)) is linear in b, so one difference step is exact.
            let ones = vec![1.0; columns];
            let slope = finite_difference(&ones, |b| {
                dy.iter().enumerate().map(|(i, dy)| f64::from(*dy) * b[i % columns]).sum()
            });
            let got: Vec<f32> = got.iter().map(|value| value - 0.25).collect();
            assert_close("db", &got, &slope, 20.0, 5e-6);
        }
    }

    #[test]
    fn gather_then_scatter_keeps_the_named_rows() {
        for columns in COLUMNS {
            let tokens = 61;
            let x = numbers(1, tokens * columns);
            for rows in [vec![], vec![0], vec![60], vec![0, 1, 5, 27, 28, 29, 56, 60]] {
                let (gathered, scattered) = on_every_isa(|| {
                    let mut y = vec![f32::NAN; rows.len() * columns];
                    let y_view = dst(&mut y).rows(columns);
                    gather_rows(src(&x).rows(columns), src(&rows), y_view);
                    let mut dx = vec![f32::NAN; x.len()];
                    scatter_rows(y_view.src(), src(&rows), dst(&mut dx).rows(columns));
                    (y, dx)
                });
                let mut want_dx = vec![0.0; x.len()];
                let mut want_y: Vec<f32> = Vec::new();
                for row in &rows {
                    let range = *row as usize * columns..(*row as usize + 1) * columns;
                    want_y.extend(&x[range.clone()]);
                    want_dx[range.clone()].copy_from_slice(&x[range]);
                }
                assert_same_bits("gathered", &gathered, &want_y);
                assert_same_bits("scattered", &scattered, &want_dx);
            }
        }
    }

    #[test]
    #[should_panic(expected = "out of order")]
    fn scatter_refuses_rows_out_of_order() {
        let (dy, mut dx) = (numbers(1, 2), vec![0.0; 4]);
        scatter_rows(src(&dy).rows(1), src(&[2, 2]), dst(&mut dx).rows(1));
    }

    fn dropped(x: &[f32], keys: &[u64], tensor: u32, p: f32, in_place: bool) -> Vec<f32> {
        run_dropout(x, keys, tensor, p, false, in_place)
    }

    fn run_dropout(x: &[f32], keys: &[u64], tensor: u32, p: f32, rest: bool, in_place: bool) -> Vec<f32> {
        let columns = x.len() / keys.len();
        on_every_isa(|| {
            let mut y = if in_place { x.to_vec() } else { vec![f32::NAN; x.len()] };
            let view = dst(&mut y);
            let input = if in_place { view.src() } else { src(x) };
            dropout(input.rows(columns), src(keys), tensor, p, rest, view.rows(columns));
            y
        })
    }

    fn keys(tokens: u64) -> Vec<u64> {
        (0..tokens).map(|token| token_key(1, 2, 3, token)).collect()
    }

    #[test]
    fn dropout_follows_the_counter_and_works_in_place() {
        for columns in COLUMNS {
            let keys = keys(61);
            let x = numbers(1, 61 * columns);
            let y = dropped(&x, &keys, 9, 0.25, false);
            for (index, (x, y)) in x.iter().zip(&y).enumerate() {
                let key = row_key(keys[index / columns], 9);
                let kept = channel_bits(key, (index % columns) as u32) >= 1 << 30;
                let want = if kept { x * (1.0 / 0.75) } else { 0.0 };
                assert_eq!(y.to_bits(), want.to_bits());
            }
            assert_same_bits("in place", &dropped(&x, &keys, 9, 0.25, true), &y);
            assert_same_bits("p = 0", &dropped(&x, &keys, 9, 0.0, false), &x);
        }
    }

    #[test]
    fn dropout_and_the_rest_are_the_whole() {
        let keys = keys(5);
        let x = numbers(1, 5 * 33);
        for p in [0.0, 0.25] {
            let kept = dropped(&x, &keys, 9, p, false);
            for in_place in [false, true] {
                let rest = run_dropout(&x, &keys, 9, p, true, in_place);
                for ((x, kept), rest) in x.iter().zip(&kept).zip(&rest) {
                    assert_eq!((x - kept).to_bits(), rest.to_bits());
                }
            }
        }
    }

    #[test]
    fn dropout_drops_its_share_and_differs_by_tensor() {
        let keys = keys(500);
        let x = vec![1.0; 500 * 400];
        let first = dropped(&x, &keys, 0, 0.1, false);
        let second = dropped(&x, &keys, 1, 0.1, false);
        let share = |both: &dyn Fn(f32, f32) -> bool| {
            let hits = first.iter().zip(&second).filter(|(a, b)| both(**a, **b)).count();
            hits as f64 / x.len() as f64
        };
        // Standard deviations over 200 000 draws: 0.00067 at 0.1 and 0.00022 at 0.01.
        assert!((share(&|a, _| a == 0.0) - 0.1).abs() < 0.003);
        assert!((share(&|_, b| b == 0.0) - 0.1).abs() < 0.003);
        assert!((share(&|a, b| a == 0.0 && b == 0.0) - 0.01).abs() < 0.001);
    }

    #[test]
    fn dropout_is_its_own_gradient() {
        let keys = keys(3);
        let (x, dy) = (numbers(1, 3 * 33), numbers(2, 3 * 33));
        let y = dropped(&x, &keys, 4, 0.5, false);
        let dx = dropped(&dy, &keys, 4, 0.5, false);
        for (((x, y), dy), dx) in x.iter().zip(&y).zip(&dy).zip(&dx) {
            // y is linear in x, so its slope is the quotient.
            assert!((dx / dy - y / x).abs() < 1e-6);
        }
    }
}
