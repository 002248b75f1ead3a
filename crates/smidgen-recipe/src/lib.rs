//! The recipe: what the user wrote, accepted or refused as a whole.
//!
//! One TOML file with flat sections and closed words, plus `section.key=value` overrides.
//! Unknown keys are refused, all mistakes are reported at once with their lines, every default is filled in.
//! Paths in the file are relative to the file; paths in overrides, and `output.dir`, to the working directory.
//! Code map: `sections.rs` types and defaults, `words.rs` closed words, `keys.rs` the table of keys, `read.rs` how
//! values are taken, `parse.rs` the way in, `render.rs` the way out, `mistake.rs` the report,
//! `model_name.rs` names of models, `dataset_name.rs` names of data sets, `suggest.rs` hints, `foreign.rs` names from other trainers,
//! `single.rs` values one by one, `mix.rs` sources and columns of data.

#![forbid(unsafe_code)]

mod dataset_name;
mod foreign;
pub mod import;
mod keys;
mod mistake;
mod mix;
mod model_name;
mod parse;
mod pins;
mod read;
mod reasons;
mod render;
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
pub use parse::{RecipeSource, gives_key, parse_recipe, read_recipe, read_recipe_source};
pub use render::{KeyDifference, differences, render_job, render_key_reference};
pub use sections::{
    Adapter, Batch, Budget, Data, DeviceChoice, Eval, Expect, Init, Layers, Length, Memory, MixSource, Model,
    ModelPath, Output, ProfileChoice, Recipe, RecipePath, Targets, Template, Train, Warmup,
};
pub use smidgen_ir::words::{
    AdapterKind, AudioOverflow, BaseFormat, Bias, ClosedWord, ColumnRole, Compute, DataFormat, EvalTask,
    LossOn, Master, OnBadRow, Optimizer, Overflow, Schedule,
};
