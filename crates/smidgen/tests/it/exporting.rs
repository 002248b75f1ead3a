//! `export` from outside: what it prints and writes, and what it refuses. Its numbers are tested where they are made.

use crate::scratch::Scratch;
use expect_test::expect;
use smidgen_formats::gguf::GgufFile;

#[test]
fn an_adapter_says_what_it_became() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["export", "adapter", "--output", "out/adapter.gguf"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    expect![[r#"
        exported lora for `model` (llama)
          adapter       14 modules   rank 6, alpha 9
          written       28 tensors    33.75 KiB   f32 in `out/adapter.gguf`
    "#]]
    .assert_eq(&ended.stdout);
    let file = GgufFile::open(&scratch.path("out/adapter.gguf")).unwrap();
    assert_eq!(file.metadata().text("general.architecture"), Ok(Some("llama")));
    let again = scratch.refused(1, &["export", "adapter", "--output", "out/adapter.gguf"], &[]);
    assert_eq!(
        again,
        "error: `out/adapter.gguf` already exists\n\nhint: choose another `--output`, or remove it\n"
    );
}

#[test]
fn scales_that_differ_are_said() {
    let scratch = Scratch::of("llama-f16-some-layers");
    let ended = scratch.run(&["export", "adapter", "--output", "a.gguf", "--json"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(report["kind"], "lora");
    assert_eq!(report["alpha"], 7.0);
    assert!(report["rescaled"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn a_model_with_its_adapter_says_what_it_became() {
    let scratch = Scratch::of("gguf-gemma2");
    let arguments = ["export", "adapter", "--output", "whole.gguf", "--merged", "--type", "q8_0"];
    let ended = scratch.run(&arguments);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    expect![[r#"
        exported `model.gguf` (gemma2) with lora folded into 21 tensors
          f32           13 tensors     1.63 KiB
          q8_0          22 tensors    41.80 KiB
          written       35 tensors    43.43 KiB   `whole.gguf`
    "#]]
    .assert_eq(&ended.stdout);
    // A model that the program itself takes, and that no longer needs the adapter.
    scratch.train("run", &["model.path=whole.gguf", "train.steps=1"]);
    let plain = scratch.run(&["export", "whole.gguf", "--output", "plain.gguf", "--merged", "--json"]);
    assert_eq!(plain.code, Some(0), "{}", plain.stderr);
    let report: serde_json::Value = serde_json::from_str(&plain.stdout).unwrap();
    assert_eq!((&report["kind"], &report["folded"]), (&serde_json::Value::Null, &0.into()));
    assert_eq!(report["types"]["f16"]["tensors"], 22);
}

#[test]
fn what_cannot_be_exported_is_refused_by_name() {
    let scratch = Scratch::of("llama-dora");
    let said = scratch.refused(
        1,
        &["export", "adapter", "--output", "a.gguf"],
        &["is dora: llama.cpp adapters do not support magnitudes"],
    );
    assert!(said.contains("hint: `smidgen export --merged` writes the whole model"), "{said}");
    let typed = scratch.run(&["export", "adapter", "--output", "a.gguf", "--type", "f16"]);
    assert_eq!(typed.code, Some(2), "{}", typed.stderr);
    scratch.refused(
        1,
        &["export", "adapter", "--output", "a.gguf", "--merged"],
        &["`model` has no `tokenizer.json`"],
    );
    let model = ["export", "model", "--output", "a.gguf"];
    scratch.refused(1, &model, &["holds a model and not an adapter"]);
    scratch.refused(2, &[&model[..], &["--merged", "--base", "x"]].concat(), &["`--base` needs an adapter"]);
    scratch.refused(2, &["export", "absent", "--output", "a.gguf", "--merged"], &["`absent` was not found"]);
}

/// A hidden size of 256, so that matrices are whole blocks; the file trains like any other.
#[test]
fn mixtures_of_llama_cpp_are_written_with_a_modelfile() {
    let scratch = Scratch::of("gguf-kquants");
    let arguments =
        ["export", "adapter", "--output", "out/whole.gguf", "--merged", "--modelfile", "--type", "q4_k_m"];
    let ended = scratch.run(&arguments);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    let modelfile = std::fs::read_to_string(scratch.path("out/Modelfile")).unwrap();
    assert_eq!(modelfile, "FROM ./whole.gguf\n");
    let file = GgufFile::open(&scratch.path("out/whole.gguf")).unwrap();
    assert_eq!(file.metadata().whole("general.file_type"), Ok(Some(15)));
    let storage = |name: &str| file.tensor(name).unwrap().storage.to_string();
    let found = ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_v.weight"].map(storage);
    assert_eq!(found, ["q6_k", "q4_k", "q6_k"]);
    scratch.train("run", &["model.path=out/whole.gguf", "train.steps=1"]);
    let again = ["export", "adapter", "--output", "out/other.gguf", "--merged", "--modelfile"];
    scratch.refused(1, &again, &["`out/Modelfile` already exists"]);
}
