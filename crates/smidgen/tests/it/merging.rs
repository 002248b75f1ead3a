//! `merge` from outside: what it prints and writes, what it refuses, and that a run's adapter goes in and trains on.
//!
//! Its numbers are tested where they are made; here a merged model has to be one that the program itself takes.

use crate::scratch::Scratch;
use expect_test::expect;

#[test]
fn a_merge_says_what_it_wrote() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["merge", "adapter", "--output", "merged"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    expect![[r#"
        merged lora into `model`
          base: f32
          folded        14 tensors   144.00 KiB   W + s·B·A, rounded once
          copied         6 tensors    40.50 KiB   byte for byte
          written       20 tensors   184.50 KiB   one file in `merged`
    "#]]
    .assert_eq(&ended.stdout);
    assert_eq!(scratch.text("merged/config.json"), scratch.text("model/config.json"));
    let again = scratch.refused(1, &["merge", "adapter", "--output", "merged"], &[]);
    assert_eq!(again, "error: `merged` already exists\n\nhint: choose another `--output`, or remove it\n");
}

#[test]
fn a_merge_as_json_in_another_type() {
    let scratch = Scratch::new();
    let arguments =
        ["merge", "adapter", "--output", "deep/merged", "--base", "model", "--dtype", "bf16", "--json"];
    let ended = scratch.run(&arguments);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    expect![[r#"
        {
          "adapter": "adapter",
          "base": "model",
          "base_storages": [
            "f32"
          ],
          "base_quantized": false,
          "output": "deep/merged",
          "kind": "lora",
          "modules": 14,
          "biases": 0,
          "trained": 0,
          "shards": 1,
          "folded": {
            "tensors": 14,
            "bytes": 73728
          },
          "converted": {
            "tensors": 6,
            "bytes": 20736
          },
          "copied": {
            "tensors": 0,
            "bytes": 0
          },
          "written": {
            "tensors": 20,
            "bytes": 94464
          },
          "memory_bytes": 33557504,
          "planned_bytes": 65276928,
          "measured_bytes": N,
          "logits_difference": null,
          "notes": []
        }
    "#]]
    .assert_eq(
        &regex::Regex::new(r#"_bytes": (null|\d+),\n  "logits"#)
            .unwrap()
            .replace(&ended.stdout, "_bytes\": N,\n  \"logits"),
    );
    let config = scratch.json("deep/merged/config.json");
    let named = config.get("dtype").or(config.get("torch_dtype")).unwrap();
    assert_eq!(named, "bfloat16");
}

#[test]
fn a_runs_adapter_is_merged_and_the_result_trains_on() {
    let scratch = Scratch::new();
    scratch.train("run", &["train.steps=4"]);
    let ended = scratch.run(&["merge", "run", "--output", "merged"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    scratch.train("next", &["model.path=merged", "train.steps=4"]);
    // The merged model begins where the run ended, give or take the batches.
    let (first, next) = (scratch.losses("run"), scratch.losses("next"));
    assert!(next[0] < first[0], "{first:?} then {next:?}");
}

#[test]
fn an_adapter_without_its_base_asks_for_it() {
    let scratch = Scratch::new();
    scratch.edit_json("adapter/adapter_config.json", |config| {
        config["base_model_name_or_path"] = "somebody/some-model".into();
    });
    let said = scratch.refused(2, &["merge", "adapter", "--output", "merged"], &["`somebody/some-model`"]);
    assert!(said.contains("\n\nhint: `--base` gives the base model: a folder, a .gguf file, "), "{said}");
    scratch.edit_json("adapter/adapter_config.json", |config| {
        config["base_model_name_or_path"] = serde_json::Value::Null;
    });
    scratch.refused(2, &["merge", "adapter", "--output", "merged"], &["names no base model"]);
    scratch.refused(
        1,
        &["merge", "adapter", "--output", "merged", "--base", "adapter"],
        &["holds an adapter"],
    );
}

/// Numbers of the comparison as X: they are those of rounding, in the order of the machine's threads.
fn without_differences(text: &str) -> String {
    regex::Regex::new(r"\d\.\d\de-\d+").unwrap().replace_all(text, "X").into_owned()
}

#[test]
fn a_quantized_base_is_decoded_and_compared() {
    let scratch = Scratch::of("gguf-llama");
    let ended = scratch.run(&["merge", "adapter", "--output", "merged"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    expect![[r#"
        merged lora into `model.gguf`
          base: q4_0, q4_1, q5_0, q5_1 and q8_0, decoded to f16 (`--dtype` chooses another type)
          folded        14 tensors   128.00 KiB   W + s·B·A, rounded once
          converted      7 tensors    27.50 KiB
          written       21 tensors   155.50 KiB   one file in `merged`
          logits of base + adapter and of the merged model, 64 tokens: largest difference X, mean X, relative X
    "#]]
    .assert_eq(&without_differences(&ended.stdout));
    scratch.train("run", &["model.path=merged", "train.steps=1"]);

    let scratch = Scratch::of("llama-bnb-nf4");
    let ended = scratch.run(&["merge", "adapter", "--output", "merged", "--dtype", "f32", "--json"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(report["base_storages"], serde_json::json!(["nf4"]));
    let difference = &report["logits_difference"];
    assert!(difference["relative"].as_f64().unwrap() < 1e-4, "{difference}");
    assert_eq!(difference["tokens"], 64);
    scratch.train("run", &["model.path=merged", "train.steps=1"]);
}

#[test]
fn a_plain_base_is_compared_when_asked() {
    for case in ["llama-gqa-tied", "qwen2-dora", "qwen2-bias-all"] {
        let scratch = Scratch::of(case);
        let ended =
            scratch.run(&["merge", "adapter", "--output", "merged", "--check", "--dtype", "f32", "--json"]);
        assert_eq!((ended.code, &*ended.stderr), (Some(0), ""), "{case}");
        let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        assert!(report["logits_difference"]["relative"].as_f64().unwrap() < 1e-4, "{case}: {report}");
    }
}

/// As PEFT names it: found in the hub's cache, without a call.
#[test]
fn a_base_is_found_by_its_name_in_the_cache() {
    let scratch = Scratch::new();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let repository = "hub/hub/models--some--model";
    for name in ["config.json", "model.safetensors"] {
        let content = scratch.read(&format!("model/{name}"));
        scratch.write(&format!("{repository}/snapshots/{commit}/{name}"), content);
    }
    scratch.write(&format!("{repository}/refs/main"), commit);
    scratch.edit_json("adapter/adapter_config.json", |config| {
        config["base_model_name_or_path"] = "some/model".into();
    });
    let merge = |output: &str, more: &[&str]| {
        let arguments = [&["merge", "adapter", "--output", output][..], more].concat();
        let mut command = scratch.command(&arguments);
        command.env("HF_HOME", scratch.path("hub")).env("HF_HUB_OFFLINE", "1").env_remove("HF_HUB_CACHE");
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(merge("one", &[]), (Some(0), String::new()));
    assert_eq!(merge("two", &["--base", "hf:some/model"]), (Some(0), String::new()));
    scratch.edit_json("adapter/adapter_config.json", |config| config["revision"] = "v2".into());
    let (code, said) = merge("three", &[]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("the base model `some/model` of the adapter in `adapter` was not found"), "{said}");
    let (code, said) = merge("four", &["--base", "hf:other/model"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("`HF_HUB_OFFLINE` is set"), "{said}");
}

#[test]
fn an_adapter_of_another_model_is_refused() {
    let scratch = Scratch::new();
    let other = crate::scratch::fixture("qwen3").join("model");
    let said = scratch.refused(
        1,
        &["merge", "adapter", "--output", "merged", "--base", other.to_str().unwrap()],
        &[
            "does not fit the base model",
            "in the base, the adapter is for [",
            "hint: the adapter was trained on `model`",
        ],
    );
    assert!(said.lines().count() < 14, "{said}");
}

#[test]
fn what_cannot_be_merged_is_refused_by_name() {
    let scratch = Scratch::new();
    scratch.edit_json("adapter/adapter_config.json", |config| config["peft_type"] = "LSLORA".into());
    scratch.refused(1, &["merge", "adapter", "--output", "merged"], &["is LS-LoRA, which cannot be merged"]);
    scratch.edit_json("adapter/adapter_config.json", |config| config["peft_type"] = "IA3".into());
    scratch.refused(1, &["merge", "adapter", "--output", "merged"], &["of type `IA3`"]);
    scratch.edit_json("adapter/adapter_config.json", |config| {
        config["peft_type"] = "LORA".into();
        config["modules_to_save"] = serde_json::json!(["lm_head"]);
    });
    scratch.refused(
        1,
        &["merge", "adapter", "--output", "merged"],
        &["`modules_to_save` names `lm_head`, but the adapter has no tensor of it"],
    );
    scratch.refused(1, &["merge", "model", "--output", "merged"], &["holds a model and not an adapter"]);
    scratch.refused(1, &["merge", "absent", "--output", "merged"], &["`absent` does not exist"]);
}

#[test]
fn what_killed_merges_and_exports_left_is_swept() {
    let scratch = Scratch::new();
    // No system has that many processes; the first one always runs.
    scratch.write(".m.4000000000.tmp/model.safetensors", "x");
    scratch.write(".m.1.tmp/model.safetensors", "x");
    scratch.write(".m.gguf.4000000000-0.tmp", "x");
    for command in [&["merge", "adapter", "--output", "m"][..], &["export", "adapter", "--output", "m.gguf"]]
    {
        let ended = scratch.run(command);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }
    assert!(!scratch.exists(".m.4000000000.tmp") && !scratch.exists(".m.gguf.4000000000-0.tmp"));
    assert!(scratch.exists(".m.1.tmp"), "another merge may be running");
}

/// A bit that flipped since the run saved its adapter is named, and what someone changed on purpose can be used.
#[test]
fn a_damaged_adapter_of_a_run_is_neither_merged_nor_exported() {
    let scratch = Scratch::new();
    scratch.train("run", &[]);
    let mut weights = scratch.adapter("run");
    let last = weights.len() - 2;
    weights[last] ^= 1;
    scratch.write("run/adapter/adapter_model.safetensors", weights);
    let words = [
        "run/adapter/adapter_model.safetensors` is damaged",
        "hint: copy it again, or use another checkpoint of the run",
        "if you changed that file yourself, remove `SHA256SUMS` there",
    ];
    scratch.refused(1, &["merge", "run", "--base", "model", "--output", "m"], &words);
    scratch.refused(1, &["export", "run", "--base", "model", "--output", "m.gguf"], &words);
    let merged = ["export", "run", "--base", "model", "--merged", "--output", "m.gguf"];
    scratch.refused(1, &merged, &words);
    scratch.forget_checksums("run/adapter");
    let ended = scratch.run(&["merge", "run", "--base", "model", "--output", "m"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

/// A base from elsewhere: neither a file of this machine nor a folder is copied into the merged model.
#[test]
fn a_link_out_of_the_base_is_not_copied() {
    use std::os::unix::fs::symlink;
    let scratch = Scratch::new();
    scratch.write("private/key.jinja", "secret");
    let merge = ["merge", "adapter", "--output", "m"];
    for (link, target) in
        [("modeling_x.py", "../private/key.jinja"), ("additional_chat_templates", "../private")]
    {
        symlink(target, scratch.path("model").join(link)).unwrap();
        scratch.refused(
            1,
            &merge,
            &[&format!("`{link}` in the model folder `model` is a link to `"), "outside the folder"],
        );
        assert!(!scratch.exists("m"));
        std::fs::remove_file(scratch.path("model").join(link)).unwrap();
    }
    // An index may name any file as a shard.
    let weights = scratch.path("model/model.safetensors");
    std::fs::rename(&weights, scratch.path("private/weights")).unwrap();
    symlink("../private/weights", scratch.path("model/shard.bin")).unwrap();
    let tensor = "model.embed_tokens.weight";
    let index = format!(r#"{{"metadata": {{}}, "weight_map": {{"{tensor}": "shard.bin"}}}}"#);
    scratch.write("model/model.safetensors.index.json", index);
    scratch.refused(1, &merge, &["shard.bin`: it is a link to `", "outside its folder"]);
    std::fs::remove_file(scratch.path("model/shard.bin")).unwrap();
    // Links inside the folder are followed, and the file they lead to is copied.
    std::fs::remove_file(scratch.path("model/model.safetensors.index.json")).unwrap();
    std::fs::rename(scratch.path("private/weights"), &weights).unwrap();
    std::fs::rename(scratch.path("model/config.json"), scratch.path("model/settings")).unwrap();
    symlink("settings", scratch.path("model/config.json")).unwrap();
    scratch.write("model/LICENSE", "terms");
    assert_eq!(scratch.run(&merge).code, Some(0));
    assert!(!scratch.path("m/config.json").is_symlink());
    assert_eq!(
        (scratch.text("m/config.json"), scratch.text("m/LICENSE")),
        (scratch.text("model/settings"), "terms".into())
    );
}
