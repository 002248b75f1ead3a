//! A small model of every family of today, written as GGUF and read back: the file has the architecture and the keys of
//! llama.cpp, the same weights, and computes the same.

use super::export_tests::write_tokenizer;
use super::lora_file::export_lora;
use super::model_file::{ExportOptions, ExportedModel, MatrixType, export_model};
use crate::failure::Failure;
use crate::model_files::original::OriginalModel;
use crate::plan::model::{constant_dims, read_decoder};
use crate::session::adapted::logits_of;
use serde_json::{Value, json};
use smidgen_compile::model::read_spec;
use smidgen_compile::model::spec::Tensor;
use smidgen_formats::element::Element;
use smidgen_formats::gguf::GgufFile;
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_formats::safetensors::write::{TensorSpec, pytorch_metadata, write_safetensors};
use std::fs;
use std::path::{Path, PathBuf};

fn config(model_type: &str, more: &Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
        "max_position_embeddings": 128, "pad_token_id": null,
    });
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn yarn(more: &Value) -> Value {
    let mut yarn = json!({
        "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16,
    });
    for (key, value) in more.as_object().unwrap() {
        yarn[key] = value.clone();
    }
    yarn
}

/// A model of each family, with the name of its architecture.
fn families() -> Vec<(&'static str, Value)> {
    let kinds = json!(["sliding_attention", "full_attention", "sliding_attention", "full_attention"]);
    let sliding = json!({"rope_type": "default", "rope_theta": 5e5});
    let two_ropes = json!({"full_attention": yarn(&json!({})), "sliding_attention": sliding});
    let growing = json!({
        "beta_fast": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    });
    let granite = json!({
        "embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.22, "logits_scaling": 6.0,
        "tie_word_embeddings": true,
    });
    let lfm2 = json!({
        "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 4, "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": false, "tie_word_embeddings": true,
    });
    let gemma4 = json!({
        "layer_types": kinds, "sliding_window": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": true,
        "attention_k_eq_v": true, "num_global_key_value_heads": 1, "global_head_dim": 16,
        "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64, "final_logit_softcapping": 30.0,
    });
    let plain_gemma4 = json!({"layer_types": kinds, "sliding_window": 8, "hidden_size_per_layer_input": 0, "global_head_dim": 8});
    let scaled = json!({"rope_parameters": yarn(&json!({"attention_factor": 1.0}))});
    let full = json!(["full_attention", "full_attention", "full_attention", "full_attention"]);
    let without_windows = json!({"layer_types": full, "sliding_window": 8});
    let muse =
        json!({"layer_types": full, "layer_rope_theta": [0, 0, 0, 0], "final_logit_softcapping": null});
    let linear = json!({"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0});
    let of_gemma4 = |full: &Value, mut more: Value| {
        more["rope_parameters"] = json!({"full_attention": full, "sliding_attention": sliding});
        (more["hidden_size_per_layer_input"], more["global_head_dim"]) = (json!(0), json!(16));
        more["final_logit_softcapping"] = json!(null);
        ("gemma4", config("gemma4_text", &more))
    };
    vec![
        ("llama", config("llama", &json!({"rope_parameters": yarn(&json!({}))}))),
        ("qwen3", config("qwen3", &scaled)),
        ("gemma", config("gemma", &json!({}))),
        ("gemma3", config("gemma3_text", &json!({"query_pre_attn_scalar": 8, "sliding_window": 8}))),
        ("gemma4", config("gemma4_text", &gemma4)),
        ("gemma4", config("gemma4_unified_text", &plain_gemma4)),
        ("smollm3", config("smollm3", &json!({}))),
        ("granite", config("granite", &granite)),
        ("lfm2", config("lfm2", &lfm2)),
        ("granite", config("granite", &json!({"attention_bias": true, "mlp_bias": true}))),
        ("olmo2", config("olmo2", &json!({}))),
        ("olmo2", config("olmo3", &json!({"sliding_window": 8, "rope_parameters": two_ropes}))),
        ("seed_oss", config("seed_oss", &json!({}))),
        ("glm4", config("glm4", &json!({}))),
        ("cohere2", config("cohere2", &json!({"sliding_window": 8}))),
        ("mistral3", config("ministral3", &json!({"rope_parameters": yarn(&growing)}))),
        ("muse-glimmer", config("muse_glimmer_text", &json!({"sliding_window": 8}))),
        ("cohere2", config("cohere2", &without_windows)),
        ("muse-glimmer", config("muse_glimmer_text", &muse)),
        of_gemma4(&sliding, without_windows),
        of_gemma4(&linear, json!({"layer_types": kinds, "sliding_window": 8})),
    ]
}

/// Writes a model with small numbers that differ everywhere.
fn write_model(folder: &Path, config: &Value) {
    let spec = read_spec(config).unwrap_or_else(|error| panic!("{config}: {error}"));
    let tensors = spec.tensors();
    let spec_of = |tensor: &Tensor| TensorSpec {
        name: tensor.name.clone(),
        element: Element::F32,
        shape: constant_dims(&tensor.shape),
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec_of).collect();
    fs::create_dir(folder).unwrap();
    write_safetensors(&folder.join("model.safetensors"), &pytorch_metadata(), &specs, |index, out| {
        let count: usize = specs[index].shape.iter().product();
        let number = |i: usize| ((i * 37 + index * 101) % 211) as f32 / 211.0 - 0.4;
        (0..count).try_for_each(|i| out.write_all(&(0.5 * number(i)).to_le_bytes()))
    })
    .unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    write_tokenizer(folder);
}

fn export(folder: &Path, config: &Value) -> Result<(PathBuf, PathBuf, ExportedModel), Failure> {
    let (base, output) = (folder.join("base"), folder.join("made.gguf"));
    write_model(&base, config);
    let options = ExportOptions { matrices: MatrixType::F32, block_bytes: 2048 };
    let exported = export_model(&OriginalModel::open(&base).unwrap(), None, "made", &output, options)?;
    Ok((base, output, exported))
}

#[test]
fn every_family_is_written_and_read_back() {
    for (architecture, config) in families() {
        let folder = tempfile::tempdir().unwrap();
        let name = config["model_type"].as_str().unwrap();
        let (base, output, exported) =
            export(folder.path(), &config).unwrap_or_else(|failure| panic!("{name}: {failure}"));
        assert_eq!(exported.architecture.name(), architecture);
        let (base, model) = (Model::open(&base).unwrap(), Model::open_gguf(&output).unwrap());
        let spec = read_decoder(&base).unwrap();
        let of_file = read_decoder(&model).unwrap();
        assert_eq!(spec.tensors(), of_file.tensors(), "{name}");
        for tensor in spec.tensors() {
            let (found, expected) = (model.weight_values(&tensor.name), base.weight_values(&tensor.name));
            // Converters add 1 to the norms of some families, and reading subtracts it.
            let tolerance = if tensor.name.ends_with("norm.weight") { 2.4e-7 } else { 0.0 };
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() <= tolerance, "{name}: {}: {found} {expected}", tensor.name);
            }
        }
        let ids: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % 64).collect();
        let (found, expected) =
            (logits_of(&model, None, &ids).unwrap(), logits_of(&base, None, &ids).unwrap());
        let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() <= 1e-4 * largest, "{name}: {found} {expected}");
        }
    }
}

#[test]
fn scales_and_lists_have_the_keys_of_llama_cpp() {
    let file_of = |architecture: &str, position: usize| {
        let of_architecture = families().into_iter().filter(|(name, _)| *name == architecture);
        let (_, config) = of_architecture.into_iter().nth(position).unwrap();
        let folder = tempfile::tempdir().unwrap();
        GgufFile::open(&export(folder.path(), &config).unwrap().1).unwrap()
    };
    let granite = file_of("granite", 0);
    for (key, expected) in [
        ("logit_scale", 6.0),
        ("attention.scale", 0.25),
        ("embedding_scale", 12.0),
        ("residual_scale", f64::from(0.22f32)),
    ] {
        let found = granite.metadata().number(&format!("granite.{key}")).unwrap().unwrap();
        assert!((found - expected).abs() < 1e-6 * expected, "{key}: {found}");
    }
    let gemma4 = file_of("gemma4", 0);
    let wholes = |key: &str| gemma4.metadata().wholes(&format!("gemma4.{key}")).unwrap().unwrap();
    assert_eq!(wholes("feed_forward_length"), [48, 48, 96, 96]);
    assert_eq!(wholes("attention.head_count_kv"), [2, 1, 2, 1]);
    assert_eq!((wholes("attention.key_length"), wholes("attention.key_length_swa")), (vec![16], vec![8]));
    assert_eq!(gemma4.tensor("rope_freqs.weight").unwrap().dims, [8]);
    assert!(gemma4.tensor("blk.1.attn_v.weight").is_none() && gemma4.tensor("blk.2.attn_k.weight").is_none());
    let cap =
        |file: &GgufFile, name: &str| file.metadata().number(&format!("{name}.final_logit_softcapping"));
    for (name, position) in [("cohere2", 1), ("muse-glimmer", 1), ("gemma4", 2)] {
        // llama.cpp requires a window, and has another default for the softcap.
        let file = file_of(name, position);
        let whole = |key: &str| file.metadata().whole(&format!("{name}.attention.{key}"));
        assert_eq!(whole("sliding_window"), Ok(Some(128)), "{name}");
        match name {
            "cohere2" => assert_eq!(whole("sliding_window_pattern"), Ok(Some(1))),
            _ => assert_eq!(cap(&file, name), Ok(Some(0.0)), "{name}"),
        }
    }
    for position in [2, 3] {
        let file = file_of("gemma4", position);
        let tensor = file.tensor("rope_freqs.weight").unwrap();
        let mut bytes = vec![0; tensor.bytes as usize];
        file.read_at(tensor, 0, &mut bytes).unwrap();
        assert_eq!(bytes, 1f32.to_le_bytes().repeat(8));
    }
    let ministral = file_of("mistral3", 0);
    let number = |key: &str| ministral.metadata().number(&format!("mistral3.{key}")).unwrap();
    assert_eq!(number("rope.scaling.yarn_log_multiplier"), Some(1.0));
    assert_eq!(number("rope.scaling.yarn_beta_fast"), Some(16.0));
    assert_eq!(number("attention.temperature_scale"), Some(0.1));
}

#[test]
fn an_adapter_that_llama_cpp_would_ignore_is_refused() {
    let (_, config) = families().into_iter().find(|(name, _)| *name == "gemma4").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (base, adapter) = (folder.path().join("base"), folder.path().join("adapter"));
    write_model(&base, &config);
    fs::create_dir(&adapter).unwrap();
    let path = "base_model.model.model.per_layer_model_projection";
    let half = |name: &str, shape: [usize; 2]| TensorSpec {
        name: format!("{path}.{name}.weight"),
        element: Element::F32,
        shape: shape.to_vec(),
    };
    let specs = [half("lora_A", [1, 32]), half("lora_B", [16, 1])];
    let file = adapter.join("adapter_model.safetensors");
    write_safetensors(&file, &pytorch_metadata(), &specs, |index, out| {
        out.write_all(&vec![0; 4 * specs[index].shape.iter().product::<usize>()])
    })
    .unwrap();
    let settings = json!({
        "peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["per_layer_model_projection"], "bias": "none",
    });
    fs::write(adapter.join("adapter_config.json"), settings.to_string()).unwrap();
    let adapter = AdapterFile::open(&adapter).unwrap();
    let output = folder.path().join("adapter.gguf");
    let refused = export_lora(&adapter, &Model::open(&base).unwrap(), &output).unwrap_err().to_string();
    let expected = "`model.per_layer_model_projection` is adapted, and llama.cpp applies no adapter to \
                    `per_layer_model_proj.weight`";
    assert!(refused.contains(expected), "{refused}");
    assert!(!output.exists());
}

#[test]
fn what_llama_cpp_would_compute_otherwise_is_refused() {
    let refused = |config: &Value, words: &str| {
        let folder = tempfile::tempdir().unwrap();
        let failure = export(folder.path(), config).map(|_| ()).unwrap_err().to_string();
        assert!(failure.contains(words) && failure.contains("which GGUF cannot express"), "{failure}");
        assert!(!folder.path().join("made.gguf").exists());
    };
    let rotated = config("smollm3", &json!({"no_rope_layers": [1, 1, 1, 1]}));
    refused(&rotated, "in layer 3 the rotary embedding is not");
    refused(&config("olmo2", &json!({"tie_word_embeddings": true})), "the head is tied to the embedding");
    refused(&config("gemma", &json!({"tie_word_embeddings": false})), "the head is not tied");
    let betas = yarn(&json!({"beta_fast": 16.0}));
    refused(&config("llama", &json!({"rope_parameters": betas})), "YaRN has `beta_fast = 16`");
    let whole = yarn(&json!({"truncate": false}));
    refused(&config("llama", &json!({"rope_parameters": whole})), "in layer 0 the rotary embedding is not");
    refused(
        &config("muse_glimmer_text", &json!({"sliding_window": 8, "post_norm_eps": 1e-6})),
        "in layer 0 the form",
    );
    let bases = json!({
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    });
    let olmo = config("olmo3", &json!({"sliding_window": 8, "rope_parameters": bases}));
    refused(&olmo, "in layer 0 the rotary embedding is not");
    let capped = json!({"query_pre_attn_scalar": 8, "sliding_window": 8, "attn_logit_softcapping": 50.0});
    refused(&config("gemma3_text", &capped), "in layer 0 the softcap of scores is 50 instead of none");
    let types = json!(["full_attention", "sliding_attention", "sliding_attention", "full_attention"]);
    let shared = json!({
        "layer_types": types, "sliding_window": 8, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
    });
    refused(
        &config("gemma4_text", &shared),
        "layer 2 uses the keys and values of layer 1 instead of layer 0",
    );
    let types = json!(["sliding_attention", "full_attention", "full_attention", "sliding_attention"]);
    let uneven = config("cohere2", &json!({"sliding_window": 8, "layer_types": types}));
    refused(&uneven, "the layers with a sliding window are not periodic");
}
