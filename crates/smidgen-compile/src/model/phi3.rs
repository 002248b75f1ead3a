//! `model_type = "phi3"`: Phi-3, Phi-3.5 and Phi-4-mini.
//!
//! Llama whose q, k and v are one linear and gate and up another. Every layer has a window if `sliding_window` is set. Only
//! a share of each head may be rotated, and longrope uses short or long factors by the length of each sample.

use super::config::Config;
use super::llama::read_like_llama;
use super::spec::{DecoderSpec, LayerAttention};
use crate::error::ModelError;
use serde_json::json;
use smidgen_ir::Norm;

pub fn read_spec(config: &Config<'_>) -> Result<DecoderSpec, ModelError> {
    config.refuse("attention_bias", &[json!(false)], "false")?;
    let spec = read_like_llama("phi3", config)?;
    let eps = config.number("rms_norm_eps")?.unwrap_or(1e-5) as f32;
    Ok(DecoderSpec {
        fused: true,
        norm: Norm { eps, ..spec.norm },
        attention: LayerAttention::uniform(spec.layers, config.size("sliding_window")?),
        ..spec
    })
}
