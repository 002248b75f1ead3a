//! `smidgen generate` from outside: what it prints where, and what it refuses.
//!
//! The models are tiny and random, so texts are noise; that they are the right noise is tested next to the session.

use crate::scratch::fixture;
use serde_json::Value as Json;
use std::process::{Command, Output, Stdio};

fn generate(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_smidgen"));
    command.arg("generate").args(arguments).stdin(Stdio::null()).env("COLUMNS", "10000");
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A GGUF file brings its own tokenizer.
fn model() -> String {
    fixture("gguf-llama").join("model.gguf").to_str().unwrap().to_string()
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_read() {
    for (arguments, wanted) in [
        (&["--prompt", "a", "--temperature=-1"][..], "`--temperature -1` must be at least 0"),
        (&["--prompt", "a", "--top-p", "0"], "`--top-p 0` must be above 0"),
        (&["--prompt", "a", "--max-new", "0"], "`--max-new` must be at least 1"),
        (&["--prompt", "a", "--budget", "many"], "`--budget many` is not a size"),
        (&["--prompt", "a", "--beams", "0"], "`--beams` must be at least 1"),
        (&["--prompt", "a", "--device", "gpu"], "`--device gpu` is not a device"),
        (&["--prompt", "a", "--compute", "f64"], "`--compute f64` is not a precision"),
    ] {
        let arguments: Vec<&str> = ["nowhere"].into_iter().chain(arguments.iter().copied()).collect();
        let output = generate(&arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains(wanted), "{arguments:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_text_goes_to_stdout_and_the_table_to_stderr_if_it_is_asked_for() {
    let model = model();
    let arguments = [&model, "--prompt", "a", "--raw", "--max-new", "5"];
    let output = generate(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stderr);
    assert!(said.contains("5 tokens, stopped at `--max-new`") && said.lines().count() == 1, "{said}");
    let table = generate(&[&arguments[..], &["--plan"]].concat());
    assert_eq!(table.stdout, output.stdout);
    let table = text(&table.stderr);
    for row in ["base weights", "keys and values", "context", "peak", "fits"] {
        assert!(table.contains(row), "{table}");
    }
    let json = generate(&[&arguments[..], &["--json", "--quiet"]].concat());
    assert!(json.stderr.is_empty(), "{}", text(&json.stderr));
    let report: Json = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(report["ids"].as_array().unwrap().len(), 5);
    assert_eq!(format!("{}\n", report["text"].as_str().unwrap()), text(&output.stdout));
    let planned = report["planned_bytes"].as_u64().unwrap();
    let small = format!("{}", planned / 2);
    let refused = generate(&[&arguments[..], &["--budget", &small]].concat());
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("no context fits"), "{}", text(&refused.stderr));
    assert!(refused.stdout.is_empty());
}

/// What is chosen by itself on a machine without a GPU is what can be asked for by name; f16 is for GPUs.
#[test]
fn device_and_numbers_can_be_chosen() {
    let model = model();
    let arguments = [&model, "--prompt", "a", "--raw", "--max-new", "5", "--device", "cpu"];
    let by_itself = generate(&[&arguments[..], &["--plan"]].concat());
    assert!(by_itself.status.success(), "{}", text(&by_itself.stderr));
    assert!(
        text(&by_itself.stderr).lines().next().unwrap().ends_with(" · cpu"),
        "{}",
        text(&by_itself.stderr)
    );
    let named = generate(&[&arguments[..], &["--compute", "f32"]].concat());
    assert_eq!(by_itself.stdout, named.stdout);
    let refused = generate(&[&arguments[..], &["--compute", "f16"]].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("f16 needs a GPU"), "{}", text(&refused.stderr));
    let far = generate(&[&arguments[..7], &["cuda:99"]].concat());
    assert_eq!(far.status.code(), Some(1));
    for words in ["`cuda:99`: ", "hint: `--device cpu` generates without a GPU"] {
        assert!(text(&far.stderr).contains(words), "{}", text(&far.stderr));
    }
}

#[test]
fn an_adapter_changes_the_text() {
    let model = model();
    let adapter = fixture("gguf-llama").join("adapter");
    let arguments = [&model, "--prompt", "abc", "--raw", "--max-new", "12", "--json", "--quiet"];
    let base: Json = serde_json::from_slice(&generate(&arguments).stdout).unwrap();
    let adapted = generate(&[&arguments[..], &["--adapter", adapter.to_str().unwrap()]].concat());
    let adapted: Json = serde_json::from_slice(&adapted.stdout).unwrap();
    assert_ne!(base["ids"], adapted["ids"]);
    let missing = generate(&[&arguments[..], &["--adapter", "nowhere"]].concat());
    assert!(text(&missing.stderr).contains("`nowhere` does not exist"), "{}", text(&missing.stderr));
}
