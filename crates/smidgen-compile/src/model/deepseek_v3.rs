//! `model_type = "deepseek_v3"`: DeepSeek-V3 and R1, and others of this type.
//!
//! Latent attention, and experts beside a shared one in all layers but the first ones. Layers that predict further tokens
//! are not trained.

use super::config::Config;
use super::family::Family;
use super::glm4_moe::read_experts;
use super::latent::read_with_latents;
use super::routed::further_layers;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let mut spec = read_with_latents(config, family, false)?;
    spec.unread_layers = further_layers(config)?;
    let (experts, dense) = read_experts(config, &spec)?;
    Ok(spec.with_experts(&experts, |layer| layer >= dense))
}
