//! Row formats: which one a file has, and what a row of it teaches.
//!
//! | format | fields | other names |
//! |---|---|---|
//! | alpaca | `instruction`, `output`; `input`, `system` and `history` may be missing, null or empty | `response`, `context` |
//! | chat | `messages`: a list of `role` and `content`; `tools`, `chat_template_kwargs` | `conversations`, `conversation`, with `from` and `value` |
//! | prompt-completion | `prompt`, `completion`: both strings or both lists of messages | `response` |
//! | text | `text` | |
//! | tokens | `input_ids`; `labels` may be missing | |
//!
//! A list in a cell of a table is read from its JSON text. Fields that the format does not use are kept.
//! Leaves out files (`source.rs`), messages (`chat_row.rs`), and everything that needs a tokenizer.

use std::path::Path;

use serde_json::{Map, Value as Json};

use crate::chat_row::{
    field_names, is_sharegpt, kind_of, message, parse_cell, read_history, read_messages, take_silent,
    wrong_type,
};
pub use crate::example::RowFormat;
use crate::example::{Conversation, Example, ExampleRow};
pub use crate::format_error::FormatError;
use crate::source::{FileKind, RowPlace, RowSource, SourceError, file_kind};
use smidgen_ir::words::DataFormat;

/// A format and why it was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recognized {
    pub format: RowFormat,
    /// One clause for people, such as "alpaca: rows have `instruction` and `output`".
    pub reason: String,
}

impl Recognized {
    /// For a sentence about several: "alpaca (rows have `instruction` and `output`)".
    fn in_brackets(&self) -> String {
        let because = self.reason.split_once(": ").map_or(self.reason.as_str(), |(_, because)| because);
        format!("{} ({because})", self.format)
    }
}

/// The format of all rows: the one that the recipe names, or the one that the first row of each file has.
///
/// Files without rows are skipped; at least one file must have rows.
pub fn recognize<'a>(
    source: impl Into<RowSource<'a>>,
    wanted: DataFormat,
) -> Result<Recognized, FormatError> {
    let format = match wanted {
        DataFormat::Auto => return recognize_rows(source.into()),
        DataFormat::Alpaca => RowFormat::Alpaca,
        DataFormat::Chat => RowFormat::Chat,
        DataFormat::PromptCompletion => RowFormat::PromptCompletion,
        DataFormat::Text => RowFormat::Text,
        DataFormat::Tokens => RowFormat::Tokens,
    };
    Ok(Recognized { format, reason: format!("{format}: `data.format` says so") })
}

/// Calls `on_row` for each row, in order.
pub fn read_examples<'a, E: From<FormatError>>(
    source: impl Into<RowSource<'a>>,
    format: RowFormat,
    mut on_row: impl FnMut(RowPlace<'_>, ExampleRow) -> Result<(), E>,
) -> Result<(), E> {
    let source = source.into();
    for file in source.files() {
        let mut first_row = None;
        let result = source.read_json_rows(file, |place, row| {
            let example = example_of(format, place, row).map_err(|error| match error {
                FormatError::MixedFormats { place, found, format, first: None } => {
                    FormatError::MixedFormats { place, found, format, first: first_row.clone() }
                }
                error => error,
            });
            first_row.get_or_insert_with(|| format!("{} {}", place.unit, place.number));
            on_row(place, example.map_err(Stopped::from_row)?).map_err(Stopped::Caller)
        });
        match result {
            Ok(()) => {}
            Err(Stopped::Caller(error)) => return Err(error),
            Err(Stopped::Source(error)) => return Err(E::from(FormatError::from(error))),
        }
    }
    Ok(())
}

/// What a row teaches, and its other fields.
pub fn example_of(format: RowFormat, place: RowPlace<'_>, row: Json) -> Result<ExampleRow, FormatError> {
    let fields = match row {
        Json::Object(fields) => fields,
        other => {
            return Err(FormatError::NotAnObject { place: place.to_string(), found: kind_of(&other) });
        }
    };
    let mut row = Fields { place, format, fields, is_begun: false };
    let example = match format {
        RowFormat::Alpaca => read_alpaca(&mut row)?,
        RowFormat::Chat => read_chat(&mut row)?,
        RowFormat::PromptCompletion => read_prompt_completion(&mut row)?,
        RowFormat::Text => Example::Text(row.take_filled_string(&["text"], "`text`")?),
        RowFormat::Tokens => read_tokens(&mut row)?,
    };
    Ok(ExampleRow { example, fields: row.fields })
}

/// Why reading rows ended early.
enum Stopped<E> {
    Source(SourceError),
    Caller(E),
}

impl<E> From<SourceError> for Stopped<E> {
    fn from(error: SourceError) -> Self {
        Stopped::Source(error)
    }
}

impl<E: From<FormatError>> Stopped<E> {
    fn from_row(error: FormatError) -> Self {
        Stopped::Caller(E::from(error))
    }
}

fn recognize_rows(source: RowSource<'_>) -> Result<Recognized, FormatError> {
    let mut agreed: Option<(&Path, Recognized)> = None;
    for file in source.files() {
        let Some(found) = recognize_file(source, file)? else {
            continue;
        };
        match &agreed {
            None => agreed = Some((file, found)),
            Some((_, first)) if first.format == found.format => {}
            Some((first_file, first)) => {
                return Err(FormatError::FilesDiffer {
                    first_file: first_file.display().to_string(),
                    first: first.in_brackets(),
                    other_file: file.display().to_string(),
                    other: found.in_brackets(),
                });
            }
        }
    }
    agreed.map(|(_, recognized)| recognized).ok_or(FormatError::NoRows)
}

/// The format of the first row of a file, if it has one.
fn recognize_file(source: RowSource<'_>, file: &Path) -> Result<Option<Recognized>, FormatError> {
    if matches!(source, RowSource::Files(_)) && file_kind(file)? == FileKind::Text {
        let reason = "text: a `.txt` file has one sample per line".to_owned();
        return Ok(Some(Recognized { format: RowFormat::Text, reason }));
    }
    let first = source.read_json_rows(file, |place, row| {
        Err(Stopped::Caller(match &row {
            Json::Object(fields) => recognize_fields(fields).ok_or_else(|| FormatError::Unrecognized {
                place: place.to_string(),
                fields: field_names(fields),
            }),
            other => Err(FormatError::NotAnObject { place: place.to_string(), found: kind_of(other) }),
        }))
    });
    match first {
        Ok(()) => Ok(None),
        Err(Stopped::Caller(recognized)) => recognized.map(Some),
        Err(Stopped::Source(error)) => Err(error.into()),
    }
}

const CONVERSATION_NAMES: [&str; 3] = ["messages", "conversations", "conversation"];
const COMPLETION_NAMES: [&str; 2] = ["completion", "response"];
const OUTPUT_NAMES: [&str; 2] = ["output", "response"];
const INPUT_NAMES: [&str; 2] = ["input", "context"];

/// The most specific fields first: published data often has the others as well, such as a `text` that repeats an
/// instruction or a `prompt` that repeats a first message.
fn recognize_fields(fields: &Map<String, Json>) -> Option<Recognized> {
    let has = |name: &str| fields.contains_key(name);
    let first_of = |names: &[&'static str]| names.iter().copied().find(|name| has(name));
    let (format, what) = if has("input_ids") {
        (RowFormat::Tokens, "`input_ids`".to_owned())
    } else if let Some(name) = first_of(&CONVERSATION_NAMES) {
        let shape = if is_sharegpt(&fields[name]) { " with `from` and `value`" } else { "" };
        (RowFormat::Chat, format!("`{name}`{shape}"))
    } else if let (true, Some(name)) = (has("prompt"), first_of(&COMPLETION_NAMES)) {
        (RowFormat::PromptCompletion, format!("`prompt` and `{name}`"))
    } else if let (true, Some(name)) = (has("instruction"), first_of(&OUTPUT_NAMES)) {
        (RowFormat::Alpaca, format!("`instruction` and `{name}`"))
    } else if has("text") {
        (RowFormat::Text, "`text`".to_owned())
    } else {
        return None;
    };
    Some(Recognized { format, reason: format!("{format}: rows have {what}") })
}

fn read_alpaca(row: &mut Fields<'_>) -> Result<Example, FormatError> {
    let instruction = row.take_string(&["instruction"], "`instruction`")?;
    let output = row.take_filled_string(&OUTPUT_NAMES, "`output`")?;
    let input = row.take_optional_string(&INPUT_NAMES)?;
    let system = row.take_optional_string(&["system"])?;
    let mut before: Vec<Json> = system.iter().map(|words| message("system", words)).collect();
    before.extend(read_history(row.place, row.fields.shift_remove("history"))?);
    if instruction.trim().is_empty() && input.is_none() {
        return Err(FormatError::Empty { place: row.place.to_string(), field: "instruction".to_owned() });
    }
    Ok(Example::Alpaca { before, instruction, input, output })
}

fn read_chat(row: &mut Fields<'_>) -> Result<Example, FormatError> {
    let (name, value) = row.take(&CONVERSATION_NAMES, "`messages`")?;
    let mut messages = read_messages(row.place, name, value, true)?;
    // ShareGPT has the system prompt in a field of its own.
    if name != "messages"
        && messages[0]["role"] != "system"
        && let Some(words) = row.take_optional_string(&["system"])?
    {
        messages.insert(0, message("system", &words));
    }
    row.conversation(messages, None)
}

fn read_prompt_completion(row: &mut Fields<'_>) -> Result<Example, FormatError> {
    let (prompt_name, prompt) = row.take(&["prompt"], "`prompt`")?;
    let (name, completion) = row.take(&COMPLETION_NAMES, "`completion`")?;
    match (prompt, completion) {
        (Json::String(prompt), Json::String(completion)) if !completion.trim().is_empty() => {
            Ok(Example::PromptCompletion { prompt, completion })
        }
        (Json::String(_), Json::String(_)) => {
            Err(FormatError::Empty { place: row.place.to_string(), field: name.to_owned() })
        }
        (prompt @ Json::Array(_), completion @ Json::Array(_)) => {
            let mut messages = read_messages(row.place, prompt_name, prompt, false)?;
            let prompt_messages = messages.len();
            messages.extend(read_messages(row.place, name, completion, true)?);
            row.conversation(messages, Some(prompt_messages))
        }
        (Json::String(_), other) => {
            Err(wrong_type(row.place, name.to_owned(), &other, "a string, as `prompt` is"))
        }
        (Json::Array(_), other) => {
            Err(wrong_type(row.place, name.to_owned(), &other, "a list of messages, as `prompt` is"))
        }
        (other, _) => {
            Err(wrong_type(row.place, prompt_name.to_owned(), &other, "a string or a list of messages"))
        }
    }
}

fn read_tokens(row: &mut Fields<'_>) -> Result<Example, FormatError> {
    let (name, ids) = row.take(&["input_ids"], "`input_ids`")?;
    let ids = read_whole_numbers(row.place, name, ids)?;
    let labels = match row.fields.shift_remove("labels") {
        None | Some(Json::Null) => None,
        Some(labels) => Some(read_whole_numbers(row.place, "labels", labels)?),
    };
    Ok(Example::Tokens { ids, labels })
}

fn read_whole_numbers(place: RowPlace<'_>, field: &str, value: Json) -> Result<Vec<i64>, FormatError> {
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
struct Fields<'a> {
    place: RowPlace<'a>,
    format: RowFormat,
    fields: Map<String, Json>,
    /// A field of the format was found, so another format is no longer suspected.
    is_begun: bool,
}

impl Fields<'_> {
    /// The first field of these names.
    fn take(
        &mut self,
        names: &[&'static str],
        wanted: &'static str,
    ) -> Result<(&'static str, Json), FormatError> {
        for name in names {
            if let Some(value) = self.fields.shift_remove(*name) {
                self.is_begun = true;
                return Ok((name, value));
            }
        }
        let (place, format) = (self.place.to_string(), self.format);
        Err(match recognize_fields(&self.fields) {
            Some(other) if other.format != format && !self.is_begun => {
                FormatError::MixedFormats { place, found: other.format, format, first: None }
            }
            _ => FormatError::MissingField { place, format, wanted, fields: field_names(&self.fields) },
        })
    }

    fn take_string(&mut self, names: &[&'static str], wanted: &'static str) -> Result<String, FormatError> {
        match self.take(names, wanted)? {
            (_, Json::String(text)) => Ok(text),
            (name, other) => Err(wrong_type(self.place, name.to_owned(), &other, "a string")),
        }
    }

    fn take_filled_string(
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
    fn take_optional_string(&mut self, names: &[&'static str]) -> Result<Option<String>, FormatError> {
        let Some(name) = names.iter().find(|name| self.fields.contains_key(**name)) else {
            return Ok(None);
        };
        match self.fields.shift_remove(*name) {
            Some(Json::String(text)) if !text.is_empty() => Ok(Some(text)),
            Some(Json::String(_) | Json::Null) | None => Ok(None),
            Some(other) => Err(wrong_type(self.place, (*name).to_owned(), &other, "a string")),
        }
    }

    /// Messages with the template's other variables.
    fn conversation(
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
        Ok(Example::Chat(Conversation { messages, silent, prompt_messages, tools, more }))
    }
}
