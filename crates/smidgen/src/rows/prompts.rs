//! Rows of prompts, to which a run generates the answers: token ids, and the columns that rewards read.
//!
//! A prompt is rendered as in training on answers: conversations with the chat template, strings as they are unless
//! `data.template` says otherwise. A prompt that leaves no room for the longest answer is dropped and counted.
//! Left out: answers and their rewards.

use super::keys::{TrainingSource, data_files, template_choice, token_limits, training_sources};
use super::question::ask;
use super::sets::{MemoryRows, ReadData};
use crate::failure::Failure;
use serde_json::{Map, Value as Json, json};
use smidgen_compile::Request;
use smidgen_data::bad_rows::BadRows;
use smidgen_data::example::{Example, ExampleRow, RowFormat, has_audio};
use smidgen_data::format::{FormatError, rename_columns};
use smidgen_data::prepare::{Origin, PrepareError, Prepared, read_tokenizer};
use smidgen_data::prompt_row::prompt_of;
use smidgen_data::source::{RowPlace, RowSource, SourceError};
use smidgen_data::template::{DataTemplate, choose_template};
use smidgen_data::token_builder::TokenSetBuilder;
use smidgen_data::token_row::TokensError;
use smidgen_data::tokens::TokenLimits;
use smidgen_formats::model::Model;
use smidgen_formats::tokenizer::{Tokenizer, TokenizerError};
use smidgen_hub::Access;
use smidgen_ir::objective::RowsNeeded;
use smidgen_recipe::{Overflow, Recipe};
use std::path::PathBuf;

/// What rewards read of prompts, whose tokens are in a token set with a sample for each.
#[derive(Debug)]
pub struct Prompts {
    pub rows: Vec<Prompt>,
    /// Rewards read answers as text. It is kept: reading it again would take its memory twice.
    pub tokenizer: Tokenizer,
}

/// A prompt besides its tokens.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// As the row has it: a string, or the messages; `null` for a row of tokens.
    pub shown: Json,
    /// The other columns of the row.
    pub fields: Map<String, Json>,
}

impl Prompt {
    /// About as much memory as it takes.
    pub fn heap_bytes(&self) -> usize {
        let fields = self.fields.iter().map(|(name, value)| name.len() + json_bytes(value));
        json_bytes(&self.shown) + fields.sum::<usize>()
    }
}

fn json_bytes(value: &Json) -> usize {
    size_of::<Json>()
        + match value {
            Json::Null | Json::Bool(_) | Json::Number(_) => 0,
            Json::String(text) => text.len(),
            Json::Array(items) => items.iter().map(json_bytes).sum(),
            Json::Object(fields) => {
                fields.iter().map(|(name, value)| 32 + name.len() + json_bytes(value)).sum()
            }
        }
}

/// Reads the prompts of `data.train` and `data.mix`.
pub fn read_prompts(
    recipe: &Recipe,
    held: Option<&[Json]>,
    model: &Model,
    request: &Request,
    access: &Access,
) -> Result<(Prepared, Prompts), ReadData> {
    let tokenizer = read_tokenizer(model).map_err(|error| {
        let is_absent = matches!(&error, PrepareError::Tokenizer(TokenizerError::NoTokenizerJson { .. }));
        let hint = error.hint();
        let failure = Failure::model(error).hint_if_some(hint);
        if is_absent || !model.path().exists() { ReadData::Absent(failure) } else { ReadData::Wrong(failure) }
    })?;
    let longest_answer = recipe.answer_settings().max_completion_length;
    let limits = token_limits(recipe, request);
    let overflow = if limits.overflow == Overflow::Error { Overflow::Error } else { Overflow::Drop };
    let room = limits.max_tokens - longest_answer as u32;
    let mut reading = PromptReading {
        recipe,
        builder: TokenSetBuilder::new(TokenLimits { max_tokens: room, overflow, ..limits })
            .needing(RowsNeeded::Prompts),
        prompts: Vec::new(),
        tokenizer,
    };
    let (mut origins, mut warnings) = (Vec::new(), Vec::new());
    for (index, source) in training_sources(&recipe.data).iter().enumerate() {
        let (held, name) = (held.filter(|_| index == 0), PathBuf::from(MemoryRows::NAME));
        let files = match held {
            Some(_) => vec![name.clone()],
            None => data_files(source.paths, source.key, access).map_err(ReadData::Absent)?,
        };
        let rows = match held {
            Some(rows) => RowSource::Memory { name: &name, rows },
            None => RowSource::Files(&files),
        };
        reading.builder.begin_source(overflow);
        let (origin, of_source) = reading.read(source, rows).map_err(ReadData::Wrong)?;
        origins.push(origin);
        warnings.extend(of_source);
    }
    let PromptReading { builder, prompts: rows, tokenizer, .. } = reading;
    warnings.extend(builder.stats().rows.warning());
    let set = builder.finish().map_err(|error| ReadData::Wrong(no_room(error, room, longest_answer)))?;
    Ok((Prepared { set, origins, warnings }, Prompts { rows, tokenizer }))
}

/// What is wrong with all prompts together, in terms of the keys that limit them.
fn no_room(error: TokensError, room: u32, longest_answer: usize) -> Failure {
    let (what, longest) = match error {
        TokensError::NoRowsLeft { counts, longest, .. } if counts.too_long > 0 => {
            (format!("no prompts left: {counts}"), longest)
        }
        TokensError::TooLong { place, tokens, rows, rows_read, longest, .. } => {
            (format!("{place} has {tokens} tokens; {rows} of {rows_read} prompts are too long"), longest)
        }
        error => {
            let hint = error.hint();
            return Failure::data(error).context("`data.train`").hint_if_some(hint);
        }
    };
    Failure::data(what)
        .context("`data.train`")
        .detail(format!(
            "a prompt has at most {room} tokens: `data.max_tokens` minus `train.max_completion_length`, {longest_answer}"
        ))
        .hint(format!("`data.max_tokens = {}` has room for every prompt", longest + longest_answer))
}

struct PromptReading<'a> {
    recipe: &'a Recipe,
    builder: TokenSetBuilder,
    prompts: Vec<Prompt>,
    tokenizer: Tokenizer,
}

/// Why reading ended.
enum End {
    Enough,
    Failed(Failure),
}

impl From<SourceError> for End {
    fn from(error: SourceError) -> End {
        let hint = error.hint();
        End::Failed(Failure::data(error).hint_if_some(hint))
    }
}

fn data_failure(error: PrepareError) -> Failure {
    let hint = error.hint();
    Failure::data(error).hint_if_some(hint)
}

impl PromptReading<'_> {
    /// Reads the rows of a source. Returns how, and warnings about rows that were left out.
    fn read(
        &mut self,
        source: &TrainingSource<'_>,
        rows: RowSource<'_>,
    ) -> Result<(Origin, Vec<String>), Failure> {
        let data = &self.recipe.data;
        let (mut bad, mut read, mut templates) = (BadRows::default(), 0, Templates::default());
        for file in rows.files() {
            let ended = rows.read_rows(file, |place, row| {
                if data.limit > 0 && read == data.limit {
                    return Err(End::Enough);
                }
                read += 1;
                bad.count(place);
                let row = row.map_err(|error| PrepareError::from(FormatError::from(error)));
                let row = row.and_then(|row| Ok(prompt_of(place, rename_columns(source.columns, row))?));
                match row {
                    Ok(row) => self.push(place, row, &mut templates).map_err(End::Failed),
                    Err(error) => {
                        bad.note(place, error).map_err(|error| End::Failed(data_failure(error)))?;
                        self.builder.count_bad_row();
                        Ok(())
                    }
                }
            });
            match ended {
                Ok(()) => {}
                Err(End::Enough) => break,
                Err(End::Failed(failure)) => return Err(failure),
            }
        }
        let warnings = bad.finish(data.on_bad_row).map_err(data_failure)?;
        Ok((templates.origin(), warnings))
    }

    fn push(
        &mut self,
        place: RowPlace<'_>,
        row: ExampleRow,
        templates: &mut Templates,
    ) -> Result<(), Failure> {
        let ExampleRow { example, fields } = row;
        if has_audio(&fields) {
            return Err(Failure::data(format!("{place} has `audio`, and prompts are text only")));
        }
        let (ids, shown) = match example {
            Example::Tokens { ids, .. } => (ids, Json::Null),
            example => {
                let template = templates.for_example(&example, self.recipe, &self.tokenizer)?;
                let asked = ask(&example, template, &self.tokenizer).map_err(|error| {
                    let hint = error.hint();
                    Failure::data(error).context(place).hint_if_some(hint)
                })?;
                let ids = self.tokenizer.encode(&asked.prompt, asked.add_special).map_err(Failure::model)?;
                let shown = match example {
                    Example::PromptCompletion { prompt, .. } => json!(prompt),
                    Example::Chat(conversation) => Json::Array(conversation.messages),
                    _ => unreachable!("a prompt is tokens, a string or a conversation"),
                };
                (ids.into_iter().map(i64::from).collect(), shown)
            }
        };
        let kept = self.builder.stats().rows.kept;
        self.builder.push(place, &ids, None).map_err(|error| data_failure(error.into()))?;
        if self.builder.stats().rows.kept > kept {
            self.prompts.push(Prompt { shown, fields });
        }
        Ok(())
    }
}

/// The templates of a source: strings and conversations may have different ones.
#[derive(Default)]
struct Templates {
    of_strings: Option<Option<DataTemplate>>,
    of_conversations: Option<Option<DataTemplate>>,
}

impl Templates {
    fn for_example(
        &mut self,
        example: &Example,
        recipe: &Recipe,
        tokenizer: &Tokenizer,
    ) -> Result<Option<&DataTemplate>, Failure> {
        let (kept, format) = match example {
            Example::Chat(_) => (&mut self.of_conversations, RowFormat::Chat),
            _ => (&mut self.of_strings, RowFormat::PromptCompletion),
        };
        if kept.is_none() {
            let chosen = choose_template(&template_choice(&recipe.data.template), format, tokenizer);
            *kept = Some(chosen.map_err(|error| {
                let hint = error.hint();
                Failure::recipe(error).hint_if_some(hint)
            })?);
        }
        Ok(kept.as_ref().and_then(Option::as_ref))
    }

    fn origin(self) -> Origin {
        let name = |template: Option<DataTemplate>| template.map(|template| template.name);
        let (format, template) = match (self.of_conversations, self.of_strings) {
            (Some(template), _) => (RowFormat::Chat, name(template)),
            (None, Some(template)) => {
                let used = template.filter(|template| template.renders_pairs);
                (RowFormat::PromptCompletion, name(used))
            }
            (None, None) => (RowFormat::Tokens, None),
        };
        Origin { format, reason: "prompts: answers are generated".to_owned(), template }
    }
}
