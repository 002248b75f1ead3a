//! `model_type = "phi3"`: Phi-3, Phi-3.5 and Phi-4-mini.
//!
//! Llama whose q, k and v are one linear and gate and up another. Every layer has a window if `sliding_window` is set. Only
//! a share of each head may be rotated, and longrope uses short or long factors by the length of each sample.

use super::config::Config;
use super::family::Family;
use super::llama::read_like_llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    config.refuse("attention_bias", &[json!(false)], "false")?;
    let spec = read_like_llama(config, family)?;
    let window = config.size("sliding_window")?;
    let spec = spec.with_attention(|_, attention| {
        (attention.is_fused, attention.window) = (true, window);
    });
    Ok(spec.with_gated(|gated| gated.is_fused = true))
}
