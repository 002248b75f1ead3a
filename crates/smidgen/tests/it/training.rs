//! The promises about results, through the program: memory never changes the math, runs repeat to the bit,
//! and what is saved is what PEFT reads.
//!
//! Parity with PyTorch is replayed here too, from the numbers recorded beside the fixtures.

use crate::scratch::{Scratch, fixture};
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn same_within(relative: f64, one: &[f64], other: &[f64], what: &str) {
    assert_eq!(one.len(), other.len(), "{what}");
    for (step, (one, other)) in one.iter().zip(other).enumerate() {
        assert!((one - other).abs() <= relative * other.abs(), "{what}: step {}: {one} {other}", step + 1);
    }
}

/// The recipe of a fixture's record, as overrides.
fn recorded_recipe(expected: &Value) -> Vec<String> {
    let mut overrides = Vec::new();
    for (section, keys) in expected["recipe"].as_object().unwrap() {
        for (key, value) in keys.as_object().unwrap() {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Object(entries) => {
                    let entries: Vec<String> =
                        entries.iter().map(|(name, value)| format!("'{name}' = {value}")).collect();
                    format!("{{ {} }}", entries.join(", "))
                }
                other => other.to_string(),
            };
            overrides.push(format!("{section}.{key}={text}"));
        }
    }
    overrides
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect()
}

fn column(rows: &[Value], name: &str) -> Vec<f64> {
    rows.iter().filter_map(|row| row.get(name)?.as_f64()).collect()
}

/// Other bits, the same training: moments in 8 bits follow those in f32 step by step.
#[test]
fn moments_in_8_bits_train_as_those_in_f32() {
    let scratch = Scratch::new();
    let overrides = ["adapter.rank=88", "train.steps=40", "train.weight_decay=0.01"];
    scratch.train("f32", &overrides);
    scratch.train("8bit", &[&overrides[..], &["train.optimizer=adamw-8bit"]].concat());
    let (f32, in_8_bits) = (scratch.losses("f32"), scratch.losses("8bit"));
    assert_eq!(f32[0], in_8_bits[0]);
    assert!(f32 != in_8_bits && scratch.adapter("f32") != scratch.adapter("8bit"));
    assert!(f32[39] < 0.5 * f32[0], "hardly trained: {} to {}", f32[0], f32[39]);
    same_within(0.002, &in_8_bits, &f32, "losses");
    // However it is run.
    let other = ["train.optimizer=adamw-8bit", "memory.threads=1", "memory.recompute=all"];
    scratch.train("other", &[&overrides[..], &other].concat());
    assert!(scratch.adapter("other") == scratch.adapter("8bit"));
}

/// Weights, activations and moments on disk, alone and together: not one bit of losses and adapter changes.
#[test]
fn wherever_values_lie_a_run_is_the_same() {
    for (case, key) in [
        ("llama-gqa-tied", "model.base=as-stored"),
        ("phi3", "model.base=as-stored"),
        ("llama-gqa-tied", "model.base=nf4"),
        ("gguf-llama", "model.path=model.gguf"),
        ("llama-gqa-tied", "adapter.kind=dora"),
    ] {
        let scratch = Scratch::of(case);
        let common = ["train.steps=6", "adapter.dropout=0.1", "memory.micro_tokens=64", "adapter.rank=32"];
        let common = [&common[..], &[key]].concat();
        scratch.train("here", &common);
        let all = ["memory.weights=disk", "memory.activations=host", "memory.optimizer_state=host"];
        for (output, own) in [
            ("weights", &all[..1]),
            ("some-weights", &["memory.weights=host:0.5"]),
            ("activations", &all[1..2]),
            ("moments", &all[2..]),
            ("all", &all[..]),
            ("all-recomputed", &[&all[..], &["memory.recompute=all", "memory.threads=1"]].concat()),
        ] {
            scratch.train(output, &[&common[..], own].concat());
            let plan = scratch.json(&format!("{output}/plan.json"));
            assert!(
                plan["spaces"]["disk"].as_u64().unwrap() > 0,
                "{case} {key} {output}: nothing is on disk"
            );
            assert_eq!(scratch.losses(output), scratch.losses("here"), "{case} {key} {output}");
            assert!(scratch.adapter(output) == scratch.adapter("here"), "{case} {key} {output}");
        }
    }
}

#[test]
fn ten_steps_are_those_of_pytorch() {
    for case in ["llama-gqa-tied", "llama-bias-linear", "llama-f16-some-layers"] {
        let scratch = Scratch::of(case);
        let expected = scratch.json("expected.json");
        let overrides = recorded_recipe(&expected);
        let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
        scratch.train("run", &overrides);
        let rows = scratch.metrics("run");
        // Ten times what the record itself lies beside the same run in f64.
        let rounding = |name: &str| 10.0 * expected["rounding"][name].as_f64().unwrap();
        let (losses, norms) = (numbers(&expected["losses"]), numbers(&expected["grad_norms"]));
        same_within(rounding("losses_relative"), &column(&rows, "loss"), &losses, case);
        same_within(rounding("grad_norms_relative"), &column(&rows, "grad_norm"), &norms, case);
        assert_eq!(column(&rows, "tokens"), numbers(&expected["tokens"]), "{case}");
        assert_eq!(column(&rows, "supervised_tokens"), numbers(&expected["supervised_tokens"]), "{case}");
        check_final_adapter(&scratch, case, rounding("final_absolute"));
    }
}

/// The saved adapter has PEFT's keys and shapes, and the recorded values.
fn check_final_adapter(scratch: &Scratch, case: &str, tolerance: f64) {
    let (saved, started) = (
        scratch.adapter("run"),
        std::fs::read(fixture(case).join("adapter/adapter_model.safetensors")).unwrap(),
    );
    let expected = scratch.read("expected.safetensors");
    let (saved, started, expected) = (tensors(&saved), tensors(&started), tensors(&expected));
    let keys = |tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>| {
        tensors.iter().map(|(key, (shape, _))| (key.clone(), shape.clone())).collect::<Vec<_>>()
    };
    assert_eq!(keys(&saved), keys(&started), "{case}");
    for (key, (_, values)) in &saved {
        let (_, recorded) = &expected[&format!("final.{key}")];
        for (value, recorded) in values.iter().zip(recorded) {
            assert!(f64::from((value - recorded).abs()) <= tolerance, "{case}: {key}: {value} {recorded}");
        }
    }
}

/// Name to shape and values, of an f32 file.
fn tensors(bytes: &[u8]) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let file = safetensors::SafeTensors::deserialize(bytes).unwrap();
    let values = |data: &[u8]| -> Vec<f32> {
        data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    file.tensors()
        .into_iter()
        .map(|(name, tensor)| {
            assert_eq!(tensor.dtype(), safetensors::Dtype::F32);
            (name, (tensor.shape().to_vec(), values(tensor.data())))
        })
        .collect()
}

/// Whatever its form, a fresh adapter adds nothing: the first loss is that of the base.
#[test]
fn every_form_of_adapter_begins_at_the_base_model() {
    let scratch = Scratch::new();
    let first_loss = |kind: &str| {
        scratch.train(kind, &[&format!("adapter.kind={kind}"), "train.steps=1", "train.warmup=0"]);
        scratch.losses(kind)[0]
    };
    let expected = first_loss("lora");
    for kind in ["rslora", "dora", "ls-lora"] {
        let loss = first_loss(kind);
        assert!((loss - expected).abs() < 1e-6 * expected, "{kind}: {loss}, lora: {expected}");
    }
}

#[test]
fn the_tokenizer_lies_beside_the_adapter() {
    let scratch = Scratch::new();
    let files = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"];
    for name in files {
        scratch.write(&format!("model/{name}"), format!("the bytes of {name}"));
    }
    scratch.train("run", &["train.steps=1"]);
    for name in files {
        assert_eq!(scratch.text(&format!("run/adapter/{name}")), format!("the bytes of {name}"));
    }
    assert!(!scratch.exists("run/adapter/config.json"));
    let scratch = Scratch::of("gguf-llama");
    scratch.train("run", &["model.path=model.gguf", "train.steps=1"]);
    let tokenizer = scratch.json("run/adapter/tokenizer.json");
    let tokens = tokenizer["model"]["vocab"].as_object().unwrap().len();
    assert_eq!(tokens, 105, "the vocabulary of the file");
}

#[test]
fn adapter_config_says_what_was_trained() {
    let scratch = Scratch::of("llama-f16-some-layers");
    let recorded = recorded_recipe(&scratch.json("expected.json"));
    let recorded: Vec<&str> = recorded.iter().map(String::as_str).collect();
    scratch.train("run", &[&recorded[..], &["adapter.dropout=0.25", "train.steps=1"]].concat());
    let saved = scratch.json("run/adapter/adapter_config.json");
    let mut expected = scratch.json("adapter/adapter_config.json");
    expected["lora_dropout"] = json!(0.25);
    expected["base_model_name_or_path"] = json!(scratch.path("model"));
    for key in [
        "peft_type",
        "task_type",
        "r",
        "lora_alpha",
        "lora_dropout",
        "bias",
        "rank_pattern",
        "alpha_pattern",
        "use_dora",
        "use_rslora",
        "fan_in_fan_out",
        "base_model_name_or_path",
        "modules_to_save",
        "init_lora_weights",
        "inference_mode",
    ] {
        assert_eq!(saved[key], expected[key], "{key}");
    }
    // Only some layers are adapted, so that names would say too much: full paths of these and of no other.
    let mut paths: Vec<&str> =
        saved["target_modules"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    paths.sort();
    let keys = tensors(&scratch.adapter("run")).into_keys();
    let adapted: Vec<String> = keys
        .filter_map(|key| {
            Some(key.strip_prefix("base_model.model.")?.strip_suffix(".lora_A.weight")?.to_string())
        })
        .collect();
    assert_eq!(paths, adapted);
    assert_eq!(saved["layers_to_transform"], Value::Null);
    scratch.train("rs", &["adapter.kind=rslora", "train.steps=1"]);
    let saved = scratch.json("rs/adapter/adapter_config.json");
    assert_eq!(saved["use_rslora"], json!(true));
    // Every linear of these names is adapted: the names alone are exact.
    let names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];
    assert_eq!(saved["target_modules"], json!(names));
}

/// Beside towers, modules have the names that PEFT sees when the whole model is loaded, and an expression that would also
/// match a tower is replaced.
#[test]
fn an_adapter_of_a_wrapped_model_names_what_peft_finds() {
    let scratch = Scratch::of("gemma3-wrapped");
    let train = ["adapter.train=[\"embed_tokens\"]", "train.steps=1"];
    scratch.train("whole", &[&train[..], &["adapter.targets=.*\\.(q_proj|v_proj)"]].concat());
    let saved = scratch.json("whole/adapter/adapter_config.json");
    assert_eq!(saved["modules_to_save"], json!(["lm_head", "model.language_model.embed_tokens"]));
    assert_eq!(saved["target_modules"], json!(".*language_model\\.(.*\\.)?(q_proj|v_proj)"));
    let inside = ".*language_model.*\\.(q_proj|v_proj)";
    scratch.train("inside", &["train.steps=1", &format!("adapter.targets={inside}")]);
    let saved = scratch.json("inside/adapter/adapter_config.json");
    assert_eq!(saved["target_modules"], json!(inside));
    // It reads back, embedding included.
    scratch.train(
        "next",
        &[&train[..], &["adapter.targets=[\"q_proj\",\"v_proj\"]", "adapter.init=whole/adapter"]].concat(),
    );
}

#[test]
fn every_recompute_choice_gives_the_same_bytes() {
    let scratch = Scratch::of("llama-f16-some-layers");
    for dropout in ["adapter.dropout=0", "adapter.dropout=0.3"] {
        let adapters = ["none", "all", "every:2", "[1]", "[0,2]", "auto"].map(|choice| {
            let output = format!("{dropout}-{choice}").replace(['=', ':'], "-");
            scratch.train(&output, &[dropout, &format!("memory.recompute={choice}")]);
            (choice, scratch.adapter(&output), scratch.losses(&output))
        });
        for (choice, adapter, losses) in &adapters[1..] {
            assert!(*adapter == adapters[0].1, "{dropout} {choice}");
            assert_eq!(*losses, adapters[0].2, "{dropout} {choice}");
        }
    }
}

#[test]
fn how_a_batch_is_split_changes_rounding_only() {
    let scratch = Scratch::new();
    for dropout in ["adapter.dropout=0", "adapter.dropout=0.3"] {
        let mut runs = Vec::new();
        for micro_tokens in ["40", "57", "80", "auto"] {
            let output = format!("{dropout}-{micro_tokens}").replace('=', "-");
            let overrides = [dropout, "train.batch=7", &format!("memory.micro_tokens={micro_tokens}")];
            scratch.train(&output, &overrides);
            runs.push((micro_tokens, scratch.losses(&output)));
        }
        for (micro_tokens, losses) in &runs {
            same_within(1e-5, losses, &runs[0].1, &format!("{dropout} {micro_tokens}"));
        }
    }
    assert_ne!(scratch.losses("adapter.dropout-0-40"), scratch.losses("adapter.dropout-0.3-40"));
}

#[test]
fn a_run_repeats_to_the_bit_on_any_number_of_threads() {
    let scratch = Scratch::of("llama-bias-linear");
    for dropout in ["adapter.dropout=0", "adapter.dropout=0.1"] {
        let mut runs = Vec::new();
        for (number, threads) in [1, 2, 4, 2].into_iter().enumerate() {
            let output = format!("{dropout}-{number}").replace('=', "-");
            scratch.train(&output, &[dropout, &format!("memory.threads={threads}")]);
            runs.push((threads, scratch.adapter(&output), scratch.losses(&output)));
        }
        for (threads, adapter, losses) in &runs[1..] {
            assert!(*adapter == runs[0].1, "{dropout}, {threads} threads");
            assert_eq!(*losses, runs[0].2, "{dropout}, {threads} threads");
        }
    }
    scratch.train("other-seed", &["train.seed=8"]);
    assert!(scratch.adapter("other-seed") != scratch.adapter("adapter.dropout-0-0"));
}

#[test]
fn metrics_have_a_row_for_every_step() {
    let scratch = Scratch::new();
    let warmup = ["train.warmup=2", "train.log_every=0"];
    scratch.train("run", &warmup);
    let rows = scratch.metrics("run");
    assert_eq!(column(&rows, "step"), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let names = [
        "step",
        "epoch",
        "ranks",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "supervised_tokens",
        "step_ms",
        "tokens_per_s",
        "device_bytes",
        "device_free_bytes",
        "device_peak_bytes",
        "arena_peak_bytes",
        "pinned_bytes",
        "host_rss_bytes",
        "host_peak_bytes",
        "monitor_ms",
    ];
    for row in &rows {
        assert_eq!(row.as_object().unwrap().keys().map(String::as_str).collect::<Vec<_>>(), names);
        for name in names {
            let number = &row[name];
            let measured = name.contains("bytes") && name != "pinned_bytes";
            assert!(number.is_number() || (measured && number.is_null()), "{name}: {number}");
        }
    }
    // Ten samples in batches of four: three steps an epoch.
    let epochs = [1.0 / 3.0, 2.0 / 3.0, 1.0, 4.0 / 3.0, 5.0 / 3.0, 2.0];
    for (epoch, expected) in column(&rows, "epoch").into_iter().zip(epochs) {
        assert!((epoch - expected).abs() < 1e-12);
    }
    // Linear, two steps of warm-up: 0, 1/2, then (6 - s) / 4 of the peak.
    let rates = [0.0, 0.5, 1.0, 0.75, 0.5, 0.25].map(|part| part * 1e-2);
    assert_eq!(column(&rows, "lr"), rates);
    let epoch_tokens: f64 = column(&rows, "tokens")[..3].iter().sum();
    assert_eq!(epoch_tokens, column(&rows, "tokens")[3..].iter().sum::<f64>());
}

#[test]
fn epochs_are_passes_over_the_data() {
    let scratch = Scratch::new();
    // Ten samples in batches of four: 4, 4, 2 samples an epoch.
    for (epochs, steps) in [("2", 6), ("1", 3), ("0.5", 2), ("2.4", 8)] {
        scratch.train(&format!("epochs-{epochs}"), &[&format!("train.epochs={epochs}")]);
        assert_eq!(scratch.losses(&format!("epochs-{epochs}")).len(), steps, "{epochs}");
    }
    // The schedule follows the length: six steps are six steps, however they are asked for.
    scratch.train("steps", &[]);
    assert!(scratch.adapter("epochs-2") == scratch.adapter("steps"));
}

#[test]
fn a_batch_of_tokens_takes_samples_in_order() {
    let scratch = Scratch::new();
    let lengths: Vec<u64> = scratch
        .text("data.jsonl")
        .lines()
        .map(|row| serde_json::from_str::<Value>(row).unwrap()["input_ids"].as_array().unwrap().len() as u64)
        .collect();
    for limit in [64, 90, 1, 10_000] {
        // A batch never crosses an epoch, takes what still fits, and one sample at the least.
        let mut expected = Vec::new();
        let mut tokens = 0;
        for length in &lengths {
            if tokens > 0 && tokens + length > limit {
                expected.push(tokens);
                tokens = 0;
            }
            tokens += length;
        }
        expected.push(tokens);
        let overrides = [&format!("train.batch_tokens={limit}"), "data.shuffle=false", "train.epochs=1"];
        scratch.train(&format!("limit-{limit}"), &overrides);
        let got: Vec<u64> = scratch
            .metrics(&format!("limit-{limit}"))
            .iter()
            .map(|row| row["tokens"].as_u64().unwrap())
            .collect();
        assert_eq!(got, expected, "{limit}");
    }
}

#[test]
fn evaluation_is_that_of_pytorch_and_changes_nothing() {
    for case in ["llama-gqa-tied", "llama-bias-linear", "llama-f16-some-layers"] {
        let scratch = Scratch::of(case);
        let expected = scratch.json("expected.json");
        let recorded = recorded_recipe(&expected);
        let recorded: Vec<&str> = recorded.iter().map(String::as_str).collect();
        // A rate so small that no weight moves: the loss of the adapter as it was.
        let still = ["train.lr=1e-30", "train.weight_decay=0", "train.steps=5", "train.eval_every=2"];
        scratch.train("still", &[&recorded[..], &still].concat());
        let rows = scratch.metrics("still");
        let evals: Vec<&Value> = rows.iter().filter(|row| row.get("eval_loss").is_some()).collect();
        let steps: Vec<u64> = evals.iter().map(|row| row["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, [2, 4, 5], "{case}");
        for row in &evals {
            let loss = row["eval_loss"].as_f64().unwrap();
            let tolerance = 10.0 * expected["rounding"]["losses_relative"].as_f64().unwrap();
            same_within(tolerance, &[loss], &[expected["eval_loss"].as_f64().unwrap()], case);
            assert_eq!(row["eval_loss"], evals[0]["eval_loss"]);
        }
        scratch.train("with", &[&recorded[..], &["train.eval_every=1"]].concat());
        scratch.train("without", &recorded);
        assert!(scratch.adapter("with") == scratch.adapter("without"), "{case}");
        assert_eq!(scratch.losses("with"), scratch.losses("without"), "{case}");
    }
}

#[test]
fn evaluation_may_be_limited_and_ignores_dropout() {
    let scratch = Scratch::new();
    let common = ["data.eval=data.jsonl", "train.lr=1e-30", "train.steps=1", "train.eval_every=1"];
    let last = |output: &str| scratch.metrics(output).pop().unwrap();
    scratch.train("all", &common);
    scratch.train("dropout", &[&common[..], &["adapter.dropout=0.5"]].concat());
    assert_eq!(last("all")["eval_loss"], last("dropout")["eval_loss"]);
    scratch.train("three", &[&common[..], &["eval.limit=3"]].concat());
    assert_eq!((&last("all")["eval_samples"], &last("three")["eval_samples"]), (&json!(10), &json!(3)));
    let lengths = scratch.text("data.jsonl");
    let tokens: usize = lengths
        .lines()
        .take(3)
        .map(|row| serde_json::from_str::<Value>(row).unwrap()["input_ids"].as_array().unwrap().len())
        .sum();
    assert_eq!(last("three")["eval_tokens"], json!(tokens));
    // How evaluation is packed changes rounding only.
    scratch.train("split", &[&common[..], &["memory.micro_tokens=40"]].concat());
    let [all, split] = ["all", "split"].map(|output| last(output)["eval_loss"].as_f64().unwrap());
    same_within(1e-6, &[split], &[all], "split");
}

#[test]
fn a_run_goes_on_from_the_adapter_of_another() {
    let scratch = Scratch::new();
    let eval = ["data.eval=data.jsonl", "train.eval_every=100", "data.shuffle=false", "train.batch=10"];
    scratch.train("first", &eval);
    scratch.train("second", &[&eval[..], &["adapter.init=first/adapter", "train.steps=1"]].concat());
    // The whole data is one batch: the loss of the second run's first step is the first run's evaluation.
    let ended_with = scratch.metrics("first").pop().unwrap()["eval_loss"].as_f64().unwrap();
    same_within(1e-6, &scratch.losses("second"), &[ended_with], "first step");
    // With a rate that moves nothing, what comes out is what went in.
    let still = ["adapter.init=first/adapter", "train.steps=1", "train.lr=1e-30"];
    scratch.train("copy", &still);
    assert!(scratch.adapter("copy") == scratch.adapter("first"));
    // The folder of the run stands for the adapter in it.
    scratch.train("of-run", &["adapter.init=first", "train.steps=1", "train.lr=1e-30"]);
    assert!(scratch.adapter("of-run") == scratch.adapter("first"));
}

#[test]
fn a_new_adapter_starts_as_the_model_itself() {
    let scratch = Scratch::new();
    let overrides = ["train.steps=1", "data.shuffle=false", "train.batch=10"];
    scratch.train("one", &overrides);
    scratch.train(
        "other",
        &[&overrides[..], &["adapter.rank=2", "train.seed=99", "adapter.targets=q_proj"]].concat(),
    );
    // B is zero: neither rank nor seed nor targets can be seen in the first loss.
    assert_eq!(scratch.losses("one"), scratch.losses("other"));
}
