//! `model_type = "gemma"`: the first Gemma.
//!
//! Llama with norms that multiply by 1 + weight and embeddings scaled by √C. Gemma 2 and 3 share [`read_like_gemma`].

use super::config::Config;
use super::family::Family;
use super::layer::NormForm;
use super::llama::read_like_llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;
use smidgen_ir::{Activation, Norm};

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = read_like_gemma(config, family)?;
    // The first files say `gelu` and mean the approximation by tanh.
    let is_tanh = config.text("hidden_act")? == Some("gelu");
    Ok(spec.with_gated(|gated| {
        if is_tanh {
            gated.activation = Activation::GeluTanh;
        }
    }))
}

/// Reads the keys that the models of the family share.
pub fn read_like_gemma(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    config.refuse("use_bidirectional_attention", &[json!(false), json!("vision")], "false, vision")?;
    let biases = config.flag("attention_bias", false)?;
    let mut spec = read_like_llama(config, family)?;
    spec.embedding.scale = (spec.hidden as f64).sqrt() as f32;
    let form = NormForm::Rms(Norm { eps: spec.norm_eps(), plus_one: true });
    spec.final_norm = form;
    let spec = spec.with_layers(|_, layer| layer.norms = layer.norms.with_form(form));
    Ok(spec.with_attention_biases(biases))
}
