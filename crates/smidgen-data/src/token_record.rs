//! The bytes of one sample, the same in memory and on disk.
//!
//! A record is the ids, 4 bytes each in little-endian order, and then the labels in one of two forms, the same for a
//! whole set: one bit per position if every label is the token itself or nothing (true for all data that was tokenized
//! here), or 4 bytes per position for other labels.
//! The size of a record follows from its length alone, so no offsets are stored.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};

/// The label of a position that carries no loss.
pub const NOT_SUPERVISED: i32 = -100;

/// How labels are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LabelForm {
    /// A bit for each position, which is set if the label is the token.
    Bits,
    /// A number for each position, `-100` for none.
    Numbers,
}

/// Which tokens of a row are supervised.
#[derive(Clone, Copy, Debug)]
pub enum RowLabels<'a> {
    /// Every token.
    All,
    /// The tokens of these ranges: ascending, with gaps between them, within the row.
    Spans(&'a [Range<usize>]),
    /// One number for each token: a token of the vocabulary or `-100`.
    Given(&'a [i64]),
}

impl RowLabels<'_> {
    /// The label of a position; `id` is the token there.
    pub fn at(&self, position: usize, id: i64) -> i64 {
        match self {
            RowLabels::All => id,
            RowLabels::Spans(spans) => {
                if spans.iter().any(|span| span.contains(&position)) {
                    id
                } else {
                    i64::from(NOT_SUPERVISED)
                }
            }
            RowLabels::Given(labels) => labels[position],
        }
    }

    /// The spans of a piece of the row, relative to the piece; empty unless labels are spans.
    pub fn spans_within(&self, piece: Range<usize>) -> Vec<Range<usize>> {
        let RowLabels::Spans(spans) = self else { return Vec::new() };
        let cut = spans.iter().map(|span| span.start.max(piece.start)..span.end.min(piece.end));
        let shifted = cut.filter(|span| !span.is_empty());
        shifted.map(|span| span.start - piece.start..span.end - piece.start).collect()
    }

    /// Positions before `end` that carry a loss after the shift: all labels but the first.
    pub fn supervised_before(&self, end: usize) -> usize {
        match self {
            RowLabels::All => end.saturating_sub(1),
            RowLabels::Spans(spans) => {
                let counted = spans.iter().map(|span| span.end.min(end).saturating_sub(span.start.max(1)));
                counted.sum()
            }
            RowLabels::Given(labels) => {
                let labels = &labels[..end];
                labels.iter().skip(1).filter(|&&label| label != i64::from(NOT_SUPERVISED)).count()
            }
        }
    }

    /// Whether each of the first `ids.len()` labels is the token or nothing.
    pub fn are_bits(&self, ids: &[i64]) -> bool {
        match self {
            RowLabels::All | RowLabels::Spans(_) => true,
            RowLabels::Given(labels) => {
                let mut pairs = ids.iter().zip(*labels);
                pairs.all(|(id, label)| label == id || *label == i64::from(NOT_SUPERVISED))
            }
        }
    }
}

/// Records in a file are read in pieces of this size, on the stack.
const PIECE_BYTES: usize = 8 << 10;

impl LabelForm {
    /// The size of the record of a sample of `length` tokens.
    pub fn record_bytes(self, length: usize) -> u64 {
        let labels = match self {
            LabelForm::Bits => length.div_ceil(8),
            LabelForm::Numbers => 4 * length,
        };
        (4 * length + labels) as u64
    }

    /// Appends the record of a row whose values all fit an i32.
    pub fn encode(self, ids: &[i64], labels: RowLabels<'_>, out: &mut Vec<u8>) {
        out.extend(ids.iter().flat_map(|&id| (id as i32).to_le_bytes()));
        match self {
            LabelForm::Numbers => {
                let numbers = ids.iter().enumerate().map(|(t, &id)| labels.at(t, id) as i32);
                out.extend(numbers.flat_map(i32::to_le_bytes));
            }
            LabelForm::Bits => {
                let first = out.len();
                out.resize(first + ids.len().div_ceil(8), 0);
                let bits = &mut out[first..];
                let mut set = |position: usize| bits[position / 8] |= 1 << (position % 8);
                match labels {
                    RowLabels::All => (0..ids.len()).for_each(set),
                    RowLabels::Spans(spans) => {
                        let within = spans.iter().flat_map(|span| span.start..span.end.min(ids.len()));
                        within.for_each(set);
                    }
                    RowLabels::Given(labels) => {
                        let supervised = |t: &usize| labels[*t] != i64::from(NOT_SUPERVISED);
                        (0..ids.len()).filter(supervised).for_each(&mut set);
                    }
                }
            }
        }
    }

    /// Appends the ids, then calls `on_label` for each position with a label.
    pub fn decode(self, record: &[u8], length: usize, ids: &mut Vec<i32>, on_label: impl FnMut(usize, i32)) {
        let first = ids.len();
        let (tokens, labels) = record.split_at(4 * length);
        ids.extend(numbers(tokens));
        self.decode_labels(labels, 0, &ids[first..], on_label);
    }

    /// The same, reading the record from a file piece by piece.
    pub fn decode_from(
        self,
        file: &File,
        start: u64,
        length: usize,
        ids: &mut Vec<i32>,
        mut on_label: impl FnMut(usize, i32),
    ) -> io::Result<()> {
        let mut buffer = [0; PIECE_BYTES];
        let first = ids.len();
        for_each_piece(file, start, 4 * length, &mut buffer, |_, piece| ids.extend(numbers(piece)))?;
        let label_bytes = (self.record_bytes(length) - 4 * length as u64) as usize;
        let labels_start = start + 4 * length as u64;
        for_each_piece(file, labels_start, label_bytes, &mut buffer, |offset, piece| {
            self.decode_labels(piece, offset, &ids[first..], &mut on_label);
        })
    }

    /// `offset` is the position of `bytes` within the labels of the record.
    fn decode_labels(self, bytes: &[u8], offset: usize, ids: &[i32], mut on_label: impl FnMut(usize, i32)) {
        match self {
            LabelForm::Numbers => {
                for (index, label) in numbers(bytes).enumerate() {
                    if label != NOT_SUPERVISED {
                        on_label(offset / 4 + index, label);
                    }
                }
            }
            LabelForm::Bits => {
                for (index, &byte) in bytes.iter().enumerate() {
                    let mut rest = byte;
                    while rest != 0 {
                        let position = 8 * (offset + index) + rest.trailing_zeros() as usize;
                        on_label(position, ids[position]);
                        rest &= rest - 1;
                    }
                }
            }
        }
    }
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = i32> {
    bytes.chunks_exact(4).map(|four| i32::from_le_bytes([four[0], four[1], four[2], four[3]]))
}

fn for_each_piece(
    file: &File,
    start: u64,
    bytes: usize,
    buffer: &mut [u8],
    mut on_piece: impl FnMut(usize, &[u8]),
) -> io::Result<()> {
    for offset in (0..bytes).step_by(buffer.len()) {
        let piece = &mut buffer[..bytes.min(offset + PIECE_BYTES) - offset];
        file.read_exact_at(piece, start + offset as u64)?;
        on_piece(offset, piece);
    }
    Ok(())
}
