//! Adding an operation or a memory choice stays cheap: the places that name one are counted, and a new operation is
//! never half added.

use super::{expect_none, is_test_source, read, sources};
use regex::Regex;

/// The example of "Add an operation" in `CONTRIBUTING.md`: a typical operation, with attributes, a gradient and a
/// kernel on each device.
const EXAMPLE: &str = "GatedAct";
const MOST_PLACES: usize = 8;

/// The example of "Add a memory choice" there.
const CHOICE: &str = "tile_tokens";
const MOST_FILES: usize = 5;

/// Lines of code without comments and without the tests at the end of a file, numbered from 1.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    let lines = text[..end].lines().enumerate();
    lines.map(|(index, line)| (index + 1, line.split("//").next().unwrap_or("")))
}

/// Files with the lines of code that contain a word.
fn places(word: &str) -> Vec<(String, usize)> {
    let word = Regex::new(&format!(r"\b{word}\b")).unwrap();
    let of_program =
        sources().into_iter().filter(|(path, _)| path.contains("/src/") && !is_test_source(path));
    let mut places = Vec::new();
    for (path, text) in of_program {
        let lines = code(&text).filter(|(_, line)| word.is_match(line));
        places.extend(lines.map(|(number, _)| (path.clone(), number)));
    }
    places
}

#[test]
fn an_operation_is_named_at_eight_places_at_most() {
    let places = places(EXAMPLE);
    let example = "crates/smidgen-runtime/tests/it/row_examples.rs";
    let has_example = read(example).contains(&format!("Op::{EXAMPLE}("));
    assert!(has_example, "the example of `{EXAMPLE}` is no longer in `{example}`");
    let listed: Vec<String> = places.iter().map(|(path, line)| format!("{path}:{line}")).collect();
    let count = places.len() + 1;
    assert!(count <= MOST_PLACES, "`{EXAMPLE}` is named at {count} places:\n  {}", listed.join("\n  "));
    let section = guide("Add an operation");
    let named = |path: &str| section.contains(&format!("`{path}`"));
    let missing: Vec<String> =
        places.iter().filter(|(path, _)| !named(path)).map(|(path, _)| path.clone()).collect();
    expect_none("\"Add an operation\" in `CONTRIBUTING.md` names every place", &missing);
    assert!(named(example), "\"Add an operation\" in `CONTRIBUTING.md` does not name `{example}`");
}

/// A section of `CONTRIBUTING.md`.
fn guide(title: &str) -> String {
    let text = read("CONTRIBUTING.md");
    let found = text.split("\n## ").find(|section| section.starts_with(title));
    found.unwrap_or_else(|| panic!("`CONTRIBUTING.md` has no section \"{title}\"")).to_owned()
}

#[test]
fn a_memory_choice_is_named_in_five_files_at_most() {
    let mut files: Vec<String> = places(CHOICE).into_iter().map(|(path, _)| path).collect();
    files.dedup();
    assert!(files.len() <= MOST_FILES, "`{CHOICE}` is named in {}:\n  {}", files.len(), files.join("\n  "));
    let section = guide("Add a memory choice");
    let missing: Vec<String> =
        files.into_iter().filter(|path| !section.contains(&format!("`{path}`"))).collect();
    expect_none("\"Add a memory choice\" in `CONTRIBUTING.md` names every file", &missing);
}

/// Patterns of the arms that stand at the same depth as line `index`, up to the begin of their `match`.
fn arms_above<'a>(lines: &[&'a str], index: usize) -> Vec<&'a str> {
    let depth = |line: &str| line.len() - line.trim_start().len();
    let own = depth(lines[index]);
    let above = lines[..index].iter().rev().filter(|line| !line.trim().is_empty());
    let inside = above.take_while(|line| depth(line) >= own);
    inside
        .filter(|line| depth(line) == own)
        .map(|line| line.split("=>").next().unwrap_or("").trim())
        .collect()
}

#[test]
fn matches_over_operations_have_no_wildcard_arm() {
    let wildcard = Regex::new(r"^\s*(_|\(_(, _)*\))( if .*)? =>").unwrap();
    let pattern = Regex::new(r"^[|(&]?\s*Op::").unwrap();
    let mut violations = Vec::new();
    for (path, text) in sources().iter().filter(|(path, _)| path.contains("/src/") && !is_test_source(path)) {
        let lines: Vec<&str> = code(text).map(|(_, line)| line).collect();
        for (index, _) in lines.iter().enumerate().filter(|(_, line)| wildcard.is_match(line)) {
            if arms_above(&lines, index).iter().any(|arm| pattern.is_match(arm)) {
                violations.push(format!("{path}:{}", index + 1));
            }
        }
    }
    expect_none(
        "a `match` over operations names every operation, so that a new one cannot be forgotten",
        &violations,
    );
}
