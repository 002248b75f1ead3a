//! `smidgen resume RUN` and `train RUN --resume`: a run continues from its folder alone, grows, and is finished where
//! only its end is missing.

use crate::scratch::{RECIPE, Scratch};
use serde_json::{Value, json};

const RUN: [&str; 3] = ["train.save_every=4", "train.log_every=0", "adapter.dropout=0.1"];

/// A run of six steps that was killed after its checkpoint of step 4; the recipe is gone.
fn killed() -> Scratch {
    let scratch = Scratch::new();
    scratch.train("clean", &RUN);
    scratch.train("run", &RUN);
    scratch.forget_end("run", 4);
    std::fs::rename(scratch.path("recipe.toml"), scratch.path("elsewhere.toml")).unwrap();
    scratch
}

#[track_caller]
fn succeeds(scratch: &Scratch, arguments: &[&str]) -> String {
    let ended = scratch.run(arguments);
    assert_eq!(ended.code, Some(0), "{arguments:?}: {}", ended.stderr);
    ended.stderr
}

#[test]
fn a_run_needs_nothing_but_its_folder() {
    let scratch = killed();
    let recipe = scratch.text("run/recipe.toml");
    let said = succeeds(&scratch, &["resume", "run"]);
    assert!(said.starts_with("continuing after step 4\n"), "{said}");
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
    assert_eq!(scratch.losses("run"), scratch.losses("clean"));
    assert_eq!(scratch.text("run/recipe.toml"), recipe, "the recipe stays as it was written");
    assert!(succeeds(&scratch, &["resume", "run"]).ends_with("run` is finished\n"));

    // Moved, and with keys that may change.
    std::fs::remove_dir_all(scratch.path("run/adapter")).unwrap();
    std::fs::rename(scratch.path("run"), scratch.path("moved")).unwrap();
    succeeds(&scratch, &["train", "moved", "--resume", "memory.threads=1", "train.keep=1"]);
    assert!(scratch.adapter("moved") == scratch.adapter("clean"));
    assert!(!scratch.exists("run"), "it stays where it is");
}

#[test]
fn what_is_not_a_run_is_refused() {
    let scratch = killed();
    scratch.write("empty/notes.txt", "x");
    let folder = "hint: `smidgen resume` needs the folder of a run";
    scratch.refused(2, &["resume", "absent"], &["`absent` does not exist", folder]);
    scratch.refused(2, &["resume", "elsewhere.toml"], &["`elsewhere.toml` is not a folder", folder]);
    for command in [&["resume", "empty"][..], &["train", "empty", "--resume"]] {
        scratch.refused(
            2,
            command,
            &["`empty` is not the folder of a run: it has no `job.toml`", "train RECIPE --resume"],
        );
    }
    scratch.refused(2, &["train", "run"], &["`run` is a folder, not a recipe", "hint: `--resume` continues"]);
    scratch.refused(2, &["resume", "run", "output.dir=other"], &["`output.dir` cannot change"]);
    scratch.refused(2, &["resume", "run", "--quiet", "train.lr=1"], &["`train.lr` was 0.01, is 1"]);
}

/// It has saved no state, so it would begin again and replace its model.
#[test]
fn a_finished_run_without_checkpoints_is_not_started_again() {
    let scratch = Scratch::new();
    scratch.write("recipe.toml", RECIPE.replace("rank = 4\nalpha = 8\n", "kind = \"full\"\n"));
    scratch.train("run", &["train.save_every=0", "train.lr=1e-3"]);
    let model = scratch.read("run/model/model.safetensors");
    let words =
        ["the run in `", "is finished and has no checkpoint", "hint: start another run from its result"];
    scratch.refused(2, &["resume", "run", "--quiet", "train.steps=9"], &words);
    assert!(scratch.read("run/model/model.safetensors") == model);
    assert!(succeeds(&scratch, &["resume", "run"]).ends_with("run` is finished\n"));
}

#[test]
fn epochs_may_grow_and_nothing_may_shrink() {
    let scratch = Scratch::new();
    let constant =
        ["train.save_every=2", "train.schedule=constant", "train.warmup=0", "memory.micro_tokens=64"];
    let epochs = |count: &'static str| [&constant[..], &[count]].concat();
    scratch.train("run", &epochs("train.epochs=1"));
    let ended = scratch.train("run", &[&epochs("train.epochs=2.5")[..], &["--resume"]].concat());
    let warning = "warning: `train.epochs` grew from 1.0 to 2.5: the learning rate stays constant\n";
    assert!(ended.stderr.contains(warning), "{}", ended.stderr);
    scratch.train("clean", &epochs("train.epochs=2.5"));
    assert_eq!(scratch.losses("run"), scratch.losses("clean"));
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
    let less = [&epochs("train.epochs=2")[..], &["--resume"]].concat();
    scratch.train_refused(2, &less, &["`train.epochs` was 2.5, is 2.0: a run can only grow"]);
}

/// Killed between the adapter and the end of the process: everything is trained and saved, only the report is missing.
#[test]
fn a_run_that_was_killed_after_its_adapter_was_saved_is_finished() {
    let scratch = Scratch::new();
    scratch.train("run", &RUN);
    let adapter = scratch.adapter("run");
    let metrics = scratch.text("run/metrics.jsonl");
    scratch.checkpoints("run").iter().for_each(|step| {
        std::fs::remove_dir_all(scratch.path(&format!("run/checkpoint-{step}"))).unwrap();
    });
    // The report of an earlier part.
    scratch.write("run/report.html", "old");
    scratch.edit_json("run/run.json", |run| {
        let part = run["parts"][0].as_object_mut().unwrap();
        part.insert("ended".into(), Value::Null);
        part.remove("last_step");
    });
    std::fs::create_dir(scratch.path("run/.adapter.old")).unwrap();
    let said = succeeds(&scratch, &["resume", "run"]);
    assert!(said.ends_with("run` is finished\n"), "{said}");
    let part = &scratch.json("run/run.json")["parts"][0];
    assert_eq!((&part["ended"], &part["last_step"]), (&json!("done"), &json!(6)));
    assert!(scratch.text("run/report.html").contains("done, 6 steps"));
    assert!(scratch.adapter("run") == adapter && scratch.text("run/metrics.jsonl") == metrics);
    assert!(!scratch.exists("run/.adapter.old"));
}

/// `resume RUN` reads `job.toml`: what someone writes into the copy of the recipe would do nothing.
#[test]
fn an_edited_recipe_in_the_run_folder_is_refused() {
    let scratch = killed();
    let recipe = scratch.text("run/recipe.toml");
    scratch.write("run/recipe.toml", recipe.replace("lr = 1e-2", "lr = 2e-2"));
    let words = [
        "run/recipe.toml` was edited after the run wrote it, and would be ignored",
        "hint: `smidgen resume RUN section.key=value` changes a key",
        "undo the edit or remove the file",
    ];
    scratch.refused(2, &["resume", "run"], &words);
    // Both ways out work.
    std::fs::remove_file(scratch.path("run/recipe.toml")).unwrap();
    succeeds(&scratch, &["resume", "run"]);
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
    assert!(succeeds(&scratch, &["resume", "run"]).ends_with("run` is finished\n"));
    scratch.write("clean/recipe.toml", recipe.clone() + "# mine\n");
    scratch.refused(2, &["train", "clean", "--resume"], &["clean/recipe.toml` was edited"]);
    scratch.write("clean/recipe.toml", recipe);
    assert!(succeeds(&scratch, &["resume", "clean"]).ends_with("clean` is finished\n"));
}
