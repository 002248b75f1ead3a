//! Strided convolutions over the mel frames of a clip, and the marks of audio rows.
//!
//! A strided convolution halves frames and bins. An audio row holds `frames` frames of its output; the frame before its
//! first one is in the row before, if that row belongs to the same clip. Frames behind the end of a clip and bins outside
//! the spectrum count as zero.
//! Left out: gradients of the weights, which are never trained, causal convolutions
//! (`causal_conv.rs`), and pointwise ones, which are linears.

use super::chunk::for_each_chunk;
use super::footprint::{assert_disjoint, assert_disjoint_or_same};
use super::view::{Dst, DstRows, Src, SrcRows, StoredVector};
use smidgen_ir::{MARK_COLUMNS, StridedConv};

/// Mel frames of an audio row.
const FRAMES: usize = 8;

/// The marks of all audio rows: mel frames of the row, first row and end of its chunk, first row of its clip.
#[derive(Clone, Copy)]
pub struct Marks<'a>(pub &'a [i32]); // (A, 4)

impl Marks<'_> {
    pub fn rows(self) -> usize {
        self.0.len() / MARK_COLUMNS
    }

    /// Mel frames of a row.
    fn frames(self, row: usize) -> usize {
        self.0[MARK_COLUMNS * row] as usize
    }

    /// The rows of a row's chunk.
    pub fn chunk(self, row: usize) -> std::ops::Range<usize> {
        let marks = &self.0[MARK_COLUMNS * row..];
        let (first, end) = (marks[1] as usize, marks[2] as usize);
        assert!(first <= row && row < end && end <= self.rows(), "row {row} in a chunk {first}..{end}");
        first..end
    }

    fn first_of_clip(self, row: usize) -> usize {
        self.0[MARK_COLUMNS * row + 3] as usize
    }
}

/// Channels whose weights are decoded at the same time.
const CHANNELS: usize = 16;

/// The convolution of [`smidgen_ir::Op::StridedConv`].
pub fn strided_conv(
    conv: StridedConv,
    x: Src<f32>,
    marks: Marks<'_>,
    weight: StoredVector, // (C, 9)
    bias: StoredVector,   // (C)
    y: Dst<f32>,          // (A, frames, bins, C)
) {
    let StridedConv { frames, bins, depthwise } = conv;
    let channels = bias.len();
    let input_channels = if depthwise { channels } else { 1 };
    let (x_row, y_row) = (4 * frames * bins * input_channels, frames * bins * channels);
    assert_eq!(weight.len(), 9 * channels);
    assert_eq!((x.len(), y.len()), (marks.rows() * x_row, marks.rows() * y_row));
    assert_disjoint("strided_conv", y, [x.into(), weight.into(), bias.into()]);
    for_each_chunk(marks.rows(), 1, |chunk| {
        let row = chunk.start;
        let y = y.part(row * y_row, y_row);
        let place = InputRows { x, marks, row, frames: 2 * frames, bins: 2 * bins, channels: input_channels };
        for first in (0..channels).step_by(CHANNELS) {
            let count = CHANNELS.min(channels - first);
            let (mut taps, mut biases) = ([[0.0; CHANNELS]; 9], [0.0; CHANNELS]);
            for channel in 0..count {
                biases[channel] = bias.get(first + channel);
                for (tap, weights) in taps.iter_mut().enumerate() {
                    weights[channel] = weight.get(9 * (first + channel) + tap);
                }
            }
            for frame in 0..frames {
                for bin in 0..bins {
                    let mut sums = biases;
                    for (tap, weights) in taps.iter().enumerate() {
                        // Counted from one before the first, as `start` expects.
                        let (at, across) = (2 * frame + tap / 3, 2 * bin + tap % 3);
                        let Some(start) = place.start(at, across) else { continue };
                        if depthwise {
                            let from = x.part(start + first, count);
                            for channel in 0..count {
                                sums[channel] += weights[channel] * from.get(channel);
                            }
                        } else {
                            let input = x.get(start);
                            for (sum, weight) in sums.iter_mut().zip(weights) {
                                *sum += weight * input;
                            }
                        }
                    }
                    let out = y.part((frame * bins + bin) * channels + first, count);
                    for (channel, sum) in sums.iter().take(count).enumerate() {
                        out.set(channel, *sum);
                    }
                }
            }
        }
    });
}

/// The input of one audio row, and of the row before.
struct InputRows<'a> {
    x: Src<f32>,
    marks: Marks<'a>,
    row: usize,
    frames: usize,
    bins: usize,
    channels: usize,
}

impl InputRows<'_> {
    /// The offset of a frame and bin in `x`, both counted from one before the first; `None` where the input is zero.
    fn start(&self, frame: usize, bin: usize) -> Option<usize> {
        let bin = bin.checked_sub(1).filter(|bin| *bin < self.bins)?;
        let (row, frame) = match frame.checked_sub(1) {
            Some(frame) => (self.row, frame),
            None if self.row > self.marks.first_of_clip(self.row) => (self.row - 1, self.frames - 1),
            None => return None,
        };
        let valid_frames = (self.marks.frames(row) * self.frames).div_ceil(FRAMES);
        debug_assert!(self.x.len() >= (row + 1) * self.frames * self.bins * self.channels);
        (frame < valid_frames).then_some(((row * self.frames + frame) * self.bins + bin) * self.channels)
    }
}

/// y[a] = the `places` rows of `x` that belong to audio row a, interleaved channel by channel.
pub fn join_places(
    x: SrcRows, // (places·A, C)
    places: usize,
    y: DstRows, // (A, C·places)
) {
    assert_eq!((x.rows(), places * x.columns()), (places * y.rows(), y.columns()));
    assert_disjoint("join_places", y, [x.into()]);
    for_each_chunk(y.rows(), 1, |chunk| {
        let out = y.row(chunk.start);
        for place in 0..places {
            let from = x.row(chunk.start * places + place);
            for channel in 0..x.columns() {
                out.set(channel * places + place, from.get(channel));
            }
        }
    });
}

/// y = x, and zero in rows without frames. `y` may be `x`.
pub fn mask_rows(x: SrcRows, marks: Marks<'_>, y: DstRows) {
    assert_eq!((x.rows(), x.columns()), (y.rows(), y.columns()));
    assert_eq!(marks.rows(), x.rows());
    assert_disjoint_or_same("mask_rows", y, [x.into()]);
    for_each_chunk(y.rows(), 64, |chunk| {
        for row in chunk.range() {
            match marks.frames(row) {
                0 => y.row(row).fill_zero(),
                _ => y.row(row).copy_from(x.row(row)),
            }
        }
    });
}
