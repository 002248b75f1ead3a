//! `model_type = "granitemoe"`: the mixtures of experts of Granite 3.
//!
//! Granite with routed experts in every layer; the softmax is that of the chosen experts.

use super::config::Config;
use super::experts::{ExpertNames, ExpertTargets, ExpertsSpec};
use super::family::Family;
use super::granite;
use super::routed::{activation_of, read_router};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use smidgen_ir::Router;

/// Names of the experts of Granite 3 and 4.
pub const NAMES: ExpertNames = ExpertNames {
    router: "block_sparse_moe.router",
    experts: "block_sparse_moe.experts",
    targets: ExpertTargets::Fused,
    ..ExpertNames::QWEN
};

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = granite::read_spec(config, family)?;
    let router = read_router(config, &["num_local_experts"])?;
    let width = config.required_dimension("intermediate_size")?;
    let experts = ExpertsSpec {
        names: NAMES,
        ..ExpertsSpec::like_qwen(Router { renormalizes: true, ..router }, width, activation_of(&spec))
    };
    Ok(spec.with_experts(&experts, |_| true))
}
