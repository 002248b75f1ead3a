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

/// The special token after an answer, if the template writes one: the end of the turn, or else the beginning of the next.
fn end_of_turn(tokenizer: &Tokenizer, template: &ChatTemplate) -> Option<u32> {
    const ANSWER: &str = "an answer like no other";
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let mut messages = vec![turn("user", "a question"), turn("assistant", ANSWER)];
    let after = |messages: &[Json]| {
        let messages = Json::from(messages);
        let text = template.render(&ChatInput::new(&messages, SystemTime::UNIX_EPOCH)).ok()?.text;
        Some(text.rsplit_once(ANSWER)?.1.trim_start().to_owned())
    };
    let mut rest = after(&messages)?;
    if rest.is_empty() {
        messages.push(turn("user", "another question"));
        rest = after(&messages)?;
    }
    let first = *tokenizer.encode(&rest, false).ok()?.first()?;
    let is_special = tokenizer.decode(&[first], true).ok()?.is_empty();
    is_special.then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::export_tests::write_tokenizer;

    /// As Gemma, as Command R7B, and as GLM 4, whose turns end where the next one begins.
    #[test]
    fn a_turn_ends_with_the_special_token_after_an_answer() {
        let folder = tempfile::tempdir().unwrap();
        write_tokenizer(folder.path());
        for (template, expected) in [
            ("{% for m in messages %}<s>{{ m.content }}</s>\n{% endfor %}", Some(1)),
            ("{% for m in messages %}{{ m.content }}</s><s>{% endfor %}", Some(1)),
            (
                "{% for m in messages %}{% if m.role == 'user' %}<s>{% endif %}\n{{ m.content }}{% endfor %}",
                Some(0),
            ),
            ("{% for m in messages %}ab {{ m.content }}\n{% endfor %}", None),
        ] {
            let config = json!({"eos_token": "</s>", "bos_token": "<s>", "chat_template": template});
            std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
            let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
            let chat = tokenizer.chat_template().unwrap().unwrap();
            assert_eq!(end_of_turn(&tokenizer, &chat), expected, "{template}");
        }
    }

    #[test]
    fn a_config_has_one_end_or_a_list() {
        assert_eq!(ids_in(Some(&json!([151329, 151336, 151338]))), [151329, 151336, 151338]);
        assert_eq!(ids_in(Some(&json!(1))), [1]);
        assert!(ids_in(Some(&Json::Null)).is_empty() && ids_in(None).is_empty());
    }
}
