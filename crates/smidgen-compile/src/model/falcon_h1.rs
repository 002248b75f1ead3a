//! `model_type = "falcon_h1"`: Falcon H1.
//!
//! Every layer has attention and Mamba-2 side by side, whose outputs are added. Multipliers scale embeddings, logits, keys,
//! parts of projections, and the inputs and outputs of all blocks.

use super::config::Config;
use super::family::Family;
use super::granitemoehybrid::read_mamba;
use super::layer::{BothMixers, LayerNorms, Mixer, NormSpec};
use super::llama;
use super::recurrent::{MambaNorm, MambaSpec, RecurrentSpec};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use smidgen_ir::Norm;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let mut spec = llama::read_spec(config, family)?;
    let factor = |key| Ok(config.float(key)?.unwrap_or(1.0));
    (spec.embedding.scale, spec.head.scale) =
        (factor("embedding_multiplier")?, factor("lm_head_multiplier")?);
    spec.final_norm_path = "model.final_layernorm";
    let inputs = [factor("attention_in_multiplier")?, factor("ssm_in_multiplier")?];
    let outputs = [factor("attention_out_multiplier")?, factor("ssm_out_multiplier")?];
    let (of_keys, of_feed_forward) = (factor("key_multiplier")?, config.factors("mlp_multipliers")?);
    let recurrent = RecurrentSpec::Mamba(read_own_mamba(config, &spec)?);
    let before_feed_forward = Some(NormSpec { path: "pre_ff_layernorm", form: spec.final_norm });
    let spec = spec.with_gated(|gated| (gated.module, gated.scales) = ("feed_forward", of_feed_forward));
    // Scores are as large as keys.
    let spec = spec.with_attention(|_, attention| attention.scale *= of_keys);
    Ok(spec.with_layers(|_, layer| {
        layer.norms = LayerNorms { before_feed_forward, ..layer.norms };
        if let Some(attention) = layer.attention().cloned() {
            let both = BothMixers { attention, recurrent: recurrent.clone(), inputs, outputs };
            layer.mixer = Mixer::Both(Box::new(both));
        }
    }))
}

fn read_own_mamba(config: &Config<'_>, spec: &DecoderSpec) -> Result<MambaSpec, ModelError> {
    let inner = match config.dimension("mamba_d_ssm")? {
        Some(inner) => inner,
        None => config.required_size("mamba_expand")? * spec.hidden,
    };
    let mamba = read_mamba(config, inner)?;
    let norm = Norm { eps: spec.norm_eps(), plus_one: false };
    let norm = MambaNorm { norm, before_gate: config.flag("mamba_norm_before_gate", true)? };
    Ok(MambaSpec {
        norm: config.flag("mamba_rms_norm", false)?.then_some(norm),
        proj_biases: [mamba.proj_biases[0], config.flag("projectors_bias", false)?],
        scales: config.factors("ssm_multipliers")?,
        adapts_output: false,
        ..mamba
    })
}
