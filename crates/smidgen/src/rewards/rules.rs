//! Rewards that are built in: each gives an answer 1 or 0.
//!
//! Texts are compared without the blanks around them. The number of a text is the last one in it, as in answers that
//! reason first; commas between groups of three digits belong to a number.
//! Left out: judging by meaning, which a command can do.

use super::{Candidate, text_of};
use crate::failure::Failure;
use crate::rows::prompts::Prompt;
use regex::Regex;
use serde_json::Value as Json;
use smidgen_recipe::RewardRule;
use std::sync::LazyLock;

#[derive(Debug)]
pub enum Rule {
    Exact {
        column: String,
        pattern: Option<Regex>,
    },
    Number {
        column: String,
        pattern: Option<Regex>,
    },
    Regex(Regex),
    /// Anchored at both ends.
    Format(Regex),
    Length {
        least: usize,
        most: usize,
    },
    Json {
        keys: Vec<String>,
    },
}

static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
    let digits = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+";
    Regex::new(&format!(r"-?(?:{digits})(?:[eE][+-]?\d+)?")).expect("the pattern is valid")
});

impl Rule {
    /// # Panics
    /// For a command, which is no rule.
    pub fn of(rule: &RewardRule) -> Result<Rule, Failure> {
        let found = |pattern: &Option<String>| pattern.as_deref().map(compile).transpose();
        Ok(match rule {
            RewardRule::Exact { column, pattern } => {
                Rule::Exact { column: column.clone(), pattern: found(pattern)? }
            }
            RewardRule::Number { column, pattern } => {
                Rule::Number { column: column.clone(), pattern: found(pattern)? }
            }
            RewardRule::Regex { pattern } => Rule::Regex(compile(pattern)?),
            RewardRule::Format { pattern } => {
                compile(pattern)?;
                Rule::Format(compile(&format!(r"\A(?:{pattern})\z"))?)
            }
            RewardRule::Length { least, most } => Rule::Length { least: *least, most: *most },
            RewardRule::Json { keys } => Rule::Json { keys: keys.clone() },
            RewardRule::Command { .. } => unreachable!("a command is started, not computed"),
        })
    }

    /// What is wrong with a row that the rule reads.
    pub fn check(&self, prompt: &Prompt) -> Result<(), String> {
        match self {
            Rule::Exact { column, .. } => expected(prompt, column).map(drop),
            Rule::Number { column, .. } => match last_number(&expected(prompt, column)?) {
                Some(_) => Ok(()),
                None => Err(format!("has no number in column `{column}`")),
            },
            Rule::Regex(_) | Rule::Format(_) | Rule::Length { .. } | Rule::Json { .. } => Ok(()),
        }
    }

    pub fn score(&self, answer: &Candidate<'_>) -> f64 {
        let text = answer.text.trim();
        let is_right = match self {
            Rule::Exact { column, pattern } => {
                let expected = expected(answer.prompt, column).ok();
                found_in(pattern.as_ref(), text).is_some_and(|text| expected.is_some_and(|own| own == text))
            }
            Rule::Number { column, pattern } => {
                let expected = expected(answer.prompt, column).ok().and_then(|text| last_number(&text));
                let own = found_in(pattern.as_ref(), text).and_then(last_number);
                own.zip(expected).is_some_and(|(own, expected)| are_equal(own, expected))
            }
            Rule::Regex(pattern) | Rule::Format(pattern) => pattern.is_match(text),
            Rule::Length { least, most } => (*least..=*most).contains(&answer.tokens),
            Rule::Json { keys } => match serde_json::from_str::<Json>(text) {
                Ok(Json::Object(fields)) => keys.iter().all(|key| fields.contains_key(key)),
                Ok(_) => keys.is_empty(),
                Err(_) => false,
            },
        };
        f64::from(u8::from(is_right))
    }
}

fn compile(pattern: &str) -> Result<Regex, Failure> {
    Regex::new(pattern).map_err(|error| {
        // The last line has the reason; the lines before it point into the pattern.
        let reason = error.to_string();
        let reason =
            reason.lines().last().unwrap_or_default().trim().trim_start_matches("error: ").to_owned();
        let what = format!("`train.reward`: `{pattern}` is not a regular expression: {reason}");
        Failure::recipe(error).reworded(what)
    })
}

fn expected(prompt: &Prompt, column: &str) -> Result<String, String> {
    let value = prompt.fields.get(column).ok_or_else(|| format!("has no column `{column}`"))?;
    let text = text_of(value).ok_or_else(|| format!("has no text in column `{column}`"))?;
    let text = text.trim();
    if text.is_empty() { Err(format!("has an empty column `{column}`")) } else { Ok(text.to_owned()) }
}

/// The text, or what the pattern finds in it: its first group, or all of the match.
fn found_in<'a>(pattern: Option<&Regex>, text: &'a str) -> Option<&'a str> {
    let Some(pattern) = pattern else { return Some(text) };
    let found = pattern.captures(text)?;
    found.get(1).or(found.get(0)).map(|found| found.as_str().trim())
}

fn last_number(text: &str) -> Option<f64> {
    let found = NUMBER.find_iter(text).last()?;
    let is_sign = text[..found.start()].chars().next_back().is_none_or(|before| !before.is_alphanumeric());
    let digits = found.as_str().replace(',', "");
    let digits = if is_sign { digits.as_str() } else { digits.trim_start_matches('-') };
    digits.parse().ok()
}

/// Decimal fractions are rounded when they are read.
fn are_equal(one: f64, other: f64) -> bool {
    (one - other).abs() <= 1e-9 * one.abs().max(other.abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn score(rule: RewardRule, row: Json, text: &str) -> f64 {
        let Json::Object(fields) = row else { panic!("a row is an object") };
        let prompt = Prompt { shown: Json::Null, fields };
        let answer = Candidate { prompt: &prompt, text, tokens: text.len(), stopped_by: "end_token" };
        Rule::of(&rule).unwrap().score(&answer)
    }

    fn exact(pattern: Option<&str>) -> RewardRule {
        RewardRule::Exact { column: "answer".into(), pattern: pattern.map(str::to_owned) }
    }

    fn number(pattern: Option<&str>) -> RewardRule {
        RewardRule::Number { column: "answer".into(), pattern: pattern.map(str::to_owned) }
    }

    #[test]
    fn texts_are_compared_without_blanks() {
        let row = || json!({"answer": " yes\n"});
        assert_eq!(score(exact(None), row(), "\tyes "), 1.0);
        assert_eq!(score(exact(None), row(), "Yes"), 0.0);
        assert_eq!(score(exact(Some("<a>(.*)</a>")), row(), "I think <a> yes </a>."), 1.0);
        assert_eq!(score(exact(Some("<a>(.*)</a>")), row(), "yes"), 0.0);
        assert_eq!(score(exact(None), json!({"answer": 7}), "7"), 1.0);
    }

    #[test]
    fn the_last_number_counts() {
        for (expected, text, right) in [
            (json!("#### 1,234"), "so it is 1234.0", 1.0),
            (json!(42), "6 * 7 = 42.", 1.0),
            (json!(42), "42 is 6 * 7", 0.0),
            (json!("-5"), "the result is -5", 1.0),
            (json!("5"), "10-5", 1.0),
            (json!("0.3"), ".3", 1.0),
            (json!("1e3"), "1000", 1.0),
            (json!("3"), "1,2,3", 1.0),
            (json!("3"), "three", 0.0),
        ] {
            assert_eq!(score(number(None), json!({"answer": expected}), text), right, "{text}");
        }
        assert_eq!(score(number(Some("answer: (.*)")), json!({"answer": 4}), "answer: 4\nthen 5"), 1.0);
    }

    #[test]
    fn forms_are_checked() {
        let any = || json!({});
        assert_eq!(score(RewardRule::Regex { pattern: "b+".into() }, any(), "abba"), 1.0);
        assert_eq!(score(RewardRule::Format { pattern: "b+".into() }, any(), "abba"), 0.0);
        assert_eq!(score(RewardRule::Format { pattern: "a|abba".into() }, any(), " abba\n"), 1.0);
        let length = || RewardRule::Length { least: 2, most: 3 };
        assert_eq!(["a", "ab", "abc", "abcd"].map(|text| score(length(), any(), text)), [0.0, 1.0, 1.0, 0.0]);
        let keys =
            |keys: &[&str]| RewardRule::Json { keys: keys.iter().map(|key| (*key).to_owned()).collect() };
        assert_eq!(score(keys(&[]), any(), "[1, 2]"), 1.0);
        assert_eq!(score(keys(&["a"]), any(), "{\"a\": 1}"), 1.0);
        assert_eq!(score(keys(&["a", "b"]), any(), "{\"a\": 1}"), 0.0);
        assert_eq!(score(keys(&[]), any(), "{\"a\": 1"), 0.0);
    }

    #[test]
    fn what_cannot_be_compared_is_said() {
        let prompt = |row: Json| Prompt { shown: Json::Null, fields: row.as_object().cloned().unwrap() };
        let said = |rule: RewardRule, row: Json| Rule::of(&rule).unwrap().check(&prompt(row)).unwrap_err();
        assert_eq!(said(exact(None), json!({"gold": "1"})), "has no column `answer`");
        assert_eq!(said(exact(None), json!({"answer": [1]})), "has no text in column `answer`");
        assert_eq!(said(number(None), json!({"answer": "one"})), "has no number in column `answer`");
        let failure = Rule::of(&RewardRule::Regex { pattern: "a(".into() }).unwrap_err();
        assert_eq!(failure.message, "`train.reward`: `a(` is not a regular expression: unclosed group");
    }
}
