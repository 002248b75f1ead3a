//! No tracked file has the markers of a merge that was not resolved.

use super::{expect_none, root};
use std::fs;
use std::process::Command;

/// Lines with the markers of a conflict, counted from 1. A line of equals signs alone is a heading in some documents,
/// so it counts only inside a conflict.
fn markers(text: &str) -> Vec<usize> {
    let mut is_open = false;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let (begins, ends) = (line.starts_with("<<<<<<< "), line.starts_with(">>>>>>> "));
        if begins || ends || is_open && line == "=======" {
            found.push(index + 1);
        }
        is_open = (is_open || begins) && !ends;
    }
    found
}

#[test]
fn no_tracked_file_has_conflict_markers() {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output();
    let Some(listed) = listed.ok().filter(|listed| listed.status.success()) else {
        println!("skipped: `git ls-files` does not work here");
        return;
    };
    let names = String::from_utf8(listed.stdout).expect("names are plain");
    let mut violations = Vec::new();
    for name in names.split_terminator('\0') {
        // A file that was deleted and a binary one have no lines.
        let Ok(text) = fs::read(root().join(name))
            .map_err(drop)
            .and_then(|bytes| String::from_utf8(bytes).map_err(drop))
        else {
            continue;
        };
        violations.extend(markers(&text).iter().map(|line| format!("{name}:{line}")));
    }
    expect_none("a merge left its markers", &violations);
}

#[test]
fn markers_are_found_and_headings_are_not() {
    let conflict = ["a", "<<<<<<< HEAD", "b", "=======", "c", ">>>>>>> fixes", "d"].join("\n");
    assert_eq!(markers(&conflict), [2, 4, 6]);
    assert!(markers("Title\n=======\ntext <<<<<<< HEAD\n").is_empty());
}
