//! `model_type = "gemma3_text"`: the text models of Gemma 3.
//!
//! Gemma 2 with norms of queries and keys, and two rotary embeddings: one for sliding layers, and one with a larger base for
//! the others, which are every sixth by default.

use super::config::Config;
use super::family::Family;
use super::gemma2::read_with_four_norms;
use super::layer::NormedChannels;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    if config.is_part() {
        config.refuse(
            "final_logit_softcapping",
            &[],
            "null beside a tower, where transformers ignores it",
        )?;
    }
    let spec = read_with_four_norms(config, family)?;
    let pattern = config.size("sliding_window_pattern")?.unwrap_or(6);
    let slides = |layer: usize| !(layer + 1).is_multiple_of(pattern);
    let windows = config.windows(spec.layers.len(), config.size("sliding_window")?, slides)?;
    let full_theta = config.number("rope_theta")?.unwrap_or(1_000_000.0);
    let sliding_theta = config.number("rope_local_base_freq")?.unwrap_or(10_000.0);
    let ropes = config.ropes_of_kinds([full_theta, sliding_theta], [spec.head_dim(); 2])?;
    let spec = spec.with_windows(&windows).with_qk_norms(NormedChannels::Head);
    Ok(spec.with_ropes_of_kinds(ropes))
}
