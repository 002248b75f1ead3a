//! `memory.profile`: plans for cards that are not here, and for profiles from files.

use crate::scratch::Scratch;
use serde_json::{Value, json};

const FREE: [&str; 2] = ["memory.device=auto", "memory.budget=auto"];

fn plan_for(scratch: &Scratch, profile: &str) -> Value {
    let profile = format!("memory.profile={profile}");
    scratch.plan(&[&FREE[..], &[&profile]].concat())
}

#[test]
fn a_card_is_planned_for_on_any_machine() {
    let scratch = Scratch::new();
    let plan = plan_for(&scratch, "rtx-4090");
    assert_eq!((&plan["policy"]["device"], &plan["fits"]), (&json!("cuda"), &json!(true)));
    // The card's memory less what is left free for a display.
    assert_eq!(plan["budget_bytes"], json!((24_210u64 - 256) << 20));
    // The context of the built-in profile with its margin, the arena in whole granules, and the recorded launches.
    let context = plan["rows"]["context"].as_u64().unwrap();
    assert!((536 << 20..544 << 20).contains(&context), "{context}");
    let profile = &plan["profile"];
    assert_eq!((&profile["name"], &profile["origin"]), (&json!("rtx-4090"), &json!("built-in")));
    let ended = scratch.run(&[
        "plan",
        "recipe.toml",
        "memory.profile=rtx-4090",
        "memory.device=auto",
        "model.compute=bf16",
    ]);
    let title = ended.stdout.lines().next().unwrap();
    assert!(title.ends_with("· bf16 (CUDA) · batch 4 · budget 64.00 MiB · rtx-4090"), "{title}");
    let stated =
        scratch.plan(&["memory.device=auto", "memory.profile=rtx-3060-laptop", "memory.budget=90GiB"]);
    assert_eq!(stated["budget_bytes"], json!(5_930u64 << 20), "no more than the card has");
    let fit = scratch.run(&[
        "fit",
        "recipe.toml",
        "memory.profile=rtx-4060",
        "memory.device=auto",
        "--budget",
        "auto",
        "--json",
    ]);
    let answers: Value = serde_json::from_str(&fit.stdout).unwrap();
    assert_eq!(answers["budget_bytes"], json!((7_930u64 - 256) << 20));
}

/// By its own name, and by the driver's in a profile from a file.
#[test]
fn a_card_without_bf16_computes_in_f16() {
    let scratch = Scratch::new();
    let mut of_file = plan_for(&scratch, "t4")["profile"].clone();
    of_file["name"] = json!("Tesla T4");
    scratch.write("my-card.json", of_file.to_string());
    for profile in ["memory.profile=t4", "memory.profile=my-card.json"] {
        let plan = ["plan", "recipe.toml", profile, "memory.device=auto"];
        let ended = scratch.run(&[&plan[..], &["model.compute=auto"]].concat());
        let title = ended.stdout.lines().next().unwrap();
        assert!(title.contains("· f16 (CUDA) ·"), "{title}");
        scratch.refused(
            2,
            &[&plan[..], &["model.compute=bf16"]].concat(),
            &["compute capability 7.5, and bf16 needs 8.0", "hint: write `model.compute = \"f16\"`"],
        );
    }
}

#[test]
fn a_saved_profile_is_as_good_as_a_built_in_one() {
    let scratch = Scratch::new();
    let built_in = plan_for(&scratch, "l4");
    scratch.write("my-card.json", built_in["profile"].to_string());
    let saved = plan_for(&scratch, "my-card.json");
    assert_eq!(saved["profile"]["origin"], "file");
    for field in ["step_ms", "budget_bytes", "peak_bytes", "policy"] {
        assert_eq!(saved[field], built_in[field], "{field}");
    }
    scratch.edit_json("my-card.json", |profile| profile["bf16"]["bytes_per_s"] = json!(-1));
    let plan = ["plan", "recipe.toml", "memory.device=auto", "memory.profile=my-card.json"];
    scratch.refused(1, &plan, &["my-card.json`: `bf16.bytes_per_s` must be a number above 0"]);
    scratch.write("my-card.json", "{");
    scratch.refused(1, &plan, &["my-card.json` is not JSON"]);
    scratch.refused(
        1,
        &["plan", "recipe.toml", "memory.device=auto", "memory.profile=absent.json"],
        &["cannot read the profile `", "absent.json"],
    );
}

#[test]
fn a_name_that_is_unknown_or_contradicts_the_device_is_refused() {
    let scratch = Scratch::new();
    let auto = "memory.device=auto";
    let words =
        ["`memory.profile = rtx-4091`: unknown profile", "rtx-3060-laptop", "did you mean `rtx-4090`?"];
    scratch.refused(2, &["plan", "recipe.toml", auto, "memory.profile=rtx-4091"], &words);
    let words = ["is for a GPU (`h200`), but `memory.device` is `cpu`", "remove one of the two keys"];
    scratch.refused(2, &["plan", "recipe.toml", "memory.profile=h200"], &words);
    scratch.train_refused(2, &["memory.profile=h200"], &words);
}

#[test]
fn a_run_on_the_processor_may_go_by_any_profile_of_one() {
    let scratch = Scratch::new();
    let plan = scratch.plan(&["memory.profile=cpu"]);
    scratch.train("run", &["memory.profile=cpu"]);
    let taken = scratch.json("run/plan.json");
    assert_eq!((&taken["step_ms"], &taken["profile"]), (&plan["step_ms"], &plan["profile"]));
}
