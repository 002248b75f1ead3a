//! `model_type = "qwen3_moe"`: the mixtures of experts of Qwen 3.
//!
//! Qwen 3 with routed experts in all layers, or in those that `decoder_sparse_step` and `mlp_only_layers` leave. A window, if
//! it is used, is that of every layer.

use super::config::Config;
use super::experts::ExpertsSpec;
use super::family::Family;
use super::layer::NormedChannels;
use super::llama::read_like_llama;
use super::routed::{activation_of, read_router, sparse_layers};
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let biases = config.flag("attention_bias", false)?;
    let spec = read_like_llama(config, family)?;
    let window =
        if config.flag("use_sliding_window", false)? { config.size("sliding_window")? } else { None };
    let router = read_router(config, &["num_local_experts", "num_experts"])?;
    let width = config.required_dimension("moe_intermediate_size")?;
    let experts = ExpertsSpec::like_qwen(router, width, activation_of(&spec));
    let sparse = sparse_layers(config, spec.layers.len())?;
    let spec = spec.with_attention_biases(biases).with_qk_norms(NormedChannels::Head);
    let spec = spec.with_attention(|_, attention| attention.window = window);
    Ok(spec.with_experts(&experts, |layer| sparse[layer]))
}
