//! Models: a `config.json` becomes a [`spec::DecoderSpec`], one file a `model_type`.
//!
//! One decoder, many dialects: a dialect only reads its config; the graph builder knows none of them.

pub mod config;
pub mod llama;
pub mod spec;

use crate::error::ModelError;
use config::Config;
use spec::DecoderSpec;

type ReadSpec = fn(&Config) -> Result<DecoderSpec, ModelError>;

const DIALECTS: [(&str, ReadSpec); 1] = [("llama", llama::read_spec)];

/// The decoder that a `config.json` describes.
pub fn read_spec(config: &serde_json::Value) -> Result<DecoderSpec, ModelError> {
    let config = Config::new(config)?;
    let model_type = config.text("model_type")?.ok_or(ModelError::Missing { key: "model_type" })?;
    match DIALECTS.iter().find(|(name, _)| *name == model_type) {
        Some((_, read)) => read(&config),
        None => Err(ModelError::UnknownArchitecture {
            model_type: model_type.to_string(),
            supported: DIALECTS.map(|(name, _)| name).join(", "),
        }),
    }
}
