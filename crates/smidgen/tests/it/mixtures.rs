//! Mixtures of experts from outside: bad files, routers that send tokens to few experts, plans that say what is trained,
//! and merges into every layout of experts.

use crate::bad_model::{join, split};
use crate::scratch::{RECIPE, Scratch};
use serde_json::{Value, json};
use smidgen_ir::{Storage, quant};

const WEIGHTS: &str = "model/model.safetensors";
/// Cases whose adapter is on the experts too, in every layout of their files.
const ADAPTED: [&str; 7] =
    ["qwen3-moe", "mixtral", "granitemoe", "gpt-oss", "gemma4-moe", "glm4-moe", "minimax-m2"];

/// Changes the header of the weights of a case.
fn with_header(case: &str, edit: impl FnOnce(&mut Value)) -> Scratch {
    let scratch = Scratch::of(case);
    let (mut header, data) = split(&scratch.read(WEIGHTS));
    edit(&mut header);
    scratch.write(WEIGHTS, join(&header, &data));
    scratch
}

fn rename(header: &mut Value, from: &str, to: &str) {
    let tensor = header.as_object_mut().unwrap().remove(from).unwrap_or_else(|| panic!("no `{from}`"));
    header[to] = tensor;
}

/// Sets all bytes of the tensors whose names end so to zero.
fn zero(scratch: &Scratch, ending: &str) {
    let (header, mut data) = split(&scratch.read(WEIGHTS));
    for (_, tensor) in header.as_object().unwrap().iter().filter(|(name, _)| name.ends_with(ending)) {
        let [begin, end] = [0, 1].map(|at| tensor["data_offsets"][at].as_u64().unwrap() as usize);
        data[begin..end].fill(0);
    }
    scratch.write(WEIGHTS, join(&header, &data));
}

#[test]
fn experts_that_are_missing_or_of_another_shape_are_named() {
    let module = "model.layers.1.mlp.experts";
    let scratch = with_header("qwen3-moe", |header| {
        rename(header, &format!("{module}.3.up_proj.weight"), &format!("{module}.3.upper.weight"));
    });
    let words = [
        "`model.layers.1.mlp.experts.3.up_proj.weight` is missing",
        "`model.layers.1.mlp.experts.3.upper.weight` is in the file but not in the config's model",
    ];
    scratch.train_refused(1, &[], &words);
    let scratch = with_header("qwen3-moe", |header| {
        header[format!("{module}.2.gate_proj.weight")]["shape"] = json!([24, 10]);
    });
    scratch.train_refused(
        1,
        &[],
        &["`model.layers.1.mlp.experts.2.gate_proj.weight` is [24, 10], and other"],
    );
    let scratch = with_header("gemma4-moe", |header| {
        rename(header, "model.layers.0.experts.down_proj", "model.layers.0.experts.lower_proj");
    });
    scratch.train_refused(1, &[], &["`model.layers.0.experts.down_proj.weight` is missing"]);
    // Turned inside out, the numbers are as many.
    let scratch = with_header("granitemoe", |header| {
        let name = "model.layers.0.block_sparse_moe.input_linear.weight";
        header[name]["shape"] = json!([6, 48, 12]);
    });
    scratch.train_refused(1, &[], &["experts.gate_up_proj.weight` is [288, 12], the config says [144, 24]"]);
}

/// Half as many experts that are twice as wide have matrices of the same size all together.
#[test]
fn experts_of_another_count_are_refused_also_if_all_sizes_agree() {
    for (case, keys, words) in [
        (
            "mixtral",
            [("num_local_experts", 2), ("intermediate_size", 24)],
            "has 4 experts, the config says 2",
        ),
        (
            "granitemoe",
            [("num_local_experts", 3), ("intermediate_size", 24)],
            "has 6 experts, the config says 3",
        ),
        ("olmoe", [("num_experts", 8), ("intermediate_size", 6)], "has 4 experts, the config says 8"),
    ] {
        let scratch = Scratch::of(case);
        scratch.edit_json("model/config.json", |config| {
            keys.iter().for_each(|(key, value)| config[*key] = json!(value));
        });
        scratch.train_refused(1, &[], &[words]);
        scratch.refused(1, &["plan", "recipe.toml"], &[words]);
    }
    let scratch = Scratch::of("qwen3-moe");
    scratch.edit_json("model/config.json", |config| config["num_experts_per_tok"] = json!(6));
    scratch.train_refused(1, &[], &["tokens choose 6 of 5 experts"]);
    let scratch = Scratch::of("gpt-oss");
    let words = [
        "`adapter.bias` cannot train the biases of the experts of `model.layers.0.mlp.experts.gate_up_proj`",
    ];
    scratch.refused(2, &["plan", "recipe.toml", "adapter.bias=all"], &words);
    scratch.refused(
        2,
        &["plan", "recipe.toml", "adapter.targets=[experts]", "adapter.bias=lora_only"],
        &words,
    );
}

/// With equal scores all tokens choose the first experts: one or two have all rows, the others none. Wherever the weights
/// are and whatever is recomputed, the losses are the same.
#[test]
fn experts_without_tokens_and_experts_with_all_of_them() {
    for (case, router) in [
        ("qwen3-moe", "mlp.gate.weight"),
        ("mixtral", "block_sparse_moe.gate.weight"),
        ("gpt-oss", "mlp.router.weight"),
        ("glm4-moe", "mlp.gate.weight"),
    ] {
        let scratch = Scratch::of(case);
        zero(&scratch, router);
        zero(&scratch, "router.bias");
        zero(&scratch, "e_score_correction_bias");
        let targets = "adapter.targets=[experts, q_proj]";
        let train = |output: &str, more: &[&str]| {
            scratch.train(output, &[&[targets, "train.steps=3", "train.batch=10"], more].concat());
            scratch.losses(output)
        };
        let want = train("resident", &[]);
        assert!(want.iter().all(|loss| loss.is_finite()), "{case}: {want:?}");
        assert!(want[2] < want[0], "{case}: {want:?}");
        let recompute = ["memory.recompute=all", "memory.weights=disk"];
        assert_eq!(train("streamed", &recompute), want, "{case}");
        assert_eq!(train("breadth", &["memory.order=breadth", "memory.weights=disk"]), want, "{case}");
    }
}

/// The numbers of every kind add up to those of the run.
#[test]
fn a_plan_says_what_is_trained_and_what_is_frozen() {
    for case in
        ADAPTED.into_iter().chain(["qwen2-moe", "deepseek-v3", "qwen3-5-moe", "gemma4-e", "phi3-dora"])
    {
        let scratch = Scratch::of(case);
        let check = |overrides: &[&str]| {
            let plan = scratch.plan(overrides);
            let weights = plan["weights"].as_array().unwrap();
            let sum = weights.iter().map(|kind| kind["trained_parameters"].as_u64().unwrap()).sum::<u64>();
            assert_eq!(json!(sum), plan["trained_parameters"], "{case} {overrides:?}");
        };
        check(&[]);
        // Experts whose files have them transposed are not trained, and neither are biases of experts.
        if case != "gpt-oss" {
            check(&["adapter.targets=[o_proj]", "adapter.bias=all"]);
            scratch.write("recipe.toml", RECIPE.replace("rank = 4\nalpha = 8", "kind = \"full\""));
            check(&[]);
        }
    }
    let scratch = Scratch::of("qwen2-moe");
    let line = |overrides: &[&str]| {
        let ended = scratch.run(&[&["plan", "recipe.toml"], overrides].concat());
        let found = ended.stdout.lines().find(|line| line.contains("frozen: ")).map(str::trim);
        found.unwrap_or_else(|| panic!("{}{}", ended.stdout, ended.stderr)).to_string()
    };
    assert_eq!(
        line(&[]),
        "adapted: attention, shared experts; frozen: embeddings, experts, routers, norms, head"
    );
    assert_eq!(
        line(&["adapter.targets=[experts, q_proj]"]),
        "adapted: attention (2 of 8 linears), experts; frozen: embeddings, shared experts, routers, norms, head"
    );
}

/// Merges with the numbers of both models compared, and trains the result.
fn merge(scratch: &Scratch, case: &str, adapter: &str, least: f64) -> Value {
    let arguments =
        ["merge", adapter, "--output", "merged", "--base", "model", "--check", "--dtype", "f32", "--json"];
    let ended = scratch.run(&arguments);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""), "{case}");
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let relative = report["logits_difference"]["relative"].as_f64().unwrap();
    assert!(relative < least, "{case}: {relative:e}");
    scratch.train("next", &["model.path=merged", "train.steps=1"]);
    report
}

#[test]
fn adapters_on_experts_are_merged_in_every_layout() {
    for case in ADAPTED {
        let scratch = Scratch::of(case);
        let report = merge(&scratch, case, "adapter", 2e-6);
        let [before, after] = [WEIGHTS, "merged/model.safetensors"].map(|name| {
            let (header, _) = split(&scratch.read(name));
            let shapes = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
            shapes.map(|(name, tensor)| (name.clone(), tensor["shape"].clone())).collect::<Vec<_>>()
        });
        assert_eq!(after, before, "{case}: names and shapes");
        assert!(report["folded"]["tensors"].as_u64().unwrap() > 4, "{case}: {report}");
    }
}

/// Numbers of a tensor of a file.
fn numbers(scratch: &Scratch, file: &str, tensor: &str) -> Vec<f32> {
    let (header, data) = split(&scratch.read(file));
    let [begin, end] = [0, 1].map(|at| header[tensor]["data_offsets"][at].as_u64().unwrap() as usize);
    let bytes = &data[begin..end];
    match header[tensor]["dtype"].as_str().unwrap() {
        "F32" => bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect(),
        "BF16" => {
            let wide = |half: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16);
            bytes.as_chunks::<2>().0.iter().map(wide).collect()
        }
        other => panic!("{tensor} is {other}"),
    }
}

fn norm(numbers: impl Iterator<Item = f32>) -> f64 {
    numbers.map(|number| f64::from(number).powi(2)).sum::<f64>().sqrt()
}

/// The norms of an adapter on experts are those of its factors, and of what a merge adds.
#[test]
fn inspect_knows_the_factors_of_experts() {
    let scratch = Scratch::of("granitemoe");
    merge(&scratch, "granitemoe", "adapter", 2e-6);
    let report = scratch.run(&["inspect", "adapter", "--json"]);
    let report: Value = serde_json::from_str(&report.stdout).unwrap();
    let module = "model.layers.0.block_sparse_moe.experts";
    let modules = report["modules"].as_array().unwrap();
    let found =
        modules.iter().find(|own| own["module"] == format!("{module}.gate_up_proj").as_str()).unwrap();
    let tensor = "model.layers.0.block_sparse_moe.input_linear.weight";
    let [before, after] = [WEIGHTS, "merged/model.safetensors"].map(|file| numbers(&scratch, file, tensor));
    let added = norm(after.iter().zip(&before).map(|(after, before)| after - before));
    let factor = |name: &str| {
        let key = format!("base_model.model.{module}.base_layer.lora_{name}.weight");
        norm(numbers(&scratch, "adapter/adapter_model.safetensors", &key).into_iter())
    };
    for (key, want) in [("product_norm", added), ("a_norm", factor("A")), ("b_norm", factor("B"))] {
        let got = found[key].as_f64().unwrap();
        assert!((got / want - 1.0).abs() < 1e-5, "{key}: {got}, not {want}");
    }
}

/// Experts of a case as fp8 with a scale for each row, as `compressed-tensors` has them.
fn with_experts_in_fp8(case: &str) -> Scratch {
    let scratch = Scratch::of(case);
    let (header, data) = split(&scratch.read(WEIGHTS));
    let (mut made, mut bytes) = (serde_json::Map::new(), Vec::new());
    let mut add = |name: &str, dtype: &str, shape: Value, content: &[u8]| {
        let offsets = [bytes.len(), bytes.len() + content.len()];
        made.insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        bytes.extend_from_slice(content);
    };
    for (name, tensor) in header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
        let [begin, end] = [0, 1].map(|at| tensor["data_offsets"][at].as_u64().unwrap() as usize);
        let content = &data[begin..end];
        if !name.contains(".experts.") {
            add(name, tensor["dtype"].as_str().unwrap(), tensor["shape"].clone(), content);
            continue;
        }
        let [rows, columns] = [0, 1].map(|at| tensor["shape"][at].as_u64().unwrap() as usize);
        let numbers = numbers(&scratch, WEIGHTS, name);
        let encoded = quant::encode(Storage::Fp8Rows, rows, columns, &numbers).unwrap();
        let (codes, scales) = encoded.split_at(rows * columns);
        add(name, "F8_E4M3", json!([rows, columns]), codes);
        add(&format!("{name}_scale"), "F32", json!([rows, 1]), scales);
    }
    scratch.write(WEIGHTS, join(&Value::Object(made), &bytes));
    scratch.edit_json("model/config.json", |config| {
        config["quantization_config"] =
            json!({"quant_method": "compressed-tensors", "format": "float-quantized"});
    });
    scratch
}

/// Quantized experts are trained as stored, resumed, and merged into f32.
#[test]
fn a_whole_run_over_experts_in_fp8() {
    for case in ["qwen3-moe", "mixtral"] {
        let scratch = with_experts_in_fp8(case);
        let targets = "adapter.targets=[experts, q_proj]";
        let ended = scratch.run(&["plan", "recipe.toml", targets]);
        assert!(ended.stdout.contains("bf16 and fp8, as stored"), "{}{}", ended.stdout, ended.stderr);
        scratch.train("whole", &[targets]);
        scratch.train("run", &[targets, "train.save_every=3"]);
        scratch.forget_end("run", 3);
        let resumed = scratch.run(&["train", "recipe.toml", "--resume", targets, "train.save_every=3"]);
        assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
        assert_eq!(scratch.adapter("run"), scratch.adapter("whole"), "{case}");
        merge(&scratch, case, "run", 2e-6);
    }
}

/// A gpt-oss of one layer whose experts are MXFP4, with arbitrary codes.
fn gpt_oss_in_mxfp4() -> Scratch {
    let scratch = Scratch::of("gpt-oss");
    let (hidden, width, experts) = (32, 64, 5);
    scratch.edit_json("model/config.json", |config| {
        config["hidden_size"] = json!(hidden);
        config["intermediate_size"] = json!(width);
        config["quantization_config"] = json!({"quant_method": "mxfp4"});
    });
    let mut random = 1u64;
    let mut next = move || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as f32 / (1u64 << 31) as f32
    };
    let (mut made, mut bytes) = (serde_json::Map::new(), Vec::new());
    let mut add = |name: &str, dtype: &str, shape: &[usize], content: Vec<u8>| {
        let offsets = [bytes.len(), bytes.len() + content.len()];
        made.insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        bytes.extend_from_slice(&content);
    };
    let (header, _) = split(&scratch.read(WEIGHTS));
    for (name, tensor) in header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
        let resized = |size: &Value| match (size.as_u64().unwrap(), name.contains("experts")) {
            (24, true) if name.contains("gate_up_proj_bias") => 2 * width,
            (24, _) => hidden,
            (other, _) => other as usize,
        };
        let shape: Vec<usize> = tensor["shape"].as_array().unwrap().iter().map(resized).collect();
        let parameter = ["gate_up_proj", "down_proj"].into_iter().find(|end| name.ends_with(end));
        if let Some(parameter) = parameter.filter(|_| name.contains("experts")) {
            let (rows, columns) =
                if parameter == "down_proj" { (hidden, width) } else { (2 * width, hidden) };
            let blocks = [experts, rows, columns / 32, 16];
            let codes = (0..blocks.iter().product()).map(|_| (next() * 256.0) as u8).collect();
            let scales = (0..experts * rows * columns / 32).map(|_| 122 + (next() * 3.0) as u8).collect();
            add(&format!("{name}_blocks"), "U8", &blocks, codes);
            add(&format!("{name}_scales"), "U8", &blocks[..3], scales);
            continue;
        }
        let middle = if name.contains("norm") { 1.0 } else { 0.0 };
        let count = shape.iter().product::<usize>();
        let halves = (0..count).flat_map(|_| {
            let number: f32 = middle + 0.6 * (next() - 0.5);
            ((number.to_bits() >> 16) as u16).to_le_bytes()
        });
        add(name, "BF16", &shape, halves.collect());
    }
    scratch.write(WEIGHTS, join(&Value::Object(made), &bytes));
    scratch
}

/// A merge into MXFP4 writes bf16, which every number of MXFP4 is, in the layout that transformers reads.
#[test]
fn a_whole_run_over_experts_in_mxfp4() {
    let scratch = gpt_oss_in_mxfp4();
    let targets = "adapter.targets=[experts, q_proj]";
    scratch.train("run", &[targets]);
    let losses = scratch.losses("run");
    assert!(losses[5] < losses[0], "{losses:?}");
    merge(&scratch, "mxfp4", "run", 2e-6);
    let ended = scratch.run(&["merge", "run", "--output", "in-bf16", "--base", "model", "--json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert!(report["logits_difference"]["relative"].as_f64().unwrap() < 1e-2, "{report}");
    let (header, _) = split(&scratch.read("in-bf16/model.safetensors"));
    let tensor = &header["model.layers.0.mlp.experts.gate_up_proj"];
    assert_eq!((&tensor["dtype"], &tensor["shape"]), (&json!("BF16"), &json!([5, 32, 128])));
    assert_eq!(header["model.layers.0.mlp.experts.down_proj"]["shape"], json!([5, 64, 32]));
    let config = scratch.json("in-bf16/config.json");
    assert!(config.get("quantization_config").is_none() && config["dtype"] == "bfloat16", "{config}");
}
