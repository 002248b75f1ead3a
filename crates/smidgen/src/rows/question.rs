//! Rows as questions: the prompt of each row, and its expected answer.
//!
//! The prompt of a row of a known format is what training would show: the template rendered up to the answer. A row with
//! a plain `question` and `choices` (as on the hub) is handled as in lm-evaluation-harness: the question, a space and the
//! choice. Left out: scoring the answers.

use crate::failure::Failure;
use crate::rows::keys::template_choice;
use serde_json::{Map, Value as Json};
use smidgen_data::bad_rows::BadRows;
use smidgen_data::example::{Conversation, Example};
use smidgen_data::format::{FormatError, RowFormat, RowReading, read_examples, recognize};
use smidgen_data::mask::EncodeError;
use smidgen_data::prepare::PrepareError;
use smidgen_data::source::{RowPlace, RowUnit, SourceError, read_json_rows};
use smidgen_data::template::{DataTemplate, TemplateError, TemplateKind, choose_template, data_moment};
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::tokenizer::chat_template::ChatInput;
use std::path::PathBuf;

/// One row to answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// Where the row is, for messages.
    pub place: String,
    /// The file, and the number of the row in it.
    pub file: usize,
    pub unit: RowUnit,
    pub number: u64,
    pub prompt: String,
    /// Whether the tokenizer adds its special tokens; a chat template has already written them.
    pub add_special: bool,
    /// The text between the prompt and a choice.
    pub delimiter: String,
    /// The expected answer.
    pub expected: Option<String>,
    /// All other fields of the row.
    pub fields: Map<String, Json>,
}

/// The questions of some files.
#[derive(Clone, Debug, PartialEq)]
pub struct Questions {
    pub rows: Vec<Question>,
    /// Whether the rows have a format for which a loss can be computed.
    pub format: Option<RowFormat>,
    pub template: Option<String>,
    /// What was skipped, one line per file.
    pub warnings: Vec<String>,
}

const QUESTION_NAMES: [&str; 3] = ["question", "question_stem", "query"];
/// Fields that make a row one of a known format.
const FORMAT_FIELDS: [&str; 7] =
    ["instruction", "prompt", "messages", "conversations", "conversation", "text", "input_ids"];

/// Whether the first row is a plain question with choices, which no format describes.
pub fn are_plain_questions(files: &[PathBuf]) -> Result<bool, Failure> {
    for file in files {
        let first = read_json_rows(file, |_, row| {
            let Json::Object(fields) = row else { return Err(Halt::Plain(false)) };
            let has = |name: &&str| fields.contains_key(*name);
            let plain = has(&"choices") && QUESTION_NAMES.iter().any(&has);
            Err(Halt::Plain(plain && !FORMAT_FIELDS.iter().any(has)))
        });
        match first {
            Ok(()) => {}
            Err(Halt::Plain(plain)) => return Ok(plain),
            Err(Halt::Failed(failure)) => return Err(failure),
            Err(Halt::Enough) => unreachable!("the first row ends it"),
        }
    }
    Ok(false)
}

/// Reads up to `limit` questions (0: all).
pub fn read_questions(
    files: &[PathBuf],
    data: &smidgen_recipe::Data,
    limit: usize,
    tokenizer: &Tokenizer,
) -> Result<Questions, Failure> {
    let mut rows: Vec<Question> = Vec::new();
    let mut take = |question: Question| -> Result<(), Halt> {
        rows.push(question);
        if limit > 0 && rows.len() == limit { Err(Halt::Enough) } else { Ok(()) }
    };
    let index_of = |place: RowPlace<'_>| files.iter().position(|file| file == place.file).unwrap_or(0);
    let mut bad = BadRows::default();
    let (format, template, read) = if are_plain_questions(files)? {
        let read = files.iter().try_for_each(|file| {
            read_json_rows(file, |place, row| take(plain_question(place, index_of(place), row)?))
        });
        (None, None, read)
    } else {
        let found = recognize(files, data.format, &data.columns, data.on_bad_row).map_err(format_failure)?;
        let format = found.format;
        if matches!(format, RowFormat::Text | RowFormat::Tokens) {
            return Err(Failure::recipe(format!(
                "the rows of `data.eval` have the format `{format}`, which has no question and no answer"
            ))
            .hint("`eval.task = \"loss\"` works with any format"));
        }
        let template =
            choose_template(&template_choice(&data.template), format, tokenizer).map_err(template_failure)?;
        let reading = RowReading { source: files.into(), format, columns: &data.columns, limit: 0 };
        let read = read_examples(reading, |place, row| {
            bad.count(place);
            let row = match row {
                Ok(row) => row,
                Err(error) => return bad.note(place, error.into()).map_err(Halt::from),
            };
            let asked = ask(&row.example, template.as_ref()).map_err(|error| {
                let hint = error.hint();
                Halt::Failed(Failure::data(error).context(place).hint_if_some(hint))
            })?;
            take(Question {
                place: place.to_string(),
                file: index_of(place),
                unit: place.unit,
                number: place.number,
                prompt: asked.prompt,
                add_special: asked.add_special,
                delimiter: asked.delimiter,
                expected: asked.expected,
                fields: row.fields,
            })
        });
        (Some(format), template.map(|template| template.name), read)
    };
    match read {
        Ok(()) | Err(Halt::Enough) => {}
        Err(Halt::Failed(failure)) => return Err(failure),
        Err(Halt::Plain(_)) => unreachable!("only the first row is asked that"),
    }
    let warnings = bad.finish(data.on_bad_row).map_err(prepare_failure)?;
    if rows.is_empty() {
        return Err(format_failure(FormatError::NoRows));
    }
    Ok(Questions { rows, format, template, warnings })
}

fn plain_question(place: RowPlace<'_>, file: usize, row: Json) -> Result<Question, Halt> {
    let failed = |what: &str| Halt::Failed(Failure::data(format!("{place}: {what}")));
    let Json::Object(mut fields) = row else { return Err(failed("not an object with named fields")) };
    let name = QUESTION_NAMES.iter().find(|name| fields.contains_key(**name));
    let Some(name) = name else {
        return Err(failed("the row has none of `question`, `question_stem` and `query`"));
    };
    match fields.remove(*name) {
        Some(Json::String(prompt)) => Ok(Question {
            place: place.to_string(),
            file,
            unit: place.unit,
            number: place.number,
            prompt,
            add_special: true,
            delimiter: " ".to_owned(),
            expected: None,
            fields,
        }),
        _ => Err(failed(&format!("`{name}` is not a text"))),
    }
}

struct Asked {
    prompt: String,
    add_special: bool,
    delimiter: String,
    expected: Option<String>,
}

fn ask(example: &Example, template: Option<&DataTemplate>) -> Result<Asked, EncodeError> {
    match (example, template.map(|template| &template.kind)) {
        (Example::Tokens { .. } | Example::Text(_), _) => unreachable!("refused with their format"),
        (Example::PromptCompletion { prompt, completion }, _) => {
            let words = completion.trim_start();
            Ok(Asked {
                prompt: prompt.clone(),
                add_special: true,
                delimiter: completion[..completion.len() - words.len()].to_owned(),
                expected: Some(words.to_owned()),
            })
        }
        (Example::Alpaca { before, .. }, Some(TemplateKind::Text(_))) if !before.is_empty() => {
            let template = template.map(|template| template.name.clone()).unwrap_or_default();
            Err(EncodeError::NoPlace { fields: "`system` or `history`", template })
        }
        (Example::Alpaca { instruction, input, output, .. }, Some(TemplateKind::Text(text))) => Ok(Asked {
            prompt: text.render(instruction, input.as_deref()),
            add_special: true,
            delimiter: String::new(),
            expected: Some(output.clone()),
        }),
        (Example::Alpaca { before, instruction, input, output }, Some(TemplateKind::Chat(_))) => {
            let conversation = Conversation::of_instruction(before, instruction, input.as_deref(), output);
            ask(&Example::Chat(conversation), template)
        }
        (Example::Chat(conversation), Some(TemplateKind::Chat(chat))) => {
            let all = &conversation.messages;
            let answer = match conversation.prompt_messages {
                Some(prompt) => Some(prompt),
                None => all.iter().rposition(|message| message["role"] == "assistant"),
            };
            let before = answer.unwrap_or(all.len());
            let messages = Json::from(&all[..before]);
            let rendered = chat.render(&ChatInput {
                tools: conversation.tools.as_ref(),
                more: Some(&conversation.more),
                add_generation_prompt: true,
                ..ChatInput::new(&messages, data_moment())
            })?;
            let expected = all.get(before).and_then(|message| message["content"].as_str());
            Ok(Asked {
                prompt: rendered.text,
                add_special: false,
                delimiter: String::new(),
                expected: expected.map(str::to_owned),
            })
        }
        (Example::Chat(_), Some(TemplateKind::Text(_))) => {
            let name = template.map(|template| template.name.clone()).unwrap_or_default();
            Err(EncodeError::NoTemplate(TemplateError::TextForChat { name }))
        }
        (Example::Chat(_) | Example::Alpaca { .. }, None) => {
            Err(EncodeError::NoTemplate(TemplateError::ModelHasNone))
        }
    }
}

/// Why reading ended early.
enum Halt {
    Enough,
    Plain(bool),
    Failed(Failure),
}

impl From<SourceError> for Halt {
    fn from(error: SourceError) -> Halt {
        let hint = error.hint();
        Halt::Failed(Failure::data(error).hint_if_some(hint))
    }
}

impl From<FormatError> for Halt {
    fn from(error: FormatError) -> Halt {
        Halt::Failed(format_failure(error))
    }
}

impl From<PrepareError> for Halt {
    fn from(error: PrepareError) -> Halt {
        Halt::Failed(prepare_failure(error))
    }
}

fn prepare_failure(error: PrepareError) -> Failure {
    let hint = error.hint();
    Failure::data(error).hint_if_some(hint)
}

fn format_failure(error: FormatError) -> Failure {
    let hint = error.hint();
    let failure = match error {
        FormatError::NoRows => Failure::data(error).context("`data.eval`"),
        _ => Failure::data(error),
    };
    failure.hint_if_some(hint)
}

fn template_failure(error: TemplateError) -> Failure {
    let hint = error.hint();
    Failure::recipe(error).hint_if_some(hint)
}
