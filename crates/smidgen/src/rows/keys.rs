//! Translates the recipe's data keys into the types of `smidgen-data`: files, limits, templates.
//!
//! `smidgen-recipe` and `smidgen-data` do not depend on each other, so the translation is here.

use crate::failure::Failure;
use smidgen_compile::Request;
use smidgen_data::clip_row::AudioOptions;
use smidgen_data::source::find_files;
use smidgen_data::template::TemplateChoice;
use smidgen_data::tokens::TokenLimits;
use smidgen_hub::{Access, DatasetUse, locate_dataset};
use smidgen_recipe::{
    AudioOverflow, ColumnRole, Data, DataFormat, DatasetName, MixSource, Recipe, RecipePath, Template,
};
use std::path::{Path, PathBuf};

pub fn template_choice(template: &Template) -> TemplateChoice {
    match template {
        Template::Auto => TemplateChoice::Auto,
        Template::Model => TemplateChoice::Model,
        Template::Plain => TemplateChoice::Plain,
        Template::Named(name) => TemplateChoice::Named(name.clone()),
        Template::File(path) => TemplateChoice::File(path.resolved.clone()),
    }
}

/// A source of training rows: `data.train`, or an entry of `data.mix`.
pub struct TrainingSource<'a> {
    /// The recipe key that names it, for messages.
    pub key: &'static str,
    pub paths: &'a [RecipePath],
    pub weight: f64,
    pub format: DataFormat,
    pub columns: &'a [(ColumnRole, String)],
}

pub fn training_sources(data: &Data) -> Vec<TrainingSource<'_>> {
    let Data { train, format, columns, .. } = data;
    let first = (!train.is_empty()).then(|| TrainingSource {
        key: "data.train",
        paths: train,
        weight: 1.0,
        format: *format,
        columns,
    });
    let mixed = data.mix.iter().map(|MixSource { path, weight, format, columns }| TrainingSource {
        key: "data.mix",
        paths: path,
        weight: *weight,
        format: *format,
        columns,
    });
    first.into_iter().chain(mixed).collect()
}

/// The files that a key names; those of data sets on the hub are downloaded if `access` allows it.
pub fn data_files(paths: &[RecipePath], key: &str, access: &Access) -> Result<Vec<PathBuf>, Failure> {
    let purpose = if key == "data.eval" { DatasetUse::Eval } else { DatasetUse::Train };
    let mut patterns = Vec::new();
    for path in paths {
        let text = path.resolved.to_string_lossy();
        match text.strip_prefix("hf:").and_then(DatasetName::parse) {
            None => patterns.push(text.into_owned()),
            Some(name) => {
                let found = locate_dataset(&name, purpose, access);
                let files = found.map_err(|error| Failure::from(error).context(format!("`{key}`")))?;
                patterns.extend(files.iter().map(|file| file.to_string_lossy().into_owned()));
            }
        }
    }
    find_files(&patterns, Path::new("/")).map_err(|error| {
        let hint = error.hint();
        Failure::data(error).context(format!("`{key}`")).hint_if_some(hint)
    })
}

/// How clips are read; `None` for a model without an audio encoder.
pub fn audio_options(recipe: &Recipe, request: &Request, cache: Option<&Path>) -> Option<AudioOptions> {
    let data = &recipe.data;
    request.spec.audio.as_ref().map(|audio| AudioOptions {
        token: audio.token,
        max_seconds: data.max_audio_seconds,
        trim: data.audio_overflow == AudioOverflow::Trim,
        folder: data.audio_dir.as_ref().map(|folder| folder.resolved.clone()),
        scratch: cache.map_or_else(std::env::temp_dir, |cache| cache.join("audio")),
    })
}

pub fn token_limits(recipe: &Recipe, request: &Request) -> TokenLimits {
    TokenLimits {
        vocab_size: request.spec.vocabulary as u32,
        max_tokens: recipe.data.max_tokens as u32,
        overflow: recipe.data.overflow,
    }
}
