//! `model_type = "glm4_moe_lite"`: GLM-4.7-Flash.
//!
//! DeepSeek-V3's latent attention and experts in GLM's layers; `mlp_layer_types` says which layers have experts.

use super::config::Config;
use super::family::Family;
use super::glm4_moe::read_experts;
use super::latent::read_with_latents;
use super::routed::further_layers;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let mut spec = read_with_latents(config, family, false)?;
    // The class has one number under two names.
    if config.has_own("head_dim") && config.size("head_dim")? != config.size("qk_rope_head_dim")? {
        return Err(ModelError::Contradiction { what: "`head_dim` is not `qk_rope_head_dim`".into() });
    }
    spec.unread_layers = further_layers(config)?;
    let (experts, _) = read_experts(config, &spec)?;
    let sparse = config.layer_words("mlp_layer_types", spec.layers.len(), "dense, sparse")?;
    Ok(spec.with_experts(&experts, |layer| sparse.as_ref().map_or(layer > 0, |sparse| sparse[layer] == 1)))
}
