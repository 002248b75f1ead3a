//! `model_type = "glm4_moe_lite"`: GLM-4.7-Flash.
//!
//! DeepSeek-V3's latent attention in GLM's layers.

use super::config::Config;
use super::family::Family;
use super::latent::read_with_latents;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    read_with_latents(config, family, false)
}
