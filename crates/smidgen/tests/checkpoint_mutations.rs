//! Damaged checkpoint files: valid ones with bytes changed, cut, doubled and numbers blown up.
//! Opening one may fail but never panics, and never holds more memory than the file's size justifies.
//! What is accepted keeps the promises its readers rely on, and the safetensors library accepts it too.
//! Configs have a binary of their own, `config_mutations.rs`.

#![allow(clippy::unwrap_used)]

mod mutation;

use std::fs;
use std::path::Path;

use mutation::{allowed_bytes, cases, mutated, mutation, peak_bytes_of};
use proptest::prelude::*;
use smidgen::checkpoint::folder::ModelFolder;
use smidgen::checkpoint::peft::{AdapterConfig, AdapterFile, AdapterKey};
use smidgen::checkpoint::safetensors::SafetensorsFile;

fn with_prefix(json: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn valid_safetensors() -> Vec<u8> {
    let json = concat!(
        r#"{"__metadata__":{"format":"pt"},"#,
        r#""model.embed_tokens.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"#,
        r#""model.norm.weight":{"dtype":"BF16","shape":[3],"data_offsets":[24,30]},"#,
        r#""empty":{"dtype":"U8","shape":[0],"data_offsets":[30,30]},"#,
        r#""scale":{"dtype":"F16","shape":[],"data_offsets":[30,32]}}      "#
    );
    with_prefix(json, &[7; 32])
}

/// What every reader relies on: tensors inside the file, one after the other, all readable.
fn check_promises(file: &SafetensorsFile) {
    let mut next = None;
    for tensor in file.tensors() {
        assert_eq!(tensor.element.tensor_bytes(&tensor.shape), Some(tensor.bytes));
        assert!(next.is_none_or(|next| next == tensor.file_offset));
        next = Some(tensor.file_offset + tensor.bytes);
        let mut data = vec![0; tensor.bytes as usize];
        file.read_at(tensor, 0, &mut data).unwrap();
        assert_eq!(file.tensor(&tensor.name), Some(tensor));
    }
    assert!(next.is_none_or(|next| next == file.file_bytes()));
}

#[track_caller]
fn check_safetensors(bytes: &[u8]) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    fs::write(&path, bytes).unwrap();
    let (opened, peak_bytes) = peak_bytes_of(|| SafetensorsFile::open(&path));
    assert!(peak_bytes <= allowed_bytes(bytes.len()), "{peak_bytes} for {} bytes", bytes.len());
    match opened {
        Ok(file) => {
            check_promises(&file);
            safetensors::SafeTensors::deserialize(bytes).expect("the safetensors library accepts it");
            true
        }
        Err(error) => {
            assert!(error.to_string().contains("m.safetensors"), "{error}");
            false
        }
    }
}

fn write_model(folder: &Path, index: &[u8]) {
    fs::write(folder.join("config.json"), "{}").unwrap();
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    for (shard, tensor) in [("one", "a"), ("two", "b")] {
        let json = format!(r#"{{"{tensor}":{{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}}}"#);
        fs::write(folder.join(shard), with_prefix(&json, &[1, 2])).unwrap();
    }
}

const VALID_INDEX: &[u8] = br#"{"metadata": {"total_size": 4}, "weight_map": {"a": "one", "b": "two"}}"#;

const VALID_CONFIG: &[u8] = br#"{"alpha_pattern": {"layers\\.\\d+\\.q_proj": 32, "v_proj": 8.5},
"base_model_name_or_path": "some/model", "bias": "none", "init_lora_weights": true, "layers_to_transform": [0, 1, 2],
"lora_alpha": 16, "lora_dropout": 0.05, "modules_to_save": ["lm_head"], "peft_type": "LORA", "r": 8,
"rank_pattern": {"^model.layers.[0-9]{1,2}.q_proj": 4}, "target_modules": ["q_proj", "v_proj"], "use_dora": false}"#;

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_damaged_safetensors_file_is_refused_or_sound(mutations in prop::collection::vec(mutation(), 1..5)) {
        check_safetensors(&mutated(&valid_safetensors(), &mutations));
    }

    #[test]
    fn a_damaged_index_is_refused_or_sound(mutations in prop::collection::vec(mutation(), 1..5)) {
        let index = mutated(VALID_INDEX, &mutations);
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path(), &index);
        let (opened, peak_bytes) = peak_bytes_of(|| ModelFolder::open(folder.path()));
        prop_assert!(peak_bytes <= allowed_bytes(index.len()), "{peak_bytes} for {} bytes", index.len());
        if let Ok(model) = opened {
            for name in model.tensor_names() {
                let tensor = model.tensor(name).unwrap();
                prop_assert_eq!(tensor.file_path().parent(), Some(folder.path()));
                model.read_at(&tensor, 0, &mut [0; 2]).unwrap();
            }
        }
    }

    #[test]
    fn a_damaged_adapter_folder_is_refused_or_sound(
        mutations in prop::collection::vec(mutation(), 1..4),
        of_config in any::<bool>(),
    ) {
        let key = "base_model.model.q_proj.lora_A.weight";
        let json = format!(r#"{{"{key}":{{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}}}"#);
        let mut files = [VALID_CONFIG.to_vec(), with_prefix(&json, &[0; 8])];
        let damaged = &mut files[if of_config { 0 } else { 1 }];
        *damaged = mutated(damaged, &mutations);
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("adapter_config.json"), &files[0]).unwrap();
        fs::write(folder.path().join("adapter_model.safetensors"), &files[1]).unwrap();
        if let Ok(adapter) = AdapterFile::open(folder.path()) {
            for (key, tensor) in adapter.tensors() {
                prop_assert_eq!(key.to_string(), tensor.name());
                prop_assert!(adapter.tensor(&key).is_some());
            }
        }
    }

    #[test]
    fn every_key_formats_back_to_itself(
        prefix in prop_oneof![Just("base_model.model."), Just("")],
        path in "[a-z.]{0,8}",
        suffix in prop_oneof![
            Just(".lora_A.weight"), Just(".lora_B.weight"), Just(".lora_B.bias"), Just(".lora_magnitude_vector"),
            Just(".base_layer.bias"), Just(".lora_embedding_A"), Just(".weight"), Just("")
        ],
    ) {
        let key = format!("{prefix}{path}{suffix}");
        prop_assert_eq!(AdapterKey::parse(&key).to_string(), key);
    }
}

#[test]
fn the_undamaged_files_are_accepted() {
    assert!(check_safetensors(&valid_safetensors()));
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), VALID_INDEX);
    assert_eq!(ModelFolder::open(folder.path()).unwrap().tensor_names().count(), 2);
    let path = folder.path().join("adapter_config.json");
    fs::write(&path, VALID_CONFIG).unwrap();
    AdapterConfig::read(&path).unwrap().module_scales().unwrap();
}

#[test]
fn claims_of_size_cost_nothing() {
    let mut bytes = valid_safetensors();
    for claim in [bytes.len() as u64, 99_999_999, 100_000_001, u64::MAX, u64::MAX - 7] {
        bytes[..8].copy_from_slice(&claim.to_le_bytes());
        assert!(!check_safetensors(&bytes));
    }
    for shape in ["[99999999999]", "[4294967296,4294967296]", "[18446744073709551615]"] {
        let json = format!(r#"{{"x":{{"dtype":"U8","shape":{shape},"data_offsets":[0,99999999999]}}}}"#);
        assert!(!check_safetensors(&with_prefix(&json, &[0; 4])));
    }
}

#[test]
fn many_small_things_cost_in_proportion() {
    let long_shape =
        format!(r#"{{"x":{{"dtype":"U8","shape":[0{}],"data_offsets":[0,0]}}}}"#, ",1".repeat(100_000));
    assert!(check_safetensors(&with_prefix(&long_shape, &[])));
    let many: Vec<String> = (0..20_000)
        .map(|i| format!(r#""{i}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{}]}}"#, i + 1))
        .collect();
    let json = format!("{{{}}}", many.join(","));
    assert!(check_safetensors(&with_prefix(&json, &vec![0; 20_000])));
    let deep = format!(r#"{{"x":{}"#, "[".repeat(200_000));
    assert!(!check_safetensors(&with_prefix(&deep, &[])));
}
