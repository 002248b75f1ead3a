//! Finds answers in texts with the pattern of `eval.answer`.
//!
//! The pattern is a case-sensitive regular expression; its first match is the answer. Without a pattern the answer is
//! the whole expected output. The field `answer` of a row takes precedence (`choice.rs`, only with a pattern;
//! `eval/answers.rs`).
//! Left out: answers with the same meaning in other words.

use crate::failure::Failure;
use regex::Regex;
use std::ops::Range;

/// Rows with more different answers than this are not multiple choice.
pub const MOST_ANSWERS: usize = 64;

/// The pattern of `eval.answer`, if there is one.
pub fn answer_pattern(text: &str) -> Result<Option<Regex>, Failure> {
    if text.is_empty() {
        return Ok(None);
    }
    let pattern = Regex::new(text).map_err(|error| {
        // The last line has the reason; the lines before it point into the pattern.
        let reason = error.to_string();
        let reason = reason.lines().last().unwrap_or_default().trim().trim_start_matches("error: ");
        let message = format!("`eval.answer` is not a regular expression: `{text}`: {reason}");
        Failure::recipe(error).reworded(message)
    })?;
    if pattern.find("").is_some() {
        return Err(Failure::recipe(format!("`eval.answer`: `{text}` matches the empty text"))
            .hint("a pattern such as `answer[1-4]` or `true|false` finds an answer"));
    }
    Ok(Some(pattern))
}

/// A pattern that finds any of the answers; longer answers are tried before their prefixes.
pub fn any_of(answers: &[String]) -> Regex {
    let mut answers: Vec<&str> = answers.iter().map(String::as_str).collect();
    answers.sort_by(|one, other| other.len().cmp(&one.len()).then(one.cmp(other)));
    let alternatives: Vec<String> = answers.iter().map(|answer| regex::escape(answer)).collect();
    Regex::new(&alternatives.join("|")).expect("escaped texts are a pattern")
}

/// The range of the answer in an expected output: the first match of the pattern, or all of it.
pub fn answer_in(pattern: Option<&Regex>, output: &str) -> Option<Range<usize>> {
    match pattern {
        Some(pattern) => pattern.find(output).map(|found| found.range()),
        None => {
            let start = output.len() - output.trim_start().len();
            let range = start..output.trim_end().len().max(start);
            (!range.is_empty()).then_some(range)
        }
    }
}

/// The different answers, sorted. Refuses a single answer and more than `MOST_ANSWERS`.
pub fn distinct(answers: impl IntoIterator<Item = String>) -> Result<Vec<String>, Failure> {
    let mut answers: Vec<String> = answers.into_iter().collect();
    let rows = answers.len();
    answers.sort_unstable();
    answers.dedup();
    match answers.len() {
        count if count > MOST_ANSWERS => Err(Failure::recipe(format!(
            "{rows} rows of `data.eval` have {count} different answers, more than the {MOST_ANSWERS} of a multiple choice"
        ))
        .hint("set `eval.answer` to a pattern that finds the answer in an output, such as `answer[1-4]`")),
        0 | 1 => Err(Failure::recipe(format!(
            "every row of `data.eval` has the same answer{}: there is nothing to choose",
            answers.first().map(|answer| format!(" `{answer}`")).unwrap_or_default()
        ))
        .hint("raise `eval.limit`, or check `eval.answer`")),
        _ => Ok(answers),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_match_is_the_answer() {
        let pattern = answer_pattern("answer[1-5]").unwrap();
        let text = "the correct answer is answer3, not answer1";
        assert_eq!(&text[answer_in(pattern.as_ref(), text).unwrap()], "answer3");
        assert_eq!(answer_in(pattern.as_ref(), "Answer3"), None);
        assert_eq!(answer_in(None, "  true \n"), Some(2..6));
        assert_eq!(answer_in(None, " \n"), None);
    }

    #[test]
    fn longer_answers_are_found_first() {
        let pattern = any_of(&["no".into(), "nothing".into(), "a.b".into()]);
        assert_eq!(pattern.find("nothing").unwrap().as_str(), "nothing");
        assert!(pattern.find("acb").is_none());
    }

    #[test]
    fn too_few_or_too_many_answers_are_refused() {
        let error = distinct(["x".to_string(), "x".to_string()]).unwrap_err();
        assert_eq!(
            error.message,
            "every row of `data.eval` has the same answer `x`: there is nothing to choose"
        );
        let error = distinct((0..65).map(|number| number.to_string())).unwrap_err();
        assert_eq!(
            error.message,
            "65 rows of `data.eval` have 65 different answers, more than the 64 of a multiple choice"
        );
        assert!(error.hints[0].starts_with("set `eval.answer`"));
        assert_eq!(distinct(["b".to_string(), "a".to_string(), "b".to_string()]).unwrap(), ["a", "b"]);
    }

    #[test]
    fn invalid_patterns_are_refused() {
        assert_eq!(
            answer_pattern("answer[1-").unwrap_err().message,
            "`eval.answer` is not a regular expression: `answer[1-`: unclosed character class"
        );
        assert_eq!(answer_pattern("x*").unwrap_err().message, "`eval.answer`: `x*` matches the empty text");
    }
}
