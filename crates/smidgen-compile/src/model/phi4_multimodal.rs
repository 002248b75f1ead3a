//! `model_type = "phi4_multimodal"`: Phi-4-multimodal in the layout of transformers.
//!
//! The decoder is that of Phi-4-mini. The audio encoder is read from `audio_config`, whose sizes come from the file and
//! not from defaults, because the published ones differ from those of the class. Images are not supported: what sees
//! stays on disk.

use super::audio::{AudioSpec, FRAMES};
use super::config::Config;
use super::phi3;
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;

pub fn read_spec(config: &Config<'_>) -> Result<DecoderSpec, ModelError> {
    let spec = phi3::read_spec(config)?;
    let audio = config.table("audio_config", "audio_config.")?;
    let audio = audio.map(|table| read_audio(&table, spec.hidden)).transpose()?;
    Ok(DecoderSpec { model_type: "phi4_multimodal".into(), audio, ..spec })
}

fn read_audio(config: &Config<'_>, decoder_hidden: usize) -> Result<AudioSpec, ModelError> {
    let hidden = config.required_dimension("hidden_size")?;
    let heads = config.required_dimension("num_attention_heads")?;
    config.refuse("nemo_activation", &[json!("relu")], "relu")?;
    config.refuse("bias_symmetric", &[json!(false)], "false")?;
    config.refuse("nemo_final_size", &[json!(10)], "10")?;
    check_audio(config, hidden, heads)?;
    Ok(AudioSpec {
        hidden,
        intermediate: config.required_dimension("intermediate_size")?,
        blocks: config.required_layers("num_blocks")?,
        heads,
        kernel: config.size("kernel_size")?.unwrap_or(3),
        bins: 80,
        conv_channels: config.required_dimension("nemo_conv_channels")?,
        max_distance: config.required_dimension("bias_max_distance")?,
        token: config.size("audio_token_id")?.unwrap_or(200_011) as u32,
        decoder_hidden,
    })
}

/// What both spellings of the config have in common, and may not say otherwise.
pub fn check_audio(config: &Config<'_>, hidden: usize, heads: usize) -> Result<(), ModelError> {
    for key in ["activation", "conv_activation", "conv_glu_type"] {
        config.refuse(key, &[json!("swish"), json!("silu")], "swish")?;
    }
    config.refuse("chunk_size", &[json!(-1)], "-1")?;
    config.refuse("time_reduction", &[json!(FRAMES)], "8")?;
    config.refuse("depthwise_multiplier", &[json!(1)], "1")?;
    config.refuse("input_size", &[json!(80)], "80")?;
    for key in ["ext_pw_out_channel", "depthwise_separable_out_channel", "depthwise_seperable_out_channel"] {
        config.refuse(key, &[json!(hidden)], "the hidden size")?;
    }
    match hidden.is_multiple_of(heads) {
        true => Ok(()),
        false => {
            let what = format!("an audio encoder of {hidden} channels cannot have {heads} heads");
            Err(ModelError::Contradiction { what })
        }
    }
}
