//! `smidgen doctor`: the list, the profile that it leaves, and how it ends.
//!
//! The processor is looked at, so that the lines are the same with and without a GPU. Measured with little work: what
//! comes out is a profile, not a good one.

use crate::scratch::Scratch;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::path::PathBuf;

fn doctor(scratch: &Scratch, code: i32, arguments: &[&str]) -> Value {
    let ended = scratch.run(&[&["doctor", "--device", "cpu", "--quiet", "--json"], arguments].concat());
    assert_eq!(ended.code, Some(code), "{}{}", ended.stdout, ended.stderr);
    serde_json::from_str(&ended.stdout).unwrap()
}

fn line<'a>(report: &'a Value, name: &str) -> &'a Value {
    let lines = report["checks"].as_array().unwrap();
    lines.iter().find(|line| line["name"] == name).unwrap_or_else(|| panic!("no line {name}: {report}"))
}

fn verdicts(report: &Value, names: &[&str]) -> Vec<String> {
    names.iter().map(|name| line(report, name)["verdict"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn what_is_measured_is_kept_and_plans_go_by_it() {
    let scratch = Scratch::new();
    let threads = "memory.threads=2";
    let before = scratch.plan(&[]);
    assert_eq!(before["profile"]["origin"], "built-in");
    let first = doctor(&scratch, 0, &["recipe.toml", threads, "--no-measure"]);
    assert_eq!((verdicts(&first, &["profile"]), &first["profile"]), (vec!["warn".to_owned()], &Value::Null));

    let report = doctor(&scratch, 0, &["recipe.toml", threads, "--brief"]);
    let names: Vec<&str> =
        report["checks"].as_array().unwrap().iter().map(|line| line["name"].as_str().unwrap()).collect();
    let expected = [
        "program",
        "processor",
        "memory",
        "container",
        "environment",
        "locked memory",
        "gpu",
        "libraries",
        "disk",
        "cache",
        "profile",
        "recipe",
        "model",
        "data",
        "load",
        "plan",
        "checkpoints",
    ];
    assert_eq!(names.into_iter().filter(|name| *name != "gpu memory").collect::<Vec<_>>(), expected);
    assert_eq!(report["fine"], true);
    for name in ["profile", "recipe", "model", "data", "load", "plan", "checkpoints"] {
        assert_eq!(line(&report, name)["verdict"], "pass", "{report:#}");
    }
    assert!(
        line(&report, "plan")["finding"]
            .as_str()
            .unwrap()
            .ends_with("according to the profile measured on this machine")
    );

    let path = PathBuf::from(report["profile"]["path"].as_str().unwrap());
    assert!(path.starts_with(scratch.cache()));
    let kept: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for rates in ["f32", "bf16"] {
        assert!(kept[rates]["product_flops_per_s"].as_f64().unwrap() > 1e6, "{kept:#}");
    }
    let after = scratch.plan(&[]);
    assert_eq!((&after["profile"]["origin"], &after["profile"]["f32"]), (&json!("measured"), &kept["f32"]));
    assert_eq!(scratch.plan(&[])["step_ms"], after["step_ms"], "a plan measures nothing");
    // The profile is that of two threads.
    assert_eq!(scratch.plan(&["memory.threads=1"])["profile"]["origin"], "built-in");
    assert_eq!(scratch.plan(&["memory.profile=cpu"])["profile"]["origin"], "built-in");

    // A file that is broken, or of another version, is as good as none, and is measured anew.
    std::fs::write(&path, "{\"smidgen\": ").unwrap();
    assert_eq!(scratch.plan(&[])["profile"]["origin"], "built-in");
    let mut old = kept.clone();
    old["smidgen"] = json!("0.0.1");
    std::fs::write(&path, old.to_string()).unwrap();
    assert_eq!(scratch.plan(&[])["profile"]["origin"], "built-in");
    let unread = doctor(&scratch, 0, &["recipe.toml", threads, "--no-measure"]);
    assert_eq!(verdicts(&unread, &["profile"]), ["warn"]);
    doctor(&scratch, 0, &["recipe.toml", threads, "--brief"]);
    assert_eq!(scratch.plan(&[])["profile"]["origin"], "measured");
    assert!(!scratch.exists("run"), "doctor writes nothing where runs go");
}

#[test]
fn a_line_that_fails_says_what_to_do_and_ends_the_command_badly() {
    let scratch = Scratch::new();
    let absent = doctor(&scratch, 2, &["absent.toml", "--no-measure"]);
    assert_eq!((verdicts(&absent, &["recipe"]), &absent["fine"]), (vec!["fail".to_owned()], &json!(false)));
    assert!(line(&absent, "recipe")["finding"].as_str().unwrap().contains("absent.toml"));
    let wrong = doctor(&scratch, 2, &["recipe.toml", "adapter.rnak=3", "--no-measure"]);
    assert!(line(&wrong, "recipe")["finding"].as_str().unwrap().contains("`adapter.rnak`"));
    assert!(!line(&wrong, "recipe")["remedies"].as_array().unwrap().is_empty());

    let tight = doctor(&scratch, 1, &["recipe.toml", "memory.budget=1MiB", "--no-measure"]);
    assert_eq!(verdicts(&tight, &["recipe", "model", "data", "plan"]), ["pass", "pass", "pass", "fail"]);
    assert!(!line(&tight, "plan")["remedies"].as_array().unwrap().is_empty(), "{tight:#}");

    let elsewhere = doctor(&scratch, 1, &["recipe.toml", "model.path=absent", "--no-measure"]);
    assert_eq!(verdicts(&elsewhere, &["recipe", "model"]), ["pass", "fail"]);
    let dataless = doctor(&scratch, 0, &["recipe.toml", "data.train=absent.jsonl", "--no-measure"]);
    assert_eq!(verdicts(&dataless, &["data", "plan"]), ["warn", "pass"]);
}

/// With or without a profile; a number that no machine has, so that the test holds next to a GPU too.
#[test]
fn a_recipe_whose_gpu_is_missing_fails() {
    let scratch = Scratch::new();
    for overrides in
        [&["memory.device=cuda:63"] as &[&str], &["memory.device=cuda:63", "memory.profile=rtx-4090"]]
    {
        let arguments = [&["doctor", "recipe.toml", "--quiet", "--json", "--no-measure"], overrides].concat();
        let ended = scratch.run(&arguments);
        assert_eq!(ended.code, Some(1), "{}{}", ended.stdout, ended.stderr);
        let report: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(verdicts(&report, &["gpu"]), ["fail"], "{report:#}");
    }
}

/// Weights are read before a run would read them: what headers cannot tell is said by tensor and row.
#[test]
fn a_model_that_cannot_be_trained_on_is_found_before_the_run() {
    let scratch = Scratch::new();
    let file = "model/model.safetensors";
    let good = scratch.read(file);
    let tensors: usize = {
        let file = SafeTensors::deserialize(&good).unwrap();
        file.tensors().iter().map(|(_, view)| view.data().len()).sum()
    };
    let looked = |code| doctor(&scratch, code, &["recipe.toml", "--no-measure", "--whole"]);
    let fine = looked(0);
    let facts = &line(&fine, "load")["facts"];
    assert_eq!((&facts["read_bytes"], &facts["model_bytes"]), (&json!(tensors), &json!(tensors)));
    assert!(facts["bytes_per_s"].as_f64().unwrap() > 0.0);

    // The third number of the second row of a matrix.
    let name = "model.layers.1.mlp.up_proj.weight";
    let place_of = |name: &str| {
        let file = SafeTensors::deserialize(&good).unwrap();
        let view = file.tensor(name).unwrap();
        let begin = view.data().as_ptr() as usize - good.as_ptr() as usize;
        (begin, view.data().len(), view.shape()[1])
    };
    let (begin, length, columns) = place_of(name);
    let mut bytes = good.clone();
    let number = begin + 4 * (columns + 2);
    bytes[number..number + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    scratch.write(file, &bytes);
    let broken = looked(1);
    assert_eq!(verdicts(&broken, &["model", "load", "plan"]), ["pass", "fail", "pass"]);
    let said = line(&broken, "load")["finding"].as_str().unwrap();
    assert!(said.contains(&format!("tensor `{name}` in `")) && said.ends_with("has NaN in row 1"), "{said}");
    assert!(line(&broken, "load")["remedies"][0].as_str().unwrap().contains("`smidgen pull`"));

    // A hole, as a download that was not finished leaves it.
    let mut bytes = good.clone();
    bytes[begin..begin + length].fill(0);
    scratch.write(file, &bytes);
    let hole = looked(0);
    assert_eq!(
        (verdicts(&hole, &["load"]), &line(&hole, "load")["facts"]["zeros"]),
        (vec!["warn".into()], &json!([name]))
    );

    // A file that ends too early, and one that is not there as a file.
    scratch.write(file, &good[..good.len() - 5]);
    let short = looked(1);
    let said = line(&short, "model")["finding"].as_str().unwrap();
    assert!(said.contains("truncated") && verdicts(&short, &["model"]) == ["fail"], "{said}");
    assert!(line(&short, "model")["remedies"][0].as_str().unwrap().contains("`smidgen pull`"), "{short:#}");
    std::fs::remove_file(scratch.path(file)).unwrap();
    std::fs::create_dir(scratch.path(file)).unwrap();
    assert_eq!(verdicts(&looked(1), &["model"]), ["fail"]);
}

/// Libraries that are named like NVIDIA's and are none: words, and no crash.
#[cfg(target_os = "linux")]
#[test]
fn libraries_that_cannot_be_used_are_no_crash() {
    let scratch = Scratch::new();
    for name in ["libcuda.so", "libcuda.so.1", "libnvrtc.so", "libnvrtc-builtins.so", "libcublasLt.so"] {
        scratch.write(&format!("lib/{name}"), "not a library");
    }
    let mut command = scratch.command(&["doctor", "--device", "cuda:0", "--no-measure", "--json"]);
    let output = command.env("LD_LIBRARY_PATH", scratch.path("lib")).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(verdicts(&report, &["gpu", "libraries"]), ["fail", "fail"]);
    assert!(
        line(&report, "libraries")["finding"].as_str().unwrap().contains("missing: driver"),
        "{report:#}"
    );
}

#[test]
fn the_list_reads_well() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["doctor", "--device", "cuda:77", "--no-measure"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stdout.contains("  fail  gpu            "), "{}", ended.stdout);
    assert!(
        ended.stdout.contains("remedy: `memory.device = \"cpu\"` trains without a GPU\n"),
        "{}",
        ended.stdout
    );
    assert!(ended.stderr.starts_with("error: ") && ended.stderr.contains("checks failed: `gpu`"));
    let said = scratch.run(&["doctor", "--device", "gpu"]);
    assert_eq!((said.code, &*said.stdout), (Some(2), ""));
    assert!(said.stderr.contains("`--device gpu` must be `auto`, `cpu` or `cuda:N`"), "{}", said.stderr);
}

#[test]
fn what_ranks_would_use_is_looked_for() {
    let scratch = Scratch::new();
    let report = doctor(&scratch, 0, &["--ranks"]);
    let checks = report["checks"].as_array().unwrap();
    let names: Vec<&str> = checks.iter().map(|line| line["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["nccl", "mpi", "mpiexec", "ranks"]);
    for check in checks.iter().filter(|check| check["verdict"] == "warn") {
        assert!(!check["remedies"].as_array().unwrap().is_empty(), "{check}");
    }
}
