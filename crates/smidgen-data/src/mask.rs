//! One row as tokens, and which of them are supervised.
//!
//! The rules are those of TRL's supervised fine-tuning: a completion begins where the tokens of the whole row first
//! differ from those of the prompt alone; texts are tokenized with the tokenizer's own special tokens and end with EOS;
//! conversations are tokenized as the template renders them, which adds its own special tokens.
//! A turn of the assistant is what the template marks as generated, or else what rendering one more message adds to
//! the conversation; it is never searched for in the text.
//! Leaves out cutting to a length, and rows that are tokens already.

use std::collections::HashSet;
use std::ops::Range;

use serde_json::Value as Json;
use thiserror::Error;

use crate::example::{Conversation, Example};
use crate::template::{DataTemplate, TemplateError, TemplateKind, data_moment};
use smidgen_formats::tokenizer::chat_template::{ChatInput, ChatTemplate, ChatTemplateError, Rendered};
use smidgen_formats::tokenizer::{Tokenizer, TokenizerError};
use smidgen_ir::words::LossOn;

#[derive(Debug, Error)]
pub enum EncodeError {
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
    #[error(transparent)]
    NoTemplate(TemplateError),
    #[error(
        "message {message}: the template renders the conversation up to here differently than the whole one, \
         so the assistant's turns cannot be found"
    )]
    NotPrefixes {
        /// From 1.
        message: usize,
    },
}

impl EncodeError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            EncodeError::NoTemplate(error) => error.hint(),
            EncodeError::NotPrefixes { .. } => Some(
                "use a template with `{% generation %}` blocks: a built-in one, such as `data.template = \
                 \"chatml\"`, or a `.jinja` file; or `data.loss_on = \"completion\"`"
                    .to_owned(),
            ),
            EncodeError::Tokenizer(_) | EncodeError::Template(_) => None,
        }
    }
}

/// Whether a row teaches where to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnEnd {
    /// The last thing supervised is a special token.
    Supervised,
    /// A special token follows what is supervised.
    NotSupervised,
    /// There is none.
    Missing,
}

/// A row as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedRow {
    pub ids: Vec<i64>,
    /// Supervised tokens: ranges in order, apart from each other.
    pub spans: Vec<Range<usize>>,
    /// The whole row does not begin with the tokens of the prompt alone.
    pub prompt_differs: bool,
    pub turn_end: TurnEnd,
    pub bos_doubled: bool,
}

/// Turns rows into tokens; shared by threads.
#[derive(Debug)]
pub struct RowEncoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<&'a DataTemplate>,
    loss_on: LossOn,
    eos: Option<String>,
    /// Tokens that can end a turn.
    special: HashSet<u32>,
}

impl<'a> RowEncoder<'a> {
    pub fn new(
        tokenizer: &'a Tokenizer,
        template: Option<&'a DataTemplate>,
        loss_on: LossOn,
    ) -> RowEncoder<'a> {
        let ids = tokenizer.special_ids();
        // BOS and the unknown token end nothing.
        let ends = |id: &u32| ids.eos == Some(*id) || ![ids.bos, ids.unk].contains(&Some(*id));
        let special = tokenizer.special_token_ids().into_iter().filter(ends).collect();
        let eos = ids.eos.and_then(|id| tokenizer.token(id));
        RowEncoder { tokenizer, template, loss_on, eos, special }
    }

    /// # Panics
    /// For a row of tokens, which needs no encoding.
    pub fn encode(&self, example: &Example) -> Result<EncodedRow, EncodeError> {
        let (ids, spans, prompt_differs) = match (example, self.template.map(|template| &template.kind)) {
            (Example::Tokens { .. }, _) => panic!("a row of tokens has its ids already"),
            (Example::Text(text), _) => {
                let ids = self.tokenizer.encode(&self.with_eos(text), true)?;
                let all = 0..ids.len();
                (ids, vec![all], false)
            }
            (Example::PromptCompletion { prompt, completion }, _) => self.encode_pair(prompt, completion)?,
            (Example::Alpaca { instruction, input, output }, Some(TemplateKind::Text(prompt))) => {
                self.encode_pair(&prompt.render(instruction, input.as_deref()), output)?
            }
            (Example::Alpaca { instruction, input, output }, Some(TemplateKind::Chat(template))) => {
                let conversation = Conversation::of_instruction(instruction, input.as_deref(), output);
                self.encode_conversation(template, &conversation)?
            }
            (Example::Chat(conversation), Some(TemplateKind::Chat(template))) => {
                self.encode_conversation(template, conversation)?
            }
            (Example::Chat(_), Some(TemplateKind::Text(_))) => {
                let name = self.template.map(|template| template.name.clone()).unwrap_or_default();
                return Err(EncodeError::NoTemplate(TemplateError::TextForChat { name }));
            }
            (Example::Chat(_) | Example::Alpaca { .. }, None) => {
                return Err(EncodeError::NoTemplate(TemplateError::ModelHasNone));
            }
        };
        let bos = self.tokenizer.special_ids().bos;
        Ok(EncodedRow {
            turn_end: self.turn_end(&ids, &spans),
            bos_doubled: bos.is_some_and(|bos| ids.starts_with(&[bos, bos])),
            ids: ids.into_iter().map(i64::from).collect(),
            spans,
            prompt_differs,
        })
    }

    fn with_eos(&self, text: &str) -> String {
        match &self.eos {
            Some(eos) if !text.ends_with(eos.as_str()) => format!("{text}{eos}"),
            _ => text.to_owned(),
        }
    }

    fn encode_pair(&self, prompt: &str, completion: &str) -> Result<Encoded, EncodeError> {
        let whole = format!("{prompt}{}", self.with_eos(completion));
        let ids = self.tokenizer.encode(&whole, true)?;
        match self.loss_on {
            LossOn::All => Ok(all_of(ids)),
            LossOn::Completion | LossOn::Assistant => {
                let prompt = self.tokenizer.encode(prompt, true)?;
                Ok(behind_prompt(ids, &prompt))
            }
        }
    }

    fn encode_conversation(
        &self,
        template: &ChatTemplate,
        conversation: &Conversation,
    ) -> Result<Encoded, EncodeError> {
        let render = |messages: usize, add_generation_prompt: bool| -> Result<Rendered, ChatTemplateError> {
            let messages = Json::from(&conversation.messages[..messages]);
            template.render(&ChatInput {
                tools: conversation.tools.as_ref(),
                more: Some(&conversation.more),
                add_generation_prompt,
                ..ChatInput::new(&messages, data_moment())
            })
        };
        let all = conversation.messages.len();
        let is_assistant = |message: &usize| conversation.messages[*message]["role"] == "assistant";
        match self.loss_on {
            LossOn::All => Ok(all_of(self.tokenizer.encode(&render(all, false)?.text, false)?)),
            LossOn::Completion => {
                let (prompt, end) = match conversation.prompt_messages {
                    Some(prompt) => (prompt, all),
                    None => match (0..all).rev().find(is_assistant) {
                        // What comes after the last answer does not change the answer.
                        Some(answer) => (answer, answer + 1),
                        None => {
                            let ids = self.tokenizer.encode(&render(all, false)?.text, false)?;
                            return Ok((ids, vec![], false));
                        }
                    },
                };
                let prompt = self.tokenizer.encode(&render(prompt, true)?.text, false)?;
                let ids = self.tokenizer.encode(&render(end, false)?.text, false)?;
                Ok(behind_prompt(ids, &prompt))
            }
            LossOn::Assistant => {
                let whole = render(all, false)?;
                let turns = match template.marks_generation() {
                    true => whole.generated,
                    false => {
                        let mut turns = Vec::new();
                        for message in (0..all).filter(is_assistant) {
                            let before = render(message, true)?.text;
                            let with = render(message + 1, false)?.text;
                            if !with.starts_with(&before) || !whole.text.starts_with(&with) {
                                return Err(EncodeError::NotPrefixes { message: message + 1 });
                            }
                            turns.push(before.len()..with.len());
                        }
                        turns
                    }
                };
                let (ids, ranges) = self.tokenizer.encode_with_ranges(&whole.text, false)?;
                let spans = tokens_of_turns(&ranges, &turns);
                Ok((ids, spans, false))
            }
        }
    }

    fn turn_end(&self, ids: &[u32], spans: &[Range<usize>]) -> TurnEnd {
        let Some(last) = spans.last() else { return TurnEnd::Missing };
        let meaningful = ids[last.clone()].iter().rev().find(|id| !self.is_space(**id));
        match (meaningful, ids.get(last.end)) {
            (Some(id), _) if self.special.contains(id) => TurnEnd::Supervised,
            (_, Some(next)) if self.special.contains(next) => TurnEnd::NotSupervised,
            _ => TurnEnd::Missing,
        }
    }

    /// White space, as vocabularies spell it.
    fn is_space(&self, id: u32) -> bool {
        const SPACES: &[char] = &[' ', '\n', '\t', '\r', '▁', 'Ġ', 'Ċ', 'ĉ', 'č'];
        let Some(token) = self.tokenizer.token(id) else { return false };
        token == "<0x0A>" || token.chars().all(|sign| SPACES.contains(&sign))
    }
}

/// Ids, spans, and whether the prompt alone has different tokens.
type Encoded = (Vec<u32>, Vec<Range<usize>>, bool);

fn all_of(ids: Vec<u32>) -> Encoded {
    let all = 0..ids.len();
    (ids, vec![all], false)
}

/// Everything from the first token that differs from the prompt.
fn behind_prompt(ids: Vec<u32>, prompt: &[u32]) -> Encoded {
    let shared = ids.iter().zip(prompt).take_while(|(id, prompt)| id == prompt).count();
    let spans = if shared < ids.len() { vec![shared..ids.len()] } else { vec![] };
    (ids, spans, shared < prompt.len())
}

/// The tokens that cover some byte of a turn.
fn tokens_of_turns(ranges: &[Range<usize>], turns: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut spans: Vec<Range<usize>> = Vec::new();
    let mut from = 0;
    for turn in turns.iter().filter(|turn| !turn.is_empty()) {
        let touches = |range: &Range<usize>| range.start < turn.end && range.end > turn.start;
        let Some(first) = ranges[from..].iter().position(touches) else { continue };
        let first = from + first;
        let last = ranges[first..].iter().rposition(touches).map_or(first, |offset| first + offset);
        // A token that covers parts of two turns belongs to the first.
        from = last + 1;
        match spans.last_mut() {
            Some(before) if before.end == first => before.end = from,
            _ => spans.push(first..from),
        }
    }
    spans
}

#[cfg(test)]
#[path = "mask_tests.rs"]
mod tests;
