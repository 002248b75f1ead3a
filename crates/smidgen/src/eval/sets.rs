//! The evaluation rows of a recipe as token sets: samples for a loss, and sequences to compare for a choice.
//!
//! Rows that are plain questions with choices have no format, and so no loss but that of their right choices.

use super::choice::ChoiceSet;
use super::question::{are_plain_questions, read_questions};
use crate::failure::Failure;
use crate::plan::job::{ReadData, data_files, read_set, token_limits};
use smidgen_compile::Request;
use smidgen_data::prepare::{Prepared, read_tokenizer};
use smidgen_formats::model::Model;
use smidgen_recipe::{EvalTask, Recipe};

/// Both are missing where `data.eval` is.
#[derive(Debug, Default)]
pub struct EvalSets {
    pub loss: Option<Prepared>,
    pub choices: Option<ChoiceSet>,
}

pub fn read_eval_sets(
    recipe: &Recipe,
    task: EvalTask,
    model: &Model,
    request: &Request,
    quiet: bool,
) -> Result<EvalSets, Failure> {
    let paths = &recipe.data.eval;
    if paths.is_empty() {
        return Ok(EvalSets::default());
    }
    let mut sets = EvalSets::default();
    let mut has_loss = true;
    if task == EvalTask::Choice {
        let files = data_files(paths, "data.eval")?;
        has_loss = !are_plain_questions(&files)?;
        // The tokenizer is gone before any weight is loaded.
        let tokenizer = read_tokenizer(model).map_err(|error| {
            let failure = Failure::world(&error);
            error.hint().map_or(failure.clone(), |hint| failure.hint(hint))
        })?;
        let questions = read_questions(&files, &recipe.data, recipe.eval.limit, &tokenizer)?;
        let limits = token_limits(recipe, request);
        let choices = ChoiceSet::build(&questions, &files, &recipe.eval.answer, &tokenizer, limits)?;
        sets.choices = Some(choices);
    }
    if has_loss {
        sets.loss = match read_set(recipe, paths, "data.eval", model, request, quiet) {
            Ok(prepared) => Some(prepared),
            Err(ReadData::Absent(failure) | ReadData::Wrong(failure)) => return Err(failure),
        };
    }
    Ok(sets)
}
