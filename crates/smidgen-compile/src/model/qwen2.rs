//! `model_type = "qwen2"`: Qwen 2 and 2.5.
//!
//! Llama with biases on q, k and v, for which the config has no key. Released models have no sliding window
//! (`use_sliding_window` is false, and the other window keys then mean nothing); otherwise the layers from
//! `max_window_layers` on have one, or those that `layer_types` names.

use super::config::Config;
use super::llama::read_like_llama;
use super::spec::{DecoderSpec, LayerAttention};
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>) -> Result<DecoderSpec, ModelError> {
    let spec = read_like_llama("qwen2", config)?;
    Ok(DecoderSpec { qkv_bias: true, attention: sliding_attention(config, spec.layers)?, ..spec })
}

/// The windows of Qwen 2 and 3.
pub fn sliding_attention(config: &Config<'_>, layers: usize) -> Result<Vec<LayerAttention>, ModelError> {
    if !config.flag("use_sliding_window", false)? {
        return Ok(LayerAttention::uniform(layers, None));
    }
    let window = config.required_size("sliding_window")?;
    let first = config.size("max_window_layers")?.unwrap_or(28);
    let slides = config.sliding_layers(layers)?;
    let slides = slides.unwrap_or_else(|| (0..layers).map(|layer| layer >= first).collect());
    Ok(LayerAttention::sliding(slides, window))
}
