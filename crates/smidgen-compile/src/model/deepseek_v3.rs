//! `model_type = "deepseek_v3"`: DeepSeek-V3 and R1, and others of this type.
//!
//! Latent attention, and experts beside a shared one in all layers but the first ones. Layers that predict further tokens
//! are not trained.

use super::config::Config;
use super::family::Family;
use super::glm4_moe::read_experts;
use super::latent::read_with_latents;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let mut spec = read_with_latents(config, family, false)?;
    let further = config.count("num_nextn_predict_layers")?;
    spec.unread_layers = further.or(config.count("num_mtp_layers")?).unwrap_or(0);
    let (experts, dense) = read_experts(config, &spec)?;
    Ok(spec.with_experts(&experts, |layer| layer >= dense))
}
