//! `model_type = "phi4mm"`: Phi-4-multimodal as published, with its audio encoder under `audio_processor`.
//!
//! The same model as `phi4_multimodal` with other names for the same numbers. Left out: the adapters inside the
//! checkpoint, which are read with its weights.

use super::audio::AudioSpec;
use super::config::Config;
use super::phi3;
use super::phi4_multimodal::check_audio;
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;

/// Of the published tokenizer; its config does not say.
const AUDIO_TOKEN: u32 = 200_011;

pub fn read_spec(config: &Config<'_>) -> Result<DecoderSpec, ModelError> {
    let spec = phi3::read_spec(config)?;
    let processor = config.table("audio_processor", "audio_processor.")?;
    let processor = processor.ok_or(ModelError::Missing { key: "audio_processor" })?;
    let audio = processor.table("config", "audio_processor.config.")?;
    let audio = audio.ok_or(ModelError::Missing { key: "audio_processor.config" })?;
    let audio = read_audio(config, &audio, spec.hidden)?;
    Ok(DecoderSpec { model_type: "phi4mm".into(), audio: Some(audio), ..spec })
}

fn read_audio(
    config: &Config<'_>,
    audio: &Config<'_>,
    decoder_hidden: usize,
) -> Result<AudioSpec, ModelError> {
    let missing = |key| ModelError::Missing { key };
    let hidden = audio.required_dimension("attention_dim")?;
    let heads = audio.required_dimension("attention_heads")?;
    audio.refuse("causal", &[json!(true)], "true")?;
    audio.refuse("bias_in_glu", &[json!(true)], "true")?;
    let bias = audio.table("relative_attention_bias_args", "relative_attention_bias_args.")?;
    let bias = bias.ok_or(missing("relative_attention_bias_args"))?;
    bias.refuse("type", &[json!("t5")], "t5")?;
    bias.refuse("t5_bias_symmetric", &[json!(false)], "false")?;
    let convolutions = audio.table("nemo_conv_settings", "nemo_conv_settings.")?;
    let convolutions = convolutions.ok_or(missing("nemo_conv_settings"))?;
    check_audio(audio, hidden, heads)?;
    Ok(AudioSpec {
        hidden,
        intermediate: audio.required_dimension("linear_units")?,
        blocks: audio.required_layers("num_blocks")?,
        heads,
        kernel: audio.size("kernel_size")?.unwrap_or(3),
        bins: 80,
        conv_channels: convolutions.required_dimension("conv_channels")?,
        max_distance: bias.required_dimension("t5_bias_max_distance")?,
        token: config.size("audio_token_id")?.map_or(AUDIO_TOKEN, |token| token as u32),
        decoder_hidden,
    })
}
