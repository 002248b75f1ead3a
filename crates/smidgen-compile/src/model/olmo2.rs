//! `model_type = "olmo2"`: OLMo 2.
//!
//! Llama whose norms are after attention and MLP, not before, with norms of the queries and keys of all heads together.

use super::config::Config;
use super::family::Family;
use super::layer::{LayerNorms, NormedChannels};
use super::llama::read_like_llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let biases = config.flag("attention_bias", false)?;
    let spec = read_like_llama(config, family)?;
    let norms = LayerNorms::around(spec.final_norm);
    let norms = LayerNorms { before_mixer: None, before_feed_forward: None, ..norms };
    let spec = spec.with_layers(|_, layer| layer.norms = norms);
    Ok(spec.with_attention_biases(biases).with_qk_norms(NormedChannels::AllHeads))
}
