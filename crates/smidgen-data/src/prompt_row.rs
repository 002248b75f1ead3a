//! Rows with a prompt to answer: GRPO generates the answers, and rewards read the other columns.
//!
//! | fields | prompt |
//! |---|---|
//! | `prompt`, or `question` | a string, or a list of messages |
//! | `messages` | a conversation; an answer at its end becomes the column `answer` |
//! | `prompt_ids` | token ids |
//!
//! All other columns stay as they are, a `completion` among them.

use serde_json::Value as Json;

use crate::chat_row::{field_names, kind_of, read_messages, wrong_type};
use crate::example::{Example, ExampleRow, RowFormat};
use crate::format::refuse_images;
use crate::format_error::FormatError;
use crate::row_fields::{CONVERSATION_NAMES, Fields, read_whole_numbers};
use crate::row_place::RowPlace;

/// The prompt of a row, as tokens, as a string with an empty completion, or as a conversation without its answer; and the
/// row's other fields.
pub fn prompt_of(place: RowPlace<'_>, row: Json) -> Result<ExampleRow, FormatError> {
    let fields = match row {
        Json::Object(fields) => fields,
        other => return Err(FormatError::NotAnObject { place: place.to_string(), found: kind_of(&other) }),
    };
    let mut row = Fields { place, format: RowFormat::PromptCompletion, fields, found_any: true };
    refuse_images(&row)?;
    let names = ["prompt_ids", "prompt", "messages", "conversations", "conversation", "question"];
    let Some(name) =
        names.into_iter().find(|name| row.fields.get(*name).is_some_and(|value| !value.is_null()))
    else {
        let (place, format) = (place.to_string(), RowFormat::PromptCompletion);
        let fields = field_names(&row.fields);
        return Err(FormatError::MissingField { place, format, wanted: "`prompt`", fields });
    };
    let (_, value) = row.take(&[name], "`prompt`")?;
    let empty = || FormatError::Empty { place: place.to_string(), field: name.to_owned() };
    let example = match value {
        ids if name == "prompt_ids" => {
            let ids = read_whole_numbers(place, name, ids)?;
            if ids.is_empty() {
                return Err(empty());
            }
            Example::Tokens { ids, labels: None }
        }
        Json::String(prompt) if !CONVERSATION_NAMES.contains(&name) => {
            if prompt.trim().is_empty() {
                return Err(empty());
            }
            Example::PromptCompletion { prompt, completion: String::new() }
        }
        messages @ (Json::Array(_) | Json::String(_)) => {
            let mut messages = read_messages(place, name, messages, false)?;
            let is_answer = |message: &mut Json| message["role"] == "assistant";
            if CONVERSATION_NAMES.contains(&name)
                && let Some(mut answer) = messages.pop_if(is_answer)
            {
                row.fields.entry("answer").or_insert(answer["content"].take());
            }
            if messages.is_empty() {
                return Err(empty());
            }
            let count = messages.len();
            row.conversation(messages, Some(count))?
        }
        other => {
            let wanted = "a string or a list of messages";
            return Err(wrong_type(place, name.to_owned(), &other, wanted));
        }
    };
    Ok(ExampleRow { example, fields: row.fields })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row_place::RowUnit;
    use serde_json::json;
    use std::path::Path;

    fn read(row: Json) -> Result<ExampleRow, String> {
        let place = RowPlace { file: Path::new("a.jsonl"), unit: RowUnit::Line, number: 7 };
        prompt_of(place, row).map_err(|error| error.to_string())
    }

    #[test]
    fn a_prompt_is_found_and_all_other_columns_stay() {
        let row = read(json!({"prompt": "2 + 2", "answer": "4", "completion": "four"})).unwrap();
        let asked = Example::PromptCompletion { prompt: "2 + 2".into(), completion: String::new() };
        assert_eq!(row.example, asked);
        assert_eq!(Json::Object(row.fields), json!({"answer": "4", "completion": "four"}));
        let row = read(json!({"question": "2 + 2", "prompt": null})).unwrap();
        assert_eq!(row.example, asked);
        let row = read(json!({"prompt_ids": [1, 2]})).unwrap();
        assert_eq!(row.example, Example::Tokens { ids: vec![1, 2], labels: None });
    }

    #[test]
    fn an_answer_at_the_end_of_a_conversation_is_what_rewards_compare_with() {
        let turn = |role: &str, content: &str| json!({"role": role, "content": content});
        let all =
            json!([turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]);
        let row = read(json!({"messages": all})).unwrap();
        let Example::Chat(conversation) = row.example else { panic!("a conversation") };
        assert_eq!((conversation.messages.len(), conversation.prompt_messages), (3, Some(3)));
        assert_eq!(row.fields["answer"], "d");
        let row = read(json!({"prompt": [turn("user", "a")], "answer": "b"})).unwrap();
        let Example::Chat(conversation) = row.example else { panic!("a conversation") };
        assert_eq!((conversation.messages.len(), conversation.prompt_messages), (1, Some(1)));
        assert_eq!(row.fields["answer"], "b");
    }

    #[test]
    fn a_row_without_a_prompt_is_named() {
        for (row, words) in [
            (json!({"answer": "4"}), "`a.jsonl` line 7: `prompt` is missing"),
            (json!({"prompt": "  "}), "`prompt` is empty"),
            (json!({"prompt": 4}), "`prompt` is a number, expected a string or a list of messages"),
            (json!({"prompt_ids": []}), "`prompt_ids` is empty"),
            (json!({"prompt": "a", "image": "b.png"}), "`image` has images"),
            (json!([1]), "is a list, not an object"),
        ] {
            let said = read(row).unwrap_err();
            assert!(said.contains(words), "{said}");
        }
    }
}
