//! Adding an operation or a memory choice stays cheap: the places that name one are counted, and a new operation is
//! never half added.

use super::sizes::is_in_room;
use super::{expect_none, is_test_source, read, sources};
use regex::Regex;
use std::collections::BTreeMap;

/// The example of "Add an operation" in `CONTRIBUTING.md`: a typical operation, with attributes, a gradient and a
/// kernel on each device.
const EXAMPLE: &str = "GatedAct";
/// Lines of the program that name an operation. Its row, its gradient, its kernel on each device and its example are five,
/// so three are left for what is built with it. Whatever else there is to ask about operations is a column of the table.
const MOST_PLACES: usize = 8;
/// Where the operations are listed.
const OPERATIONS: &str = "crates/smidgen-ir/src/op.rs";

/// The example of "Add a memory choice" there.
const CHOICE: &str = "layers_per_lap";
const MOST_FILES_OF_CHOICE: usize = 5;
/// Where the memory choices are listed.
const POLICY: &str = "crates/smidgen-ir/src/policy.rs";
/// Fields of other types that have the name of a memory choice, by what they are reached through: what a node, a step or
/// an early update changes; what a micro-batch needs; the rows of a table.
const OTHER_FIELDS: [(&str, &[&str]); 4] = [
    ("updates", &["early", "node", "norm", "original", "piece", "step"]),
    ("micro_tokens", &["demand"]),
    ("activations", &["rows"]),
    ("gradients", &["rows"]),
];

/// Lines of code without comments and without the tests at the end of a file, numbered from 1.
pub fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    let lines = text[..end].lines().enumerate();
    lines.map(|(index, line)| (index + 1, line.split("//").next().unwrap_or("")))
}

/// Files with the lines of code that match, without tests.
fn places(pattern: &str) -> Vec<(String, usize)> {
    let pattern = Regex::new(pattern).unwrap();
    let of_program =
        sources().into_iter().filter(|(path, _)| path.contains("/src/") && !is_test_source(path));
    let mut places = Vec::new();
    for (path, text) in of_program {
        let lines = code(&text).filter(|(_, line)| pattern.is_match(line));
        places.extend(lines.map(|(number, _)| (path.clone(), number)));
    }
    places
}

/// Where the program names each operation: its row in the op table, and every line with `Op::` and its name.
fn places_of_operations() -> BTreeMap<String, Vec<(String, usize)>> {
    let row = Regex::new(r"^    (\w+)(\(.*\)| \{.*\})? => \{$").unwrap();
    let table = read(OPERATIONS);
    let rows = table.lines().enumerate();
    let mut places: BTreeMap<String, Vec<(String, usize)>> = rows
        .filter_map(|(index, line)| Some((row.captures(line)?[1].to_owned(), index + 1)))
        .map(|(operation, line)| (operation, vec![(OPERATIONS.to_owned(), line)]))
        .collect();
    let name = Regex::new(r"\bOp::(\w+)").unwrap();
    for (path, text) in sources().iter().filter(|(path, _)| path.contains("/src/") && !is_test_source(path)) {
        for (number, line) in code(text) {
            let place = (path.clone(), number);
            for named in name.captures_iter(line) {
                let own = places.get_mut(&named[1]).filter(|own| !own.contains(&place));
                own.into_iter().for_each(|own| own.push(place.clone()));
            }
        }
    }
    places.values_mut().for_each(|own| own.sort());
    places
}

/// The example that each operation needs is one more place.
#[test]
fn every_operation_is_named_at_eight_places_at_most() {
    let mut violations = Vec::new();
    for (operation, places) in &places_of_operations() {
        let count = places.len() + 1;
        if count > MOST_PLACES {
            let listed: Vec<String> = places.iter().map(|(path, line)| format!("{path}:{line}")).collect();
            violations.push(format!("`{operation}` at {count}: {}", listed.join(", ")));
        }
    }
    expect_none("an operation is named at eight places at most", &violations);
    let imported = places(r"\buse .*\bOp::");
    let imported: Vec<String> = imported.iter().map(|(path, line)| format!("{path}:{line}")).collect();
    expect_none("operations are named as `Op::…`, so that their places can be counted", &imported);
}

#[test]
fn the_guide_names_every_file_of_its_operation() {
    let places = &places_of_operations()[EXAMPLE];
    let mut files: Vec<String> = places.iter().map(|(path, _)| path.clone()).collect();
    let example = "crates/smidgen-runtime/tests/it/row_examples.rs";
    let has_example = read(example).contains(&format!("Op::{EXAMPLE}("));
    assert!(has_example, "the example of `{EXAMPLE}` is no longer in `{example}`");
    files.push(example.to_owned());
    let section = guide("Add an operation");
    files.retain(|path| !section.contains(&format!("`{path}`")));
    expect_none("\"Add an operation\" in `CONTRIBUTING.md` names every file", &files);
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

/// Whether code uses this field of a policy or of pins. A field of anything that is not known to be something else counts,
/// however it is reached; the names of keys in texts do not.
fn uses_choice(text: &str, choice: &str) -> bool {
    let field = Regex::new(&format!(r"\.\s*{choice}\b(\s*\()?")).unwrap();
    let named = Regex::new(&format!(r"\b{choice}\b\s*([:,}}]|$)")).unwrap();
    let owner = |start: usize| {
        let before = text[..start].trim_end();
        let is_of_name = |letter: char| letter.is_alphanumeric() || letter == '_';
        before.trim_end_matches(is_of_name).len()..before.len()
    };
    let others = OTHER_FIELDS.iter().find(|(name, _)| *name == choice).map_or(&[][..], |(_, owners)| owners);
    let mut fields = field.captures_iter(text).filter(|found| found.get(1).is_none());
    fields.any(|found| !others.contains(&&text[owner(found.get(0).unwrap().start())]))
        || braced(text).into_iter().any(|inside| named.is_match(inside))
        || text.contains(&format!("key!(pin {choice},"))
}

/// The code of files that speak of policies, without texts.
fn code_with_policies() -> Vec<(String, String)> {
    let quoted = Regex::new(r#"'"'|"(?:[^"\\]|\\.)*""#).unwrap();
    let speaks_of_policies = Regex::new(r"\b(policy|pins|Policy|Pins)\b").unwrap();
    let is_read = |path: &str, text: &str| {
        path.contains("/src/") && !is_test_source(path) && path != POLICY && speaks_of_policies.is_match(text)
    };
    let sources = sources().into_iter().filter(|(path, text)| is_read(path, text));
    sources
        .map(|(path, text)| {
            let text = code(&text).map(|(_, line)| line).collect::<Vec<_>>().join("\n");
            (path, quoted.replace_all(&text, "").into_owned())
        })
        .filter(|(_, text)| speaks_of_policies.is_match(text))
        .collect()
}

/// Files that use a memory choice. Those of the solver are one room, which is listed once.
fn files_of(choice: &str, sources: &[(String, String)]) -> Vec<String> {
    let users = sources.iter().filter(|(_, text)| text.contains(choice) && uses_choice(text, choice));
    let mut files: Vec<String> = users.map(|(path, _)| room_of(path.clone())).collect();
    files.push(POLICY.to_owned());
    files.sort();
    files.dedup();
    files
}

/// The name of the solver's room for its files, and the path of any other file.
fn room_of(path: String) -> String {
    if is_in_room("solver", &path) { "the solver".to_owned() } else { path }
}

#[test]
fn every_memory_choice_is_named_in_five_files_at_most() {
    let choices = memory_choices();
    assert!(choices.iter().any(|choice| choice == CHOICE), "`{POLICY}` does not list `{CHOICE}`");
    let sources = code_with_policies();
    let mut violations = Vec::new();
    for choice in &choices {
        let files = files_of(choice, &sources);
        if files.len() > MOST_FILES_OF_CHOICE {
            violations.push(format!("`{choice}` in {}: {}", files.len(), files.join(", ")));
        }
    }
    expect_none("a memory choice is named in five files at most", &violations);
    let named: Vec<String> = places(&format!(r"\b{CHOICE}\b")).into_iter().map(|(path, _)| path).collect();
    let mut rooms: Vec<String> = named.iter().cloned().map(room_of).collect();
    rooms.sort();
    rooms.dedup();
    assert!(
        rooms.len() <= MOST_FILES_OF_CHOICE,
        "`{CHOICE}` is named in {}:\n  {}",
        rooms.len(),
        rooms.join("\n  ")
    );
    let section = guide("Add a memory choice");
    let is_named = |room: &String| {
        let mut own = named.iter().filter(|path| room_of((*path).clone()) == *room);
        own.any(|path| section.contains(&format!("`{path}`")))
    };
    rooms.retain(|room| !is_named(room));
    expect_none("\"Add a memory choice\" in `CONTRIBUTING.md` names every file", &rooms);
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
        "point.weights",
        "key!(pin weights, SPACE)",
    ] {
        assert!(uses(text), "{text}");
    }
    for text in ["job.weights()", "Point { weights, ..first }", "fn f(weights: usize) -> Policy { weights }"]
    {
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
