//! `model_type = "olmo_hybrid"`: OLMo Hybrid.
//!
//! Three of four layers have the gated delta rule, with norms before their blocks; the others are those of OLMo 2, rotated
//! unless the config says that the base of the rotary embedding is null.

use super::config::Config;
use super::family::Family;
use super::layer::{LayerNorms, Mixer};
use super::olmo2;
use super::recurrent::{DeltaProjections, DeltaSpec, RecurrentSpec};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;
use smidgen_ir::Norm;

/// Of the norms of the delta rule, whatever the config says of others.
const DELTA_NORM: Norm = Norm { eps: 1e-5, plus_one: false };

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = olmo2::read_spec(config, family)?;
    let delta = read_delta(config, &spec)?;
    let layers = spec.layers.len();
    let listed = config.kinds_of_layers(layers, "linear_attention, full_attention")?;
    let is_full = |layer: usize| match &listed {
        Some(kinds) => kinds[layer] == 1,
        None => (layer + 1).is_multiple_of(4) || (layers < 4 && layer + 1 == layers),
    };
    let table = config.table("rope_parameters", "rope_parameters.")?;
    let rotates = !table.is_some_and(|table| table.is_null("rope_theta"));
    let before = LayerNorms::before(spec.final_norm);
    let spec = spec.with_attention(|_, attention| attention.rope = attention.rope.filter(|_| rotates));
    Ok(spec.with_layers(|index, layer| {
        if !is_full(index) {
            layer.norms = before;
            layer.mixer = Mixer::Recurrent(RecurrentSpec::Delta(delta.clone()));
        }
    }))
}

/// The sizes of the delta rule, which follow from those of attention where the config has none.
fn read_delta(config: &Config<'_>, spec: &DecoderSpec) -> Result<DeltaSpec, ModelError> {
    config.refuse(
        "hidden_act",
        &[json!("silu"), json!("swish")],
        "silu, which layers with a delta rule have",
    )?;
    let heads = config.required_dimension("num_attention_heads")?;
    let key_heads = config.dimension("linear_num_key_heads")?.unwrap_or(heads);
    let key_dim = config.dimension("linear_key_head_dim")?.unwrap_or(3 * spec.hidden / (4 * key_heads));
    let delta = DeltaSpec {
        heads: config.dimension("linear_num_value_heads")?.unwrap_or(heads),
        key_heads,
        key_dim,
        value_dim: config.dimension("linear_value_head_dim")?.unwrap_or(2 * key_dim),
        taps: config.taps("linear_conv_kernel_dim")?,
        projections: DeltaProjections::Separate,
        write: if config.flag("linear_allow_neg_eigval", true)? { 2.0 } else { 1.0 },
        norm: DELTA_NORM,
    };
    config.check_states(
        ["linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"],
        delta.scan(),
    )?;
    Ok(delta)
}
