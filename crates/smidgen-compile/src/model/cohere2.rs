//! `model_type = "cohere2"`: Command R7B and Command A.
//!
//! Llama with one layer norm per layer, which attention and MLP read in parallel; neighbouring channels are rotated, in
//! layers with a window only; logits are scaled.

use super::config::Config;
use super::family::Family;
use super::layer::{LayerNorms, NormForm, NormSpec};
use super::llama::read_like_llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let biases = config.flag("attention_bias", false)?;
    let mut spec = read_like_llama(config, family)?;
    let form = NormForm::Layer { eps: config.required_float("layer_norm_eps")? };
    let norms = LayerNorms {
        before_mixer: Some(NormSpec { path: "input_layernorm", form }),
        ..LayerNorms::default()
    };
    (spec.final_norm, spec.head.scale) = (form, config.required_float("logit_scale")?);
    let pattern = config.size("sliding_window_pattern")?.unwrap_or(4);
    let slides = |layer: usize| !(layer + 1).is_multiple_of(pattern);
    let windows = config.windows(spec.layers.len(), config.size("sliding_window")?, slides)?;
    let spec = spec.with_layers(|_, layer| (layer.norms, layer.is_parallel) = (norms, true));
    let spec = spec.with_windows(&windows).with_attention_biases(biases).with_interleaved_ropes();
    Ok(spec.with_attention(|_, attention| {
        attention.rope = attention.rope.filter(|_| attention.window.is_some())
    }))
}
