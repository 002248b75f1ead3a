//! Documents that must not go false: what they name exists, what is generated is what the code says now.
//!
//! Reference pages (keys, commands) come from the code; tables of figures are in `benchmarks.rs`.
//! `UPDATE_EXPECT=1 cargo test -p smidgen --test tidy` rewrites what is generated.

use crate::{FOLDERS, ROOT_DOCUMENTS, expect_file, expect_none, project_files, read, root, sources};
use regex::Regex;
use smidgen::internal::{command, render_command_reference};
use smidgen_recipe::render_key_reference;

/// Pages that a test writes as a whole: their sentences are those of the code.
const GENERATED: [&str; 2] = ["docs/commands.md", "docs/recipe.md"];

/// Every Markdown page of the project.
fn documents() -> Vec<String> {
    project_files().into_iter().filter(|path| path.ends_with(".md")).collect()
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

fn in_backticks(text: &str) -> Vec<String> {
    let pattern = Regex::new(r"`([^`\n]+)`").unwrap();
    pattern.captures_iter(text).map(|found| found[1].to_string()).collect()
}

/// Whether a word in backticks claims to be a file or folder of this project.
fn looks_like_a_path(word: &str) -> bool {
    let plain = word.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c));
    let first = word.split('/').next().unwrap_or(word);
    let rooted = word.contains('/') && FOLDERS.contains(&first);
    let ends = |ending: &str| word.ends_with(ending) && word != ending;
    plain && (rooted || [".rs", ".md", ".py"].into_iter().any(ends))
}

// ── how they are written ───────────────────────────────────────────────────────────────────────────

#[test]
fn documents_are_short() {
    for (path, most) in [("README.md", 110), ("ARCHITECTURE.md", 200), ("CONTRIBUTING.md", 150)] {
        let lines = read(path).lines().count();
        assert!(lines <= most, "`{path}` has {lines} lines, at most {most} are allowed");
    }
}

#[test]
fn one_sentence_a_line() {
    let second = Regex::new(r"[A-Za-z)`]\. +[A-Z`]").unwrap();
    let mut violations = Vec::new();
    for path in documents().iter().filter(|path| !GENERATED.contains(&path.as_str())) {
        for (number, line) in prose(&read(path)) {
            if second.is_match(line) {
                violations.push(format!("{path}:{number}: {line}"));
            }
        }
    }
    expect_none("one sentence a line", &violations);
}

/// A decision is a page of three sections, named in the index.
#[test]
fn a_decision_is_a_constraint_a_choice_and_a_cost() {
    const LONGEST_PAGE_LINES: usize = 40;
    let index = read("docs/decisions/README.md");
    let mut violations = Vec::new();
    for path in documents().iter().filter(|path| path.starts_with("docs/decisions/")) {
        let name = path.rsplit('/').next().unwrap_or(path);
        if name == "README.md" {
            continue;
        }
        let page = read(path);
        let headings: Vec<&str> = page.lines().filter(|line| line.starts_with('#')).collect();
        let title = headings.first().copied().unwrap_or_default().trim_start_matches("# ");
        if headings[1..] != ["## Constraint", "## Choice", "## Cost"] {
            violations.push(format!("{path}: the sections are {headings:?}"));
        }
        if page.lines().count() > LONGEST_PAGE_LINES {
            violations.push(format!("{path}: more than {LONGEST_PAGE_LINES} lines"));
        }
        if !index.contains(&format!("- [{title}]({name})\n")) {
            violations.push(format!("{path}: the index has no line `- [{title}]({name})`"));
        }
    }
    expect_none("decisions are pages of constraint, choice and cost", &violations);
}

// ── what they name exists ──────────────────────────────────────────────────────────────────────────

#[test]
fn every_path_in_the_documents_exists() {
    let files = project_files();
    let mut violations = Vec::new();
    for document in documents() {
        for word in in_backticks(&read(&document)).iter().filter(|word| looks_like_a_path(word)) {
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
fn every_link_between_documents_works() {
    let link = Regex::new(r"\]\(([^)#:]+)(#[^)]*)?\)").unwrap();
    let mut violations = Vec::new();
    for document in documents() {
        let folder = root().join(&document).parent().unwrap().to_path_buf();
        for found in link.captures_iter(&read(&document)) {
            if !folder.join(&found[1]).exists() {
                violations.push(format!("{document}: {}", &found[1]));
            }
        }
    }
    expect_none("links lead to files that exist", &violations);
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

/// `error:` lines of the page on troubleshooting are messages of the program; `…` stands for names and numbers.
#[test]
fn quoted_messages_exist() {
    const FEWEST_LETTERS: usize = 8;
    let continued = Regex::new(r"\\\n *").unwrap();
    let code: Vec<String> = sources()
        .iter()
        .filter(|(path, _)| path.contains("/src/"))
        .map(|(_, text)| continued.replace_all(text, "").replace("\\\"", "\""))
        .collect();
    let page = read("docs/troubleshooting.md");
    let messages: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("error: ")).collect();
    assert!(messages.len() >= 10, "{messages:?}");
    let mut violations = Vec::new();
    for message in messages {
        // Causes are joined by colons, where one error is inside another.
        let pieces = message.split('…').flat_map(|piece| piece.split(": ")).map(str::trim);
        let pieces: Vec<&str> = pieces.filter(|piece| piece.len() >= FEWEST_LETTERS).collect();
        assert!(!pieces.is_empty(), "too little of a message to look for: {message}");
        for piece in pieces.iter().filter(|piece| !code.iter().any(|text| text.contains(**piece))) {
            violations.push(format!("`{piece}` of `{message}`"));
        }
    }
    expect_none("`docs/troubleshooting.md` quotes messages of the program", &violations);
}

#[test]
fn the_changelog_begins_with_this_version() {
    let changelog = read("CHANGELOG.md");
    let newest = changelog.lines().find_map(|line| line.strip_prefix("## ")).expect("a version");
    assert_eq!(newest.split_whitespace().next(), Some(env!("CARGO_PKG_VERSION")));
}

/// The commands of a page that begin with `cargo run` or `cargo test`, without their comments.
fn cargo_commands(page: &str) -> Vec<String> {
    let text = read(page);
    let lines = text.lines().filter(|line| line.starts_with("cargo run ") || line.starts_with("cargo test "));
    lines.map(|line| line.split(" # ").next().unwrap_or(line).trim_end().to_owned()).collect()
}

#[test]
fn the_gate_runs_the_documented_test_command() {
    let [train, test] = ["cargo run --release -- train recipes/quickstart.toml", TEST_COMMAND];
    assert_eq!(cargo_commands("README.md"), [train, test]);
    assert_eq!(cargo_commands("CONTRIBUTING.md"), [test]);
    assert_eq!(cargo_commands(".ci/run"), [test]);
    // `cargo run` needs no `--bin` while there is one program.
    let programs = project_files().into_iter().filter(|path| path.ends_with("src/main.rs"));
    let programs: Vec<String> = programs.filter(|path| path.starts_with("crates/")).collect();
    assert_eq!(programs, ["crates/smidgen/src/main.rs"]);
}

const TEST_COMMAND: &str = "cargo test --workspace --locked";

/// What makes the tests quick is in files that cargo reads, so that the plain command is as quick as the gate.
#[test]
fn the_gate_has_no_build_settings_of_its_own() {
    let gate = read(".ci/run");
    let own: Vec<String> = ["CARGO_PROFILE", "CARGO_INCREMENTAL", "CARGO_BUILD", "RUST_TEST_THREADS"]
        .into_iter()
        .filter(|name| gate.contains(name))
        .map(str::to_owned)
        .collect();
    expect_none("`.ci/run` builds as `cargo test` does", &own);
    let manifest = read("Cargo.toml");
    let (_, profile) = manifest.split_once("\n[profile.dev]\n").expect("a profile of tests");
    let profile: Vec<&str> = profile.lines().take_while(|line| !line.is_empty()).collect();
    for setting in ["debug = false", "incremental = false", "codegen-units = 1"] {
        assert!(profile.contains(&setting), "tests are built with `{setting}`");
    }
    let runner = read(".cargo/config.toml");
    let script = in_quotes_after(&runner, "runner = ");
    assert!(read(&script).contains("RUST_TEST_THREADS"), "`{script}` sets the number of tests at a time");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        for file in [".ci/run", &script] {
            let mode = std::fs::metadata(root().join(file)).unwrap().permissions().mode();
            assert!(mode & 0o100 != 0, "`{file}` must be executable");
        }
    }
}

fn in_quotes_after(text: &str, name: &str) -> String {
    let (_, value) = text.split_once(name).unwrap_or_else(|| panic!("`{name}` is missing"));
    value.split('"').nth(1).expect("a value in quotes").to_owned()
}

#[test]
fn the_readme_leads_to_every_page() {
    let map: Vec<String> = ROOT_DOCUMENTS.iter().flat_map(|path| in_backticks(&read(path))).collect();
    let pages =
        documents().into_iter().filter(|path| path.starts_with("docs/") && path.matches('/').count() == 1);
    let missing: Vec<String> = pages.filter(|path| !map.contains(path)).collect();
    expect_none("every page of `docs/` is named by a document in the root", &missing);
}

// ── reference pages ────────────────────────────────────────────────────────────────────────────────

#[test]
fn the_key_reference_is_what_the_code_says() {
    let head = "# Keys of a recipe\n\n\
        This page is generated from the table that the parser reads.\n\
        A recipe that asks for something this version cannot do is refused before anything is loaded, with all such \
        keys at once (`docs/supported.md`).\n\n";
    expect_file("docs/recipe.md", &format!("{head}{}", render_key_reference()));
}

#[test]
fn the_command_reference_is_what_the_code_says() {
    let head = "# Commands\n\n\
        This page is generated from the definitions of the command line; `smidgen COMMAND --help` prints the same.\n\
        Results go to stdout, messages to stderr.\n\
        Exit codes: 0 done; 1 failed, or the run does not fit; 2 the recipe or the command is wrong; 130 interrupted, with the state saved.\n\
        Lines are at most 80 columns wide, or `COLUMNS` if it is set; `NO_COLOR` turns colour off, `CLICOLOR_FORCE` turns it on.\n";
    expect_file("docs/commands.md", &format!("{head}{}", render_command_reference(&command())));
}
