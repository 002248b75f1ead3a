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
