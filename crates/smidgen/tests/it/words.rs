//! What the program says, line by line: nothing wider than 80 columns, no colour where none is asked for.
//!
//! Every command that people read runs on a small recipe, well and badly. Paths are data and may be as long as they are.

use crate::scratch::Scratch;

/// Runs a command as in a terminal of the usual width, and holds what it says to it.
fn held(scratch: &Scratch, arguments: &[&str], code: i32) -> String {
    let mut command = scratch.command(arguments);
    let output = command.env_remove("COLUMNS").output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stdout}{stderr}");
    // Help has lines of spaces between options.
    let is_help = arguments.contains(&"--help");
    for line in stdout.lines().chain(stderr.lines()) {
        assert!(!line.contains('\x1b'), "{arguments:?} is coloured: {line:?}");
        assert!(line == line.trim_end() || is_help, "{arguments:?} ends in spaces: {line:?}");
        // A folder is one word and stays whole.
        let is_path = line.split_whitespace().any(|word| word.contains(&*scratch.root().to_string_lossy()));
        assert!(
            line.chars().count() <= 80 || is_path,
            "{arguments:?} has {} columns:\n{line}",
            line.chars().count()
        );
    }
    stdout + &stderr
}

#[test]
fn reports_fit_80_columns() {
    let scratch = Scratch::new();
    held(&scratch, &["plan", "recipe.toml"], 0);
    held(&scratch, &["plan", "recipe.toml", "memory.budget=33MiB", "data.max_tokens=40"], 0);
    held(&scratch, &["fit", "recipe.toml"], 0);
    held(&scratch, &["preview", "recipe.toml", "--rows", "0"], 0);
    held(&scratch, &["doctor", "--no-measure"], 0);
    held(&scratch, &["doctor", "recipe.toml", "--no-measure"], 0);
    held(&scratch, &["inspect", "model"], 0);
    held(&scratch, &["eval", "recipe.toml", "--adapter", "adapter", "data.eval=data.jsonl"], 0);
    held(&scratch, &["train", "recipe.toml", "train.log_every=1"], 0);
    held(&scratch, &["train", "recipe.toml", "train.log_every=1", "--resume"], 0);
    held(&scratch, &["inspect", "run"], 0);
    held(&scratch, &["report", "run"], 0);
}

#[test]
fn refusals_fit_80_columns() {
    let scratch = Scratch::new();
    for (code, arguments) in [
        (1, &["plan", "recipe.toml", "memory.budget=1MiB"] as &[&str]),
        (1, &["train", "recipe.toml", "memory.budget=1MiB"]),
        (2, &["plan", "nothing.toml"]),
        (
            2,
            &[
                "plan",
                "recipe.toml",
                "lora_r=8",
                "per_device_train_batch_size=4",
                "gradient_accumulation_steps=2",
            ],
        ),
        (2, &["plan", "recipe.toml", "adapter.targets=[q_proj, no_such_module]"]),
        (2, &["plan", "recipe.toml", "train.lr=-1", "memory.recompute=sometimes", "model.base=q4"]),
        (1, &["train", "recipe.toml", "data.train=nothing.jsonl"]),
        (1, &["train", "recipe.toml", "model.path=nothing"]),
        (1, &["train", "recipe.toml", "model.path=hf:org/name"]),
        (1, &["preview", "recipe.toml", "data.format=chat"]),
        (2, &["import", "data.jsonl"]),
        (1, &["inspect", "nothing"]),
        (2, &["eval", "recipe.toml", "--task", "taste"]),
        (1, &["doctor", "recipe.toml", "--no-measure", "model.path=nothing"]),
    ] {
        held(&scratch, arguments, code);
    }
}

/// Colour is added to words that are there without it, and ends in its line.
#[test]
fn colour_changes_no_word() {
    let scratch = Scratch::new();
    let said = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut command = scratch.command(arguments);
        command.env_remove("COLUMNS").env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE");
        let output = command.envs(variables.iter().copied()).output().unwrap();
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    let escapes = regex::Regex::new("\x1b\\[[0-9;]*m").unwrap();
    for (arguments, words) in [
        (&["plan", "recipe.toml"] as &[&str], &["\x1b[32mfits\x1b[0m"] as &[&str]),
        (
            &["plan", "recipe.toml", "memory.budget=1MiB"],
            &["\x1b[1;31mdoes not fit\x1b[0m", "\x1b[1;31merror:\x1b[0m", "\x1b[36mhint:\x1b[0m"],
        ),
        (&["train", "recipe.toml", "memory.budget=1MiB"], &["\x1b[1;31merror:\x1b[0m"]),
        (
            &["doctor", "recipe.toml", "--no-measure", "model.path=nothing"],
            &["\x1b[32mpass\x1b[0m", "\x1b[1;31mfail\x1b[0m", "\x1b[36mremedy:\x1b[0m"],
        ),
    ] {
        let (plain, painted) = (said(arguments, &[]), said(arguments, &[("CLICOLOR_FORCE", "1")]));
        assert!(!plain.contains('\x1b'), "{plain}");
        for word in words {
            assert!(painted.contains(word), "{arguments:?} has no {word:?}:\n{painted}");
        }
        let bare = escapes.replace_all(&painted, "");
        // What is free on this machine may differ from call to call.
        if arguments[0] != "doctor" {
            assert_eq!(bare, plain);
        }
        for line in painted.lines() {
            assert_eq!(line.matches("\x1b[0m").count() * 2, line.matches('\x1b').count(), "{line:?}");
        }
        let off = said(arguments, &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]);
        assert!(!off.contains('\x1b'), "{off}");
    }
}

/// Every command that says something to people says it to programs.
#[test]
fn every_command_has_its_json() {
    let without = ["completions", "dash", "man"];
    for command in smidgen::internal::command().get_subcommands() {
        let json = command.get_arguments().find(|argument| argument.get_long() == Some("json"));
        assert_eq!(json.is_none(), without.contains(&command.get_name()), "{}", command.get_name());
        assert!(
            json.is_none_or(|json| json.get_help().is_some()),
            "{} --json has no words",
            command.get_name()
        );
    }
    let scratch = Scratch::new();
    scratch.write("zero.json", r#"{"zero_optimization": {"stage": 2}}"#);
    for (arguments, key) in [
        (&["plan", "recipe.toml"] as &[&str], "peak_bytes"),
        (&["fit", "recipe.toml"], "max_tokens"),
        (&["preview", "recipe.toml"], "samples"),
        (&["doctor", "recipe.toml", "--no-measure", "--device", "cpu"], "checks"),
        (&["train", "recipe.toml"], "memory"),
        (&["train", "recipe.toml", "--resume"], "memory"),
        (&["report", "run"], "memory"),
        (&["inspect", "model"], ""),
        (&["inspect", "run"], ""),
        (&["eval", "recipe.toml", "--adapter", "adapter", "data.eval=data.jsonl"], "base"),
        (&["merge", "run", "--output", "merged"], ""),
        (&["import", "zero.json"], "lines"),
    ] {
        let ended = scratch.run(&[arguments, &["--json"]].concat());
        assert_eq!(ended.code, Some(0), "{arguments:?}: {}", ended.stderr);
        let value: serde_json::Value = serde_json::from_str(&ended.stdout)
            .unwrap_or_else(|error| panic!("{arguments:?}: {error}: {}", ended.stdout));
        assert!(key.is_empty() || value.get(key).is_some(), "{arguments:?}: {value:#}");
    }
    // The run's own JSON is that of the report.
    let [train, report] = [&["train", "recipe.toml", "--resume", "--json"][..], &["report", "run", "--json"]]
        .map(|arguments| serde_json::from_str::<serde_json::Value>(&scratch.run(arguments).stdout).unwrap());
    assert_eq!(train["memory"], report["memory"]);
}

#[test]
fn help_fits_80_columns() {
    let scratch = Scratch::new();
    let all = held(&scratch, &["--help"], 0);
    let names =
        all.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let commands: Vec<&str> = names
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(
        commands.contains(&"plan") && commands.contains(&"import") && commands.len() >= 14,
        "{commands:?}"
    );
    for command in commands.iter().filter(|command| **command != "help") {
        held(&scratch, &[command, "--help"], 0);
    }
}

#[test]
fn import_writes_a_recipe_and_says_the_rest() {
    let scratch = Scratch::new();
    scratch.write("zero.json", r#"{"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "offload_param": {"device": "cpu"}}}"#);
    let said = held(&scratch, &["import", "zero.json", "--out", "new/zero.toml"], 1);
    assert!(said.contains("cannot write `new/zero.toml`"), "{said}");
    let said = held(&scratch, &["import", "zero.json", "--out", "zero.toml"], 0);
    assert!(said.contains("the plan is the allocation") && said.contains("data.train"), "{said}");
    let recipe = scratch.text("zero.toml");
    assert!(recipe.contains("# zero_optimization.offload_param.device"), "{recipe}");
    assert!(recipe.contains("\nweights = \"host\"\n"), "{recipe}");
    held(&scratch, &["import", "zero.json", "--out", "zero.toml"], 2);
    assert_eq!(scratch.text("zero.toml"), recipe, "a recipe that is there stays");
    // Complete with what is given beside it, and a recipe for every other command.
    let given = [
        "model.path=model",
        "data.train=data.jsonl",
        "output.dir=run",
        "memory.budget=64MiB",
        "memory.weights=device",
    ];
    held(&scratch, &[&["import", "zero.json", "--out", "whole.toml"][..], &given].concat(), 0);
    let plan = held(&scratch, &["plan", "whole.toml", "memory.device=cpu"], 0);
    assert!(plan.contains("fits"), "{plan}");
    let json = scratch.run(&["import", "zero.json", "--json"]);
    assert_eq!((json.code, &*json.stderr), (Some(0), ""));
    assert!(serde_json::from_str::<serde_json::Value>(&json.stdout).unwrap()["missing"].is_array());
    // A folder whose config smidgen does not load.
    std::fs::create_dir(scratch.path("other")).unwrap();
    scratch.write("other/config.json", r#"{"model_type": "falcon"}"#);
    let said = held(&scratch, &["import", "zero.json", "model.path=other", "--out", "other.toml"], 0);
    assert!(said.contains("warning: `other`: ") && said.contains("falcon"), "{said}");
}

#[test]
fn shells_learn_the_commands() {
    let scratch = Scratch::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = scratch.run(&["completions", shell]);
        assert_eq!(script.code, Some(0));
        assert!(script.stdout.contains("import") && script.stdout.contains("resume"), "{shell}");
    }
    assert_eq!(scratch.run(&["completions", "tcsh"]).code, Some(2));
    assert_eq!(scratch.run(&["man", "pages/man1"]).code, Some(0));
    for command in smidgen::internal::command().get_subcommands().filter(|command| !command.is_hide_set()) {
        let page = scratch.read(&format!("pages/man1/smidgen-{}.1", command.get_name()));
        let page = String::from_utf8(page).unwrap();
        assert!(page.contains(".SH SYNOPSIS"), "{page}");
    }
}
