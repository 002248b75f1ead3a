//! Exports of the committed fixtures, read back: a whole model has the tensors of the merged one under other names, and
//! an adapter has PEFT's tensors in the order and scale that llama.cpp expects.

use super::lora_file::export_lora;
use super::model_file::{ExportOptions, ExportedModel, MatrixType, export_model};
use crate::failure::Failure;
use crate::merge::{MergeOptions, merge};
use crate::model_files::numbers::read_f32;
use crate::model_files::original::OriginalModel;
use crate::plan::model::read_decoder;
use crate::session::adapted::logits_of;
use half::f16;
use serde_json::{Value, json};
use smidgen_formats::element::Element;
use smidgen_formats::gguf::GgufFile;
use smidgen_formats::model::Model;
use smidgen_formats::peft::{AdapterFile, read_modules};
use std::fs;
use std::path::{Path, PathBuf};

fn fixture(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(case)
}

/// A fixture with its base and adapter; a folder gets a tokenizer, because the fixtures have none.
struct Case {
    folder: tempfile::TempDir,
    base: PathBuf,
    adapter: AdapterFile,
}

impl Case {
    fn open(case: &str) -> Case {
        Case::with_config(case, |_| {})
    }

    fn with_config(case: &str, edit: impl FnOnce(&mut Value)) -> Case {
        let folder = tempfile::tempdir().unwrap();
        let file = fixture(case).join("model.gguf");
        let base = if file.exists() { file } else { copy_base(case, folder.path(), edit) };
        let adapter = AdapterFile::open(&fixture(case).join("adapter")).unwrap();
        Case { folder, base, adapter }
    }

    fn original(&self) -> OriginalModel {
        OriginalModel::open(&self.base).unwrap()
    }

    fn try_export(&self, matrices: MatrixType) -> Result<(ExportedModel, Model), Failure> {
        let output = self.folder.path().join(format!("{matrices:?}.gguf"));
        // Blocks have a few rows, so that a tensor has several.
        let options = ExportOptions { matrices, block_bytes: 2048 };
        let exported = export_model(&self.original(), Some(&self.adapter), "made", &output, options)?;
        Ok((exported, Model::open_gguf(&output).unwrap()))
    }

    fn export(&self, matrices: MatrixType) -> (ExportedModel, Model) {
        self.try_export(matrices).unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// The merged model in f32.
    fn merged(&self) -> Model {
        let output = self.folder.path().join("merged");
        let options = MergeOptions { element: Some(Element::F32), ..MergeOptions::default() };
        merge(&self.adapter, &self.original(), &output, options).unwrap();
        Model::open_folder(&output).unwrap()
    }
}

fn copy_base(case: &str, folder: &Path, edit: impl FnOnce(&mut Value)) -> PathBuf {
    let (from, to) = (fixture(case).join("model"), folder.join("base"));
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(&from).unwrap() {
        let path = entry.unwrap().path();
        fs::write(to.join(path.file_name().unwrap()), fs::read(&path).unwrap()).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    edit(&mut config);
    fs::write(to.join("config.json"), config.to_string()).unwrap();
    write_tokenizer(&to);
    to
}

pub fn write_tokenizer(to: &Path) {
    let added = |id: usize, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [added(0, "<s>"), added(1, "</s>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, "Ġ": 5}, "merges": [["a", "b"]]},
    });
    fs::write(to.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(to.join("tokenizer_config.json"), r#"{"bos_token": "<s>", "eos_token": "</s>"}"#).unwrap();
}

const FOLDERS: [&str; 12] = [
    "llama-gqa-tied",
    "llama-bias-linear",
    "llama-dora",
    "llama-f16-some-layers",
    "llama-bnb-nf4",
    "mistral-window",
    "qwen2",
    "qwen2-bias-all",
    "qwen3",
    "phi3",
    "phi3-longrope",
    "gemma3-v4",
];
const FILES: [&str; 8] = [
    "gguf-llama",
    "gguf-llama3-rope",
    "gguf-gemma2",
    "gguf-gemma3",
    "gguf-phi3",
    "gguf-qwen2",
    "gguf-qwen3",
    "gguf-kquants",
];

#[test]
fn a_model_in_f32_has_the_merged_tensors_and_computes_the_same() {
    for name in FOLDERS.into_iter().chain(FILES) {
        let case = Case::open(name);
        let (exported, model) = case.export(MatrixType::F32);
        assert!(exported.folded > 0, "{name}");
        let merged = case.merged();
        let spec = read_decoder(&merged).unwrap();
        for tensor in spec.tensors() {
            let (found, expected) = (model.weight_values(&tensor.name), merged.weight_values(&tensor.name));
            // The export adds 1 to the norms of Gemma, and reading subtracts it.
            let of_gemma = name.contains("gemma") && tensor.name.ends_with("norm.weight");
            let tolerance = if of_gemma { 2.4e-7 } else { 0.0 };
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() <= tolerance, "{name}: {}: {found} {expected}", tensor.name);
            }
        }
        let ids: Vec<u32> = (0..48).map(|i| (i * 37 + 5) % spec.vocabulary as u32).collect();
        let (found, expected) =
            (logits_of(&model, None, &ids).unwrap(), logits_of(&merged, None, &ids).unwrap());
        let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() <= 2e-5 * largest, "{name}: {found} {expected}");
        }
    }
}

#[test]
fn narrower_types_are_one_rounding_away() {
    for name in ["llama-gqa-tied", "gemma3-v4", "gguf-llama", "phi3"] {
        let case = Case::open(name);
        let merged = case.merged();
        let ((_, half), (exported, eighth)) = (case.export(MatrixType::F16), case.export(MatrixType::Q8_0));
        let mut odd = 0;
        for tensor in read_decoder(&merged).unwrap().tensors() {
            let expected = merged.weight_values(&tensor.name);
            let weight = half.weight(&tensor.name).unwrap();
            let [_, columns] = *weight.shape() else { continue };
            let rounded: Vec<f32> = expected.iter().map(|value| f16::from_f32(*value).to_f32()).collect();
            assert_eq!(half.weight_values(&tensor.name), rounded, "{name}: {}", tensor.name);
            let found = eighth.weight_values(&tensor.name);
            if columns % 32 != 0 {
                odd += 1;
                assert_eq!(found, rounded, "{name}: {}", tensor.name);
                continue;
            }
            for (found, expected) in found.chunks(32).zip(expected.chunks(32)) {
                let step = expected.iter().fold(0f32, |largest, value| largest.max(value.abs())) / 127.0;
                for (found, expected) in found.iter().zip(expected) {
                    // Half a step, and the rounding of the step to f16.
                    assert!(
                        (found - expected).abs() <= 0.57 * step + 1e-7,
                        "{name}: {found} {expected} {step}"
                    );
                }
            }
        }
        let said = exported.notes.iter().any(|note| note.contains("not a multiple of 32"));
        assert_eq!(said, odd > 0, "{name}: {:?}", exported.notes);
    }
}

#[test]
fn an_adapters_tensors_are_in_the_files_order_and_scale() {
    for name in ["llama-gqa-tied", "llama-f16-some-layers", "qwen2", "phi3", "gguf-llama", "gguf-gemma2"] {
        let case = Case::open(name);
        let model = Model::open(&case.base).unwrap();
        let output = case.folder.path().join("adapter.gguf");
        let exported = export_lora(&case.adapter, &model, &output).unwrap();
        let spec = read_decoder(&model).unwrap();
        let file = GgufFile::open(&output).unwrap();
        let text = |key: &str| file.metadata().text(key).unwrap().unwrap().to_string();
        assert_eq!((&*text("general.type"), &*text("adapter.type")), ("adapter", "lora"));
        assert_eq!(text("general.architecture"), exported.architecture.name());
        let alpha = file.metadata().number("adapter.lora.alpha").unwrap().unwrap();
        let modules = read_modules(&case.adapter).unwrap().modules;
        assert_eq!((file.tensors().len(), exported.modules), (2 * modules.len(), modules.len()), "{name}");
        for module in &modules {
            let (mut a, mut b) =
                (vec![0.0; module.rank * module.columns()], vec![0.0; module.rank * module.rows()]);
            read_f32(&module.a, 0, &mut a).unwrap();
            read_f32(&module.b, 0, &mut b).unwrap();
            let place = gguf_name(&module.path);
            assert_eq!(read_tensor(&file, &format!("{place}.lora_a"), &[module.rank, module.columns()]), a);
            let found = read_tensor(&file, &format!("{place}.lora_b"), &[module.rows(), module.rank]);
            let turned = exported.architecture.name() == "llama"
                && (place.ends_with("attn_q.weight") || place.ends_with("attn_k.weight"));
            for (file_row, found) in found.chunks(module.rank).enumerate() {
                // Within a head: 0, D/2, 1, D/2 + 1, ...
                let (head, place) = (file_row / spec.head_dim(), file_row % spec.head_dim());
                let row = if turned {
                    head * spec.head_dim() + place % 2 * (spec.head_dim() / 2) + place / 2
                } else {
                    file_row
                };
                for (found, b) in found.iter().zip(&b[row * module.rank..][..module.rank]) {
                    let (scaled, expected) =
                        (alpha / module.rank as f64 * f64::from(*found), module.scale * f64::from(*b));
                    assert!(
                        (scaled - expected).abs() <= 3e-7 * expected.abs(),
                        "{name}: {scaled} {expected}"
                    );
                }
            }
        }
    }
}

/// The GGUF names of separate and of fused linears.
fn gguf_name(path: &str) -> String {
    let (layer, module) = path.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let name = match module {
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.qkv_proj" => "attn_qkv",
        "self_attn.o_proj" => "attn_output",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" | "mlp.gate_up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        other => panic!("{other}"),
    };
    format!("blk.{layer}.{name}.weight")
}

fn read_tensor(file: &GgufFile, name: &str, dims: &[usize]) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap_or_else(|| panic!("{name}"));
    assert_eq!(tensor.dims, dims, "{name}");
    let mut bytes = vec![0; tensor.bytes as usize];
    file.read_at(tensor, 0, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
}

#[test]
fn a_model_that_gguf_cannot_express_is_refused_and_leaves_nothing() {
    let refused = |case: Case, words: &[&str]| {
        let failure = case.try_export(MatrixType::F16).map(|_| ()).unwrap_err().to_string();
        words.iter().for_each(|word| assert!(failure.contains(word), "{word}: {failure}"));
        let left = fs::read_dir(case.folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(left.into_iter().all(|name| name == "base"), "{words:?}");
    };
    refused(
        Case::open("gemma2"),
        &["in layer 0 the scale of scores is 0.204", "which GGUF cannot express for `gemma2`"],
    );
    refused(Case::open("gemma3-text"), &["the layers with a sliding window are not periodic"]);
    let slides = |config: &mut Value| {
        config["use_sliding_window"] = json!(true);
        config["sliding_window"] = json!(8);
        config["max_window_layers"] = json!(1);
        config["layer_types"] = json!(null);
    };
    refused(
        Case::with_config("qwen2", slides),
        &["in layer 1 the sliding window is 8 instead of none, which GGUF cannot express for `qwen2`"],
    );
    refused(Case::open("llama-lslora"), &["is LS-LoRA, which cannot be exported"]);
    let case = Case::open("llama-gqa-tied");
    fs::remove_file(case.base.join("tokenizer.json")).unwrap();
    refused(case, &["has no `tokenizer.json`"]);
    let gemma2 = Case::with_config("gemma2", |config| config["query_pre_attn_scalar"] = json!(16));
    gemma2.export(MatrixType::F16);

    let lora = |case: &str| {
        let case = Case::open(case);
        let model = Model::open(&case.base).unwrap();
        let output = case.folder.path().join("a.gguf");
        let failure = export_lora(&case.adapter, &model, &output).unwrap_err().to_string();
        assert!(!output.exists());
        failure
    };
    let dora = lora("llama-dora");
    assert!(
        dora.contains("is dora: llama.cpp adapters do not support magnitudes")
            && dora.contains("`smidgen export --merged`"),
        "{dora}"
    );
    let biases = lora("qwen2-bias-all");
    assert!(biases.contains("trained biases") && biases.contains("`smidgen merge`"), "{biases}");
    let fourier = lora("llama-lslora");
    assert!(fourier.contains("is LS-LoRA") && !fourier.contains("--merged"), "{fourier}");
}
