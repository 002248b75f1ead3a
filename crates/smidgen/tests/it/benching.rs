//! `smidgen bench` from outside: what it measures of training and of generation, and which options exclude each other.
//!
//! How fast this machine is decides nothing here: figures have to be there, positive, and fit each other.

use crate::scratch::fixture;
use serde_json::Value;
use std::process::{Command, Output, Stdio};

fn bench(arguments: &[&str]) -> Output {
    let model = fixture("llama-head64").join("model");
    let mut command = Command::new(env!("CARGO_BIN_EXE_smidgen"));
    command.args(["bench", "--device", "cpu", "--steps", "2", "--json", "memory.threads=1"]);
    command.arg("--model").arg(model).args(arguments).stdin(Stdio::null());
    command.output().unwrap()
}

fn figures(arguments: &[&str]) -> Value {
    let ended = bench(arguments);
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    serde_json::from_slice(&ended.stdout).unwrap()
}

fn number(figures: &Value, key: &str) -> f64 {
    figures[key].as_f64().unwrap_or_else(|| panic!("no number `{key}` in {figures}"))
}

#[test]
fn a_step_is_timed_and_its_memory_is_that_of_the_plan() {
    let found = figures(&["--batch", "3", "--tokens", "16"]);
    let tokens_per_s = 3.0 * 16.0 / (number(&found, "step_ms") / 1e3);
    assert!((number(&found, "tokens_per_s") / tokens_per_s - 1.0).abs() < 1e-6, "{found}");
    assert_eq!(found["step_ms_all"].as_array().map(Vec::len), Some(2));
    assert!(number(&found, "planned_bytes") > 0.0 && number(&found, "predicted_step_ms") > 0.0);
}

#[test]
fn generation_is_timed_per_token_of_all_sequences() {
    let mut bytes = Vec::new();
    for (batch, base) in [(1, "bf16"), (2, "f32")] {
        let found = figures(&["--decode", "--batch", &batch.to_string(), "--tokens", "12", "--base", base]);
        assert_eq!(found["base"], base);
        let tokens_per_s = f64::from(batch) / (number(&found, "decode_step_ms") / 1e3);
        assert!((number(&found, "decode_tokens_per_s") / tokens_per_s - 1.0).abs() < 1e-6, "{found}");
        assert!(number(&found, "prompt_tokens_per_s") > 0.0);
        bytes.push(number(&found, "weight_bytes_per_step"));
    }
    // Every weight is read once, however many sequences there are.
    assert_eq!(2.0 * bytes[0], bytes[1]);
}

#[test]
fn what_a_cpu_does_not_have_is_refused() {
    let refused = bench(&["--compute", "fp8"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("a CPU does not multiply in fp8") && said.contains("bf16"), "{said}");
}
