//! `model_type = "qwen3"`: the dense models of Qwen 3.
//!
//! Llama with an RMS norm of each head's queries and keys, after the projection and before rope, and an explicit
//! `head_dim` that need not divide the hidden size. Windows are as in `qwen2`.

use super::config::Config;
use super::family::Family;
use super::layer::NormedChannels;
use super::llama::read_like_llama;
use super::qwen2::sliding_windows;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let biases = config.flag("attention_bias", false)?;
    let spec = read_like_llama(config, family)?;
    let windows = sliding_windows(config, spec.layers.len())?;
    Ok(spec.with_attention_biases(biases).with_windows(&windows).with_qk_norms(NormedChannels::Head))
}
