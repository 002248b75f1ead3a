//! Rows as questions: the prompt of each row, and its expected answer.
//!
//! The prompt of a row of a known format is that of training: the template rendered up to the answer. A row with a
//! plain `question` and `choices` (as data sets on the hub have) is handled as in lm-evaluation-harness: the question,
//! a space and the choice. Left out: scoring the answers.

use crate::failure::Failure;
use crate::rows::keys::template_choice;
use serde_json::{Map, Value as Json};
use smidgen_data::bad_rows::BadRows;
use smidgen_data::example::{Conversation, Example, has_audio};
use smidgen_data::format::{Columns, FormatError, RowFormat, RowReading, kind_of, read_examples, recognize};
use smidgen_data::mask::EncodeError;
use smidgen_data::prepare::PrepareError;
use smidgen_data::source::{RowPlace, RowUnit, SourceError, read_rows};
use smidgen_data::template::{
    DataTemplate, TemplateError, TemplateKind, choose_template, no_chat_template, template_time,
};
use smidgen_data::tokens::TokenSet;
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::tokenizer::chat_template::ChatInput;
use smidgen_recipe::DataFormat;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

/// A row to answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// File and row, for messages.
    pub place: String,
    /// Index of the file; `number` counts the rows in it.
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

#[derive(Clone, Debug, PartialEq)]
pub struct Questions {
    pub rows: Vec<Question>,
    /// The format of the rows, if it is one for which a loss can be computed.
    pub format: Option<RowFormat>,
    pub template: Option<String>,
    /// Rows that were skipped, one line per file.
    pub warnings: Vec<String>,
}

const QUESTION_NAMES: [&str; 3] = ["question", "question_stem", "query"];
/// Fields that only rows of a training format have.
const FORMAT_FIELDS: [&str; 7] =
    ["instruction", "prompt", "messages", "conversations", "conversation", "text", "input_ids"];

/// Whether the first valid row is a plain question with choices, which is not a training format.
pub fn are_plain_questions(files: &[PathBuf]) -> Result<bool, Failure> {
    for file in files {
        let first = read_rows(file, |_, row| {
            // Bad rows are reported or skipped when all rows are read.
            let Ok(row) = row else { return Ok(()) };
            let Json::Object(fields) = row else { return Err(Halt::Plain(false)) };
            let has = |name: &&str| fields.contains_key(*name);
            let plain = has(&"choices") && QUESTION_NAMES.iter().any(&has);
            Err(Halt::Plain(plain && !FORMAT_FIELDS.iter().any(has)))
        });
        match first {
            Ok(()) => {}
            Err(Halt::Plain(plain)) => return Ok(plain),
            Err(Halt::Failed(failure)) => return Err(failure),
            Err(Halt::Enough) => unreachable!("reading ends at the first row"),
        }
    }
    Ok(false)
}

/// Rows of a training format, of which some become questions.
#[derive(Clone, Copy)]
pub struct AskedRows<'a> {
    /// The recipe key that names them, for messages.
    pub key: &'static str,
    pub files: &'a [PathBuf],
    pub format: DataFormat,
    pub columns: &'a Columns,
    /// `None` takes all rows.
    pub only: Option<&'a HeldOut>,
}

/// The rows that `data.split` holds out, by file and number.
#[derive(Debug, Default)]
pub struct HeldOut(HashMap<PathBuf, HashSet<u64>>);

impl HeldOut {
    pub fn of(set: &TokenSet) -> HeldOut {
        let mut rows: HashMap<PathBuf, HashSet<u64>> = HashMap::new();
        for sample in 0..set.len() {
            let place = set.place(sample);
            match rows.get_mut(place.file) {
                Some(numbers) => drop(numbers.insert(place.number)),
                None => drop(rows.insert(place.file.to_path_buf(), HashSet::from([place.number]))),
            }
        }
        HeldOut(rows)
    }

    fn has(&self, place: RowPlace<'_>) -> bool {
        self.0.get(place.file).is_some_and(|numbers| numbers.contains(&place.number))
    }
}

/// Reads up to `limit` questions (0: all) from files of plain questions or of a training format.
pub fn read_questions(
    files: &[PathBuf],
    data: &smidgen_recipe::Data,
    limit: usize,
    tokenizer: &Tokenizer,
) -> Result<Questions, Failure> {
    if !are_plain_questions(files)? {
        let smidgen_recipe::Data { format, columns, .. } = data;
        let rows = AskedRows { key: "data.eval", files, format: *format, columns, only: None };
        return read_asked(&[rows], data, limit, tokenizer);
    }
    let mut rows: Vec<Question> = Vec::new();
    let mut bad = BadRows::default();
    let read = (0..).zip(files).try_for_each(|(index, file)| {
        read_rows(file, |place, row| {
            bad.count(place);
            match row.map_err(FormatError::from).and_then(|row| plain_question(place, index, row)) {
                Ok(question) => rows.push(question),
                Err(error) => bad.note(place, error.into())?,
            }
            if limit > 0 && rows.len() == limit { Err(Halt::Enough) } else { Ok(()) }
        })
    });
    if let Err(Halt::Failed(failure)) = read {
        return Err(failure);
    }
    let warnings = bad.finish(data.on_bad_row).map_err(prepare_failure)?;
    if rows.is_empty() {
        Err(format_failure("data.eval", FormatError::NoRows))
    } else {
        Ok(Questions { rows, format: None, template: None, warnings })
    }
}

/// Reads up to `limit` questions (0: all) from sources of training formats. Files are numbered across sources.
pub fn read_asked(
    sources: &[AskedRows<'_>],
    data: &smidgen_recipe::Data,
    limit: usize,
    tokenizer: &Tokenizer,
) -> Result<Questions, Failure> {
    let mut all = Questions { rows: vec![], format: None, template: None, warnings: vec![] };
    let mut first_file = 0;
    for source in sources {
        let AskedRows { key, files, format, columns, only } = *source;
        let found =
            recognize(files, format, columns, data.on_bad_row).map_err(|error| format_failure(key, error))?;
        let format = found.format;
        if matches!(format, RowFormat::Text | RowFormat::Tokens | RowFormat::Preference) {
            return Err(Failure::recipe(format!(
                "the rows of `{key}` have the format `{format}`, which has no question and no answer"
            ))
            .hint("`eval.task = \"loss\"` works with any format"));
        }
        let template =
            choose_template(&template_choice(&data.template), format, tokenizer).map_err(template_failure)?;
        let reading = RowReading { source: files.into(), format, columns, limit: 0 };
        let index_of = |place: RowPlace<'_>| files.iter().position(|file| file == place.file).unwrap_or(0);
        let mut bad = BadRows::default();
        let read = read_examples(reading, |place, row| {
            if only.is_some_and(|held_out| !held_out.has(place)) {
                return Ok(());
            }
            bad.count(place);
            let row = match row {
                Ok(row) => row,
                Err(error) => return bad.note(place, error.into()).map_err(Halt::from),
            };
            if has_audio(&row.fields) {
                let what = format!("{place} has `audio`, and questions are text only");
                return Err(Halt::Failed(
                    Failure::data(what).hint("`eval.task = \"loss\"` evaluates rows with audio"),
                ));
            }
            let asked = ask(&row.example, template.as_ref(), tokenizer).map_err(|error| {
                let hint = error.hint();
                Halt::Failed(Failure::data(error).context(place).hint_if_some(hint))
            })?;
            all.rows.push(Question {
                place: place.to_string(),
                file: first_file + index_of(place),
                unit: place.unit,
                number: place.number,
                prompt: asked.prompt,
                add_special: asked.add_special,
                delimiter: asked.delimiter,
                expected: asked.expected,
                fields: row.fields,
            });
            if limit > 0 && all.rows.len() == limit { Err(Halt::Enough) } else { Ok(()) }
        });
        let is_enough = match read {
            Ok(()) => false,
            Err(Halt::Enough) => true,
            Err(Halt::Failed(failure)) => return Err(failure),
            Err(Halt::Plain(_)) => unreachable!("only `are_plain_questions` returns it"),
        };
        all.warnings.extend(bad.finish(data.on_bad_row).map_err(prepare_failure)?);
        all.format = all.format.or(Some(format));
        all.template = all.template.or(template.map(|template| template.name));
        if is_enough {
            break;
        }
        first_file += files.len();
    }
    if all.rows.is_empty() {
        Err(format_failure(sources.first().map_or("data.eval", |source| source.key), FormatError::NoRows))
    } else {
        Ok(all)
    }
}

fn plain_question(place: RowPlace<'_>, file: usize, row: Json) -> Result<Question, FormatError> {
    let Json::Object(mut fields) = row else {
        return Err(FormatError::NotAnObject { place: place.to_string(), found: kind_of(&row) });
    };
    let name = QUESTION_NAMES.iter().find(|name| fields.contains_key(**name));
    let Some(name) = name else { return Err(FormatError::NoQuestion { place: place.to_string() }) };
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
        other => Err(FormatError::WrongType {
            place: place.to_string(),
            field: (*name).to_owned(),
            found: other.as_ref().map_or("missing", kind_of),
            expected: "a text",
        }),
    }
}

/// The fields of a [`Question`] that come from its example.
pub(super) struct Asked {
    pub prompt: String,
    pub add_special: bool,
    delimiter: String,
    expected: Option<String>,
}

pub(super) fn ask(
    example: &Example,
    template: Option<&DataTemplate>,
    tokenizer: &Tokenizer,
) -> Result<Asked, EncodeError> {
    let renders_pairs = template.is_some_and(|template| template.renders_pairs);
    match (example, template.map(|template| &template.kind)) {
        (Example::Tokens { .. } | Example::Text(_) | Example::Group(_), _) => {
            unreachable!("refused with their format")
        }
        (Example::PromptCompletion { prompt, completion }, Some(kind)) if renders_pairs => match kind {
            TemplateKind::Text(text) => Ok(Asked {
                prompt: text.render(prompt, None),
                add_special: true,
                delimiter: String::new(),
                expected: Some(completion.clone()),
            }),
            TemplateKind::Chat(_) => {
                let conversation = Conversation::of_instruction(&[], prompt, None, completion);
                ask(&Example::Chat(conversation), template, tokenizer)
            }
        },
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
            ask(&Example::Chat(conversation), template, tokenizer)
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
                ..ChatInput::new(&messages, template_time())
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
            Err(EncodeError::NoTemplate(no_chat_template(tokenizer)))
        }
    }
}

/// Why reading ended early.
enum Halt {
    /// `limit` is reached.
    Enough,
    /// Whether the first row is a plain question.
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
        Halt::Failed(format_failure("data.eval", error))
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

fn format_failure(key: &str, error: FormatError) -> Failure {
    let hint = error.hint();
    let failure = match error {
        FormatError::NoRows => Failure::data(error).context(format!("`{key}`")),
        _ => Failure::data(error),
    };
    failure.hint_if_some(hint)
}

fn template_failure(error: TemplateError) -> Failure {
    let hint = error.hint();
    Failure::recipe(error).hint_if_some(hint)
}
