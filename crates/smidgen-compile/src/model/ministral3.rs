//! `model_type = "ministral3"`: Ministral 3.
//!
//! Llama with one window for all layers, if any, whose queries grow with their position beyond the original context, by `llama_4_scaling_beta`.

use super::config::Config;
use super::family::Family;
use super::layer::Rotation;
use super::llama::read_like_llama;
use super::spec::DecoderSpec;
use crate::error::ModelError;
use smidgen_ir::{PositionScale, RopeSpec};

/// Indices into `ropes`.
const KEYS: usize = 0;
const QUERIES: usize = 1;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = read_like_llama(config, family)?;
    let windows = config.common_window(spec.layers.len())?;
    let mut spec = spec.with_windows(&windows);
    let table = config.table("rope_parameters", "rope_parameters.")?;
    let table = table.ok_or(ModelError::Missing { key: "rope_parameters" })?;
    let Some(beta) = table.scale("llama_4_scaling_beta")?.map(|beta| beta as f32) else { return Ok(spec) };
    let original = table.required_size("original_max_position_embeddings")?;
    let queries =
        RopeSpec { position_scale: Some(PositionScale { beta, original }), ..spec.ropes[KEYS].clone() };
    spec.ropes.push(queries);
    let rotation = Rotation { queries: QUERIES, ..Rotation::by(KEYS) };
    Ok(spec.with_attention(|_, attention| attention.rope = Some(rotation)))
}
