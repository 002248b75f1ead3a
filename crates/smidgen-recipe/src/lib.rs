//! The recipe: what the user wrote, accepted or refused as a whole.
//!
//! A recipe is one TOML file with flat sections, plus `section.key=value` overrides.
//! Unknown keys are refused, all mistakes are reported at once with their lines, every default is filled in.
//! Paths in the file are relative to the file; paths in overrides, and `output.dir`, to the working directory.
//! Code map: `sections.rs` types and defaults, `keys.rs` the table of keys, `value.rs` and `read.rs` values,
//! `parse.rs` text to recipe, `render.rs` and `toml_text.rs` recipe to text, `mistake.rs` the report of mistakes,
//! `suggest.rs` hints, `foreign.rs` and `reasons.rs` settings of other trainers, `model_name.rs` and `dataset_name.rs`
//! names on the hub, `mix.rs` sources and columns of data, `objective.rs` training objectives, `schema.rs` the keys as a
//! JSON schema, `pins.rs` keys that fix memory choices, `single.rs` one value on its own, `import` configurations of
//! other tools.

#![forbid(unsafe_code)]

mod dataset_name;
mod foreign;
pub mod import;
mod keys;
mod mistake;
mod mix;
mod model_name;
mod objective;
mod parse;
mod pins;
mod read;
mod reasons;
mod render;
mod reward;
mod reward_tables;
pub mod schema;
mod sections;
mod single;
mod suggest;
mod toml_text;
mod value;

#[cfg(test)]
mod tests;

pub use dataset_name::{DATASET_FORMS, DatasetName};
pub use mistake::{Mistake, Place, ReadRecipeError, RecipeErrors};
pub use model_name::{HfName, MODEL_PATH_FORMS, NoModelPath, PypiName, parse_model_path};
pub use objective::{AnswerMean, AnswerSettings, ObjectiveMistake};
pub use parse::{
    RecipeSource, gives_key, parse_recipe, read_recipe, read_recipe_from_stdin, read_recipe_source,
};
pub use render::{KeyDifference, differences, render_job, render_key_reference};
pub use reward::{Reward, RewardRule};
pub use sections::{
    Adapter, Aim, Batch, Budget, Data, DeviceChoice, Eval, Expect, Init, Layers, Length, Memory, MixSource,
    Model, ModelPath, Output, ProfileChoice, Recipe, RecipePath, Targets, Template, Train, Warmup,
};
pub use smidgen_ir::words::{
    AdapterKind, AudioOverflow, BaseFormat, Bias, ClosedWord, ColumnRole, Compute, DataFormat, EvalTask,
    LossOn, Master, ObjectiveKind, OnBadRow, Optimizer, Overflow, RatioLevel, ReferenceMemory, ReferenceUse,
    RewardKind, RewardScale, Schedule,
};
