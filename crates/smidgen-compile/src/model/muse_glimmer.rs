//! `model_type = "muse_glimmer_text"`: the text model of Muse Glimmer.
//!
//! Gemma 2 with embeddings, queries and keys normed without weights, outputs of attention gated by a sigmoid, layers without
//! a rotary embedding, and scaled logits.

use super::config::Config;
use super::family::Family;
use super::gemma::read_like_gemma;
use super::layer::{LayerNorms, NormForm, NormSpec, NormedChannels, OutputGate, QkNorm};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use smidgen_ir::Norm;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let mut spec = read_like_gemma(config, family)?;
    let (layers, norm) = (spec.layers.len(), Norm { eps: spec.norm_eps(), plus_one: false });
    let after = NormForm::Rms(Norm { eps: config.required_float("post_norm_eps")?, plus_one: true });
    let around = LayerNorms::around(spec.final_norm);
    let formed = |norm: Option<NormSpec>| norm.map(|norm| NormSpec { form: after, ..norm });
    let norms = LayerNorms {
        after_mixer: formed(around.after_mixer),
        after_feed_forward: formed(around.after_feed_forward),
        ..around
    };
    (spec.embedding.scale, spec.embedding.norm) = (1.0, Some(norm));
    spec.final_norm = NormForm::Rms(norm);
    spec.head.scale = config.required_float("output_multiplier")?;
    spec.head.softcap = config.float("final_logit_softcapping")?;
    let is_full = |layer: usize| (layers - 1 - layer).is_multiple_of(4);
    let windows = config.windows(layers, config.size("sliding_window")?, |layer| !is_full(layer))?;
    // Only whether a number is 0 counts.
    let rotates = config.layer_flags("layer_rope_theta", layers)?;
    let scale = config.required_float("qk_scale_factor")?;
    let spec = spec.with_windows(&windows).with_layers(|_, layer| layer.norms = norms);
    Ok(spec.with_attention(|layer, attention| {
        attention.qk_norm = Some(QkNorm { norm, over: NormedChannels::Head, has_weights: false });
        attention.scale *= scale;
        attention.gate = OutputGate::Projected;
        let is_rotated = rotates.as_ref().map_or(!is_full(layer), |rotates| rotates[layer]);
        attention.rope = attention.rope.filter(|_| is_rotated);
    }))
}
