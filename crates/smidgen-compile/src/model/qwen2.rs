//! `model_type = "qwen2"`: Qwen 2 and 2.5.
//!
//! Llama with biases on q, k and v, for which the config has no key. Released models have no sliding window
//! (`use_sliding_window` is false, and the other window keys then mean nothing); otherwise the layers from
//! `max_window_layers` on have one, or those that `layer_types` names.

use super::config::Config;
use super::family::Family;
use super::llama::read_like_llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = read_like_llama(config, family)?;
    let windows = sliding_windows(config, spec.layers.len())?;
    Ok(spec.with_windows(&windows).with_attention(|_, attention| attention.qkv_bias = true))
}

/// The windows of Qwen 2 and 3.
pub fn sliding_windows(config: &Config<'_>, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let window =
        if config.flag("use_sliding_window", false)? { config.size("sliding_window")? } else { None };
    let first = config.count("max_window_layers")?.unwrap_or(layers);
    config.windows(layers, window, |layer| window.is_some() && layer >= first)
}
