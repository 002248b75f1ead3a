//! Merges into quantized bases, from the committed fixtures: every tensor is the decoded one plus s·B·A, rounded once,
//! and the output folder is a plain model with the same logits.

use super::difference::compare_logits;
use super::*;
use crate::model_files::numbers::read_f32;
use crate::plan::model::read_decoder;
use crate::session::adapted::logits_of;
use half::f16;
use smidgen_formats::model::Model;
use std::path::PathBuf;

fn fixture(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(case)
}

fn base_of(case: &str) -> PathBuf {
    let file = fixture(case).join("model.gguf");
    if file.exists() { file } else { fixture(case).join("model") }
}

const CASES: [&str; 8] = [
    "llama-bnb-nf4",
    "llama-bnb-fp4",
    "gguf-llama",
    "gguf-llama3-rope",
    "gguf-gemma2",
    "gguf-gemma3",
    "gguf-phi3",
    "gguf-kquants",
];

struct Case {
    adapter: AdapterFile,
    original: OriginalModel,
    folder: tempfile::TempDir,
}

impl Case {
    fn open(case: &str) -> Case {
        Case {
            adapter: AdapterFile::open(&fixture(case).join("adapter")).unwrap(),
            original: OriginalModel::open(&base_of(case)).unwrap(),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn merge(&self, name: &str, element: Option<Element>) -> (Merged, Model) {
        // Blocks of a few rows, so that seams are crossed.
        let options = MergeOptions { element, block_bytes: 2048, ..MergeOptions::default() };
        let output = self.folder.path().join(name);
        let merged = merge(&self.adapter, &self.original, &output, options).unwrap();
        (merged, Model::open_folder(&output).unwrap())
    }

    /// The decoded base plus s·B·A in f64.
    fn expected(&self, name: &str) -> Vec<f64> {
        let values = self.original.model().weight_values(name);
        let mut sum: Vec<f64> = values.into_iter().map(f64::from).collect();
        let modules = read_modules(&self.adapter).unwrap().modules;
        if let Some(module) = modules.iter().find(|module| format!("{}.weight", module.path) == name) {
            let (mut a, mut b) =
                (vec![0.0; module.rank * module.columns()], vec![0.0; module.rank * module.rows()]);
            read_f32(&module.a, 0, &mut a).unwrap();
            read_f32(&module.b, 0, &mut b).unwrap();
            assert!(b.iter().any(|value| *value != 0.0), "an adapter that adds nothing tests nothing");
            for (place, value) in sum.iter_mut().enumerate() {
                let (row, column) = (place / module.columns(), place % module.columns());
                let product = (0..module.rank).map(|k| {
                    f64::from(b[row * module.rank + k]) * f64::from(a[k * module.columns() + column])
                });
                *value += module.scale * product.sum::<f64>();
            }
        }
        sum
    }
}

#[test]
fn tensors_are_the_decoded_ones_plus_the_product_rounded_once() {
    for name in CASES {
        let case = Case::open(name);
        assert!(case.original.is_quantized(), "{name}");
        let (_, wide) = case.merge("f32", Some(Element::F32));
        let (merged, narrow) = case.merge("as-it-is", None);
        assert!(merged.folded.tensors > 0 && merged.notes.is_empty(), "{name}: {:?}", merged.notes);
        for tensor in case.original.tensors() {
            let place = tensor.name();
            let exact = wide.weight_values(place);
            for (found, expected) in exact.iter().zip(case.expected(place)) {
                let distance = (f64::from(*found) - expected).abs();
                assert!(distance <= 1e-6 * (1.0 + expected.abs()), "{name}: {place}: {found} {expected}");
            }
            let written = narrow.weight(place).unwrap().element_name();
            if tensor.is_quantized() {
                assert_eq!(written, "F16", "{name}: {place}");
            }
            if written == "F16" {
                let rounded: Vec<f32> = exact.iter().map(|value| f16::from_f32(*value).to_f32()).collect();
                assert_eq!(narrow.weight_values(place), rounded, "{name}: {place}");
            }
        }
        assert_eq!(wide.weight_names().len(), case.original.tensors().len(), "{name}");
    }
}

#[test]
fn the_config_describes_a_plain_model() {
    for name in CASES {
        let case = Case::open(name);
        let (_, model) = case.merge("out", None);
        let config = model.config();
        assert!(config.get("quantization_config").is_none(), "{name}");
        assert_eq!(config.get("dtype").or(config.get("torch_dtype")).unwrap(), "float16", "{name}");
        let (mut before, after) =
            (read_decoder(case.original.model()).unwrap(), read_decoder(&model).unwrap());
        before.stored = after.stored;
        assert_eq!(before, after, "{name}");
        let has_tokenizer = model.path().join("tokenizer.json").exists();
        assert_eq!(has_tokenizer, name.starts_with("gguf"), "{name}");
    }
}

#[test]
fn logits_differ_by_rounding_alone() {
    for name in CASES {
        let case = Case::open(name);
        case.merge("f32", Some(Element::F32));
        case.merge("f16", None);
        let compare = |output: &str| {
            compare_logits(&case.original, &case.adapter, &case.folder.path().join(output)).unwrap()
        };
        let (wide, narrow) = (compare("f32"), compare("f16"));
        assert!(wide.relative < 1e-4 && wide.mean <= wide.max, "{name}: {wide:?}");
        assert!(narrow.relative > wide.relative && narrow.relative < 5e-2, "{name}: {narrow:?}");
        // The adapter changes the logits; otherwise the comparison would test nothing.
        let ids: Vec<u32> = (3..40).collect();
        let with = logits_of(case.original.model(), Some(&case.adapter), &ids).unwrap();
        assert_ne!(with, logits_of(case.original.model(), None, &ids).unwrap(), "{name}");
    }
}
