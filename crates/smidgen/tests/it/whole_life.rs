//! The whole life of a run against its plan, through the program: what each phase is planned to take, what the commands
//! that follow take, and budgets that the machine cannot hold.

use crate::scratch::Scratch;
use serde_json::{Value, json};

fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a number of bytes"))
}

#[test]
fn every_phase_has_its_bytes_in_every_space() {
    let scratch = Scratch::new();
    let plan = scratch.plan(&["data.eval=data.jsonl", "train.eval_every=2", "train.save_every=2"]);
    let life = plan["life"].as_object().unwrap();
    let mut names: Vec<&String> = life.keys().collect();
    names.sort();
    assert_eq!(names, ["eval", "export", "generate", "load", "merge", "resume", "save", "train"]);
    for (name, spaces) in life {
        let mut keys: Vec<&String> = spaces.as_object().unwrap().keys().collect();
        keys.sort();
        assert_eq!(keys, ["device", "disk", "host", "pinned"], "{name}");
        assert!(bytes(&spaces["device"]) > 0, "{name}");
    }
    // The reservation is one: nothing of a run takes more, saving no second copy.
    for name in ["load", "train", "eval", "save", "resume"] {
        assert_eq!(life[name]["device"], plan["peak_bytes"], "{name}");
    }
    assert!(bytes(&life["save"]["disk"]) > bytes(&life["train"]["disk"]));
    let save = &life["save"]["disk"];
    let must_fit = json!({"device": plan["peak_bytes"], "pinned": 0, "host": 0, "disk": save});
    assert_eq!(plan["must_fit"], must_fit);
    // What a recipe does not do is not planned for.
    let plan = scratch.plan(&["train.save_every=0"]);
    assert!(plan["life"].get("eval").is_none());
    // What lies on disk while it is not needed is there in every phase.
    let plan = scratch.plan(&["memory.optimizer_state=host"]);
    let away = bytes(&plan["spaces"]["disk"]);
    assert!(away > 0 && bytes(&plan["life"]["load"]["disk"]) == away);
}

#[test]
fn the_commands_that_follow_take_what_was_planned() {
    let scratch = Scratch::new();
    scratch.train("run", &[]);
    let life = &scratch.json("run/plan.json")["life"];
    let (ended, peak_bytes) =
        scratch.run_measured(&["merge", "run", "--base", "model", "--output", "merged", "--json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let merged: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(merged["written"]["bytes"], life["merge"]["disk"]);
    assert_eq!(merged["planned_bytes"], life["merge"]["device"]);
    // A small model does not fill the blocks that a merge reserves, so only the upper bound holds.
    assert!(
        peak_bytes.is_none_or(|peak_bytes| peak_bytes <= bytes(&merged["planned_bytes"])),
        "{peak_bytes:?}"
    );
    let ended =
        scratch.run(&["export", "run", "--base", "model", "--merged", "--output", "merged.gguf", "--json"]);
    if ended.code == Some(0) {
        let exported: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(exported["planned_bytes"], life["export"]["device"]);
    } else {
        // The fixture has no tokenizer, without which there is no such file.
        assert!(ended.stderr.contains("tokenizer"), "{}", ended.stderr);
    }
}

#[test]
fn a_budget_that_the_machine_cannot_hold_is_refused() {
    let scratch = Scratch::new();
    if smidgen::internal::read_ram().total_bytes.is_none() {
        eprintln!("skipped: not measured on this system how much memory it has");
        return;
    }
    let words =
        ["`memory.budget` is 4000.00 TiB, and this ", "hint: `memory.budget = \"auto\"` takes what is free"];
    scratch.train_refused(1, &["memory.budget=4000TiB"], &words);
    // A plan may be for another machine.
    assert_eq!(scratch.plan(&["memory.budget=4000TiB"])["fits"], json!(true));
}

#[test]
fn a_run_that_may_adapt_is_the_same_while_nothing_moves() {
    let scratch = Scratch::new();
    let saves = "train.save_every=2";
    scratch.train("fixed", &[saves]);
    scratch.train("adapting", &[saves, "memory.adapt=true"]);
    assert!(scratch.adapter("adapting") == scratch.adapter("fixed"));
    assert_eq!(scratch.losses("adapting"), scratch.losses("fixed"));
    let words = ["`memory.adapt` has no effect: `train.save_every` is 0"];
    scratch.train_refused(2, &["memory.adapt=true", "train.save_every=0"], &words);
}

#[test]
fn what_auto_leaves_to_others_is_said() {
    let scratch = Scratch::new();
    let plan = scratch.plan(&["memory.budget=auto"]);
    let notes = plan["notes"].as_array().unwrap();
    let is_said = |note: &Value| note.as_str().unwrap().ends_with("free for other processes");
    assert!(notes.iter().any(is_said), "{notes:?}");
}
