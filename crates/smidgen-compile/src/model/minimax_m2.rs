//! `model_type = "minimax_m2"`: MiniMax-M2.
//!
//! Norms of queries and keys over all heads, a part of each head rotated, and routed experts in every layer with sigmoid
//! scores, which are corrected for the choice and renormalized.

use super::config::Config;
use super::experts::{ExpertNames, ExpertTargets, ExpertsSpec};
use super::family::Family;
use super::layer::NormedChannels;
use super::llama::read_like_llama;
use super::routed::{activation_of, read_router};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use smidgen_ir::{Router, RouterScores};

const NAMES: ExpertNames = ExpertNames {
    correction: "mlp.e_score_correction_bias",
    targets: ExpertTargets::Numbered,
    ..ExpertNames::QWEN
};

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = read_like_llama(config, family)?;
    let router = Router {
        scores: RouterScores::Sigmoid,
        is_corrected: true,
        renormalizes: true,
        ..read_router(config, &["num_local_experts", "num_experts"])?
    };
    let width = config.required_dimension("intermediate_size")?;
    let experts = ExpertsSpec { names: NAMES, ..ExpertsSpec::like_qwen(router, width, activation_of(&spec)) };
    Ok(spec.with_qk_norms(NormedChannels::AllHeads).with_experts(&experts, |_| true))
}
