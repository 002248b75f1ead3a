//! `smidgen eval` and evaluations of a run that score choices, from outside.
//!
//! The model is tiny and random: that numbers are right is tested beside the code; here, that they arrive.

use crate::scratch::{Scratch, fixture};
use serde_json::{Value, json};

const RECIPE: &str = r#"[model]
path = "model"

[adapter]
rank = 4
alpha = 8

[data]
train = "instructions.json"
eval = "instructions.json"
max_tokens = 128

[train]
batch = 4
steps = 4
lr = 2e-2
seed = 7

[memory]
device = "cpu"
threads = 2
budget = "64MiB"

[output]
dir = "run"
"#;

/// The tiny model of `fixtures/eval` with a tokenizer that has a chat template.
fn scratch() -> Scratch {
    let scratch = Scratch::new();
    std::fs::remove_dir_all(scratch.path("model")).unwrap();
    for (folder, names) in [
        ("eval/model", &["config.json", "model.safetensors"][..]),
        ("sft/byte_level", &["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]),
    ] {
        for name in names {
            scratch.write(&format!("model/{name}"), std::fs::read(fixture(folder).join(name)).unwrap());
        }
    }
    for name in ["questions.json", "instructions.json"] {
        scratch.write(name, std::fs::read(fixture("eval").join(name)).unwrap());
    }
    let answers: Vec<Value> = (0..8)
        .map(|number| {
            let answer = format!("answer{}", number % 2 + 1);
            let output = format!("the correct answer is {answer}");
            json!({"instruction": format!("the quick fox {number}"), "input": "", "output": output, "answer": answer})
        })
        .collect();
    scratch.write("answers.json", Value::from(answers).to_string());
    scratch.write("recipe.toml", RECIPE);
    scratch
}

fn eval(scratch: &Scratch, arguments: &[&str]) -> Value {
    let ended = scratch.run(&[&["eval"], arguments, &["--json", "--quiet"]].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stderr, "");
    serde_json::from_str(&ended.stdout).unwrap()
}

#[test]
fn a_run_is_scored_beside_its_base() {
    let scratch = scratch();
    // Before training there is only the base.
    let base = eval(&scratch, &["recipe.toml", "--task", "choice"]);
    assert_eq!((&base["rows"], base.get("adapter")), (&json!(12), None));
    let trained =
        scratch.train("run", &["train.steps=30", "eval.task=choice", "train.eval_every=15", "--quiet"]);
    assert_eq!(trained.code, Some(0), "{}", trained.stderr);
    let rows = scratch.metrics("run");
    let evaluated: Vec<&Value> = rows.iter().filter(|row| row.get("eval_acc").is_some()).collect();
    assert_eq!(evaluated.len(), 2);
    for name in ["eval_acc_norm", "eval_acc_bytes", "eval_acc_stderr", "eval_acc_norm_stderr", "eval_loss"] {
        assert!(evaluated[1][name].is_f64(), "{name}: {}", evaluated[1]);
    }
    let state = scratch.json("run/adapter/trainer_state.json");
    let logged = state["log_history"].as_array().unwrap().iter().filter(|row| row.get("eval_acc").is_some());
    assert_eq!(logged.count(), 2);
    // The trained model again, from its folder: the same numbers as the last evaluation of the run.
    let found = eval(&scratch, &["run"]);
    assert_eq!(found["base"], base["base"]);
    assert_eq!(found["task"], "choice");
    assert!(
        (found["adapter"]["acc"].as_f64().unwrap() - evaluated[1]["eval_acc"].as_f64().unwrap()).abs()
            < 1e-12
    );
    let difference = found["adapter"]["loss"].as_f64().unwrap() - evaluated[1]["eval_loss"].as_f64().unwrap();
    assert!(difference.abs() < 1e-5, "{difference}");
    assert!(found["adapter"]["loss"].as_f64().unwrap() < found["base"]["loss"].as_f64().unwrap() - 0.5);
    assert_eq!(scratch.json("run/eval.json"), json!({ "choice": found }));
    let [planned, measured] = ["planned_bytes", "measured_bytes"].map(|name| found[name].as_u64());
    assert!(planned > Some(10 << 20) && planned <= Some(64 << 20), "{planned:?}");
    assert_eq!(measured.is_some(), cfg!(target_os = "linux"));
    let sample = &found["samples"][4];
    assert_eq!(sample["base"], base["samples"][4]["base"]);
    assert_ne!(sample["base"]["log_likelihoods"], sample["adapter"]["log_likelihoods"]);
    assert_eq!(
        sample["choices"].as_array().unwrap().len(),
        sample["adapter"]["log_likelihoods"].as_array().unwrap().len()
    );
    let flips = found["to_right"].as_f64().unwrap() - found["to_wrong"].as_f64().unwrap();
    let acc = |model: &str| found[model]["acc"].as_f64().unwrap();
    assert!((acc("adapter") - acc("base") - flips / 12.0).abs() < 1e-12);
    // What people see.
    let table = scratch.run(&["eval", "recipe.toml", "eval.task=choice", "--out", "here.json"]);
    assert_eq!(table.code, Some(0), "{}", table.stderr);
    for words in ["base", "adapter", "difference", "perplexity", "acc norm", "12 rows: the adapter turns"] {
        assert!(table.stdout.contains(words), "{}", table.stdout);
    }
    assert!(table.stderr.contains("results of each row are in `here.json`"), "{}", table.stderr);
    assert!(!table.stderr.contains("base weights"), "{}", table.stderr);
    let planned = scratch.run(&["eval", "recipe.toml", "eval.task=choice", "--plan", "--limit", "2"]);
    for words in ["evaluation · budget 64.00 MiB", "base weights", "context", "fits, "] {
        assert!(planned.stderr.contains(words), "{}", planned.stderr);
    }
    assert_eq!(scratch.json("here.json")["adapter"], found["adapter"]);
    // The loss alone is that of the run too.
    let loss = eval(&scratch, &["run", "--task", "loss"]);
    assert_eq!(scratch.json("run/eval.json"), json!({ "choice": found, "loss": loss }));
    // A file from before 0.11 holds one result, which says its task.
    scratch.write("run/eval.json", found.to_string());
    let loss = eval(&scratch, &["run", "--task", "loss"]);
    assert_eq!(scratch.json("run/eval.json"), json!({ "choice": found, "loss": loss }));
    let difference = loss["adapter"]["loss"].as_f64().unwrap() - found["adapter"]["loss"].as_f64().unwrap();
    assert!(difference.abs() < 1e-6, "{difference}");
    assert_eq!(loss["samples"].as_array().unwrap().len(), 12);
    let alone = eval(&scratch, &["run", "--base", "--limit", "5"]);
    assert_eq!((&alone["rows"], alone.get("adapter")), (&json!(5), None));
}

#[test]
fn rows_that_are_held_out_are_scored_as_choices_and_as_answers() {
    let scratch = scratch();
    let split = ["data.eval=", "data.split=0.3", "eval.task=choice", "train.eval_every=4"];
    let trained = scratch.train("run", &[&split[..], &["--quiet"]].concat());
    assert_eq!(trained.code, Some(0), "{}", trained.stderr);
    let rows = scratch.metrics("run");
    let last = rows.last().unwrap();
    assert!(last["eval_acc"].is_f64() && last["eval_loss"].is_f64(), "{last}");
    // The rows that were not trained on, as a file of their own, score the same.
    let found = eval(&scratch, &["run"]);
    assert_eq!(found["rows"], 4);
    let places = found["samples"].as_array().unwrap().iter().map(|row| row["place"].as_str().unwrap());
    let numbers: Vec<usize> =
        places.map(|place| place.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    let all = scratch.json("instructions.json");
    let held: Vec<Value> = numbers.iter().map(|number| all[number - 1].clone()).collect();
    scratch.write("held.json", Value::from(held).to_string());
    let alone = eval(&scratch, &["run", "data.split=0", "data.eval=held.json"]);
    assert_eq!(alone["adapter"], found["adapter"]);
    assert_eq!(alone["base"]["acc"], found["base"]["acc"]);
    // What a model says to them.
    let answers = [
        "recipe.toml",
        "data.train=answers.json",
        "data.eval=",
        "data.split=0.25",
        "eval.answer=answer[1-5]",
    ];
    let found = eval(&scratch, &[&answers[..], &["--task", "generate"]].concat());
    assert_eq!(found["samples"].as_array().unwrap().len(), 2);
}

#[test]
fn plain_questions_are_scored_and_trained_with() {
    let scratch = scratch();
    let found = eval(&scratch, &["recipe.toml", "data.eval=questions.json", "--task", "choice"]);
    // Recorded with the same model and tokenizer by lm-evaluation-harness.
    let expected: Value =
        serde_json::from_slice(&std::fs::read(fixture("eval").join("record.json")).unwrap()).unwrap();
    let wanted = &expected[1];
    assert_eq!((&wanted["rows"], &wanted["tokenizer"]), (&json!("questions"), &json!("byte_level")));
    assert_eq!(found["base"]["acc"], wanted["results"]["acc"]);
    assert_eq!(found["base"]["acc_norm"], wanted["results"]["acc_norm"]);
    assert_eq!(found["samples"][3]["id"], "q3");
    let trained = scratch.train(
        "run",
        &["data.eval=questions.json", "eval.task=choice", "train.eval_every=4", "eval.limit=6", "--quiet"],
    );
    assert_eq!(trained.code, Some(0), "{}", trained.stderr);
    let rows = scratch.metrics("run");
    let last = rows.last().unwrap();
    assert_eq!(last["eval_samples"], 6);
    assert!(last["eval_loss"].as_f64().unwrap() > 0.0 && last["eval_acc"].is_f64());
}

#[test]
fn bad_questions_are_reported_together_or_skipped() {
    let scratch = scratch();
    let all = scratch.json("questions.json");
    let lines = all.as_array().unwrap().iter().map(|row| format!("{row}\n")).collect::<String>();
    let mut bytes = b"{\"question\": \"\xFF\", \"choices\": []}\n".to_vec();
    bytes.extend_from_slice(lines.as_bytes());
    bytes.extend_from_slice(b"{\"choices\": []}\n");
    scratch.write("bad.jsonl", bytes);
    let arguments = ["recipe.toml", "data.eval=bad.jsonl", "--task", "choice"];
    let refused = scratch.run(&[&["eval"], &arguments[..]].concat());
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    for words in [
        "2 of 14 rows are bad",
        "1 row: is not UTF-8 (line 1)",
        "1 row: the row has none of `question`, `question_stem` and `query` (line 14)",
    ] {
        assert!(refused.stderr.contains(words), "{}", refused.stderr);
    }
    let ended = scratch.run(&[&["eval"], &arguments[..], &["data.on_bad_row=skip", "--json"]].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("2 of 14 rows skipped"), "{}", ended.stderr);
    let found: Value = serde_json::from_str(&ended.stdout).unwrap();
    let sound = eval(&scratch, &["recipe.toml", "data.eval=questions.json", "--task", "choice"]);
    assert_eq!(found["base"], sound["base"]);
}

#[test]
fn what_a_model_says_is_searched_for_answers() {
    let scratch = scratch();
    let arguments =
        ["recipe.toml", "data.eval=answers.json", "data.train=answers.json", "eval.answer=answer[1-5]"];
    let trained = scratch.train("run", &[&arguments[1..3], &["train.steps=60", "--quiet"]].concat());
    assert_eq!(trained.code, Some(0), "{}", trained.stderr);
    let found = eval(&scratch, &[&arguments[..], &["--task", "generate"]].concat());
    assert_eq!(found["samples"].as_array().unwrap().len(), 8);
    // What is trained on so few rows is learnt; the base says noise.
    assert_eq!(found["base"]["acc"], 0.0);
    assert_eq!(found["base"]["unanswered"], 1.0);
    assert!(found["adapter"]["unanswered"].as_f64().unwrap() < 0.5, "{}", found["samples"][0]);
    assert!(
        found["samples"][0]["adapter"]["text"].as_str().unwrap().contains("the correct answer is answer")
    );
    let beams =
        eval(&scratch, &[&arguments[..], &["--task", "generate", "--beams", "3", "--limit", "2"]].concat());
    assert_eq!((&beams["beams"], &beams["rows"]), (&json!(3), &json!(2)));
}

#[test]
fn what_cannot_be_evaluated_is_refused() {
    let scratch = scratch();
    let refused = |arguments: &[&str], code: i32, words: &[&str]| {
        let ended = scratch.run(&[&["eval"], arguments].concat());
        assert_eq!(ended.code, Some(code), "{arguments:?}: {}", ended.stderr);
        for word in words {
            assert!(ended.stderr.contains(word), "{arguments:?}: {}", ended.stderr);
        }
        assert_eq!(ended.stdout, "");
    };
    refused(&["recipe.toml", "data.eval=[]"], 2, &["`data.eval` names no file"]);
    refused(&["recipe.toml", "--beams", "0"], 2, &["`--beams` must be at least 1"]);
    refused(&["recipe.toml", "--beams", "2"], 2, &["`--beams` needs `--task generate`, the task is `loss`"]);
    refused(&["recipe.toml", "--task", "guess"], 2, &["eval.task", "guess"]);
    refused(&["recipe.toml", "memory.device=cuda:99"], 1, &["cuda:99", "`memory.device = \"cpu\"` trains"]);
    refused(&["recipe.toml", "model.compute=f16"], 2, &["`model.compute = f16` needs a GPU"]);
    refused(&["model"], 2, &["`model` is not the folder of a run: it has no `job.toml`"]);
    refused(&["recipe.toml", "--adapter", "nowhere"], 1, &["`nowhere` does not exist"]);
    let pattern = ["recipe.toml", "data.eval=answers.json", "--task", "choice", "eval.answer=answer["];
    refused(&pattern, 2, &["`eval.answer` is not a regular expression"]);
    let pattern = ["recipe.toml", "data.eval=answers.json", "--task", "generate", "eval.answer=option[12]"];
    refused(&pattern, 1, &["row 1: `eval.answer` (`option[12]`) does not match the answer `answer1`"]);
    for task in ["choice", "generate"] {
        let small = ["recipe.toml", "data.eval=answers.json", "--task", task, "memory.budget=4MiB"];
        refused(&small, 1, &["4.00 MiB", "hint: "]);
    }
    let words = ["`eval.task = generate` is not supported", "`smidgen eval` generates after training"];
    scratch.train_refused(2, &["eval.task=generate"], &words);
}
