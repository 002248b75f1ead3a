//! Adding an operation or a memory choice stays cheap: the places that name one are counted, and a new operation is
//! never half added.

use super::{expect_none, is_test_source, read, sources};
use regex::Regex;

/// The example of "Add an operation" in `CONTRIBUTING.md`: a typical operation, with attributes, a gradient and a
/// kernel on each device.
const EXAMPLE: &str = "GatedAct";
const MOST_PLACES: usize = 8;

/// The example of "Add a memory choice" there.
const CHOICE: &str = "layers_per_lap";
const MOST_FILES: usize = 5;
/// Where the memory choices are listed.
const POLICY: &str = "crates/smidgen-ir/src/policy.rs";
/// What has fields with the names of memory choices and is neither a policy nor a list of pins. `memory` is there because
/// texts name keys of the recipe.
const NO_POLICY: [&str; 15] = [
    "demand", "early", "first", "freedom", "from", "idea", "memory", "node", "norm", "original", "piece",
    "point", "self", "step", "to",
];

/// Lines of code without comments and without the tests at the end of a file, numbered from 1.
pub fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
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

/// The fields of `Policy`, which are those of `Pins` too.
fn memory_choices() -> Vec<String> {
    let line = Regex::new(r"(?m)^    (\w+): .+, pin .+, json ").unwrap();
    line.captures_iter(&read(POLICY)).map(|found| found[1].to_owned()).collect()
}

/// What stands between the braces of every `Policy { .. }` and `Pins { .. }`, made or taken apart.
fn braced(text: &str) -> Vec<&str> {
    let begin = Regex::new(r"\b(Policy|Pins) \{").unwrap();
    let is_value = |start: usize| !text[..start].ends_with("-> ");
    let inside = |from: usize| {
        let mut depth = 1;
        let end = text[from..].find(|letter: char| {
            depth += i32::from(letter == '{') - i32::from(letter == '}');
            depth == 0
        });
        &text[from..from + end.expect("braces are closed")]
    };
    begin.find_iter(text).filter(|found| is_value(found.start())).map(|found| inside(found.end())).collect()
}

/// Whether code uses this field of a policy or of pins. A field of anything that is not known to be something else counts.
fn uses_choice(text: &str, choice: &str) -> bool {
    let field = Regex::new(&format!(r"\.\s*{choice}\b(\s*\()?")).unwrap();
    let named = Regex::new(&format!(r"\b{choice}\b\s*([:,}}]|$)")).unwrap();
    let owner = |start: usize| {
        let before = text[..start].trim_end();
        let is_of_name = |letter: char| letter.is_alphanumeric() || letter == '_';
        before.trim_end_matches(is_of_name).len()..before.len()
    };
    let mut fields = field.captures_iter(text).filter(|found| found.get(1).is_none());
    fields.any(|found| !NO_POLICY.contains(&&text[owner(found.get(0).unwrap().start())]))
        || braced(text).into_iter().any(|inside| named.is_match(inside))
        || text.contains(&format!("key!(pin {choice},"))
}

/// Files that use a memory choice.
fn files_of(choice: &str) -> Vec<String> {
    let speaks_of_policies = Regex::new(r"\b(policy|pins|Policy|Pins)\b").unwrap();
    let mut files = vec![POLICY.to_owned()];
    for (path, text) in sources() {
        let text = code(&text).map(|(_, line)| line).collect::<Vec<_>>().join("\n");
        let is_of_program = path.contains("/src/") && !is_test_source(&path) && path != POLICY;
        if is_of_program && speaks_of_policies.is_match(&text) && uses_choice(&text, choice) {
            files.push(path);
        }
    }
    files
}

#[test]
fn every_memory_choice_is_named_in_five_files_at_most() {
    let choices = memory_choices();
    assert!(choices.iter().any(|choice| choice == CHOICE), "`{POLICY}` does not list `{CHOICE}`");
    let mut violations = Vec::new();
    for choice in &choices {
        let files = files_of(choice);
        if files.len() > MOST_FILES {
            violations.push(format!("`{choice}` in {}: {}", files.len(), files.join(", ")));
        }
    }
    expect_none("a memory choice is named in five files at most", &violations);
    let mut files: Vec<String> = places(CHOICE).into_iter().map(|(path, _)| path).collect();
    files.dedup();
    assert!(files.len() <= MOST_FILES, "`{CHOICE}` is named in {}:\n  {}", files.len(), files.join("\n  "));
    let section = guide("Add a memory choice");
    let missing: Vec<String> =
        files.into_iter().filter(|path| !section.contains(&format!("`{path}`"))).collect();
    expect_none("\"Add a memory choice\" in `CONTRIBUTING.md` names every file", &missing);
}

#[test]
fn uses_of_a_choice_are_found() {
    let uses = |text: &str| uses_choice(text, "weights");
    for text in [
        "policy.weights == Space::Host",
        "let now = before\n    .weights;",
        "freedom.policy(&point).weights",
        "Pins { order, weights: None, ..pins }",
        "let Policy { weights, .. } = policy;",
        "Policy { order: f(|x| { x }), weights }",
        "key!(pin weights, SPACE)",
    ] {
        assert!(uses(text), "{text}");
    }
    for text in [
        "point.weights",
        "job.weights()",
        "Point { weights, ..first }",
        "fn f(weights: usize) -> Policy { weights }",
    ] {
        assert!(!uses(text), "{text}");
    }
}

#[test]
fn methods_of_policies_are_in_one_file() {
    let methods = Regex::new(r"\bimpl (Policy|Pins) \{").unwrap();
    let others = sources().into_iter().filter(|(path, text)| path != POLICY && methods.is_match(text));
    let others: Vec<String> = others.map(|(path, _)| path).filter(|path| !is_test_source(path)).collect();
    expect_none(&format!("methods of `Policy` and `Pins` are in `{POLICY}`"), &others);
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
