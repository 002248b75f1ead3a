//! What can be wrong with rows that are asked as questions, and with the choices that they offer.
//!
//! The message and the hint of an earlier stage are that stage's own. What is wrong with one row is said with its place.

use crate::format_error::FormatError;
use crate::mask::EncodeError;
use crate::source_error::SourceError;
use crate::template::TemplateError;
use crate::token_row::TokensError;
use smidgen_formats::tokenizer::TokenizerError;
use thiserror::Error;

/// With more different answers than this, a question is not multiple choice.
pub const MOST_ANSWERS: usize = 64;

#[derive(Debug, Error)]
pub enum QuestionError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error(transparent)]
    Tokens(#[from] TokensError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error("{place}: {error}")]
    Encode { place: String, error: EncodeError },
    #[error("{place}: {what}")]
    Row { place: String, what: String },
    #[error("the rows of `data.eval` are `{format}`, which have no question and no answer")]
    NoQuestions { format: String },
    #[error("`eval.answer` is not a regular expression: `{pattern}`: {reason}")]
    BrokenPattern { pattern: String, reason: String },
    #[error("`eval.answer`: `{pattern}` matches nothing at all everywhere")]
    EmptyPattern { pattern: String },
    #[error("{rows} rows of `data.eval` have {answers} different answers, a choice has at most {MOST_ANSWERS}")]
    TooManyAnswers { rows: usize, answers: usize },
    #[error("every row of `data.eval` has the same answer{answer}: there is nothing to choose")]
    OneAnswer { answer: String },
}

impl QuestionError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            QuestionError::Source(error) => return error.hint(),
            QuestionError::Format(error) => return error.hint(),
            QuestionError::Template(error) => return error.hint(),
            QuestionError::Encode { error, .. } => return error.hint(),
            QuestionError::Tokens(_)
            | QuestionError::Tokenizer(_)
            | QuestionError::Row { .. }
            | QuestionError::BrokenPattern { .. } => return None,
            QuestionError::NoQuestions { .. } => "`eval.task = \"loss\"` needs neither",
            QuestionError::EmptyPattern { .. } => {
                "a pattern such as `answer[1-4]` or `true|false` finds an answer"
            }
            QuestionError::TooManyAnswers { .. } => {
                "set `eval.answer` to a pattern that finds the answer in an output, such as `answer[1-4]`"
            }
            QuestionError::OneAnswer { .. } => "raise `eval.limit`, or look at `eval.answer`",
        };
        Some(hint.to_owned())
    }
}
