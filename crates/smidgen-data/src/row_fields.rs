//! The fields of a row: taken one by one, and by their names the format of the row.
//!
//! What the fields of each format mean is in `format.rs` and `preference_row.rs`.

use serde_json::{Map, Value as Json};

use crate::chat_row::{field_names, is_sharegpt, parse_cell, take_parts, take_silent, wrong_type};
use crate::example::{Conversation, Example, RowFormat};
use crate::format_error::FormatError;
use crate::row_place::RowPlace;

/// A format and why it was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recognized {
    pub format: RowFormat,
    /// One clause for messages, such as "alpaca: rows have `instruction` and `output`".
    pub reason: String,
}

impl Recognized {
    /// For a message about several formats: "alpaca (rows have `instruction` and `output`)".
    pub(crate) fn in_brackets(&self) -> String {
        let because = self.reason.split_once(": ").map_or(self.reason.as_str(), |(_, because)| because);
        format!("{} ({because})", self.format)
    }
}

pub(crate) const CONVERSATION_NAMES: [&str; 3] = ["messages", "conversations", "conversation"];
/// Names of prompt and completion, the most specific pair first.
pub(crate) const PAIRS: [(&str, &str); 4] =
    [("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("input", "output")];
pub(crate) const OUTPUT_NAMES: [&str; 2] = ["output", "response"];
pub(crate) const INPUT_NAMES: [&str; 2] = ["input", "context"];

/// Tries the most specific fields first, because published data often has less specific ones as well, such as a `text`
/// that repeats an instruction or a `prompt` that repeats a first message.
pub(crate) fn recognize_fields(fields: &Map<String, Json>) -> Option<Recognized> {
    let has = |name: &str| fields.contains_key(name);
    let first_of = |names: &[&'static str]| names.iter().copied().find(|name| has(name));
    let (format, what) = if has("input_ids") {
        (RowFormat::Tokens, "`input_ids`".to_owned())
    } else if has("prompt_ids") {
        (RowFormat::Tokens, "`prompt_ids`".to_owned())
    } else if has("chosen") && has("rejected") {
        (RowFormat::Preference, "`chosen` and `rejected`".to_owned())
    } else if let Some(name) = first_of(&CONVERSATION_NAMES) {
        let shape = if is_sharegpt(&fields[name]) { " with `from` and `value`" } else { "" };
        (RowFormat::Chat, format!("`{name}`{shape}"))
    } else if let Some((prompt, completion)) =
        PAIRS[..2].iter().find(|(prompt, name)| has(prompt) && has(name))
    {
        (RowFormat::PromptCompletion, format!("`{prompt}` and `{completion}`"))
    } else if let (true, Some(name)) = (has("instruction"), first_of(&OUTPUT_NAMES)) {
        (RowFormat::Alpaca, format!("`instruction` and `{name}`"))
    } else if has("text") {
        (RowFormat::Text, "`text`".to_owned())
    // With `choices`, the question alone is not the prompt.
    } else if let Some((prompt, completion)) =
        PAIRS[2..].iter().find(|(prompt, name)| has(prompt) && has(name))
        && !has("choices")
    {
        (
            RowFormat::PromptCompletion,
            format!("`{prompt}` and `{completion}`, which are taken as `prompt` and `completion`"),
        )
    } else {
        return None;
    };
    Some(Recognized { format, reason: format!("{format}: rows have {what}") })
}

pub(crate) fn read_whole_numbers(
    place: RowPlace<'_>,
    field: &str,
    value: Json,
) -> Result<Vec<i64>, FormatError> {
    match parse_cell(place, field, value)? {
        Json::Array(entries) => {
            let number = |(index, entry): (usize, &Json)| {
                entry
                    .as_i64()
                    .ok_or_else(|| wrong_type(place, format!("{field}[{index}]"), entry, "a whole number"))
            };
            entries.iter().enumerate().map(number).collect()
        }
        other => Err(wrong_type(place, field.to_owned(), &other, "a list of whole numbers")),
    }
}

/// A row whose fields are taken one by one; the rest is kept with the example.
pub(crate) struct Fields<'a> {
    pub place: RowPlace<'a>,
    pub format: RowFormat,
    pub fields: Map<String, Json>,
    /// Whether a field of the format was found, so that the row is not of another format.
    pub found_any: bool,
}

impl Fields<'_> {
    /// The first field of these names.
    pub fn take(
        &mut self,
        names: &[&'static str],
        wanted: &'static str,
    ) -> Result<(&'static str, Json), FormatError> {
        for name in names {
            if let Some(value) = self.fields.shift_remove(*name) {
                self.found_any = true;
                return Ok((name, value));
            }
        }
        let (place, format) = (self.place.to_string(), self.format);
        Err(match recognize_fields(&self.fields) {
            Some(other) if other.format != format && !self.found_any => {
                FormatError::MixedFormats { place, found: other.format, format, first: None }
            }
            _ => FormatError::MissingField { place, format, wanted, fields: field_names(&self.fields) },
        })
    }

    /// A field that the row does not have.
    pub fn missing(&self, wanted: &'static str) -> FormatError {
        let (place, format) = (self.place.to_string(), self.format);
        FormatError::MissingField { place, format, wanted, fields: field_names(&self.fields) }
    }

    /// As `conversation`, for one of several answers: the others need the row's tools too.
    pub fn conversation_like_others(
        &mut self,
        messages: Vec<Json>,
        prompt_messages: usize,
    ) -> Result<Example, FormatError> {
        let fields = self.fields.clone();
        let example = self.conversation(messages, Some(prompt_messages));
        self.fields = fields;
        example
    }

    pub fn take_string(
        &mut self,
        names: &[&'static str],
        wanted: &'static str,
    ) -> Result<String, FormatError> {
        match self.take(names, wanted)? {
            (_, Json::String(text)) => Ok(text),
            (name, other) => Err(wrong_type(self.place, name.to_owned(), &other, "a string")),
        }
    }

    /// A string that is not blank.
    pub fn take_filled_string(
        &mut self,
        names: &[&'static str],
        wanted: &'static str,
    ) -> Result<String, FormatError> {
        match self.take(names, wanted)? {
            (_, Json::String(text)) if !text.trim().is_empty() => Ok(text),
            (name, Json::String(_)) => {
                Err(FormatError::Empty { place: self.place.to_string(), field: name.to_owned() })
            }
            (name, other) => Err(wrong_type(self.place, name.to_owned(), &other, "a string")),
        }
    }

    /// A string that may be missing, null or empty.
    pub fn take_optional_string(&mut self, names: &[&'static str]) -> Result<Option<String>, FormatError> {
        let Some(name) = names.iter().find(|name| self.fields.contains_key(**name)) else {
            return Ok(None);
        };
        match self.fields.shift_remove(*name) {
            Some(Json::String(text)) if !text.is_empty() => Ok(Some(text)),
            Some(Json::String(_) | Json::Null) | None => Ok(None),
            Some(other) => Err(wrong_type(self.place, (*name).to_owned(), &other, "a string")),
        }
    }

    /// A conversation of these messages, with the row's tools and template variables.
    pub fn conversation(
        &mut self,
        mut messages: Vec<Json>,
        prompt_messages: Option<usize>,
    ) -> Result<Example, FormatError> {
        let place = self.place;
        let mut take = |name: &str| match self.fields.shift_remove(name) {
            None | Some(Json::Null) => Ok(None),
            Some(Json::String(text)) if text.trim().is_empty() => Ok(None),
            Some(value) => parse_cell(place, name, value).map(Some),
        };
        let tools = match take("tools")? {
            None => None,
            Some(tools @ Json::Array(_)) => Some(tools),
            Some(other) => return Err(wrong_type(place, "tools".to_owned(), &other, "a list of tools")),
        };
        let more = match take("chat_template_kwargs")? {
            None => Map::new(),
            Some(Json::Object(more)) => more,
            Some(other) => {
                return Err(wrong_type(place, "chat_template_kwargs".to_owned(), &other, "an object"));
            }
        };
        let silent = take_silent(&mut messages);
        let parts = take_parts(&mut messages);
        Ok(Example::Chat(Conversation { messages, parts, silent, prompt_messages, tools, more }))
    }
}
