//! Damaged configs: a model's `config.json` and an adapter's `adapter_config.json` with changed bytes and
//! JSON values. Reading one may fail but must not panic, and must not need more memory than the file's size
//! justifies. Configs that are accepted must be valid for their readers.
//! `SMIDGEN_MUTATIONS=1000000 cargo test --release -p smidgen-formats --test it config_mutations` is the long
//! run.

use crate::mutation::json::{Change, change, changed};
use crate::mutation::{cases, mutated, mutation, peak_bytes_of};
use proptest::prelude::*;
use serde_json::Value;
use smidgen_compile::model::read_spec;
use smidgen_formats::json_file::{MAX_CONFIG_BYTES, read_json_file};
use smidgen_formats::peft::AdapterConfig;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The files with this name in the folders of all fixtures.
fn fixtures(file: &str) -> Vec<Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let mut folders: Vec<PathBuf> = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    let found: Vec<Vec<u8>> = folders.iter().filter_map(|folder| fs::read(folder.join(file)).ok()).collect();
    assert!(found.len() >= 5, "{} of `{file}`", found.len());
    found
}

static MODEL_CONFIGS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| fixtures("model/config.json"));
static ADAPTER_CONFIGS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let mut configs = fixtures("adapter/adapter_config.json");
    configs.push(PATTERNED_ADAPTER.to_vec());
    configs
});

/// An adapter's config with patterns.
pub const PATTERNED_ADAPTER: &[u8] = br#"{"alpha_pattern": {"layers\\.\\d+\\.q_proj": 32, "v_proj": 8.5},
"base_model_name_or_path": "some/model", "bias": "none", "init_lora_weights": true, "layers_to_transform": [0, 1, 2],
"lora_alpha": 16, "lora_dropout": 0.05, "modules_to_save": ["lm_head"], "peft_type": "LORA", "r": 8,
"rank_pattern": {"^model.layers.[0-9]{1,2}.q_proj": 4}, "target_modules": ["q_proj", "v_proj"], "use_dora": false}"#;

const MODEL_KEYS: &[&str] = &[
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "hidden_activation",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "torch_dtype",
    "dtype",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_type",
    "type",
    "factor",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "sliding_window_pattern",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope_local_base_freq",
    "pretraining_tp",
    "quantization_config",
    "full_attention",
    "sliding_attention",
    "text_config",
];

const ADAPTER_KEYS: &[&str] = &[
    "peft_type",
    "task_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "bias",
    "fan_in_fan_out",
    "modules_to_save",
    "init_lora_weights",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
    "lora_bias",
    "loftq_config",
    "megatron_config",
    "eva_config",
    "trainable_token_indices",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
];

/// Values in tables need most memory: the eight characters of `[{"x":]}` become a vector and a table with
/// capacity four.
fn allowed_config_bytes(file_bytes: usize) -> usize {
    crate::mutation::allowed_bytes(2 * file_bytes)
}

/// The reader parses the file twice: for the known keys and for the others.
fn allowed_adapter_bytes(file_bytes: usize) -> usize {
    2 * allowed_config_bytes(file_bytes)
}

/// A file that each case of a test overwrites.
struct ScratchFile(tempfile::TempDir, &'static str);

impl ScratchFile {
    fn named(name: &'static str) -> ScratchFile {
        ScratchFile(tempfile::tempdir().unwrap(), name)
    }

    fn holding(&self, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(self.1);
        fs::write(&path, bytes).unwrap();
        path
    }
}

fn parsed(files: &[Vec<u8>], which: usize) -> Value {
    serde_json::from_slice(&files[which % files.len()]).unwrap()
}

/// Reads a model's config as the program does, and checks the result. Returns whether it was accepted.
fn check_model_config(path: &Path, bytes: &[u8]) -> bool {
    let (read, peak_bytes) = peak_bytes_of(|| {
        let config: Value = read_json_file(path, MAX_CONFIG_BYTES).map_err(|error| error.to_string())?;
        read_spec(&config).map_err(|error| error.to_string())
    });
    assert!(peak_bytes <= allowed_config_bytes(bytes.len()), "{peak_bytes} for {} bytes", bytes.len());
    let spec = match read {
        Ok(spec) => spec,
        Err(message) => {
            assert!(!message.is_empty() && message.len() <= 2 * bytes.len() + 1000, "{message}");
            return false;
        }
    };
    let sizes = [spec.vocabulary, spec.hidden, spec.layers.len(), spec.max_positions];
    assert!(sizes.iter().all(|size| (1..=1 << 31).contains(size)) && spec.layers.len() <= 4096, "{spec:?}");
    // This would overflow if a size had no limit.
    assert!(spec.parameters() > 0);
    for (_, attention) in spec.attentions() {
        assert!(attention.kv_heads >= 1 && attention.heads.is_multiple_of(attention.kv_heads), "{spec:?}");
        let head_dim = attention.head_dim;
        assert!(head_dim.is_multiple_of(2) && (2..=512).contains(&head_dim), "{spec:?}");
    }
    let is_real = |number: f32| number > 0.0 && number.is_finite();
    assert!(is_real(spec.norm_eps()) && spec.ropes.iter().all(|rope| is_real(rope.theta)), "{spec:?}");
    true
}

/// Reads an adapter's config and checks the result. Returns whether it was accepted.
fn check_adapter_config(path: &Path, again: &ScratchFile, bytes: &[u8]) -> bool {
    let (read, peak_bytes) = peak_bytes_of(|| AdapterConfig::read(path));
    assert!(peak_bytes <= allowed_adapter_bytes(bytes.len()), "{peak_bytes} for {} bytes", bytes.len());
    let config = match read {
        Ok(config) => config,
        Err(error) => {
            assert!(error.to_string().contains("adapter_config.json"), "{error}");
            return false;
        }
    };
    assert!(config.r > 0 && config.rank_pattern.iter().all(|(_, rank)| *rank > 0));
    config.unsupported();
    // A compiled pattern is bounded by the pattern's own limit of 1 MiB, not by the file.
    let patterns = 1 + config.rank_pattern.len() + config.alpha_pattern.len();
    let (scales, peak_bytes) = peak_bytes_of(|| config.module_scales());
    assert!(peak_bytes <= (8 << 20) * patterns, "{peak_bytes} for {patterns} patterns");
    if let Ok(scales) = scales {
        assert!(scales.rank_for("model.layers.1.self_attn.q_proj") > 0);
    }
    let text = config.to_json();
    // Indentation can make deeply nested lists longer than the limit for reading.
    if text.len() as u64 <= MAX_CONFIG_BYTES {
        let written = AdapterConfig::read(&again.holding(text.as_bytes())).unwrap();
        assert_eq!(written.to_json(), text);
    }
    true
}

fn changes(keys: &'static [&'static str]) -> impl Strategy<Value = Vec<Change>> {
    prop::collection::vec(change(keys), 1..6)
}

#[test]
fn model_configs_with_damaged_bytes() {
    let place = ScratchFile::named("config.json");
    let strategy = (any::<usize>(), prop::collection::vec(mutation(), 1..5));
    proptest!(cases(), |((which, mutations) in strategy)| {
        let bytes = mutated(&MODEL_CONFIGS[which % MODEL_CONFIGS.len()], &mutations);
        check_model_config(&place.holding(&bytes), &bytes);
    });
}

#[test]
fn model_configs_with_other_values() {
    let place = ScratchFile::named("config.json");
    proptest!(cases(), |((which, changes) in (any::<usize>(), changes(MODEL_KEYS)))| {
        let bytes = changed(&parsed(&MODEL_CONFIGS, which), &changes);
        check_model_config(&place.holding(&bytes), &bytes);
    });
}

#[test]
fn adapter_configs_with_damaged_bytes() {
    let (place, again) =
        (ScratchFile::named("adapter_config.json"), ScratchFile::named("adapter_config.json"));
    let strategy = (any::<usize>(), prop::collection::vec(mutation(), 1..5));
    proptest!(cases(), |((which, mutations) in strategy)| {
        let bytes = mutated(&ADAPTER_CONFIGS[which % ADAPTER_CONFIGS.len()], &mutations);
        check_adapter_config(&place.holding(&bytes), &again, &bytes);
    });
}

#[test]
fn adapter_configs_with_other_values() {
    let (place, again) =
        (ScratchFile::named("adapter_config.json"), ScratchFile::named("adapter_config.json"));
    proptest!(cases(), |((which, changes) in (any::<usize>(), changes(ADAPTER_KEYS)))| {
        let bytes = changed(&parsed(&ADAPTER_CONFIGS, which), &changes);
        check_adapter_config(&place.holding(&bytes), &again, &bytes);
    });
}

/// A small config must not cause a table of a million layers.
#[test]
fn a_large_number_of_layers_allocates_nothing() {
    let place = ScratchFile::named("config.json");
    for which in 0..MODEL_CONFIGS.len() {
        let mut config = parsed(&MODEL_CONFIGS, which);
        config["num_hidden_layers"] = Value::from(1 << 20);
        let bytes = config.to_string().into_bytes();
        check_model_config(&place.holding(&bytes), &bytes);
    }
}

/// The changes lead to accepted and to refused configs; otherwise the tests above would be worthless.
#[test]
fn some_damage_is_accepted_and_some_refused() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let place = ScratchFile::named("config.json");
    let (adapter, again) =
        (ScratchFile::named("adapter_config.json"), ScratchFile::named("adapter_config.json"));
    let (mut models, mut adapters) = (0, 0);
    for round in 0..200 {
        let changes = changes(MODEL_KEYS).new_tree(&mut runner).unwrap().current();
        let bytes = changed(&parsed(&MODEL_CONFIGS, round), &changes);
        models += usize::from(check_model_config(&place.holding(&bytes), &bytes));
        let mutations = prop::collection::vec(mutation(), 1..3).new_tree(&mut runner).unwrap().current();
        let bytes = mutated(&ADAPTER_CONFIGS[round % ADAPTER_CONFIGS.len()], &mutations);
        adapters += usize::from(check_adapter_config(&adapter.holding(&bytes), &again, &bytes));
    }
    for accepted in [models, adapters] {
        assert!(
            (10..190).contains(&accepted),
            "{models} model configs and {adapters} adapter configs of 200"
        );
    }
    for bytes in MODEL_CONFIGS.iter() {
        assert!(check_model_config(&place.holding(bytes), bytes));
    }
    for bytes in ADAPTER_CONFIGS.iter() {
        assert!(check_adapter_config(&adapter.holding(bytes), &again, bytes));
    }
}
