//! A run folder has one owner: a second run in it is refused and changes nothing, and what a killed run held is free.

use crate::scratch::Scratch;
use std::process::{Child, Command};
use std::time::Duration;

const OVERRIDES: [&str; 3] = ["train.epochs=40", "train.save_every=5", "train.log_every=0"];

/// A run that has trained some steps and is paused, whatever the speed of the machine.
fn paused(scratch: &Scratch) -> Child {
    let child =
        scratch.start(&[&["train", "recipe.toml", "output.dir=run", "--quiet"][..], &OVERRIDES].concat());
    while !scratch.exists("run/metrics.jsonl") {
        std::thread::sleep(Duration::from_millis(2));
    }
    signal(&child, "STOP");
    child
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

#[test]
fn a_second_run_is_refused_and_the_first_ends_as_if_alone() {
    let scratch = Scratch::new();
    scratch.train("alone", &OVERRIDES);
    let mut first = paused(&scratch);
    for resume in [&[][..], &["--resume"]] {
        let second = [&["train", "recipe.toml", "output.dir=run"][..], &OVERRIDES, resume].concat();
        scratch.refused(1, &second, &["another process is training in", "hint: wait until it ends"]);
    }
    signal(&first, "CONT");
    assert!(first.wait().unwrap().success());
    assert!(scratch.adapter("run") == scratch.adapter("alone"));
    assert_eq!(scratch.losses("run"), scratch.losses("alone"));
    assert!(!scratch.exists("run/.lock"));
}

/// `report`, `dash` and `eval` take no lock and write nothing but a whole file of their own.
#[test]
fn a_run_can_be_looked_at_while_it_goes_on() {
    let scratch = Scratch::new();
    let mut first = paused(&scratch);
    let before = scratch.files();
    for (command, own) in [
        (&["report", "run"][..], "run/report.html"),
        (&["eval", "run", "--base", "data.eval=data.jsonl", "--quiet"], "run/eval.json"),
    ] {
        let ended = scratch.run(command);
        assert_eq!(ended.code, Some(0), "{command:?}: {}", ended.stderr);
        assert!(scratch.exists(own) && scratch.exists("run/.lock"));
        let mut after = scratch.files();
        after.retain(|path, _| !before.contains_key(path));
        let new: Vec<_> = after.keys().map(|path| path.strip_prefix(scratch.root()).unwrap()).collect();
        assert_eq!(new, [std::path::Path::new(own)], "{command:?}");
        std::fs::remove_file(scratch.path(own)).unwrap();
        assert!(scratch.files() == before, "{command:?} changed a file of the run");
    }
    signal(&first, "KILL");
    first.wait().unwrap();
}

#[test]
fn a_killed_run_owns_nothing() {
    let scratch = Scratch::new();
    scratch.train("alone", &OVERRIDES);
    let mut first = paused(&scratch);
    signal(&first, "KILL");
    first.wait().unwrap();
    assert!(scratch.exists("run/.lock"), "a killed process removes nothing");
    scratch.train("run", &[&OVERRIDES[..], &["--resume"]].concat());
    assert!(scratch.adapter("run") == scratch.adapter("alone"));
    assert!(!scratch.exists("run/.lock"));
}
