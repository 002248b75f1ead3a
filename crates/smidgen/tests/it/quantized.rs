//! Models in other storages through the program: GGUF files, 4-bit checkpoints, plain ones quantized at load.
//!
//! What is planned, that it trains, and what is said of damaged ones: exit code 1, the file and the tensor by name,
//! nothing written. Numbers are compared with PyTorch in `parity.rs`.

use crate::four_bit::{Part, file_of, floats, part, parts_of_file, parts_of_file_with};
use crate::scratch::Scratch;
use expect_test::{Expect, expect};
use serde_json::{Value, json};
use smidgen_ir::quant::fp8;
use smidgen_ir::storage::FP8_BLOCK;

const WEIGHTS: &str = "model/model.safetensors";
const GGUF: &str = "model.gguf";

/// The line of the base weights in the plan, then two steps that have to be finite and to learn.
fn check_run(case: &str, overrides: &[&str], expected: Expect) -> Scratch {
    let scratch = Scratch::of(case);
    let ended = scratch.run(&[&["plan", "recipe.toml"][..], overrides].concat());
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""), "{case}");
    let line = ended.stdout.lines().find(|line| line.contains("base weights ")).unwrap();
    expected.assert_eq(line.trim());
    assert!(!scratch.exists("run"));
    let two_steps = ["train.steps=2", "train.warmup=0", "train.batch=5", "data.shuffle=false"];
    scratch.train("run", &[&two_steps[..], overrides].concat());
    let losses = scratch.losses("run");
    assert!(losses.len() == 2 && losses.iter().all(|loss| loss.is_finite()), "{case}: {losses:?}");
    assert!(scratch.exists("run/adapter/adapter_model.safetensors"));
    scratch
}

#[test]
fn gguf_files_are_planned_and_trained_on() {
    check_run(
        "gguf-kquants",
        &["model.path=model.gguf"],
        expect!["base weights      252.34 KiB   q4_k and q6_k and q5_k and f32, as stored"],
    );
    check_run(
        "gguf-gemma3",
        &["model.path=model.gguf"],
        expect!["base weights       63.85 KiB   q8_0 and f16 and f32, as stored"],
    );
    check_run(
        "gguf-llama",
        &["model.path=model.gguf", "model.base=nf4"],
        expect!["base weights       52.39 KiB   nf4 and f16 and q8_0 and f32"],
    );
}

#[test]
fn checkpoints_in_4_bits_are_planned_and_trained_on() {
    check_run("llama-bnb-nf4", &[], expect!["base weights       76.95 KiB   nf4 and bf16, as stored"]);
    check_run("llama-bnb-fp4", &[], expect!["base weights       41.19 KiB   fp4-single and f16, as stored"]);
    check_run("llama-bnb-fp4", &["model.base=bf16"], expect!["base weights      112.88 KiB   bf16"]);
}

#[test]
fn plain_checkpoints_are_quantized_at_load() {
    check_run("qwen2-nf4", &[], expect!["base weights      177.75 KiB   bf16, as stored"]);
    check_run("qwen2-nf4", &["model.base=nf4"], expect!["base weights       60.92 KiB   nf4 and bf16"]);
    check_run(
        "qwen2-nf4",
        &["model.base=nf4-single"],
        expect!["base weights       64.55 KiB   nf4-single and bf16"],
    );
    check_run("qwen2-nf4", &["model.base=int8"], expect!["base weights      101.94 KiB   int8 and bf16"]);
}

/// Quantized at load or stored so: the same numbers, so the same run to the bit.
#[test]
fn a_model_quantized_at_load_is_the_model_stored_so() {
    let base = ["train.steps=2", "model.base=nf4"];
    let scratch = Scratch::of("llama-gqa-tied");
    scratch.train("at-load", &base);
    let (stored, said) = stored_in_4_bits(&scratch);
    stored.train("as-stored", &["train.steps=2"]);
    assert_eq!(stored.losses("as-stored"), scratch.losses("at-load"));
    assert!(stored.adapter("as-stored") == scratch.adapter("at-load"));
    assert_eq!(said, 14);
}

/// The model of a scratch folder as bitsandbytes would have stored it, and how many of its tensors it quantized.
fn stored_in_4_bits(scratch: &Scratch) -> (Scratch, usize) {
    use crate::four_bit::parts_of_values;
    use smidgen_ir::Code4;
    let mut quantized = 0;
    let mut parts = Vec::new();
    for part in parts_of_file(&scratch.read(WEIGHTS)) {
        if part.name.ends_with("_proj.weight") {
            let numbers: Vec<f32> = part
                .data
                .chunks_exact(4)
                .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
                .collect();
            let [rows, columns] = [0, 1].map(|at| part.shape[at] as usize);
            parts.extend(parts_of_values(&part.name, Code4::Nf4, true, rows, columns, &numbers));
            quantized += 1;
        } else {
            parts.push(part);
        }
    }
    let stored = Scratch::of("llama-gqa-tied");
    stored.write(WEIGHTS, file_of(&parts));
    stored.edit_json("model/config.json", |config| {
        config["quantization_config"] = json!({"quant_method": "bitsandbytes", "load_in_4bit": true});
    });
    (stored, quantized)
}

/// The model with its linears in fp8 with scales of squares, and the same numbers in f32.
fn stored_in_fp8() -> [Scratch; 2] {
    let [stored, decoded] = [Scratch::of("llama-head128"), Scratch::of("llama-head128")];
    let (mut parts, mut plain) = (Vec::new(), Vec::new());
    for tensor in parts_of_file(&stored.read(WEIGHTS)) {
        if !tensor.name.ends_with("_proj.weight") {
            plain.push(tensor.clone());
            parts.push(tensor);
            continue;
        }
        let numbers = floats_of(&tensor);
        let [rows, columns] = [0, 1].map(|at| tensor.shape[at] as usize);
        let squares = [rows, columns].map(|side| side.div_ceil(FP8_BLOCK));
        let square_of = |at: usize| at / columns / FP8_BLOCK * squares[1] + at % columns / FP8_BLOCK;
        let mut scales = vec![0.0f32; squares[0] * squares[1]];
        for (at, number) in numbers.iter().enumerate() {
            let scale = &mut scales[square_of(at)];
            *scale = scale.max(number.abs() / fp8::LARGEST);
        }
        // Half of the published models have scales in bf16.
        let in_bf16 = tensor.name.contains("mlp");
        let scales: Vec<f32> = scales
            .into_iter()
            .map(|scale| if in_bf16 { f32::from_bits(((scale.to_bits() >> 16) + 1) << 16) } else { scale })
            .collect();
        let codes: Vec<u8> =
            (0..numbers.len()).map(|at| fp8::encode_byte(numbers[at] / scales[square_of(at)])).collect();
        let values: Vec<f32> =
            (0..codes.len()).map(|at| fp8::decode_byte(codes[at]) * scales[square_of(at)]).collect();
        plain.push(part(tensor.name.clone(), "F32", &tensor.shape, floats(&values)));
        parts.push(part(tensor.name.clone(), "F8_E4M3", &tensor.shape, codes));
        let sides = squares.map(|side| side as u64);
        let scales_name = format!("{}_scale_inv", tensor.name);
        parts.push(if in_bf16 {
            let halves = scales.iter().flat_map(|scale| ((scale.to_bits() >> 16) as u16).to_le_bytes());
            part(scales_name, "BF16", &sides, halves.collect())
        } else {
            part(scales_name, "F32", &sides, floats(&scales))
        });
    }
    stored.write(WEIGHTS, file_of(&parts));
    decoded.write(WEIGHTS, file_of(&plain));
    let mut config = stored.json("model/config.json");
    config["quantization_config"] = json!({
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]
    });
    stored.write("model/config.json", config.to_string());
    [stored, decoded]
}

fn floats_of(tensor: &Part) -> Vec<f32> {
    match tensor.dtype {
        "F32" => {
            tensor.data.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
        }
        "BF16" => {
            let halves = tensor.data.chunks_exact(2).map(|two| u16::from_le_bytes(two.try_into().unwrap()));
            halves.map(|half| f32::from_bits(u32::from(half) << 16)).collect()
        }
        other => panic!("`{}` is {other}", tensor.name),
    }
}

/// What DeepSeek and Qwen publish: a run on it is a run on the numbers that it stands for, to the bit.
#[test]
fn a_checkpoint_in_fp8_is_the_numbers_that_it_stands_for() {
    let [stored, decoded] = stored_in_fp8();
    let settings = ["train.steps=2", "model.compute=f32"];
    stored.train("run", &settings);
    decoded.train("run", &settings);
    assert_eq!(stored.losses("run"), decoded.losses("run"));
    assert!(stored.adapter("run") == decoded.adapter("run"));
    let line = |scratch: &Scratch| {
        let table = scratch.run(&["plan", "recipe.toml"]).stdout;
        table.lines().find(|line| line.contains("base weights ")).unwrap().to_owned()
    };
    let with_weights = line(&stored);
    assert!(with_weights.contains("fp8-blocks and ") && with_weights.contains("as stored"), "{with_weights}");
    // Quantized once more, and merged.
    stored.train("again", &["train.steps=2", "model.base=nf4"]);
    let merged = stored.run(&["merge", "run", "--output", "merged"]);
    assert_eq!(merged.code, Some(0), "{}", merged.stderr);
    assert!(stored.json("merged/config.json").get("quantization_config").is_none());
    let ended = stored.run(&["inspect", "model"]);
    assert!(ended.stdout.contains("fp8"), "{}", ended.stdout);
}

#[test]
fn damaged_checkpoints_in_fp8_are_refused_by_name() {
    let [stored, _] = stored_in_fp8();
    let whole = parts_of_file_with(&stored.read(WEIGHTS), &["F8_E4M3"]);
    let first = whole.iter().position(|part| part.name.ends_with("q_proj.weight_scale_inv")).unwrap();
    let mut orphan = whole.clone();
    orphan.retain(|part| Some(part.name.as_str()) != whole[first].name.strip_suffix("_scale_inv"));
    stored.write(WEIGHTS, file_of(&orphan));
    stored.train_refused(1, &[], &["holds the scales of `", "which is missing"]);
    let mut short = whole.clone();
    (short[first].shape, short[first].data) = (vec![1, 1], vec![0; 4]);
    short[first].dtype = "F32";
    stored.write(WEIGHTS, file_of(&short));
    stored.train_refused(1, &[], &["_scale_inv` is F32 of shape [1, 1]", "block of 128 by 128"]);
    stored.write(WEIGHTS, file_of(&whole));
    let mut config = stored.json("model/config.json");
    config["quantization_config"]["weight_block_size"] = Value::Null;
    stored.write("model/config.json", config.to_string());
    stored.train_refused(1, &[], &["`quantization_config.weight_block_size = none`", "[128,128]"]);
}

/// A linear in another format than the config says, unless the config names it as an exception, and the reverse.
#[test]
fn a_quantization_that_the_config_and_the_file_do_not_share_is_refused() {
    let claim = |method: &str| match method {
        "fp8" => json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
        _ => json!({"quant_method": "bitsandbytes", "load_in_4bit": true}),
    };
    for (method, key) in [("fp8", "modules_to_not_convert"), ("bitsandbytes", "llm_int8_skip_modules")] {
        let plain = Scratch::of("llama-head128");
        plain.edit_json("model/config.json", |config| config["quantization_config"] = claim(method));
        let says = format!(
            "`model.layers.0.self_attn.q_proj.weight` is stored as F32, `quantization_config` says {method}"
        );
        plain.train_refused(1, &[], &["config.json contradicts the weights in `", &says, key]);
        plain.edit_json("model/config.json", |config| {
            config["quantization_config"][key] = json!(["lm_head", "model.layers.0", "model.layers.*"]);
        });
        plain.train("run", &["train.steps=1"]);
    }
    let [stored, _] = stored_in_fp8();
    stored.edit_json("model/config.json", |config| {
        config["quantization_config"]["modules_to_not_convert"] = json!(["k_proj"]);
    });
    stored.train_refused(
        1,
        &[],
        &["k_proj.weight` is stored as fp8-blocks, but `modules_to_not_convert` names it"],
    );
    stored.edit_json("model/config.json", |config| config["quantization_config"] = claim("bitsandbytes"));
    stored.train_refused(1, &[], &["is stored as fp8-blocks, `quantization_config` says bitsandbytes"]);
    stored.edit_json("model/config.json", |config| config["quantization_config"] = Value::Null);
    stored.train_refused(1, &[], &["is stored as fp8-blocks, but config.json has no `quantization_config`"]);
}

/// NaN is treated as NaN in any other storage: the first step that uses it ends the run.
#[test]
fn a_nan_in_fp8_ends_the_first_step() {
    let [stored, _] = stored_in_fp8();
    let mut parts = parts_of_file_with(&stored.read(WEIGHTS), &["F8_E4M3"]);
    let codes = parts.iter_mut().find(|part| part.dtype == "F8_E4M3").unwrap();
    codes.data[3] = 0x7F;
    stored.write(WEIGHTS, file_of(&parts));
    let ended = stored.run(&["train", "recipe.toml"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("error: step 1 is not finite"), "{}", ended.stderr);
}

/// A plan needs no weights: the config of a 4-bit model says how they will lie.
#[test]
fn a_4_bit_model_is_planned_from_its_config_alone() {
    for case in ["llama-bnb-nf4", "llama-bnb-fp4"] {
        let scratch = Scratch::of(case);
        let with_weights = scratch.plan(&[]);
        std::fs::remove_file(scratch.path(WEIGHTS)).unwrap();
        assert_eq!(scratch.plan(&[]), with_weights, "{case}");
        scratch.train_refused(1, &[], &["model` has a config but no weights"]);
    }
}

/// A run that has to be refused as a plan and as training, with the same words.
fn check_refused(scratch: &Scratch, overrides: &[&str], expected: Expect) {
    let said = scratch.train_refused(1, overrides, &[]);
    expected.assert_eq(&scratch.neutral(&said));
    let plan = [&["plan", "recipe.toml"][..], overrides].concat();
    assert_eq!(scratch.refused(1, &plan, &[]), said);
}

fn check_gguf(edit: impl FnOnce(&mut Vec<u8>), expected: Expect) {
    let scratch = Scratch::of("gguf-llama");
    let mut bytes = scratch.read(GGUF);
    edit(&mut bytes);
    scratch.write(GGUF, &bytes);
    check_refused(&scratch, &["model.path=model.gguf"], expected);
}

#[test]
fn truncated_gguf_files() {
    check_gguf(
        |bytes| bytes.truncate(bytes.len() - 1),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file is truncated: 107,103 of at least 107,104 bytes, tensor `output.weight` is incomplete; download it again
    "#]],
    );
    check_gguf(
        |bytes| bytes.truncate(bytes.len() / 2),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file is truncated: 53,552 of at least 66,912 bytes, tensor `blk.1.attn_q.weight` is incomplete; download it again
    "#]],
    );
    check_gguf(
        |bytes| bytes.truncate(1_000),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file claims 105 elements of `tokenizer.ggml.tokens`, at least 840 bytes, and has 282 left; it is damaged
    "#]],
    );
    check_gguf(
        |bytes| bytes.truncate(30),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file claims 24 metadata pairs, at least 312 bytes, and has 6 left; it is damaged
    "#]],
    );
    check_gguf(
        |bytes| bytes.truncate(6),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file is truncated: the version needs 4 bytes at 4, the file has 6; download it again
    "#]],
    );
    check_gguf(
        Vec::clear,
        expect![[r#"
        error: `FOLDER/model.gguf`: the file is truncated: the magic needs 4 bytes at 0, the file has 0; download it again
    "#]],
    );
}

#[test]
fn gguf_files_of_another_kind() {
    // Magic, version, number of tensors, number of metadata pairs: the numbers the other way round.
    check_gguf(
        |bytes| bytes[4..8].reverse(),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file is big-endian, only little-endian GGUF is supported; download or convert it as little-endian
    "#]],
    );
    check_gguf(
        |bytes| bytes[..4].reverse(),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file is big-endian, only little-endian GGUF is supported; download or convert it as little-endian
    "#]],
    );
    check_gguf(
        |bytes| bytes[4] = 4,
        expect![[r#"
        error: `FOLDER/model.gguf`: the file has GGUF version 4; versions 2 and 3 are supported, convert the model again
    "#]],
    );
    check_gguf(
        |bytes| bytes[4] = 1,
        expect![[r#"
        error: `FOLDER/model.gguf`: the file has GGUF version 1; versions 2 and 3 are supported, convert the model again
    "#]],
    );
    check_gguf(
        |bytes| bytes[..4].copy_from_slice(b"ggml"),
        expect![[r#"
        error: `FOLDER/model.gguf`: this is not a GGUF file: it starts with [67, 67, 6d, 6c], not with `GGUF`
    "#]],
    );
    let rename = |bytes: &mut Vec<u8>| {
        let key = b"general.architecture";
        let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len();
        // The type and the length of the text stand between.
        assert_eq!(&bytes[at + 12..at + 17], b"llama");
        bytes[at + 12..at + 17].copy_from_slice(b"mamba");
    };
    check_gguf(
        rename,
        expect![[r#"
            error: `FOLDER/model.gguf`: the architecture `mamba` is not supported (supported: llama, qwen2, qwen3, phi3, gemma, gemma2, gemma3, gemma4, smollm3, granite, lfm2, olmo2, seed_oss, glm4, cohere2, mistral3, muse-glimmer)
        "#]],
    );
}

#[test]
fn gguf_files_that_lie_about_counts() {
    let claim = |at: usize, number: u64| {
        move |bytes: &mut Vec<u8>| bytes[at..at + 8].copy_from_slice(&number.to_le_bytes())
    };
    check_gguf(
        claim(8, u64::MAX),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file claims 18,446,744,073,709,551,615 tensors, at least 2^64 bytes, and has 104,664 left; it is damaged
    "#]],
    );
    check_gguf(
        claim(8, 1 << 20),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file claims 1,048,576 tensors, at least 33,554,432 bytes, and has 104,664 left; it is damaged
    "#]],
    );
    check_gguf(
        claim(8, 0),
        expect![[r#"
        error: `FOLDER/model.gguf`: the tensor `token_embd.weight` is missing
    "#]],
    );
    check_gguf(
        claim(16, u64::MAX),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file claims 18,446,744,073,709,551,615 metadata pairs, at least 2^64 bytes, and has 107,080 left; it is damaged
    "#]],
    );
    check_gguf(
        claim(16, 1 << 20),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file claims 1,048,576 metadata pairs, at least 13,631,488 bytes, and has 107,080 left; it is damaged
    "#]],
    );
    check_gguf(
        claim(16, 0),
        expect![[r#"
        error: `FOLDER/model.gguf`: tensor `general.architecture` has 8 dimensions; 1 to 4 are allowed
    "#]],
    );
    // The length of the first key.
    check_gguf(
        claim(24, u64::MAX),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file is truncated: metadata key 0 needs 18,446,744,073,709,551,615 bytes at 32, the file has 107,104; download it again
    "#]],
    );
    check_gguf(
        claim(24, 1 << 40),
        expect![[r#"
        error: `FOLDER/model.gguf`: the file is truncated: metadata key 0 needs 1,099,511,627,776 bytes at 32, the file has 107,104; download it again
    "#]],
    );
}

#[test]
fn a_text_file_that_is_called_gguf() {
    check_gguf(
        |bytes| *bytes = b"<html>404</html>\n".repeat(20),
        expect![[r#"
        error: `FOLDER/model.gguf`: this is not a GGUF file: it starts with [3c, 68, 74, 6d], not with `GGUF`
    "#]],
    );
}

/// Takes tensors out of the weights, or changes them.
fn check_folder(case: &str, edit: impl FnOnce(&mut Vec<Part>), expected: Expect) {
    let scratch = Scratch::of(case);
    let mut parts = parts_of_file(&scratch.read(WEIGHTS));
    edit(&mut parts);
    scratch.write(WEIGHTS, file_of(&parts));
    check_refused(&scratch, &[], expected);
}

#[test]
fn checkpoints_in_4_bits_with_a_part_removed() {
    let without = |suffix: &'static str| {
        move |parts: &mut Vec<Part>| {
            let name = format!("model.layers.1.mlp.up_proj.weight{suffix}");
            let before = parts.len();
            parts.retain(|part| part.name != name);
            assert_eq!(parts.len(), before - 1, "{name}");
        }
    };
    check_folder(
        "llama-bnb-nf4",
        without(""),
        expect![[r#"
        error: `FOLDER/model`: `model.layers.1.mlp.up_proj.weight`, a part of the 4-bit tensor `model.layers.1.mlp.up_proj.weight`, is missing
    "#]],
    );
    check_folder(
        "llama-bnb-nf4",
        without(".absmax"),
        expect![[r#"
        error: `FOLDER/model`: `model.layers.1.mlp.up_proj.weight.absmax`, a part of the 4-bit tensor `model.layers.1.mlp.up_proj.weight`, is missing
    "#]],
    );
    check_folder(
        "llama-bnb-nf4",
        without(".quant_map"),
        expect![[r#"
        error: `FOLDER/model`: `model.layers.1.mlp.up_proj.weight.quant_map`, a part of the 4-bit tensor `model.layers.1.mlp.up_proj.weight`, is missing
    "#]],
    );
    check_folder(
        "llama-bnb-nf4",
        without(".nested_absmax"),
        expect![[r#"
        error: `FOLDER/model`: `model.layers.1.mlp.up_proj.weight.nested_absmax`, a part of the 4-bit tensor `model.layers.1.mlp.up_proj.weight`, is missing
    "#]],
    );
    check_folder(
        "llama-bnb-nf4",
        without(".nested_quant_map"),
        expect![[r#"
        error: `FOLDER/model`: `model.layers.1.mlp.up_proj.weight.nested_quant_map`, a part of the 4-bit tensor `model.layers.1.mlp.up_proj.weight`, is missing
    "#]],
    );
    check_folder(
        "llama-bnb-nf4",
        without(".quant_state.bitsandbytes__nf4"),
        expect![[r#"
        error: config.json contradicts the weights in `FOLDER/model`
          `model.layers.1.mlp.up_proj.weight` is [8800, 1], the config says [400, 44]
          `model.layers.1.mlp.up_proj.weight.absmax` is in the file but not in the config's model
          `model.layers.1.mlp.up_proj.weight.nested_absmax` is in the file but not in the config's model
          `model.layers.1.mlp.up_proj.weight.nested_quant_map` is in the file but not in the config's model
          `model.layers.1.mlp.up_proj.weight.quant_map` is in the file but not in the config's model

        hint: config.json and the safetensors files have to come from the same model
    "#]],
    );
    check_folder(
        "llama-bnb-fp4",
        without(".absmax"),
        expect![[r#"
        error: `FOLDER/model`: `model.layers.1.mlp.up_proj.weight.absmax`, a part of the 4-bit tensor `model.layers.1.mlp.up_proj.weight`, is missing
    "#]],
    );
}

#[test]
fn checkpoints_in_4_bits_with_a_state_changed() {
    let with = |key: &'static str, value: Value| {
        move |parts: &mut Vec<Part>| {
            crate::four_bit::edit_state(parts, |state| state[key] = value);
        }
    };
    check_folder(
        "llama-bnb-nf4",
        with("blocksize", 128.into()),
        expect![[r#"
        error: `FOLDER/model`: the quantization state of `model.layers.0.mlp.down_proj.weight` has blocks of 128; only blocks of 64 are supported
    "#]],
    );
    check_folder(
        "llama-bnb-nf4",
        with("shape", vec![400, 45].into()),
        expect![[r#"
        error: `FOLDER/model`: `model.layers.0.mlp.down_proj.weight`, a part of the 4-bit tensor `model.layers.0.mlp.down_proj.weight`, does not have the 9000 bytes of 18000 codes
    "#]],
    );
    check_folder(
        "llama-bnb-nf4",
        with("quant_type", "fp4".into()),
        expect![[r#"
        error: `FOLDER/model`: `model.layers.0.mlp.down_proj.weight.quant_map`, a part of the 4-bit tensor `model.layers.0.mlp.down_proj.weight`, is not the known map: entry 0 is -1, expected 0
    "#]],
    );
}
