//! The rows of a recipe as token sets: samples for training and for an evaluation loss, and sequences for multiple
//! choice.
//!
//! Plain questions with choices have no training format, so their evaluation loss is that of the right choices.
//! Left out: batches (`data.rs`).

use super::choice::ChoiceSet;
use super::keys::{
    TrainingSource, audio_options, data_files, template_choice, token_limits, training_sources,
};
use super::question::{AskedRows, HeldOut, Questions, are_plain_questions, read_asked, read_questions};
use crate::console::progress::RowProgress;
use crate::failure::Failure;
use serde_json::Value as Json;
use smidgen_compile::Request;
use smidgen_data::format::FormatError;
use smidgen_data::prepare::{Part, PrepareError, PrepareOptions, Prepared, prepare_set, read_tokenizer};
use smidgen_data::source::RowSource;
use smidgen_data::token_row::TokensError;
use smidgen_data::token_split::SplitError;
use smidgen_formats::model::Model;
use smidgen_formats::tokenizer::{Tokenizer, TokenizerError};
use smidgen_hub::{Access, own_cache};
use smidgen_recipe::{Data, EvalTask, Recipe, Template};
use std::path::PathBuf;

/// Rows in memory instead of files. Each is a JSON object like a line of a `.jsonl` file.
///
/// A row has one of the formats of `data.format`, which is detected automatically: `prompt` and `completion`,
/// `messages`, `instruction` and `output`, `text`, or `input_ids` and `labels`.
#[derive(Clone, Debug, Default)]
pub struct MemoryRows {
    /// Rows to train on.
    pub train: Vec<Json>,
    /// Rows to evaluate every `train.eval_every` steps; may be empty.
    pub eval: Vec<Json>,
}

impl MemoryRows {
    /// Stands for the file in messages and in `job.toml`.
    pub const NAME: &str = "rows-in-memory";
}

/// The sets to evaluate; both are `None` without `data.eval` and `data.split`.
#[derive(Debug, Default)]
pub struct EvalSets {
    pub loss: Option<Prepared>,
    pub choices: Option<ChoiceSet>,
}

/// Reads the evaluation sets of a recipe. `held` are rows in memory instead of those that the recipe names.
pub fn read_eval_sets(
    recipe: &Recipe,
    held: Option<&[Json]>,
    model: &Model,
    request: &Request,
    access: &Access,
) -> Result<EvalSets, Failure> {
    let paths = &recipe.data.eval;
    if paths.is_empty() && held.is_none() {
        if recipe.data.split == 0.0 {
            return Ok(EvalSets::default());
        }
        let train = read_training_set(recipe, None, model, request, access)?;
        let (_, loss) = split_set(recipe, train)?;
        let choices = split_choices(recipe, &loss, model, request, access)?;
        return Ok(EvalSets { loss: Some(loss), choices });
    }
    let mut sets = EvalSets::default();
    let mut has_loss = true;
    if recipe.eval.task == EvalTask::Choice {
        if held.is_some() {
            return Err(Failure::recipe("`eval.task = choice` reads its rows from files: set `data.eval`"));
        }
        let files = data_files(paths, "data.eval", access)?;
        has_loss = !are_plain_questions(&files)?;
        let tokenizer = tokenizer_of(model)?;
        let questions = read_questions(&files, &recipe.data, recipe.eval.limit, &tokenizer)?;
        sets.choices = Some(choices_of(recipe, questions, &files, &tokenizer, request)?);
    }
    if has_loss {
        let Data { format, columns, .. } = &recipe.data;
        let (key, weight) = ("data.eval", 1.0);
        let source = TrainingSource { key, paths, weight, format: *format, columns };
        sets.loss = Some(read_set(recipe, &[source], held, 0, model, request, access)?);
    }
    Ok(sets)
}

fn tokenizer_of(model: &Model) -> Result<Tokenizer, Failure> {
    read_tokenizer(model).map_err(|error| {
        let hint = error.hint();
        Failure::model(error).hint_if_some(hint)
    })
}

fn choices_of(
    recipe: &Recipe,
    questions: Questions,
    files: &[PathBuf],
    tokenizer: &Tokenizer,
    request: &Request,
) -> Result<ChoiceSet, Failure> {
    let limits = token_limits(recipe, request);
    let mut choices = ChoiceSet::build(&questions, files, &recipe.eval.answer, tokenizer, limits)?;
    choices.warnings.extend(questions.warnings);
    Ok(choices)
}

/// The choices of the rows that `data.split` holds out. `loss` is the set of the same rows.
pub fn split_choices(
    recipe: &Recipe,
    loss: &Prepared,
    model: &Model,
    request: &Request,
    access: &Access,
) -> Result<Option<ChoiceSet>, Failure> {
    if recipe.eval.task != EvalTask::Choice {
        return Ok(None);
    }
    let tokenizer = tokenizer_of(model)?;
    let (questions, files) = split_questions(recipe, loss, &tokenizer, access)?;
    choices_of(recipe, questions, &files, &tokenizer, request).map(Some)
}

/// The rows to evaluate as questions: those of `data.eval`, or those that `data.split` holds out.
pub fn read_eval_questions(
    recipe: &Recipe,
    tokenizer: &Tokenizer,
    model: &Model,
    request: &Request,
    access: &Access,
) -> Result<Questions, Failure> {
    let Recipe { data, eval, .. } = recipe;
    if !data.eval.is_empty() {
        let files = data_files(&data.eval, "data.eval", access)?;
        return read_questions(&files, data, eval.limit, tokenizer);
    }
    let train = read_training_set(recipe, None, model, request, access)?;
    let (_, loss) = split_set(recipe, train)?;
    split_questions(recipe, &loss, tokenizer, access).map(|(questions, _)| questions)
}

/// The questions that `data.split` holds out, with their files. Choices are fields of rows, which a token set no longer
/// has, so the rows are read again.
fn split_questions(
    recipe: &Recipe,
    loss: &Prepared,
    tokenizer: &Tokenizer,
    access: &Access,
) -> Result<(Questions, Vec<PathBuf>), Failure> {
    let held_out = HeldOut::of(&loss.set);
    let sources = training_sources(&recipe.data);
    let mut files = Vec::new();
    for source in &sources {
        files.push(data_files(source.paths, source.key, access)?);
    }
    let asked = sources.iter().zip(&files).map(|(source, files)| AskedRows {
        key: source.key,
        files,
        format: source.format,
        columns: source.columns,
        only: Some(&held_out),
    });
    let asked: Vec<AskedRows<'_>> = asked.collect();
    let questions = read_asked(&asked, &recipe.data, recipe.eval.limit, tokenizer)?;
    Ok((questions, files.concat()))
}

/// The rows of `data.train` and `data.mix`.
pub fn read_training_set(
    recipe: &Recipe,
    held: Option<&[Json]>,
    model: &Model,
    request: &Request,
    access: &Access,
) -> Result<Prepared, ReadData> {
    let sources = training_sources(&recipe.data);
    read_set(recipe, &sources, held, recipe.data.limit as u64, model, request, access)
}

/// Tokenizes a single row of a source as `data.template = "model"` would.
pub fn read_templated_row(
    recipe: &Recipe,
    source: &TrainingSource<'_>,
    row: Json,
    model: &Model,
    request: &Request,
    access: &Access,
) -> Result<Prepared, Failure> {
    let mut recipe = recipe.clone();
    recipe.data.template = Template::Model;
    let source = [TrainingSource { columns: source.columns, ..*source }];
    Ok(read_set(&recipe, &source, Some(&[row]), 0, model, request, access)?)
}

/// Splits a set by `data.split` into a training and an evaluation set.
pub fn split_set(recipe: &Recipe, whole: Prepared) -> Result<(Prepared, Prepared), Failure> {
    let Prepared { set, origins, warnings } = whole;
    let (train, eval) = set.split(recipe.data.split, recipe.train.seed).map_err(|error| match error {
        SplitError::Open(_) => Failure::disk(error),
        SplitError::NothingToTrain { .. } | SplitError::SourceEmpty { .. } => {
            Failure::data(error).hint("lower `data.split`, or name evaluation data in `data.eval`")
        }
    })?;
    let eval = Prepared { set: eval, origins: origins.clone(), warnings: vec![] };
    Ok((Prepared { set: train, origins, warnings }, eval))
}

/// Why rows could not be read.
#[derive(Debug)]
pub enum ReadData {
    /// A file, or the tokenizer for its text, is missing.
    Absent(Failure),
    Wrong(Failure),
}

impl From<ReadData> for Failure {
    fn from(error: ReadData) -> Failure {
        match error {
            ReadData::Absent(failure) | ReadData::Wrong(failure) => failure,
        }
    }
}

/// Tokenizes the rows of some sources. `held` are rows in memory in place of the files of the first source.
fn read_set(
    recipe: &Recipe,
    sources: &[TrainingSource<'_>],
    held: Option<&[Json]>,
    limit: u64,
    model: &Model,
    request: &Request,
    access: &Access,
) -> Result<Prepared, ReadData> {
    let mut files = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        files.push(match held {
            Some(_) if index == 0 => vec![PathBuf::from(MemoryRows::NAME)],
            _ => data_files(source.paths, source.key, access).map_err(ReadData::Absent)?,
        });
    }
    let parts = sources.iter().zip(&files).enumerate().map(|(index, (source, files))| Part {
        source: match held {
            Some(rows) if index == 0 => RowSource::Memory { name: &files[0], rows },
            _ => RowSource::Files(files),
        },
        format: source.format,
        columns: source.columns,
        limit,
    });
    let parts: Vec<Part<'_>> = parts.collect();
    let key = sources.first().map_or("data.train", |source| source.key);
    let limits = token_limits(recipe, request);
    let (template, cache) = (template_choice(&recipe.data.template), own_cache().ok());
    let audio = audio_options(recipe, request, cache.as_deref());
    let options = PrepareOptions {
        template: &template,
        loss_on: recipe.data.loss_on,
        rows: recipe.rows_needed(),
        limits,
        on_bad_row: recipe.data.on_bad_row,
        cache: cache.as_deref(),
        threads: request.threads,
        audio: audio.as_ref(),
    };
    let progress = RowProgress::new(access.is_quiet());
    prepare_set(&parts, model, options, &mut |rows| progress.add(rows)).map_err(|error| {
        // A model that is known by its sizes alone has no folder.
        if let (PrepareError::Read { .. }, false) = (&error, model.path().exists()) {
            let name = model.path().display();
            return ReadData::Absent(Failure::model(format!("there is no tokenizer for `{name}` here")));
        }
        let absent = matches!(&error, PrepareError::Tokenizer(TokenizerError::NoTokenizerJson { .. }));
        let hint = error.hint();
        let failure = match error {
            // The template of the recipe does not exist or does not suit the rows.
            PrepareError::Template(error) => Failure::recipe(error),
            PrepareError::Format(FormatError::RolesDiffer { .. }) => Failure::recipe(error),
            PrepareError::Tokens(
                TokensError::NoRows | TokensError::NoRowsLeft { .. } | TokensError::NothingSupervised { .. },
            )
            | PrepareError::NoAnswers { .. }
            | PrepareError::BadRows { .. }
            | PrepareError::Format(FormatError::NoRows) => Failure::data(error).context(format!("`{key}`")),
            PrepareError::Tokens(TokensError::Keep(_)) => Failure::disk(error),
            PrepareError::Tokenizer(_) | PrepareError::Gguf(_) | PrepareError::Read { .. } => {
                Failure::model(error)
            }
            PrepareError::Source(_)
            | PrepareError::EmptySource { .. }
            | PrepareError::Format(_)
            | PrepareError::Tokens(_)
            | PrepareError::Row { .. } => Failure::data(error),
        };
        let failure = failure.hint_if_some(hint);
        if absent { ReadData::Absent(failure) } else { ReadData::Wrong(failure) }
    })
}
