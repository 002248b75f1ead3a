//! `model_type = "granitemoehybrid"`: Granite 4.
//!
//! Granite whose layers have Mamba-2 or attention, rotated only if the config says so, and a feed-forward with gate and up
//! in one matrix, beside which there may be routed experts.

use super::config::Config;
use super::experts::{ExpertsSpec, SharedExpert};
use super::family::Family;
use super::layer::{FeedForward, GatedNames, Mixer};
use super::recurrent::{MambaNorm, MambaSpec, RecurrentSpec};
use super::routed::{activation_of, read_router};
use super::spec::DecoderSpec;
use super::{granite, granitemoe};
use crate::error::ModelError;
use serde_json::json;
use smidgen_ir::{Norm, Router};

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = granite::read_spec(config, family)?;
    let (layers, norm) = (spec.layers.len(), Norm { eps: spec.norm_eps(), plus_one: false });
    let inner = config.required_size("mamba_expand")? * spec.hidden;
    let norm = MambaNorm { norm, before_gate: false };
    let mamba = MambaSpec { norm: Some(norm), ..read_mamba(config, inner)? };
    let listed = config.kinds_of_layers(layers, "linear_attention, full_attention")?;
    let rotates = match config.text("position_embedding_type")? {
        None => false,
        Some("rope") => true,
        Some(other) => return Err(ModelError::unsupported("position_embedding_type", other, "rope, null")),
    };
    let width = config.dimension("shared_intermediate_size")?;
    let width = width.ok_or(ModelError::Missing { key: "shared_intermediate_size" })?;
    let spec = spec.with_attention(|_, attention| attention.rope = attention.rope.filter(|_| rotates));
    let spec = spec.with_gated(|gated| {
        (gated.module, gated.names) = ("shared_mlp", GatedNames::INPUT_OUTPUT);
        (gated.width, gated.is_fused) = (width, true);
    });
    let gated = spec.layers.iter().find_map(|layer| match &layer.feed_forward {
        FeedForward::Gated(gated) => Some(gated.clone()),
        FeedForward::Experts(_) => None,
    });
    let spec = if config.count("num_local_experts")? == Some(0) {
        spec
    } else {
        let router = Router { renormalizes: true, ..read_router(config, &["num_local_experts"])? };
        let width = config.required_dimension("intermediate_size")?;
        let experts = ExpertsSpec {
            names: granitemoe::NAMES,
            shared: gated.map(|gated| SharedExpert { gated, gate: None }),
            ..ExpertsSpec::like_qwen(router, width, activation_of(&spec))
        };
        spec.with_experts(&experts, |_| true)
    };
    Ok(spec.with_layers(|index, layer| {
        if listed.as_ref().is_none_or(|kinds| kinds[index] == 0) {
            layer.mixer = Mixer::Recurrent(RecurrentSpec::Mamba(mamba.clone()));
        }
    }))
}

/// Mamba-2 without a norm and with `inner` channels of values, whose sizes have `mamba_` keys.
pub fn read_mamba(config: &Config<'_>, inner: usize) -> Result<MambaSpec, ModelError> {
    let size = |key: &'static str| config.dimension(key)?.ok_or(ModelError::Missing { key });
    config.refuse("hidden_act", &[json!("silu"), json!("swish")], "silu, which layers with Mamba-2 have")?;
    let heads = size("mamba_n_heads")?;
    let is_auto = config.get("mamba_d_head").is_none_or(|head| head == "auto");
    let head_dim = if is_auto { inner / heads } else { size("mamba_d_head")? };
    if heads * head_dim != inner {
        let what = format!(
            "{heads} heads of {head_dim} (`mamba_n_heads`, `mamba_d_head`) are not the {inner} channels of Mamba-2"
        );
        return Err(ModelError::Contradiction { what });
    }
    let mamba = MambaSpec {
        module: "mamba",
        heads,
        head_dim,
        groups: size("mamba_n_groups")?,
        state: size("mamba_d_state")?,
        taps: config.taps("mamba_d_conv")?,
        conv_bias: config.flag("mamba_conv_bias", true)?,
        proj_biases: [config.flag("mamba_proj_bias", false)?; 2],
        scales: [1.0; 5],
        steps: config.range("time_step_limit")?.unwrap_or([0.0, f32::INFINITY]),
        norm: None,
        adapts_output: true,
    };
    config.check_states(["mamba_n_groups", "mamba_d_state", "mamba_d_head"], mamba.scan())?;
    Ok(mamba)
}
