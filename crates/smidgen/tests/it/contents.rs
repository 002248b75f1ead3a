//! What a run is made of is compared when it is resumed: other data, weights, config, tokenizer or template are refused
//! by name, or accepted and recorded.

use crate::guards::set_values;
use crate::scratch::Scratch;
use serde_json::{Value, json};

const WEIGHTS: &str = "model/model.safetensors";
const RUN: [&str; 2] = ["train.save_every=4", "train.log_every=0"];
const RESUME: [&str; 3] = ["train.save_every=4", "train.log_every=0", "--resume"];
const QUIET: [&str; 4] = ["train.save_every=4", "train.log_every=0", "--resume", "--quiet"];

/// A run of six steps that was killed after its checkpoint of step 4.
fn killed() -> Scratch {
    let scratch = Scratch::new();
    scratch.write("model/tokenizer_config.json", "{}");
    scratch.train("run", &RUN);
    scratch.forget_end("run", 4);
    scratch
}

fn change_data(scratch: &Scratch) {
    let text = scratch.text("data.jsonl");
    let lines: Vec<&str> = text.lines().collect();
    scratch.write("data.jsonl", lines[1..].join("\n") + "\n");
}

fn scale_weights(scratch: &Scratch, tensor: &str) {
    set_values(scratch, WEIGHTS, tensor, 7, &[-1.5, 0.25]);
}

fn change_config(scratch: &Scratch) {
    scratch.edit_json("model/config.json", |config| config["rms_norm_eps"] = json!(1e-4));
}

/// Weights are compared when they are loaded: until then only the plan is written again.
fn refused_after_loading(scratch: &Scratch, overrides: &[&str], words: &[&str]) {
    let files = || {
        let mut files = scratch.files();
        files.retain(|path, _| {
            !["plan.json", "plan.txt", "report.html"].iter().any(|name| path.ends_with(name))
        });
        files
    };
    let before = files();
    let ended = scratch.run(&[&["train", "recipe.toml"][..], &QUIET, overrides].concat());
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    for word in words {
        assert!(ended.stderr.contains(word), "does not say {word:?}: {}", ended.stderr);
    }
    assert!(files() == before);
}

#[test]
fn what_changed_is_refused_by_its_name() {
    let hint = [
        "the data or model of the run in `",
        "` changed",
        "hint: restore what was changed",
        "--accept-changes",
    ];
    let check = |change: &dyn Fn(&Scratch), words: &[&str]| {
        let scratch = killed();
        change(&scratch);
        scratch.train_refused(1, &QUIET, &[words, &hint].concat());
    };
    check(&change_data, &["`data.train` has different samples: 9 with "]);
    // One token of one sample.
    let one_token = |scratch: &Scratch| {
        let text = scratch.text("data.jsonl");
        let (first, rest) = text.split_once('\n').unwrap();
        let mut row: Value = serde_json::from_str(first).unwrap();
        row["input_ids"][1] = json!((row["input_ids"][1].as_u64().unwrap() + 1) % 211);
        scratch.write("data.jsonl", format!("{row}\n{rest}"));
    };
    check(&one_token, &["`data.train` has different samples: 10 with "]);
    check(&change_config, &["the config's `rms_norm_eps` was 1e-6, is 0.0001"]);
    check(
        &|scratch| scratch.write("model/tokenizer_config.json", "{\"add_bos_token\": true}"),
        &["the tokenizer file `tokenizer_config.json` changed"],
    );
    check(
        &|scratch| scratch.write("model/chat_template.jinja", "{{ messages }}"),
        &["the template file `chat_template.jinja` is new"],
    );
    let norm = "model.layers.1.input_layernorm.weight";
    let scratch = killed();
    scale_weights(&scratch, norm);
    let words = [&format!("`{norm}` in `")[..], "model.safetensors` has different values\n"];
    refused_after_loading(&scratch, &[], &[&words, &hint[..]].concat());
    scale_weights(&scratch, "model.norm.weight");
    let words = [&format!("`{norm}` in `")[..], "has different values (2 of "];
    refused_after_loading(&scratch, &[], &words);
}

#[test]
fn weights_are_compared_however_they_are_stored() {
    for (case, path, base) in [
        ("llama-bnb-nf4", "model", "as-stored"),
        ("gguf-llama", "model.gguf", "as-stored"),
        ("llama-gqa-tied", "model", "nf4"),
        ("llama-gqa-tied", "model", "bf16"),
    ] {
        let scratch = Scratch::of(case);
        let common = [&format!("model.path={path}")[..], &format!("model.base={base}")];
        scratch.train("run", &[&RUN[..], &common].concat());
        scratch.forget_end("run", 4);
        match path {
            "model" => set_values(&scratch, WEIGHTS, "model.layers.1.self_attn.q_proj.weight", 0, &[1.5]),
            _ => {
                // The end of the file is the end of its last tensor.
                let mut bytes = scratch.read(path);
                let last = bytes.len() - 3;
                bytes[last] ^= 1;
                scratch.write(path, bytes);
            }
        }
        refused_after_loading(&scratch, &common, &["has different values"]);
    }
}

#[test]
fn accepted_changes_are_recorded() {
    let scratch = killed();
    change_data(&scratch);
    scale_weights(&scratch, "model.norm.weight");
    let more = [&RESUME[..], &["--accept-changes", "train.steps=8"]].concat();
    let ended = scratch.train("run", &more);
    let changes = ["`data.train` has different samples", "`model.norm.weight` in `"];
    for change in changes {
        assert!(ended.stderr.contains(&format!("warning: accepted: {change}")), "{}", ended.stderr);
    }
    let starts = |list: &Value| {
        let list = list.as_array().unwrap();
        assert_eq!(list.len(), 2, "{list:?}");
        list.iter().zip(changes).all(|(found, expected)| found.as_str().unwrap().starts_with(expected))
    };
    let state = scratch.json("run/checkpoint-8/smidgen_state.json");
    assert_eq!(state["made_of"]["accepted"][0]["after_step"], json!(4));
    assert!(starts(&state["made_of"]["accepted"][0]["changes"]));
    assert!(starts(&scratch.json("run/run.json")["parts"][1]["accepted"]));
    let report: Value = serde_json::from_str(&scratch.run(&["report", "run", "--json"]).stdout).unwrap();
    assert!(starts(&report["accepted_changes"]));
    assert!(scratch.text("run/report.html").contains("`data.train` has different samples"));
    // What was accepted is what the run is made of from there on.
    std::fs::remove_dir_all(scratch.path("run/adapter")).unwrap();
    scratch.train("run", &[&RESUME[..], &["train.steps=9"]].concat());
    let state = scratch.json("run/checkpoint-8/smidgen_state.json");
    assert_eq!(state["made_of"]["accepted"].as_array().unwrap().len(), 1);
    let needless = scratch.run(&["train", "recipe.toml", "--accept-changes"]);
    assert_eq!(needless.code, Some(2), "{}", needless.stderr);
}

const STATE: &str = "run/checkpoint-4/smidgen_state.json";

#[test]
fn checkpoints_of_other_versions_resume_with_a_warning_or_not_at_all() {
    let scratch = killed();
    scratch.forget_checksums("run/checkpoint-4");
    scratch.train("clean", &RUN);
    scratch.edit_json(STATE, |state| state["made_of"]["program"] = json!("0.10.9"));
    let warning =
        format!("warning: smidgen 0.10.9 wrote the checkpoint, this is {}: ", env!("CARGO_PKG_VERSION"));
    let ended = scratch.train("run", &RESUME);
    assert!(ended.stderr.contains(&warning), "{}", ended.stderr);
    assert!(scratch.adapter("run") == scratch.adapter("clean"));

    let scratch = killed();
    scratch.forget_checksums("run/checkpoint-4");
    scratch.edit_json(STATE, |state| {
        state["version"] = json!(2);
        state.as_object_mut().unwrap().remove("made_of");
    });
    let ended = scratch.train("run", &RESUME);
    let warning = "warning: smidgen 0.10 or earlier wrote the checkpoint: cannot check whether data and model are the same";
    assert!(ended.stderr.contains(warning), "{}", ended.stderr);

    let scratch = killed();
    scratch.forget_checksums("run/checkpoint-4");
    scratch.edit_json(STATE, |state| state["version"] = json!(5));
    let words = ["is version 5 of step 4, expected version 1 to 4", "hint: a later version of smidgen wrote"];
    scratch.train_refused(1, &QUIET, &words);
}

/// 0.10 wrote its defaults into the job: `loss_on = "completion"` and `overflow = "truncate"`.
#[test]
fn a_run_of_an_older_version_keeps_the_defaults_it_was_started_with() {
    let old = ["data.loss_on=completion", "data.overflow=truncate"];
    let scratch = Scratch::new();
    scratch.train("clean", &[&RUN[..], &old].concat());
    let start = || {
        let scratch = Scratch::new();
        scratch.train("run", &[&RUN[..], &old].concat());
        scratch.forget_end("run", 4);
        scratch.forget_checksums("run/checkpoint-4");
        let new_keys = ["split =", "limit =", "columns =", "on_bad_row ="];
        for name in ["run/job.toml", "run/checkpoint-4/job.toml"] {
            let job = scratch.text(name);
            assert!(
                job.contains("loss_on = \"completion\"") && job.contains("overflow = \"truncate\""),
                "{job}"
            );
            let kept = job.lines().filter(|line| !new_keys.iter().any(|key| line.starts_with(key)));
            scratch.write(name, kept.map(|line| format!("{line}\n")).collect::<String>());
        }
        scratch.edit_json(STATE, |state| {
            state["version"] = json!(2);
            state.as_object_mut().unwrap().remove("made_of");
        });
        scratch
    };
    let run = start();
    let ended = run.train("run", &RESUME);
    for (key, value) in [("loss_on", "completion"), ("overflow", "truncate")] {
        let warning = format!(
            "warning: `data.{key}` stays `{value}`, with which the run was started: the default is `auto` since 0.11"
        );
        assert!(ended.stderr.contains(&warning), "{}", ended.stderr);
        assert!(run.text("run/job.toml").contains(&format!("{key} = \"{value}\"")));
    }
    assert!(run.adapter("run") == scratch.adapter("clean"));
    // It does so as often as it is resumed.
    std::fs::remove_dir_all(run.path("run/adapter")).unwrap();
    let ended = run.train("run", &[&RESUME[..], &["train.steps=8"]].concat());
    assert!(ended.stderr.contains("`data.loss_on` stays `completion`"), "{}", ended.stderr);
    // What the recipe says is a difference as ever.
    let other = start();
    let words = ["the recipe differs", "`data.loss_on` was \"completion\", is \"auto\""];
    other.train_refused(2, &[&QUIET[..], &["data.loss_on=auto"]].concat(), &words);
}

#[test]
fn a_checkpoint_of_another_run_is_refused() {
    let scratch = killed();
    scratch.train("other", &[&RUN[..], &["train.seed=8"]].concat());
    std::fs::remove_dir_all(scratch.path("run/checkpoint-4")).unwrap();
    std::fs::rename(scratch.path("other/checkpoint-4"), scratch.path("run/checkpoint-4")).unwrap();
    scratch.train_refused(
        2,
        &QUIET,
        &["the recipe differs", "run/checkpoint-4`", "`train.seed` was 8, is 7"],
    );
}
