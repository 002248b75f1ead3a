//! `model_type = "olmo3"`: OLMo 3.
//!
//! OLMo 2 with a sliding window in three of four layers. A scaling of the rotary embedding applies to the other layers.

use super::config::Config;
use super::family::Family;
use super::olmo2;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = olmo2::read_spec(config, family)?;
    let slides = |layer: usize| !(layer + 1).is_multiple_of(4);
    let windows = config.windows(spec.layers.len(), config.size("sliding_window")?, slides)?;
    let theta = config.number("rope_theta")?.unwrap_or(500_000.0);
    let ropes = config.ropes_of_kinds([theta, 500_000.0], [spec.head_dim(); 2])?;
    Ok(spec.with_windows(&windows).with_ropes_of_kinds(ropes))
}
