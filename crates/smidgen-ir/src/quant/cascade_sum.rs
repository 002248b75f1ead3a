//! The mean of floats, summed in the order in which PyTorch's CPU kernel does on one thread.
//!
//! The mean of the scales is stored with a doubly quantized tensor, and codes depend on its last bit.
//! The order: eight lanes, in each four interleaved rows, in each a cascade of four levels of partial
//! sums; fewer than eight numbers are four interleaved rows. Found with torch 2.15 on x86-64.
//! Left out: several threads, whose number changes torch's own mean of more than 32768 numbers.

const LANES: usize = 8;
const ROWS: usize = 4;
const LEVELS: usize = 4;

/// NaN for no numbers.
pub fn mean(values: &[f32]) -> f32 {
    let sum = if values.len() < LANES { sum_rows::<1>(values)[0] } else { sum_lanes(values) };
    sum / values.len() as f32
}

fn sum_lanes(values: &[f32]) -> f32 {
    let (whole, rest) = values.split_at(values.len() / LANES * LANES);
    let lanes = sum_rows::<LANES>(whole);
    rest.iter().chain(&lanes).fold(0.0, |sum, value| sum + value)
}

/// The sums of `W` interleaved columns.
fn sum_rows<const W: usize>(values: &[f32]) -> [f32; W] {
    let count = values.len() / (ROWS * W);
    let (cascaded, rest) = values.split_at(count * ROWS * W);
    let mut rows = cascade::<W>(cascaded, count);
    for vector in rest.chunks_exact(W) {
        add(&mut rows[0], vector);
    }
    let [mut sum, others @ ..] = rows;
    for row in others {
        add(&mut sum, &row);
    }
    sum
}

/// Every level is added to the next after 2^power sums into it, so that small terms are not added to a large sum.
fn cascade<const W: usize>(values: &[f32], count: usize) -> [[f32; W]; ROWS] {
    let power = (ceil_log2(count) / LEVELS).max(4);
    let step = 1 << power;
    let mut levels = [[[0.0; W]; ROWS]; LEVELS];
    for (index, rows) in values.chunks_exact(ROWS * W).enumerate() {
        for (sum, row) in levels[0].iter_mut().zip(rows.chunks_exact(W)) {
            add(sum, row);
        }
        let done = index + 1;
        if done % step != 0 {
            continue;
        }
        for level in 1..LEVELS {
            let below = std::mem::replace(&mut levels[level - 1], [[0.0; W]; ROWS]);
            for (sum, row) in levels[level].iter_mut().zip(&below) {
                add(sum, row);
            }
            if done >> (level * power) & (step - 1) != 0 {
                break;
            }
        }
    }
    let [mut sums, others @ ..] = levels;
    for level in others {
        for (sum, row) in sums.iter_mut().zip(&level) {
            add(sum, row);
        }
    }
    sums
}

fn ceil_log2(count: usize) -> usize {
    match count {
        0 | 1 => 0,
        count => (count - 1).ilog2() as usize + 1,
    }
}

fn add(sum: &mut [f32], addends: &[f32]) {
    for (sum, addend) in sum.iter_mut().zip(addends) {
        *sum += addend;
    }
}
