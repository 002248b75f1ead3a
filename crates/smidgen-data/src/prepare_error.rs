//! What can go wrong between the files that a recipe names and a token set.
//!
//! The message and the hint are those of the stage that failed.

use std::io;
use std::path::PathBuf;

use smidgen_ir::words::LossOn;
use thiserror::Error;

use crate::format_error::FormatError;
use crate::mask::EncodeError;
use crate::source_error::SourceError;
use crate::template::TemplateError;
use crate::token_row::TokensError;
use crate::tokens::RowCounts;
use smidgen_formats::gguf::GgufError;
use smidgen_formats::tokenizer::TokenizerError;

const SKIP: &str = "`data.on_bad_row = \"skip\"` leaves bad rows out";

#[derive(Debug, Error)]
pub enum PrepareError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error(transparent)]
    Tokens(#[from] TokensError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// For rows of text, whose labels follow from `data.loss_on`.
    #[error("no supervised token anywhere: {counts}")]
    NoAnswers { counts: RowCounts, loss_on: LossOn },
    #[error("the rows are text, and {0}")]
    Tokenizer(TokenizerError),
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("`{}` cannot be read: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{place}: {error}")]
    Row { place: String, error: EncodeError },
    /// `all`: there is no other row.
    #[error("{report}")]
    BadRows { report: String, first: Box<PrepareError>, all: bool },
    /// One of several sources.
    #[error("`{name}`: no row can be trained on")]
    EmptySource { name: String },
}

impl PrepareError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            PrepareError::Source(error) => error.hint(),
            PrepareError::Format(error) => error.hint(),
            PrepareError::Tokens(error) => error.hint(),
            PrepareError::Template(error) => error.hint(),
            PrepareError::Row { error, .. } => error.hint(),
            PrepareError::Tokenizer(_) => {
                Some("rows of `tokens` (`input_ids`, `labels`) need no tokenizer".to_owned())
            }
            PrepareError::NoAnswers { loss_on, .. } => Some(format!(
                "no row has anything that `data.loss_on = {loss_on}` supervises; `smidgen preview` with \
                 `data.loss_on=all` shows the rows"
            )),
            PrepareError::BadRows { first, all, .. } => match (first.hint(), all) {
                (hint, true) => hint,
                (Some(hint), false) => Some(format!("{hint}; {SKIP}")),
                (None, false) => Some(SKIP.to_owned()),
            },
            PrepareError::EmptySource { .. } => {
                Some("leave the source out of `data.mix`, or fill its files".to_owned())
            }
            PrepareError::Gguf(_) | PrepareError::Read { .. } => None,
        }
    }

    /// Whether the error concerns one row only, so that other rows can still be used.
    pub(crate) fn is_of_one_row(&self) -> bool {
        match self {
            PrepareError::Format(error) => error.is_of_one_row(),
            PrepareError::Tokens(TokensError::Audio(error)) => error.is_of_one_row(),
            PrepareError::Tokens(error) => matches!(
                error,
                TokensError::LengthsDiffer { .. }
                    | TokensError::IdOutside { .. }
                    | TokensError::LabelOutside { .. }
            ),
            PrepareError::Row { error, .. } => !matches!(error, EncodeError::NoTemplate(_)),
            _ => false,
        }
    }
}
