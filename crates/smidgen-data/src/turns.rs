//! The assistant's turns of a conversation, in the texts that a chat template renders.
//!
//! A turn is found by rendering twice: it is what one more message adds to the prompt for that message. The text is
//! never searched for it. Some templates rewrite earlier turns when others follow, for example to remove the reasoning
//! from all answers except the last. Such a conversation becomes several texts: each supervises the turns that it
//! renders as the model would generate them, and no turn is supervised in another form.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use serde_json::Value as Json;

use crate::chat_row::tool_name;
use crate::encode_error::EncodeError;
use crate::example::Conversation;
use crate::message_form::message_form;
use crate::template::template_time;
use smidgen_formats::tokenizer::chat_template::{ChatInput, ChatTemplate, ChatTemplateError, Rendered};

/// Every answer is rendered with everything before it, so the work grows with the square.
const MOST_MESSAGES: usize = 2000;
/// Fields with the reasoning before an answer.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

/// A conversation and the template that renders it.
#[derive(Clone, Debug)]
pub(super) struct Turns<'a> {
    template: &'a ChatTemplate,
    conversation: &'a Conversation,
    /// How long a text may be, in addition to a multiple of the row.
    most_text_bytes: usize,
    /// The messages in the form that the template takes.
    messages: Cow<'a, [Json]>,
}

/// A text to train on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TurnsText {
    /// A text, and the byte ranges of its supervised turns.
    Turns { text: String, turns: Vec<Range<usize>> },
    /// A turn that does not begin with its prompt: what differs from the prompt is supervised.
    Answer { prompt: String, text: String },
}

struct Turn {
    message: usize,
    /// Bytes of the prompt, after which the turn begins.
    begin: usize,
    /// The conversation up to and including the turn.
    with: Prefix,
    /// Whether `with` begins with the prompt.
    continues_prompt: bool,
}

/// The length and the hash of the beginning of a text.
struct Prefix {
    bytes: usize,
    hash: u64,
}

impl Prefix {
    fn of(text: &str) -> Prefix {
        Prefix { bytes: text.len(), hash: hash_of(text) }
    }

    fn begins(&self, text: &str) -> bool {
        text.get(..self.bytes).is_some_and(|beginning| hash_of(beginning) == self.hash)
    }
}

fn hash_of(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

impl<'a> Turns<'a> {
    pub fn new(
        template: &'a ChatTemplate,
        conversation: &'a Conversation,
        most_text_bytes: usize,
    ) -> Turns<'a> {
        let messages = Cow::Borrowed(conversation.messages.as_slice());
        let mut turns = Turns { template, conversation, most_text_bytes, messages };
        turns.messages =
            message_form(conversation, |messages| Ok(turns.render_messages(messages, false)?.text));
        turns
    }

    /// Renders the first `messages` messages.
    pub fn render(
        &self,
        messages: usize,
        add_generation_prompt: bool,
    ) -> Result<Rendered, ChatTemplateError> {
        self.render_messages(&self.messages[..messages], add_generation_prompt)
    }

    fn render_messages(
        &self,
        messages: &[Json],
        add_generation_prompt: bool,
    ) -> Result<Rendered, ChatTemplateError> {
        let messages = Json::from(messages);
        self.template.render(&ChatInput {
            tools: self.conversation.tools.as_ref(),
            more: Some(&self.conversation.more),
            add_generation_prompt,
            most_text_bytes: self.most_text_bytes,
            ..ChatInput::new(&messages, template_time())
        })
    }

    pub fn render_all(&self) -> Result<Rendered, ChatTemplateError> {
        self.render(self.conversation.messages.len(), false)
    }

    fn answers(&self) -> impl DoubleEndedIterator<Item = usize> {
        let messages = &self.conversation.messages;
        (0..messages.len()).filter(|message| messages[*message]["role"] == "assistant")
    }

    fn is_silent(&self, message: usize) -> bool {
        self.conversation.silent.contains(&message)
    }

    /// The last answer that carries a loss.
    pub fn last_answer(&self) -> Option<usize> {
        self.answers().rfind(|message| !self.is_silent(*message))
    }

    /// Refuses reasoning or a tool call that the template does not render: the turn would be trained without it.
    pub fn refuse_what_is_left_out(&self) -> Result<(), EncodeError> {
        for message in self.answers() {
            let wanted = wanted_texts(&self.conversation.messages[message]);
            let Some((field, _)) = wanted.first() else { continue };
            let number = message + 1;
            let with = self
                .render(number, false)
                .map_err(|error| EncodeError::FailsOn { message: number, field, error })?
                .text;
            let turn = &with[shared_bytes(&self.render(message, true)?.text, &with)..];
            if let Some((field, _)) = wanted.iter().find(|(_, text)| !turn.contains(text)) {
                return Err(EncodeError::NotRendered { message: number, field });
            }
        }
        Ok(())
    }

    /// The byte ranges of the answers without a loss in the text of the whole conversation.
    pub fn silent_in(&self, whole: &str) -> Result<Vec<Range<usize>>, EncodeError> {
        let silent = self.answers().filter(|message| self.is_silent(*message));
        let bytes = silent.map(|message| {
            let before = self.render(message, true)?.text;
            let with = self.render(message + 1, false)?.text;
            let range = shared_bytes(&before, whole)..shared_bytes(&with, whole);
            if whole.starts_with(before.trim_end()) && !range.is_empty() {
                Ok(range)
            } else {
                Err(EncodeError::WeightNotFound { message: message + 1 })
            }
        });
        bytes.collect()
    }

    /// Texts that together supervise every turn with a loss once, in order.
    pub fn texts(&self) -> Result<Vec<TurnsText>, EncodeError> {
        let messages = self.conversation.messages.len();
        if messages > MOST_MESSAGES {
            return Err(EncodeError::TooManyMessages { messages, most: MOST_MESSAGES });
        }
        let answers = self.answers().filter(|message| !self.is_silent(*message));
        let mut left = answers.map(|message| self.turn(message)).collect::<Result<Vec<Turn>, _>>()?;
        let mut texts = Vec::new();
        let mut whole = self.render_all()?.text;
        loop {
            let is_in = |turn: &mut Turn| turn.continues_prompt && turn.with.begins(&whole);
            let turns: Vec<_> = left.extract_if(.., is_in).map(|turn| turn.begin..turn.with.bytes).collect();
            if !turns.is_empty() || (left.is_empty() && texts.is_empty()) {
                texts.push(TurnsText::Turns { text: whole, turns });
            }
            let Some(last) = left.last() else { break };
            whole = self.render(last.message + 1, false)?.text;
            if !last.continues_prompt {
                let prompt = self.render(last.message, true)?.text;
                texts.push(TurnsText::Answer { prompt, text: whole.clone() });
                left.pop();
            }
        }
        texts.reverse();
        Ok(texts)
    }

    fn turn(&self, message: usize) -> Result<Turn, ChatTemplateError> {
        let before = self.render(message, true)?.text;
        let with = self.render(message + 1, false)?.text;
        let continues_prompt = with.starts_with(&before);
        Ok(Turn { message, begin: before.len(), with: Prefix::of(&with), continues_prompt })
    }
}

/// Texts of a message that its turn must contain, with the names of their fields.
fn wanted_texts(message: &Json) -> Vec<(&'static str, &str)> {
    let reasoning =
        REASONING_FIELDS.iter().filter_map(|field| Some((*field, message[*field].as_str()?.trim())));
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let names = calls.filter_map(|call| Some(("tool_calls", tool_name(call)?)));
    reasoning.filter(|(_, text)| !text.is_empty()).chain(names).collect()
}

/// Bytes of the common beginning of two texts, in whole characters.
fn shared_bytes(a: &str, b: &str) -> usize {
    let same = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    (0..=same).rev().find(|end| a.is_char_boundary(*end)).unwrap_or(0)
}
