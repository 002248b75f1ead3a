//! `model_type = "mistral"`: Mistral 7B and its relatives.
//!
//! Llama with a sliding window in every layer if `sliding_window` is set: a query sees that many keys, its own included.
//! From v0.2 on it is null, and a query sees all keys up to its own.

use super::config::Config;
use super::llama::read_like_llama;
use super::spec::{DecoderSpec, LayerAttention};
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>) -> Result<DecoderSpec, ModelError> {
    let spec = read_like_llama("mistral", config)?;
    let attention = LayerAttention::uniform(spec.layers, config.size("sliding_window")?);
    Ok(DecoderSpec { attention, ..spec })
}
