//! The compact store of tokenized samples.
//!
//! The label of a position is the token at that position, `-100` is not supervised. Position t is
//! predicted from position t - 1, so the label at position 0 never counts.
//! All samples lie in flat vectors, 4 bytes a token for the ids and 4 for the labels; the labels take
//! nothing while every label equals its token.
//! What cannot train (too short, nothing supervised) is dropped and counted.
//! Leaves out files and the checks of a row (`token_row.rs`), tokenizing, and the shift by one itself (`micro_batch.rs`).

use std::fmt;
use std::path::PathBuf;

use crate::data::source::{RowPlace, RowUnit};
use crate::data::token_row::{TokensError, check_token_row};

/// The label of a position that carries no loss.
pub const NOT_SUPERVISED: i32 = -100;

/// What happens to a row of more than `max_tokens` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// Its first `max_tokens` tokens are kept.
    Truncate,
    Drop,
    Error,
}

/// What rows are held to.
#[derive(Clone, Copy, Debug)]
pub struct TokenLimits {
    pub vocab_size: u32,
    pub max_tokens: u32,
    pub overflow: Overflow,
}

/// What became of the rows; the fields but `read` and `truncated` add up to `read`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    pub read: u64,
    pub kept: u64,
    /// Kept rows that lost their end.
    pub truncated: u64,
    /// Dropped: more than `max_tokens` tokens, where `overflow` says so.
    pub too_long: u64,
    /// Dropped: no token or one.
    pub too_short: u64,
    /// Dropped: not one supervised token.
    pub unsupervised: u64,
    /// Dropped: all supervised tokens stood after `max_tokens`.
    pub unsupervised_by_truncation: u64,
}

impl fmt::Display for RowCounts {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} rows read", self.read)?;
        for (count, what) in [
            (self.truncated, "truncated"),
            (self.too_long, "dropped as too long"),
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
    /// One line when a row was changed or dropped, else nothing.
    pub fn warning(&self) -> Option<String> {
        (self.kept < self.read || self.truncated > 0).then(|| format!("{self}, {} kept", self.kept))
    }
}

/// Sizes of what was kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenStats {
    pub rows: RowCounts,
    pub tokens: u64,
    /// Positions that carry a loss, after the shift.
    pub supervised_tokens: u64,
    /// Tokens that truncation cut from kept rows.
    pub cut_tokens: u64,
    pub shortest_tokens: usize,
    pub mean_tokens: f64,
    pub longest_tokens: usize,
}

/// One row. Both slices have the same length, at least 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample<'a> {
    pub ids: &'a [i32],
    /// Not shifted: `labels[t]` is what position t - 1 has to predict.
    pub labels: &'a [i32],
}

/// All samples of a data set.
#[derive(Debug)]
pub struct TokenSet {
    ids: Vec<i32>,
    /// Empty when every label equals its id.
    labels: Vec<i32>,
    /// Sample i is `offsets[i]..offsets[i + 1]`.
    offsets: Vec<usize>,
    supervised: Vec<u32>,
    /// Line or row of each sample in its file.
    row_numbers: Vec<u32>,
    /// Files in reading order, with the first sample of each.
    files: Vec<(PathBuf, RowUnit, usize)>,
    stats: TokenStats,
}

impl TokenSet {
    pub fn len(&self) -> usize {
        self.supervised.len()
    }

    /// Never true: a set without samples is refused when it is built.
    pub fn is_empty(&self) -> bool {
        self.supervised.is_empty()
    }

    pub fn sample(&self, index: usize) -> Sample<'_> {
        let range = self.offsets[index]..self.offsets[index + 1];
        let ids = &self.ids[range.clone()];
        let labels = match self.labels.is_empty() {
            true => ids,
            false => &self.labels[range],
        };
        Sample { ids, labels }
    }

    /// Tokens of a sample.
    pub fn length(&self, index: usize) -> u32 {
        // `TokenSetBuilder::push` holds every sample to `max_tokens`, a u32.
        (self.offsets[index + 1] - self.offsets[index]) as u32
    }

    /// Positions of a sample that carry a loss, after the shift.
    pub fn supervised(&self, index: usize) -> u32 {
        self.supervised[index]
    }

    /// Tokens of the longest sample.
    pub fn longest(&self) -> usize {
        self.stats.longest_tokens
    }

    pub fn stats(&self) -> &TokenStats {
        &self.stats
    }

    /// Where a sample came from, for messages.
    pub fn place(&self, index: usize) -> RowPlace<'_> {
        let file = self.files.partition_point(|&(_, _, first_sample)| first_sample <= index);
        let (path, unit, _) = &self.files[file - 1];
        RowPlace { file: path, unit: *unit, number: u64::from(self.row_numbers[index]) }
    }

    pub fn heap_bytes(&self) -> usize {
        fn vec_bytes<T>(vec: &Vec<T>) -> usize {
            vec.capacity() * size_of::<T>()
        }
        vec_bytes(&self.ids)
            + vec_bytes(&self.labels)
            + vec_bytes(&self.offsets)
            + vec_bytes(&self.supervised)
            + vec_bytes(&self.row_numbers)
            + vec_bytes(&self.files)
            + self.files.iter().map(|(path, _, _)| path.as_os_str().len()).sum::<usize>()
    }
}

/// Takes rows one at a time; also the way in for rows that were tokenized here.
pub struct TokenSetBuilder {
    limits: TokenLimits,
    set: TokenSet,
    /// The first row that `Overflow::Error` refuses, and how many there are.
    first_too_long: Option<(String, usize)>,
    too_long: u64,
    longest_read: usize,
}

impl TokenSetBuilder {
    pub fn new(limits: TokenLimits) -> Self {
        TokenSetBuilder {
            limits,
            set: TokenSet {
                ids: Vec::new(),
                labels: Vec::new(),
                offsets: vec![0],
                supervised: Vec::new(),
                row_numbers: Vec::new(),
                files: Vec::new(),
                stats: TokenStats {
                    rows: RowCounts::default(),
                    tokens: 0,
                    supervised_tokens: 0,
                    cut_tokens: 0,
                    shortest_tokens: usize::MAX,
                    mean_tokens: 0.0,
                    longest_tokens: 0,
                },
            },
            first_too_long: None,
            too_long: 0,
            longest_read: 0,
        }
    }

    /// Checks a row, then keeps or drops it. Without labels every token is supervised.
    pub fn push(
        &mut self,
        place: RowPlace<'_>,
        ids: &[i64],
        labels: Option<&[i64]>,
    ) -> Result<(), TokensError> {
        check_token_row(self.limits.vocab_size, place, ids, labels)?;
        let rows = &mut self.set.stats.rows;
        rows.read += 1;
        self.longest_read = self.longest_read.max(ids.len());
        if ids.len() < 2 {
            rows.too_short += 1;
            return Ok(());
        }
        let max_tokens = self.limits.max_tokens as usize;
        let too_long = ids.len() > max_tokens;
        if too_long && self.limits.overflow != Overflow::Truncate {
            self.too_long += 1;
            rows.too_long += 1;
            if self.first_too_long.is_none() {
                self.first_too_long = Some((place.to_string(), ids.len()));
            }
            return Ok(());
        }
        let kept = ids.len().min(max_tokens);
        let count = |end: usize| -> usize {
            match labels {
                None => end.saturating_sub(1),
                Some(labels) => {
                    labels[..end].iter().skip(1).filter(|&&label| label != i64::from(NOT_SUPERVISED)).count()
                }
            }
        };
        let supervised = count(kept);
        if supervised == 0 {
            match too_long && count(ids.len()) > 0 {
                true => rows.unsupervised_by_truncation += 1,
                false => rows.unsupervised += 1,
            }
            return Ok(());
        }
        rows.kept += 1;
        rows.truncated += u64::from(too_long);
        self.store(place, &ids[..kept], labels.map(|labels| &labels[..kept]));
        let set = &mut self.set;
        set.supervised.push(supervised as u32);
        set.stats.tokens += kept as u64;
        set.stats.supervised_tokens += supervised as u64;
        set.stats.cut_tokens += (ids.len() - kept) as u64;
        set.stats.shortest_tokens = set.stats.shortest_tokens.min(kept);
        set.stats.longest_tokens = set.stats.longest_tokens.max(kept);
        Ok(())
    }

    pub fn finish(self) -> Result<TokenSet, TokensError> {
        let mut set = self.set;
        let rows = set.stats.rows;
        let max_tokens = self.limits.max_tokens;
        if let (Overflow::Error, Some((place, tokens))) = (self.limits.overflow, self.first_too_long) {
            return Err(TokensError::TooLong {
                place,
                tokens,
                max_tokens,
                rows: self.too_long,
                rows_read: rows.read,
                longest: self.longest_read,
            });
        }
        if rows.read == 0 {
            return Err(TokensError::NoRows);
        }
        if rows.kept == 0 {
            return Err(match rows.unsupervised + rows.unsupervised_by_truncation {
                0 => TokensError::NoRowsLeft { counts: rows, max_tokens, longest: self.longest_read },
                _ => TokensError::NothingSupervised { counts: rows, max_tokens },
            });
        }
        set.stats.mean_tokens = set.stats.tokens as f64 / rows.kept as f64;
        set.ids.shrink_to_fit();
        set.labels.shrink_to_fit();
        set.offsets.shrink_to_fit();
        set.supervised.shrink_to_fit();
        set.row_numbers.shrink_to_fit();
        set.files.shrink_to_fit();
        Ok(set)
    }

    /// Appends a checked row: every value fits an i32.
    fn store(&mut self, place: RowPlace<'_>, ids: &[i64], labels: Option<&[i64]>) {
        let set = &mut self.set;
        let labels = labels.unwrap_or(ids);
        if set.labels.is_empty() && labels != ids {
            set.labels.extend_from_slice(&set.ids);
        }
        // The first sample has no earlier ids to copy, so emptiness alone does not tell the two cases apart.
        if !set.labels.is_empty() || labels != ids {
            set.labels.extend(labels.iter().map(|&label| label as i32));
        }
        set.ids.extend(ids.iter().map(|&id| id as i32));
        set.offsets.push(set.ids.len());
        if !matches!(set.files.last(), Some((path, _, _)) if path == place.file) {
            let first_sample = set.row_numbers.len();
            set.files.push((place.file.to_path_buf(), place.unit, first_sample));
        }
        set.row_numbers.push(u32::try_from(place.number).unwrap_or(u32::MAX));
    }
}

/// Sets for the tests of what is built on them.
#[cfg(test)]
pub(crate) mod test_sets {
    use super::*;
    use std::path::Path;

    pub fn set_of_rows(rows: &[(Vec<i64>, Vec<i64>)]) -> TokenSet {
        let mut builder = TokenSetBuilder::new(TokenLimits {
            vocab_size: u32::MAX,
            max_tokens: u32::MAX,
            overflow: Overflow::Error,
        });
        for (row, (ids, labels)) in rows.iter().enumerate() {
            let place =
                RowPlace { file: Path::new("rows.jsonl"), unit: RowUnit::Line, number: row as u64 + 1 };
            builder.push(place, ids, Some(labels)).unwrap();
        }
        builder.finish().unwrap()
    }

    /// Every token supervised.
    pub fn set_of_lengths(lengths: &[usize]) -> TokenSet {
        let rows: Vec<_> = lengths.iter().map(|&length| (vec![0; length], vec![0; length])).collect();
        set_of_rows(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const LIMITS: TokenLimits = TokenLimits { vocab_size: 100, max_tokens: 8, overflow: Overflow::Truncate };

    fn place(number: u64) -> RowPlace<'static> {
        RowPlace { file: Path::new("a.jsonl"), unit: RowUnit::Line, number }
    }

    fn build(limits: TokenLimits, rows: &[(&[i64], Option<&[i64]>)]) -> Result<TokenSet, TokensError> {
        let mut builder = TokenSetBuilder::new(limits);
        for (row, (ids, labels)) in rows.iter().enumerate() {
            builder.push(place(row as u64 + 1), ids, *labels)?;
        }
        builder.finish()
    }

    #[test]
    fn samples_keep_ids_and_labels_whatever_the_order_of_masked_rows() {
        let plain: (&[i64], Option<&[i64]>) = (&[1, 2, 3], None);
        let masked: (&[i64], Option<&[i64]>) = (&[4, 5, 6, 7], Some(&[-100, -100, 6, 9]));
        for (rows, first_masked) in [([plain, masked], 1), ([masked, plain], 0)] {
            let set = build(LIMITS, &rows).unwrap();
            assert_eq!(set.len(), 2);
            let sample = set.sample(first_masked);
            assert_eq!(sample.ids, [4, 5, 6, 7]);
            assert_eq!(sample.labels, [-100, -100, 6, 9]);
            assert_eq!(set.supervised(first_masked), 2);
            let sample = set.sample(1 - first_masked);
            assert_eq!(sample.ids, [1, 2, 3]);
            assert_eq!(sample.labels, [1, 2, 3]);
            assert_eq!(set.supervised(1 - first_masked), 2);
            assert_eq!(set.length(first_masked), 4);
        }
    }

    #[test]
    fn labels_equal_to_ids_take_no_memory() {
        let set = build(LIMITS, &[(&[1, 2, 3], None), (&[4, 5], Some(&[4, 5]))]).unwrap();
        // 5 ids, 3 offsets, 2 counts, 2 row numbers, one file entry with its name.
        let file_bytes = size_of::<(PathBuf, RowUnit, usize)>() + "a.jsonl".len();
        assert_eq!(set.heap_bytes(), 5 * 4 + 3 * 8 + 2 * 4 + 2 * 4 + file_bytes);
        assert_eq!(set.sample(1).labels, [4, 5]);
    }

    #[test]
    fn the_first_label_never_counts() {
        let set = build(LIMITS, &[(&[1, 2, 3], Some(&[1, -100, 3])), (&[1, 2], Some(&[1, -100]))]).unwrap();
        assert_eq!(set.len(), 1);
        assert_eq!(set.supervised(0), 1);
        assert_eq!(set.stats().rows.unsupervised, 1);
    }

    #[test]
    fn rows_are_dropped_and_counted_by_reason() {
        let long: Vec<i64> = (0..12).collect();
        let late: Vec<i64> = (0..12).map(|t| if t < 8 { -100 } else { t }).collect();
        let set = build(
            LIMITS,
            &[
                (&[], None),
                (&[1], None),
                (&[1, 2], Some(&[-100, -100])),
                (&long, None),
                (&long, Some(&late)),
                (&[5, 6, 7], None),
            ],
        )
        .unwrap();
        let stats = set.stats();
        assert_eq!(
            stats.rows,
            RowCounts {
                read: 6,
                kept: 2,
                truncated: 1,
                too_long: 0,
                too_short: 2,
                unsupervised: 1,
                unsupervised_by_truncation: 1,
            }
        );
        assert_eq!((stats.tokens, stats.cut_tokens), (11, 4));
        assert_eq!(stats.supervised_tokens, 7 + 2);
        assert_eq!((stats.shortest_tokens, stats.longest_tokens), (3, 8));
        assert_eq!(stats.mean_tokens, 5.5);
        assert_eq!(set.sample(0).ids, [0, 1, 2, 3, 4, 5, 6, 7]);
        // Dropped rows shift the samples, not their places.
        assert_eq!(set.place(0).to_string(), "`a.jsonl` line 4");
        assert_eq!(set.place(1).to_string(), "`a.jsonl` line 6");
        assert_eq!(
            stats.rows.warning().unwrap(),
            "6 rows read, 1 truncated, 2 dropped with fewer than two tokens, \
             1 dropped without a supervised token, \
             1 dropped because truncation left no supervised token, 2 kept"
        );
    }

    #[test]
    fn a_clean_set_has_no_warning() {
        let set = build(LIMITS, &[(&[1, 2, 3, 4, 5, 6, 7, 8], None)]).unwrap();
        assert_eq!(set.stats().rows.warning(), None);
    }

    #[test]
    fn overflow_can_drop_or_refuse() {
        let long: Vec<i64> = (0..9).collect();
        let longer: Vec<i64> = (0..11).collect();
        let rows: [(&[i64], Option<&[i64]>); 3] = [(&[1, 2], None), (&long, None), (&longer, None)];
        let drop = TokenLimits { overflow: Overflow::Drop, ..LIMITS };
        let set = build(drop, &rows).unwrap();
        assert_eq!((set.len(), set.stats().rows.too_long), (1, 2));
        let refuse = TokenLimits { overflow: Overflow::Error, ..LIMITS };
        let error = build(refuse, &rows).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`a.jsonl` line 2 has 9 tokens, `data.max_tokens` is 8; 2 of 3 rows are longer"
        );
        assert!(error.hint().unwrap().starts_with("`data.max_tokens = 11`"));
        let error = build(drop, &rows[1..]).unwrap_err();
        assert_eq!(error.to_string(), "no rows left: 2 rows read, 2 dropped as too long");
        assert_eq!(error.hint().unwrap(), "`data.max_tokens = 11` keeps every row whole");
    }

    #[test]
    fn nothing_to_train_on_is_an_error_with_its_reason() {
        assert_eq!(build(LIMITS, &[]).unwrap_err().to_string(), "no rows");
        let error = build(LIMITS, &[(&[1], None)]).unwrap_err();
        assert!(matches!(error, TokensError::NoRowsLeft { .. }));
        assert!(error.hint().unwrap().contains("two tokens"));
        let error = build(LIMITS, &[(&[1, 2], Some(&[1, -100]))]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no supervised token anywhere: 1 rows read, 1 dropped without a supervised token"
        );
        assert!(error.hint().unwrap().contains("leave `labels` out"));
        let ids: Vec<i64> = (0..9).collect();
        let mut labels = vec![-100; 9];
        labels[8] = 8;
        let error = build(LIMITS, &[(&ids, Some(&labels))]).unwrap_err();
        assert_eq!(
            error.hint().unwrap(),
            "supervised tokens stand after position 8: raise `data.max_tokens`"
        );
    }

    #[test]
    fn values_are_held_to_the_vocabulary() {
        let said =
            |ids: &[i64], labels: Option<&[i64]>| build(LIMITS, &[(ids, labels)]).unwrap_err().to_string();
        assert_eq!(
            said(&[1, 100], None),
            "`a.jsonl` line 1: `input_ids[1]` is 100, the model's vocabulary is 0 to 99"
        );
        assert_eq!(
            said(&[-1, 1], None),
            "`a.jsonl` line 1: `input_ids[0]` is -1, the model's vocabulary is 0 to 99"
        );
        assert_eq!(said(&[1, 2], Some(&[1])), "`a.jsonl` line 1: `input_ids` has 2 entries, `labels` has 1");
        for label in [-1, 100, -101, 1 << 40] {
            assert_eq!(
                said(&[1, 2], Some(&[-100, label])),
                format!(
                    "`a.jsonl` line 1: `labels[1]` is {label}, neither -100 nor in the model's vocabulary 0 to 99"
                )
            );
        }
        assert!(build(LIMITS, &[(&[0, 99], Some(&[99, 0]))]).is_ok());
    }
}
