//! `model_type = "mixtral"`: Mixtral 8x7B and 8x22B.
//!
//! Mistral with routed experts in every layer, whose scores are renormalized.

use super::config::Config;
use super::experts::{ExpertNames, ExpertTargets, ExpertsSpec};
use super::family::Family;
use super::llama::read_like_llama;
use super::routed::{activation_of, read_router};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use smidgen_ir::Router;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = read_like_llama(config, family)?;
    let window = config.size("sliding_window")?;
    let router = read_router(config, &["num_local_experts", "num_experts"])?;
    let width = config.required_dimension("intermediate_size")?;
    let experts = ExpertsSpec {
        names: ExpertNames { targets: ExpertTargets::Fused, ..ExpertNames::QWEN },
        ..ExpertsSpec::like_qwen(Router { renormalizes: true, ..router }, width, activation_of(&spec))
    };
    let spec = spec.with_attention(|_, attention| attention.window = window);
    Ok(spec.with_experts(&experts, |_| true))
}
