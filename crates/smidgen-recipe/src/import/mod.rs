//! Configurations of other tools, turned into the recipe that means the same.
//!
//! `document.rs` reads the file, `origin.rs` tells whose it is, one file for each tool says what its settings mean, and
//! `render.rs` writes the recipe and what there is to say about it: what has no counterpart and why, what was assumed,
//! and what is left to fill in. Values go through the readers of the recipe's own keys.
//! Left out: training scripts in Python, whose settings are code.

mod accelerate;
mod adapter_config;
mod adapters;
mod axolotl;
mod deepspeed;
pub mod document;
pub mod draft;
mod fields;
mod llama_factory;
pub mod origin;
mod reasons;
pub mod render;
mod trainer;
mod vocabulary;

use crate::RecipeErrors;
use crate::single::key_places;
use draft::{Draft, ImportMistake, Places};
use fields::Fields;
use origin::{Origin, Tool, recognize};
use std::fmt;

/// A file that was understood.
#[derive(Debug)]
pub struct Imported {
    pub origin: Origin,
    pub draft: Draft,
    /// Required keys that nobody gave, and what to put there.
    pub missing: Vec<Missing>,
}

/// A required key that is still open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    pub key: String,
    pub what: String,
}

/// Why a file could not be turned into a recipe.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error(transparent)]
    Document(#[from] document::DocumentError),
    #[error(transparent)]
    Unrecognized(#[from] origin::Unrecognized),
    #[error(transparent)]
    Override(#[from] RecipeErrors),
    #[error("{}", listed(.0))]
    Mistakes(Vec<ImportMistake>),
}

/// Understands the text of a file; `overrides` are `section.key=value` and win over it.
pub fn import(
    text: &str,
    tool: Option<Tool>,
    overrides: &[String],
    places: Places,
) -> Result<Imported, ImportError> {
    let entries = document::read_document(text)?;
    let fields = Fields::of(&entries);
    let origin = match tool {
        Some(tool) => Origin { tool, because: "`--from` says so".to_owned() },
        None => recognize(&entries)?,
    };
    let mut draft = Draft::new(places);
    match origin.tool {
        Tool::DeepSpeed => deepspeed::read_deepspeed(&fields, &mut draft),
        Tool::Accelerate => accelerate::read_accelerate(&fields, &mut draft),
        Tool::Trl => trainer::read_trainer(&fields, &mut draft),
        Tool::Axolotl => axolotl::read_axolotl(&fields, &mut draft),
        Tool::LlamaFactory => llama_factory::read_llama_factory(&fields, &mut draft),
        Tool::Peft => adapter_config::read_adapter_config(&fields, &mut draft),
    }
    draft.leave_rest(&fields);
    if !draft.mistakes.is_empty() {
        draft.mistakes.sort_by_key(|mistake| mistake.line);
        return Err(ImportError::Mistakes(draft.mistakes));
    }
    for text in overrides {
        draft.put_override(text)?;
    }
    let missing = settle(&mut draft);
    draft.left_out.sort_by_key(|left| left.line);
    Ok(Imported { origin, draft, missing })
}

/// Lines that would do nothing are written as comments, and required keys that are open are collected.
fn settle(draft: &mut Draft) -> Vec<Missing> {
    let is_off =
        |draft: &Draft, key: &str| draft.line(key).is_none_or(|line| !line.active || line.toml == "0");
    for (key, needed) in [("train.eval_every", "data.eval"), ("train.early_stop", "train.eval_every")] {
        let open = match needed {
            "data.eval" => !draft.has(needed),
            _ => is_off(draft, needed),
        };
        if open && let Some(line) = draft.lines.iter_mut().find(|line| line.key == key && line.toml != "0") {
            line.active = false;
            line.remark = format!("needs `{needed}`");
        }
    }
    let says = |key: &str, toml: &str| draft.line(key).is_some_and(|line| line.active && line.toml == toml);
    if says("adapter.kind", "\"full\"") && says("memory.weights", "\"host\"") {
        draft.assume(
            "weights that are trained stay on the device: `memory.weights` moves those that are frozen",
        );
    }
    let open = key_places().filter(|place| place.required && !draft.has(&place.path()));
    let open: Vec<String> = open.map(|place| place.path()).collect();
    open.into_iter()
        .map(|key| {
            let said = draft.wanted.iter().find(|(wanted, _)| *wanted == key);
            let what = said.map_or_else(|| usual(&key).to_owned(), |(_, what)| what.clone());
            Missing { key, what }
        })
        .collect()
}

fn usual(key: &str) -> &'static str {
    match key {
        "model.path" => "the model: `hf:org/name`, a folder or a .gguf file",
        "data.train" => "the file to train on",
        _ => "the folder of the run",
    }
}

fn listed(mistakes: &[ImportMistake]) -> String {
    let noun = if mistakes.len() == 1 { "mistake" } else { "mistakes" };
    let lines = mistakes.iter().map(|mistake| format!("\n  {mistake}"));
    format!("{} {noun}{}", mistakes.len(), lines.collect::<String>())
}

impl fmt::Display for ImportMistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}
