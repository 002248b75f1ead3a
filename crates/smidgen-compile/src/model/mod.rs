//! Models: turns a `config.json` into a [`spec::DecoderSpec`], with one file per `model_type`.
//!
//! A model file only reads its config; what an absent key means is in `class_defaults.json`. The graph builder reads the
//! `DecoderSpec` and knows no model type.

pub mod audio;
pub mod checkpoints;
pub mod cohere2;
pub mod config;
pub mod deepseek_v2;
pub mod deepseek_v3;
pub mod experts;
pub mod falcon_h1;
pub mod family;
pub mod gemma;
pub mod gemma2;
pub mod gemma3;
pub mod gemma4;
pub mod glm4;
pub mod glm4_moe;
pub mod glm4_moe_lite;
pub mod gpt_oss;
pub mod granite;
pub mod granitemoe;
pub mod granitemoehybrid;
pub mod kinds;
pub mod latent;
pub mod layer;
pub mod lfm2;
pub mod lfm2_moe;
pub mod llama;
pub mod minimax_m2;
pub mod ministral3;
pub mod mistral;
pub mod mistral4;
pub mod mixtral;
pub mod muse_glimmer;
pub mod olmo2;
pub mod olmo3;
pub mod olmo_hybrid;
pub mod olmoe;
pub mod parts;
pub mod phi3;
pub mod phi4_multimodal;
pub mod phi4mm;
pub mod qwen2;
pub mod qwen2_moe;
pub mod qwen3;
pub mod qwen3_5;
pub mod qwen3_moe;
pub mod recurrent;
pub mod routed;
pub mod seed_oss;
pub mod smollm3;
pub mod spec;
pub mod tensors;

use crate::error::ModelError;
use config::Config;
use family::Family;
use serde_json::Value;
use spec::DecoderSpec;

/// A row for each `model_type`, with its file in this folder.
const FAMILIES: &[Family] = &[
    Family::new("llama", llama::read_spec),
    Family::new("qwen2", qwen2::read_spec),
    Family::new("qwen3", qwen3::read_spec),
    Family::new("qwen3_5_text", qwen3_5::read_spec).with_partial_rotary(),
    Family::new("qwen3_5_moe_text", qwen3_5::read_moe_spec).with_partial_rotary(),
    Family::new("qwen3_next", qwen3_5::read_next_spec).with_partial_rotary(),
    Family::new("mistral", mistral::read_spec),
    Family::new("phi3", phi3::read_spec).with_partial_rotary(),
    PHI4_MULTIMODAL,
    Family { name: "phi4mm", read: phi4mm::read_spec, ..PHI4_MULTIMODAL },
    Family::new("gemma", gemma::read_spec),
    Family::new("gemma2", gemma2::read_spec),
    Family::new("gemma3_text", gemma3::read_spec).with_overflow_of_f16(),
    Family::new("smollm3", smollm3::read_spec),
    Family::new("granite", granite::read_spec),
    Family::new("granitemoehybrid", granitemoehybrid::read_spec),
    Family::new("lfm2", lfm2::read_spec),
    Family::new("lfm2_moe", lfm2_moe::read_spec),
    Family::new("falcon_h1", falcon_h1::read_spec),
    Family::new("olmo2", olmo2::read_spec),
    Family::new("olmo3", olmo3::read_spec),
    Family::new("olmo_hybrid", olmo_hybrid::read_spec),
    Family::new("glm4", glm4::read_spec).with_partial_rotary(),
    Family::new("cohere2", cohere2::read_spec),
    Family::new("ministral3", ministral3::read_spec),
    Family::new("gemma4_text", gemma4::read_spec).with_overflow_of_f16(),
    Family::new("gemma4_unified_text", gemma4::read_spec).with_overflow_of_f16(),
    Family::new("muse_glimmer_text", muse_glimmer::read_spec),
    Family { has_dropout: true, ..Family::new("seed_oss", seed_oss::read_spec) },
    Family::new("qwen3_moe", qwen3_moe::read_spec).with_overflow_of_f16(),
    Family::new("qwen2_moe", qwen2_moe::read_spec),
    Family::new("mixtral", mixtral::read_spec),
    Family::new("olmoe", olmoe::read_spec),
    Family::new("granitemoe", granitemoe::read_spec),
    Family::new("gpt_oss", gpt_oss::read_spec).with_overflow_of_f16(),
    Family::new("glm4_moe", glm4_moe::read_spec).with_partial_rotary().with_overflow_of_f16(),
    Family::new("minimax_m2", minimax_m2::read_spec).with_partial_rotary(),
    Family::new("deepseek_v2", deepseek_v2::read_spec),
    Family::new("deepseek_v3", deepseek_v3::read_spec),
    Family::new("glm4_moe_lite", glm4_moe_lite::read_spec).with_partial_rotary(),
    Family::new("mistral4", mistral4::read_spec),
];

const PHI4_MULTIMODAL: Family =
    Family::new("phi4_multimodal", phi4_multimodal::read_spec).with_partial_rotary();

/// Types of checkpoints with towers for images or sound: the type of the text model if its own table does not say, and
/// whether an absent `tie_word_embeddings` ties the head.
const WRAPPERS: &[(&str, &str, bool)] = &[
    ("gemma3", "gemma3_text", true),
    ("gemma4", "gemma4_text", true),
    ("gemma4_unified", "gemma4_unified_text", true),
    ("mistral3", "mistral", true),
    ("muse_glimmer", "muse_glimmer_text", false),
    ("qwen3_5", "qwen3_5_text", false),
    ("qwen3_5_moe", "qwen3_5_moe_text", false),
];

/// The decoder that a `config.json` describes.
pub fn read_spec(config: &Value) -> Result<DecoderSpec, ModelError> {
    let outer = Config::new(config)?;
    llama::refuse_quantization(&outer)?;
    let (text, family) = text_model(config)?;
    let mut spec = (family.read)(&text, family)?;
    // What the text model shares with its towers is said outside.
    if let Some((_, _, is_tied)) = wrapper(&outer)? {
        spec.head.is_tied = outer.flag("tie_word_embeddings", *is_tied)?;
        if !text.has_own("dtype") && !text.has_own("torch_dtype") {
            spec.stored = outer.stored_dtype()?;
        }
    }
    Ok(spec)
}

fn wrapper(outer: &Config<'_>) -> Result<Option<&'static (&'static str, &'static str, bool)>, ModelError> {
    let model_type = outer.text("model_type")?.ok_or(ModelError::Missing { key: "model_type" })?;
    Ok(WRAPPERS.iter().find(|(name, _, _)| *name == model_type))
}

/// The config of the language model, with its defaults, and its family. Checkpoints with a vision tower have it in a table
/// of its own.
fn text_model(config: &Value) -> Result<(Config<'_>, &'static Family), ModelError> {
    let outer = Config::new(config)?;
    let (text, model_type) = match wrapper(&outer)? {
        Some((_, default, _)) => {
            let table = outer.table("text_config", "text_config.")?;
            let text = table.ok_or(ModelError::Missing { key: "text_config" })?;
            (text, text.text("model_type")?.unwrap_or(default))
        }
        None => (outer, outer.text("model_type")?.ok_or(ModelError::Missing { key: "model_type" })?),
    };
    let family = FAMILIES.iter().find(|family| family.name == model_type);
    let family = family.ok_or_else(|| ModelError::UnknownArchitecture {
        model_type: model_type.to_string(),
        supported: supported().join(", "),
    })?;
    Ok((text.with_defaults(family.defaults()), family))
}

/// Whether activations of models of this type exceed the range of f16.
pub fn overflows_f16(model_type: &str) -> bool {
    FAMILIES.iter().any(|family| family.name == model_type && family.overflows_f16)
}

/// Every `model_type` that is read, those with towers included.
pub fn supported() -> Vec<&'static str> {
    let wrappers = WRAPPERS.iter().map(|(name, _, _)| *name);
    FAMILIES.iter().map(|family| family.name).chain(wrappers).collect()
}

/// Keys of a config that say something and change nothing, each with the reason; transformers ignores them too.
pub fn ignored_keys(config: &Value) -> Result<Vec<String>, ModelError> {
    let (config, family) = text_model(config)?;
    let mut ignored = Vec::new();
    let key = "partial_rotary_factor";
    if !family.partial_rotary && config.rotary_shares()?.iter().any(|share| *share != 1.0) {
        let name = family.name;
        ignored.push(format!(
            "`{key}` in config.json is ignored, as in transformers: {name} models rotate whole heads"
        ));
    }
    let key = "output_router_logits";
    if config.flag(key, false)? && config.get("router_aux_loss_coef").is_none() {
        let name = family.name;
        ignored.push(format!("`{key}` in config.json is ignored: {name} models have no loss of the router"));
    }
    let key = "aux_loss_alpha";
    if let Some(alpha) = config.scale(key)? {
        let reason = "the router has no loss of its own";
        ignored.push(format!("`{key} = {alpha}` in config.json is ignored, as in transformers: {reason}"));
    }
    for key in llama::DROPOUTS.into_iter().filter(|_| family.has_dropout) {
        if let Some(share) = config.scale(key)? {
            ignored.push(format!(
                "`{key} = {share}` in config.json is left out: the base model is trained without dropout; \
                 `adapter.dropout` sets that of the adapter"
            ));
        }
    }
    Ok(ignored)
}

#[cfg(test)]
mod tests {
    use super::layer::{LayerNorms, NormForm};
    use super::*;
    use serde_json::{Map, json};
    use smidgen_ir::{Activation, Norm, RopeScaling};

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
        spec.attentions().map(|(_, attention)| attention.window).collect()
    }

    #[test]
    fn qwen2_has_biases_that_no_key_says() {
        let off = json!({"use_sliding_window": false, "sliding_window": 16, "max_window_layers": 1});
        let spec = read_spec(&config("qwen2", &off)).unwrap();
        let attention = spec.attention().unwrap();
        assert!(attention.qkv_bias && !attention.output_bias && windows(&spec) == [None, None]);
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
        let attention = spec.attention().unwrap();
        assert!(attention.qk_norm.is_some() && !attention.qkv_bias && attention.head_dim == 32);
        assert!(tensor_names(&spec).contains(&"model.layers.0.self_attn.k_norm.weight".into()));
        let silent = read_spec(&config("qwen3", &json!({}))).unwrap();
        assert_eq!(silent.head_dim(), 128, "the default of the class");
    }

    #[test]
    fn mistral_slides_where_it_says_so() {
        let window = |value: Value| {
            windows(&read_spec(&config("mistral", &json!({"sliding_window": value}))).unwrap())[1]
        };
        assert_eq!(window(json!(4096)), Some(4096));
        assert_eq!(window(Value::Null), None);
        assert_eq!(windows(&read_spec(&config("mistral", &json!({}))).unwrap()), [Some(4096); 2]);
    }

    /// As transformers, which reads such a config as a Ministral.
    #[test]
    fn mistral_with_layer_types_slides_only_where_they_say_so() {
        let types = json!(["sliding_attention", "full_attention"]);
        let of = |more: Value| read_spec(&config("mistral", &more));
        let named = of(json!({"sliding_window": 8, "layer_types": types})).unwrap();
        assert_eq!(windows(&named), [Some(8), None]);
        assert_eq!(windows(&of(json!({"layer_types": types})).unwrap()), [Some(4096), None]);
        let full = json!({"sliding_window": null, "layer_types": ["full_attention", "full_attention"]});
        assert_eq!(windows(&of(full).unwrap()), [None, None]);
        let without = of(json!({"sliding_window": null, "layer_types": types})).unwrap_err().to_string();
        assert!(without.contains("layers have sliding attention, and there is no window"), "{without}");
    }

    /// Only these classes of transformers read the key; the others rotate whole heads.
    #[test]
    fn a_partial_rotary_factor_is_obeyed_where_transformers_obeys_it() {
        for (model_type, obeyed) in [
            ("llama", false),
            ("qwen2", false),
            ("qwen3", false),
            ("mistral", false),
            ("gemma2", false),
            ("gemma3_text", false),
            ("phi3", true),
            ("phi4_multimodal", true),
            ("glm4", true),
        ] {
            let top = config(model_type, &json!({"head_dim": 16, "partial_rotary_factor": 0.5}));
            let inner = json!({"head_dim": 16, "rope_parameters": {"partial_rotary_factor": 0.5}});
            for config in [&top, &config(model_type, &inner)] {
                let spec = read_spec(config).unwrap();
                assert_eq!(spec.ropes[0].dim, if obeyed { 8 } else { 16 }, "{model_type}");
                assert_eq!(ignored_keys(config).unwrap().len(), usize::from(!obeyed), "{model_type}");
            }
        }
        let whole = config("qwen3", &json!({"head_dim": 16, "partial_rotary_factor": 1.0}));
        assert_eq!(ignored_keys(&whole), Ok(vec![]));
        let full = json!({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25});
        let sliding = json!({"rope_type": "default", "rope_theta": 1e4});
        let of_kinds = json!({"full_attention": full, "sliding_attention": sliding});
        let gemma4 = json!({"head_dim": 16, "sliding_window": 8, "rope_parameters": of_kinds});
        assert_eq!(ignored_keys(&config("gemma4_text", &gemma4)), Ok(vec![]));
        let scaled = json!({"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}});
        assert_eq!(
            read_spec(&config("llama", &scaled)).unwrap_err().to_string(),
            "`partial_rotary_factor = 0.5` in config.json is not supported (supported: 1 for this model type with a scaled rotary embedding)"
        );
    }

    #[test]
    fn the_context_before_yarn_is_the_one_at_the_top() {
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128});
        let top = json!({"rope_parameters": yarn, "original_max_position_embeddings": 16});
        for (more, expected) in [(top, 16), (json!({"rope_parameters": yarn}), 128)] {
            let spec = read_spec(&config("llama", &more)).unwrap();
            let RopeScaling::Yarn { original_max_positions, .. } = spec.ropes[0].scaling else {
                panic!("{:?}", spec.ropes[0])
            };
            assert_eq!(original_max_positions, expected);
        }
    }

    #[test]
    fn where_the_class_has_one_window_a_list_cannot_say_otherwise() {
        let rope = json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0,
        });
        let mixed = json!(["sliding_attention", "full_attention"]);
        let of = |window: Value, types: &Value| {
            let more = json!({"rope_parameters": rope, "sliding_window": window, "layer_types": types});
            read_spec(&config("ministral3", &more))
        };
        assert_eq!(windows(&of(json!(8), &Value::Null).unwrap()), [Some(8); 2]);
        assert_eq!(
            windows(&of(Value::Null, &json!(["full_attention", "full_attention"])).unwrap()),
            [None; 2]
        );
        let message = of(json!(8), &mixed).unwrap_err().to_string();
        assert!(message.contains("`layer_types` differs from `sliding_window`"), "{message}");
        let text = config("mistral", &json!({"sliding_window": 8, "layer_types": mixed}));
        let wrapper = json!({"model_type": "mistral3", "text_config": text});
        assert!(read_spec(&wrapper).is_err());
        assert_eq!(windows(&read_spec(&text).unwrap()), [Some(8), None]);
    }

    #[test]
    fn the_first_gemma_says_gelu_and_means_its_approximation() {
        let activation = |model_type: &str, name: &str| {
            let spec = read_spec(&config(model_type, &json!({"head_dim": 16, "hidden_act": name}))).unwrap();
            routed::activation_of(&spec)
        };
        assert_eq!(activation("gemma", "gelu"), Activation::GeluTanh);
        assert_eq!(activation("llama", "gelu"), Activation::Gelu);
    }

    #[test]
    fn a_list_of_layers_that_rotate_may_be_longer_than_the_model() {
        let rotated = |list: Value| {
            let spec = read_spec(&config("smollm3", &json!({"no_rope_layers": list})))?;
            Ok(spec.attentions().map(|(_, attention)| attention.rope.is_some()).collect::<Vec<bool>>())
        };
        assert_eq!(rotated(json!([1, 0, 1])), Ok(vec![true, false]));
        let short = rotated(json!([1])).unwrap_err();
        assert!(matches!(short, ModelError::Contradiction { .. }), "{short}");
    }

    #[test]
    fn sizes_of_the_layers_of_gemma4_are_checked() {
        let of = |more: Value| {
            let mut whole = json!({
                "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "num_hidden_layers": 12,
                "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size_per_layer_input": 0,
            });
            whole.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            read_spec(&config("gemma4_text", &whole))
        };
        assert!(of(json!({})).is_ok());
        for (more, expected) in [
            (json!({"global_head_dim": 511}), "`head_dim = 511`"),
            (json!({"global_head_dim": 1024}), "`head_dim = 1024`"),
            (json!({"attention_k_eq_v": true, "num_global_key_value_heads": 3}), "8 attention heads"),
            (json!({"per_layer_config": {"0": {"head_dim": 8}}}), "layers of one kind have heads"),
            (
                json!({"num_kv_shared_layers": 2, "per_layer_config": {"10": {"num_key_value_heads": 4}, "5": {"head_dim": 32},
                    "11": {"head_dim": 32}}}),
                "layer 10 shares keys and values",
            ),
            (json!({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256}), "257 tokens"),
            (
                json!({"hidden_size_per_layer_input": 1 << 30, "vocab_size_per_layer_input": 257}),
                "rows have up to 4194304 channels",
            ),
        ] {
            let error = of(more.clone()).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(expected), "{more}: {error}");
        }
    }

    #[test]
    fn the_padding_row_is_that_of_the_embedding_class() {
        let padding =
            |model_type: &str, more: Value| read_spec(&config(model_type, &more)).unwrap().embedding.padding;
        assert_eq!(padding("llama", json!({})), None);
        assert_eq!(padding("llama", json!({"pad_token_id": 3})), Some(3));
        // PyTorch counts from the end; an id that no row has is no padding.
        assert_eq!(padding("llama", json!({"pad_token_id": -1})), Some(256));
        assert_eq!(padding("llama", json!({"pad_token_id": 257})), None);
        let gemma = json!({"head_dim": 32});
        assert_eq!(padding("gemma2", gemma.clone()), Some(0));
        assert_eq!(padding("gemma2", json!({"head_dim": 32, "pad_token_id": null})), None);
        assert_eq!(padding("gemma3_text", gemma), Some(0));
        assert_eq!(padding("phi3", json!({"vocab_size": 32_064})), Some(32_000));
    }

    /// The whole config of a family: a small model in every size, and the defaults of its class for all other keys.
    fn whole_config(family: &Family) -> Map<String, Value> {
        let mut whole = family.defaults().clone();
        let small =
            config(family.name, &json!({"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 12}));
        whole.extend(small.as_object().unwrap().clone());
        // Latent attention has keys of its own for each head.
        if whole.contains_key("kv_lora_rank") {
            whole.insert("num_key_value_heads".into(), json!(4));
            whole.insert("num_experts_per_tok".into(), json!(2));
            whole.remove("head_dim");
        }
        if ["ministral3", "mistral4"].contains(&family.name) {
            let rope = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e6});
            whole.insert("rope_parameters".into(), rope);
        }
        if whole.contains_key("first_k_dense_replace") {
            whole.insert("first_k_dense_replace".into(), json!(1));
        }
        if whole.contains_key("num_kv_shared_layers") {
            whole.insert("num_kv_shared_layers".into(), json!(3));
        }
        if family.name == "lfm2" {
            whole
                .extend([("full_attn_idxs".into(), json!([1, 3])), ("intermediate_size".into(), json!(900))]);
        }
        let kinds = match family.name {
            "granitemoehybrid" => Some(["mamba", "attention"]),
            "lfm2_moe" => Some(["conv", "full_attention"]),
            _ => None,
        };
        if let Some(kinds) = kinds {
            whole.insert("layer_types".into(), json!([kinds; 6].concat()));
        }
        if whole.contains_key("mamba_rms_norm") {
            whole.insert("mamba_rms_norm".into(), json!(true));
        }
        if whole.contains_key("decoder_sparse_step") {
            whole.insert("mlp_only_layers".into(), json!([1]));
        }
        if whole.contains_key("enable_moe_block") {
            whole.extend(
                ["num_experts", "top_k_experts", "moe_intermediate_size"].map(|key| (key.into(), json!(2))),
            );
        }
        if whole.contains_key("pad_token_id") {
            whole.insert("pad_token_id".into(), json!(3));
        }
        if whole.contains_key("use_sliding_window") {
            whole
                .extend([("use_sliding_window".into(), json!(true)), ("max_window_layers".into(), json!(1))]);
        }
        for dropout in llama::DROPOUTS.into_iter().filter(|_| family.has_dropout) {
            whole.insert(dropout.into(), json!(0.1));
        }
        whole
    }

    /// Keys that mean nothing without others, or that only other programs read.
    const UNREAD: [&str; 13] = [
        "linear_a_log_max",
        "linear_a_log_min",
        "linear_dt_init_floor",
        "linear_dt_max",
        "linear_dt_min",
        "mamba_chunk_size",
        "mamba_expand",
        "max_window_layers",
        "num_logits_to_keep",
        "original_max_position_embeddings",
        "pretraining_tp",
        "router_aux_loss_coef",
        "use_sliding_window",
    ];

    /// Each key that a class has a default for changes the decoder, or is refused by its name.
    #[test]
    fn no_key_of_a_class_is_half_read() {
        // Those with audio need more keys.
        for family in FAMILIES.iter().filter(|family| !family.name.starts_with("phi4")) {
            let whole = whole_config(family);
            let read = |config: &Map<String, Value>| read_spec(&Value::Object(config.clone()));
            let spec = read(&whole).unwrap_or_else(|error| panic!("{}: {error}", family.name));
            for key in family.defaults().keys().filter(|key| !UNREAD.contains(&key.as_str())) {
                let flipped = match &whole[key] {
                    Value::Bool(flag) => json!(!flag),
                    Value::String(_) => json!("relu"),
                    Value::Number(number) if number.is_u64() => json!((number.as_u64().unwrap() * 2).max(2)),
                    Value::Number(number) => json!(number.as_f64().unwrap() * 2.0 + 0.25),
                    other => panic!("{}: `{key} = {other}`", family.name),
                };
                let mut config = whole.clone();
                config.insert(key.clone(), flipped);
                let notes = ignored_keys(&Value::Object(config.clone())).unwrap_or_default();
                let is_told = notes.iter().any(|note| note.contains(&format!("`{key}")));
                match read(&config) {
                    Ok(other) => {
                        assert!(other != spec || is_told, "{}: `{key}` changes nothing", family.name)
                    }
                    Err(ModelError::Contradiction { .. }) => {}
                    Err(error) => {
                        assert!(error.to_string().contains(key), "{}: `{key}`: {error}", family.name)
                    }
                }
            }
        }
    }

    /// What the classes of transformers say.
    #[test]
    fn absent_keys_are_the_defaults_of_the_class() {
        let of = |model_type: &str| {
            let mut config = config(model_type, &json!({"head_dim": 16}));
            for key in ["num_key_value_heads", "max_position_embeddings"] {
                config.as_object_mut().unwrap().remove(key);
            }
            let spec = read_spec(&config).unwrap();
            (spec.attention().unwrap().kv_heads, spec.norm_eps(), spec.max_positions, windows(&spec)[0])
        };
        assert_eq!(of("llama"), (4, 1e-6, 2048, None));
        assert_eq!(of("gemma2"), (4, 1e-6, 8192, Some(4096)));
        assert_eq!(of("phi3"), (4, 1e-5, 4096, None));
        let mistral =
            read_spec(&config("mistral", &json!({"num_attention_heads": 8, "num_key_value_heads": null})));
        assert_eq!(mistral.unwrap().attention().unwrap().kv_heads, 8, "null means as many as heads");
    }

    #[test]
    fn phi3_is_fused_and_its_factors_follow_the_length() {
        let rope = json!({"type": "su", "short_factor": vec![1.0; 6], "long_factor": vec![2.0; 6]});
        let more = json!({
            "rope_scaling": rope, "partial_rotary_factor": 0.75, "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096, "sliding_window": 2047,
        });
        let spec = read_spec(&config("phi3", &more)).unwrap();
        assert_eq!(windows(&spec), [Some(2047); 2]);
        assert_eq!(spec.final_norm, NormForm::Rms(Norm { eps: 1e-5, plus_one: false }));
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
        let attention = spec.attention().unwrap();
        assert_eq!((attention.softcap, spec.head.softcap), (Some(50.0), Some(30.0)));
        assert_eq!((spec.embedding.scale, attention.scale), (8.0, 1.0 / 16.0));
        assert!(spec.final_norm.adds_one() && spec.head.is_tied);
        assert_eq!(spec.layers[1].norms, LayerNorms::around(spec.final_norm));
        assert_eq!(routed::activation_of(&spec), Activation::GeluTanh);
        let none = json!({"head_dim": 32, "attn_logit_softcapping": null});
        assert_eq!(read_spec(&config("gemma2", &none)).unwrap().attention().unwrap().softcap, None);
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
        let rope = |layer: usize| newer.layers[layer].attention().unwrap().rope.unwrap().keys;
        let theta = |layer: usize| newer.ropes[rope(layer)].theta;
        assert_eq!((theta(0), theta(1)), (1e4, 1e6));
        let attention = newer.attention().unwrap();
        assert!(attention.qk_norm.is_some() && attention.softcap.is_none());
    }

    #[test]
    fn what_would_be_half_read_is_refused_by_name() {
        let refused =
            |model_type: &str, more: Value| read_spec(&config(model_type, &more)).unwrap_err().to_string();
        assert_eq!(
            refused("llama", json!({"quantization_config": {"quant_method": "hqq"}})),
            "`quantization_config.quant_method = hqq` in config.json is not supported \
             (supported: bitsandbytes, fp8, mxfp4, gptq, awq, compressed-tensors)"
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
