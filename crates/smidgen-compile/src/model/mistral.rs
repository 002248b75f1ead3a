//! `model_type = "mistral"`: Mistral 7B and its relatives.
//!
//! Llama with a sliding window: a query sees that many keys, its own included. From v0.2 on it is null, and a query sees all
//! keys up to its own. With `layer_types` transformers reads the config as a Ministral, unless it is that of a text model
//! beside a tower: only the layers that are named sliding have the window.

use super::config::Config;
use super::family::Family;
use super::llama::read_like_llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = read_like_llama(config, family)?;
    let (layers, window) = (spec.layers.len(), config.size("sliding_window")?);
    let windows = if config.is_part() {
        config.common_window(layers)?
    } else {
        config.windows(layers, window, |_| window.is_some())?
    };
    Ok(spec.with_windows(&windows))
}
