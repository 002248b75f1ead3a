//! `model_type = "gpt_oss"`: gpt-oss-20b and gpt-oss-120b.
//!
//! Biases everywhere, a sink in each softmax, windows in every other layer, and routed experts whose gate and up are clamped.
//! The softmax is that of the chosen experts.

use super::config::Config;
use super::experts::{ExpertNames, ExpertTargets, ExpertsSpec};
use super::family::Family;
use super::llama::read_like_llama;
use super::routed::read_router;
use super::spec::DecoderSpec;
use crate::error::ModelError;
use smidgen_ir::{Activation, RopeScaling, RopeSpec, Router};

const NAMES: ExpertNames = ExpertNames {
    router: "mlp.router",
    takes_turns: true,
    targets: ExpertTargets::Fused,
    ..ExpertNames::QWEN
};

/// The rotary embedding of a config without one, as in the class of transformers.
const YARN: RopeScaling = RopeScaling::Yarn {
    factor: 32.0,
    beta_fast: 32.0,
    beta_slow: 1.0,
    original_max_positions: 4096,
    truncate: false,
};

/// What YaRN multiplies cosines and sines by for a factor of 32.
fn yarn_scale() -> f32 {
    (0.1 * 32f64.ln() + 1.0) as f32
}

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let biases = config.flag("attention_bias", true)?;
    let mut spec = read_like_llama(config, family)?;
    if !config.has_own("rope_parameters") && !config.has_own("rope_scaling") {
        let ropes = spec.ropes.into_iter();
        spec.ropes =
            ropes.map(|rope| RopeSpec { scaling: YARN, attention_scale: yarn_scale(), ..rope }).collect();
    }
    let windows =
        config.windows(spec.layers.len(), config.size("sliding_window")?, |layer| layer % 2 == 0)?;
    let router = read_router(config, &["num_local_experts", "num_experts"])?;
    let activation = Activation::ClampedSwiglu {
        limit: config.required_float("swiglu_limit")?,
        alpha: config.required_float("swiglu_alpha")?,
    };
    let width = config.required_dimension("intermediate_size")?;
    let experts = ExpertsSpec {
        names: NAMES,
        router_bias: true,
        bias: true,
        ..ExpertsSpec::like_qwen(Router { renormalizes: true, ..router }, width, activation)
    };
    let spec = spec.with_attention_biases(biases).with_windows(&windows);
    let spec = spec.with_attention(|_, attention| attention.has_sinks = true);
    Ok(spec.with_experts(&experts, |_| true))
}
