//! `model_type = "qwen3"`: the dense models of Qwen 3.
//!
//! Llama with an RMS norm of each head's queries and keys, behind the projection and before rope, and an
//! explicit `head_dim` that need not divide the hidden size. A sliding window is refused, as for `qwen2`.

use super::config::Config;
use super::llama::read_like_llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;

pub fn read_spec(config: &Config<'_>) -> Result<DecoderSpec, ModelError> {
    config.refuse("use_sliding_window", &[json!(false)], "false")?;
    // Where it is absent the reference takes 128, not a share of the hidden size: better to have it said.
    config.required_size("head_dim")?;
    let biases = config.flag("attention_bias", false)?;
    Ok(DecoderSpec {
        qkv_bias: biases,
        output_bias: biases,
        qk_norm: true,
        ..read_like_llama("qwen3", config)?
    })
}
