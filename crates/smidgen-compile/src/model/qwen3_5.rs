//! `model_type = "qwen3_5_text"`: the text models of Qwen 3.5.
//!
//! Three of four layers have the gated delta rule, the others attention whose query projection also has a gate for each
//! head's output. A quarter of a head is rotated, and all norms but those of the delta rule multiply by 1 + weight. The
//! sections of the rotary embedding belong to axes of images; all axes of text are equal.

use super::config::Config;
use super::family::Family;
use super::layer::{Mixer, NormForm, NormedChannels, OutputGate};
use super::llama::read_like_llama;
use super::qwen2_moe::experts_with_shared;
use super::recurrent::{DeltaProjections, DeltaSpec, RecurrentSpec};
use super::routed::{activation_of, read_router, sparse_layers};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;
use smidgen_ir::{Norm, Router};

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    read_hybrid(config, family, DeltaProjections::Parts)
}

/// `model_type = "qwen3_5_moe_text"`: the same with routed experts and a shared one in every layer.
pub fn read_moe_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = read_hybrid(config, family, DeltaProjections::Parts)?;
    let router = Router { renormalizes: true, ..read_router(config, &["num_experts"])? };
    let experts = experts_with_shared(config, router, activation_of(&spec))?;
    Ok(spec.with_experts(&experts, |_| true))
}

/// `model_type = "qwen3_next"`: Qwen 3 Next, whose matrices of the delta rule have the rows of a key head together.
pub fn read_next_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = read_hybrid(config, family, DeltaProjections::KeyHeads)?;
    let router = read_router(config, &["num_experts"])?;
    let experts = experts_with_shared(config, router, activation_of(&spec))?;
    let sparse = sparse_layers(config, spec.layers.len())?;
    Ok(spec.with_experts(&experts, |layer| sparse[layer]))
}

/// Reads the layers of Qwen 3.5 and of Qwen 3 Next, which store the projections of the delta rule differently.
pub fn read_hybrid(
    config: &Config<'_>,
    family: &Family,
    projections: DeltaProjections,
) -> Result<DecoderSpec, ModelError> {
    let biases = config.flag("attention_bias", false)?;
    let mut spec = read_like_llama(config, family)?;
    let (layers, norm) = (spec.layers.len(), Norm { eps: spec.norm_eps(), plus_one: false });
    let delta = read_delta(config, projections, norm)?;
    let interval = config.size("full_attention_interval")?.unwrap_or(4);
    let listed = config.kinds_of_layers(layers, "linear_attention, full_attention")?;
    let is_full = |layer: usize| match &listed {
        Some(kinds) => kinds[layer] == 1,
        None => (layer + 1).is_multiple_of(interval),
    };
    spec.final_norm = NormForm::Rms(Norm { plus_one: true, ..norm });
    let form = spec.final_norm;
    let spec = spec.with_attention_biases(biases).with_qk_norms(NormedChannels::Head);
    let spec = spec.with_attention(|_, attention| attention.gate = OutputGate::OfQueries);
    Ok(spec.with_layers(|index, layer| {
        layer.norms = layer.norms.with_form(form);
        if !is_full(index) {
            layer.mixer = Mixer::Recurrent(RecurrentSpec::Delta(delta.clone()));
        }
    }))
}

/// The sizes of the delta rule, with `linear_` keys.
pub fn read_delta(
    config: &Config<'_>,
    projections: DeltaProjections,
    norm: Norm,
) -> Result<DeltaSpec, ModelError> {
    config.refuse(
        "hidden_act",
        &[json!("silu"), json!("swish")],
        "silu, which layers with a delta rule have",
    )?;
    let size = |key: &'static str| config.dimension(key)?.ok_or(ModelError::Missing { key });
    let delta = DeltaSpec {
        heads: size("linear_num_value_heads")?,
        key_heads: size("linear_num_key_heads")?,
        key_dim: size("linear_key_head_dim")?,
        value_dim: size("linear_value_head_dim")?,
        taps: config.taps("linear_conv_kernel_dim")?,
        projections,
        write: 1.0,
        norm,
    };
    let keys = ["linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"];
    config.check_states(keys, delta.scan())?;
    Ok(delta)
}
