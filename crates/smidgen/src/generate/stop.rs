//! The stop tokens of a model.
//!
//! A model has an end-of-text token in its tokenizer, often others in `generation_config.json` or `config.json`, and
//! one that its chat template writes after an answer. A text ends with any of them.
//! The template's token is found by rendering an answer and reading the token after it.

use crate::failure::Failure;
use serde_json::{Value as Json, json};
use smidgen_data::template::TemplateKind;
use smidgen_formats::json_file::{MAX_CONFIG_BYTES, read_json_file};
use smidgen_formats::model::Model;
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::tokenizer::chat_template::{ChatInput, ChatTemplate};
use std::collections::BTreeSet;
use std::time::SystemTime;

/// Why a text stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoppedBy {
    /// A stop token; it is not part of the text.
    Token(u32),
    /// The maximum number of tokens was reached.
    MaxTokens,
    /// The context of the model or of the plan is full.
    Context,
    /// The caller stopped it.
    Caller,
}

impl StoppedBy {
    pub fn name(self) -> &'static str {
        match self {
            StoppedBy::Token(_) => "end_token",
            StoppedBy::MaxTokens => "max_tokens",
            StoppedBy::Context => "context",
            StoppedBy::Caller => "caller",
        }
    }
}

/// All stop tokens of the model, and of the template of its prompts.
pub fn stop_ids(
    model: &Model,
    tokenizer: &Tokenizer,
    template: Option<&TemplateKind>,
) -> Result<BTreeSet<u32>, Failure> {
    let mut ids = BTreeSet::new();
    ids.extend(tokenizer.special_ids().eos);
    ids.extend(ids_in(model.config().get("eos_token_id")));
    if let Model::Folder { folder, .. } = model {
        let path = folder.path().join("generation_config.json");
        if path.exists() {
            let config: Json = read_json_file(&path, MAX_CONFIG_BYTES).map_err(Failure::model)?;
            ids.extend(ids_in(config.get("eos_token_id")));
        }
    }
    let of_model = tokenizer.chat_template().and_then(Result::ok);
    ids.extend(of_model.and_then(|chat| end_of_turn(tokenizer, &chat)));
    if let Some(TemplateKind::Chat(chat)) = template {
        ids.extend(end_of_turn(tokenizer, chat));
    }
    Ok(ids)
}

/// The ids in a config value: a number or a list.
fn ids_in(value: Option<&Json>) -> Vec<u32> {
    let one = |value: &Json| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Json::Array(list)) => list.iter().filter_map(one).collect(),
        Some(value) => one(value).into_iter().collect(),
        None => vec![],
    }
}

/// The special token after an answer, if the template writes one.
fn end_of_turn(tokenizer: &Tokenizer, template: &ChatTemplate) -> Option<u32> {
    const ANSWER: &str = "an answer like no other";
    let messages = json!([
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": ANSWER},
    ]);
    let text = template.render(&ChatInput::new(&messages, SystemTime::UNIX_EPOCH)).ok()?.text;
    let (_, rest) = text.rsplit_once(ANSWER)?;
    let first = *tokenizer.encode(rest.trim_start(), false).ok()?.first()?;
    let is_special = tokenizer.decode(&[first], true).ok()?.is_empty();
    is_special.then_some(first)
}
