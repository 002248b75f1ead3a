//! Models: a `config.json` becomes a [`spec::DecoderSpec`], one file a `model_type`.
//!
//! One decoder, many dialects: a dialect only reads its config; the graph builder knows none of them.

pub mod config;
pub mod llama;
pub mod mistral;
pub mod qwen2;
pub mod qwen3;
pub mod spec;

use crate::error::ModelError;
use config::Config;
use spec::DecoderSpec;

type ReadSpec = fn(&Config) -> Result<DecoderSpec, ModelError>;

const DIALECTS: [(&str, ReadSpec); 4] = [
    ("llama", llama::read_spec),
    ("qwen2", qwen2::read_spec),
    ("qwen3", qwen3::read_spec),
    ("mistral", mistral::read_spec),
];

/// The decoder that a `config.json` describes.
pub fn read_spec(config: &serde_json::Value) -> Result<DecoderSpec, ModelError> {
    let config = Config::new(config)?;
    let model_type = config.text("model_type")?.ok_or(ModelError::Missing { key: "model_type" })?;
    match DIALECTS.iter().find(|(name, _)| *name == model_type) {
        Some((_, read)) => read(&config),
        None => Err(ModelError::UnknownArchitecture {
            model_type: model_type.to_string(),
            supported: DIALECTS.map(|(name, _)| name).join(", "),
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

    #[test]
    fn qwen2_has_biases_that_no_key_says() {
        let off = json!({"use_sliding_window": false, "sliding_window": 16, "max_window_layers": 1});
        let spec = read_spec(&config("qwen2", &off)).unwrap();
        assert!(spec.qkv_bias && !spec.output_bias && spec.window.is_none());
        let names = tensor_names(&spec);
        assert!(names.contains(&"model.layers.1.self_attn.v_proj.bias".into()));
        assert!(!names.contains(&"model.layers.1.self_attn.o_proj.bias".into()));
        let on = read_spec(&config("qwen2", &json!({"use_sliding_window": true}))).unwrap_err().to_string();
        assert_eq!(on, "`use_sliding_window = true` in config.json is not supported (supported: false)");
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
        let window =
            |value: Value| read_spec(&config("mistral", &json!({"sliding_window": value}))).unwrap().window;
        assert_eq!(window(json!(4096)), Some(4096));
        assert_eq!(window(Value::Null), None);
    }
}
