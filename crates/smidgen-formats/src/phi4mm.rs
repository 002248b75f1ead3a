//! The published checkpoint of Phi-4-multimodal, which has its own tensor names and contains a LoRA for
//! speech.
//!
//! Linear layers of its decoder are stored as `base_layer.weight`, next to `lora_A.speech` and
//! `lora_B.speech` (and a LoRA for images, which is not read). The model needs the speech adapter for audio,
//! so weights are read with it merged in, unless the adapter itself is trained further.
//! Callers use the names of transformers' own layout, which are translated here. Left out: images.

use crate::folder::ModelFolder;
use crate::tensor_ref::TensorRef;
use crate::weight::{MergedWeight, Weight};

/// `model_type` of the published checkpoint.
pub const MODEL_TYPE: &str = "phi4mm";

/// How a checkpoint of Phi-4-multimodal is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phi4mm {
    /// alpha / rank of the speech adapter.
    pub scale: f32,
    /// Whether weights are read with the adapter merged in.
    pub is_merged: bool,
}

/// Rank and alpha of the speech adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpeechLora {
    pub rank: usize,
    pub alpha: f64,
}

impl SpeechLora {
    /// Reads them from the config; absent ones are those of the published model.
    pub fn of_config(config: &serde_json::Value) -> SpeechLora {
        let lora = &config["speech_lora"];
        SpeechLora {
            rank: lora["r"].as_u64().filter(|rank| (1..1 << 20).contains(rank)).unwrap_or(320) as usize,
            alpha: lora["lora_alpha"].as_f64().filter(|alpha| *alpha > 0.0).unwrap_or(640.0),
        }
    }
}

impl Phi4mm {
    /// `None` for other models.
    pub fn of_config(config: &serde_json::Value) -> Option<Phi4mm> {
        (config["model_type"] == MODEL_TYPE).then(|| {
            let SpeechLora { rank, alpha } = SpeechLora::of_config(config);
            Phi4mm { scale: (alpha / rank as f64) as f32, is_merged: true }
        })
    }

    /// The weight with this name in transformers' layout.
    pub fn weight(&self, folder: &ModelFolder, name: &str) -> Option<Weight> {
        let Some(module) = adapted_module(name) else {
            return folder.tensor(&stored_name(name)).map(Weight::Plain);
        };
        let base = folder.tensor(&format!("{module}.base_layer.weight")).or_else(|| folder.tensor(name))?;
        match self.is_merged.then(|| speech_factors(folder, module)).flatten() {
            Some([a, b]) => Some(Weight::Merged(MergedWeight { base, a, b, scale: self.scale })),
            None => Some(Weight::Plain(base)),
        }
    }
}

/// The name in the checkpoint of the base weight with this name in transformers' layout.
pub fn file_name(folder: &ModelFolder, name: &str) -> String {
    let inner = adapted_module(name).map(|module| format!("{module}.base_layer.weight"));
    inner.filter(|inner| folder.tensor(inner).is_some()).unwrap_or_else(|| stored_name(name))
}

/// Names of the speech adapter's A and B of a module.
pub fn speech_names(module: &str) -> [String; 2] {
    ["A", "B"].map(|which| format!("{module}.lora_{which}.speech.weight"))
}

/// The speech adapter's A and B of a module.
pub fn speech_factors(folder: &ModelFolder, module: &str) -> Option<[TensorRef; 2]> {
    let [a, b] = speech_names(module).map(|name| folder.tensor(&name));
    Some([a?, b?])
}

/// The module of a weight, if the adapters in the checkpoint cover it.
fn adapted_module(name: &str) -> Option<&str> {
    let module = name.strip_suffix(".weight").filter(|module| module.starts_with("model.layers."))?;
    let ends = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"];
    ends.iter().any(|end| module.ends_with(end)).then_some(module)
}

/// The name in the published checkpoint of a tensor without an adapter.
pub fn stored_name(name: &str) -> String {
    const AUDIO: &str = "model.embed_tokens_extend.audio_embed.";
    let Some(rest) = name.strip_prefix(AUDIO) else { return name.to_owned() };
    let renamed = [
        (".gate_up_proj.", ".net.0.linear."),
        (".down_proj.", ".net.2."),
        (".self_attn.q_proj.", ".self_attn.linear_q."),
        (".self_attn.k_proj.", ".self_attn.linear_k."),
        (".self_attn.v_proj.", ".self_attn.linear_v."),
        (".self_attn.o_proj.", ".self_attn.linear_out."),
    ];
    for (from, to) in renamed.into_iter().filter(|_| rest.starts_with("encoder.encoders.")) {
        if rest.contains(from) {
            return format!("{AUDIO}{}", rest.replace(from, to));
        }
    }
    for (from, to) in [("up_proj_for_speech.", "speech.0."), ("down_proj_for_speech.", "speech.2.")] {
        if let Some(part) = rest.strip_prefix(from) {
            return format!("{AUDIO}audio_projection.{to}{part}");
        }
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_published_file() {
        let audio = "model.embed_tokens_extend.audio_embed";
        let block = format!("{audio}.encoder.encoders.3");
        for (name, expected) in [
            (
                format!("{block}.feed_forward_in.gate_up_proj.bias"),
                format!("{block}.feed_forward_in.net.0.linear.bias"),
            ),
            (
                format!("{block}.feed_forward_out.down_proj.weight"),
                format!("{block}.feed_forward_out.net.2.weight"),
            ),
            (format!("{block}.self_attn.k_proj.weight"), format!("{block}.self_attn.linear_k.weight")),
            (format!("{block}.self_attn.o_proj.bias"), format!("{block}.self_attn.linear_out.bias")),
            (format!("{block}.conv.glu.b1"), format!("{block}.conv.glu.b1")),
            (
                format!("{audio}.up_proj_for_speech.weight"),
                format!("{audio}.audio_projection.speech.0.weight"),
            ),
            (format!("{audio}.down_proj_for_speech.bias"), format!("{audio}.audio_projection.speech.2.bias")),
            ("model.norm.weight".into(), "model.norm.weight".into()),
        ] {
            assert_eq!(stored_name(&name), expected);
        }
        assert_eq!(
            adapted_module("model.layers.1.mlp.down_proj.weight"),
            Some("model.layers.1.mlp.down_proj")
        );
        assert_eq!(adapted_module("model.layers.1.input_layernorm.weight"), None);
    }

    #[test]
    fn rank_and_alpha_come_from_the_config() {
        let config = serde_json::json!({"model_type": "phi4mm", "speech_lora": {"r": 4, "lora_alpha": 8}});
        assert_eq!(SpeechLora::of_config(&config), SpeechLora { rank: 4, alpha: 8.0 });
        assert_eq!(Phi4mm::of_config(&config).unwrap().scale, 2.0);
        assert_eq!(SpeechLora::of_config(&serde_json::json!({})), SpeechLora { rank: 320, alpha: 640.0 });
        assert_eq!(Phi4mm::of_config(&serde_json::json!({"model_type": "phi3"})), None);
    }
}
