//! `model_type = "phi4mm"`: Phi-4-multimodal as published, with its audio encoder under `audio_processor`.
//!
//! The same model as `phi4_multimodal`, whose config has other names. Left out: the adapters inside the checkpoint, which
//! are read with its weights.

use super::config::Config;
use super::family::Family;
use super::phi3;
use super::phi4_multimodal::AudioConfig;
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let missing = |key| ModelError::Missing { key };
    let spec = phi3::read_spec(config, family)?;
    let processor = config.table("audio_processor", "audio_processor.")?.ok_or(missing("audio_processor"))?;
    let encoder = processor.table("config", "audio_processor.config.")?;
    let encoder = encoder.ok_or(missing("audio_processor.config"))?;
    encoder.refuse("causal", &[json!(true)], "true")?;
    encoder.refuse("bias_in_glu", &[json!(true)], "true")?;
    let biases = encoder.table("relative_attention_bias_args", "relative_attention_bias_args.")?;
    let biases = biases.ok_or(missing("relative_attention_bias_args"))?;
    biases.refuse("type", &[json!("t5")], "t5")?;
    biases.refuse("t5_bias_symmetric", &[json!(false)], "false")?;
    let convolutions = encoder.table("nemo_conv_settings", "nemo_conv_settings.")?;
    let convolutions = convolutions.ok_or(missing("nemo_conv_settings"))?;
    let spelled = AudioConfig {
        encoder: &encoder,
        hidden: "attention_dim",
        intermediate: "linear_units",
        heads: "attention_heads",
        conv_channels: (&convolutions, "conv_channels"),
        max_distance: (&biases, "t5_bias_max_distance"),
        token: config,
    };
    let audio = spelled.read(spec.hidden)?;
    Ok(DecoderSpec { audio: Some(audio), ..spec })
}
