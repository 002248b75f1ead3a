//! `model_type = "smollm3"`: SmolLM 3.
//!
//! Llama whose every fourth layer does not rotate queries and keys, or those that `no_rope_layers` marks with 0.

use super::config::Config;
use super::family::Family;
use super::llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = llama::read_spec(config, family)?;
    let layers = spec.layers.len();
    let interval = config.required_size("no_rope_layer_interval")?;
    let rotates = match config.flags("no_rope_layers")? {
        // The list may be longer than the model.
        Some(listed) if listed.len() > layers => listed[..layers].to_vec(),
        Some(listed) => config.check_layers("no_rope_layers", listed, layers)?,
        None => (0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect(),
    };
    let window =
        if config.flag("use_sliding_window", false)? { config.size("sliding_window")? } else { None };
    let windows = config.windows(layers, window, |layer| window.is_some() && !rotates[layer])?;
    Ok(spec.with_windows(&windows).with_attention(|layer, attention| {
        if !rotates[layer] {
            attention.rope = None;
        }
    }))
}
