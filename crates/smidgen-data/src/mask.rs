//! One row as tokens, and which of them are supervised.
//!
//! The rules are those of TRL's supervised fine-tuning: a completion begins where the tokens of the whole row first
//! differ from those of the prompt alone; texts are tokenized with the tokenizer's own special tokens and end with EOS;
//! conversations are tokenized as the template renders them, which adds its own special tokens.
//! A turn of the assistant is what the template marks as generated; if it marks nothing, turns are found by rendering
//! (`turns.rs`).
//! Cutting to a length is in `token_builder.rs`. Rows of tokens do not come here.

use std::collections::HashSet;
use std::ops::Range;

pub use crate::encode_error::EncodeError;
use crate::example::{Conversation, Example};
use crate::template::{DataTemplate, TemplateError, TemplateKind, no_chat_template};
use crate::turns::{Turns, TurnsText};
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::tokenizer::chat_template::ChatTemplate;
use smidgen_ir::words::LossOn;

/// A tokenizer takes up to 250 bytes per byte of a text.
const MOST_TEXT_BYTES: usize = 4 << 20;
/// Longer than all but the longest tokens, and than the text that published templates add to a row.
const TEXT_BYTES_PER_TOKEN: usize = 64;
const TEMPLATE_BYTES: usize = 64 << 10;

/// Whether the model learns from a row where to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnEnd {
    /// The last thing supervised is a special token.
    Supervised,
    /// A special token follows what is supervised.
    NotSupervised,
    /// Neither: there is no special token at the end.
    Missing,
}

/// One of the samples that a row becomes; usually there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedSample {
    pub ids: Vec<i64>,
    /// Supervised tokens: ascending ranges with gaps between them.
    pub spans: Vec<Range<usize>>,
    /// Whether the prompt alone has other tokens than the beginning of the whole row.
    pub prompt_differs: bool,
    pub turn_end: TurnEnd,
    pub bos_doubled: bool,
    /// Whether a template was used.
    pub is_templated: bool,
}

impl EncodedSample {
    /// A sequence that is tokens already; supervised from `first` on.
    pub fn of_tokens(ids: Vec<i64>, first: usize) -> EncodedSample {
        let spans = std::iter::once(first..ids.len()).collect();
        let turn_end = TurnEnd::Missing;
        EncodedSample { ids, spans, prompt_differs: false, turn_end, bos_doubled: false, is_templated: false }
    }
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
    /// What a template may add to the text of a row.
    most_text_bytes: usize,
}

impl<'a> RowEncoder<'a> {
    pub fn new(
        tokenizer: &'a Tokenizer,
        template: Option<&'a DataTemplate>,
        loss_on: LossOn,
    ) -> RowEncoder<'a> {
        let ids = tokenizer.special_ids();
        // All special tokens except BOS and the unknown token; EOS counts even if it is one of them.
        let ends = |id: &u32| ids.eos == Some(*id) || ![ids.bos, ids.unk].contains(&Some(*id));
        let special = tokenizer.special_token_ids().into_iter().filter(ends).collect();
        let eos = ids.eos.and_then(|id| tokenizer.token(id));
        RowEncoder { tokenizer, template, loss_on, eos, special, most_text_bytes: MOST_TEXT_BYTES }
    }

    /// Limits what a template may add to the text of a row by the tokens that are kept of it.
    pub fn with_max_tokens(mut self, max_tokens: usize) -> RowEncoder<'a> {
        let most = max_tokens.saturating_mul(TEXT_BYTES_PER_TOKEN).saturating_add(TEMPLATE_BYTES);
        self.most_text_bytes = most.min(MOST_TEXT_BYTES);
        self
    }

    /// The text of a token.
    pub fn token_text(&self, id: u32) -> Option<String> {
        self.tokenizer.token(id)
    }

    /// One sample, or several if the template rewrites earlier turns of a conversation.
    ///
    /// # Panics
    /// For a row of tokens, which needs no tokenizer.
    pub fn encode(&self, example: &Example) -> Result<Vec<EncodedSample>, EncodeError> {
        let bytes = example.text_bytes();
        if bytes > MOST_TEXT_BYTES {
            return Err(EncodeError::TooMuchText { bytes, most: MOST_TEXT_BYTES });
        }
        let mut is_templated = true;
        let name = || self.template.map(|template| template.name.clone()).unwrap_or_default();
        let encoded = match (example, self.template.map(|template| &template.kind)) {
            (Example::Tokens { .. } | Example::Group(_), _) => {
                panic!(
                    "a row of tokens has its ids already, and the answers of a group are encoded one by one"
                )
            }
            (Example::Text(text), _) => {
                is_templated = false;
                vec![all_of(self.tokenizer.encode(&self.with_eos(text), true)?)]
            }
            (Example::PromptCompletion { prompt, completion }, Some(kind)) if self.renders_pairs() => {
                match kind {
                    TemplateKind::Text(text) => {
                        vec![self.encode_pair(&text.render(prompt, None), completion)?]
                    }
                    TemplateKind::Chat(template) => {
                        let conversation = Conversation::of_instruction(&[], prompt, None, completion);
                        self.encode_conversation(template, &conversation)?
                    }
                }
            }
            (Example::PromptCompletion { prompt, completion }, _) => {
                is_templated = false;
                vec![self.encode_pair(prompt, completion)?]
            }
            (Example::Alpaca { before, instruction, input, output }, Some(TemplateKind::Text(prompt))) => {
                if !before.is_empty() {
                    let fields = "`system` or `history`";
                    return Err(EncodeError::NoPlace { fields, template: name() });
                }
                vec![self.encode_pair(&prompt.render(instruction, input.as_deref()), output)?]
            }
            (Example::Alpaca { before, instruction, input, output }, Some(TemplateKind::Chat(template))) => {
                let conversation =
                    Conversation::of_instruction(before, instruction, input.as_deref(), output);
                self.encode_conversation(template, &conversation)?
            }
            (Example::Chat(conversation), Some(TemplateKind::Chat(template))) => {
                self.encode_conversation(template, conversation)?
            }
            (Example::Chat(_), Some(TemplateKind::Text(_))) => {
                return Err(EncodeError::NoTemplate(TemplateError::TextForChat { name: name() }));
            }
            (Example::Chat(_) | Example::Alpaca { .. }, None) => {
                return Err(EncodeError::NoTemplate(no_chat_template(self.tokenizer)));
            }
        };
        Ok(encoded.into_iter().map(|encoded| self.sample_of(encoded, is_templated)).collect())
    }

    /// Whether prompts and completions that are strings are rendered with the template.
    fn renders_pairs(&self) -> bool {
        self.template.is_some_and(|template| template.renders_pairs)
    }

    fn sample_of(&self, (ids, spans, prompt_differs): Encoded, is_templated: bool) -> EncodedSample {
        let bos = self.tokenizer.special_ids().bos;
        EncodedSample {
            turn_end: self.turn_end(&ids, &spans),
            bos_doubled: bos.is_some_and(|bos| ids.starts_with(&[bos, bos])),
            ids: ids.into_iter().map(i64::from).collect(),
            spans,
            prompt_differs,
            is_templated,
        }
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
            LossOn::Auto | LossOn::Completion | LossOn::Assistant => {
                let prompt = self.tokenizer.encode(prompt, true)?;
                Ok(after_prompt(ids, &prompt))
            }
        }
    }

    fn encode_conversation(
        &self,
        template: &ChatTemplate,
        conversation: &Conversation,
    ) -> Result<Vec<Encoded>, EncodeError> {
        let turns = Turns::new(template, conversation, self.most_text_bytes);
        turns.refuse_what_is_left_out()?;
        match (self.loss_on, conversation.prompt_messages) {
            (LossOn::All, _) => {
                let whole = turns.render_all()?.text;
                let silent = turns.silent_in(&whole)?;
                let (ids, ranges) = self.tokenizer.encode_with_ranges(&whole, false)?;
                let spans = all_but(&tokens_of_turns(&ranges, &silent), ids.len());
                Ok(vec![(ids, spans, false)])
            }
            (LossOn::Auto | LossOn::Completion, Some(prompt)) => {
                let all = conversation.messages.len();
                if let Some(message) = conversation.silent.iter().find(|message| **message >= prompt) {
                    return Err(EncodeError::WeightInCompletion { message: message + 1 });
                }
                let (prompt, whole) = (turns.render(prompt, true)?.text, turns.render(all, false)?.text);
                Ok(vec![self.encode_answer(&prompt, &whole)?])
            }
            (LossOn::Completion, None) => match turns.last_answer() {
                // Messages after the last answer are not rendered.
                Some(answer) => {
                    let (prompt, whole) = (turns.render(answer, true)?, turns.render(answer + 1, false)?);
                    Ok(vec![self.encode_answer(&prompt.text, &whole.text)?])
                }
                None => Ok(vec![self.encode_turns(&turns.render_all()?.text, &[])?]),
            },
            (LossOn::Auto, None) | (LossOn::Assistant, _) if template.marks_generation() => {
                let mut whole = turns.render_all()?;
                let silent = turns.silent_in(&whole.text)?;
                let has_loss = |turn: &Range<usize>| {
                    silent.iter().all(|silent| turn.end <= silent.start || turn.start >= silent.end)
                };
                whole.generated.retain(has_loss);
                Ok(vec![self.encode_turns(&whole.text, &whole.generated)?])
            }
            (LossOn::Auto, None) | (LossOn::Assistant, _) => {
                let encode = |text: &TurnsText| match text {
                    TurnsText::Turns { text, turns } => self.encode_turns(text, turns),
                    TurnsText::Answer { prompt, text } => self.encode_answer(prompt, text),
                };
                turns.texts()?.iter().map(encode).collect()
            }
        }
    }

    /// Supervises what comes after the prompt.
    fn encode_answer(&self, prompt: &str, whole: &str) -> Result<Encoded, EncodeError> {
        let prompt = self.tokenizer.encode(prompt, false)?;
        Ok(after_prompt(self.tokenizer.encode(whole, false)?, &prompt))
    }

    /// Supervises ranges of bytes.
    fn encode_turns(&self, whole: &str, turns: &[Range<usize>]) -> Result<Encoded, EncodeError> {
        let (ids, ranges) = self.tokenizer.encode_with_ranges(whole, false)?;
        Ok((ids, tokens_of_turns(&ranges, turns), false))
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

    /// Whether a token is white space, in the spellings of byte-level and SentencePiece vocabularies.
    fn is_space(&self, id: u32) -> bool {
        const SPACES: &[char] = &[' ', '\n', '\t', '\r', '▁', 'Ġ', 'Ċ', 'ĉ', 'č'];
        let Some(token) = self.tokenizer.token(id) else { return false };
        token == "<0x0A>" || token.chars().all(|sign| SPACES.contains(&sign))
    }
}

/// Ids, spans, and [`EncodedSample::prompt_differs`].
type Encoded = (Vec<u32>, Vec<Range<usize>>, bool);

fn all_of(ids: Vec<u32>) -> Encoded {
    let all = 0..ids.len();
    (ids, vec![all], false)
}

/// The ranges between spans.
fn all_but(spans: &[Range<usize>], length: usize) -> Vec<Range<usize>> {
    let ends = [0].into_iter().chain(spans.iter().map(|span| span.end));
    let starts = spans.iter().map(|span| span.start).chain([length]);
    ends.zip(starts).map(|(end, start)| end..start).filter(|range| !range.is_empty()).collect()
}

/// Supervises everything from the first token that differs from the prompt.
fn after_prompt(ids: Vec<u32>, prompt: &[u32]) -> Encoded {
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
