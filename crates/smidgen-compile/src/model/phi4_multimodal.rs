//! `model_type = "phi4_multimodal"`: Phi-4-multimodal in the layout of transformers.
//!
//! The decoder is that of Phi-4-mini. The sizes of the audio encoder must be in `audio_config`: there are no defaults,
//! because the published sizes differ from those of the class. Images are not supported, so the vision encoder is not
//! loaded.

use super::audio::{AudioSpec, FRAMES};
use super::config::Config;
use super::family::Family;
use super::phi3;
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;

/// The token id of the published tokenizer, for configs without one.
const AUDIO_TOKEN: usize = 200_011;

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let spec = phi3::read_spec(config, family)?;
    let audio = config.table("audio_config", "audio_config.")?;
    let audio = audio.map(|audio| {
        audio.refuse("nemo_activation", &[json!("relu")], "relu")?;
        audio.refuse("bias_symmetric", &[json!(false)], "false")?;
        audio.refuse("nemo_final_size", &[json!(10)], "10")?;
        let spelled = AudioConfig {
            encoder: &audio,
            hidden: "hidden_size",
            intermediate: "intermediate_size",
            heads: "num_attention_heads",
            conv_channels: (&audio, "nemo_conv_channels"),
            max_distance: (&audio, "bias_max_distance"),
            token: &audio,
        };
        spelled.read(spec.hidden)
    });
    Ok(DecoderSpec { audio: audio.transpose()?, ..spec })
}

/// Where one spelling of the config has the sizes of the audio encoder.
pub struct AudioConfig<'a, 'b> {
    pub encoder: &'a Config<'b>,
    pub hidden: &'static str,
    pub intermediate: &'static str,
    pub heads: &'static str,
    pub conv_channels: (&'a Config<'b>, &'static str),
    pub max_distance: (&'a Config<'b>, &'static str),
    /// The table with `audio_token_id`.
    pub token: &'a Config<'b>,
}

impl AudioConfig<'_, '_> {
    pub fn read(&self, decoder_hidden: usize) -> Result<AudioSpec, ModelError> {
        let encoder = self.encoder;
        let (hidden, heads) =
            (encoder.required_dimension(self.hidden)?, encoder.required_dimension(self.heads)?);
        check_audio(encoder, hidden, heads)?;
        let ((convolutions, channels), (biases, distance)) = (self.conv_channels, self.max_distance);
        Ok(AudioSpec {
            hidden,
            intermediate: encoder.required_dimension(self.intermediate)?,
            blocks: encoder.required_layers("num_blocks")?,
            heads,
            kernel: encoder.size("kernel_size")?.unwrap_or(3),
            bins: 80,
            conv_channels: convolutions.required_dimension(channels)?,
            max_distance: biases.required_dimension(distance)?,
            token: self.token.size("audio_token_id")?.unwrap_or(AUDIO_TOKEN) as u32,
            decoder_hidden,
        })
    }
}

/// Refuses values of keys that both spellings share and that are not supported.
fn check_audio(config: &Config<'_>, hidden: usize, heads: usize) -> Result<(), ModelError> {
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
    if hidden.is_multiple_of(heads) {
        Ok(())
    } else {
        let what = format!("an audio encoder of {hidden} channels cannot have {heads} heads");
        Err(ModelError::Contradiction { what })
    }
}
