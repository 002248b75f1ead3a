//! Damaged checkpoint files: valid ones with bytes changed, cut or doubled, and with huge numbers.
//! Opening one may fail but must not panic, and must not need more memory than the file's size justifies.
//! Files that are accepted must be valid for their readers, and safetensors files also for the safetensors
//! library.
//! Left out: configs (`config_mutations.rs`) and 4-bit tensors (`quant_state_mutations.rs`).
//! `SMIDGEN_MUTATIONS=100000 cargo test --release -p smidgen-formats --test it checkpoint_mutations` is the
//! long run.

use std::fs;
use std::path::Path;

use crate::config_mutations::PATTERNED_ADAPTER;
use crate::mutation::{allowed_bytes, cases, mutated, mutation, peak_bytes_of};
use proptest::prelude::*;
use smidgen_formats::folder::ModelFolder;
use smidgen_formats::gguf::GgufFile;
use smidgen_formats::gguf::model::GgufModel;
use smidgen_formats::gguf::value::{Array, Metadata, Value};
use smidgen_formats::gguf::write::{GgufTensorSpec, write_gguf};
use smidgen_formats::peft::{AdapterConfig, AdapterFile, AdapterKey};
use smidgen_formats::safetensors::SafetensorsFile;
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_ir::{Block, DType, Storage};

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

/// Checks what readers rely on: tensors are inside the file, follow each other, and can be read.
fn check_tensors(file: &SafetensorsFile) {
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
            check_tensors(&file);
            safetensors::SafeTensors::deserialize(bytes).expect("the safetensors library accepts it");
            true
        }
        Err(error) => {
            assert!(error.to_string().contains("m.safetensors"), "{error}");
            false
        }
    }
}

/// A model of one layer with every kind of metadata, a tokenizer, and blocks of two kinds.
fn valid_gguf() -> Vec<u8> {
    let text = |text: &str| Value::String(text.into());
    let texts =
        |texts: &[&str]| Value::Array(Array::String(texts.iter().map(|text| (*text).into()).collect()));
    let pairs = [
        ("general.architecture", text("llama")),
        ("general.alignment", Value::U32(32)),
        ("llama.block_count", Value::U32(1)),
        ("llama.context_length", Value::U64(64)),
        ("llama.embedding_length", Value::I32(32)),
        ("llama.feed_forward_length", Value::U16(32)),
        ("llama.attention.head_count", Value::U8(2)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("smollm")),
        ("tokenizer.ggml.tokens", texts(&["<s>", "a", "b", "ab", "<0>"])),
        ("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![3, 1, 1, 1, 4]))),
        ("tokenizer.ggml.merges", texts(&["a b"])),
        ("tokenizer.ggml.bos_token_id", Value::U32(0)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(true)),
        ("other", Value::Array(Array::Bool(vec![true, false]))),
    ];
    let mut metadata = Metadata::default();
    for (key, value) in pairs {
        metadata.insert(key, value).unwrap();
    }
    let spec = |name: &str, dims: &[usize], storage| GgufTensorSpec {
        name: name.into(),
        dims: dims.to_vec(),
        storage,
    };
    let specs = [
        spec("token_embd.weight", &[5, 32], Storage::Gguf(Block::Q8_0)),
        spec("output_norm.weight", &[32], Storage::F32),
        spec("blk.0.attn_q.weight", &[32, 32], Storage::Gguf(Block::Q4_1)),
        spec("blk.0.attn_v.bias", &[3], Storage::Plain(DType::Bf16)),
        spec("rope_freqs.weight", &[8], Storage::F32),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let one = 1_f32.to_le_bytes();
    write_gguf(&path, &metadata, &specs, |position, writer| {
        let bytes = [170, 128, 640, 6, 32][position];
        writer.write_all(&one.repeat(bytes / 4 + 1)[..bytes])
    })
    .unwrap();
    fs::read(&path).unwrap()
}

/// Where the data of the undamaged file begins.
fn gguf_header_bytes(valid: &[u8]) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    fs::write(&path, valid).unwrap();
    let file = GgufFile::open(&path).unwrap();
    GgufModel::read(&file).unwrap();
    Tokenizer::from_gguf(&file).unwrap();
    file.data_offset() as usize
}

/// Checks what readers rely on: tensors have the right size, are inside the file, do not overlap, and can be
/// read.
fn check_gguf_tensors(file: &GgufFile) {
    let mut ranges = Vec::new();
    for tensor in file.tensors() {
        assert_eq!(tensor.storage.bytes(tensor.rows(), tensor.columns()) as u64, tensor.bytes);
        let mut data = vec![0; tensor.bytes as usize];
        file.read_at(tensor, 0, &mut data).unwrap();
        assert_eq!(file.tensor(&tensor.name), Some(tensor));
        ranges.push((tensor.file_offset, tensor.file_offset + tensor.bytes));
    }
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
    assert!(ranges.iter().all(|&(begin, end)| begin >= file.data_offset() && end <= file.file_bytes()));
}

#[track_caller]
fn check_gguf(bytes: &[u8]) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    fs::write(&path, bytes).unwrap();
    let (opened, peak_bytes) = peak_bytes_of(|| GgufFile::open(&path));
    assert!(peak_bytes <= allowed_bytes(bytes.len()), "{peak_bytes} for {} bytes", bytes.len());
    match opened {
        Ok(file) => {
            check_gguf_tensors(&file);
            let (model, peak_bytes) = peak_bytes_of(|| GgufModel::read(&file));
            assert!(peak_bytes <= allowed_bytes(bytes.len()), "{peak_bytes} for {} bytes", bytes.len());
            if let Err(error) = model {
                assert!(error.to_string().contains("m.gguf"), "{error}");
            }
            match Tokenizer::from_gguf(&file) {
                Ok(tokenizer) => drop(tokenizer.encode("<s>ab ab12<0>\u{e9}", true)),
                Err(error) => assert!(error.to_string().contains("m.gguf"), "{error}"),
            }
            true
        }
        Err(error) => {
            assert!(error.to_string().contains("m.gguf"), "{error}");
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

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_damaged_safetensors_file_is_refused_or_sound(mutations in prop::collection::vec(mutation(), 1..5)) {
        check_safetensors(&mutated(&valid_safetensors(), &mutations));
    }

    #[test]
    fn a_damaged_gguf_file_is_refused_or_sound(mutations in prop::collection::vec(mutation(), 1..5)) {
        check_gguf(&mutated(&valid_gguf(), &mutations));
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
                tensor.read_at(0, &mut [0; 2]).unwrap();
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
        let mut files = [PATTERNED_ADAPTER.to_vec(), with_prefix(&json, &[0; 8])];
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
    assert!(check_gguf(&valid_gguf()));
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), VALID_INDEX);
    assert_eq!(ModelFolder::open(folder.path()).unwrap().tensor_names().count(), 2);
    let path = folder.path().join("adapter_config.json");
    fs::write(&path, PATTERNED_ADAPTER).unwrap();
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
fn memory_is_proportional_to_the_number_of_entries() {
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

#[test]
fn a_gguf_file_cut_anywhere_is_refused() {
    let valid = valid_gguf();
    // The size of the last tensor is a multiple of the alignment, so no padding follows it.
    for length in 0..valid.len() {
        assert!(!check_gguf(&valid[..length]), "cut at {length}");
    }
}

#[test]
fn a_gguf_file_with_any_byte_changed_is_refused_or_sound() {
    let valid = valid_gguf();
    for at in 0..gguf_header_bytes(&valid) {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = valid.clone();
            bytes[at] ^= flip;
            check_gguf(&bytes);
        }
    }
}

#[test]
fn wrong_sizes_in_a_gguf_file_allocate_nothing() {
    let valid = valid_gguf();
    // Every eight bytes of the header that could be a count, a length, a dimension or an offset.
    for at in 8..gguf_header_bytes(&valid) - 8 {
        for claim in [u64::MAX, u64::MAX / 8, 1 << 40, valid.len() as u64] {
            let mut bytes = valid.clone();
            bytes[at..at + 8].copy_from_slice(&claim.to_le_bytes());
            check_gguf(&bytes);
        }
    }
}
