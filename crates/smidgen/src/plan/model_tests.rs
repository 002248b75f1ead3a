//! The storage format of weights for each `model.base` and kind of model, and checkpoints that contradict their config.

use super::*;
use crate::four_bit::{Part, file_of, part, parts_of_file};
use expect_test::{Expect, expect};
use serde_json::{Value, json};
use smidgen_ir::Block;
use smidgen_recipe::ClosedWord;
use std::path::{Path, PathBuf};

const BASES: [BaseFormat; 8] = [
    BaseFormat::AsStored,
    BaseFormat::F32,
    BaseFormat::Bf16,
    BaseFormat::F16,
    BaseFormat::Fp8,
    BaseFormat::Int8,
    BaseFormat::Nf4,
    BaseFormat::Nf4Single,
];

fn fixture(place: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(place)
}

fn open(path: &Path) -> (Model, DecoderSpec) {
    let model = Model::open(path).unwrap_or_else(|error| panic!("{error}"));
    let spec = read_decoder(&model).unwrap_or_else(|failure| panic!("{failure}"));
    (model, spec)
}

fn storage(path: &Path, base: BaseFormat) -> HashMap<String, Storage> {
    let (model, spec) = open(path);
    build_storage(base, &spec, &model)
}

/// A table with a line per tensor of the first layer or of no layer, and a column per `model.base`.
fn check(place: &str, expected: Expect) {
    let (_, spec) = open(&fixture(place));
    let by_base = BASES.map(|base| storage(&fixture(place), base));
    let mut table = String::new();
    for tensor in spec.tensors().into_iter().filter(|tensor| tensor.layer.is_none_or(|layer| layer == 0)) {
        let columns = by_base.each_ref().map(|storage| format!("{:<11}", storage[&tensor.name].to_string()));
        let name = tensor.name.replace("model.layers.0.", "0.");
        table.push_str(format!("{name:<36}{}", columns.concat()).trim_end());
        table.push('\n');
    }
    expected.assert_eq(&table);
}

#[test]
fn every_base_is_checked() {
    assert_eq!(BASES, BaseFormat::ALL);
}

#[test]
fn a_plain_model_with_biases() {
    check(
        "qwen2-nf4/model",
        expect![[r#"
            model.embed_tokens.weight           bf16       f32        bf16       f16        bf16       bf16       bf16       bf16
            0.self_attn.q_proj.weight           bf16       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.self_attn.q_proj.bias             bf16       f32        bf16       f16        bf16       bf16       bf16       bf16
            0.self_attn.k_proj.weight           bf16       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.self_attn.k_proj.bias             bf16       f32        bf16       f16        bf16       bf16       bf16       bf16
            0.self_attn.v_proj.weight           bf16       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.self_attn.v_proj.bias             bf16       f32        bf16       f16        bf16       bf16       bf16       bf16
            0.self_attn.o_proj.weight           bf16       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.mlp.gate_proj.weight              bf16       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.mlp.up_proj.weight                bf16       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.mlp.down_proj.weight              bf16       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.input_layernorm.weight            bf16       f32        bf16       f16        bf16       bf16       bf16       bf16
            0.post_attention_layernorm.weight   bf16       f32        bf16       f16        bf16       bf16       bf16       bf16
            model.norm.weight                   bf16       f32        bf16       f16        bf16       bf16       bf16       bf16
        "#]],
    );
}

#[test]
fn a_4_bit_model() {
    check(
        "llama-bnb-nf4/model",
        expect![[r#"
            model.embed_tokens.weight           bf16       f32        bf16       f16        bf16       bf16       bf16       bf16
            0.self_attn.q_proj.weight           nf4        f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.self_attn.k_proj.weight           nf4        f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.self_attn.v_proj.weight           nf4        f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.self_attn.o_proj.weight           nf4        f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.mlp.gate_proj.weight              nf4        f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.mlp.up_proj.weight                nf4        f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.mlp.down_proj.weight              nf4        f32        bf16       f16        fp8        int8       nf4        nf4-single
            lm_head.weight                      bf16       f32        bf16       f16        bf16       bf16       bf16       bf16
            0.input_layernorm.weight            bf16       f32        bf16       f16        bf16       bf16       bf16       bf16
            0.post_attention_layernorm.weight   bf16       f32        bf16       f16        bf16       bf16       bf16       bf16
            model.norm.weight                   bf16       f32        bf16       f16        bf16       bf16       bf16       bf16
        "#]],
    );
}

#[test]
fn a_gguf_model_of_several_block_formats() {
    check(
        "gguf-kquants/model.gguf",
        expect![[r#"
            model.embed_tokens.weight           q6_k       f32        bf16       f16        q6_k       q6_k       q6_k       q6_k
            0.self_attn.q_proj.weight           q4_k       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.self_attn.k_proj.weight           q5_k       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.self_attn.v_proj.weight           q6_k       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.self_attn.o_proj.weight           q4_k       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.mlp.gate_proj.weight              q4_k       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.mlp.up_proj.weight                q5_k       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.mlp.down_proj.weight              q6_k       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.input_layernorm.weight            f32        f32        bf16       f16        f32        f32        f32        f32
            0.post_attention_layernorm.weight   f32        f32        bf16       f16        f32        f32        f32        f32
            model.norm.weight                   f32        f32        bf16       f16        f32        f32        f32        f32
        "#]],
    );
}

/// Norms are f32 whatever their type in the file, because the 1 that the file adds to them is subtracted.
#[test]
fn a_gguf_model_whose_norms_are_shifted() {
    check(
        "gguf-gemma2/model.gguf",
        expect![[r#"
            model.embed_tokens.weight           q8_0       f32        bf16       f16        q8_0       q8_0       q8_0       q8_0
            0.self_attn.q_proj.weight           q8_0       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.self_attn.k_proj.weight           q8_0       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.self_attn.v_proj.weight           q8_0       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.self_attn.o_proj.weight           q8_0       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.mlp.gate_proj.weight              q8_0       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.mlp.up_proj.weight                q8_0       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.mlp.down_proj.weight              q8_0       f32        bf16       f16        fp8        int8       nf4        nf4-single
            0.input_layernorm.weight            f32        f32        bf16       f16        f32        f32        f32        f32
            0.post_attention_layernorm.weight   f32        f32        bf16       f16        f32        f32        f32        f32
            0.pre_feedforward_layernorm.weight  f32        f32        bf16       f16        f32        f32        f32        f32
            0.post_feedforward_layernorm.weight f32        f32        bf16       f16        f32        f32        f32        f32
            model.norm.weight                   f32        f32        bf16       f16        f32        f32        f32        f32
        "#]],
    );
}

/// No head, embedding, norm or bias is quantized.
#[test]
fn only_linears_of_layers_are_quantized_at_load() {
    for place in [
        "llama-gqa-tied/model",
        "llama-bias-linear/model",
        "phi3/model",
        "gemma3-text/model",
        "llama-bnb-fp4/model",
        "gguf-qwen3/model.gguf",
    ] {
        let (_, spec) = open(&fixture(place));
        let stored = storage(&fixture(place), BaseFormat::AsStored);
        for (base, quantized) in [
            (BaseFormat::Fp8, Storage::Fp8Rows),
            (BaseFormat::Int8, Storage::Int8Rows),
            (BaseFormat::Nf4, Storage::Bnb4 { code: Code4::Nf4, double: true }),
            (BaseFormat::Nf4Single, Storage::Bnb4 { code: Code4::Nf4, double: false }),
        ] {
            let found = storage(&fixture(place), base);
            for tensor in spec.tensors() {
                let name = &tensor.name;
                let is_linear = name.contains("_proj.weight");
                let expected = if is_linear { quantized } else { stored[name] };
                assert_eq!(found[name], expected, "{place}: {name} with {base}");
            }
            let linears = found.values().filter(|storage| **storage == quantized).count();
            let in_layers = spec.linears().len() - 1;
            assert_eq!(linears, in_layers, "{place} with {base}");
        }
    }
}

/// A folder that has only `config.json`.
fn config_alone(config: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

fn config_of(place: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(place).join("config.json")).unwrap()).unwrap()
}

#[test]
fn a_config_alone_gives_the_storage_of_a_4_bit_model() {
    for place in ["llama-bnb-nf4/model", "llama-bnb-fp4/model", "qwen2-nf4/model"] {
        let alone = config_alone(&config_of(place));
        for base in BASES {
            assert_eq!(storage(alone.path(), base), storage(&fixture(place), base), "{place} with {base}");
        }
    }
}

#[test]
fn a_missing_key_means_the_default_of_bitsandbytes() {
    let linear = "model.layers.0.mlp.up_proj.weight";
    let stored = |quantization: Option<Value>| {
        let mut config = config_of("llama-bnb-nf4/model");
        config["quantization_config"] = quantization.map_or(Value::Null, |mut keys| {
            keys["quant_method"] = json!("bitsandbytes");
            keys
        });
        storage(config_alone(&config).path(), BaseFormat::AsStored)[linear].to_string()
    };
    assert_eq!(stored(Some(json!({"load_in_4bit": true}))), "fp4-single");
    assert_eq!(stored(Some(json!({"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}))), "nf4-single");
    assert_eq!(stored(Some(json!({"load_in_4bit": true, "bnb_4bit_use_double_quant": true}))), "fp4");
    assert_eq!(stored(None), "bf16");
}

const Q: &str = "model.layers.0.self_attn.q_proj.weight";

/// Checks a fixture after editing its tensors.
fn checked(place: &str, edit: impl FnOnce(&mut Vec<Part>)) -> Result<(), Failure> {
    let mut parts = parts_of_file(&std::fs::read(fixture(place).join("model.safetensors")).unwrap());
    edit(&mut parts);
    let folder = config_alone(&config_of(place));
    std::fs::write(folder.path().join("model.safetensors"), file_of(&parts)).unwrap();
    let (model, spec) = open(folder.path());
    let place = folder.path().to_string_lossy().into_owned();
    check_weights(&spec, &model).map_err(|mut failure| {
        failure.message = failure.message.replace(&place, "FOLDER");
        failure
    })
}

#[test]
fn the_fixtures_fit_their_configs() {
    for place in ["llama-bnb-nf4/model", "llama-bnb-fp4/model", "qwen2-nf4/model", "llama-int8/model"] {
        checked(place, |_| {}).unwrap();
    }
    for place in ["gguf-kquants/model.gguf", "gguf-gemma3/model.gguf"] {
        let (model, spec) = open(&fixture(place));
        check_weights(&spec, &model).unwrap();
    }
}

#[test]
fn quantization_parts_without_a_state_are_unknown_tensors() {
    let failure = checked("llama-gqa-tied/model", |parts| {
        parts.push(part(format!("{Q}.absmax"), "U8", &[3], vec![0; 3]));
    })
    .unwrap_err();
    expect![[r#"
        error: config.json contradicts the weights in `FOLDER`
          `model.layers.0.self_attn.q_proj.weight.absmax` is in the file but not in the config's model

        hint: config.json and the safetensors files have to come from the same model"#]]
    .assert_eq(&failure.to_string());
    let failure = checked("llama-bnb-nf4/model", |parts| {
        parts.retain(|part| !(part.is_state() && part.name.starts_with(Q)));
    })
    .unwrap_err();
    expect![[r#"
        error: config.json contradicts the weights in `FOLDER`
          `model.layers.0.self_attn.q_proj.weight` is [968, 1], the config says [44, 44]
          `model.layers.0.self_attn.q_proj.weight.absmax` is in the file but not in the config's model
          `model.layers.0.self_attn.q_proj.weight.nested_absmax` is in the file but not in the config's model
          `model.layers.0.self_attn.q_proj.weight.nested_quant_map` is in the file but not in the config's model
          `model.layers.0.self_attn.q_proj.weight.quant_map` is in the file but not in the config's model

        hint: config.json and the safetensors files have to come from the same model"#]].assert_eq(&failure.to_string());
}

#[test]
fn a_4_bit_matrix_of_another_shape_contradicts_the_config() {
    let failure = checked("llama-bnb-nf4/model", |parts| {
        let state = parts.iter_mut().find(|part| part.is_state() && part.name.starts_with(Q)).unwrap();
        let mut json: Value = serde_json::from_slice(&state.data).unwrap();
        assert_eq!(json["shape"], json!([44, 44]));
        json["shape"] = json!([1936, 1]);
        state.data = json.to_string().into_bytes();
        state.make_vector();
    })
    .unwrap_err();
    expect![[r#"
        error: config.json contradicts the weights in `FOLDER`
          `model.layers.0.self_attn.q_proj.weight` is [1936, 1], the config says [44, 44]

        hint: config.json and the safetensors files have to come from the same model"#]]
    .assert_eq(&failure.to_string());
}

#[test]
fn unsupported_element_types_are_named() {
    let failure = checked("llama-gqa-tied/model", |parts| {
        for part in parts.iter_mut().filter(|part| part.name == Q) {
            part.dtype = "U32";
        }
    })
    .unwrap_err();
    expect![[r#"
        error: config.json contradicts the weights in `FOLDER`
          `model.layers.0.self_attn.q_proj.weight` is stored as U32

        hint: config.json and the safetensors files have to come from the same model"#]]
    .assert_eq(&failure.to_string());
}

/// Kernels decode matrices; norms and biases are read as plain numbers.
#[test]
fn matrices_may_have_any_storage_and_vectors_only_a_plain_one() {
    let (matrix, vector) = (Shape::matrix(4, 32), Shape::vector(32));
    for storage in
        [Storage::Gguf(Block::Q8_0), Storage::Int8Rows, Storage::Bnb4 { code: Code4::Fp4, double: true }]
    {
        assert!(is_trainable_on(&matrix, Some(storage)));
        assert!(!is_trainable_on(&vector, Some(storage)));
    }
    for storage in [Storage::F32, Storage::Plain(DType::Bf16), Storage::Plain(DType::F16)] {
        assert!(is_trainable_on(&matrix, Some(storage)) && is_trainable_on(&vector, Some(storage)));
    }
    assert!(!is_trainable_on(&matrix, None));
}
