//! The compact store of tokenized samples.
//!
//! The label of a position is the token at that position, or `-100` if it is not supervised. Position t is predicted
//! from position t - 1, so the label at position 0 never counts; the shift by one happens in `micro_batch.rs`.
//! Samples are stored one after the other as records (`token_record.rs`): in memory, or if there are many, in a file
//! that is read sample by sample. The lengths and counts that planning needs are always in memory.
//! Sets are built in `token_builder.rs`; the file is in `token_file.rs`.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::clips::SampleClips;
use crate::row_place::{RowPlace, RowUnit};
use crate::token_record::LabelForm;
pub use crate::token_record::NOT_SUPERVISED;
use smidgen_ir::Extent;
use smidgen_ir::objective::RowsNeeded;
use smidgen_ir::words::Overflow;

/// What rows are checked against.
#[derive(Clone, Copy, Debug)]
pub struct TokenLimits {
    pub vocab_size: u32,
    pub max_tokens: u32,
    pub overflow: Overflow,
}

/// How many rows were kept, held out, skipped and dropped. These numbers add up to `read` + `split_off`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowCounts {
    pub read: u64,
    /// Samples beyond the first of a conversation that became several.
    #[serde(default)]
    pub split_off: u64,
    pub kept: u64,
    /// Left out by `data.on_bad_row`.
    pub bad: u64,
    /// Held out for evaluation.
    pub held_out: u64,
    /// Kept rows that lost their end.
    pub truncated: u64,
    /// Kept rows that were cut into pieces.
    pub chunked: u64,
    /// The samples that the rows in `chunked` became.
    pub pieces: u64,
    /// Dropped by `overflow`: more than `max_tokens` tokens.
    pub too_long: u64,
    /// Dropped: a clip above `max_audio_seconds`, or audio tokens beyond `max_tokens`.
    #[serde(default)]
    pub audio_too_long: u64,
    /// Dropped: no token or one.
    pub too_short: u64,
    /// Dropped: no supervised token.
    pub unsupervised: u64,
    /// Dropped: all supervised tokens came after `max_tokens`.
    pub unsupervised_by_truncation: u64,
}

impl fmt::Display for RowCounts {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} rows read", self.read)?;
        if self.chunked > 0 {
            write!(out, ", {} cut into {} pieces", self.chunked, self.pieces)?;
        }
        for (count, what) in [
            (self.split_off, "samples split off"),
            (self.bad, "skipped as bad"),
            (self.held_out, "held out for evaluation"),
            (self.truncated, "truncated"),
            (self.too_long, "dropped as too long"),
            (self.audio_too_long, "dropped because their audio is too long"),
            (self.too_short, "dropped with fewer than two tokens"),
            (self.unsupervised, "dropped without a supervised token"),
            (self.unsupervised_by_truncation, "dropped because truncation left no supervised token"),
        ] {
            if count > 0 {
                write!(out, ", {count} {what}")?;
            }
        }
        Ok(())
    }
}

impl RowCounts {
    /// One line if a row was changed or dropped.
    pub fn warning(&self) -> Option<String> {
        (self.kept + self.held_out < self.read + self.split_off || self.truncated > 0)
            .then(|| format!("{self}, {} kept", self.kept))
    }
}

/// Statistics of the samples that were kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenStats {
    pub rows: RowCounts,
    pub tokens: u64,
    /// Positions that carry a loss, after the shift.
    pub supervised_tokens: u64,
    /// Tokens of kept rows that are in no sample.
    pub cut_tokens: u64,
    pub shortest_tokens: usize,
    pub mean_tokens: f64,
    pub longest_tokens: usize,
}

impl TokenStats {
    pub(super) fn empty(rows: RowCounts) -> TokenStats {
        TokenStats { rows, shortest_tokens: usize::MAX, ..TokenStats::default() }
    }

    /// Adds a sample; the mean is set at the end.
    pub(super) fn add_sample(&mut self, tokens: usize, supervised: usize) {
        self.tokens += tokens as u64;
        self.supervised_tokens += supervised as u64;
        self.shortest_tokens = self.shortest_tokens.min(tokens);
        self.longest_tokens = self.longest_tokens.max(tokens);
    }
}

/// One sample. Both lists have the same length, at least 2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    pub ids: Vec<i32>,
    /// Not shifted: `labels[t]` is what position t - 1 must predict.
    pub labels: Vec<i32>,
}

/// The file of a large set cannot be read during a run.
#[derive(Debug, Error)]
#[error("the tokens in `{}` cannot be read: {source}", path.display())]
pub struct ReadSampleError {
    pub path: PathBuf,
    pub source: io::Error,
}

/// The records of all samples.
#[derive(Debug)]
pub(super) enum Records {
    Memory(Vec<u8>),
    /// Open as long as the set exists, so the file may be deleted from its folder.
    File {
        file: File,
        path: PathBuf,
        first_byte: u64,
    },
}

/// A file that samples came from, and the first of these samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileOfSamples {
    /// Index in [`TokenSet::files`].
    pub file: usize,
    pub unit: RowUnit,
    pub first_sample: usize,
}

/// All samples of a data set.
#[derive(Debug)]
pub struct TokenSet {
    pub(super) records: Records,
    pub(super) form: LabelForm,
    pub(super) lengths: Vec<u32>,
    pub(super) supervised: Vec<u32>,
    /// Line or row of each sample in its file.
    pub(super) row_numbers: Vec<u32>,
    /// The start of every [`SAMPLES_OF_A_BLOCK`]th record; the starts between follow from lengths.
    pub(super) block_starts: Vec<u64>,
    /// The start of every record, used instead of `block_starts` by a set that has only some samples of its file.
    pub(super) starts: Option<Vec<u64>>,
    /// The first sample of each source.
    pub(super) sources: Vec<usize>,
    /// The files in reading order, and which of them samples came from.
    pub(super) files: Vec<PathBuf>,
    pub(super) files_of_samples: Vec<FileOfSamples>,
    pub(super) stats: TokenStats,
    /// `None` if no sample has audio.
    pub(super) clips: Option<SampleClips>,
    /// What rows are: each has `rows.sequences()` samples, one after the other.
    pub(super) rows: RowsNeeded,
    /// A number for each sample of rows that are compared: for pairs how many supervised tokens come before the
    /// completion, else the label or the reward. Empty for plain samples.
    pub(super) marks: Vec<f32>,
}

pub(super) const SAMPLES_OF_A_BLOCK: usize = 32;

impl TokenSet {
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Never true: a set without samples is refused when it is built.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Appends the tokens of a sample to `ids`, then calls `on_label` with the position and the label of each position
    /// that has one, including the first. Allocates only in `ids`.
    pub fn read(
        &self,
        index: usize,
        ids: &mut Vec<i32>,
        on_label: impl FnMut(usize, i32),
    ) -> Result<(), ReadSampleError> {
        let first = self.record_start(index);
        let length = self.lengths[index] as usize;
        match &self.records {
            Records::Memory(bytes) => {
                let record = &bytes[first as usize..first as usize + self.form.record_bytes(length) as usize];
                self.form.decode(record, length, ids, on_label);
                Ok(())
            }
            Records::File { file, path, first_byte } => self
                .form
                .decode_from(file, first_byte + first, length, ids, on_label)
                .map_err(|source| ReadSampleError { path: path.clone(), source }),
        }
    }

    /// A sample in buffers of its own, for callers that need only a few.
    pub fn sample(&self, index: usize) -> Result<Sample, ReadSampleError> {
        let mut ids = Vec::new();
        let mut labels = vec![NOT_SUPERVISED; self.lengths[index] as usize];
        self.read(index, &mut ids, |position, label| labels[position] = label)?;
        Ok(Sample { ids, labels })
    }

    /// Tokens of a sample.
    pub fn length(&self, index: usize) -> u32 {
        self.lengths[index]
    }

    /// Positions of a sample that carry a loss, after the shift.
    pub fn supervised(&self, index: usize) -> u32 {
        self.supervised[index]
    }

    /// What the rows of the set are.
    pub fn rows(&self) -> RowsNeeded {
        self.rows
    }

    /// Rows of the set; a row has one sample, or several that are compared.
    pub fn row_count(&self) -> usize {
        self.len() / self.rows.sequences()
    }

    /// The label or the reward of a sample; for pairs, how many of its supervised tokens come before the completion.
    pub fn mark(&self, index: usize) -> f32 {
        self.marks.get(index).copied().unwrap_or(0.0)
    }

    /// Tokens of the longest samples that stay in one micro-batch.
    pub fn longest_together(&self) -> usize {
        let sum = |lengths: &[u32]| lengths.iter().map(|length| *length as usize).sum();
        self.lengths.chunks(self.rows.together()).map(sum).max().unwrap_or(0)
    }

    /// Tokens of the longest prompt and the longest completion together.
    pub fn longest_mismatch(&self) -> usize {
        let prompts = self.lengths.iter().zip(&self.supervised).map(|(length, own)| length - own);
        (prompts.max().unwrap_or(0) + self.supervised.iter().max().unwrap_or(&0)) as usize
    }

    /// The sizes of these samples together.
    pub fn extent(&self, samples: impl IntoIterator<Item = u32>) -> Extent {
        samples.into_iter().fold(Extent::default(), |sum, sample| Extent {
            tokens: sum.tokens + self.lengths[sample as usize] as usize,
            rows: sum.rows + self.supervised[sample as usize] as usize,
            segments: sum.segments + 1,
            audio: sum.audio + self.clips.as_ref().map_or(0, |clips| clips.rows_of_sample(sample as usize)),
        })
    }

    /// `None` if no sample has audio.
    pub fn clips(&self) -> Option<&SampleClips> {
        self.clips.as_ref()
    }

    /// Tokens of the longest sample.
    pub fn longest(&self) -> usize {
        self.stats.longest_tokens
    }

    pub fn stats(&self) -> &TokenStats {
        &self.stats
    }

    /// Whether samples are read from a file during a run.
    pub fn is_on_disk(&self) -> bool {
        matches!(self.records, Records::File { .. })
    }

    /// The samples of each source.
    pub fn sources(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let ends = self.sources[1..].iter().copied().chain([self.len()]);
        self.sources.iter().zip(ends).map(|(&first, end)| first..end)
    }

    /// The row that a sample came from, for messages.
    pub fn place(&self, index: usize) -> RowPlace<'_> {
        let after = self.files_of_samples.partition_point(|file| file.first_sample <= index);
        let found = self.files_of_samples[after - 1];
        RowPlace {
            file: &self.files[found.file],
            unit: found.unit,
            number: u64::from(self.row_numbers[index]),
        }
    }

    /// Memory of the set. A set on disk has only lengths and counts in memory.
    pub fn heap_bytes(&self) -> usize {
        fn vec_bytes<T>(vec: &Vec<T>) -> usize {
            vec.capacity() * size_of::<T>()
        }
        let records = match &self.records {
            Records::Memory(bytes) => vec_bytes(bytes),
            Records::File { path, .. } => path.as_os_str().len(),
        };
        records
            + vec_bytes(&self.lengths)
            + vec_bytes(&self.supervised)
            + vec_bytes(&self.row_numbers)
            + vec_bytes(&self.block_starts)
            + self.starts.as_ref().map_or(0, vec_bytes)
            + vec_bytes(&self.files_of_samples)
            + vec_bytes(&self.files)
            + vec_bytes(&self.marks)
            + self.files.iter().map(|path| path.as_os_str().len()).sum::<usize>()
    }

    pub(super) fn record_start(&self, index: usize) -> u64 {
        if let Some(starts) = &self.starts {
            return starts[index];
        }
        let block = index / SAMPLES_OF_A_BLOCK;
        let before = &self.lengths[block * SAMPLES_OF_A_BLOCK..index];
        self.block_starts[block]
            + before.iter().map(|&length| self.form.record_bytes(length as usize)).sum::<u64>()
    }

    /// Records that the next sample comes from this file.
    pub(super) fn note_file(&mut self, file: &Path, unit: RowUnit) {
        if self.files.last().is_none_or(|path| path != file) {
            let (index, first_sample) = (self.files.len(), self.row_numbers.len());
            self.files_of_samples.push(FileOfSamples { file: index, unit, first_sample });
            self.files.push(file.to_path_buf());
        }
    }

    /// Computes the starts of all blocks from the lengths.
    pub(super) fn index_blocks(&mut self) {
        self.block_starts.clear();
        let mut start = 0;
        for block in self.lengths.chunks(SAMPLES_OF_A_BLOCK) {
            self.block_starts.push(start);
            start += block.iter().map(|&length| self.form.record_bytes(length as usize)).sum::<u64>();
        }
        self.block_starts.shrink_to_fit();
    }
}

/// The maximum of each dimension.
pub fn largest_extent(one: Extent, other: Extent) -> Extent {
    Extent {
        tokens: one.tokens.max(other.tokens),
        rows: one.rows.max(other.rows),
        segments: one.segments.max(other.segments),
        audio: one.audio.max(other.audio),
    }
}

/// The number of tokens of some samples, and how many of them are supervised.
pub fn token_and_row_count(set: &TokenSet, samples: impl IntoIterator<Item = u32>) -> (usize, usize) {
    let extent = set.extent(samples);
    (extent.tokens, extent.rows)
}
