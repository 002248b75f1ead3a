//! Defaults that changed since a run was started: the run keeps those that it has.
//!
//! A recipe that does not give a key means the default of the program that started the run, so a newer default is no
//! change of the recipe. What a recipe says, or said when the run was started, is compared as ever (`resume.rs`).
//! Left out: runs that are resumed from their folder, which reads their job with all its values.

use super::resume::JOB_FILE;
use smidgen_recipe::{ClosedWord, LossOn, Overflow, Recipe, gives_key, read_recipe};
use std::path::Path;

/// Gives the recipe the old defaults of the run in `folder`, and returns a line about each.
pub fn keep_defaults(recipe: &mut Recipe, text: &str, overrides: &[String], folder: &Path) -> Vec<String> {
    let Ok(old) = read_recipe(&folder.join(JOB_FILE), &[]) else { return vec![] };
    let Ok(written) = std::fs::read_to_string(folder.join("recipe.toml")) else { return vec![] };
    let is_left_open = |key: &str| !gives_key(text, overrides, key) && !gives_key(&written, &[], key);
    let (now, before) = (&mut recipe.data, &old.data);
    let mut kept = Vec::new();
    if (now.loss_on, before.loss_on) == (LossOn::Auto, LossOn::Completion) && is_left_open("data.loss_on") {
        now.loss_on = before.loss_on;
        kept.push(stays("data.loss_on", before.loss_on.word()));
    }
    if (now.overflow, before.overflow) == (Overflow::Auto, Overflow::Truncate)
        && is_left_open("data.overflow")
    {
        now.overflow = before.overflow;
        kept.push(stays("data.overflow", before.overflow.word()));
    }
    kept
}

fn stays(key: &str, value: &str) -> String {
    format!("`{key}` stays `{value}`, with which the run was started: the default is `auto` since 0.11")
}
