//! Configs and tensor names from metadata, one small file per architecture.

use serde_json::{Value as Json, json};
use smidgen_compile::model::layer::{KeysAndValues, NormForm};
use smidgen_ir::{Norm, RopeScaling};

use super::super::GgufFile;
use super::super::model::GgufModel;
use super::super::tensor_names::{RowOrder, TensorSource};
use super::*;

/// Metadata of a small model: two layers, four query heads of 8 channels, two key heads.
fn sizes(architecture: &str) -> Metadata {
    let mut metadata = metadata(&[("general.architecture", text(architecture))]);
    let numbers = [
        ("block_count", 2),
        ("context_length", 128),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ];
    for (key, number) in numbers {
        metadata.insert(&format!("{architecture}.{key}"), Value::U32(number)).unwrap();
    }
    metadata.set(&format!("{architecture}.attention.layer_norm_rms_epsilon"), Value::F32(1e-5));
    metadata.set("tokenizer.ggml.eos_token_id", Value::U32(2));
    metadata
}

fn model_of(
    metadata: &Metadata,
    names: &[&str],
    given: &[(&str, Vec<f32>)],
) -> Result<(GgufFile, GgufModel), String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let mut specs = vec![spec("token_embd.weight", &[48, 32], Storage::F32)];
    // A row for each token, with 4 channels for each of 4 layers.
    let size = |name: &str| if name == "per_layer_token_embd.weight" { [48, 16] } else { [8, 32] };
    specs.extend(names.iter().map(|name| spec(name, &size(name), Storage::F32)));
    specs.extend(given.iter().map(|(name, values)| spec(name, &[values.len()], Storage::F32)));
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let given: Vec<(&str, Vec<u8>)> = given.iter().map(|(name, values)| (*name, bytes(values))).collect();
    write(&path, metadata, &specs, &given);
    let file = GgufFile::open(&path).unwrap();
    let start = format!("`{}`: ", path.display());
    GgufModel::read(&file)
        .map_err(|error| {
            error.to_string().strip_prefix(&start).expect("the error names the file").to_string()
        })
        .map(|model| (file, model))
}

fn config_of(metadata: &Metadata, given: &[(&str, Vec<f32>)]) -> Json {
    model_of(metadata, &[], given).unwrap().1.config
}

fn with(architecture: &str, more: &[(&str, Value)]) -> Metadata {
    let mut metadata = sizes(architecture);
    for (key, value) in more {
        metadata.set(&format!("{architecture}.{key}"), value.clone());
    }
    metadata
}

#[test]
fn llama_has_the_config_of_its_original() {
    let config = config_of(&with("llama", &[("rope.freq_base", Value::F32(1e5))]), &[]);
    let expected = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "bos_token_id": null, "eos_token_id": 2, "pad_token_id": null,
        "hidden_act": "silu",
        "attention_bias": false, "mlp_bias": false,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    });
    assert_eq!(config, expected);
    let spec = smidgen_compile::model::read_spec(&config).unwrap();
    let attention = spec.attention().unwrap();
    assert_eq!((attention.head_dim, attention.kv_heads, spec.ropes[0].theta), (8, 2, 1e5));
    assert_eq!(spec.final_norm, NormForm::Rms(Norm { eps: 1e-5, plus_one: false }));
    assert!(spec.head.is_tied);
}

#[test]
fn every_tensor_of_the_compiled_llama_has_its_source() {
    let layer = [
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    ];
    let mut names = vec!["output_norm.weight".to_string(), "output.weight".to_string()];
    for number in 0..2 {
        names.extend(layer.iter().map(|name| format!("blk.{number}.{name}.weight")));
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (file, model) = model_of(&sizes("llama"), &names, &[]).unwrap();
    let spec = smidgen_compile::model::read_spec(&model.config).unwrap();
    assert!(!spec.head.is_tied);
    assert_eq!(spec.tensors().len(), model.sources().count());
    for tensor in spec.tensors() {
        assert!(model.source(&tensor.name).is_some(), "{}", tensor.name);
    }
    let source = |name: &str| {
        let TensorSource { position, rows, added } = model.source(name).unwrap();
        (file.tensors()[*position].name.as_str(), *rows, *added)
    };
    let paired = RowOrder::PairsOfHeads { head_dim: 8 };
    assert_eq!(source("model.layers.1.self_attn.k_proj.weight"), ("blk.1.attn_k.weight", paired, 0.0));
    let as_stored = RowOrder::AsStored;
    assert_eq!(source("model.layers.1.self_attn.v_proj.weight"), ("blk.1.attn_v.weight", as_stored, 0.0));
    assert_eq!(source("lm_head.weight"), ("output.weight", as_stored, 0.0));
}

#[test]
fn llama_3_and_mistral_are_recognized_in_llama_files() {
    // Heads of 8 channels have four frequencies. No settings give the second one the largest divisor.
    let config = config_of(&sizes("llama"), &[("rope_freqs.weight", vec![1.0, 9.0, 2.0, 5.0])]);
    assert_eq!(config["rope_parameters"]["rope_theta"], 1e4);
    assert_eq!(config["rope_parameters"]["rope_type"], "longrope");
    assert_eq!(config["rope_parameters"]["attention_factor"], 1.0);
    let llama3 = with("llama", &[("rope.freq_base", Value::F32(5e5))]);
    let config = config_of(&llama3, &[("rope_freqs.weight", vec![1.0, 1.0, 1.0, 8.0])]);
    assert_eq!(config["rope_parameters"]["rope_type"], "llama3");
    // With 8192 positions the third frequency would already be interpolated, see `turns` in `rope_divisors`.
    assert_eq!(config["rope_parameters"]["original_max_position_embeddings"], 32768);
    smidgen_compile::model::read_spec(&config).unwrap();
    let mistral = config_of(&with("llama", &[("attention.sliding_window", Value::U32(16))]), &[]);
    assert_eq!((&mistral["model_type"], &mistral["sliding_window"]), (&json!("mistral"), &json!(16)));
    let linear =
        with("llama", &[("rope.scaling.type", text("linear")), ("rope.scaling.factor", Value::F32(4.0))]);
    let linear = config_of(&linear, &[]);
    let expected = json!({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0});
    assert_eq!(linear["rope_parameters"], expected);
}

#[test]
fn qwen_keeps_its_biases_norms_and_head_size() {
    let (_, qwen2) = model_of(&sizes("qwen2"), &[], &[("blk.0.attn_q.bias", vec![0.0; 32])]).unwrap();
    assert_eq!(qwen2.config["model_type"], "qwen2");
    let source = qwen2.source("model.layers.0.self_attn.q_proj.bias").unwrap();
    assert_eq!(source.rows, RowOrder::AsStored);
    let lengths = [("attention.key_length", Value::U32(16)), ("attention.value_length", Value::U32(16))];
    let (_, qwen3) = model_of(&with("qwen3", &lengths), &["blk.1.attn_q_norm.weight"], &[]).unwrap();
    assert_eq!((&qwen3.config["model_type"], &qwen3.config["head_dim"]), (&json!("qwen3"), &json!(16)));
    assert_eq!(qwen3.source("model.layers.1.self_attn.q_norm.weight").unwrap().added, 0.0);
    smidgen_compile::model::read_spec(&qwen3.config).unwrap();
}

#[test]
fn phi3_is_fused_and_rotates_part_of_a_head_with_two_lists_of_factors() {
    let more = [
        ("rope.dimension_count", Value::U32(6)),
        ("rope.scaling.original_context_length", Value::U32(32)),
        ("rope.scaling.attn_factor", Value::F32(1.1902381)),
        ("attention.sliding_window", Value::U32(0)),
    ];
    let factors = [
        ("rope_factors_long.weight", vec![1.0, 2.5, 40.0]),
        ("rope_factors_short.weight", vec![1.0, 1.0, 1.1]),
    ];
    let names = ["blk.0.attn_qkv.weight", "blk.0.ffn_up.weight"];
    let (_, model) = model_of(&with("phi3", &more), &names, &factors).unwrap();
    let expected = json!({
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.0, 1.1], "long_factor": [1.0, 2.5, 40.0],
        "original_max_position_embeddings": 32, "attention_factor": 1.1902381,
    });
    assert_eq!(model.config["rope_parameters"], expected);
    assert_eq!(model.config["sliding_window"], Json::Null);
    assert!(model.source("model.layers.0.self_attn.qkv_proj.weight").is_some());
    assert!(model.source("model.layers.0.mlp.gate_up_proj.weight").is_some());
    let plain = config_of(&with("phi3", &[("attention.sliding_window", Value::U32(2047))]), &[]);
    assert_eq!(plain["sliding_window"], 2047);
    assert_eq!(plain["rope_parameters"]["rope_type"], "default");
    let half = model_of(&with("phi3", &more), &[], &factors[..1]).unwrap_err();
    assert_eq!(half, "the tensor `rope_factors_short.weight` is missing");
    let short = [("rope_factors_long.weight", vec![1.0]), ("rope_factors_short.weight", vec![1.0; 3])];
    assert_eq!(
        model_of(&with("phi3", &more), &[], &short).unwrap_err(),
        "tensor `rope_factors_long.weight` should have 3 numbers of type `f32`, but it is [1] of type `f32`"
    );
}

#[test]
fn gemma_alternates_attention_and_subtracts_one_from_its_norms() {
    let names = ["blk.1.ffn_norm.weight", "blk.1.post_attention_norm.weight", "blk.1.attn_q.weight"];
    let (_, model) = model_of(&sizes("gemma2"), &names, &[]).unwrap();
    let config = &model.config;
    assert_eq!(config["layer_types"], json!(["sliding_attention", "full_attention"]));
    assert_eq!((&config["attn_logit_softcapping"], &config["sliding_window"]), (&json!(50.0), &json!(4096)));
    assert_eq!(config["query_pre_attn_scalar"], 8);
    assert_eq!(model.source("model.layers.1.pre_feedforward_layernorm.weight").unwrap().added, 1.0);
    assert_eq!(model.source("model.layers.1.self_attn.q_proj.weight").unwrap().added, 0.0);
    let more = [
        ("block_count", Value::U32(7)),
        ("attention.sliding_window", Value::U32(512)),
        ("rope.freq_base", Value::F32(1e6)),
        ("rope.scaling.type", text("linear")),
        ("rope.scaling.factor", Value::F32(8.0)),
    ];
    let (_, model) = model_of(&with("gemma3", &more), &["blk.6.attn_k_norm.weight"], &[]).unwrap();
    let types = model.config["layer_types"].as_array().unwrap();
    let full: Vec<usize> = (0..7).filter(|layer| types[*layer] == "full_attention").collect();
    assert_eq!((full, &model.config["model_type"]), (vec![5], &json!("gemma3_text")));
    let expected = json!({
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    });
    assert_eq!(model.config["rope_parameters"], expected);
    assert_eq!(model.source("model.layers.6.self_attn.k_norm.weight").unwrap().added, 1.0);
    let pattern = Value::Array(Array::Bool(vec![true, true, false, true, true, false, true]));
    let more = [more[0].clone(), more[1].clone(), ("attention.sliding_window_pattern", pattern)];
    let (_, model) = model_of(&with("gemma3", &more), &[], &[]).unwrap();
    assert_eq!(model.config["layer_types"][2], "full_attention");
    assert_eq!(model.config["layer_types"][6], "sliding_attention");
}

#[test]
fn yarn_is_read_with_its_betas_and_the_scale_of_llama_cpp() {
    let yarn = [
        ("rope.freq_base", Value::F32(5e5)),
        ("rope.scaling.type", text("yarn")),
        ("rope.scaling.factor", Value::F32(8.0)),
        ("rope.scaling.original_context_length", Value::U32(16)),
        ("rope.scaling.yarn_beta_fast", Value::F32(16.0)),
        ("rope.scaling.yarn_attn_factor", Value::F32(1.25)),
        ("attention.sliding_window", Value::U32(8)),
    ];
    let (_, model) = model_of(&with("olmo2", &yarn), &[], &[]).unwrap();
    let expected = json!({
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16,
            "beta_fast": 16.0, "attention_factor": 1.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    });
    assert_eq!((&model.config["model_type"], &model.config["rope_parameters"]), (&json!("olmo3"), &expected));
    let growing = [
        ("rope.scaling.yarn_log_multiplier", Value::F32(1.0)),
        ("attention.temperature_scale", Value::F32(0.1)),
    ];
    let growing: Vec<(&str, Value)> = yarn[..4].iter().cloned().chain(growing).collect();
    let (_, model) = model_of(&with("mistral3", &growing), &[], &[]).unwrap();
    let spec = smidgen_compile::model::read_spec(&model.config).unwrap();
    assert_eq!(spec.ropes[0].attention_scale, 1.0);
    let scale = spec.ropes[1].position_scale.unwrap();
    assert_eq!((scale.beta, scale.original), (0.1, 16));
    let part = [("rope.scaling.yarn_ext_factor", Value::F32(0.5))];
    let part: Vec<(&str, Value)> = yarn[..4].iter().cloned().chain(part).collect();
    assert_eq!(
        model_of(&with("qwen2", &part), &[], &[]).unwrap_err(),
        "`qwen2.rope.scaling.yarn_ext_factor = 0.5` is not supported (supported: 1)"
    );
}

#[test]
fn a_token_that_ends_a_turn_is_an_end_too() {
    let mut metadata = sizes("glm4");
    metadata.set("tokenizer.ggml.eot_token_id", Value::U32(7));
    assert_eq!(config_of(&metadata, &[])["eos_token_id"], json!([2, 7]));
    metadata.set("tokenizer.ggml.eot_token_id", Value::U32(2));
    assert_eq!(config_of(&metadata, &[])["eos_token_id"], json!(2));
}

#[test]
fn scales_of_granite_and_their_defaults() {
    let more = [
        ("logit_scale", Value::F32(8.0)),
        ("attention.scale", Value::F32(0.0625)),
        ("embedding_scale", Value::F32(12.0)),
    ];
    let spec = smidgen_compile::model::read_spec(&config_of(&with("granite", &more), &[])).unwrap();
    let residual = spec.layers[1].residual_scale;
    assert_eq!((spec.embedding.scale, spec.head.scale, residual), (12.0, 0.125, 1.0));
    assert_eq!(spec.attention().unwrap().scale, 0.0625);
    let silent = smidgen_compile::model::read_spec(&config_of(&with("granite", &more[..1]), &[])).unwrap();
    assert_eq!(silent.attention().unwrap().scale, 8f32.powf(-0.5));
    let missing = model_of(&sizes("granite"), &[], &[]).unwrap_err();
    assert_eq!(missing, "the metadata has no `granite.logit_scale`");
}

fn list(numbers: &[i32]) -> Value {
    Value::Array(Array::I32(numbers.to_vec()))
}

fn flags(flags: &[bool]) -> Value {
    Value::Array(Array::Bool(flags.to_vec()))
}

/// Four layers, of which two share keys and values; every other layer has a window.
fn gemma4() -> Vec<(&'static str, Value)> {
    vec![
        ("block_count", Value::U32(4)),
        ("feed_forward_length", list(&[64, 64, 128, 128])),
        ("attention.head_count_kv", list(&[2, 1, 2, 1])),
        ("attention.key_length", Value::U32(16)),
        ("attention.value_length", Value::U32(16)),
        ("attention.key_length_swa", Value::U32(8)),
        ("attention.value_length_swa", Value::U32(8)),
        ("attention.sliding_window", Value::U32(8)),
        ("attention.sliding_window_pattern", flags(&[true, false, true, false])),
        ("attention.shared_kv_layers", Value::U32(2)),
        ("embedding_length_per_layer_input", Value::U32(4)),
        ("rope.dimension_count", Value::U32(16)),
        ("rope.dimension_count_swa", Value::U32(8)),
    ]
}

#[test]
fn layers_of_gemma_4_differ_in_their_sizes() {
    let more = gemma4();
    let mut divisors = vec![1.0, 1.0];
    divisors.resize(8, 1e30);
    let given = [("rope_freqs.weight", divisors)];
    let (_, model) = model_of(&with("gemma4", &more), &["per_layer_token_embd.weight"], &given).unwrap();
    let spec = smidgen_compile::model::read_spec(&model.config).unwrap();
    let heads: Vec<(usize, usize, KeysAndValues)> = spec
        .attentions()
        .map(|(_, attention)| (attention.head_dim, attention.kv_heads, attention.source))
        .collect();
    // No layer has values of its own in this file, so those of full layers are their keys.
    let expected = [
        (8, 2, KeysAndValues::Projected),
        (16, 1, KeysAndValues::OneProjection),
        (8, 2, KeysAndValues::OfLayer(0)),
        (16, 1, KeysAndValues::OfLayer(1)),
    ];
    assert_eq!(heads, expected);
    assert_eq!(spec.ropes[0].scaling, RopeScaling::Proportional { rotated_pairs: 2, factor: 1.0 });
    assert_eq!(
        spec.embedding.per_layer.map(|per_layer| (per_layer.vocabulary, per_layer.width)),
        Some((48, 4))
    );
    let uneven = [("feed_forward_length", list(&[64, 96, 64, 64]))];
    let uneven: Vec<(&str, Value)> = more.iter().cloned().chain(uneven).collect();
    let refused = model_of(&with("gemma4", &uneven), &[], &[]).unwrap_err();
    assert!(
        refused.starts_with("`gemma4.feed_forward_length = 96 in layer 1` is not supported"),
        "{refused}"
    );
}

/// The norms of two layers, with these weights for queries and 1 for keys.
fn norms_of_queries_and_keys(factors: [f32; 2]) -> [(&'static str, Vec<f32>); 4] {
    [
        ("blk.0.attn_q_norm.weight", vec![factors[0]; 8]),
        ("blk.0.attn_k_norm.weight", vec![1.0; 8]),
        ("blk.1.attn_q_norm.weight", vec![factors[1]; 8]),
        ("blk.1.attn_k_norm.weight", vec![1.0; 8]),
    ]
}

#[test]
fn the_factor_of_queries_is_in_the_weights_of_their_norms() {
    let more = [
        ("logit_scale", Value::F32(0.5)),
        ("attention.sliding_window", Value::U32(8)),
        ("attention.sliding_window_pattern", Value::Array(Array::Bool(vec![true, false]))),
    ];
    let read = |other: f32| {
        model_of(&with("muse-glimmer", &more), &["output.weight"], &norms_of_queries_and_keys([3.5, other]))
    };
    let spec = smidgen_compile::model::read_spec(&read(3.5).unwrap().1.config).unwrap();
    let attentions: Vec<_> = spec.attentions().map(|(_, attention)| attention).collect();
    assert!((attentions[0].scale - 3.5 * 8f32.powf(-0.5)).abs() < 1e-6);
    assert!(attentions[0].rope.is_some() && attentions[1].rope.is_none());
    assert_eq!(
        read(2.0).unwrap_err(),
        "`blk.1.attn_q_norm.weight` has the weights 3.5 and 2; all must be alike"
    );
}

#[test]
fn an_absent_softcap_of_logits_is_that_of_llama_cpp() {
    let muse = [
        ("logit_scale", Value::F32(0.5)),
        ("attention.sliding_window", Value::U32(8)),
        ("attention.sliding_window_pattern", flags(&[true, false])),
    ];
    let key = "final_logit_softcapping";
    for (given, expected) in [(None, json!(30.0)), (Some(0.0), Json::Null), (Some(20.0), json!(20.0))] {
        let more = |settings: &[(&'static str, Value)]| -> Vec<(&str, Value)> {
            settings.iter().cloned().chain(given.map(|cap| (key, Value::F32(cap)))).collect()
        };
        let norms = norms_of_queries_and_keys([3.5; 2]);
        assert_eq!(config_of(&with("muse-glimmer", &more(&muse)), &norms)[key], expected);
        assert_eq!(config_of(&with("gemma4", &more(&gemma4())), &[])[key], expected);
        let of_gemma3 = if given.is_none() { Json::Null } else { expected };
        assert_eq!(config_of(&with("gemma3", &more(&[])), &[])[key], of_gemma3);
    }
    let score_cap = with("gemma3", &[("attn_logit_softcapping", Value::F32(50.0))]);
    assert_eq!(
        model_of(&score_cap, &[], &[]).unwrap_err(),
        "`gemma3.attn_logit_softcapping = 50` is not supported for architecture `gemma3`"
    );
}

#[test]
fn sizes_of_heads_are_refused_by_their_keys() {
    let refused = |metadata: &Metadata| model_of(metadata, &[], &[]).unwrap_err();
    let and = |more: &[(&'static str, Value)]| with("gemma4", &[gemma4(), more.to_vec()].concat());
    let both = |key: &'static str, value: &'static str, size: u32| {
        and(&[(key, Value::U32(size)), (value, Value::U32(size))])
    };
    let supported = "is not supported (supported: even sizes up to 512)";
    assert_eq!(
        refused(&both("attention.key_length", "attention.value_length", 1024)),
        format!("`gemma4.attention.key_length = heads of 1024 channels` {supported}")
    );
    assert_eq!(
        refused(&both("attention.key_length_swa", "attention.value_length_swa", 7)),
        format!("`gemma4.attention.key_length_swa = heads of 7 channels` {supported}")
    );
    assert_eq!(
        refused(&with("qwen3", &[("embedding_length", Value::U32(4096))])),
        format!("`qwen3.attention.head_count = heads of 1024 channels` {supported}")
    );
    assert_eq!(
        refused(&and(&[("attention.head_count_kv", list(&[2, 3, 2, 1]))])),
        "`gemma4.attention.head_count_kv = 3` is not supported (supported: divisors of `attention.head_count`)"
    );
}

#[test]
fn the_base_of_layers_with_a_window_is_refused_where_llama_cpp_ignores_it() {
    let olmo = |base: f32| {
        let more = [
            ("rope.freq_base", Value::F32(5e5)),
            ("rope.freq_base_swa", Value::F32(base)),
            ("attention.sliding_window", Value::U32(8)),
        ];
        model_of(&with("olmo2", &more), &[], &[])
    };
    assert_eq!(olmo(5e5).unwrap().1.config["rope_parameters"]["sliding_attention"]["rope_theta"], json!(5e5));
    assert_eq!(
        olmo(1e4).unwrap_err(),
        "`olmo2.rope.freq_base_swa = 10000` is not supported (supported: the number of `rope.freq_base`)"
    );
    // Without the key, llama.cpp has the same base for all architectures.
    let gemma3 = config_of(&with("gemma3", &[("attention.sliding_window", Value::U32(8))]), &[]);
    assert_eq!(gemma3["rope_parameters"]["full_attention"]["rope_theta"], json!(1e4));
}

#[test]
fn layers_of_gemma_4_share_keys_and_values_as_in_llama_cpp() {
    let refused = |slides: &[bool], shared: u32| {
        let more = [
            ("attention.head_count_kv", Value::U32(2)),
            ("attention.sliding_window_pattern", flags(slides)),
            ("attention.shared_kv_layers", Value::U32(shared)),
        ];
        let refused = model_of(&with("gemma4", &[gemma4(), more.to_vec()].concat()), &[], &[]).unwrap_err();
        assert_eq!(
            refused,
            format!(
                "`gemma4.attention.shared_kv_layers = {shared}` is not supported (supported: numbers that leave layers of \
                 which the last but one has a window, and the last has none)"
            )
        );
    };
    refused(&[false, true, true, false], 2);
    refused(&[true, false, true, false], 1);
    refused(&[true, false, true, false], 3);
    refused(&[true, false, true, false], 4);
}

#[test]
fn keys_mean_what_they_mean_to_llama_cpp() {
    let refused = |metadata: &Metadata| model_of(metadata, &[], &[]).unwrap_err();
    let switched = |on: bool| {
        with("granite", &[("logit_scale", Value::F32(8.0)), ("rope.scaling.finetuned", Value::Bool(on))])
    };
    config_of(&switched(true), &[]);
    assert_eq!(
        refused(&switched(false)),
        "`granite.rope.scaling.finetuned = false` is not supported (supported: true)"
    );
    config_of(&with("qwen3", &[("rope.scaling.finetuned", Value::Bool(false))]), &[]);

    let window = ("attention.sliding_window", Value::U32(8));
    let pattern = |period: u32| ("attention.sliding_window_pattern", Value::U32(period));
    let every =
        config_of(&with("gemma3", &[("block_count", Value::U32(6)), window.clone(), pattern(0)]), &[]);
    assert_eq!(every["layer_types"], json!(vec!["sliding_attention"; 6]));
    assert_eq!(
        refused(&with("llama", &[window.clone(), pattern(2)])),
        "`llama.attention.sliding_window_pattern = 2` is not supported for architecture `llama`"
    );

    let and = |more: &[(&'static str, Value)]| with("gemma4", &[gemma4(), more.to_vec()].concat());
    assert_eq!(
        refused(&and(&[pattern(2)])),
        "`gemma4.attention.sliding_window_pattern = 2` is not supported (supported: a list of true and false)"
    );
    let last = ("attention.sliding_window_pattern", flags(&[true, false, true, true]));
    assert_eq!(
        refused(&and(&[last])),
        "`gemma4.attention.sliding_window_pattern = true in the last layer` is not supported (supported: false in the last \
         layer)"
    );
    let without = |key: &str| {
        let more: Vec<(&str, Value)> = gemma4().into_iter().filter(|(known, _)| *known != key).collect();
        refused(&with("gemma4", &more))
    };
    for key in ["attention.sliding_window", "attention.sliding_window_pattern"] {
        assert_eq!(without(key), format!("the metadata has no `gemma4.{key}`"));
    }
    assert_eq!(
        refused(&with("muse-glimmer", &[("logit_scale", Value::F32(0.5))])),
        "the metadata has no `muse-glimmer.attention.sliding_window`"
    );
}

#[test]
fn unsupported_settings_and_tensors_are_named() {
    let refused = |metadata: &Metadata, names: &[&str]| model_of(metadata, names, &[]).unwrap_err();
    assert_eq!(
        refused(&sizes("mamba"), &[]),
        "the architecture `mamba` is not supported (supported: llama, qwen2, qwen3, phi3, gemma, gemma2, gemma3, gemma4, \
         smollm3, granite, lfm2, olmo2, seed_oss, glm4, cohere2, mistral3, muse-glimmer)"
    );
    assert_eq!(
        refused(&sizes("llama"), &["blk.0.attn_qkv.weight", "blk.2.attn_q.weight"]),
        "2 tensors do not belong to a `llama` model of 2 layers, among them `blk.0.attn_qkv.weight`, `blk.2.attn_q.weight`"
    );
    assert_eq!(
        refused(&with("llama", &[("attention.scale", Value::F32(0.1))]), &[]),
        "`llama.attention.scale = 0.1` is not supported for architecture `llama`"
    );
    assert_eq!(
        refused(&with("llama", &[("expert_count", Value::U32(8))]), &[]),
        "`llama.expert_count = 8` is not supported (supported: 0)"
    );
    assert_eq!(
        refused(
            &with("qwen2", &[("rope.scaling.type", text("none")), ("rope.scaling.factor", Value::F32(4.0))]),
            &[]
        ),
        "`qwen2.rope.scaling.type = none` is not supported (supported: none, linear and yarn with a factor, longrope \
         without one)"
    );
    assert_eq!(
        refused(&with("qwen3", &[("attention.sliding_window", Value::U32(8))]), &[]),
        "`qwen3.attention.sliding_window = 8` is not supported (supported: 0)"
    );
    assert_eq!(
        refused(&with("llama", &[("final_logit_softcapping", Value::F32(30.0))]), &[]),
        "`llama.final_logit_softcapping = 30` is not supported for architecture `llama`"
    );
    assert_eq!(
        refused(&with("gemma3", &[("block_count", Value::U32(1 << 20))]), &[]),
        "`gemma3.block_count = 1048576` is not supported (supported: up to 4096 layers)"
    );
    assert_eq!(
        refused(&with("llama", &[("attention.head_count_kv", Value::Array(Array::U32(vec![1, 2])))]), &[]),
        "`llama.attention.head_count_kv` is an array of 2 x u32, not a whole number from 0"
    );
    assert_eq!(refused(&Metadata::default(), &[]), "the metadata has no `general.architecture`");
}
