//! The checks of a row of tokens, and what can be wrong with tokenized data.
//!
//! Ids must be in the vocabulary, labels in the vocabulary or `-100`, one label for each id.
//! Such rows are read in `format.rs`, and valid ones stored in `token_builder.rs`, which uses the same error type.

use thiserror::Error;

use crate::clip_row::AudioRowError;
use crate::row_place::RowPlace;
use crate::token_record::NOT_SUPERVISED;
use crate::tokens::RowCounts;
use smidgen_formats::whole_file::WriteFileError;

/// What can be wrong with tokenized data.
#[derive(Debug, Error)]
pub enum TokensError {
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
    #[error("{place} {found}, and `train.objective` needs {needed}")]
    OtherRows { place: String, found: &'static str, needed: &'static str },
    #[error("{place} has {given} completions, and `train.num_generations` is {count}")]
    Answers { place: String, given: usize, count: usize },
    #[error("{place} has audio, and only text is compared")]
    AudioToCompare { place: String },
    #[error("all rows are labelled {label}: the other class is missing")]
    OneClass { label: bool },
    #[error(transparent)]
    Audio(#[from] AudioRowError),
    #[error("cannot store the tokens of a large data set: {0}")]
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
            TokensError::LengthsDiffer { .. } => {
                Some("`labels` needs one entry for each of `input_ids`, not shifted; leave it out to supervise every token".to_owned())
            }
            TokensError::IdOutside { .. } => {
                Some("tokenize the data with the tokenizer of this model".to_owned())
            }
            TokensError::LabelOutside { .. } => {
                Some("mark positions without a loss with -100".to_owned())
            }
            TokensError::OtherRows { .. } => Some(
                "`train.objective` is `sft` for samples, `dpo`, `orpo`, `cpo` or `simpo` for pairs, `kto` for labels, \
                 `grpo` for answers with rewards"
                    .to_owned(),
            ),
            TokensError::Answers { given, .. } => {
                Some(format!("write `train.num_generations = {given}`; every row has equally many"))
            }
            TokensError::AudioToCompare { .. } => Some("remove the row, or its audio".to_owned()),
            TokensError::OneClass { .. } => Some(
                "kto compares desirable with undesirable completions: add rows of the other class".to_owned(),
            ),
            TokensError::Audio(error) => error.hint(),
            TokensError::TooLong { longest, .. } => {
                Some(format!("`data.max_tokens = {longest}` keeps every row whole; `data.overflow = \"truncate\"` cuts longer rows, `\"drop\"` leaves them out"))
            }
            TokensError::Keep(_) => {
                Some("free some space, or set `SMIDGEN_CACHE` to a folder on a larger disk".to_owned())
            }
            TokensError::NoRows => Some("check `data.train` and `data.eval`: their files have no rows".to_owned()),
            TokensError::NoRowsLeft { counts, longest, .. } => Some(match counts.too_long {
                0 => "a row needs at least two tokens: one to predict the next from".to_owned(),
                _ => format!("`data.max_tokens = {longest}` keeps every row whole"),
            }),
            TokensError::NothingSupervised { counts, max_tokens } => Some(match counts.unsupervised_by_truncation {
                0 => "`labels` are -100 everywhere (the first position never counts): leave `labels` out to supervise every token".to_owned(),
                _ => format!("the supervised tokens come after position {max_tokens}: raise `data.max_tokens`"),
            }),
        }
    }
}

/// Checks that ids are in the vocabulary, labels in it or -100, and that there is one label for each id.
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
