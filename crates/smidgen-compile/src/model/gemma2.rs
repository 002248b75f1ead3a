//! `model_type = "gemma2"`: Gemma 2.
//!
//! Norms multiply by 1 + weight and are before and after attention and MLP; embeddings are scaled by √C; scores and logits
//! are capped; even layers have a sliding window. Gemma 3 shares [`read_like_gemma`].

use super::config::Config;
use super::family::Family;
use super::layer::{LayerNorms, NormForm};
use super::llama::{activation, read_like_llama};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;
use smidgen_ir::Norm;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let mut spec = read_like_gemma(config, family)?;
    let windows = config.windows(spec.layers.len(), family.window(config)?, |layer| layer % 2 == 0)?;
    let softcap = config.cap("attn_logit_softcapping", Some(50.0))?;
    spec.head.softcap = config.cap("final_logit_softcapping", Some(30.0))?;
    Ok(spec.with_windows(&windows).with_attention(|_, attention| attention.softcap = softcap))
}

/// Reads the keys that the models of the family share. No windows and no caps.
pub fn read_like_gemma(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    config.refuse("use_bidirectional_attention", &[json!(false)], "false")?;
    // If it is absent, the reference uses 256 and not a share of the hidden size, so it is required here.
    config.required_size("head_dim")?;
    let key = if config.get("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
    // Early files say `gelu`, which the reference reads as the approximation by tanh.
    let name = match config.text(key)? {
        None | Some("gelu") => "gelu_pytorch_tanh",
        Some(name) => name,
    };
    let biases = config.flag("attention_bias", false)?;
    let mut spec = read_like_llama(config, family)?;
    let scale = config.number("query_pre_attn_scalar")?.unwrap_or(256.0).powf(-0.5) as f32;
    let activation = activation(key, name)?;
    spec.embedding.scale = (spec.hidden as f64).sqrt() as f32;
    let NormForm::Rms(norm) = spec.final_norm;
    let form = NormForm::Rms(Norm { plus_one: true, ..norm });
    spec.final_norm = form;
    let spec = spec.with_layers(|_, layer| layer.norms = LayerNorms::around(form));
    let spec = spec.with_attention(|_, attention| attention.scale = scale);
    Ok(spec.with_attention_biases(biases).with_gated(|gated| gated.activation = activation))
}
