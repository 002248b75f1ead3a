//! `model_type = "lfm2_moe"`: LFM 2 with routed experts.
//!
//! LFM 2 whose feed-forwards are routed experts in all layers but the first ones, with sigmoid scores that a stored number
//! corrects for the choice. The width of the dense ones is that of the config.

use super::config::Config;
use super::experts::{ExpertNames, ExpertTargets, ExpertsSpec};
use super::family::Family;
use super::lfm2::read_with_width;
use super::routed::{activation_of, read_router};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use smidgen_ir::{Router, RouterScores};

const NAMES: ExpertNames = ExpertNames {
    router: "feed_forward.gate",
    experts: "feed_forward.experts",
    correction: "feed_forward.expert_bias",
    targets: ExpertTargets::Fused,
    ..ExpertNames::QWEN
};

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    // The class has no default for it.
    if !config.has_own("layer_types") {
        return Err(ModelError::Missing { key: "layer_types" });
    }
    let spec = read_with_width(config, family, config.required_dimension("intermediate_size")?)?;
    let router = Router {
        scores: RouterScores::Sigmoid,
        is_corrected: config.flag("use_expert_bias", true)?,
        added_to_sum: 1e-6,
        scale: config.float("routed_scaling_factor")?.unwrap_or(1.0),
        ..read_router(config, &["num_experts"])?
    };
    let width = config.required_dimension("moe_intermediate_size")?;
    let dense = config.count("num_dense_layers")?.unwrap_or(0);
    let experts = ExpertsSpec { names: NAMES, ..ExpertsSpec::like_qwen(router, width, activation_of(&spec)) };
    Ok(spec.with_experts(&experts, |layer| layer >= dense))
}
