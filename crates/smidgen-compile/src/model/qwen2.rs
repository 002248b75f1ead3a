//! `model_type = "qwen2"`: Qwen 2 and 2.5.
//!
//! Llama with biases on q, k and v, which no key of the config says. Released models do not slide
//! (`use_sliding_window` is false, and the other window keys then mean nothing); one that does is refused.

use super::config::Config;
use super::llama::read_like_llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;

pub fn read_spec(config: &Config<'_>) -> Result<DecoderSpec, ModelError> {
    config.refuse("use_sliding_window", &[json!(false)], "false")?;
    Ok(DecoderSpec { qkv_bias: true, ..read_like_llama("qwen2", config)? })
}
