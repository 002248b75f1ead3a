//! `model_type = "deepseek_v2"`: DeepSeek-V2 and V2-Lite.
//!
//! Latent attention whose rotated channels are pairs of neighbours, and experts beside shared ones in all layers but the
//! first ones. The router takes the softmax of all experts, and its weights are not renormalized.

use super::config::Config;
use super::family::Family;
use super::latent::read_with_latents;
use super::routed::{Checked, read_groups, read_router, read_with_shared};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;
use smidgen_ir::Router;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let biases = config.flag("mlp_bias", false)?;
    let spec = read_with_latents(config, family, false)?.with_interleaved_ropes();
    let spec = spec.with_gated(|gated| gated.bias = biases);
    // The class of transformers does not read it.
    config.refuse("norm_topk_prob", &[json!(false)], "false")?;
    let groups = match config.text("topk_method")? {
        Some("greedy") => None,
        Some("group_limited_greedy") => read_groups(config, 1)?,
        other => {
            let got = other.unwrap_or("null");
            return Err(ModelError::unsupported("topk_method", got, "greedy, group_limited_greedy"));
        }
    };
    let router = read_router(config, &["n_routed_experts", "num_experts"])?;
    let scale = config.float("routed_scaling_factor")?.unwrap_or(1.0);
    let experts = read_with_shared(config, &spec, Router { groups, scale, ..router }.checked()?, biases)?;
    let dense = config.count("first_k_dense_replace")?.unwrap_or(0);
    Ok(spec.with_experts(&experts, |layer| layer >= dense))
}
