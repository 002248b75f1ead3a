//! A training example: a row whose format is understood, before any template or tokenizer.
//!
//! Every file format and every row format is turned into this type, and everything after (templates, masks, preview,
//! evaluation) works on it.
//! Rows are read in `source.rs`; formats are detected and fields checked in `format.rs`.

use std::fmt;

use serde_json::{Map, Value as Json, json};
use smidgen_ir::objective::RowsNeeded;
use smidgen_ir::words::LossOn;

/// The format of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFormat {
    Alpaca,
    /// The user's turn is the Alpaca prompt.
    AlpacaPrompt,
    Chat,
    PromptCompletion,
    Text,
    Tokens,
    /// Answers to compare: a chosen and a rejected one, or one with a label.
    Preference,
}

impl RowFormat {
    /// What `data.loss_on` means for rows of this format.
    pub fn loss_on(self, wanted: LossOn) -> LossOn {
        match (wanted, self) {
            (LossOn::Auto, RowFormat::Chat) => LossOn::Assistant,
            (LossOn::Auto, RowFormat::Text) => LossOn::All,
            (
                LossOn::Auto,
                RowFormat::Alpaca
                | RowFormat::AlpacaPrompt
                | RowFormat::PromptCompletion
                | RowFormat::Preference
                | RowFormat::Tokens,
            ) => LossOn::Completion,
            (wanted, _) => wanted,
        }
    }
}

impl fmt::Display for RowFormat {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            RowFormat::Alpaca => "alpaca",
            RowFormat::AlpacaPrompt => "alpaca-prompt",
            RowFormat::Chat => "chat",
            RowFormat::PromptCompletion => "prompt-completion",
            RowFormat::Text => "text",
            RowFormat::Tokens => "tokens",
            RowFormat::Preference => "preference",
        })
    }
}

/// What the model learns from one row.
#[derive(Clone, Debug, PartialEq)]
pub enum Example {
    /// Token ids; without labels every token is supervised.
    Tokens { ids: Vec<i64>, labels: Option<Vec<i64>> },
    /// Plain text.
    Text(String),
    /// An instruction, perhaps with an input, and its answer. `before` has a system prompt and earlier turns.
    Alpaca { before: Vec<Json>, instruction: String, input: Option<String>, output: String },
    /// A prompt and its completion as text.
    PromptCompletion { prompt: String, completion: String },
    /// A conversation. In a row of prompt and completion as messages, the messages of the prompt come first.
    Chat(Conversation),
    /// Several answers to one prompt, or one answer that is judged.
    Group(Group),
}

/// Sequences that an objective compares. Each is a prompt and a completion, as tokens, strings or a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub kind: GroupKind,
    /// With the label (1 or -1) or the reward of each; 0 for pairs.
    pub members: Vec<(Example, f32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// A chosen answer, then a rejected one.
    Pair,
    Labelled,
    Rewarded,
}

impl Group {
    /// Whether an objective can be trained on it.
    pub fn suits(&self, needed: RowsNeeded) -> bool {
        match needed {
            RowsNeeded::Samples | RowsNeeded::Prompts => false,
            RowsNeeded::Pairs { .. } => self.kind == GroupKind::Pair,
            RowsNeeded::Labels => self.kind == GroupKind::Labelled,
            RowsNeeded::Answers { .. } => self.kind == GroupKind::Rewarded,
        }
    }
}

impl Example {
    /// The approximate size of its text.
    pub fn text_bytes(&self) -> usize {
        let content_bytes = |message: &Json| message["content"].as_str().map_or(0, str::len);
        match self {
            Example::Tokens { ids, .. } => 8 * ids.len(),
            Example::Text(text) => text.len(),
            Example::Alpaca { before, instruction, input, output } => {
                let before: usize = before.iter().map(content_bytes).sum();
                before + instruction.len() + input.as_ref().map_or(0, String::len) + output.len()
            }
            Example::PromptCompletion { prompt, completion } => prompt.len() + completion.len(),
            Example::Group(group) => group.members.iter().map(|(member, _)| member.text_bytes()).sum(),
            Example::Chat(conversation) => conversation.messages.iter().map(content_bytes).sum(),
        }
    }
}

/// A conversation in the form that chat templates expect.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// Objects with `role` (`system`, `user`, `assistant`, `tool` or `ipython`) and `content`.
    pub messages: Vec<Json>,
    /// Contents that the row has as lists of text parts, with the indices of their messages; `messages` has them
    /// joined.
    pub parts: Vec<(usize, Json)>,
    /// Indices of assistant messages that carry no loss, ascending.
    pub silent: Vec<usize>,
    /// How many of the messages are the prompt; `None` if the row does not say.
    pub prompt_messages: Option<usize>,
    pub tools: Option<Json>,
    /// Variables for the template, such as `enable_thinking`.
    pub more: Map<String, Json>,
}

impl Conversation {
    /// An instruction and its answer as two turns; an input follows the instruction on a line of its own.
    pub fn of_instruction(
        before: &[Json],
        instruction: &str,
        input: Option<&str>,
        output: &str,
    ) -> Conversation {
        let asked = match input.filter(|input| !input.is_empty()) {
            Some(input) => format!("{instruction}\n{input}"),
            None => instruction.to_owned(),
        };
        let turns =
            [json!({"role": "user", "content": asked}), json!({"role": "assistant", "content": output})];
        Conversation {
            messages: before.iter().cloned().chain(turns).collect(),
            parts: Vec::new(),
            silent: Vec::new(),
            prompt_messages: Some(before.len() + 1),
            tools: None,
            more: Map::new(),
        }
    }
}

/// The field of a row that names its clips.
pub(crate) const AUDIO_FIELD: &str = "audio";

/// Whether a row names a clip.
pub fn has_audio(fields: &Map<String, Json>) -> bool {
    match fields.get(AUDIO_FIELD) {
        None | Some(Json::Null) => false,
        Some(Json::Array(several)) => !several.is_empty(),
        Some(_) => true,
    }
}

/// An example with the other fields of its row, for evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct ExampleRow {
    pub example: Example,
    /// Fields that the format does not use, such as `answer` or `choices`.
    pub fields: Map<String, Json>,
}
