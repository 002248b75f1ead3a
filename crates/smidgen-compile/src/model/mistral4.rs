//! `model_type = "mistral4"`: the text model of Mistral Small 4.
//!
//! DeepSeek-V3's latent attention, whose queries grow with their position beyond the original context, by
//! `llama_4_scaling_beta`. The scale is that of whole queries, so it is apart from the rotation of some channels. Experts
//! beside a shared one, chosen by a softmax of all of them.

use super::config::Config;
use super::family::Family;
use super::latent::read_with_latents;
use super::layer::KeysAndValues;
use super::routed::{Checked, read_groups, read_router, read_with_shared};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use smidgen_ir::{PositionScale, RopeScaling, RopeSpec, Router};

/// Index into `ropes`.
const QUERY_SCALE: usize = 1;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let mut spec = read_with_latents(config, family, true)?;
    let router = read_router(config, &["n_routed_experts", "num_local_experts"])?;
    let (groups, scale) = (read_groups(config, 2)?, config.float("routed_scaling_factor")?.unwrap_or(1.0));
    let experts = read_with_shared(config, &spec, Router { groups, scale, ..router }.checked()?, false)?;
    let dense = config.count("first_k_dense_replace")?.unwrap_or(0);
    spec = spec.with_experts(&experts, |layer| layer >= dense);
    let table = config.table("rope_parameters", "rope_parameters.")?;
    let table = table.ok_or(ModelError::Missing { key: "rope_parameters" })?;
    let Some(beta) = table.scale("llama_4_scaling_beta")?.map(|beta| beta as f32) else { return Ok(spec) };
    let original = table.required_size("original_max_position_embeddings")?;
    spec.ropes.push(RopeSpec {
        scaling: RopeScaling::Proportional { rotated_pairs: 0, factor: 1.0 },
        position_scale: Some(PositionScale { beta, original }),
        ..RopeSpec::plain(1.0, 2)
    });
    Ok(spec.with_attention(|_, attention| {
        if let KeysAndValues::Latent(latent) = &mut attention.source {
            latent.query_scale = Some(QUERY_SCALE);
        }
    }))
}
