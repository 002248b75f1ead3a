//! `model_type = "glm4"`: GLM-4-0414.
//!
//! Llama with four norms in a layer, gate and up as one linear, and neighbouring channels of half of each head rotated.

use super::config::Config;
use super::family::Family;
use super::layer::{LayerNorms, NormSpec};
use super::llama::read_like_llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let biases = config.flag("attention_bias", true)?;
    let spec = read_like_llama(config, family)?;
    let norm = |path| Some(NormSpec { path, form: spec.final_norm });
    let norms = LayerNorms {
        before_mixer: norm("input_layernorm"),
        after_mixer: norm("post_self_attn_layernorm"),
        before_feed_forward: norm("post_attention_layernorm"),
        after_feed_forward: norm("post_mlp_layernorm"),
    };
    let spec = spec.with_layers(|_, layer| layer.norms = norms).with_interleaved_ropes();
    let spec = spec.with_attention(|_, attention| attention.qkv_bias = biases);
    Ok(spec.with_gated(|gated| gated.is_fused = true))
}
