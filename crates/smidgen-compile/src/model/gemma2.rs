//! `model_type = "gemma2"`: Gemma 2.
//!
//! Norms multiply by 1 + weight and are before and after attention and MLP; embeddings are scaled by √C; scores and logits
//! are capped; even layers have a sliding window. Gemma 3 shares [`read_like_gemma`].

use super::config::Config;
use super::family::Family;
use super::llama::{activation, read_like_llama};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;
use smidgen_ir::Norm;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = read_like_gemma(config, family)?;
    let attention = config.windows(spec.layers, family.window(config)?, |layer| layer % 2 == 0)?;
    Ok(DecoderSpec {
        attention,
        attention_softcap: config.cap("attn_logit_softcapping", Some(50.0))?,
        logit_softcap: config.cap("final_logit_softcapping", Some(30.0))?,
        ..spec
    })
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
    let spec = read_like_llama(config, family)?;
    let scalar = config.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    Ok(DecoderSpec {
        norm: Norm { plus_one: true, ..spec.norm },
        sandwich_norms: true,
        activation: activation(key, name)?,
        attention_scale: scalar.powf(-0.5) as f32,
        embedding_scale: (spec.hidden as f64).sqrt() as f32,
        qkv_bias: biases,
        output_bias: biases,
        ..spec
    })
}
