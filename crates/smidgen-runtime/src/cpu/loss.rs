//! Cross entropy over the vocabulary, with the logits' gradient written over the logits.
//!
//! Per row, where z are the logits (after the soft cap z = c tanh(l / c), if there is one):
//!
//! ```text
//! nll = ln(sum exp z) - z[label]        dl = (softmax(z) - onehot(label)) * scale * (1 - (z / c)²)
//! ```
//!
//! The largest logit is subtracted before `exp`; sums are f32 within a segment of columns, f64 across segments.
//! Left out: means over tokens; the caller chooses the scale.

use super::chunk::{CHUNK_ELEMENTS, for_each_chunk, for_each_row};
use super::footprint::assert_disjoint;
use super::simd::{
    Isa, LANES, Lanes, exp, exp_lanes, for_each_block, kernel, max_lanes, sum_lanes, tanh, tanh_lanes,
};
use super::view::{Dst, DstRows, Src};

/// A row with this label is ignored: its loss and its gradient are zero. The value is PyTorch's.
pub const IGNORED_LABEL: i32 = -100;

/// Writes the negative log likelihood of each row to `nll`. With `grad_scale`, the logits of a row are replaced by their
/// gradient times its scale; without, they are unchanged.
pub fn softmax_loss(
    logits: DstRows,  // (rows, V)
    labels: Src<i32>, // (rows)
    softcap: Option<f32>,
    grad_scale: Option<&(dyn Fn(usize) -> f32 + Sync)>,
    nll: Dst<f32>, // (rows)
) {
    let (rows, vocabulary) = (logits.rows(), logits.columns());
    assert_eq!((labels.len(), nll.len()), (rows, rows));
    assert_disjoint("softmax_loss", logits, [labels.into(), nll.into()]);
    assert_disjoint("softmax_loss", nll, [labels.into()]);
    let isa = Isa::current();
    for_each_row(rows, vocabulary, |row| {
        let label = labels.get(row);
        let loss = match usize::try_from(label) {
            Ok(label) if label < vocabulary => {
                loss_row(isa, logits.row(row), label, softcap, grad_scale.map(|scale| scale(row)))
            }
            _ => {
                assert_eq!(
                    label, IGNORED_LABEL,
                    "`softmax_loss`: label of row {row} is outside a vocabulary of {vocabulary}"
                );
                if grad_scale.is_some() {
                    logits.row(row).fill_zero();
                }
                0.0
            }
        };
        nll.set(row, loss);
    });
}

/// Logits z become cap·tanh(z/cap).
pub fn cap_logits(logits: Dst<f32>, cap: f32) {
    let isa = Isa::current();
    for_each_chunk(logits.len(), CHUNK_ELEMENTS, |chunk| {
        cap_chunk(isa, logits.part(chunk.start, chunk.len), cap);
    });
}

kernel! {
    fn cap_chunk(logits: Dst<f32>, cap: f32) {
        for_each_block!(block in logits.len() => {
            logits.set_lanes(block, cap_lanes(logits.src().lanes_or(block, 0.0), cap));
        });
    }
}

/// Columns whose exponentials are summed in f32 before the sum is added to an f64 total.
const SEGMENT_COLUMNS: usize = 4096;

kernel! {
    fn loss_row(
        logits: Dst<f32>,
        label: usize,
        softcap: Option<f32>,
        grad_scale: Option<f32>,
    ) -> f32 {
        let largest = largest_of(logits, softcap);
        let labelled = capped(logits.src().get(label), softcap);

        let keep_capped = softcap.is_some() && grad_scale.is_some();
        let sum = sum_below(logits, largest, softcap, keep_capped);

        if let Some(scale) = grad_scale {
            let inverse_sum = (1.0 / sum) as f32;
            write_gradient(logits, true, Some(label), labelled, (largest, inverse_sum), softcap, scale);
        }
        (f64::from(largest) + sum.ln() - f64::from(labelled)) as f32
    }
}

/// Replaces a row of logits by its gradient. With `is_capped`, the softcap has already been applied to the logits.
#[inline(always)]
pub(super) fn write_gradient(
    logits: Dst<f32>,
    is_capped: bool,
    label: Option<usize>,
    labelled: f32,
    (largest, inverse_sum): (f32, f32),
    softcap: Option<f32>,
    scale: f32,
) {
    for_each_block!(block in logits.len() => {
        let mut z = logits.lanes(block);
        if let Some(cap) = softcap.filter(|_| !is_capped) {
            z = cap_lanes(z, cap);
        }
        let mut out = exp_below(z, largest);
        for value in &mut out {
            *value = *value * inverse_sum * scale;
        }
        if let Some(cap) = softcap {
            for lane in 0..LANES {
                out[lane] *= cap_slope(z[lane], cap);
            }
        }
        logits.set_lanes(block, out);
    });
    if let Some(label) = label {
        let probability = exp(labelled - largest) * inverse_sum;
        let slope = softcap.map_or(1.0, |cap| cap_slope(labelled, cap));
        logits.set(label, (probability - 1.0) * scale * slope);
    }
}

/// The largest logit after the softcap. The softcap is monotonic, so it is applied only to the largest.
#[inline(always)]
pub(super) fn largest_of(logits: Dst<f32>, softcap: Option<f32>) -> f32 {
    let mut largest = [f32::NEG_INFINITY; LANES];
    for_each_block!(block in logits.len() => {
        let lanes = logits.src().lanes_or(block, f32::NEG_INFINITY);
        for lane in 0..LANES {
            let candidate = lanes[lane];
            largest[lane] = if candidate > largest[lane] { candidate } else { largest[lane] };
        }
    });
    capped(max_lanes(largest), softcap)
}

/// The sum of exp(z - largest). With `keep_capped`, the logits are replaced by z.
#[inline(always)]
pub(super) fn sum_below(logits: Dst<f32>, largest: f32, softcap: Option<f32>, keep_capped: bool) -> f64 {
    let mut sum = 0.0_f64;
    for start in (0..logits.len()).step_by(SEGMENT_COLUMNS) {
        let len = SEGMENT_COLUMNS.min(logits.len() - start);
        sum += f64::from(segment_sum(logits.part(start, len), largest, softcap, keep_capped));
    }
    sum
}

#[inline(always)]
fn segment_sum(logits: Dst<f32>, largest: f32, softcap: Option<f32>, keep_capped: bool) -> f32 {
    let mut sums = [0.0; LANES];
    for_each_block!(block in logits.len() => {
        let mut z = logits.src().lanes_or(block, f32::NEG_INFINITY);
        if let Some(cap) = softcap {
            z = cap_lanes(z, cap);
            if keep_capped {
                logits.set_lanes(block, z);
            }
        }
        let powers = exp_below(z, largest);
        for lane in 0..LANES {
            sums[lane] += if lane < block.count { powers[lane] } else { 0.0 };
        }
    });
    sum_lanes(sums)
}

#[inline(always)]
fn exp_below(mut z: Lanes, largest: f32) -> Lanes {
    for value in &mut z {
        *value -= largest;
    }
    exp_lanes(z)
}

#[inline(always)]
fn cap_lanes(mut lanes: Lanes, cap: f32) -> Lanes {
    let inverse = 1.0 / cap;
    for value in &mut lanes {
        *value *= inverse;
    }
    lanes = tanh_lanes(lanes);
    for value in &mut lanes {
        *value *= cap;
    }
    lanes
}

#[inline(always)]
pub(super) fn capped(logit: f32, softcap: Option<f32>) -> f32 {
    softcap.map_or(logit, |cap| tanh(logit * (1.0 / cap)) * cap)
}

#[inline(always)]
fn cap_slope(z: f32, cap: f32) -> f32 {
    let t = z * (1.0 / cap);
    (1.0 - t) * (1.0 + t)
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    fn reference(logits: &[f64], label: usize, softcap: Option<f64>) -> f64 {
        let z: Vec<f64> = logits.iter().map(|l| softcap.map_or(*l, |cap| cap * (l / cap).tanh())).collect();
        let largest = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = z.iter().map(|z| (z - largest).exp()).sum();
        largest + sum.ln() - z[label]
    }

    fn labels(rows: usize, vocabulary: usize) -> Vec<i32> {
        (0..rows).map(|row| (row * 7 % vocabulary) as i32).collect()
    }

    fn run(
        logits: &[f32],
        labels: &[i32],
        softcap: Option<f32>,
        grad_scale: Option<f32>,
    ) -> (Vec<f32>, Vec<f32>) {
        on_every_isa(|| {
            let mut logits = logits.to_vec();
            let mut nll = vec![f32::NAN; labels.len()];
            let columns = logits.len() / labels.len();
            let view = dst(&mut logits).rows(columns);
            let scale = grad_scale.map(|scale| move |_: usize| scale);
            let scale = scale.as_ref().map(|scale| scale as &(dyn Fn(usize) -> f32 + Sync));
            softmax_loss(view, src(labels), softcap, scale, dst(&mut nll));
            (logits, nll)
        })
    }

    fn wide(seed: u64, len: usize) -> Vec<f32> {
        numbers(seed, len).iter().map(|value| value * 6.0).collect()
    }

    #[test]
    fn loss_matches_the_reference_and_leaves_the_logits() {
        for vocabulary in [1, 7, 16, 33, 576, 3 * SEGMENT_COLUMNS + 5] {
            for softcap in [None, Some(4.0_f32)] {
                let rows = if vocabulary > 1000 { 3 } else { 61 };
                let logits = wide(1, rows * vocabulary);
                let labels = labels(rows, vocabulary);
                let (after, nll) = run(&logits, &labels, softcap, None);
                assert_same_bits("logits", &after, &logits);
                let want: Vec<f64> = logits
                    .chunks(vocabulary)
                    .zip(&labels)
                    .map(|(row, label)| reference(&widened(row), *label as usize, softcap.map(f64::from)))
                    .collect();
                assert_close("nll", &nll, &want, 1.0, 1e-6);
                let (_, with_gradient) = run(&logits, &labels, softcap, Some(0.5));
                assert_same_bits("nll", &with_gradient, &nll);
            }
        }
    }

    #[test]
    fn gradient_matches_finite_differences() {
        for vocabulary in [1, 7, 16, 33] {
            for softcap in [None, Some(4.0_f32)] {
                let (rows, scale) = (3, 0.7_f32);
                let logits = wide(2, rows * vocabulary);
                let labels = labels(rows, vocabulary);
                let (got, _) = run(&logits, &labels, softcap, Some(scale));
                let want = finite_difference(&widened(&logits), |logits| {
                    logits
                        .chunks(vocabulary)
                        .zip(&labels)
                        .map(|(row, label)| {
                            let cap = softcap.map(f64::from);
                            f64::from(scale) * reference(row, *label as usize, cap)
                        })
                        .sum()
                });
                assert_close("dl", &got, &want, 1.0, 1e-6);
            }
        }
    }

    #[test]
    fn a_gradient_row_sums_to_zero_over_a_large_vocabulary() {
        let vocabulary = 100_003;
        let (gradient, _) = run(&wide(3, vocabulary), &[77], None, Some(1.0));
        let sum: f64 = gradient.iter().map(|value| f64::from(*value)).sum();
        assert!(sum.abs() < 1e-6, "{sum:e}");
    }

    #[test]
    fn large_logits_do_not_overflow_and_nan_is_kept() {
        let (gradient, nll) = run(&[1e30, -1e30, 0.0], &[0], None, Some(1.0));
        assert_eq!((nll[0], gradient), (0.0, vec![0.0, 0.0, 0.0]));
        let (_, nll) = run(&[500.0, 400.0], &[1], None, None);
        assert_eq!(nll[0], 100.0);
        let (_, nll) = run(&[1.0, f32::NAN, 0.0], &[0], None, None);
        assert!(nll[0].is_nan());
        let masked = [0.0, f32::NEG_INFINITY, 0.0];
        let (gradient, nll) = run(&masked, &[0], None, Some(1.0));
        assert!((nll[0] - 2.0_f32.ln()).abs() < 1e-6);
        assert_eq!(gradient, [-0.5, 0.0, 0.5]);
    }

    #[test]
    fn ignored_rows_are_zero() {
        let logits = wide(4, 2 * 33);
        let (gradient, nll) = run(&logits, &[IGNORED_LABEL, 5], None, Some(1.0));
        assert_eq!(nll[0], 0.0);
        assert!(gradient[..33].iter().all(|value| *value == 0.0));
        assert!(nll[1] > 0.0 && gradient[33 + 5] < 0.0);
    }

    #[test]
    #[should_panic(expected = "label of row 0 is outside a vocabulary of 4")]
    fn a_label_outside_the_vocabulary_is_refused() {
        let (mut logits, mut nll) = (numbers(1, 4), vec![0.0]);
        let view = dst(&mut logits).rows(4);
        softmax_loss(view, src(&[4]), None, None, dst(&mut nll));
    }
}
