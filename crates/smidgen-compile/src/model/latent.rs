//! What the model types with latent attention share: its ranks, its heads, and their rotated channels.
//!
//! DeepSeek-V2 began it, and others took it over. Where scores are scaled for a longer context, they are by the square of
//! the number by which YaRN scales cosines and sines, at `mscale_all_dim`.

use super::config::Config;
use super::family::Family;
use super::layer::{KeysAndValues, LatentSpec, LayerSpec, Rotation};
use super::llama::{check_heads, read_with_heads};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;
use smidgen_ir::Norm;

/// The norms of latents have the default of their class, whatever the config says of the other norms.
const LATENT_NORM: Norm = Norm { eps: 1e-6, plus_one: false };

/// Reads a decoder with latent attention, and dense feed-forwards in all layers. `rotates_share` says whether the share of
/// rotated channels, if there is one, is that of a whole query.
pub fn read_with_latents(
    config: &Config<'_>,
    family: &Family,
    rotates_share: bool,
) -> Result<DecoderSpec, ModelError> {
    let size = |key| config.dimension(key)?.ok_or(ModelError::Missing { key });
    let heads = config.required_dimension("num_attention_heads")?;
    let latent = LatentSpec {
        query_rank: config.dimension("q_lora_rank")?,
        rank: size("kv_lora_rank")?,
        plain: size("qk_nope_head_dim")?,
        rotated: size("qk_rope_head_dim")?,
        value: size("v_head_dim")?,
        norm: LATENT_NORM,
        query_scale: None,
    };
    if config.dimension("num_key_value_heads")?.is_some_and(|own| own != heads) {
        let what = format!(
            "`num_key_value_heads` is not `num_attention_heads = {heads}`, and all heads have own keys"
        );
        return Err(ModelError::Contradiction { what });
    }
    let head_dim = latent.query().max(latent.value).next_multiple_of(2);
    check_heads(heads, heads, head_dim)?;
    if !latent.rotated.is_multiple_of(2) {
        return Err(ModelError::unsupported("qk_rope_head_dim", latent.rotated.to_string(), "even sizes"));
    }
    let has_share = config.rotary_shares()?.iter().any(|share| *share != 1.0);
    let of_whole = rotates_share && has_share;
    let rotated_of = if of_whole { latent.query() } else { latent.rotated };
    let rope = config.rope(of_whole || family.partial_rotary, rotated_of)?;
    if rope.dim != latent.rotated {
        let what = format!("`partial_rotary_factor` rotates {} of {} channels", rope.dim, latent.rotated);
        return Err(ModelError::Contradiction { what });
    }
    let biases = config.flag("attention_bias", false)?;
    let is_interleaved = config.flag("rope_interleave", true)?;
    let scale = score_scale(config, latent.query())?;
    read_with_heads(config, family, rope, |width, eps| {
        let mut layer = LayerSpec::like_llama(heads, heads, head_dim, width, eps);
        let attention = layer.attention_mut().expect("a layer as Llama's has attention");
        attention.source = KeysAndValues::Latent(latent);
        attention.rope = Some(Rotation { is_interleaved, ..Rotation::by(0) });
        attention.scale = scale;
        (attention.qkv_bias, attention.output_bias) = (biases, biases);
        layer
    })
}

/// What scores are multiplied by.
fn score_scale(config: &Config<'_>, query: usize) -> Result<f32, ModelError> {
    let plain = (query as f64).powf(-0.5);
    let newer = config.table("rope_parameters", "rope_parameters.")?;
    let table = newer.or(config.table("rope_scaling", "rope_scaling.")?);
    let Some(table) = table.filter(|table| table.has_own("rope_type") || table.has_own("type")) else {
        return Ok(plain as f32);
    };
    let key = if table.has_own("rope_type") { "rope_type" } else { "type" };
    let all = table.scale("mscale_all_dim")?.filter(|_| table.get(key) != Some(&json!("default")));
    let growth = match (all, table.number("factor")?) {
        (Some(all), Some(factor)) if factor > 1.0 => 0.1 * all * factor.ln() + 1.0,
        _ => 1.0,
    };
    Ok((plain * growth * growth) as f32)
}
