//! `model_type = "qwen2_moe"`: Qwen1.5-MoE and the mixtures of experts of Qwen 2.
//!
//! Qwen 2 with routed experts and a shared one, whose output is multiplied by the sigmoid of a projection. Sliding layers
//! alternate with others.

use super::config::Config;
use super::experts::{ExpertNames, ExpertTargets, ExpertsSpec, SharedExpert};
use super::family::Family;
use super::layer::{GatedNames, GatedSpec};
use super::llama::read_like_llama;
use super::routed::{activation_of, read_router, sparse_layers};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use smidgen_ir::{Activation, Router};

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = read_like_llama(config, family)?;
    let layers = spec.layers.len();
    let window =
        if config.flag("use_sliding_window", false)? { config.size("sliding_window")? } else { None };
    let first_without = config.count("max_window_layers")?.unwrap_or(layers);
    let slides = |layer: usize| window.is_some() && layer.is_multiple_of(2) && layer < first_without;
    let windows = config.windows(layers, window, slides)?;
    let bias = config.flag("qkv_bias", true)?;
    let experts = experts_with_shared(config, read_router(config, &["num_experts"])?, activation_of(&spec))?;
    let sparse = sparse_layers(config, layers)?;
    let spec = spec.with_windows(&windows).with_attention(|_, attention| attention.qkv_bias = bias);
    Ok(spec.with_experts(&experts, |layer| sparse[layer]))
}

/// Routed experts and a shared one, whose output is multiplied by the sigmoid of a projection.
pub fn experts_with_shared(
    config: &Config<'_>,
    router: Router,
    activation: Activation,
) -> Result<ExpertsSpec, ModelError> {
    let width = config.required_dimension("shared_expert_intermediate_size")?;
    let gated = GatedSpec {
        module: "mlp.shared_expert",
        names: GatedNames::USUAL,
        width,
        activation,
        is_fused: false,
        bias: false,
        scales: [1.0; 2],
    };
    let width = config.required_dimension("moe_intermediate_size")?;
    Ok(ExpertsSpec {
        names: ExpertNames { targets: ExpertTargets::Fused, ..ExpertNames::QWEN },
        shared: Some(SharedExpert { gated, gate: Some("mlp.shared_expert_gate") }),
        ..ExpertsSpec::like_qwen(router, width, activation)
    })
}
