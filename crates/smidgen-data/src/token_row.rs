//! `tokens` rows on disk: `{"input_ids": [...], "labels": [...]}`, from any kind of data file; JSON is parsed into them directly.
//!
//! `labels` may be missing or null (then every token is supervised), other fields are ignored.
//! A value of the wrong type is reported with its line, its column and the field it stands in.
//! The numbers are held to the vocabulary here; what becomes of a sound row is the store's business
//! (`tokens.rs`), whose errors are listed here too so that reading a data set has one error type.

use std::fmt;
use std::path::PathBuf;

use serde::de::{Deserialize, DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use thiserror::Error;

use crate::source::{RowPlace, SourceError, read_rows};
use crate::token_builder::TokenSetBuilder;
use crate::tokens::{NOT_SUPERVISED, RowCounts, TokenLimits, TokenSet};
use smidgen_formats::whole_file::WriteFileError;

/// Reads `tokens` rows from files, in order, into one set.
pub fn read_token_set(files: &[PathBuf], limits: TokenLimits) -> Result<TokenSet, TokensError> {
    let mut builder = TokenSetBuilder::new(limits);
    for file in files {
        read_rows(file, |place, row: TokenRow| {
            let Some(ids) = row.input_ids else {
                return Err(TokensError::MissingIds { place: place.to_string() });
            };
            builder.push(place, &ids, row.labels.as_deref())
        })?;
    }
    builder.finish()
}

/// What can be wrong with tokenized data.
#[derive(Debug, Error)]
pub enum TokensError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error("{place}: `input_ids` is missing")]
    MissingIds { place: String },
    #[error("{place}: `input_ids` has {ids} entries, `labels` has {labels}")]
    LengthsDiffer { place: String, ids: usize, labels: usize },
    #[error("{place}: `input_ids[{index}]` is {value}, the model's vocabulary is 0 to {}", i64::from(*vocab_size) - 1)]
    IdOutside { place: String, index: usize, value: i64, vocab_size: u32 },
    #[error("{place}: `labels[{index}]` is {value}, neither -100 nor in the model's vocabulary 0 to {}", i64::from(*vocab_size) - 1)]
    LabelOutside { place: String, index: usize, value: i64, vocab_size: u32 },
    #[error(
        "{place} has {tokens} tokens, `data.max_tokens` is {max_tokens}; {rows} of {rows_read} rows are longer"
    )]
    TooLong { place: String, tokens: usize, max_tokens: u32, rows: u64, rows_read: u64, longest: usize },
    #[error("the tokens of a large data set are kept in a file: {0}")]
    Keep(#[from] WriteFileError),
    #[error("no rows")]
    NoRows,
    #[error("no rows left: {counts}")]
    NoRowsLeft { counts: RowCounts, max_tokens: u32, longest: usize },
    #[error("no supervised token anywhere: {counts}")]
    NothingSupervised { counts: RowCounts, max_tokens: u32 },
}

impl TokensError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            TokensError::Source(source) => source.hint(),
            TokensError::MissingIds { .. } => {
                Some("a `tokens` row is `{\"input_ids\": [...], \"labels\": [...]}`; rows of text need another `data.format`".to_owned())
            }
            TokensError::LengthsDiffer { .. } => {
                Some("`labels` has one entry for each of `input_ids`, not shifted; leave it out to supervise every token".to_owned())
            }
            TokensError::IdOutside { .. } => {
                Some("tokenize the data with the tokenizer of this model".to_owned())
            }
            TokensError::LabelOutside { .. } => {
                Some("mark positions without a loss by -100".to_owned())
            }
            TokensError::TooLong { longest, .. } => {
                Some(format!("`data.max_tokens = {longest}` keeps every row whole; `data.overflow = \"truncate\"` or `\"drop\"` accepts the loss"))
            }
            TokensError::Keep(_) => {
                Some("free some space, or set `SMIDGEN_CACHE` to a folder on a larger disk".to_owned())
            }
            TokensError::NoRows => Some("check `data.train` and `data.eval`: their files hold no row".to_owned()),
            TokensError::NoRowsLeft { counts, longest, .. } => Some(match counts.too_long {
                0 => "a row needs two tokens at least: one to predict the next from".to_owned(),
                _ => format!("`data.max_tokens = {longest}` keeps every row whole"),
            }),
            TokensError::NothingSupervised { counts, max_tokens } => Some(match counts.unsupervised_by_truncation {
                0 => "`labels` are -100 everywhere (the first position never counts): leave `labels` out to supervise every token".to_owned(),
                _ => format!("supervised tokens stand after position {max_tokens}: raise `data.max_tokens`"),
            }),
        }
    }
}

/// Holds a row to the vocabulary: ids in it, labels in it or -100, one label for each id.
pub fn check_token_row(
    vocab_size: u32,
    place: RowPlace<'_>,
    ids: &[i64],
    labels: Option<&[i64]>,
) -> Result<(), TokensError> {
    // Ids are stored as i32, so a vocabulary never reaches beyond it.
    let vocab_size = vocab_size.min(i32::MAX as u32);
    let vocabulary = 0..i64::from(vocab_size);
    if let Some((index, &value)) = ids.iter().enumerate().find(|(_, id)| !vocabulary.contains(id)) {
        return Err(TokensError::IdOutside { place: place.to_string(), index, value, vocab_size });
    }
    let Some(labels) = labels else {
        return Ok(());
    };
    if labels.len() != ids.len() {
        return Err(TokensError::LengthsDiffer {
            place: place.to_string(),
            ids: ids.len(),
            labels: labels.len(),
        });
    }
    match labels
        .iter()
        .enumerate()
        .find(|&(_, label)| *label != i64::from(NOT_SUPERVISED) && !vocabulary.contains(label))
    {
        None => Ok(()),
        Some((index, &value)) => {
            Err(TokensError::LabelOutside { place: place.to_string(), index, value, vocab_size })
        }
    }
}

/// A row as it is written. Fields of other names (`attention_mask`, ...) are ignored.
struct TokenRow {
    input_ids: Option<Vec<i64>>,
    labels: Option<Vec<i64>>,
}

impl<'de> Deserialize<'de> for TokenRow {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TokenRowVisitor)
    }
}

/// Written out because a derived one would also take an array for a row.
struct TokenRowVisitor;

impl<'de> Visitor<'de> for TokenRowVisitor {
    type Value = TokenRow;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object with `input_ids`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<TokenRow, A::Error> {
        let (mut input_ids, mut labels) = (None, None);
        while let Some(name) = fields.next_key::<String>()? {
            let (field, value) = match name.as_str() {
                "input_ids" => ("input_ids", &mut input_ids),
                "labels" => ("labels", &mut labels),
                _ => {
                    fields.next_value::<serde::de::IgnoredAny>()?;
                    continue;
                }
            };
            if value.is_some() {
                return Err(A::Error::duplicate_field(field));
            }
            *value = fields.next_value_seed(WholeNumbers(field))?;
        }
        Ok(TokenRow { input_ids, labels })
    }
}

/// An array of integers or `null`, with the field's name in the complaint.
struct WholeNumbers(&'static str);

impl<'de> DeserializeSeed<'de> for WholeNumbers {
    type Value = Option<Vec<i64>>;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for WholeNumbers {
    type Value = Option<Vec<i64>>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "`{}` to be an array of whole numbers", self.0)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut numbers = Vec::new();
        while let Some(number) = entries.next_element_seed(WholeNumber(self.0))? {
            numbers.push(number);
        }
        Ok(Some(numbers))
    }
}

struct WholeNumber(&'static str);

impl<'de> DeserializeSeed<'de> for WholeNumber {
    type Value = i64;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<i64, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Visitor<'_> for WholeNumber {
    type Value = i64;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "a whole number in `{}`", self.0)
    }

    fn visit_i64<E>(self, number: i64) -> Result<i64, E> {
        Ok(number)
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<i64, E> {
        i64::try_from(number).map_err(|_| E::invalid_value(serde::de::Unexpected::Unsigned(number), &self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::Overflow;

    const LIMITS: TokenLimits =
        TokenLimits { vocab_size: 100, max_tokens: 1024, overflow: Overflow::Truncate };

    fn read(files: &[(&str, &str)]) -> Result<TokenSet, String> {
        let folder = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = files
            .iter()
            .map(|(name, text)| {
                let path = folder.path().join(name);
                std::fs::write(&path, text).unwrap();
                path
            })
            .collect();
        read_token_set(&paths, LIMITS)
            .map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))
    }

    fn said(text: &str) -> String {
        read(&[("a.jsonl", text)]).unwrap_err()
    }

    #[test]
    fn both_file_formats_and_several_files_make_one_set() {
        let set = read(&[
            (
                "a.jsonl",
                "{\"input_ids\": [1, 2], \"attention_mask\": [1, 1], \"labels\": null}\n\n{\"labels\": [-100, 4], \"input_ids\": [3, 4]}\n",
            ),
            ("b.json", "[{\"input_ids\": [5, 6, 7], \"note\": {\"a\": [1.5]}}]"),
        ])
        .unwrap();
        let samples: Vec<_> = (0..set.len())
            .map(|index| set.sample(index).unwrap())
            .map(|sample| (sample.ids, sample.labels))
            .collect();
        assert_eq!(
            samples,
            [(vec![1, 2], vec![1, 2]), (vec![3, 4], vec![-100, 4]), (vec![5, 6, 7], vec![5, 6, 7]),]
        );
        assert!(set.place(1).to_string().ends_with("a.jsonl` line 3"));
        assert!(set.place(2).to_string().ends_with("b.json` row 1"));
    }

    #[test]
    fn wrong_types_name_the_field_the_line_and_the_column() {
        assert_eq!(
            said("{\"input_ids\": [1, \"2\"]}"),
            "`a.jsonl` line 1, column 21: invalid type: string \"2\", expected a whole number in `input_ids`"
        );
        assert_eq!(
            said("{\"input_ids\": [1, 2], \"labels\": [1, 2.5]}"),
            "`a.jsonl` line 1, column 39: invalid type: floating point `2.5`, expected a whole number in `labels`"
        );
        assert_eq!(
            said("\n{\"input_ids\": 7}"),
            "`a.jsonl` line 2, column 15: invalid type: integer `7`, expected `input_ids` to be an array of whole numbers"
        );
        assert_eq!(
            said("{\"input_ids\": [18446744073709551615]}"),
            "`a.jsonl` line 1, column 35: invalid value: integer `18446744073709551615`, expected a whole number in `input_ids`"
        );
        assert_eq!(
            said("7"),
            "`a.jsonl` line 1, column 1: invalid type: integer `7`, expected an object with `input_ids`"
        );
        assert_eq!(
            read(&[("a.json", "[{\"input_ids\": [1, 2]},\n [[1, 2], [1, 2]]]")]).unwrap_err(),
            "`a.json` row 2 (line 2, column 2): invalid type: sequence, expected an object with `input_ids`"
        );
        assert!(said("{\"input_ids\": [1], \"input_ids\": [2]}").contains("duplicate field `input_ids`"));
    }

    #[test]
    fn broken_and_incomplete_rows_are_named() {
        assert_eq!(
            said("{\"input_ids\": [1, 2]}\n{\"input_ids\": [1, 2}\n"),
            "`a.jsonl` line 2, column 20: broken JSON: expected `,` or `]`"
        );
        assert_eq!(
            said("{\"input_ids\": [1, 2]}\n{\"input_ids\": [1, 2"),
            "`a.jsonl` line 2, column 19: broken JSON: EOF while parsing a list"
        );
        assert_eq!(said("{\"labels\": [1, 2]}"), "`a.jsonl` line 1: `input_ids` is missing");
        assert_eq!(
            read(&[("a.json", "[{\"input_ids\": [1, 2]}, {\"input_ids\": [1, 200]}]")]).unwrap_err(),
            "`a.json` row 2: `input_ids[1]` is 200, the model's vocabulary is 0 to 99"
        );
        assert_eq!(said("\n"), "no rows");
        assert_eq!(read(&[("a.json", "[]")]).unwrap_err(), "no rows");
    }
}
