//! Models: turns a `config.json` into a [`spec::DecoderSpec`], with one file per `model_type`.
//!
//! A model file only reads its config. The graph builder reads the `DecoderSpec` and knows no model type.

pub mod audio;
pub mod config;
pub mod gemma2;
pub mod gemma3;
pub mod llama;
pub mod mistral;
pub mod phi3;
pub mod phi4_multimodal;
pub mod phi4mm;
pub mod qwen2;
pub mod qwen3;
pub mod spec;
pub mod tensors;

use crate::error::ModelError;
use config::Config;
use spec::DecoderSpec;

type ReadSpec = fn(&Config) -> Result<DecoderSpec, ModelError>;

const MODEL_TYPES: [(&str, ReadSpec); 9] = [
    ("llama", llama::read_spec),
    ("qwen2", qwen2::read_spec),
    ("qwen3", qwen3::read_spec),
    ("mistral", mistral::read_spec),
    ("phi3", phi3::read_spec),
    ("phi4_multimodal", phi4_multimodal::read_spec),
    ("phi4mm", phi4mm::read_spec),
    ("gemma2", gemma2::read_spec),
    ("gemma3_text", gemma3::read_spec),
];

/// The decoder that a `config.json` describes.
pub fn read_spec(config: &serde_json::Value) -> Result<DecoderSpec, ModelError> {
    let config = Config::new(config)?;
    let model_type = config.text("model_type")?.ok_or(ModelError::Missing { key: "model_type" })?;
    match MODEL_TYPES.iter().find(|(name, _)| *name == model_type) {
        Some((_, read)) => read(&config),
        None => Err(ModelError::UnknownArchitecture {
            model_type: model_type.to_string(),
            supported: MODEL_TYPES.map(|(name, _)| name).join(", "),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn config(model_type: &str, more: &Value) -> Value {
        let mut config = json!({
            "model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 256,
        });
        for (key, value) in more.as_object().expect("an object") {
            config[key] = value.clone();
        }
        config
    }

    fn tensor_names(spec: &DecoderSpec) -> Vec<String> {
        spec.tensors().into_iter().map(|tensor| tensor.name).collect()
    }

    fn windows(spec: &DecoderSpec) -> Vec<Option<usize>> {
        spec.attention.iter().map(|attention| attention.window).collect()
    }

    #[test]
    fn qwen2_has_biases_that_no_key_says() {
        let off = json!({"use_sliding_window": false, "sliding_window": 16, "max_window_layers": 1});
        let spec = read_spec(&config("qwen2", &off)).unwrap();
        assert!(spec.qkv_bias && !spec.output_bias && windows(&spec) == [None, None]);
        let names = tensor_names(&spec);
        assert!(names.contains(&"model.layers.1.self_attn.v_proj.bias".into()));
        assert!(!names.contains(&"model.layers.1.self_attn.o_proj.bias".into()));
        let on = json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1});
        assert_eq!(windows(&read_spec(&config("qwen2", &on)).unwrap()), [None, Some(16)]);
        let types = json!(["sliding_attention", "full_attention"]);
        let on = json!({"use_sliding_window": true, "sliding_window": 16, "layer_types": types});
        assert_eq!(windows(&read_spec(&config("qwen2", &on)).unwrap()), [Some(16), None]);
    }

    #[test]
    fn qwen3_norms_queries_and_keys_and_says_its_head_size() {
        let spec = read_spec(&config("qwen3", &json!({"head_dim": 32}))).unwrap();
        assert!(spec.qk_norm && !spec.qkv_bias && spec.head_dim == 32);
        assert!(tensor_names(&spec).contains(&"model.layers.0.self_attn.k_norm.weight".into()));
        let silent = read_spec(&config("qwen3", &json!({}))).unwrap_err();
        assert_eq!(silent, ModelError::Missing { key: "head_dim" });
    }

    #[test]
    fn mistral_slides_where_it_says_so() {
        let window = |value: Value| {
            windows(&read_spec(&config("mistral", &json!({"sliding_window": value}))).unwrap())[1]
        };
        assert_eq!(window(json!(4096)), Some(4096));
        assert_eq!(window(Value::Null), None);
    }

    #[test]
    fn phi3_is_fused_and_its_factors_follow_the_length() {
        let rope = json!({"type": "su", "short_factor": vec![1.0; 6], "long_factor": vec![2.0; 6]});
        let more = json!({
            "rope_scaling": rope, "partial_rotary_factor": 0.75, "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096, "sliding_window": 2047,
        });
        let spec = read_spec(&config("phi3", &more)).unwrap();
        assert_eq!((windows(&spec), spec.norm.eps), (vec![Some(2047); 2], 1e-5));
        let rope = &spec.ropes[0];
        // The scale that the published Phi-3.5 and Phi-4-mini come to: 131072 / 4096 = 32.
        assert!((rope.attention_scale - 1.190_238_1).abs() < 1e-6, "{}", rope.attention_scale);
        assert_eq!(rope.dim, 12);
        let (long, original) = rope.long_frequencies().unwrap();
        assert_eq!((long[0], rope.inverse_frequencies()[0], original), (0.5, 1.0, 4096));
        let names = tensor_names(&spec);
        assert!(names.contains(&"model.layers.1.self_attn.qkv_proj.weight".into()));
        assert!(names.contains(&"model.layers.1.mlp.gate_up_proj.weight".into()));
        assert!(!names.iter().any(|name| name.contains("q_proj.") || name.contains("up_proj.bias")));
        let short =
            json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}});
        let message = read_spec(&config("phi3", &short)).unwrap_err().to_string();
        assert_eq!(message, "config.json contradicts itself: `short_factor` has 1 numbers for 8 frequencies");
    }

    #[test]
    fn gemma2_alternates_windows_and_caps() {
        let spec = read_spec(&config("gemma2", &json!({"head_dim": 32, "sliding_window": 8}))).unwrap();
        assert_eq!(windows(&spec), [Some(8), None]);
        assert_eq!((spec.attention_softcap, spec.logit_softcap), (Some(50.0), Some(30.0)));
        assert_eq!((spec.embedding_scale, spec.attention_scale), (8.0, 1.0 / 16.0));
        assert!(spec.norm.plus_one && spec.sandwich_norms && spec.tied_head);
        assert_eq!(spec.activation, smidgen_ir::Activation::GeluTanh);
        let none = json!({"head_dim": 32, "attn_logit_softcapping": null});
        assert_eq!(read_spec(&config("gemma2", &none)).unwrap().attention_softcap, None);
    }

    #[test]
    fn gemma3_turns_sliding_layers_by_their_own_base_in_both_spellings() {
        let newer = json!({
            "head_dim": 32, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        });
        let older = json!({
            "head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        });
        let newer = read_spec(&config("gemma3_text", &newer)).unwrap();
        assert_eq!(newer, read_spec(&config("gemma3_text", &older)).unwrap());
        assert_eq!(windows(&newer), [Some(8), None]);
        let theta = |layer: usize| newer.ropes[newer.attention[layer].rope].theta;
        assert_eq!((theta(0), theta(1)), (1e4, 1e6));
        assert!(newer.qk_norm && newer.attention_softcap.is_none());
    }

    #[test]
    fn what_would_be_half_read_is_refused_by_name() {
        let refused =
            |model_type: &str, more: Value| read_spec(&config(model_type, &more)).unwrap_err().to_string();
        assert_eq!(
            refused("llama", json!({"quantization_config": {"quant_method": "gptq"}})),
            "`quantization_config.quant_method = gptq` in config.json is not supported (supported: bitsandbytes, fp8)"
        );
        assert_eq!(
            refused(
                "llama",
                json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}})
            ),
            "`quantization_config.weight_block_size = [64,64]` in config.json is not supported (supported: [128,128])"
        );
        assert!(refused("phi3", json!({"resid_pdrop": 0.1})).starts_with("`resid_pdrop = 0.1`"));
        let bidirectional = json!({"head_dim": 32, "use_bidirectional_attention": true});
        assert!(refused("gemma3_text", bidirectional).starts_with("`use_bidirectional_attention = true`"));
        let chunked = json!({"head_dim": 32, "layer_types": ["chunked_attention", "full_attention"]});
        assert!(refused("gemma2", chunked).contains("sliding_attention, full_attention"));
    }
}
