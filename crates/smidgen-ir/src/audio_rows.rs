//! How sound is cut into rows: eight mel frames each, and chunks that long clips are cut into.
//!
//! A row becomes one embedding. The last row of a clip may have fewer frames, and the last chunk of a long clip is padded
//! with rows that have none. The attributes of operations on such rows are here too.

use std::fmt;

/// An activation function of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainActivation {
    Relu,
    Silu,
    /// The exact form, with the error function.
    Gelu,
}

/// Sizes of [`crate::Op::StridedConv`]: what one audio row holds of its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedConv {
    /// Frames of the output in an audio row; the input has twice as many.
    pub frames: usize,
    /// Bins of the output; the input has twice as many.
    pub bins: usize,
    /// Each channel has its own input; otherwise there is one input for all.
    pub depthwise: bool,
}

impl fmt::Display for StridedConv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StridedConv { frames, bins, depthwise } = self;
        write!(f, "frames={frames} bins={bins}{}", if *depthwise { " depthwise" } else { "" })
    }
}

/// Columns of the marks of an audio row: number of mel frames (0 for padding), first row of its chunk, end of its chunk,
/// first row of its clip.
pub const MARK_COLUMNS: usize = 4;

/// Mel frames of an audio row.
pub const FRAMES_OF_ROW: usize = 8;
/// Rows above which a clip is cut into chunks that do not see each other.
pub const ROWS_OF_CHUNK: usize = 500;

/// Rows of a clip of this many mel frames.
pub fn rows_of_frames(frames: usize) -> usize {
    frames.div_ceil(FRAMES_OF_ROW)
}

/// Rows of a clip, including the padding of its last chunk.
pub fn filled_rows(rows: usize) -> usize {
    if rows > ROWS_OF_CHUNK { rows.next_multiple_of(ROWS_OF_CHUNK) } else { rows }
}

/// The marks of the rows of a clip that begins at row `first` of a micro-batch.
pub fn marks_of_clip(first: usize, frames: usize) -> impl Iterator<Item = [i32; MARK_COLUMNS]> {
    let filled = filled_rows(rows_of_frames(frames));
    (0..filled).map(move |row| {
        let chunk = row / ROWS_OF_CHUNK * ROWS_OF_CHUNK;
        let end = filled.min(chunk + ROWS_OF_CHUNK);
        let own = frames.saturating_sub(row * FRAMES_OF_ROW).min(FRAMES_OF_ROW);
        [own, first + chunk, first + end, first].map(|number| number as i32)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clip_of_one_chunk_is_not_padded() {
        let marks: Vec<_> = marks_of_clip(7, 21).collect();
        assert_eq!(marks, [[8, 7, 10, 7], [8, 7, 10, 7], [5, 7, 10, 7]]);
        assert_eq!((rows_of_frames(4000), filled_rows(500)), (500, 500));
    }

    #[test]
    fn a_longer_clip_is_padded_to_whole_chunks() {
        let marks: Vec<_> = marks_of_clip(0, 4001).collect();
        assert_eq!(marks.len(), 1000);
        assert_eq!(
            (marks[499], marks[500], marks[999]),
            ([8, 0, 500, 0], [1, 500, 1000, 0], [0, 500, 1000, 0])
        );
    }
}
