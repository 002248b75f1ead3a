//! `model_type = "minimax_m2"`: MiniMax-M2.
//!
//! Norms of queries and keys over all heads, a part of each head rotated, and routed experts in every layer with sigmoid
//! scores, which are corrected for the choice and renormalized.

use super::config::Config;
use super::experts::{ExpertNames, ExpertTargets, ExpertsSpec};
use super::family::Family;
use super::layer::NormedChannels;
use super::llama::read_like_llama;
use super::routed::{activation_of, read_router_at};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;
use smidgen_ir::{RopeScaling, Router, RouterScores};

const NAMES: ExpertNames = ExpertNames {
    correction: "mlp.e_score_correction_bias",
    targets: ExpertTargets::Numbered,
    ..ExpertNames::QWEN
};

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let mut spec = read_like_llama(config, family)?;
    // Published files say how many channels are rotated, transformers which part of a head.
    if let Some(dim) =
        config.size("rotary_dim")?.filter(|_| config.rotary_shares().is_ok_and(|all| all.is_empty()))
    {
        if spec.ropes[0].scaling != RopeScaling::Default || dim % 2 > 0 || dim > spec.head_dim() {
            return Err(ModelError::unsupported(
                "rotary_dim",
                dim.to_string(),
                "even sizes up to `head_dim`",
            ));
        }
        spec.ropes[0].dim = dim;
    }
    // Published files say what the class always does.
    config.refuse("use_routing_bias", &[json!(true)], "true")?;
    config.refuse("use_qk_norm", &[json!(true)], "true")?;
    config.refuse("qk_norm_type", &[json!("per_layer")], "per_layer")?;
    config.refuse("shared_intermediate_size", &[json!(0)], "0")?;
    if config.flags("attn_type_list")?.is_some_and(|kinds| kinds.contains(&false)) {
        return Err(ModelError::unsupported("attn_type_list", "0", "1 for every layer"));
    }
    let keys = ["num_local_experts", "num_experts"];
    let router = Router {
        is_corrected: true,
        renormalizes: true,
        added_to_sum: 1e-20,
        ..read_router_at(config, &keys, "num_experts_per_tok", RouterScores::Sigmoid)?
    };
    let width = config.required_dimension("intermediate_size")?;
    let experts = ExpertsSpec { names: NAMES, ..ExpertsSpec::like_qwen(router, width, activation_of(&spec)) };
    Ok(spec.with_qk_norms(NormedChannels::AllHeads).with_experts(&experts, |_| true))
}
