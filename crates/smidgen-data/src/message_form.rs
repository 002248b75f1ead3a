//! The form in which a chat template takes messages: contents as lists of parts or as texts, and calls of tools without
//! a content.
//!
//! Templates differ in what they read. The first form that the template renders is taken, for all messages of a
//! conversation, and the first is what transformers does: lists stay lists, and a null content is left out.
//! A list counts as rendered if each of its texts is there and the list itself is not printed.
//! Errors are not reported here: rendering the taken form gives them.

use std::borrow::Cow;

use serde_json::Value as Json;
use smidgen_formats::tokenizer::chat_template::ChatTemplateError;

use crate::example::Conversation;

/// How the beginning of a list of parts looks when a template prints it, as Python or as JSON.
const PRINTED_LISTS: [&str; 6] =
    ["[{'type': ", "[{'text': ", "[{\"type\": ", "[{\"text\": ", "[{\"type\":\"", "[{\"text\":\""];

/// What becomes of a content that is null.
#[derive(Clone, Copy)]
enum NoContent {
    LeftOut,
    Null,
    Empty,
}

/// The messages in the form that the template takes.
pub(super) fn message_form<'a>(
    conversation: &'a Conversation,
    render: impl Fn(&[Json]) -> Result<String, ChatTemplateError>,
) -> Cow<'a, [Json]> {
    let messages = conversation.messages.as_slice();
    let has_null = messages.iter().any(|message| message.get("content").is_some_and(Json::is_null));
    let nulls: &[NoContent] =
        if has_null { &[NoContent::LeftOut, NoContent::Null, NoContent::Empty] } else { &[NoContent::Null] };
    let has_parts = !conversation.parts.is_empty();
    if !has_null && !has_parts {
        return Cow::Borrowed(messages);
    }
    let texts = |null: NoContent| render(&with_nulls(messages, null));
    for null in nulls.iter().filter(|_| has_parts) {
        let mut lists = with_nulls(messages, *null);
        for (index, parts) in &conversation.parts {
            lists[*index]["content"] = parts.clone();
        }
        let Ok(rendered) = render(&lists) else { continue };
        let joined = texts(*null).unwrap_or_default();
        if takes_lists(conversation, &rendered, &joined) {
            return Cow::Owned(lists);
        }
    }
    let renders = nulls.iter().find(|null| texts(**null).is_ok());
    match renders {
        Some(null) => Cow::Owned(with_nulls(messages, *null)),
        None => Cow::Borrowed(messages),
    }
}

fn with_nulls(messages: &[Json], null: NoContent) -> Vec<Json> {
    let mut messages = messages.to_vec();
    for message in messages.iter_mut().filter_map(Json::as_object_mut) {
        if message.get("content").is_some_and(Json::is_null) {
            match null {
                NoContent::LeftOut => drop(message.shift_remove("content")),
                NoContent::Null => {}
                NoContent::Empty => drop(message.insert("content".to_owned(), Json::from(""))),
            }
        }
    }
    messages
}

/// Whether a text has what the parts say, as far as the text of the joined contents has it.
fn takes_lists(conversation: &Conversation, rendered: &str, joined: &str) -> bool {
    let prints = |text: &str| PRINTED_LISTS.iter().any(|list| text.contains(list));
    let parts = conversation.parts.iter().flat_map(|(_, parts)| parts.as_array().into_iter().flatten());
    let mut texts = parts.filter_map(|part| part["text"].as_str().map(str::trim));
    let is_kept = |text: &str| rendered.contains(text) || !joined.contains(text);
    (!prints(rendered) || prints(joined)) && texts.all(is_kept)
}
