//! `model_type = "olmoe"`: OLMoE.
//!
//! Llama with norms of queries and keys over all heads, and routed experts in every layer.

use super::config::Config;
use super::experts::ExpertsSpec;
use super::family::Family;
use super::layer::NormedChannels;
use super::llama::read_like_llama;
use super::routed::{activation_of, read_router};
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let biases = config.flag("attention_bias", false)?;
    config.refuse("clip_qkv", &[], "null")?;
    let spec = read_like_llama(config, family)?;
    let router = read_router(config, &["num_experts", "num_local_experts"])?;
    let width = config.required_dimension("intermediate_size")?;
    let experts = ExpertsSpec::like_qwen(router, width, activation_of(&spec));
    let spec = spec.with_attention_biases(biases).with_qk_norms(NormedChannels::AllHeads);
    Ok(spec.with_experts(&experts, |_| true))
}
