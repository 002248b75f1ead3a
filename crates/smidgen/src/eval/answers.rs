//! Accuracy of generated answers: the model continues each question, and the answer is searched in its text.
//!
//! The protocol is that of LLM-Adapters' commonsense evaluation: the prompt comes from the template, decoding is
//! greedy or a beam search, and the text is stripped. The answer is the first match of the pattern; no match counts
//! as wrong.
//! Without `eval.answer` the pattern matches any of the answers in the rows.
//! Left out: sampling, and a second model as judge.

use crate::failure::Failure;
use crate::generate::beam::BeamSettings;
use crate::generate::sampler::Sampling;
use crate::generate::session::{Settings, TokenSession};
use crate::rows::answer::{answer_in, answer_pattern, any_of, distinct};
use crate::rows::choice::{expected_of, shortened};
use crate::rows::question::Questions;
use crate::rows::score::{Mean, mean_of};
use regex::Regex;
use serde_json::Value as Json;
use smidgen_formats::tokenizer::Tokenizer;
use std::collections::BTreeSet;

/// Maximum tokens of an answer.
pub const NEW_TOKENS: usize = 32;

/// Questions with their right answers, and the pattern that finds an answer in a text.
#[derive(Clone, Debug)]
pub struct AnswerKey {
    pub pattern: Regex,
    pub rows: Vec<KeyRow>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct KeyRow {
    pub place: String,
    pub id: Option<Json>,
    pub prompt: Vec<u32>,
    pub gold: String,
}

/// The answer of a model to one row.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelAnswer {
    pub text: String,
    pub answer: Option<String>,
    pub right: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct GenerationScores {
    pub acc: Mean,
    /// Rows in which no answer was found.
    pub unanswered: usize,
    pub rows: Vec<ModelAnswer>,
}

impl AnswerKey {
    pub fn build(questions: &Questions, answer: &str, tokenizer: &Tokenizer) -> Result<AnswerKey, Failure> {
        let stated = answer_pattern(answer)?;
        let mut golds = Vec::with_capacity(questions.rows.len());
        for question in &questions.rows {
            let gold = match question.fields.get("answer").and_then(Json::as_str) {
                Some(gold) => gold.to_owned(),
                None => {
                    let expected = expected_of(question)?;
                    let range = answer_in(stated.as_ref(), expected).ok_or_else(|| {
                        Failure::data(format!(
                            "{}: `eval.answer` (`{answer}`) finds nothing in the expected output `{}`",
                            question.place,
                            shortened(expected)
                        ))
                    })?;
                    expected[range].to_owned()
                }
            };
            if let Some(pattern) = &stated
                && answer_in(Some(pattern), &gold) != Some(0..gold.len())
            {
                return Err(Failure::data(format!(
                    "{}: `eval.answer` (`{answer}`) does not match the answer `{}`",
                    question.place,
                    shortened(&gold)
                )));
            }
            golds.push(gold);
        }
        let pattern = match stated {
            Some(pattern) => pattern,
            None => any_of(&distinct(golds.iter().cloned())?),
        };
        let rows = questions.rows.iter().zip(golds).map(|(question, gold)| {
            let prompt = tokenizer.encode(&question.prompt, question.add_special).map_err(Failure::model)?;
            let (place, id) = (question.place.clone(), question.fields.get("id").cloned());
            Ok(KeyRow { place, id, prompt, gold })
        });
        Ok(AnswerKey { pattern, rows: rows.collect::<Result<_, Failure>>()? })
    }

    pub fn longest_prompt(&self) -> usize {
        self.rows.iter().map(|row| row.prompt.len()).max().unwrap_or(0)
    }

    /// Scores the model's texts, one per row.
    pub fn score(&self, texts: Vec<String>) -> GenerationScores {
        assert_eq!(texts.len(), self.rows.len());
        let rows: Vec<ModelAnswer> = texts
            .into_iter()
            .zip(&self.rows)
            .map(|(text, row)| {
                let text = text.trim().to_owned();
                let answer = self.pattern.find(&text).map(|found| found.as_str().to_owned());
                let right = answer.as_ref() == Some(&row.gold);
                ModelAnswer { text, answer, right }
            })
            .collect();
        let right: Vec<bool> = rows.iter().map(|row| row.right).collect();
        let unanswered = rows.iter().filter(|row| row.answer.is_none()).count();
        GenerationScores { acc: mean_of(&right), unanswered, rows }
    }
}

/// Continues the prompt of every row. Calls `on_row` with the number of rows before one that begins.
pub fn generate_answers(
    session: &mut TokenSession,
    key: &AnswerKey,
    beams: usize,
    stop_ids: &BTreeSet<u32>,
    on_row: &dyn Fn(usize),
) -> Result<Vec<Vec<u32>>, Failure> {
    if beams > 1 {
        let settings =
            BeamSettings { beams, max_new: NEW_TOKENS, length_penalty: 1.0, stop_ids: stop_ids.clone() };
        let each = key.rows.iter().enumerate().map(|(index, row)| {
            on_row(index);
            Ok(session.search_beams(&row.prompt, &settings)?.ids)
        });
        return each.collect();
    }
    let settings =
        Settings { sampling: Sampling::default(), max_new: NEW_TOKENS, stop_ids: stop_ids.clone() };
    let prompts: Vec<Vec<u32>> = key.rows.iter().map(|row| row.prompt.clone()).collect();
    let mut begun = 0;
    let on_token = |prompt: usize, _: u32| {
        if prompt > begun {
            begun = prompt;
            on_row(prompt);
        }
    };
    let generated = session.generate_batch(&prompts, &settings, on_token)?;
    Ok(generated.into_iter().map(|generated| generated.ids).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(pattern: &str, golds: &[&str]) -> AnswerKey {
        let row = |gold: &&str| KeyRow {
            place: String::new(),
            id: None,
            prompt: vec![1],
            gold: (*gold).to_owned(),
        };
        AnswerKey {
            pattern: answer_pattern(pattern).unwrap().unwrap(),
            rows: golds.iter().map(row).collect(),
        }
    }

    #[test]
    fn the_first_match_counts_and_no_match_is_wrong() {
        let key = key("answer[1-5]", &["answer3", "answer1", "answer2", "answer4"]);
        let texts =
            [" the correct answer is answer3 or answer1\n", "answer3, answer1", "I cannot say", "Answer4"];
        let scores = key.score(texts.map(String::from).to_vec());
        assert_eq!(scores.acc.value, 0.25);
        assert_eq!(scores.unanswered, 2);
        assert_eq!(scores.rows[0].text, "the correct answer is answer3 or answer1");
        assert_eq!(scores.rows[1].answer.as_deref(), Some("answer3"));
    }
}
