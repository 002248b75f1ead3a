//! The rows of a job: training samples, evaluation samples, and batches.
//!
//! A plan can be made without data; it then assumes that every sample has `data.max_tokens` tokens.

use super::choice::ChoiceSet;
use super::prompting::prompt_of_rows;
use super::sets::{MemoryRows, ReadData, read_eval_sets, read_set};
use crate::failure::Failure;
use smidgen_compile::Request;
use smidgen_data::batch::{BatchOptions, BatchPlan, BatchSize, RunLength};
use smidgen_data::prepare::{Origin, Prepared};
use smidgen_data::tokens::TokenSet;
use smidgen_formats::model::Model;
use smidgen_formats::tokenizer::prompt_file::PromptFile;
use smidgen_recipe::{Batch, Length, Recipe};

/// Rows to train on, or what a plan assumes without them.
#[derive(Debug)]
pub enum Data {
    Rows(Box<Rows>),
    /// Every sample has `max_tokens` tokens, all supervised.
    Assumed {
        reason: String,
    },
}

#[derive(Debug)]
pub struct Rows {
    pub train: TokenSet,
    pub eval: Option<TokenSet>,
    /// If `eval.task` is `choice`.
    pub choices: Option<ChoiceSet>,
    pub batches: BatchPlan,
    /// The detected format of `data.train`, and why.
    pub origin: Origin,
    /// How prompts are written, if the rows say.
    pub prompt: Option<PromptFile>,
    pub warnings: Vec<String>,
}

/// `may_be_absent`: missing files are not an error; the plan then assumes the longest samples.
pub fn read_data(
    recipe: &Recipe,
    held: Option<&MemoryRows>,
    model: &Model,
    request: &Request,
    may_be_absent: bool,
    quiet: bool,
) -> Result<Data, Failure> {
    if recipe.data.train.is_empty() && held.is_none() && may_be_absent {
        return Ok(Data::Assumed { reason: "none is looked at".into() });
    }
    let (held_train, held_eval) = match held {
        Some(held) => (Some(&held.train[..]), Some(&held.eval[..]).filter(|rows| !rows.is_empty())),
        None => (None, None),
    };
    let train = read_set(recipe, &recipe.data.train, held_train, "data.train", model, request, quiet);
    let train = match train {
        Ok(prepared) => prepared,
        Err(ReadData::Absent(reason)) if may_be_absent => {
            return Ok(Data::Assumed { reason: reason.message });
        }
        Err(ReadData::Absent(failure) | ReadData::Wrong(failure)) => return Err(failure),
    };
    let evaluated = read_eval_sets(recipe, held_eval, recipe.eval.task, model, request, quiet)?;
    let eval = evaluated.loss;
    let mut warnings = Vec::new();
    for (key, prepared) in [("data.train", Some(&train)), ("data.eval", eval.as_ref())] {
        let of_set = prepared.into_iter().flat_map(|prepared| &prepared.warnings);
        warnings.extend(of_set.map(|warning| format!("`{key}`: {warning}")));
    }
    let of_choices = evaluated.choices.iter().flat_map(|choices| &choices.warnings);
    warnings.extend(of_choices.map(|warning| format!("`data.eval`: {warning}")));
    let Prepared { set: train, origin, .. } = train;
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
    };
    let batches = BatchPlan::new(&train, options).map_err(Failure::recipe)?;
    let prompt = prompt_of_rows(recipe, &origin)?;
    let choices = evaluated.choices;
    Ok(Data::Rows(Box::new(Rows { train, eval, choices, batches, origin, prompt, warnings })))
}
