//! Plan = allocation, measured from outside: a run takes what its plan says.
//!
//! The kernel's peak of the process is held to the rule of `assert_as_planned`, in test builds as in release: a plan does
//! not depend on how the program was built. `benches/grid.py` does the same with larger models, and on a GPU.

use crate::scratch::{RECIPE, Scratch};
use std::fmt::Write;

#[test]
fn a_run_never_takes_more_than_its_plan() {
    for case in ["llama-gqa-tied", "llama-bias-linear", "llama-f16-some-layers"] {
        let scratch = Scratch::of(case);
        for (output, overrides) in [
            ("plain", &[][..]),
            ("lean", &["memory.recompute=all", "memory.micro_tokens=40", "train.save_every=2"]),
            ("wide", &["train.batch=10", "adapter.rank=32", "data.eval=data.jsonl", "train.eval_every=3"]),
            ("threads", &["memory.threads=4", "adapter.dropout=0.2"]),
            ("away", &["memory.weights=disk", "memory.activations=host", "memory.optimizer_state=host"]),
        ] {
            scratch.train_measured(output, overrides);
            check_phases(&scratch, case, output);
        }
    }
}

/// Beside a GPU weights lie in pinned memory; on disk where the recipe says so, or where pinned memory is too short.
#[test]
fn weights_beside_a_gpu_lie_on_disk_where_pinned_memory_is_short() {
    let scratch = Scratch::new();
    let shape =
        concat!("model.path=", env!("CARGO_MANIFEST_DIR"), "/../../recipes/shapes/qwen2.5-0.5b-instruct");
    let plan = |overrides: &[&str]| {
        let large = [shape, "data.train=absent.jsonl", "data.max_tokens=256", "train.batch=1"];
        let gpu = ["memory.device=cuda:0", "memory.profile=h200", "memory.optimizer_state=device"];
        scratch.plan(&[&large, &gpu[..], overrides].concat())
    };
    let place = |plan: &serde_json::Value| {
        let bytes = |space: &str| plan["spaces"][space].as_u64().unwrap();
        (plan["policy"]["weights"].as_str().unwrap().to_owned(), bytes("pinned"), bytes("disk"))
    };
    let here = plan(&["memory.weights=host", "memory.activations=device"]);
    let (weights, pinned, disk) = place(&here);
    assert!(weights == "host" && pinned > 0 && disk == 0, "{weights} {pinned} {disk}");
    let stated = place(&plan(&["memory.weights=disk"]));
    // The embedding is looked up where it lies; the rest comes by way of one slot.
    assert!(stated.0 == "disk" && stated.2 > 0 && stated.1 > 16 << 20, "{stated:?}");
    let budget = format!("memory.budget={}", here["peak_bytes"]);
    // Short of what the embedding and half of the layers take.
    let [enough, short] = [4 * pinned, 400 << 20].map(|bytes| format!("memory.host_budget={bytes}"));
    assert_eq!(place(&plan(&[&budget, &enough])).0, "host");
    let chosen = plan(&[&budget, &short]);
    assert_eq!((chosen["fits"].as_bool(), place(&chosen).0.as_str()), (Some(true), "disk"));
    let reasons = chosen["policy"]["reasons"].to_string();
    assert!(reasons.contains("on disk, prefetched, because host memory is short"), "{reasons}");
}

#[test]
fn a_run_that_trains_the_base_never_takes_more_than_its_plan() {
    for (case, model) in
        [("llama-gqa-tied", "model"), ("llama-bias-linear", "model"), ("gguf-full", "model.gguf")]
    {
        let scratch = Scratch::of(case);
        let recipe = RECIPE.replace("rank = 4\nalpha = 8\n", "kind = \"full\"\n");
        scratch.write("recipe.toml", recipe.replace("\"model\"", &format!("\"{model}\"")));
        for (output, overrides) in [
            ("plain", &[][..]),
            ("last", &["adapter.layers=last:1", "train.save_every=2", "memory.recompute=all"]),
            ("away", &["memory.weights=disk", "memory.activations=host", "memory.optimizer_state=host"]),
            ("bits", &["train.optimizer=adamw-8bit", "data.eval=data.jsonl", "train.eval_every=3"]),
        ] {
            scratch.train_measured(output, &[overrides, &["train.lr=1e-4"]].concat());
            check_phases(&scratch, case, output);
        }
    }
}

/// The order of an epoch and the lengths of its samples are held once, however often they are looked at.
#[test]
fn a_large_data_set_is_held_once() {
    let scratch = Scratch::new();
    let mut rows = String::new();
    for row in 0..1_200_000 {
        writeln!(rows, "{{\"input_ids\":[{},{}]}}", row % 211, row * 7 % 211).unwrap();
    }
    scratch.write("data.jsonl", rows);
    scratch.train_measured("samples", &["train.steps=2", "memory.budget=80MiB"]);
    check_phases(&scratch, "a million samples", "samples");
    scratch.train_measured("tokens", &["train.steps=2", "train.batch_tokens=60", "memory.budget=80MiB"]);
    check_phases(&scratch, "a million samples", "tokens");
}

/// What was sampled in each phase is below the plan too, and so is what is on disk.
fn check_phases(scratch: &Scratch, case: &str, output: &str) {
    let phases = scratch.json(&format!("{output}/phases.json"));
    for (phase, bytes) in phases.as_object().unwrap() {
        for space in ["device", "disk"] {
            let [planned, measured] = ["planned", "measured"].map(|kind| bytes[kind][space].as_u64());
            let Some(planned) = planned else { continue };
            assert!(
                measured <= Some(planned),
                "{case} {output} {phase}: {measured:?} of {planned} ({space})"
            );
        }
    }
    assert!(["load", "train", "save"].iter().all(|phase| phases.get(phase).is_some()), "{phases}");
}
