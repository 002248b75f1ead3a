//! `model_type = "lfm2"`: LFM 2.
//!
//! Layers have attention with norms of queries and keys, or a gated short convolution. Llama otherwise, with names of its own
//! and a width of the feed-forward that older configs leave to be computed.

use super::config::Config;
use super::family::Family;
use super::layer::{AttentionPaths, GatedNames, LayerNorms, Mixer, NormSpec, NormedChannels};
use super::llama::read_like_llama;
use super::recurrent::{RecurrentSpec, ShortConvSpec};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use smidgen_ir::{Activation, Norm};

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    read_with_width(config, family, width(config)?)
}

/// Reads all but the width of the feed-forward.
pub fn read_with_width(
    config: &Config<'_>,
    family: &Family,
    width: usize,
) -> Result<DecoderSpec, ModelError> {
    let mut spec = read_like_llama(config, family)?;
    // An older key says the same.
    spec.head.is_tied = config.flag("tie_embedding", spec.head.is_tied)?;
    spec.final_norm_path = "model.embedding_norm";
    let (layers, norm) =
        (spec.layers.len(), Norm { eps: config.required_float("norm_eps")?, plus_one: false });
    spec.final_norm = super::layer::NormForm::Rms(norm);
    let conv = ShortConvSpec { taps: config.taps("conv_L_cache")?, bias: config.flag("conv_bias", false)? };
    let listed = config.kinds_of_layers(layers, "conv, full_attention")?;
    let attends = config.counts("full_attn_idxs")?;
    let is_conv = |layer: usize| match (&listed, &attends) {
        (Some(kinds), _) => kinds[layer] == 0,
        (None, Some(attends)) => !attends.contains(&layer),
        (None, None) => false,
    };
    let form = spec.final_norm;
    let at = |path| Some(NormSpec { path, form });
    let norms = LayerNorms {
        before_mixer: at("operator_norm"),
        before_feed_forward: at("ffn_norm"),
        ..LayerNorms::default()
    };
    let spec = spec.with_qk_norms(NormedChannels::Head);
    let spec =
        spec.with_attention(|_, attention| attention.paths = AttentionPaths::LFM2).with_gated(|gated| {
            (gated.module, gated.names) = ("feed_forward", GatedNames::NUMBERED);
            (gated.width, gated.activation) = (width, Activation::Silu);
        });
    Ok(spec.with_layers(|index, layer| {
        layer.norms = norms;
        if is_conv(index) {
            layer.mixer = Mixer::Recurrent(RecurrentSpec::ShortConv(conv.clone()));
        }
    }))
}

/// Channels of the feed-forward: those of the config, or two thirds of them times a factor, rounded up.
fn width(config: &Config<'_>) -> Result<usize, ModelError> {
    let given = config
        .dimension("block_ff_dim")?
        .map_or_else(|| config.dimension("intermediate_size"), |dim| Ok(Some(dim)))?;
    let given = given.ok_or(ModelError::Missing { key: "intermediate_size" })?;
    if !config.flag("block_auto_adjust_ff_dim", true)? {
        return Ok(given);
    }
    let factor = config.number("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple =
        config.dimension("block_multiple_of")?.ok_or(ModelError::Missing { key: "block_multiple_of" })?;
    let adjusted = (factor * (2 * given / 3) as f64) as usize;
    Ok(adjusted.max(1).next_multiple_of(multiple))
}
