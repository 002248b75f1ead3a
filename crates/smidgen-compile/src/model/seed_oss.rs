//! `model_type = "seed_oss"`: Seed-OSS.
//!
//! Llama with a head size of its own, and separate keys for the biases of q, k, v and of o. The class applies dropout to
//! the base model while it trains; here it is left out, with a note (`ignored_keys` in `mod.rs`).

use super::config::Config;
use super::family::Family;
use super::llama::read_like_llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let (inputs, output) = (config.flag("attention_bias", true)?, config.flag("attention_out_bias", false)?);
    let mlp = config.flag("mlp_bias", false)?;
    let spec = read_like_llama(config, family)?;
    let spec =
        spec.with_attention(|_, attention| (attention.qkv_bias, attention.output_bias) = (inputs, output));
    Ok(spec.with_gated(|gated| gated.bias = mlp))
}
