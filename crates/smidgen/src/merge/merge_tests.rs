//! Merges of a tiny made-up model, compared with the formula in f64.
//! Blocks have a few rows and shards a few hundred bytes, so that tensors cross the boundaries of both.

use super::*;
use half::bf16;
use serde_json::Value;
use smidgen_formats::folder::ModelFolder;
use smidgen_formats::load::read_tensor_into;
use smidgen_formats::peft::{AdapterConfig, AdapterKey, AdapterTensor, Bias, FourierConfig, write_adapter};
use smidgen_formats::safetensors::write::{TensorSpec, pytorch_metadata, write_safetensors};
use std::fs;

const ROWS: usize = 12;
const COLUMNS: usize = 10;
const RANK: usize = 5;
const SMALL: MergeOptions =
    MergeOptions { element: None, max_shard_bytes: 600, block_bytes: 2 * 4 * 3 * COLUMNS };

/// Values that are neither round nor alike, between -1 and 1.
fn values(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((seed * 31 + i * 17 + 5) as f32 * 0.731).sin()).collect()
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Two linears with biases, one in BF16 and one in F32, and tensors that no adapter changes.
fn write_model(folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.json"), r#"{"model_type": "made-up", "torch_dtype": "bfloat16"}"#).unwrap();
    fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    fs::write(folder.join("README.md"), "a card").unwrap();
    let narrow =
        |values: Vec<f32>| values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect::<Vec<u8>>();
    let tensors = [
        ("layers.0.q.weight", Element::Bf16, vec![ROWS, COLUMNS], narrow(values(1, ROWS * COLUMNS))),
        ("layers.0.q.bias", Element::Bf16, vec![ROWS], narrow(values(2, ROWS))),
        ("layers.0.k.weight", Element::F32, vec![ROWS, COLUMNS], f32_bytes(&values(3, ROWS * COLUMNS))),
        ("layers.0.k.bias", Element::F32, vec![ROWS], f32_bytes(&values(4, ROWS))),
        ("embed.weight", Element::Bf16, vec![33, COLUMNS], narrow(values(5, 33 * COLUMNS))),
        ("counts", Element::I64, vec![3], vec![7; 24]),
        ("scalar", Element::F32, vec![], f32_bytes(&[0.3])),
    ];
    let specs: Vec<TensorSpec> = tensors
        .iter()
        .map(|(name, element, shape, _)| TensorSpec {
            name: name.to_string(),
            element: *element,
            shape: shape.clone(),
        })
        .collect();
    let path = folder.join("model.safetensors");
    write_safetensors(&path, &pytorch_metadata(), &specs, |i, w| w.write_all(&tensors[i].3)).unwrap();
}

fn write_made_adapter(folder: &Path, config: &AdapterConfig, tensors: &[(AdapterKey, Vec<usize>, Vec<f32>)]) {
    let listed: Vec<AdapterTensor> = tensors
        .iter()
        .map(|(key, shape, _)| AdapterTensor {
            key: key.clone(),
            element: Element::F32,
            shape: shape.clone(),
        })
        .collect();
    write_adapter(folder, config, &listed, |i, w| w.write_all(&f32_bytes(&tensors[i].2))).unwrap();
}

fn config() -> AdapterConfig {
    AdapterConfig::new(RANK, 7.0, &["q".to_string(), "k".to_string()])
}

fn pair(path: &str, seed: usize) -> [(AdapterKey, Vec<usize>, Vec<f32>); 2] {
    [
        (AdapterKey::LoraA(path.to_string()), vec![RANK, COLUMNS], values(seed, RANK * COLUMNS)),
        (AdapterKey::LoraB(path.to_string()), vec![ROWS, RANK], values(seed + 1, ROWS * RANK)),
    ]
}

fn read_values(model: &ModelFolder, name: &str) -> Vec<f32> {
    let tensor = model.tensor(name).unwrap();
    let mut bytes = vec![0; tensor.elements() as usize * 4];
    read_tensor_into(&tensor, 0, Element::F32, &mut bytes, &mut [0; 64]).unwrap();
    bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
}

fn read_raw(model: &ModelFolder, name: &str) -> Vec<u8> {
    let tensor = model.tensor(name).unwrap();
    let mut bytes = vec![0; tensor.bytes() as usize];
    tensor.read_at(0, &mut bytes).unwrap();
    bytes
}

/// W + s·B·A in f64; with magnitudes, rows are scaled to these norms.
fn formula(weight: &[f32], seed: usize, scale: f64, magnitude: Option<&[f32]>) -> Vec<f64> {
    let (a, b) = (values(seed, RANK * COLUMNS), values(seed + 1, ROWS * RANK));
    let mut sum: Vec<f64> = weight.iter().map(|w| f64::from(*w)).collect();
    for (row, values) in sum.chunks_mut(COLUMNS).enumerate() {
        for (column, value) in values.iter_mut().enumerate() {
            let product =
                (0..RANK).map(|k| f64::from(b[row * RANK + k]) * f64::from(a[k * COLUMNS + column]));
            *value += scale * product.sum::<f64>();
        }
        if let Some(magnitude) = magnitude {
            let norm = values.iter().map(|v| v * v).sum::<f64>().sqrt();
            values.iter_mut().for_each(|v| *v *= f64::from(magnitude[row]) / norm);
        }
    }
    sum
}

/// Every value within half a unit of the type, and the error of a few sums in f32.
#[track_caller]
fn close(found: &[f32], expected: &[f64], relative: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let distance = (f64::from(*found) - expected).abs();
        assert!(distance <= relative * expected.abs() + 1e-6, "{found} is not {expected}");
    }
}

const HALF_BF16: f64 = 1.0 / 256.0;
const HALF_F32: f64 = 1.0 / (1 << 24) as f64;

struct Made {
    folder: tempfile::TempDir,
}

impl Made {
    fn new(config: &AdapterConfig, tensors: &[(AdapterKey, Vec<usize>, Vec<f32>)]) -> Made {
        let made = Made { folder: tempfile::tempdir().unwrap() };
        write_model(&made.at("model"));
        write_made_adapter(&made.at("adapter"), config, tensors);
        made
    }

    fn at(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn try_merge(&self, output: &str, options: MergeOptions) -> Result<Merged, Failure> {
        let adapter = AdapterFile::open(&self.at("adapter")).unwrap();
        let original = OriginalModel::open(&self.at("model")).unwrap();
        merge(&adapter, &original, &self.at(output), options)
    }

    fn merge(&self, output: &str, options: MergeOptions) -> (Merged, ModelFolder) {
        let merged = self.try_merge(output, options).unwrap();
        (merged, ModelFolder::open(&self.at(output)).unwrap())
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.at(folder)).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn both() -> Vec<(AdapterKey, Vec<usize>, Vec<f32>)> {
    [pair("layers.0.q", 10), pair("layers.0.k", 20)].concat()
}

#[test]
fn lora_adds_the_product_and_copies_the_rest() {
    let made = Made::new(&config(), &both());
    let (merged, model) = made.merge("out", MergeOptions::default());
    assert_eq!((merged.modules, merged.biases, merged.shards), (2, 0, 1));
    assert_eq!(merged.folded, Tally { tensors: 2, bytes: 6 * (ROWS * COLUMNS) as u64 });
    assert_eq!((merged.copied.tensors, merged.converted), (5, Tally::default()));
    let original = ModelFolder::open(&made.at("model")).unwrap();
    let expect = |name: &str, seed| formula(&read_values(&original, name), seed, 1.4, None);
    close(&read_values(&model, "layers.0.q.weight"), &expect("layers.0.q.weight", 10), HALF_BF16);
    close(&read_values(&model, "layers.0.k.weight"), &expect("layers.0.k.weight", 20), HALF_F32);
    for name in ["layers.0.q.bias", "layers.0.k.bias", "embed.weight", "counts", "scalar"] {
        assert_eq!(read_raw(&model, name), read_raw(&original, name), "{name}");
        assert_eq!(model.tensor(name).unwrap().element(), original.tensor(name).unwrap().element());
    }
    assert_eq!(made.names("out"), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(made.names("."), ["adapter", "model", "out"]);
    assert_eq!(
        fs::read(made.at("out/config.json")).unwrap(),
        fs::read(made.at("model/config.json")).unwrap()
    );
}

#[test]
fn rslora_and_dora_follow_their_formulas() {
    let magnitude = |seed| -> Vec<f32> { values(seed, ROWS).iter().map(|v| v + 1.5).collect() };
    for use_rslora in [false, true] {
        let config = AdapterConfig { use_rslora, use_dora: true, ..config() };
        let mut tensors = both();
        for (path, seed) in [("layers.0.q", 30), ("layers.0.k", 40)] {
            tensors.push((AdapterKey::LoraMagnitude(path.to_string()), vec![ROWS], magnitude(seed)));
        }
        let made = Made::new(&config, &tensors);
        let (merged, model) = made.merge("out", SMALL);
        assert_eq!(merged.kind, if use_rslora { StoredKind::RsLoraDora } else { StoredKind::Dora });
        let original = ModelFolder::open(&made.at("model")).unwrap();
        let scale = 7.0 / if use_rslora { (RANK as f64).sqrt() } else { RANK as f64 };
        for (path, seed, relative) in [("layers.0.q", 10, HALF_BF16), ("layers.0.k", 20, HALF_F32)] {
            let name = format!("{path}.weight");
            let lengths = magnitude(seed + 20);
            let expected = formula(&read_values(&original, &name), seed, scale, Some(&lengths));
            close(&read_values(&model, &name), &expected, relative);
        }
    }
}

#[test]
fn trained_biases_replace_those_of_the_base() {
    let mut tensors = pair("layers.0.q", 10).to_vec();
    tensors.push((AdapterKey::BaseLayerBias("layers.0.q".to_string()), vec![ROWS], values(50, ROWS)));
    tensors.push((AdapterKey::ModuleBias("layers.0.k".to_string()), vec![ROWS], values(60, ROWS)));
    let made = Made::new(&AdapterConfig { bias: Bias::All, ..config() }, &tensors);
    let (merged, model) = made.merge("out", SMALL);
    assert_eq!((merged.modules, merged.biases), (1, 2));
    assert_eq!(read_values(&model, "layers.0.k.bias"), values(60, ROWS));
    let rounded: Vec<f32> = values(50, ROWS).iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
    assert_eq!(read_values(&model, "layers.0.q.bias"), rounded);
}

#[test]
fn neither_blocks_nor_shards_change_a_value() {
    let made = Made::new(&config(), &both());
    let (_, whole) = made.merge("whole", MergeOptions::default());
    for (output, block_bytes) in [("rows", 8 * COLUMNS), ("three", SMALL.block_bytes), ("less", 8)] {
        let (merged, model) = made.merge(output, MergeOptions { block_bytes, ..SMALL });
        // By element type and name: 556 bytes of I64 and F32, the embedding's 660, and 264 of BF16.
        assert_eq!((merged.shards, model.files().len()), (3, 3));
        for name in whole.tensor_names() {
            assert_eq!(read_raw(&model, name), read_raw(&whole, name), "{name}");
        }
    }
    let index: Value =
        serde_json::from_slice(&fs::read(made.at("rows/model.safetensors.index.json")).unwrap()).unwrap();
    let total: u64 = whole.tensor_names().map(|name| whole.tensor(name).unwrap().bytes()).sum();
    assert_eq!(index["metadata"]["total_size"], total);
}

#[test]
fn another_type_is_rounded_once_from_f32() {
    let made = Made::new(&config(), &both());
    let wide = MergeOptions { element: Some(Element::F32), ..SMALL };
    let (_, exact) = made.merge("f32", wide);
    let (merged, narrow) = made.merge("bf16", MergeOptions { element: Some(Element::Bf16), ..SMALL });
    assert_eq!((merged.folded.tensors, merged.converted.tensors, merged.copied.tensors), (2, 2, 3));
    for name in exact.tensor_names().filter(|name| *name != "counts") {
        assert_eq!(exact.tensor(name).unwrap().element(), Element::F32);
        let rounded: Vec<u8> =
            read_values(&exact, name).iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
        assert_eq!(read_raw(&narrow, name), rounded, "{name}");
    }
    assert_eq!(narrow.tensor("counts").unwrap().element(), Element::I64);
    assert_eq!(exact.config()["torch_dtype"], "float32");
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_and_leaves_nothing() {
    let refused = |config: &AdapterConfig, tensors: &[(AdapterKey, Vec<usize>, Vec<f32>)], words: &[&str]| {
        let made = Made::new(config, tensors);
        let failure = made.try_merge("out", SMALL).unwrap_err().to_string();
        words.iter().for_each(|word| assert!(failure.contains(word), "{word}: {failure}"));
        assert_eq!(made.names("."), ["adapter", "model"]);
    };
    let mut other = pair("layers.7.q", 10).to_vec();
    other.extend(pair("layers.0.k", 20));
    other[2].1 = vec![RANK, COLUMNS - 1];
    other[2].2.truncate(RANK * (COLUMNS - 1));
    let named = AdapterConfig { base_model_name_or_path: Some("some/model".to_string()), ..config() };
    refused(
        &named,
        &other,
        &[
            "does not fit the base model",
            "\n  `layers.0.k.weight` is [12, 10] in the base, the adapter is for [12, 9]",
            "\n  `layers.7.q.weight` is not in the base",
            "\n\nhint: the adapter was trained on `some/model`",
        ],
    );
    let head = AdapterConfig::new(RANK, 7.0, &["lm_head".to_string()]);
    refused(&head, &pair("lm_head", 10), &["it is tied to the embedding"]);
    let fourier = AdapterConfig { fourier: Some(FourierConfig::default()), ..config() };
    refused(&fourier, &both(), &["is LS-LoRA, which cannot be merged", "no weight W can do that"]);

    let made = Made::new(&config(), &both());
    fs::create_dir(made.at("out")).unwrap();
    let failure = made.try_merge("out", SMALL).unwrap_err().to_string();
    assert!(failure.contains("out` already exists"), "{failure}");
    assert!(made.names("out").is_empty());
}

#[test]
fn a_base_that_breaks_off_leaves_no_output() {
    let made = Made::new(&config(), &both());
    let adapter = AdapterFile::open(&made.at("adapter")).unwrap();
    let original = OriginalModel::open(&made.at("model")).unwrap();
    // The header is already read, so the missing rows are noticed only when they are read.
    let weights = fs::OpenOptions::new().write(true).open(made.at("model/model.safetensors")).unwrap();
    let bytes = weights.metadata().unwrap().len();
    weights.set_len(bytes - 100).unwrap();
    let failure = merge(&adapter, &original, &made.at("out"), SMALL).unwrap_err().to_string();
    assert!(failure.contains("model.safetensors`: "), "{failure}");
    assert_eq!(made.names("."), ["adapter", "model"]);
}
