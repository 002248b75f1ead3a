//! Configurations of other tools, translated into recipes.
//!
//! `document.rs` parses the file and `origin.rs` detects the tool. One file per tool has its table (`table.rs`): what each
//! of its keys means. `interpret.rs` reads any table into a `draft.rs`, and `render.rs` writes the recipe and the notes:
//! what was not carried over and why, what was assumed, which required keys are missing.
//! Values are checked by the readers of the recipe's own keys.
//! Not supported: training scripts in Python, whose settings are code.

mod accelerate;
mod adapter_config;
mod adapters;
mod axolotl;
mod datasets;
mod deepspeed;
mod dictionaries;
pub mod document;
pub mod draft;
pub mod families;
mod fields;
mod flow;
mod interpret;
mod llama_factory;
mod llama_factory_v1;
mod mistakes;
mod mlx_lm;
mod objectives;
pub mod origin;
mod purpose;
pub mod render;
mod slices;
mod table;
mod templates;
mod torchtune;
mod trainer;
mod unsloth;
mod values;

use crate::RecipeErrors;
use crate::keys::KEYS;
use dictionaries::{flattened, note_contradictions};
use draft::{Draft, Places};
use families::Kind;
use fields::Fields;
use llama_factory_v1::{is_v1, read_llama_factory_v1};
use mistakes::{ImportMistake, Mistakes};
use objectives::{SETTINGS, named_objective};
use origin::{Origin, Tool, recognize};
use purpose::refuse_other_purposes;

/// A translated file.
#[derive(Debug)]
pub struct Imported {
    pub origin: Origin,
    pub draft: Draft,
    pub missing: Vec<Missing>,
}

/// A required key without a value, and a description of the value that belongs there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    pub key: String,
    pub what: String,
}

/// Why a file could not be translated.
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

impl Imported {
    /// Warns of models that do not load; `loads` says whether those of a `model_type` do.
    pub fn warn_of_families(&mut self, loads: impl Fn(&str) -> bool) {
        for (model, family) in std::mem::take(&mut self.draft.families) {
            if !matches!(family.kind, Kind::Type(model_type) if loads(model_type)) {
                self.draft.warn(format!(
                    "`{model}`: smidgen does not load {} models (docs/supported.md lists those that it loads)",
                    family.name
                ));
            }
        }
    }
}

/// Translates the text of a file. `overrides` are `section.key=value` and replace what the file says.
pub fn import(
    text: &str,
    tool: Option<Tool>,
    overrides: &[String],
    places: Places,
) -> Result<Imported, ImportError> {
    let entries = document::read_document(text)?;
    let flat = flattened(&entries);
    let origin = match tool {
        Some(tool) => Origin { tool, because: "given by `--from`".to_owned() },
        None => recognize(&entries, &flat)?,
    };
    let mistakes = Mistakes::default();
    let objective = named_objective(&Fields::of(&entries, &mistakes), origin.tool);
    refuse_other_purposes(&entries, &mistakes, if objective.is_some() { &SETTINGS } else { &[] });
    let entries = match origin.tool {
        Tool::Trl | Tool::Unsloth => {
            note_contradictions(&flat, &mistakes);
            flat
        }
        _ => entries,
    };
    let fields = Fields::of(&entries, &mistakes);
    let mut draft = Draft::new(places);
    if let Some(objective) = objective {
        objective.put(&fields, &mut draft, &mistakes);
    }
    match origin.tool {
        Tool::DeepSpeed => deepspeed::read_deepspeed(&fields, &mut draft),
        Tool::Accelerate => accelerate::read_accelerate(&fields, &mut draft),
        Tool::Trl => trainer::read_trainer(&fields, &mut draft),
        Tool::Axolotl => axolotl::read_axolotl(&fields, &mut draft),
        Tool::LlamaFactory if is_v1(&entries) => read_llama_factory_v1(&fields, &mut draft),
        Tool::LlamaFactory => llama_factory::read_llama_factory(&fields, &mut draft),
        Tool::Peft => adapter_config::read_adapter_config(&fields, &mut draft),
        Tool::Torchtune => torchtune::read_torchtune(&fields, &mut draft),
        Tool::Unsloth => unsloth::read_unsloth(&fields, &mut draft),
        Tool::MlxLm => mlx_lm::read_mlx_lm(&fields, &mut draft),
    }
    draft.leave_rest(&fields);
    let mistakes = mistakes.sorted();
    if !mistakes.is_empty() {
        return Err(ImportError::Mistakes(mistakes));
    }
    for text in overrides {
        draft.put_override(text)?;
    }
    let missing = settle(&mut draft);
    draft.left_out.sort_by_key(|left| left.line);
    Ok(Imported { origin, draft, missing })
}

/// Turns lines that would have no effect into comments, and lists the required keys that have no value.
fn settle(draft: &mut Draft) -> Vec<Missing> {
    let is_off =
        |draft: &Draft, key: &str| draft.line(key).is_none_or(|line| !line.active || line.toml == "0");
    // The command line may have set `data.eval`.
    let has_eval = draft.has("data.eval");
    if let Some(line) = draft.lines.iter_mut().find(|line| line.key == "data.split" && has_eval) {
        line.active = false;
        line.remark = "`data.eval` is evaluated".to_owned();
    }
    for (key, needed) in [("train.eval_every", "data.eval"), ("train.early_stop", "train.eval_every")] {
        let open = match needed {
            "data.eval" => !draft.has(needed) && is_off(draft, "data.split"),
            _ => is_off(draft, needed),
        };
        if open && let Some(line) = draft.lines.iter_mut().find(|line| line.key == key && line.toml != "0") {
            line.active = false;
            line.remark = format!("needs `{needed}`");
        }
    }
    let missing = KEYS.iter().filter(|key| key.required && !draft.has(&key.path()));
    missing
        .map(|key| {
            let key = key.path();
            let wanted = draft.wanted.iter().find(|(wanted, _)| *wanted == key);
            let what = wanted.map_or_else(|| usual_value(&key).to_owned(), |(_, what)| what.clone());
            Missing { key, what }
        })
        .collect()
}

fn usual_value(key: &str) -> &'static str {
    match key {
        "model.path" => "the model: `hf:org/name`, a folder or a .gguf file",
        "data.train" => "the file to train on",
        _ => "the run folder",
    }
}

fn listed(mistakes: &[ImportMistake]) -> String {
    let noun = if mistakes.len() == 1 { "mistake" } else { "mistakes" };
    let lines = mistakes.iter().map(|mistake| format!("\n  {mistake}"));
    format!("{} {noun}{}", mistakes.len(), lines.collect::<String>())
}
