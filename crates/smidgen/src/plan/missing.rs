//! What a model of an unknown `model_type` has that this version does not, and a supported model of about its size.
//!
//! Parts are recognized by keys of config.json, because types are many and keys say what a model is made of; a few old types
//! have no key for it and are named. Used for hints only.
//! Left out: types that are supported and have a value that is not; the reader of the type refuses the value by name.

use serde_json::Value;
use smidgen_compile::model::supported;

const EXPERT_COUNTS: [&str; 4] = ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];

/// Parts of models, each with the keys of config.json that only models with this part set.
#[rustfmt::skip]
const PARTS: &[(&str, &[&str])] = &[
    ("encoder and cross attention", &["is_encoder_decoder", "cross_attention_layers"]),
    ("state space layers", &["state_size", "mamba_d_state", "mamba_expand", "ssm_state_size", "ssm_cfg"]),
    ("linear attention", &["linear_attn_config"]),
    ("recurrent layers", &["lru_width", "rescale_every", "mlstm_round_up_to_multiple_of", "num_hops_per_iteration", "H_cycles"]),
    ("latents of the output of attention", &["o_lora_rank"]),
    ("attention in chunks", &["attention_chunk_size"]),
    ("sparse attention with an indexer", &["index_topk"]),
    ("more than one residual stream", &["altup_num_inputs", "hc_mult"]),
    ("differential attention", &["lambda_std_dev"]),
    ("positions added to scores (ALiBi)", &["alibi"]),
];

/// Types without such keys: the beginning of the type, and the part, if there is one.
const TYPES: &[(&str, &str)] = &[
    ("bloom", "positions added to scores (ALiBi)"),
    ("mpt", "positions added to scores (ALiBi)"),
    ("gpt_neox", LAYER_NORMS),
    ("gptj", LAYER_NORMS),
    ("codegen", LAYER_NORMS),
    ("stablelm", LAYER_NORMS),
    ("starcoder2", LAYER_NORMS),
    ("persimmon", LAYER_NORMS),
    ("falcon_", ""),
    ("falcon", LAYER_NORMS),
    ("gpt", POSITIONS),
    ("opt", POSITIONS),
    ("openai-gpt", POSITIONS),
    ("biogpt", POSITIONS),
    ("xglm", POSITIONS),
    ("xlnet", BIDIRECTIONAL),
    ("electra", BIDIRECTIONAL),
    ("ernie4", ""),
    ("ernie", BIDIRECTIONAL),
    ("big_bird", BIDIRECTIONAL),
    ("bitnet", "weights of three values"),
    ("cohere2", ""),
    ("cohere", "layer norms of queries and keys"),
];

const BIDIRECTIONAL: &str = "bidirectional attention";
const LAYER_NORMS: &str = "layer norms with biases";
const POSITIONS: &str = "learned positions";

/// Models to use instead, with their parameters in billions.
const BY_SIZE: &[(f64, &str)] = &[
    (0.135, "HuggingFaceTB/SmolLM2-135M"),
    (0.6, "Qwen/Qwen3-0.6B"),
    (1.7, "Qwen/Qwen3-1.7B"),
    (4.0, "Qwen/Qwen3-4B"),
    (8.2, "Qwen/Qwen3-8B"),
    (14.8, "Qwen/Qwen3-14B"),
    (32.8, "Qwen/Qwen3-32B"),
    (70.6, "meta-llama/Llama-3.3-70B-Instruct"),
];

/// The hint for a config whose `model_type` is not supported.
pub fn hint(config: &Value) -> String {
    let parts = parts(config);
    let text_type = config["text_config"]["model_type"].as_str();
    if let Some(text) = text_type.filter(|text| supported().contains(text)) {
        return format!("its text model is a `{text}`, which is supported in checkpoints of its own");
    }
    let mut said = if parts.is_empty() {
        let model_type = config["model_type"].as_str().unwrap_or_default();
        format!("this version has no reader of `{}` configs", model_type.escape_default())
    } else {
        format!("missing here: {}", parts.join(", "))
    };
    let is_decoder = !parts.contains(&BIDIRECTIONAL) && !parts.contains(&PARTS[0].0);
    if let Some(name) = instead(config).filter(|_| is_decoder) {
        said += &format!("; a supported model of about that size is `hf:{name}`");
    }
    said
}

/// The tables of a config that describe the text model.
fn tables(config: &Value) -> impl Iterator<Item = &Value> {
    let inner = ["text_config", "llm_config", "ffn_config", "attn_config"].into_iter();
    [config].into_iter().chain(inner.filter_map(|key| config.get(key)))
}

/// Whether a value says that a model has a part.
fn is_on(value: &Value) -> bool {
    match value {
        Value::Bool(flag) => *flag,
        Value::Number(number) => number.as_f64().is_some_and(|number| number > 0.0),
        Value::Array(list) => !list.is_empty(),
        Value::Object(table) => !table.is_empty(),
        Value::Null | Value::String(_) => false,
    }
}

fn parts(config: &Value) -> Vec<&'static str> {
    let has_key =
        |keys: &[&str]| tables(config).any(|table| keys.iter().any(|key| table.get(key).is_some_and(is_on)));
    let mut parts: Vec<&str> =
        PARTS.iter().filter(|(_, keys)| has_key(keys)).map(|(part, _)| *part).collect();
    let model_type = config["model_type"].as_str().unwrap_or_default();
    let is_encoder = model_type.contains("bert") && !model_type.ends_with("decoder");
    let of_type = TYPES.iter().find(|(start, _)| model_type.starts_with(start)).map(|(_, part)| *part);
    let of_type = of_type.or(is_encoder.then_some(BIDIRECTIONAL));
    parts.extend(of_type.filter(|part| !part.is_empty() && !parts.contains(part)));
    let layer_types = tables(config).filter_map(|table| table["layer_types"].as_array()).flatten();
    let is_linear = layer_types.filter_map(Value::as_str).any(|kind| kind == "linear_attention");
    let is_listed = parts.iter().any(|part| ["linear attention", "state space layers"].contains(part));
    parts.extend((is_linear && !is_listed).then_some("linear attention"));
    parts
}

/// The supported model with about as many parameters, if there is one of at least half and at most twice the size.
fn instead(config: &Value) -> Option<&'static str> {
    let billions = parameters(config)? / 1e9;
    let distance = |size: f64| (size / billions).ln().abs();
    let nearest =
        BY_SIZE.iter().min_by(|(one, _), (other, _)| distance(*one).total_cmp(&distance(*other)))?;
    (distance(nearest.0) <= 2f64.ln()).then_some(nearest.1)
}

/// Parameters of a decoder with the sizes of a config, roughly: four projections of attention, three of each feed-forward.
fn parameters(config: &Value) -> Option<f64> {
    let number = |keys: &[&str]| {
        let numbers = |table| keys.iter().filter_map(move |key| Value::get(table, key)?.as_f64());
        tables(config).flat_map(numbers).find(|number| *number > 0.0)
    };
    let hidden = number(&["hidden_size", "n_embd", "d_model", "dim"])?;
    let layers = number(&["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"])?;
    let width = number(&["intermediate_size", "ffn_hidden_size", "ffn_dim", "d_ff", "n_inner"]);
    let width = width.unwrap_or(4.0 * hidden);
    let experts = number(&EXPERT_COUNTS);
    let width = match experts {
        Some(experts) => experts * number(&["moe_intermediate_size"]).unwrap_or(width),
        None => width,
    };
    let vocabulary = number(&["vocab_size"]).unwrap_or(0.0);
    Some(layers * hidden * (4.0 * hidden + 3.0 * width) + vocabulary * hidden)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Configs of published models, shortened to the keys that say what they are made of.
    #[test]
    fn what_is_missing_is_named() {
        let said = |config: Value| hint(&config);
        assert_eq!(
            said(json!({
                "model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,
                "num_experts": 16, "num_experts_per_tok": 2, "mamba_d_state": 16, "vocab_size": 65536,
            })),
            "missing here: state space layers; a supported model of about that size is \
             `hf:meta-llama/Llama-3.3-70B-Instruct`"
        );
        assert_eq!(
            said(json!({
                "model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "intermediate_size": 5120,
                "state_size": 16, "vocab_size": 50280,
            })),
            "missing here: state space layers; a supported model of about that size is `hf:Qwen/Qwen3-4B`"
        );
        assert_eq!(
            said(json!({"model_type": "t5", "is_encoder_decoder": true, "d_model": 512, "num_layers": 6})),
            "missing here: encoder and cross attention"
        );
        assert_eq!(
            said(
                json!({"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 30522})
            ),
            "missing here: bidirectional attention"
        );
        assert_eq!(
            said(json!({
                "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
            })),
            "missing here: learned positions; a supported model of about that size is \
             `hf:HuggingFaceTB/SmolLM2-135M`"
        );
        assert_eq!(
            said(json!({"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}})),
            "its text model is a `llama`, which is supported in checkpoints of its own"
        );
        assert_eq!(
            said(json!({"model_type": "unheard-of", "hidden_size": 64})),
            "this version has no reader of `unheard-of` configs"
        );
    }

    /// Keys without a number or set to off say nothing.
    #[test]
    fn keys_that_are_off_name_no_part() {
        let off = json!({
            "model_type": "new", "num_experts": null, "is_encoder_decoder": false, "alibi": false, "kv_lora_rank": 0,
        });
        assert_eq!(parts(&off), [""; 0]);
    }
}
