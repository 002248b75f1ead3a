//! Defaults that changed after a run was started: the run keeps its old ones.
//!
//! A recipe that does not give a key means the default of the program that started the run, so a newer default is not
//! a change of the recipe. Keys that the recipe gives, now or when the run was started, are compared in `resume.rs`.
//! Left out: runs that are resumed by their folder; their `job.toml` has all values.

use super::resume::JOB_FILE;
use smidgen_recipe::{ClosedWord, LossOn, Overflow, Recipe, gives_key, read_recipe};
use std::path::Path;

/// Gives the recipe the old defaults of the run in `folder`, and returns a line about each.
pub fn keep_defaults(recipe: &mut Recipe, text: &str, overrides: &[String], folder: &Path) -> Vec<String> {
    let Ok(old) = read_recipe(&folder.join(JOB_FILE), &[]) else { return vec![] };
    let Ok(written) = std::fs::read_to_string(folder.join("recipe.toml")) else { return vec![] };
    let is_default = |key: &str| !gives_key(text, overrides, key) && !gives_key(&written, &[], key);
    let (new, old) = (&mut recipe.data, &old.data);
    let mut kept = Vec::new();
    if (new.loss_on, old.loss_on) == (LossOn::Auto, LossOn::Completion) && is_default("data.loss_on") {
        new.loss_on = old.loss_on;
        kept.push(stays("data.loss_on", old.loss_on.word()));
    }
    if (new.overflow, old.overflow) == (Overflow::Auto, Overflow::Truncate) && is_default("data.overflow") {
        new.overflow = old.overflow;
        kept.push(stays("data.overflow", old.overflow.word()));
    }
    kept
}

fn stays(key: &str, value: &str) -> String {
    format!("`{key}` stays `{value}`, with which the run was started: the default is `auto` since 0.11")
}
