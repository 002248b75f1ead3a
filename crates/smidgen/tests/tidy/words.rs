//! Plain words: phrases of an old dialect of this project that comments, messages and documents must not use again.
//!
//! The list is short on purpose: each phrase has a plain replacement and no good use here.

use super::{expect_none, project_files, read};
use regex::Regex;

const PHRASES: [(&str, &str); 11] = [
    (r"\banew\b", "again"),
    (r"\b(is|are) told\b", "is reported, is detected"),
    (r"\btold (apart|by)\b", "detected"),
    (r"\bso much of\b", "this much"),
    (r"\bso many (bytes|tokens|samples|steps|rows|layers|elements)\b", "this many"),
    (r"\blies? (beside|elsewhere)\b", "is next to, is offloaded"),
    (r"\bas (it|they) lies?\b", "as stored"),
    (r"\bbrought ahead\b", "prefetched"),
    (r"\bwhich is not here\b", "not found on this machine"),
    (r"\bunless (said|told)\b", "by default"),
    (r"\bis no (folder|file|number|device|size|run|JSON|list)\b", "is not a"),
];

#[test]
fn an_old_dialect_does_not_come_back() {
    let phrases = PHRASES.map(|(phrase, instead)| (Regex::new(phrase).unwrap(), instead));
    // The log and the changelog are records of the past.
    let is_record = |path: &str| ["docs/log.md", "CHANGELOG.md"].contains(&path);
    let is_read = |path: &str| path.ends_with(".md") || path.contains("/src/") && path.ends_with(".rs");
    let mut violations = Vec::new();
    for path in project_files().into_iter().filter(|path| is_read(path) && !is_record(path)) {
        for (index, line) in read(&path).lines().enumerate() {
            for (phrase, instead) in &phrases {
                if let Some(found) = phrase.find(line) {
                    violations.push(format!("{path}:{}: `{}`, say `{instead}`", index + 1, found.as_str()));
                }
            }
        }
    }
    expect_none("plain words", &violations);
}
