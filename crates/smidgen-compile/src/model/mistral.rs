//! `model_type = "mistral"`: Mistral 7B and its relatives.
//!
//! Llama in which every layer slides where `sliding_window` is set: a query sees that many keys, itself
//! included. From v0.2 on it is null and all keys are seen.

use super::config::Config;
use super::llama::read_like_llama;
use super::spec::{DecoderSpec, LayerAttention};
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>) -> Result<DecoderSpec, ModelError> {
    let spec = read_like_llama("mistral", config)?;
    let attention = LayerAttention::uniform(spec.layers, config.size("sliding_window")?);
    Ok(DecoderSpec { attention, ..spec })
}
