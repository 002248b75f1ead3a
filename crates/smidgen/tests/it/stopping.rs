//! Evaluations and what follows from them: which checkpoint is the best and stays, when a run stops early and what
//! its adapter is then, and what `trainer_state.json` and the event file tell of it all.

use crate::event_file::{read_events, read_scalars};
use crate::scratch::Scratch;
use serde_json::{Value, json};

/// A rate at which the loss of rows that are not trained on falls for a while and then rises.
const RISING: [&str; 8] = [
    "data.eval=other.jsonl",
    "train.steps=40",
    "train.eval_every=2",
    "train.schedule=constant",
    "train.lr=0.03",
    // Runs of other lengths are to begin and to be split alike.
    "train.warmup=2",
    "memory.micro_tokens=64",
    "train.log_every=0",
];

fn with_other_rows() -> Scratch {
    let scratch = Scratch::new();
    scratch.write_rows("other.jsonl", 6, 12);
    scratch
}

fn evaluations(scratch: &Scratch, output: &str) -> Vec<(u64, f64)> {
    let rows = scratch.metrics(output);
    let evaluated =
        rows.iter().filter_map(|row| Some((row["step"].as_u64()?, row.get("eval_loss")?.as_f64()?)));
    evaluated.collect()
}

fn best(evaluations: &[(u64, f64)]) -> (u64, f64) {
    *evaluations.iter().min_by(|one, other| one.1.total_cmp(&other.1)).unwrap()
}

#[test]
fn the_best_evaluated_checkpoint_is_never_removed() {
    let scratch = with_other_rows();
    for (keep, kept) in [(1, 2), (3, 4)] {
        let output = format!("keep-{keep}");
        let own = ["train.save_every=1", &format!("train.keep={keep}")];
        let ended = scratch.train(&output, &[&RISING[..], &own].concat());
        let (step, loss) = best(&evaluations(&scratch, &output));
        assert!(step < 38, "the best is among the last: this shows nothing");
        let checkpoints = scratch.checkpoints(&output);
        assert!(checkpoints.contains(&step) && checkpoints.contains(&40), "{checkpoints:?} {step}");
        assert_eq!(checkpoints.len(), kept);
        let words = format!("/adapter`; best eval_loss {loss:.4} in `checkpoint-{step}`\n");
        assert!(ended.stderr.ends_with(&words), "{}", ended.stderr);
        // The adapter is that of the last step.
        let last = scratch.read(&format!("{output}/checkpoint-40/adapter_model.safetensors"));
        assert!(scratch.adapter(&output) == last);
    }
}

#[test]
fn every_new_best_is_saved_and_named() {
    let scratch = with_other_rows();
    for (output, save_every) in [("seldom", "train.save_every=15"), ("never", "train.save_every=0")] {
        scratch.train(output, &[&RISING[..], &[save_every, "train.keep=1"]].concat());
        let (step, loss) = best(&evaluations(&scratch, output));
        assert!(step % 15 != 0 && step < 30, "the best is saved anyway: this shows nothing");
        assert_eq!(scratch.checkpoints(output), [step, 40], "{output}");
        let state = scratch.json(&format!("{output}/adapter/trainer_state.json"));
        assert_eq!((&state["best_global_step"], &state["best_metric"]), (&json!(step), &json!(loss)));
        let kept = scratch.path(&format!("{output}/checkpoint-{step}"));
        assert_eq!(state["best_model_checkpoint"], json!(kept));
    }
    // Saving costs nothing of the result.
    assert!(scratch.adapter("seldom") == scratch.adapter("never"));
}

const EARLY: [&str; 2] = ["train.early_stop=3", "train.save_every=0"];

#[test]
fn a_run_that_no_longer_improves_stops_with_its_best_adapter() {
    let scratch = with_other_rows();
    let overrides = [&RISING[..], &EARLY].concat();
    let ended = scratch.train("run", &overrides);
    let evaluations = evaluations(&scratch, "run");
    let (step, loss) = best(&evaluations);
    // Three evaluations, two steps apart, after the best.
    let last = step + 6;
    assert_eq!(evaluations.last().unwrap().0, last);
    assert!(last < 40);
    assert_eq!(scratch.losses("run").len() as u64, last);
    let said: Vec<&str> = ended.stderr.lines().rev().take(2).collect();
    assert_eq!(said[1], "stopped early: no improvement in 3 evaluations");
    assert!(said[0].ends_with(&format!("; best eval_loss {loss:.4} in `checkpoint-{step}`")), "{}", said[0]);
    let done = format!("done: {last} of 40 steps, loss X, adapter of step {step} in `FOLDER/run/adapter`; ");
    assert!(scratch.neutral(said[0]).starts_with(&done), "{}", said[0]);
    // A run of so many steps ends with the same adapter; so does the checkpoint.
    let steps = format!("train.steps={step}");
    scratch.train("short", &[&RISING[..], &[&steps]].concat());
    assert!(scratch.adapter("run") == scratch.adapter("short"));
    assert!(
        scratch.adapter("run") == scratch.read(&format!("run/checkpoint-{step}/adapter_model.safetensors"))
    );
    // Finished is finished.
    let files = scratch.files();
    let ended = scratch.train("run", &[&overrides[..], &["--resume"]].concat());
    assert!(ended.stderr.ends_with("run` is finished\n"), "{}", ended.stderr);
    assert!(scratch.files() == files);
}

#[test]
fn killed_before_its_early_end_is_written_it_ends_the_same() {
    let scratch = with_other_rows();
    let overrides = [&RISING[..], &["train.early_stop=3", "train.save_every=1"]].concat();
    scratch.train("clean", &overrides);
    scratch.train("run", &overrides);
    std::fs::remove_dir_all(scratch.path("run/adapter")).unwrap();
    // All steps are done, only the end is missing: no further step is taken.
    let ended = scratch.train("run", &[&overrides[..], &["--resume"]].concat());
    assert!(ended.stderr.contains("stopped early: no improvement in 3 evaluations"), "{}", ended.stderr);
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
    assert_eq!(evaluations(&scratch, "run"), evaluations(&scratch, "clean"));
    assert_eq!(scratch.checkpoints("run"), scratch.checkpoints("clean"));
}

#[test]
fn a_best_checkpoint_that_was_removed_is_sought_anew() {
    let scratch = with_other_rows();
    let overrides = [&RISING[..], &["train.early_stop=3", "train.save_every=1"]].concat();
    scratch.train("run", &overrides);
    let (step, _) = best(&evaluations(&scratch, "run"));
    std::fs::remove_dir_all(scratch.path("run/adapter")).unwrap();
    std::fs::remove_dir_all(scratch.path(&format!("run/checkpoint-{step}"))).unwrap();
    let ended = scratch.train("run", &[&overrides[..], &["--resume"]].concat());
    let words = format!(
        "warning: `checkpoint-{step}`, the best evaluated, is gone: best-checkpoint tracking restarts"
    );
    assert!(ended.stderr.contains(&words), "{}", ended.stderr);
}

#[test]
fn early_stopping_without_evaluations_is_refused() {
    let scratch = Scratch::new();
    let words = ["`train.early_stop` has no effect: `train.eval_every` is 0"];
    scratch.train_refused(2, &["train.early_stop=2"], &words);
    let words = ["`train.eval_every` has no effect: `data.eval` names no file"];
    scratch.train_refused(2, &["train.early_stop=2", "train.eval_every=1"], &words);
}

#[test]
fn the_state_beside_every_adapter_tells_the_history() {
    let scratch = with_other_rows();
    scratch.train("run", &[&RISING[..], &["train.steps=6", "train.save_every=4"]].concat());
    for (folder, step, epochs) in [("checkpoint-4", 4, 4.0 / 3.0), ("adapter", 6, 2.0)] {
        let text = scratch.text(&format!("run/{folder}/trainer_state.json"));
        assert!(text.starts_with("{\n  \"best_global_step\": ") && text.ends_with("\n}\n"), "{text}");
        let state: Value = serde_json::from_str(&text).unwrap();
        let keys: Vec<&String> = state.as_object().unwrap().keys().collect();
        assert!(keys.is_sorted(), "{keys:?}");
        assert_eq!((&state["global_step"], &state["epoch"]), (&json!(step), &json!(epochs)));
        assert_eq!((&state["max_steps"], &state["num_train_epochs"]), (&json!(6), &json!(2)));
        let rows: Vec<Value> =
            scratch.metrics("run").into_iter().filter(|row| row["step"].as_u64() <= Some(step)).collect();
        let history = state["log_history"].as_array().unwrap();
        let end = usize::from(folder == "adapter");
        assert_eq!(history.len(), rows.len() + end, "{folder}");
        for (log, row) in history.iter().zip(&rows) {
            for (name, own) in [
                ("step", "step"),
                ("epoch", "epoch"),
                ("loss", "loss"),
                ("learning_rate", "lr"),
                ("eval_loss", "eval_loss"),
            ] {
                assert_eq!(log.get(name), row.get(own), "{folder} {name}");
            }
        }
        let tokens: u64 = rows.iter().filter_map(|row| row.get("tokens")?.as_u64()).sum();
        assert_eq!(state["num_input_tokens_seen"], json!(tokens));
    }
}

#[test]
fn the_event_file_holds_every_row_of_the_metrics() {
    let scratch = with_other_rows();
    scratch.train("run", &[&RISING[..], &["train.steps=5", "adapter.kind=ls-lora"]].concat());
    let mut expected = Vec::new();
    for row in scratch.metrics("run") {
        let step = row["step"].as_u64().unwrap();
        let names: &[(&str, &str)] = match row.get("eval_loss") {
            Some(_) => &[("eval/loss", "eval_loss")],
            None => &[
                ("train/epoch", "epoch"),
                ("train/loss", "loss"),
                ("train/reg_loss", "reg_loss"),
                ("train/grad_norm", "grad_norm"),
                ("train/learning_rate", "lr"),
                ("train/tokens_per_s", "tokens_per_s"),
            ],
        };
        for (tag, name) in names {
            expected.push((step, tag.to_string(), row[*name].as_f64().unwrap() as f32));
        }
    }
    assert_eq!(read_scalars(&scratch.path("run")), expected);
    let events = read_events(&scratch.path("run"));
    assert!(events.windows(2).all(|pair| pair[0].wall_s <= pair[1].wall_s && pair[0].wall_s > 1.7e9));
}
