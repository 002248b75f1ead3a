//! Tests of adapter folders: written and read back, matched against a recipe, and refused for each reason.
//! These adapters have one or two tiny modules; only their shapes matter.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use super::*;
use crate::element::Element;
use crate::safetensors::SafetensorsFile;
use crate::safetensors::write::{TensorSpec, pytorch_metadata, write_safetensors};

const Q: &str = "model.layers.0.self_attn.q_proj";

fn tensor(key: AdapterKey, shape: &[usize]) -> AdapterTensor {
    AdapterTensor { key, element: Element::F32, shape: shape.to_vec() }
}

/// A and B of one module that maps 6 channels to 4.
fn pair(path: &str, rank: usize) -> [AdapterTensor; 2] {
    [
        tensor(AdapterKey::LoraA(path.to_string()), &[rank, 6]),
        tensor(AdapterKey::LoraB(path.to_string()), &[4, rank]),
    ]
}

fn config(rank: usize) -> AdapterConfig {
    AdapterConfig::new(rank, 16.0, &["q_proj".to_string(), "v_proj".to_string()])
}

fn zeros(tensors: &[AdapterTensor]) -> impl FnMut(usize, &mut dyn Write) -> io::Result<()> {
    let bytes: Vec<u64> = tensors.iter().map(|t| t.element.tensor_bytes(&t.shape).unwrap()).collect();
    move |position, writer| writer.write_all(&vec![0; bytes[position] as usize])
}

fn written(config: &AdapterConfig, tensors: &[AdapterTensor]) -> (tempfile::TempDir, AdapterFile) {
    let folder = tempfile::tempdir().unwrap();
    write_adapter(folder.path(), config, tensors, zeros(tensors)).unwrap();
    let file = AdapterFile::open(folder.path()).unwrap();
    (folder, file)
}

fn expected(tensors: &[AdapterTensor]) -> Vec<ExpectedTensor> {
    let expect = |t: &AdapterTensor| ExpectedTensor { key: t.key.clone(), shape: t.shape.clone() };
    tensors.iter().map(expect).collect()
}

/// Checks the text of the mismatch below its first line.
#[track_caller]
fn mismatch(recipe: &[AdapterTensor], adapter: &[AdapterTensor], adapter_config: &AdapterConfig, text: &str) {
    let (_folder, file) = written(adapter_config, adapter);
    let error = match_adapter(&expected(recipe), &file).unwrap_err().to_string();
    let (first, rest) = error.split_once('\n').unwrap();
    assert_eq!(first, format!("the adapter in `{}` does not fit the recipe", file.path().display()));
    assert_eq!(rest, text);
}

#[test]
fn an_adapter_reads_back_with_mixed_elements() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("runs/1");
    let mut tensors = pair(Q, 2).to_vec();
    tensors[0].element = Element::Bf16;
    tensors.push(AdapterTensor {
        key: AdapterKey::BaseTensor("lm_head.weight".to_string()),
        element: Element::F16,
        shape: vec![5],
    });
    let data = |position: usize| -> Vec<u8> {
        let t = &tensors[position];
        let bytes = t.element.tensor_bytes(&t.shape).unwrap();
        (0..bytes).map(|i| i as u8 * 3 + position as u8).collect()
    };
    write_adapter(&at, &config(2), &tensors, |position, w| w.write_all(&data(position))).unwrap();

    let names: Vec<_> = fs::read_dir(&at).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    let file = AdapterFile::open(&at).unwrap();
    assert_eq!(file.config(), &config(2));
    assert_eq!(file.tensors().len(), 3);
    let found = match_adapter(&expected(&tensors), &file).unwrap();
    for (position, (wanted, found)) in tensors.iter().zip(&found).enumerate() {
        assert_eq!(found.name(), wanted.key.to_string());
        assert_eq!(found.element(), wanted.element);
        let mut read = vec![0; found.bytes() as usize];
        found.read_at(0, &mut read).unwrap();
        assert_eq!(read, data(position));
    }
    let raw = SafetensorsFile::open(&at.join("adapter_model.safetensors")).unwrap();
    assert_eq!(raw.metadata()["format"], "pt");
}

#[test]
fn a_hint_names_another_rank() {
    mismatch(
        &pair(Q, 16),
        &pair(Q, 8),
        &config(8),
        "  2 with another shape: \
         `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` is [8, 6], expected [16, 6], \
         `base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight` is [4, 8], expected [4, 16]\
         \n\nhint: the adapter has rank 8, the recipe says 16",
    );
    let mut by_pattern = config(8);
    by_pattern.rank_pattern = vec![("v_proj".to_string(), 4)];
    let (_folder, file) = written(&by_pattern, &[pair(Q, 8), pair("v_proj", 4)].concat());
    let recipe = expected(&[pair(Q, 16), pair("v_proj", 16)].concat());
    let error = match_adapter(&recipe, &file).unwrap_err();
    assert_eq!(error.hints, ["the adapter's ranks differ from module to module, or the recipe's do"]);
}

#[test]
fn all_missing_and_unexpected_keys_are_in_one_error_with_the_modules() {
    mismatch(
        &pair("q_proj", 2),
        &pair("v_proj", 2),
        &config(2),
        "  2 missing: `base_model.model.q_proj.lora_A.weight`, `base_model.model.q_proj.lora_B.weight`\
         \n  2 unexpected: `base_model.model.v_proj.lora_A.weight`, `base_model.model.v_proj.lora_B.weight`\
         \n\nhint: the adapter targets `v_proj`, the recipe targets `q_proj`",
    );
}

#[test]
fn long_lists_are_cut_after_eight() {
    let layers = |count: usize| -> Vec<AdapterTensor> {
        (0..count).flat_map(|layer| pair(&format!("layers.{layer}.q_proj"), 2)).collect()
    };
    let (_folder, file) = written(&config(2), &layers(1));
    let error = match_adapter(&expected(&layers(7)), &file).unwrap_err();
    assert_eq!(error.missing.len(), 12);
    let text = error.to_string();
    assert!(text.contains("\n  12 missing: "), "{text}");
    assert!(text.ends_with("`base_model.model.layers.4.q_proj.lora_B.weight` and 4 more"), "{text}");
}

#[test]
fn a_hint_names_dora_on_one_side() {
    let plain = pair(Q, 2).to_vec();
    let mut dora = plain.clone();
    dora.push(tensor(AdapterKey::LoraMagnitude(Q.to_string()), &[4]));
    let key = "`base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector`";
    mismatch(
        &dora,
        &plain,
        &config(2),
        &format!("  1 missing: {key}\n\nhint: the recipe uses DoRA, the adapter does not"),
    );
    mismatch(
        &plain,
        &dora,
        &config(2),
        &format!("  1 unexpected: {key}\n\nhint: the adapter uses DoRA, the recipe does not"),
    );
}

#[test]
fn a_hint_names_another_base_model() {
    let mut wide = pair(Q, 2);
    wide[0].shape = vec![2, 7];
    let mut named = config(2);
    named.base_model_name_or_path = Some("some/other".to_string());
    mismatch(
        &pair(Q, 2),
        &wide,
        &named,
        "  1 with another shape: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` \
         is [2, 7], expected [2, 6]\n\nhint: the adapter was made for another base model, `some/other`",
    );
}

#[test]
fn a_hint_names_keys_without_the_prefix() {
    mismatch(
        &[],
        &[tensor(AdapterKey::Foreign("q_proj.lora_A".to_string()), &[2])],
        &config(2),
        "  1 unexpected: `q_proj.lora_A`\
         \n\nhint: keys without the prefix `base_model.model.` are not written by PEFT",
    );
}

#[test]
fn folders_without_an_adapter_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let refused = |at: &Path, expected: &str| {
        let text = AdapterFile::open(at).unwrap_err().to_string();
        assert_eq!(text.replace(&at.display().to_string(), "DIR"), expected);
    };
    refused(&at.join("no"), "the adapter folder `DIR` does not exist");
    refused(at, "`DIR` has no `adapter_config.json`; give the folder of a PEFT adapter");
    fs::write(at.join("config.json"), "{}").unwrap();
    refused(at, "`DIR` holds a model and not an adapter: it has `config.json` but no `adapter_config.json`");
    refused(
        &at.join("config.json"),
        "`DIR` is not a folder; give the folder that holds `adapter_config.json`",
    );
    fs::write(at.join("adapter_config.json"), r#"{"peft_type":"LORA"}"#).unwrap();
    refused(at, "`DIR` has no `adapter_model.safetensors`");
    fs::write(at.join("adapter_model.bin"), "").unwrap();
    refused(
        at,
        "`DIR` has only `adapter_model.bin`, which is pickled; convert it with `python -c \
         \"import torch, safetensors.torch as s; s.save_file(torch.load('DIR/adapter_model.bin', map_location='cpu', \
         weights_only=True), 'DIR/adapter_model.safetensors', {'format': 'pt'})\"`",
    );
    fs::write(at.join("adapter_model.safetensors"), "short").unwrap();
    refused(
        at,
        "`DIR/adapter_model.safetensors`: the file is truncated: 5 of at least 8 bytes; download it again",
    );
    let spec = TensorSpec { name: "x".to_string(), element: Element::I8, shape: vec![1] };
    let weights = at.join("adapter_model.safetensors");
    write_safetensors(&weights, &pytorch_metadata(), &[spec], |_, w| w.write_all(&[0])).unwrap();
    refused(
        at,
        "tensor `x` in `DIR/adapter_model.safetensors` is of type I8; adapters may be F32, F16 or BF16",
    );
    fs::write(at.join("adapter_config.json"), "{}").unwrap();
    refused(
        at,
        "`DIR/adapter_config.json` is not the expected JSON: missing field `peft_type` at line 1 column 2",
    );
}

#[test]
fn tensors_that_disagree_with_the_config_are_not_written() {
    let refused = |config: &AdapterConfig, tensors: &[AdapterTensor], expected: &str| {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("a");
        let error = write_adapter(&at, config, tensors, zeros(tensors)).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert!(!at.exists());
    };
    refused(
        &config(4),
        &pair("q_proj", 2),
        "tensor `base_model.model.q_proj.lora_A.weight` of shape [2, 6] \
         does not have rank 4, which the config sets for its module",
    );
    refused(
        &config(2),
        &[tensor(AdapterKey::LoraA("q_proj".to_string()), &[2])],
        "tensor `base_model.model.q_proj.lora_A.weight` of shape [2] \
         does not have rank 2, which the config sets for its module",
    );
    refused(
        &config(2),
        &pair("model.o_proj", 2),
        "the config's `target_modules` do not include module `model.o_proj`, which has tensors",
    );
    let mut integers = pair("q_proj", 2);
    integers[1].element = Element::I32;
    refused(
        &config(2),
        &integers,
        "tensor `base_model.model.q_proj.lora_B.weight` is of type I32; adapters may be F32, F16 or BF16",
    );
    let mut unsorted = config(2);
    unsorted.alpha_pattern = vec![("q_proj".to_string(), 1.0), ("0.q_proj".to_string(), 2.0)];
    refused(
        &unsorted,
        &pair("layers.0.q_proj", 2),
        "`alpha_pattern` sets 1 for module `layers.0.q_proj`, but 2 once its keys are sorted, as they are in the file; \
         make the keys mutually exclusive",
    );
    let mut broken = config(2);
    broken.rank_pattern = vec![("(".to_string(), 2)];
    let folder = tempfile::tempdir().unwrap();
    let error = write_adapter(folder.path(), &broken, &[], |_, _| Ok(())).unwrap_err();
    assert!(matches!(error, WriteAdapterError::Pattern(_)), "{error}");
}

#[test]
fn a_source_that_fails_leaves_both_old_files() {
    let tensors = pair("q_proj", 2);
    let (folder, _file) = written(&config(2), &tensors);
    let snapshot = || {
        ["adapter_config.json", "adapter_model.safetensors"]
            .map(|name| fs::read(folder.path().join(name)).unwrap())
    };
    let before = snapshot();
    let mut later = config(2);
    later.lora_alpha = 64.0;
    let error = write_adapter(folder.path(), &later, &tensors, |position, w| match position {
        0 => w.write_all(&[1; 48]),
        _ => Err(io::Error::new(io::ErrorKind::StorageFull, "disk full")),
    })
    .unwrap_err();
    assert!(error.to_string().ends_with("disk full"), "{error}");
    assert_eq!(snapshot(), before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn unsupported_settings_are_refused_with_the_reason() {
    let (folder, _file) = written(&config(2), &pair(Q, 2));
    let text = r#"{"peft_type":"LORA","fan_in_fan_out":true,"use_qalora":true}"#;
    fs::write(folder.path().join("adapter_config.json"), text).unwrap();
    let error = AdapterFile::open(folder.path()).unwrap_err().to_string();
    assert_eq!(
        error.replace(&folder.path().display().to_string(), "DIR"),
        "the adapter in `DIR` cannot be read as LoRA\
         \n  `use_qalora`: the input is averaged in groups before A\
         \n  `fan_in_fan_out`: the base weights are stored transposed, as GPT-2's are"
    );
}

#[test]
fn the_adapter_in_a_run_folder_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (at, tensors) = (folder.path().join("adapter"), pair(Q, 2));
    write_adapter(&at, &config(2), &tensors, zeros(&tensors)).unwrap();
    assert_eq!(AdapterFile::open_adapter_or_run(folder.path()).unwrap().path(), at);
    assert_eq!(AdapterFile::open_adapter_or_run(&at).unwrap().path(), at);
    let error = AdapterFile::open_adapter_or_run(Path::new("absent")).unwrap_err().to_string();
    assert_eq!(error, "the adapter folder `absent` does not exist");
}

#[test]
fn both_names_of_an_adapted_modules_bias_are_read() {
    let at = |path: &str| path.to_string();
    let mut old = pair(Q, 2).to_vec();
    old.push(tensor(AdapterKey::ModuleBias(at(Q)), &[4]));
    old.push(tensor(AdapterKey::ModuleBias(at("model.norm")), &[6]));
    let mut current = pair(Q, 2).to_vec();
    current.push(tensor(AdapterKey::BaseLayerBias(at(Q)), &[4]));
    current.push(tensor(AdapterKey::ModuleBias(at("model.norm")), &[6]));
    for tensors in [&old, &current] {
        let (_folder, file) = written(&config(2), tensors);
        assert_eq!(match_adapter(&expected(&current), &file).unwrap().len(), 4);
        let read = read_modules(&file).unwrap();
        assert!(read.modules[0].bias.is_some());
        assert_eq!(read.biases.len(), 1);
        assert_eq!(read.biases[0].0, "model.norm");
    }
    let key = "`base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias`";
    mismatch(
        &current[..3],
        &pair(Q, 2),
        &config(2),
        &format!("  1 missing: {key}\n\nhint: the recipe uses trained biases, the adapter does not"),
    );
}

/// A and B, coefficients and a scalar sigma.
fn ls_lora(path: &str, rank: usize) -> Vec<AdapterTensor> {
    let mut tensors = pair(path, rank).to_vec();
    tensors.push(tensor(AdapterKey::FourierWeight(path.to_string()), &[4]));
    tensors.push(tensor(AdapterKey::FourierSigma(path.to_string()), &[]));
    tensors
}

#[test]
fn ls_lora_reads_back_with_its_scalars() {
    let fourier = AdapterConfig { fourier: Some(FourierConfig::default()), ..config(2) };
    let (_folder, file) = written(&fourier, &ls_lora(Q, 2));
    assert_eq!(file.config().kind(), StoredKind::LsLora);
    let found = match_adapter(&expected(&ls_lora(Q, 2)), &file).unwrap();
    assert_eq!((found[3].shape(), found[3].bytes(), found[3].elements()), (&[][..], 4, 1));
    let read = read_modules(&file).unwrap();
    assert_eq!(read.modules[0].fourier.as_ref().unwrap().1.name(), found[3].name());
    let error = match_adapter(&expected(&pair(Q, 2)), &file).unwrap_err();
    assert_eq!(error.hints, ["the adapter uses LS-LoRA, the recipe does not"]);
}

#[test]
fn modules_are_sorted_by_layer_and_have_their_scales() {
    let mut by_pattern = config(2);
    by_pattern.alpha_pattern = vec![("v_proj".to_string(), 3.0)];
    by_pattern.use_rslora = true;
    by_pattern.rank_pattern = vec![("v_proj".to_string(), 4)];
    let tensors =
        [pair("m.10.x.q_proj", 2), pair("m.2.x.v_proj", 4), pair("v_proj", 4), pair("m.2.x.q_proj", 2)]
            .concat();
    let (_folder, file) = written(&by_pattern, &tensors);
    let read = read_modules(&file).unwrap();
    let found: Vec<_> = (read.modules.iter())
        .map(|m| (split_layer(&m.path), m.rank, m.alpha, m.rows(), m.columns()))
        .collect();
    assert_eq!(
        found,
        [
            ((Some(2), "x.q_proj"), 2, 16.0, 4, 6),
            ((Some(2), "x.v_proj"), 4, 3.0, 4, 6),
            ((Some(10), "x.q_proj"), 2, 16.0, 4, 6),
            ((None, "v_proj"), 4, 3.0, 4, 6),
        ]
    );
    assert_eq!(read.modules[1].scale, 1.5);
}

#[test]
fn all_problems_with_modules_are_reported_together() {
    let incomplete = |config: &AdapterConfig, tensors: &[AdapterTensor], expected: &str| {
        let (_folder, file) = written(config, tensors);
        let error = read_modules(&file).unwrap_err().to_string();
        let (_, problems) = error.split_once('\n').unwrap_or_default();
        assert_eq!(problems, expected);
    };
    incomplete(&config(2), &[], "  there is no `lora_A` tensor");
    incomplete(&config(2), &pair("q_proj", 2)[..1], "  `base_model.model.q_proj.lora_B.weight` is missing");
    let dora = AdapterConfig { use_dora: true, ..config(2) };
    incomplete(
        &dora,
        &ls_lora("q_proj", 2),
        "  `base_model.model.q_proj.lora_magnitude_vector` is missing\
         \n  `base_model.model.q_proj.fourier_params.weight` belongs to LS-LoRA, the config says `dora`\
         \n  `base_model.model.q_proj.fourier_params.sigma` belongs to LS-LoRA, the config says `dora`",
    );
    let mut magnitude = pair("q_proj", 2).to_vec();
    magnitude.push(tensor(AdapterKey::LoraMagnitude("q_proj".to_string()), &[5]));
    incomplete(&dora, &magnitude, "  `base_model.model.q_proj.lora_magnitude_vector` is [5], expected [4]");
    incomplete(
        &config(2),
        &magnitude,
        "  `base_model.model.q_proj.lora_magnitude_vector` belongs to DoRA, the config says `lora`",
    );
    let mut more = pair("q_proj", 2).to_vec();
    more.push(tensor(AdapterKey::BaseTensor("lm_head.weight".to_string()), &[2]));
    more.push(tensor(AdapterKey::LoraEmbeddingA("embed".to_string()), &[2, 3]));
    incomplete(
        &config(2),
        &more[..3],
        "  `base_model.model.lm_head.weight` is a tensor of the base model that `modules_to_save` does not name, the config \
         says `lora`",
    );
    let saving = AdapterConfig { modules_to_save: Some(vec!["lm_head".to_string()]), ..config(2) };
    let (_folder, file) = written(&saving, &more[..3]);
    let read = read_modules(&file).unwrap();
    assert_eq!(read.saved.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["lm_head.weight"]);
    incomplete(
        &saving,
        &more[..2],
        "  `modules_to_save` names `lm_head`, but the adapter has no tensor of it",
    );
}
