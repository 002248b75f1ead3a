//! What the program says, whole: help, tables, the lines of a run. Data on stdout, talk on stderr.
//!
//! Snapshots hold all but speeds, losses and the folder; `UPDATE_EXPECT=1 cargo test` rewrites them.

use crate::scratch::Scratch;
use expect_test::{Expect, expect};

fn check(scratch: &Scratch, said: &str, expected: Expect) {
    expected.assert_eq(&scratch.neutral(said));
}

#[test]
fn help_lists_the_commands() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["--help"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    check(&scratch, &ended.stdout, expect![[]]);
    let ended = scratch.run(&["train", "--help"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    check(&scratch, &ended.stdout, expect![[]]);
}

#[test]
fn a_command_that_is_none_is_the_callers_mistake() {
    let scratch = Scratch::new();
    for arguments in [&[][..], &["fine-tune"], &["plan"], &["plan", "recipe.toml", "--json", "--text"]] {
        let ended = scratch.run(arguments);
        assert_eq!((ended.code, &*ended.stdout), (Some(2), ""), "{arguments:?}");
        assert!(!ended.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn plan_prints_the_budget_table() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["plan", "recipe.toml"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    check(&scratch, &ended.stdout, expect![[]]);
    assert!(!scratch.exists("run"));
}

#[test]
fn plan_without_a_stated_budget_takes_what_is_free() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["plan", "recipe.toml", "memory.budget=auto"]);
    assert_eq!(ended.code, Some(0));
    let title = ended.stdout.lines().next().unwrap();
    check(&scratch, title, expect![[]]);
}

#[test]
fn plan_as_text_lists_leaves_and_steps() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["plan", "recipe.toml", "--text"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    let head: Vec<&str> = ended.stdout.lines().take(8).collect();
    check(&scratch, &head.join("\n"), expect![[]]);
    assert_eq!(ended.stdout, scratch.run(&["plan", "recipe.toml", "--text"]).stdout);
}

#[test]
fn plan_needs_neither_data_nor_weights_and_says_so() {
    let scratch = Scratch::new();
    scratch.write("bare/config.json", scratch.text("model/config.json"));
    let ended = scratch.run(&["plan", "recipe.toml", "model.path=bare", "data.train=absent.jsonl"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    check(&scratch, &ended.stdout, expect![[]]);
}

#[test]
fn a_plan_that_does_not_fit_is_shown_and_refused() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["plan", "recipe.toml", "memory.budget=8MiB"]);
    assert_eq!(ended.code, Some(1));
    let verdict = ended.stdout.lines().find(|line| line.starts_with("  peak")).unwrap();
    check(&scratch, verdict, expect![[]]);
    check(&scratch, &ended.stderr, expect![[]]);
}

#[test]
fn train_talks_on_stderr() {
    let scratch = Scratch::new();
    let ended = scratch.run(&[
        "train",
        "recipe.toml",
        "data.eval=data.jsonl",
        "train.eval_every=4",
        "train.log_every=2",
    ]);
    assert_eq!((ended.code, &*ended.stdout), (Some(0), ""));
    check(&scratch, &ended.stderr, expect![[]]);
    let mut names: Vec<String> = std::fs::read_dir(scratch.path("run"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["adapter", "job.toml", "metrics.jsonl", "plan.json", "plan.txt", "recipe.toml"]);
    assert_eq!(scratch.text("run/recipe.toml"), scratch.text("recipe.toml"));
    let table = scratch.run(&["plan", "recipe.toml", "data.eval=data.jsonl", "train.eval_every=4"]).stdout;
    let text = scratch.run(&["plan", "recipe.toml", "data.eval=data.jsonl", "train.eval_every=4", "--text"]);
    assert_eq!(scratch.text("run/plan.txt"), format!("{table}\n{}", text.stdout));
}

#[test]
fn the_resolved_job_is_written_whole() {
    let scratch = Scratch::new();
    scratch.train("run", &[]);
    check(&scratch, &scratch.text("run/job.toml"), expect![[]]);
    // The job is a recipe: it plans to the same table.
    let again = scratch.run(&["plan", "run/job.toml"]);
    assert_eq!(again.stdout, scratch.run(&["plan", "recipe.toml"]).stdout);
}

#[test]
fn a_folder_that_holds_a_run_is_refused() {
    let scratch = Scratch::new();
    scratch.train("run", &[]);
    let said = scratch.train_refused(1, &[], &[]);
    check(&scratch, &said, expect![[]]);
    // Also where only a part of a run is left.
    for name in ["adapter", "job.toml", "plan.json", "recipe.toml"] {
        let path = scratch.path("run").join(name);
        match path.is_dir() {
            true => std::fs::remove_dir_all(path).unwrap(),
            false => std::fs::remove_file(path).unwrap(),
        }
        scratch.train_refused(1, &[], &["already holds a run"]);
    }
}

#[test]
fn resume_of_a_finished_run_says_so() {
    let scratch = Scratch::new();
    for save_every in ["train.save_every=0", "train.save_every=4"] {
        let output = save_every.replace('=', "-");
        scratch.train(&output, &[save_every]);
        let before = scratch.files();
        let ended = scratch.train(&output, &[save_every, "--resume"]);
        assert_eq!(ended.stdout, "");
        assert_eq!(scratch.neutral(&ended.stderr), format!("the run in `FOLDER/{output}` is finished\n"));
        assert!(scratch.files() == before);
    }
}

#[test]
fn resume_of_a_run_that_never_began_starts_at_step_0() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["train", "recipe.toml", "--resume"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.starts_with("there is no checkpoint: starting at step 0\n"), "{}", ended.stderr);
    scratch.train("clean", &[]);
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
}

#[test]
fn quiet_says_nothing() {
    let scratch = Scratch::new();
    // A row without a supervised token is worth a warning, but not here.
    let data = scratch.text("data.jsonl") + "{\"input_ids\":[1,2],\"labels\":[-100,-100]}\n";
    scratch.write("data.jsonl", data);
    let overrides = ["data.eval=data.jsonl", "train.eval_every=3", "train.log_every=1", "--quiet"];
    let ended = scratch.train("run", &overrides);
    assert_eq!((&*ended.stdout, &*ended.stderr), ("", ""));
    let ended = scratch.train("run", &[&overrides[..], &["--resume"]].concat());
    assert_eq!((&*ended.stdout, &*ended.stderr), ("", ""));
    let ended = scratch.run(&["--quiet", "plan", "recipe.toml", "--json"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    assert!(ended.stdout.starts_with('{'));
}
