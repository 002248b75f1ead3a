//! Row formats: which one a file has, and how a row of it becomes an [`Example`].
//!
//! | format | fields | other names |
//! |---|---|---|
//! | alpaca | `instruction`, `output`; `input`, `system` and `history` may be missing, null or empty | `response`, `context` |
//! | alpaca-prompt | the same; instruction and input become the Alpaca prompt in the user's turn | the same |
//! | chat | `messages`: a list of `role` and `content`; `tools`, `chat_template_kwargs` | `conversations`, `conversation`, with `from` and `value` |
//! | prompt-completion | `prompt`, `completion`: both strings that are not blank, or both lists of messages | `prompt` and `response`, `question` and `answer`, `input` and `output` |
//! | text | `text` | |
//! | tokens | `input_ids`; `labels` may be missing | |
//!
//! Rows to compare are in `preference_row.rs`. `data.columns` renames columns first. Nothing needs a tokenizer.

use std::path::Path;

use serde_json::Value as Json;

pub use crate::chat_row::kind_of;
use crate::chat_row::{field_names, message, read_history, read_messages, wrong_type};
pub use crate::example::RowFormat;
use crate::example::{Example, ExampleRow, has_audio};
pub use crate::format_error::FormatError;
use crate::preference_row::{read_preference, read_token_group};
pub use crate::row_fields::Recognized;
use crate::row_fields::{
    CONVERSATION_NAMES, Fields, INPUT_NAMES, OUTPUT_NAMES, PAIRS, read_whole_numbers, recognize_fields,
};
use crate::source::{FileKind, RowPlace, RowResult, RowSource, SourceError, file_kind};
use crate::template::TextPrompt;
use smidgen_ir::words::{ClosedWord, ColumnRole, DataFormat, OnBadRow};

/// The column for each role (`data.columns`), in the order written.
pub type Columns = [(ColumnRole, String)];

/// The format of all rows: `data.format`, else the format that `data.columns` belong to, else the format of the first
/// row of each file.
///
/// Files without rows are skipped; at least one file must have rows.
pub fn recognize<'a>(
    source: impl Into<RowSource<'a>>,
    wanted: DataFormat,
    columns: &Columns,
    on_bad_row: OnBadRow,
) -> Result<Recognized, FormatError> {
    let named = columns.iter().map(|(role, column)| format!("`{column}` as `{role}`"));
    let named = named.collect::<Vec<_>>().join(", ");
    let mapped = match columns {
        [] => String::new(),
        _ => format!(", and `data.columns` takes {named}"),
    };
    let format = match wanted {
        DataFormat::Auto => {
            return match format_of_roles(columns)? {
                Some(format) => {
                    Ok(Recognized { format, reason: format!("{format}: `data.columns` takes {named}") })
                }
                None => {
                    let mut found = recognize_rows(source.into(), columns, on_bad_row)?;
                    found.reason.push_str(&mapped);
                    Ok(found)
                }
            };
        }
        DataFormat::Alpaca => RowFormat::Alpaca,
        DataFormat::AlpacaPrompt => RowFormat::AlpacaPrompt,
        DataFormat::Chat => RowFormat::Chat,
        DataFormat::PromptCompletion => RowFormat::PromptCompletion,
        DataFormat::Text => RowFormat::Text,
        DataFormat::Tokens => RowFormat::Tokens,
        DataFormat::Preference => RowFormat::Preference,
    };
    Ok(Recognized { format, reason: format!("{format}: set by `data.format`{mapped}") })
}

/// The format that the roles belong to. Roles such as `system`, which several formats use, decide nothing.
fn format_of_roles(columns: &Columns) -> Result<Option<RowFormat>, FormatError> {
    let mut found: Option<(ColumnRole, RowFormat)> = None;
    for &(role, _) in columns {
        let format = match role {
            // Rows to compare have these columns too.
            ColumnRole::Prompt | ColumnRole::Completion
                if columns.iter().any(|(role, _)| is_judgement(*role)) =>
            {
                continue;
            }
            ColumnRole::Prompt | ColumnRole::Completion => RowFormat::PromptCompletion,
            ColumnRole::Instruction => RowFormat::Alpaca,
            ColumnRole::Messages => RowFormat::Chat,
            ColumnRole::Text => RowFormat::Text,
            ColumnRole::InputIds | ColumnRole::Labels => RowFormat::Tokens,
            ColumnRole::Chosen | ColumnRole::Rejected | ColumnRole::Label => RowFormat::Preference,
            ColumnRole::Input
            | ColumnRole::Output
            | ColumnRole::System
            | ColumnRole::History
            | ColumnRole::Tools
            | ColumnRole::ChatTemplateKwargs => continue,
        };
        match found {
            None => found = Some((role, format)),
            Some((_, first)) if first == format => {}
            Some((first, _)) => return Err(FormatError::RolesDiffer { first, other: role }),
        }
    }
    Ok(found.map(|(_, format)| format))
}

fn is_judgement(role: ColumnRole) -> bool {
    matches!(role, ColumnRole::Chosen | ColumnRole::Rejected | ColumnRole::Label)
}

/// Rows to read, and how. The format is a [`DataFormat`] until it is recognized.
#[derive(Clone, Copy, Debug)]
pub struct RowReading<'a, F = RowFormat> {
    pub source: RowSource<'a>,
    pub format: F,
    pub columns: &'a Columns,
    /// Maximum rows of all files together, from the first; 0 = all.
    pub limit: u64,
}

/// Calls `on_row` for each row, in order, with its example or with what is wrong with it.
///
/// After the last row, a column of `data.columns` that no row had is an error.
pub fn read_examples<E: From<FormatError>>(
    reading: RowReading<'_>,
    mut on_row: impl FnMut(RowPlace<'_>, Result<ExampleRow, FormatError>) -> Result<(), E>,
) -> Result<(), E> {
    let RowReading { source, format, columns, limit } = reading;
    let mut unseen: Vec<_> = columns.iter().collect();
    let (mut rows, mut first_fields) = (0, None);
    for file in source.files() {
        let mut first_row = None;
        let result = source.read_rows(file, |place, row| {
            if limit > 0 && rows == limit {
                return Err(Stopped::Enough);
            }
            rows += 1;
            if let Ok(Json::Object(fields)) = &row {
                unseen.retain(|(_, column)| !fields.contains_key(column));
                first_fields.get_or_insert_with(|| field_names(fields));
            }
            let row = row.map_err(FormatError::from).map(|row| rename_columns(columns, row));
            let example = row.and_then(|row| example_of(format, place, row)).map_err(|error| match error {
                FormatError::MixedFormats { place, found, format, first: None } => {
                    FormatError::MixedFormats { place, found, format, first: first_row.clone() }
                }
                error => error,
            });
            first_row.get_or_insert_with(|| format!("{} {}", place.unit, place.number));
            on_row(place, example).map_err(Stopped::Caller)
        });
        match result {
            Ok(()) => {}
            Err(Stopped::Enough) => break,
            Err(Stopped::Caller(error)) => return Err(error),
            Err(Stopped::Source(error)) => return Err(E::from(FormatError::from(error))),
        }
    }
    match (unseen.first(), first_fields) {
        (Some((role, column)), Some(fields)) => {
            Err(E::from(FormatError::NoColumn { column: column.clone(), role: *role, fields }))
        }
        _ => Ok(()),
    }
}

/// Renames columns to their roles. Another column that already has such a name is removed.
pub fn rename_columns(columns: &Columns, row: Json) -> Json {
    let Json::Object(mut fields) = row else { return row };
    let taken: Vec<Option<Json>> = columns.iter().map(|(_, column)| fields.shift_remove(column)).collect();
    for ((role, _), value) in columns.iter().zip(taken) {
        fields.shift_remove(role.word());
        if let Some(value) = value {
            fields.insert(role.word().to_owned(), value);
        }
    }
    Json::Object(fields)
}

/// The example of a row, and the row's other fields.
pub fn example_of(format: RowFormat, place: RowPlace<'_>, row: Json) -> Result<ExampleRow, FormatError> {
    let fields = match row {
        Json::Object(fields) => fields,
        other => {
            return Err(FormatError::NotAnObject { place: place.to_string(), found: kind_of(&other) });
        }
    };
    let mut row = Fields { place, format, fields, found_any: false };
    let example = match format {
        RowFormat::Alpaca | RowFormat::AlpacaPrompt => read_alpaca(&mut row)?,
        RowFormat::Chat => read_chat(&mut row)?,
        RowFormat::PromptCompletion => read_prompt_completion(&mut row)?,
        RowFormat::Text => Example::Text(row.take_filled_string(&["text"], "`text`")?),
        RowFormat::Tokens if row.fields.contains_key("prompt_ids") => read_token_group(&mut row)?,
        RowFormat::Tokens => read_tokens(&mut row)?,
        RowFormat::Preference => read_preference(&mut row)?,
    };
    match format {
        RowFormat::Alpaca
        | RowFormat::AlpacaPrompt
        | RowFormat::Chat
        | RowFormat::PromptCompletion
        | RowFormat::Preference => refuse_images(&row)?,
        RowFormat::Text | RowFormat::Tokens => {}
    }
    Ok(ExampleRow { example, fields: row.fields })
}

/// Refuses a row whose text is about images in a column of their own: without them it would teach to guess.
pub(crate) fn refuse_images(row: &Fields<'_>) -> Result<(), FormatError> {
    let is_filled = |value: &Json| match value {
        Json::Null => false,
        Json::String(text) => !text.trim().is_empty(),
        Json::Array(images) => images.iter().any(|image| !image.is_null()),
        _ => true,
    };
    let found = ["images", "image"].into_iter().find(|name| row.fields.get(*name).is_some_and(is_filled));
    found.map_or(Ok(()), |field| Err(FormatError::Images { place: row.place.to_string(), field }))
}

/// Why reading rows ended early.
enum Stopped<E> {
    Enough,
    Source(SourceError),
    Caller(E),
}

impl<E> From<SourceError> for Stopped<E> {
    fn from(error: SourceError) -> Self {
        Stopped::Source(error)
    }
}

fn recognize_rows(
    source: RowSource<'_>,
    columns: &Columns,
    on_bad_row: OnBadRow,
) -> Result<Recognized, FormatError> {
    let mut agreed: Option<(&Path, Recognized)> = None;
    for file in source.files() {
        let Some(found) = recognize_file(source, file, columns, on_bad_row)? else {
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

/// The format of the first row of a file that is an object; with `on_bad_row = "skip"`, of the first row that has a
/// known format. `None` for a file without rows.
fn recognize_file(
    source: RowSource<'_>,
    file: &Path,
    columns: &Columns,
    on_bad_row: OnBadRow,
) -> Result<Option<Recognized>, FormatError> {
    if matches!(source, RowSource::Files(_)) && file_kind(file)? == FileKind::Document {
        let reason = "text: a `.txt` or `.md` file is a document".to_owned();
        return Ok(Some(Recognized { format: RowFormat::Text, reason }));
    }
    let mut first_error = None;
    let found = source.read_rows(file, |place, row: RowResult| {
        let error = match row.map(|row| rename_columns(columns, row)) {
            Ok(Json::Object(fields)) => {
                let unknown =
                    || FormatError::Unrecognized { place: place.to_string(), fields: field_names(&fields) };
                match (recognize_fields(&fields), on_bad_row) {
                    (None, OnBadRow::Skip) => unknown(),
                    (found, _) => return Err(Stopped::Caller(found.ok_or_else(unknown))),
                }
            }
            Ok(other) => FormatError::NotAnObject { place: place.to_string(), found: kind_of(&other) },
            Err(error) => FormatError::from(error),
        };
        first_error.get_or_insert(error);
        Ok(())
    });
    match (found, first_error) {
        (Ok(()), None) => Ok(None),
        (Ok(()), Some(error)) => Err(error),
        (Err(Stopped::Caller(recognized)), _) => recognized.map(Some),
        (Err(Stopped::Source(error)), _) => Err(error.into()),
        (Err(Stopped::Enough), _) => unreachable!("reading without a limit does not end early"),
    }
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
    if row.format == RowFormat::AlpacaPrompt {
        let instruction = TextPrompt::Alpaca.render(&instruction, input.as_deref());
        return Ok(Example::Alpaca { before, instruction, input: None, output });
    }
    Ok(Example::Alpaca { before, instruction, input, output })
}

fn read_chat(row: &mut Fields<'_>) -> Result<Example, FormatError> {
    let (name, value) = row.take(&CONVERSATION_NAMES, "`messages`")?;
    let mut messages = read_messages(row.place, name, value, true)?;
    // ShareGPT has the system prompt in a field of its own.
    if messages[0]["role"] != "system"
        && let Some(words) = row.take_optional_string(&["system"])?
    {
        messages.insert(0, message("system", &words));
    }
    row.conversation(messages, None)
}

fn read_prompt_completion(row: &mut Fields<'_>) -> Result<Example, FormatError> {
    let has = |name: &str| row.fields.contains_key(name);
    let pair = PAIRS.into_iter().find(|(prompt, completion)| has(prompt) && has(completion));
    let (prompt_name, name) = pair.unwrap_or(PAIRS[0]);
    let (prompt_name, prompt) = row.take(&[prompt_name], "`prompt`")?;
    let (name, completion) = row.take(&[name], "`completion`")?;
    // The clips of a row are a prompt too.
    let needs_text = !has_audio(&row.fields);
    let empty = |field: &str| FormatError::Empty { place: row.place.to_string(), field: field.to_owned() };
    match (prompt, completion) {
        (Json::String(prompt), Json::String(_)) if needs_text && prompt.trim().is_empty() => {
            Err(empty(prompt_name))
        }
        (Json::String(_), Json::String(completion)) if completion.trim().is_empty() => Err(empty(name)),
        (Json::String(prompt), Json::String(completion)) => {
            Ok(Example::PromptCompletion { prompt, completion })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::RowUnit;
    use serde_json::json;

    #[test]
    fn rows_with_images_are_refused() {
        let turn = |role: &str, content: &str| json!({"role": role, "content": content});
        let read = |format: RowFormat, row: Json| {
            example_of(format, RowPlace { file: Path::new("a.jsonl"), unit: RowUnit::Line, number: 7 }, row)
        };
        let said = |format: RowFormat, row: Json| read(format, row).unwrap_err().to_string();
        let with = |field: &str, value: Json| {
            let mut row = json!({"messages": [turn("user", "what is it?"), turn("assistant", "a cat")]});
            row[field] = value;
            row
        };
        for (field, value) in [
            ("images", json!(["iVBOR"])),
            ("image", json!("cat.png")),
            ("images", json!([{"path": "cat.png"}])),
        ] {
            let row = with(field, value);
            let expected = format!("`a.jsonl` line 7: `{field}` has images, and only text is trained");
            assert_eq!(said(RowFormat::Chat, row.clone()), expected);
            assert!(read(RowFormat::Chat, row).unwrap_err().hint().unwrap().contains("data.on_bad_row"));
        }
        for (field, value) in
            [("images", json!([])), ("image", json!(null)), ("images", json!([null])), ("image", json!(""))]
        {
            assert!(read(RowFormat::Chat, with(field, value)).is_ok());
        }
        let pair = json!({"prompt": "what is it?", "completion": "a cat", "image": "cat.png"});
        assert!(said(RowFormat::PromptCompletion, pair).contains("`image` has images"));
        assert!(read(RowFormat::Text, json!({"text": "x", "image": "cat.png"})).is_ok());
        let part = json!({"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
                                       {"role": "assistant", "content": "a cat"}]});
        let expected =
            "`a.jsonl` line 7: `messages[0].content[0]` is a part of type `image`, only text is supported";
        assert_eq!(said(RowFormat::Chat, part), expected);
    }
}
