//! The evaluation rows of a recipe as token sets: samples for a loss, and sequences to compare for a choice.
//!
//! Rows that are plain questions with choices have no format, so their only loss is that of the right choices.

use super::choice::ChoiceSet;
use super::keys::{data_files, template_choice, token_limits};
use super::question::{are_plain_questions, read_questions};
use crate::console::progress::RowProgress;
use crate::failure::Failure;
use crate::hub::environment::own_cache;
use serde_json::Value as Json;
use smidgen_compile::Request;
use smidgen_data::format::FormatError;
use smidgen_data::prepare::{PrepareError, PrepareOptions, Prepared, prepare_set, read_tokenizer};
use smidgen_data::source::RowSource;
use smidgen_data::token_row::TokensError;
use smidgen_formats::model::Model;
use smidgen_formats::tokenizer::TokenizerError;
use smidgen_recipe::{EvalTask, Recipe, RecipePath};
use std::path::PathBuf;

/// Rows that the caller holds instead of files: objects as a line of a `.jsonl` file has them.
///
/// A row is in one of the formats that `data.format` names, which is detected automatically: `prompt` and `completion`,
/// `messages`, `instruction` and `output`, `text`, or `input_ids` and `labels`.
#[derive(Clone, Debug, Default)]
pub struct MemoryRows {
    /// Trained on.
    pub train: Vec<Json>,
    /// Evaluated during training, each `train.eval_every` steps; may be empty.
    pub eval: Vec<Json>,
}

impl MemoryRows {
    /// What messages and `job.toml` say in place of a file.
    pub const NAME: &str = "rows-in-memory";
}

/// Both are `None` without `data.eval`.
#[derive(Debug, Default)]
pub struct EvalSets {
    pub loss: Option<Prepared>,
    pub choices: Option<ChoiceSet>,
}

/// `held` are rows in memory instead of those that the recipe names.
pub fn read_eval_sets(
    recipe: &Recipe,
    held: Option<&[Json]>,
    task: EvalTask,
    model: &Model,
    request: &Request,
    quiet: bool,
) -> Result<EvalSets, Failure> {
    let paths = &recipe.data.eval;
    if paths.is_empty() && held.is_none() {
        return Ok(EvalSets::default());
    }
    let mut sets = EvalSets::default();
    let mut has_loss = true;
    if task == EvalTask::Choice {
        if held.is_some() {
            return Err(Failure::recipe("`eval.task = choice` reads its rows from files: set `data.eval`"));
        }
        let files = data_files(paths, "data.eval")?;
        has_loss = !are_plain_questions(&files)?;
        // The tokenizer is freed before any weight is loaded.
        let tokenizer = read_tokenizer(model).map_err(|error| {
            let hint = error.hint();
            Failure::model(error).hint_if_some(hint)
        })?;
        let questions = read_questions(&files, &recipe.data, recipe.eval.limit, &tokenizer)?;
        let limits = token_limits(recipe, request);
        let choices = ChoiceSet::build(&questions, &files, &recipe.eval.answer, &tokenizer, limits)?;
        sets.choices = Some(choices);
    }
    if has_loss {
        sets.loss = match read_set(recipe, paths, held, "data.eval", model, request, quiet) {
            Ok(prepared) => Some(prepared),
            Err(ReadData::Absent(failure) | ReadData::Wrong(failure)) => return Err(failure),
        };
    }
    Ok(sets)
}

#[derive(Debug)]
pub enum ReadData {
    /// A file, or the tokenizer for its text, is missing.
    Absent(Failure),
    Wrong(Failure),
}

pub fn read_set(
    recipe: &Recipe,
    paths: &[RecipePath],
    held: Option<&[Json]>,
    key: &str,
    model: &Model,
    request: &Request,
    quiet: bool,
) -> Result<Prepared, ReadData> {
    let files = match held {
        Some(_) => vec![PathBuf::from(MemoryRows::NAME)],
        None => data_files(paths, key).map_err(ReadData::Absent)?,
    };
    let source = match held {
        Some(rows) => RowSource::Memory { name: &files[0], rows },
        None => RowSource::Files(&files),
    };
    let limits = token_limits(recipe, request);
    let (template, cache) = (template_choice(&recipe.data.template), own_cache().ok());
    let options = PrepareOptions {
        format: recipe.data.format,
        template: &template,
        loss_on: recipe.data.loss_on,
        limits,
        cache: cache.as_deref(),
        threads: request.threads,
    };
    let progress = RowProgress::new(quiet);
    prepare_set(source, model, options, &mut |rows| progress.add(rows)).map_err(|error| {
        let absent = matches!(&error, PrepareError::Tokenizer(TokenizerError::NoTokenizerJson { .. }));
        let hint = error.hint();
        let failure = match error {
            // The template of the recipe does not exist or does not suit the rows.
            PrepareError::Template(error) => Failure::recipe(error),
            PrepareError::Tokens(
                TokensError::NoRows | TokensError::NoRowsLeft { .. } | TokensError::NothingSupervised { .. },
            )
            | PrepareError::NoAnswers { .. }
            | PrepareError::Format(FormatError::NoRows) => Failure::data(error).context(format!("`{key}`")),
            PrepareError::Tokens(TokensError::Keep(_)) => Failure::disk(error),
            PrepareError::Tokenizer(_) | PrepareError::Gguf(_) | PrepareError::Read { .. } => {
                Failure::model(error)
            }
            PrepareError::Source(_)
            | PrepareError::Format(_)
            | PrepareError::Tokens(_)
            | PrepareError::Row { .. } => Failure::data(error),
        };
        let failure = failure.hint_if_some(hint);
        if absent { ReadData::Absent(failure) } else { ReadData::Wrong(failure) }
    })
}
