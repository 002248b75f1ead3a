//! `model_type = "gemma3_text"`: the text models of Gemma 3.
//!
//! Gemma 2 without caps, with norms of queries and keys, and two rotary embeddings: one for sliding layers, and one with a
//! larger base for the others, which are every sixth by default. A checkpoint with a vision part has the type `gemma3` and
//! is refused.

use super::config::Config;
use super::family::Family;
use super::gemma2::read_like_gemma;
use super::spec::{DecoderSpec, LayerAttention};
use crate::error::ModelError;

/// Indices into `ropes`.
const FULL: usize = 0;
const SLIDING: usize = 1;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = read_like_gemma(config, family)?;
    let pattern = config.size("sliding_window_pattern")?.unwrap_or(6);
    let slides = |layer: usize| !(layer + 1).is_multiple_of(pattern);
    let windows = config.windows(spec.layers, family.window(config)?, slides)?.into_iter();
    let attention = windows.map(|layer| match layer.window {
        Some(_) => LayerAttention { rope: SLIDING, ..layer },
        None => LayerAttention { rope: FULL, ..layer },
    });
    let newer = config.table("rope_parameters", "rope_parameters.")?;
    let of_kind = |key: &'static str, prefix: &'static str| match newer {
        Some(table) => table.table(key, prefix),
        None => Ok(None),
    };
    let full = match of_kind("full_attention", "rope_parameters.full_attention.")? {
        Some(table) => Some(table),
        None => config.table("rope_scaling", "rope_scaling.")?,
    };
    let sliding = of_kind("sliding_attention", "rope_parameters.sliding_attention.")?;
    let full_theta = config.number("rope_theta")?.unwrap_or(1_000_000.0);
    let sliding_theta = config.number("rope_local_base_freq")?.unwrap_or(10_000.0);
    Ok(DecoderSpec {
        qk_norm: true,
        attention: attention.collect(),
        ropes: vec![
            config.rope_of_table(family.partial_rotary, full, full_theta, spec.head_dim)?,
            config.rope_of_table(family.partial_rotary, sliding, sliding_theta, spec.head_dim)?,
        ],
        attention_softcap: config.cap("attn_logit_softcapping", None)?,
        logit_softcap: config.cap("final_logit_softcapping", None)?,
        ..spec
    })
}
