//! What can be wrong with a row when it is tokenized: the message and a hint.
//!
//! The caller adds the place of the row.

use smidgen_ir::grouped_digits::Grouped;
use thiserror::Error;

use crate::template::TemplateError;
use smidgen_formats::tokenizer::TokenizerError;
use smidgen_formats::tokenizer::chat_template::ChatTemplateError;

/// Why a row cannot be tokenized. Messages of a conversation are counted from 1.
#[derive(Debug, Error)]
pub enum EncodeError {
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
    #[error(transparent)]
    NoTemplate(TemplateError),
    #[error("the row has {fields}, which the prompt `{template}` cannot render")]
    NoPlace { fields: &'static str, template: String },
    #[error("message {message}: the chat template does not render `{field}`")]
    NotRendered { message: usize, field: &'static str },
    #[error("message {message}: the chat template fails on a message with `{field}`: {error}")]
    FailsOn { message: usize, field: &'static str, error: ChatTemplateError },
    #[error(
        "message {message} has `weight` 0, but the chat template renders it differently when others follow, so its \
         tokens cannot be found"
    )]
    WeightNotFound { message: usize },
    #[error(
        "message {message} has `weight` 0, but it is a part of a completion, which carries a loss as a whole"
    )]
    WeightInCompletion { message: usize },
    #[error("the conversation has {messages} messages, at most {most} are supported")]
    TooManyMessages { messages: usize, most: usize },
    #[error("the row has {} bytes of text, at most {} are supported", Grouped(*bytes as u64), Grouped(*most as u64))]
    TooMuchText { bytes: usize, most: usize },
}

impl EncodeError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            EncodeError::NoTemplate(error) => return error.hint(),
            EncodeError::Tokenizer(_) | EncodeError::Template(_) => return None,
            EncodeError::NoPlace { .. } => {
                "use a chat template (`data.template`), write the text into `instruction`, or remove the field"
            }
            EncodeError::NotRendered { field, .. } | EncodeError::FailsOn { field, .. } => {
                return Some(format!(
                    "set `data.template` to a template that renders `{field}`, write it into `content` as the model \
                     should say it, or remove it"
                ));
            }
            EncodeError::WeightNotFound { .. } => {
                "use `data.loss_on = \"assistant\"` with a template without `{% generation %}` blocks, or end the \
                 conversation before the message"
            }
            EncodeError::WeightInCompletion { .. } => {
                "`data.loss_on = \"assistant\"` supervises the turns of the assistant one by one"
            }
            EncodeError::TooMuchText { .. } => "split the row into several",
            EncodeError::TooManyMessages { .. } => "split the conversation into several rows",
        };
        Some(hint.to_owned())
    }
}
