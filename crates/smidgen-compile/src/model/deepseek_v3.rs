//! `model_type = "deepseek_v3"`: DeepSeek-V3 and R1, and others of this type.
//!
//! Latent attention, and experts beside a shared one in all layers but the first ones.

use super::config::Config;
use super::family::Family;
use super::latent::read_with_latents;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    read_with_latents(config, family, false)
}
