//! `model_type = "gemma3_text"`: the text models of Gemma 3.
//!
//! Gemma 2 without caps, with norms of queries and keys, and two rotary embeddings: one for sliding layers, and one with a
//! larger base for the others, which are every sixth by default. A checkpoint with a vision part has the type `gemma3` and
//! is refused.

use super::config::Config;
use super::family::Family;
use super::gemma2::read_like_gemma;
use super::layer::NormedChannels;
use super::spec::DecoderSpec;
use crate::error::ModelError;

/// Indices into `ropes`.
const FULL: usize = 0;
const SLIDING: usize = 1;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let mut spec = read_like_gemma(config, family)?;
    let pattern = config.size("sliding_window_pattern")?.unwrap_or(6);
    let slides = |layer: usize| !(layer + 1).is_multiple_of(pattern);
    let windows = config.windows(spec.layers.len(), family.window(config)?, slides)?;
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
    let head_dim = spec.head_dim();
    spec.ropes = vec![
        config.rope_of_table(family.partial_rotary, full, full_theta, head_dim)?,
        config.rope_of_table(family.partial_rotary, sliding, sliding_theta, head_dim)?,
    ];
    let softcap = config.cap("attn_logit_softcapping", None)?;
    spec.head.softcap = config.cap("final_logit_softcapping", None)?;
    let spec = spec.with_windows(&windows).with_qk_norms(NormedChannels::Head);
    Ok(spec.with_attention(|_, attention| {
        attention.softcap = softcap;
        attention.rope = Some(if attention.window.is_some() { SLIDING } else { FULL });
    }))
}
