//! The programs in `examples/`, called as functions on a tiny model: a plan, a run on rows in memory, and an answer
//! from the adapter that the run wrote.

use crate::scratch::fixture;
use smidgen::{Budget, Ending, FailureKind, Job, MemoryRows, Purpose, Recipe, RecipePath, StoppedBy};
use std::ops::ControlFlow;

#[allow(dead_code, reason = "an example has a `main`")]
#[path = "../../examples/fine_tune_rows.rs"]
mod fine_tune_rows;
#[allow(dead_code, reason = "an example has a `main`")]
#[path = "../../examples/load_and_generate.rs"]
mod load_and_generate;
#[allow(dead_code, reason = "an example has a `main`")]
#[path = "../../examples/plan_a_model.rs"]
mod plan_a_model;

/// A GGUF file brings its own tokenizer.
fn model() -> String {
    fixture("gguf-llama").join("model.gguf").to_str().unwrap().to_string()
}

#[test]
fn a_model_is_planned_on_a_card_that_is_not_here() {
    let plan = plan_a_model::plan_a_model(&model(), "rtx-4090", "1GiB").unwrap();
    assert!(plan.fits && plan.budget_bytes == 1 << 30, "{plan}");
    assert_eq!(plan.rows.iter().map(|(_, bytes)| bytes).sum::<u64>(), plan.peak_bytes);
    assert!(plan.to_string().contains("fits"), "{plan}");
    assert_eq!(plan.json["peak_bytes"], plan.peak_bytes);
    let small = plan_a_model::plan_a_model(&model(), "rtx-4090", "1MiB").unwrap();
    assert!(!small.fits && small.peak_bytes > small.budget_bytes, "{small}");
    let unknown = plan_a_model::plan_a_model(&model(), "rtx-1", "1GiB").unwrap_err();
    assert_eq!(unknown.kind, FailureKind::Recipe, "{unknown}");
}

#[test]
fn rows_in_memory_are_trained_on_and_their_adapter_answers() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let mut steps = Vec::new();
    let run = fine_tune_rows::fine_tune_rows(&model(), &output, Budget::Bytes(128 << 20), |row| {
        steps.push((row.step, row.loss));
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!((run.steps, run.total_steps, run.ending), (30, 30, Ending::Done));
    assert_eq!(steps.iter().map(|(step, _)| *step).collect::<Vec<_>>(), (1..=30).collect::<Vec<_>>());
    assert_eq!((steps[0].1, steps[29].1), (run.first_loss, run.last_loss));
    assert!(run.last_loss < run.first_loss, "{run:?}");
    for file in ["job.toml", "plan.json", "metrics.jsonl", "report.html", "adapter/adapter_model.safetensors"]
    {
        assert!(output.join(file).is_file(), "{file}");
    }
    let mut pieces = String::new();
    let answer =
        load_and_generate::load_and_generate(&model(), &output, "1 + 3 = ", |piece| pieces.push_str(piece))
            .unwrap();
    assert_eq!(answer.text, pieces);
    assert!(answer.token_ids.len() == 32 || matches!(answer.stopped_by, StoppedBy::Token(_)), "{answer:?}");
}

#[test]
fn a_callback_stops_a_run_and_its_state_is_saved() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let stop_at_7 = |row: &smidgen::MetricsRow| {
        if row.step == 7 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let run = fine_tune_rows::fine_tune_rows(&model(), &output, Budget::Bytes(128 << 20), stop_at_7).unwrap();
    assert_eq!((run.steps, run.ending), (7, Ending::Interrupted));
    assert!(output.join("checkpoint-7").is_dir() && !run.product.exists());
    // Another run does not take its place.
    let again = fine_tune_rows::fine_tune_rows(&model(), &output, Budget::Bytes(128 << 20), stop_at_7);
    assert_eq!(again.unwrap_err().kind, FailureKind::Disk);
}

#[test]
fn values_set_in_code_are_held_to_the_rules_of_a_recipe() {
    let mut recipe = Recipe::new(model().parse().unwrap());
    recipe.adapter.rank = 0;
    recipe.train.eval_every = 5;
    recipe.output.dir = RecipePath::at("run".as_ref());
    let row = serde_json::json!({"text": "a"});
    let rows = MemoryRows { train: vec![row], eval: vec![] };
    let failure = Job::prepare_rows(recipe, &rows, Purpose::Train).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Recipe);
    for words in ["the recipe has 2 mistakes", "`adapter.rank` must be", "`train.eval_every` has no effect"] {
        assert!(failure.message.contains(words), "{failure}");
    }
}

#[test]
fn a_wrong_row_is_named_by_its_number() {
    let mut recipe = Recipe::new(model().parse().unwrap());
    recipe.output.dir = RecipePath::at("run".as_ref());
    let train = vec![serde_json::json!({"text": "a b"}), serde_json::json!({"text": 7})];
    let rows = MemoryRows { train, eval: vec![] };
    let failure = Job::prepare_rows(recipe, &rows, Purpose::Train).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Data);
    assert!(failure.message.contains("`rows-in-memory` row 2"), "{failure}");
}
