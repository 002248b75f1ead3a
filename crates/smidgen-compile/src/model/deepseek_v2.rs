//! `model_type = "deepseek_v2"`: DeepSeek-V2 and V2-Lite.
//!
//! Latent attention whose rotated channels are pairs of neighbours, and experts beside shared ones.

use super::config::Config;
use super::family::Family;
use super::latent::read_with_latents;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let biases = config.flag("mlp_bias", false)?;
    let spec = read_with_latents(config, family, false)?.with_interleaved_ropes();
    Ok(spec.with_gated(|gated| gated.bias = biases))
}
