//! Splits a set in two: samples to train on, and samples that are held out for evaluation.
//!
//! Rows are held out whole, with all samples that were made of them, and a row of a file that is named twice counts
//! once, so no row is on both sides. The seed alone decides which rows are held out.
//! Records in memory are copied; if they are in a file, both sets read it.

use std::io;

use thiserror::Error;

use crate::permutation::{permute, seed_of_stream};
use crate::tokens::{FileOfSamples, Records, RowCounts, TokenSet, TokenStats};

/// A stream of random numbers that neither batches nor mixed sources use.
const SPLIT_STREAM: u64 = u64::MAX;

#[derive(Debug, Error)]
pub enum SplitError {
    #[error("`data.split = {share}` holds out {held_out} of {rows} rows, which leaves none to train on")]
    NothingToTrain { share: f64, held_out: usize, rows: usize },
    #[error("`data.split = {share}` leaves no row of source {source_number} to train on")]
    SourceEmpty { share: f64, source_number: usize },
    #[error("the tokens of a large data set cannot be opened again: {0}")]
    Open(#[from] io::Error),
}

impl TokenSet {
    /// The samples to train on, and those to evaluate: a share of the rows, rounded up.
    pub fn split(self, share: f64, seed: u64) -> Result<(TokenSet, TokenSet), SplitError> {
        let rows = self.rows_of_samples();
        let mut distinct = rows.clone();
        distinct.sort_unstable();
        distinct.dedup();
        // 1e-9 absorbs the rounding of the product, which must not hold out another row.
        let held_out = (share * distinct.len() as f64 - 1e-9).ceil().max(1.0) as usize;
        if held_out >= distinct.len() {
            return Err(SplitError::NothingToTrain { share, held_out, rows: distinct.len() });
        }
        let mut order = Vec::new();
        permute(&mut order, distinct.len() as u32, seed_of_stream(seed, SPLIT_STREAM), 0, true);
        let mut is_held_out = vec![false; distinct.len()];
        order[..held_out].iter().for_each(|&row| is_held_out[row as usize] = true);
        drop(order);
        let held_out_at =
            |sample: usize| distinct.binary_search(&rows[sample]).is_ok_and(|row| is_held_out[row]);
        let (eval, train): (Vec<u32>, Vec<u32>) =
            (0..self.len() as u32).partition(|&sample| held_out_at(sample as usize));
        for (number, source) in (1..).zip(self.sources()) {
            if source.clone().all(held_out_at) {
                return Err(SplitError::SourceEmpty { share, source_number: number });
            }
        }
        let rows_of = |samples: &[u32]| {
            let mut numbers: Vec<_> = samples.iter().map(|&sample| rows[sample as usize]).collect();
            numbers.dedup();
            numbers.len() as u64
        };
        let read = self.stats.rows;
        // The pieces of a row count as one row, but each sample of a conversation counts.
        let is_row = read.chunked == 0 && self.rows.sequences() == 1;
        let eval_rows = if is_row { eval.len() as u64 } else { rows_of(&eval) };
        let of_eval = RowCounts { read: eval_rows, kept: eval_rows, ..RowCounts::default() };
        let of_train = RowCounts { held_out: eval_rows, kept: read.kept.saturating_sub(eval_rows), ..read };
        let mut train_set = self.subset(&train, of_train)?;
        train_set.stats.cut_tokens = self.stats.cut_tokens;
        train_set.sources = self
            .sources()
            .map(|source| train.partition_point(|&sample| (sample as usize) < source.start))
            .collect();
        Ok((train_set, self.subset(&eval, of_eval)?))
    }

    /// File and row of each sample; a file that is listed again has the number of its first occurrence.
    fn rows_of_samples(&self) -> Vec<(u32, u32)> {
        let first_of =
            |file: usize| self.files.iter().position(|path| *path == self.files[file]).unwrap_or(file) as u32;
        let mut rows = Vec::with_capacity(self.len());
        for (index, of_file) in self.files_of_samples.iter().enumerate() {
            let end = self.files_of_samples.get(index + 1).map_or(self.len(), |next| next.first_sample);
            let file = first_of(of_file.file);
            rows.extend(self.row_numbers[of_file.first_sample..end].iter().map(|&number| (file, number)));
        }
        rows
    }

    /// A set of the given samples, in order.
    fn subset(&self, samples: &[u32], rows: RowCounts) -> Result<TokenSet, SplitError> {
        let pick = |from: &[u32]| samples.iter().map(|&sample| from[sample as usize]).collect::<Vec<u32>>();
        let mut set = TokenSet {
            records: Records::Memory(Vec::new()),
            form: self.form,
            lengths: pick(&self.lengths),
            supervised: pick(&self.supervised),
            row_numbers: Vec::with_capacity(samples.len()),
            block_starts: Vec::new(),
            starts: None,
            sources: vec![0],
            files: Vec::new(),
            files_of_samples: Vec::new(),
            stats: TokenStats::empty(rows),
            clips: self.clips.as_ref().map(|clips| clips.subset(samples)),
            rows: self.rows,
            marks: samples.iter().filter_map(|&sample| self.marks.get(sample as usize).copied()).collect(),
        };
        for &sample in samples {
            let sample = sample as usize;
            let after = self.files_of_samples.partition_point(|file| file.first_sample <= sample);
            let FileOfSamples { file, unit, .. } = self.files_of_samples[after - 1];
            set.note_file(&self.files[file], unit);
            set.row_numbers.push(self.row_numbers[sample]);
            set.stats.add_sample(self.lengths[sample] as usize, self.supervised[sample] as usize);
        }
        set.stats.mean_tokens = set.stats.tokens as f64 / samples.len() as f64;
        set.records = match &self.records {
            Records::Memory(bytes) => {
                let mut records = Vec::new();
                for &sample in samples {
                    let first = self.record_start(sample as usize) as usize;
                    let length = self.form.record_bytes(self.lengths[sample as usize] as usize) as usize;
                    records.extend_from_slice(&bytes[first..first + length]);
                }
                set.index_blocks();
                Records::Memory(records)
            }
            Records::File { file, path, first_byte } => {
                let starts = samples.iter().map(|&sample| self.record_start(sample as usize));
                set.starts = Some(starts.collect());
                Records::File { file: file.try_clone()?, path: path.clone(), first_byte: *first_byte }
            }
        };
        Ok(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row_place::{RowPlace, RowUnit};
    use crate::token_builder::TokenSetBuilder;
    use crate::token_file::{open_set, write_set};
    use crate::tokens::TokenLimits;
    use serde_json::Value as Json;
    use smidgen_ir::words::Overflow;
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    /// Rows of three to six tokens from these files; rows above four tokens are two samples.
    fn set(files: &[&str], rows: u64) -> TokenSet {
        let limits = TokenLimits { vocab_size: 1000, max_tokens: 4, overflow: Overflow::Chunk };
        let mut builder = TokenSetBuilder::new(limits);
        for file in files {
            builder.begin_source(Overflow::Chunk);
            for number in 1..=rows {
                let ids: Vec<i64> =
                    (0..3 + number as i64 % 4).map(|token| 10 * number as i64 + token).collect();
                let place = RowPlace { file: Path::new(file), unit: RowUnit::Line, number };
                builder.push(place, &ids, None).unwrap();
            }
        }
        builder.finish().unwrap()
    }

    fn places(set: &TokenSet) -> BTreeSet<String> {
        (0..set.len()).map(|sample| set.place(sample).to_string()).collect()
    }

    fn tokens(set: &TokenSet) -> Vec<Vec<i32>> {
        (0..set.len()).map(|sample| set.sample(sample).unwrap().ids).collect()
    }

    #[test]
    fn no_row_is_on_both_sides_and_none_is_lost() {
        let whole = set(&["a.jsonl", "b.jsonl"], 20);
        let all = places(&whole);
        let mut samples = tokens(&whole);
        let (train, eval) = whole.split(0.1, 7).unwrap();
        assert_eq!(places(&eval).len(), 4);
        assert!(places(&train).is_disjoint(&places(&eval)));
        assert_eq!(&places(&train) | &places(&eval), all);
        let mut split = [tokens(&train), tokens(&eval)].concat();
        samples.sort();
        split.sort();
        assert_eq!(split, samples);
        let rows = train.stats().rows;
        assert_eq!((rows.read, rows.kept, rows.held_out, eval.stats().rows.kept), (40, 36, 4, 4));
        let sources: Vec<_> = train.sources().collect();
        assert_eq!((sources.len(), sources[1].end), (2, train.len()));
        assert_eq!(train.place(sources[1].start).file, Path::new("b.jsonl"));
        assert_ne!(train.place(sources[1].start - 1).file, Path::new("b.jsonl"));
        let total: u64 = [&train, &eval].iter().map(|set| set.stats().tokens).sum();
        assert_eq!(total, tokens(&set(&["a.jsonl", "b.jsonl"], 20)).concat().len() as u64);
    }

    #[test]
    fn a_file_that_is_named_twice_is_split_once() {
        let (train, eval) = set(&["a.jsonl", "b.jsonl", "a.jsonl"], 10).split(0.3, 1).unwrap();
        assert!(places(&train).is_disjoint(&places(&eval)));
        assert_eq!(places(&eval).len(), 6);
    }

    #[test]
    fn the_seed_decides_and_the_share_is_rounded_up() {
        let held_out = |rows, share, seed| places(&set(&["a.jsonl"], rows).split(share, seed).unwrap().1);
        assert_eq!(held_out(20, 0.25, 5), held_out(20, 0.25, 5));
        assert_ne!(held_out(20, 0.25, 5), held_out(20, 0.25, 6));
        assert_eq!(held_out(20, 0.05, 5).len(), 1);
        assert_eq!(held_out(30, 0.1, 5).len(), 3);
        assert_eq!(held_out(7, 0.1, 5).len(), 1);
        let error = set(&["a.jsonl"], 1).split(0.1, 1).unwrap_err().to_string();
        assert_eq!(error, "`data.split = 0.1` holds out 1 of 1 rows, which leaves none to train on");
    }

    #[test]
    fn a_set_in_a_file_is_split_like_one_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("set");
        let files = ["a.jsonl", "b.jsonl"].map(PathBuf::from);
        let in_memory = set(&["a.jsonl", "b.jsonl"], 40);
        write_set(&path, &in_memory, &files, &Json::Null).unwrap();
        let on_disk = open_set(&path, &files, 0).unwrap().0;
        assert!(on_disk.is_on_disk());
        let (train, eval) = in_memory.split(0.2, 3).unwrap();
        let (train_on_disk, eval_on_disk) = on_disk.split(0.2, 3).unwrap();
        assert_eq!(tokens(&train), tokens(&train_on_disk));
        assert_eq!(tokens(&eval), tokens(&eval_on_disk));
        assert_eq!(train.stats(), train_on_disk.stats());
        assert_eq!(places(&eval), places(&eval_on_disk));
    }
}
