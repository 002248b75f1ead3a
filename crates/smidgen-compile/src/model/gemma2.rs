//! `model_type = "gemma2"`: Gemma 2.
//!
//! Gemma with norms before and after attention and MLP, caps on scores and logits, and a sliding window in even layers.

use super::config::Config;
use super::family::Family;
use super::gemma::read_like_gemma;
use super::layer::LayerNorms;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = read_with_four_norms(config, family)?;
    let windows =
        config.windows(spec.layers.len(), config.size("sliding_window")?, |layer| layer % 2 == 0)?;
    Ok(spec.with_windows(&windows))
}

/// Gemma 2 and 3 without their windows and rotary embeddings.
pub fn read_with_four_norms(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let mut spec = read_like_gemma(config, family)?;
    let scale = config.required_float("query_pre_attn_scalar")?.powf(-0.5);
    let softcap = config.float("attn_logit_softcapping")?;
    spec.head.softcap = config.float("final_logit_softcapping")?;
    let norms = LayerNorms::around(spec.final_norm);
    let spec = spec.with_layers(|_, layer| layer.norms = norms);
    Ok(spec.with_attention(|_, attention| (attention.scale, attention.softcap) = (scale, softcap)))
}
