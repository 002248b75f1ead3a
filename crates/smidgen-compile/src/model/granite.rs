//! `model_type = "granite"`: the dense models of Granite 3.
//!
//! Llama with four multipliers: of embeddings, of attention scores, of what a block adds to the residual stream, and of
//! logits, which are divided.

use super::config::Config;
use super::family::Family;
use super::llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let mut spec = llama::read_spec(config, family)?;
    let factor = |key| config.required_float(key);
    spec.embedding.scale = factor("embedding_multiplier")?;
    spec.head.scale = 1.0 / factor("logits_scaling")?;
    let (residual, attention_scale) = (factor("residual_multiplier")?, factor("attention_multiplier")?);
    let spec = spec.with_layers(|_, layer| layer.residual_scale = residual);
    Ok(spec.with_attention(|_, attention| attention.scale = attention_scale))
}
