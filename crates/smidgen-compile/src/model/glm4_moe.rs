//! `model_type = "glm4_moe"`: GLM-4.5 and GLM-4.6.
//!
//! Llama with biases on q, k and v, half of each head rotated, and routed experts beside a shared one in all layers but the
//! first ones. Layers that predict further tokens are not trained.

use super::config::Config;
use super::experts::ExpertsSpec;
use super::family::Family;
use super::layer::NormedChannels;
use super::llama::read_like_llama;
use super::routed::{further_layers, read_sigmoid_router, read_with_shared};
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let biases = config.flag("attention_bias", false)?;
    let mut spec = read_like_llama(config, family)?;
    spec.unread_layers = further_layers(config)?;
    let (experts, dense) = read_experts(config, &spec)?;
    if config.flag("use_qk_norm", false)? {
        spec = spec.with_qk_norms(NormedChannels::Head);
    }
    let spec = spec.with_attention(|_, attention| attention.qkv_bias = biases);
    Ok(spec.with_experts(&experts, |layer| layer >= dense))
}

/// Experts as those of DeepSeek-V3, with shared ones as one feed-forward, and the number of first layers without experts.
pub fn read_experts(config: &Config<'_>, spec: &DecoderSpec) -> Result<(ExpertsSpec, usize), ModelError> {
    let router = read_sigmoid_router(config, &["n_routed_experts", "num_local_experts"])?;
    let experts = read_with_shared(config, spec, router, false)?;
    Ok((experts, config.count("first_k_dense_replace")?.unwrap_or(0)))
}
