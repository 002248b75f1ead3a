//! Depthwise convolutions over the rows before a row, within a sample or within a chunk of sound.
//!
//! A weight has a row of taps for each channel; kernels read it tap by tap, from a transposed copy in the workspace, so
//! that neighbouring channels are neighbouring lanes.
//! Left out: the activation that follows (`plain_act.rs`).

use super::audio_conv::Marks;
use super::chunk::{CHUNK_COLUMNS, Chunk, for_each_chunk, for_each_row_chunk};
use super::footprint::assert_disjoint;
use super::simd::{Isa, LANES, for_each_block, kernel};
use super::slot_runs::{SlotRun, SlotRuns};
use super::view::{Dst, DstRows, Src, SrcRows, StoredVector};
use std::ops::Range;

/// Where rows stop seeing each other.
#[derive(Clone, Copy)]
pub enum Reach<'a> {
    /// Boundaries (G+1) of samples.
    Samples(&'a [i32]),
    Chunks(Marks<'a>),
}

impl Reach<'_> {
    /// The rows that may see a row or be seen by it.
    fn around(self, row: usize) -> Range<usize> {
        match self {
            Reach::Chunks(marks) => marks.chunk(row),
            Reach::Samples(boundaries) => {
                let next = boundaries.partition_point(|boundary| *boundary as usize <= row);
                assert!(next > 0 && next < boundaries.len(), "row {row} belongs to no sample");
                boundaries[next - 1] as usize..boundaries[next] as usize
            }
        }
    }
}

/// The weight (C, K) tap by tap, and the bias or zeros.
#[derive(Clone, Copy)]
pub struct Taps {
    weight: Src<f32>, // (K, C)
    bias: Src<f32>,   // (C)
    taps: usize,
}

impl Taps {
    /// `scratch` has room for the weight and the bias.
    pub fn new(weight: StoredVector, bias: Option<StoredVector>, channels: usize, scratch: Dst<f32>) -> Taps {
        let taps = weight.len() / channels;
        assert_eq!(weight.len(), taps * channels);
        let (by_tap, biases) = (scratch.part(0, taps * channels), scratch.part(taps * channels, channels));
        for_each_chunk(channels, CHUNK_COLUMNS, |chunk| {
            for channel in chunk.range() {
                (0..taps).for_each(|tap| {
                    by_tap.set(tap * channels + channel, weight.get(channel * taps + tap));
                });
                biases.set(channel, bias.map_or(0.0, |bias| bias.get(channel)));
            }
        });
        Taps { weight: by_tap.src(), bias: biases.src(), taps }
    }

    fn tap(self, tap: usize) -> Src<f32> {
        self.weight.part(tap * self.bias.len(), self.bias.len())
    }
}

/// y[t] = bias + Σ w[j] x[t - K + 1 + j] for each channel; or backward, where x is dy and `taps` have no bias,
/// y[t] = Σ w[j] x[t + K - 1 - j].
pub fn causal_conv(x: SrcRows, reach: Reach<'_>, taps: Taps, backward: bool, y: DstRows) {
    assert_eq!((x.rows(), x.columns()), (y.rows(), y.columns()));
    assert_disjoint("causal_conv", y, [x.into(), taps.weight.into()]);
    let isa = Isa::current();
    for_each_row_chunk(x.rows(), x.columns(), |chunk| {
        for row in chunk.range() {
            convolve_row(isa, x, taps, backward, row, reach.around(row), y.row(row));
        }
    });
}

kernel! {
    fn convolve_row(x: SrcRows, taps: Taps, backward: bool, row: usize, around: Range<usize>, y: Dst<f32>) {
        for_each_block!(block in y.len() => {
            let mut sum = taps.bias.lanes(block);
            for tap in 0..taps.taps {
                let lag = taps.taps - 1 - tap;
                let from = if backward { row + lag } else { row.wrapping_sub(lag) };
                if from >= around.start && from < around.end {
                    let (weight, x) = (taps.tap(tap).lanes(block), x.row(from).lanes(block));
                    for lane in 0..LANES {
                        sum[lane] += weight[lane] * x[lane];
                    }
                }
            }
            y.set_lanes(block, sum);
        });
    }
}

/// dw[c, j] += Σ dy[t, c] x[t - K + 1 + j, c]. Tasks split channels; rows are summed in order.
pub fn causal_conv_weight_grad(x: SrcRows, dy: SrcRows, boundaries: &[i32], dw: Dst<f32>) {
    assert_eq!((x.rows(), x.columns()), (dy.rows(), dy.columns()));
    assert_disjoint("causal_conv_weight_grad", dw, [x.into(), dy.into()]);
    let isa = Isa::current();
    for_each_chunk(x.columns(), CHUNK_COLUMNS, |chunk| sum_taps(isa, x, dy, boundaries, dw, chunk));
}

kernel! {
    fn sum_taps(x: SrcRows, dy: SrcRows, boundaries: &[i32], dw: Dst<f32>, chunk: Chunk) {
        let taps = dw.len() / x.columns();
        let (x, dy) = (x.column_part(chunk.start, chunk.len), dy.column_part(chunk.start, chunk.len));
        for_each_block!(block in chunk.len => {
            for tap in 0..taps {
                let (lag, mut sum) = (taps - 1 - tap, [0.0; LANES]);
                for sample in boundaries.windows(2) {
                    for row in sample[0] as usize + lag..sample[1] as usize {
                        let (x, dy) = (x.row(row - lag).lanes(block), dy.row(row).lanes(block));
                        for lane in 0..LANES {
                            sum[lane] += dy[lane] * x[lane];
                        }
                    }
                }
                for lane in 0..block.count {
                    let at = (chunk.start + block.start + lane) * taps + tap;
                    dw.set(at, dw.src().get(at) + sum[lane]);
                }
            }
        });
    }
}

/// The convolution of new tokens, with the last K - 1 rows of each sequence, which `windows` (L, (K-1)·C) hold and which
/// are replaced.
pub fn cached_conv(x: SrcRows, taps: Taps, runs: SlotRuns<'_>, windows: DstRows, y: DstRows) {
    assert_eq!(windows.columns(), (taps.taps - 1) * x.columns());
    assert_disjoint("cached_conv", y, [x.into(), windows.into()]);
    let isa = Isa::current();
    for_each_chunk(x.columns(), CHUNK_COLUMNS, |chunk| {
        for run in runs.iter() {
            convolve_run(isa, x, taps, run, windows, y, chunk);
        }
    });
}

kernel! {
    fn convolve_run(x: SrcRows, taps: Taps, run: SlotRun, windows: DstRows, y: DstRows, chunk: Chunk) {
        let (window, lags) = (windows.row(run.slot), taps.taps - 1);
        let part = |row: usize| window.part(row * x.columns() + chunk.start, chunk.len);
        for_each_block!(block in chunk.len => {
            for row in 0..run.count {
                let mut sum = taps.bias.part(chunk.start, chunk.len).lanes(block);
                for tap in 0..taps.taps {
                    let weight = taps.tap(tap).part(chunk.start, chunk.len).lanes(block);
                    let before = row + tap;
                    let x = if before >= lags {
                        x.row(run.first + before - lags).part(chunk.start, chunk.len).lanes(block)
                    } else if run.begins {
                        [0.0; LANES]
                    } else {
                        part(before).lanes(block)
                    };
                    for lane in 0..LANES {
                        sum[lane] += weight[lane] * x[lane];
                    }
                }
                y.row(run.first + row).part(chunk.start, chunk.len).set_lanes(block, sum);
            }
            // Each row moves to an earlier place, so none is overwritten before it is read.
            for row in 0..lags {
                let from = run.count + row;
                let last = if from >= lags {
                    x.row(run.first + from - lags).part(chunk.start, chunk.len).lanes(block)
                } else if run.begins {
                    [0.0; LANES]
                } else {
                    part(from).lanes(block)
                };
                part(row).set_lanes(block, last);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::convert::Element;
    use super::super::testing::*;
    use super::*;

    /// Rows of a sample see no row of another, and a row sees only rows before it.
    #[test]
    fn samples_and_single_steps_are_convolved_as_by_hand() {
        let (rows, channels, taps) = (11, 33, 4);
        let (x, weight, bias) =
            (numbers(1, rows * channels), numbers(2, channels * taps), numbers(3, channels));
        let boundaries = [0, 2, 9, 11];
        let mut want = vec![0.0; rows * channels];
        for sample in boundaries.windows(2) {
            for row in sample[0]..sample[1] {
                for channel in 0..channels {
                    let mut sum = f64::from(bias[channel]);
                    for tap in 0..taps {
                        let from = row + tap as i32 + 1 - taps as i32;
                        if from >= sample[0] {
                            let x = x[from as usize * channels + channel];
                            sum += f64::from(weight[channel * taps + tap]) * f64::from(x);
                        }
                    }
                    want[row as usize * channels + channel] = sum;
                }
            }
        }
        let mut scratch = vec![0.0; (taps + 1) * channels];
        let mut y = vec![f32::NAN; rows * channels];
        let [weight_bytes, bias_bytes] = [&weight, &bias].map(|values| stored_bytes(Element::F32, values).0);
        let views = [&weight_bytes, &bias_bytes].map(|bytes| stored(Element::F32, bytes));
        let by_tap = Taps::new(views[0], Some(views[1]), channels, dst(&mut scratch));
        causal_conv(
            src(&x).rows(channels),
            Reach::Samples(&boundaries),
            by_tap,
            false,
            dst(&mut y).rows(channels),
        );
        assert_close("y", &y, &want, 1.0, 1e-6);
        // The second sample again, one token after another and in two parts, in a slot that held another sequence.
        for cuts in [vec![1; 7], vec![2, 5], vec![6, 1]] {
            let mut windows = vec![9.0; 2 * (taps - 1) * channels];
            let mut first = 2;
            for count in cuts {
                let part = &x[first * channels..(first + count) * channels];
                let positions: Vec<i32> = (0..count).map(|token| (first - 2 + token) as i32).collect();
                let slots = vec![1; count];
                let mut found = vec![f32::NAN; count * channels];
                let runs = SlotRuns { slots: &slots, positions: &positions };
                let windows = dst(&mut windows).rows((taps - 1) * channels);
                let found_rows = dst(&mut found).rows(channels);
                cached_conv(src(part).rows(channels), by_tap, runs, windows, found_rows);
                assert_same_bits("step", &found, &y[first * channels..(first + count) * channels].to_vec());
                first += count;
            }
        }
    }
}
