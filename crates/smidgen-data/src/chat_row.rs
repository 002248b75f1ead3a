//! Messages of a conversation in the form that chat templates expect, whatever form the data has.
//!
//! OpenAI's `role` and `content` and ShareGPT's `from` and `value` are both read, and roles get the names that
//! templates know. A content of several text parts is joined, and the parts are kept beside it, for templates that want
//! them (`message_form.rs`). Null fields (tables fill them in if other rows have a
//! value) are removed, as in transformers and TRL. Other fields stay, except OpenAI's `weight`, which says whether an
//! answer carries a loss.
//! Which tokens of a conversation are supervised is decided in `mask.rs`.

use serde_json::{Map, Value as Json, json};

use crate::example::RowFormat;
use crate::format_error::FormatError;
use crate::row_place::RowPlace;

/// The field that keeps a message's content as a list of parts until [`take_parts`]. No row has it: a field of the row
/// with this name is replaced.
const PARTS: &str = "content parts";

fn role_of(name: &str) -> Option<&'static str> {
    Some(match name {
        "system" => "system",
        "developer" => "developer",
        "user" | "human" => "user",
        "assistant" | "gpt" | "chatgpt" | "model" | "bing" => "assistant",
        "tool" | "function" | "observation" => "tool",
        "ipython" => "ipython",
        _ => return None,
    })
}

/// Whether the first of these messages has ShareGPT's fields.
pub(super) fn is_sharegpt(messages: &Json) -> bool {
    messages.get(0).is_some_and(|message| message.get("from").is_some() && message.get("value").is_some())
}

/// The type of a value, for messages.
pub fn kind_of(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "a boolean",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    }
}

/// Parses a cell that holds a list or an object as JSON text; any other value is returned unchanged.
pub(super) fn parse_cell(place: RowPlace<'_>, field: &str, value: Json) -> Result<Json, FormatError> {
    let Json::String(text) = value else {
        return Ok(value);
    };
    if !text.trim_start().starts_with(['[', '{']) {
        return Ok(Json::String(text));
    }
    serde_json::from_str(&text).map_err(|error| FormatError::NotJson {
        place: place.to_string(),
        field: field.to_owned(),
        message: error.to_string(),
        python: text.contains("{'") || text.contains("': "),
    })
}

/// Reads the messages of the field `field`; with `needs_assistant`, one of them must be from the assistant.
pub(super) fn read_messages(
    place: RowPlace<'_>,
    field: &str,
    value: Json,
    needs_assistant: bool,
) -> Result<Vec<Json>, FormatError> {
    let messages = match parse_cell(place, field, value)? {
        Json::Array(messages) => messages,
        other => return Err(wrong_type(place, field.to_owned(), &other, "a list of messages")),
    };
    if messages.is_empty() {
        return Err(FormatError::Empty { place: place.to_string(), field: field.to_owned() });
    }
    let mut read = Vec::with_capacity(messages.len());
    for (index, message) in messages.into_iter().enumerate() {
        match message {
            Json::Object(message) => read.push(read_message(place, format!("{field}[{index}]"), message)?),
            other => return Err(wrong_type(place, format!("{field}[{index}]"), &other, "a message")),
        }
    }
    if needs_assistant && !read.iter().any(|message| message["role"] == "assistant") {
        return Err(FormatError::NoAssistant { place: place.to_string(), field: field.to_owned() });
    }
    Ok(read)
}

fn read_message(place: RowPlace<'_>, at: String, mut fields: Map<String, Json>) -> Result<Json, FormatError> {
    let sharegpt = !fields.contains_key("role") && fields.contains_key("from");
    let (role_name, content_name) = if sharegpt { ("from", "value") } else { ("role", "content") };
    let role = match fields.shift_remove(role_name) {
        Some(Json::String(name)) => match role_of(&name) {
            Some(role) => role,
            None => {
                return Err(FormatError::UnknownRole {
                    place: place.to_string(),
                    field: format!("{at}.{role_name}"),
                    role: name,
                });
            }
        },
        Some(other) => return Err(wrong_type(place, format!("{at}.{role_name}"), &other, "a string")),
        None => return Err(missing(place, &at, "`role` (or `from`)", &fields)),
    };
    let calls_tools = read_tool_calls(place, &at, &mut fields)? && role == "assistant";
    read_weight(place, &at, &mut fields)?;
    let content = match fields.shift_remove(content_name) {
        None if calls_tools => None,
        None => return Err(missing(place, &at, if sharegpt { "`value`" } else { "`content`" }, &fields)),
        Some(Json::Null) if calls_tools => Some(Json::Null),
        Some(content) => {
            fields.shift_remove(PARTS);
            if content.is_array() {
                fields.insert(PARTS.to_owned(), content.clone());
            }
            Some(Json::String(read_content(place, format!("{at}.{content_name}"), content)?))
        }
    };
    let is_empty = matches!(&content, Some(Json::String(text)) if text.trim().is_empty());
    if role == "assistant" && is_empty && !calls_tools {
        return Err(FormatError::Empty { place: place.to_string(), field: format!("{at}.{content_name}") });
    }
    let mut message = Map::with_capacity(fields.len() + 2);
    message.insert("role".to_owned(), Json::from(role));
    if let Some(content) = content {
        message.insert("content".to_owned(), content);
    }
    message.extend(fields.into_iter().filter(|(_, value)| !value.is_null()));
    Ok(Json::Object(message))
}

/// Returns whether there are tool calls; each must name its function.
fn read_tool_calls(
    place: RowPlace<'_>,
    at: &str,
    fields: &mut Map<String, Json>,
) -> Result<bool, FormatError> {
    let at = format!("{at}.tool_calls");
    let Some(calls) = fields.get_mut("tool_calls") else { return Ok(false) };
    *calls = parse_cell(place, &at, calls.take())?;
    match &*calls {
        Json::Null => Ok(false),
        Json::Array(all) => match all.iter().position(|call| tool_name(call).is_none()) {
            Some(index) => Err(wrong_type(
                place,
                format!("{at}[{index}]"),
                &all[index],
                "a call with a function's `name`",
            )),
            None => Ok(!all.is_empty()),
        },
        other => Err(wrong_type(place, at, other, "a list of calls")),
    }
}

/// The name of a called function: `function.name` as in OpenAI's form, or `name`.
pub(super) fn tool_name(call: &Json) -> Option<&str> {
    call["function"]["name"].as_str().or_else(|| call["name"].as_str())
}

/// Checks `weight`, and removes it unless it is 0.
fn read_weight(place: RowPlace<'_>, at: &str, fields: &mut Map<String, Json>) -> Result<(), FormatError> {
    match fields.get("weight").map(|weight| (weight, weight.as_f64())) {
        None | Some((_, Some(0.0))) => {}
        Some((Json::Null, _) | (_, Some(1.0))) => drop(fields.shift_remove("weight")),
        Some((other, _)) => return Err(wrong_type(place, format!("{at}.weight"), other, "0 or 1")),
    }
    Ok(())
}

/// Removes the lists of parts that [`read_messages`] kept.
pub(super) fn take_parts(messages: &mut [Json]) -> Vec<(usize, Json)> {
    let parts =
        |(index, message): (usize, &mut Json)| Some((index, message.as_object_mut()?.shift_remove(PARTS)?));
    messages.iter_mut().enumerate().filter_map(parts).collect()
}

/// Removes `weight` from all messages, and returns the indices of the assistant messages that had weight 0.
pub(super) fn take_silent(messages: &mut [Json]) -> Vec<usize> {
    let mut silent = Vec::new();
    for (index, message) in messages.iter_mut().enumerate() {
        let had_weight = message.as_object_mut().and_then(|fields| fields.shift_remove("weight")).is_some();
        if had_weight && message["role"] == "assistant" {
            silent.push(index);
        }
    }
    silent
}

pub(super) fn message(role: &str, content: &str) -> Json {
    json!({"role": role, "content": content})
}

/// The earlier turns of an alpaca row, from pairs of an instruction and its answer.
pub(super) fn read_history(place: RowPlace<'_>, history: Option<Json>) -> Result<Vec<Json>, FormatError> {
    const FIELD: &str = "history";
    let pairs = match parse_cell(place, FIELD, history.unwrap_or_default())? {
        Json::Null => vec![],
        Json::String(text) if text.trim().is_empty() => vec![],
        Json::Array(pairs) => pairs,
        other => return Err(wrong_type(place, FIELD.to_owned(), &other, "a list of pairs")),
    };
    let mut messages = Vec::with_capacity(2 * pairs.len());
    for (index, pair) in pairs.iter().enumerate() {
        let texts: Option<Vec<&str>> =
            pair.as_array().and_then(|pair| pair.iter().map(Json::as_str).collect());
        let Some([asked, answer]) = texts.as_deref() else {
            let at = format!("{FIELD}[{index}]");
            return Err(wrong_type(place, at, pair, "a pair of an instruction and its answer, both strings"));
        };
        messages.extend([message("user", asked), message("assistant", answer)]);
    }
    Ok(messages)
}

fn read_content(place: RowPlace<'_>, at: String, content: Json) -> Result<String, FormatError> {
    let parts = match content {
        Json::String(text) => return Ok(text),
        Json::Array(parts) => parts,
        other => return Err(wrong_type(place, at, &other, "a string or a list of text parts")),
    };
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        let at = format!("{at}[{index}]");
        match (part.get("type").and_then(Json::as_str), part.get("text")) {
            (Some("text") | None, Some(Json::String(part))) => text.push_str(part),
            (Some("text"), Some(other)) => {
                return Err(wrong_type(place, format!("{at}.text"), other, "a string"));
            }
            (Some(kind), _) if kind != "text" => {
                return Err(FormatError::NotText {
                    place: place.to_string(),
                    field: at,
                    part: kind.to_owned(),
                });
            }
            _ => return Err(wrong_type(place, at, part, "a part `{\"type\": \"text\", \"text\": ...}`")),
        }
    }
    Ok(text)
}

pub(super) fn wrong_type(
    place: RowPlace<'_>,
    field: String,
    found: &Json,
    expected: &'static str,
) -> FormatError {
    FormatError::WrongType { place: place.to_string(), field, found: kind_of(found), expected }
}

fn missing(place: RowPlace<'_>, at: &str, wanted: &'static str, fields: &Map<String, Json>) -> FormatError {
    FormatError::MissingField {
        place: format!("{place}, `{at}`"),
        format: RowFormat::Chat,
        wanted,
        fields: field_names(fields),
    }
}

/// The names of the first few fields, for messages.
pub(super) fn field_names(fields: &Map<String, Json>) -> String {
    const SHOWN: usize = 8;
    let mut names: Vec<String> = fields.keys().take(SHOWN).map(|name| format!("`{name}`")).collect();
    match fields.len() {
        0 => return "no fields".to_owned(),
        count if count > SHOWN => names.push(format!("{} more", count - SHOWN)),
        _ => {}
    }
    names.join(", ")
}
