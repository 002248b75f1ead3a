//! The rows of a job: training samples, evaluation samples, and batches.
//!
//! A plan can be made without data; it then assumes that every sample has `data.max_tokens` tokens.
//! Left out: how rows become token sets (`sets.rs`).

use super::choice::ChoiceSet;
use super::keys::training_sources;
use super::prompting::prompt_of_rows;
use super::prompts::{Prompts, read_prompts};
use super::sets::{
    EvalSets, MemoryRows, ReadData, read_eval_sets, read_training_set, split_choices, split_set,
};
use crate::failure::Failure;
use smidgen_compile::Request;
use smidgen_data::batch::{BatchOptions, BatchPlan, BatchSize, RunLength};
use smidgen_data::prepare::{Origin, Prepared};
use smidgen_data::tokens::TokenSet;
use smidgen_formats::model::Model;
use smidgen_formats::tokenizer::prompt_file::PromptFile;
use smidgen_hub::{Access, Fetch};
use smidgen_ir::Objective;
use smidgen_ir::objective::LabelLoss;
use smidgen_recipe::{Batch, EvalTask, Length, Recipe};

/// Rows to train on, or what a plan assumes without them.
#[derive(Debug)]
pub enum Data {
    Rows(Box<Rows>),
    /// Every sample has `max_tokens` tokens, all supervised.
    Assumed {
        reason: String,
    },
}

impl Data {
    /// The prompts of a run that generates its answers.
    pub fn prompts(&self) -> Option<&Prompts> {
        match self {
            Data::Rows(rows) => rows.prompts.as_ref(),
            Data::Assumed { .. } => None,
        }
    }
}

#[derive(Debug)]
pub struct Rows {
    pub train: TokenSet,
    pub eval: Option<TokenSet>,
    /// If `eval.task` is `choice`.
    pub choices: Option<ChoiceSet>,
    /// What rewards read of each row of `train`, if answers are generated.
    pub prompts: Option<Prompts>,
    pub batches: BatchPlan,
    /// The sources of training rows: at least one.
    pub sources: Vec<Source>,
    /// How to write prompts for the trained model, if the format of the rows shows it.
    pub prompt: Option<PromptFile>,
    pub warnings: Vec<String>,
}

/// A source of training rows.
#[derive(Debug)]
pub struct Source {
    /// As the recipe names it.
    pub name: String,
    /// The detected format, and the reason.
    pub origin: Origin,
    pub samples: usize,
    /// Samples per epoch. With several sources, weights decide the share of each.
    pub epoch_samples: usize,
}

/// `held` are rows in memory instead of files. `may_be_absent`: missing files are not an error, and the plan then
/// assumes the longest samples.
pub fn read_data(
    recipe: &Recipe,
    held: Option<&MemoryRows>,
    model: &Model,
    request: &Request,
    may_be_absent: bool,
    access: &Access,
) -> Result<Data, Failure> {
    let fetch = if may_be_absent {
        Fetch::Never { because: "a plan needs no data, `smidgen preview` downloads it" }
    } else {
        access.fetch
    };
    let access = &Access { fetch, ..*access };
    let sources = training_sources(&recipe.data);
    if sources.is_empty() && held.is_none() && may_be_absent {
        return Ok(Data::Assumed { reason: "no rows are read".into() });
    }
    let (held_train, held_eval) = match held {
        Some(held) => (Some(&held.train[..]), Some(&held.eval[..]).filter(|rows| !rows.is_empty())),
        None => (None, None),
    };
    let mut prompts = None;
    let read = match recipe.generates() {
        true => read_prompts(recipe, held_train, model, request, access).map(|(set, own)| {
            prompts = Some(own);
            set
        }),
        false => read_training_set(recipe, held_train, model, request, access),
    };
    let train = match read {
        Ok(prepared) => prepared,
        Err(ReadData::Absent(reason)) if may_be_absent => {
            return Ok(Data::Assumed { reason: reason.message });
        }
        Err(error) => return Err(error.into()),
    };
    let is_split = recipe.data.split > 0.0 && recipe.data.eval.is_empty() && held_eval.is_none();
    let (train, evaluated) = if is_split {
        let (train, loss) = split_set(recipe, train)?;
        if recipe.eval.task == EvalTask::Choice && held.is_some() {
            return Err(Failure::recipe(HELD_CHOICES).hint("set `data.train`, or `eval.task = \"loss\"`"));
        }
        let choices = split_choices(recipe, &loss, model, request, access)?;
        (train, EvalSets { loss: Some(loss), choices })
    } else {
        (train, read_eval_sets(recipe, held_eval, model, request, access)?)
    };
    let eval = evaluated.loss;
    let mut warnings = Vec::new();
    for (key, prepared) in [("data.train", Some(&train)), ("data.eval", eval.as_ref())] {
        let of_set = prepared.into_iter().flat_map(|prepared| &prepared.warnings);
        warnings.extend(of_set.map(|warning| format!("`{key}`: {warning}")));
    }
    let of_choices = evaluated.choices.iter().flat_map(|choices| &choices.warnings);
    warnings.extend(of_choices.map(|warning| format!("`data.eval`: {warning}")));
    let Prepared { set: train, origins, .. } = train;
    let eval = eval.map(|prepared| prepared.set);
    let options = BatchOptions {
        batch: match recipe.train.batch {
            Batch::Samples(samples) => BatchSize::Samples(samples as u64),
            Batch::Tokens(tokens) => BatchSize::Tokens(tokens as u64),
        },
        run_length: match recipe.train.length {
            Length::Steps(steps) => RunLength::Steps(steps),
            Length::Epochs(epochs) => RunLength::Epochs(epochs),
        },
        seed: recipe.train.seed,
        shuffle: recipe.data.shuffle,
        repeats: recipe.answer_settings().num_iterations,
    };
    let weights: Vec<f64> = sources.iter().map(|source| source.weight).collect();
    let batches = BatchPlan::mixed(&train, &weights, options).map_err(Failure::recipe)?;
    refuse_lonely_rows(recipe, &train, eval.as_ref(), &batches)?;
    let shares = batches.samples_of_sources();
    let described = sources.iter().zip(origins).zip(train.sources()).enumerate();
    let sources = described.map(|(index, ((source, origin), samples))| Source {
        name: source.paths.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        origin,
        samples: samples.len(),
        epoch_samples: shares.get(index).map_or(samples.len(), |share| *share as usize),
    });
    let sources: Vec<Source> = sources.collect();
    let mut prompt = None;
    for source in &sources {
        prompt = prompt.or(prompt_of_rows(recipe, &source.origin)?);
    }
    let choices = evaluated.choices;
    Ok(Data::Rows(Box::new(Rows { train, eval, choices, prompts, batches, sources, prompt, warnings })))
}

/// KTO's divergence pairs each prompt with the completion of another row of the step, so a step of one row is refused before
/// the run begins.
fn refuse_lonely_rows(
    recipe: &Recipe,
    train: &TokenSet,
    eval: Option<&TokenSet>,
    batches: &BatchPlan,
) -> Result<(), Failure> {
    let Ok(Some(Objective::Labels(LabelLoss { compares_divergence: true, .. }))) = recipe.objective() else {
        return Ok(());
    };
    let (rows, Batch::Samples(batch)) = (train.row_count(), recipe.train.batch) else { return Ok(()) };
    let (batch, rest) = (batch.min(rows), rows % batch.min(rows));
    let ends_epoch = batches.total_steps() >= batches.first_epoch_steps();
    let evaluated = eval.map(|set| match recipe.eval.limit {
        0 => set.row_count(),
        limit => limit.min(set.row_count()),
    });
    let what = if batch == 1 || (rest == 1 && ends_epoch) {
        format!("{rows} rows in steps of {batch} leave a step with one row")
    } else if evaluated == Some(1) {
        "there is one row to evaluate".to_owned()
    } else {
        return Ok(());
    };
    Err(Failure::data(format!("{what}, and `kto` compares each row with another one of its step"))
        .hint("change `train.batch`, `data.limit` or `data.split`, so that two rows are left; `train.loss_type = \"apo_zero_unpaired\"` compares no rows"))
}

const HELD_CHOICES: &str = "`eval.task = choice` reads its rows from files, and these rows are in memory";
