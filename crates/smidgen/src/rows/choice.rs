//! Multiple choice by likelihood: each choice is appended to the question, and the most likely one is the answer.
//!
//! The choices are those of the row (`choices`), or else all answers that occur in the file, each put in place of the
//! expected answer in the row's output. Tokens are split as in lm-evaluation-harness: spaces at the end of the context
//! belong to the continuation, and the continuation's tokens are those of the whole text after as many tokens as the
//! context has alone. Sequences that are too long lose their beginning.
//! The sequences are an ordinary token set, so their memory is planned like that of any evaluation.

use super::answer::{answer_in, answer_pattern, distinct};
use super::question::{Question, Questions};
use super::score::{Mean, Picked, mean_of, pick};
use crate::failure::Failure;
use serde_json::{Map, Value as Json};
use smidgen_data::source::RowPlace;
use smidgen_data::token_builder::TokenSetBuilder;
use smidgen_data::tokens::{TokenLimits, TokenSet};
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_ir::words::Overflow;
use std::path::PathBuf;

/// A row with its choices, which are consecutive samples of the set.
#[derive(Clone, Debug, PartialEq)]
pub struct ChoiceRow {
    pub place: String,
    /// The `id` of the row, if it has one.
    pub id: Option<Json>,
    /// The choices, without the delimiter between prompt and choice.
    pub texts: Vec<String>,
    pub first_sample: usize,
    pub gold: usize,
}

#[derive(Debug)]
pub struct ChoiceSet {
    pub set: TokenSet,
    pub rows: Vec<ChoiceRow>,
    /// Whether the choices are answers found in outputs, not `choices` of the rows.
    pub found: bool,
    pub warnings: Vec<String>,
}

/// The scores of a model on a choice set.
#[derive(Clone, Debug, PartialEq)]
pub struct ChoiceScores {
    pub acc: Mean,
    pub acc_norm: Mean,
    pub acc_bytes: Mean,
    /// The choices of the model, one entry per row.
    pub picked: Vec<Picked>,
    /// Summed negative log-likelihood of the right choices, and their tokens.
    pub gold_nll: f64,
    pub gold_tokens: u64,
}

impl ChoiceSet {
    pub fn build(
        questions: &Questions,
        files: &[PathBuf],
        answer: &str,
        tokenizer: &Tokenizer,
        limits: TokenLimits,
    ) -> Result<ChoiceSet, Failure> {
        let found = !questions.rows[0].fields.contains_key("choices");
        let choices = if found {
            found_choices(&questions.rows, answer)?
        } else {
            questions.rows.iter().map(own_choices).collect::<Result<Vec<_>, _>>()?
        };
        let mut builder = TokenSetBuilder::new(TokenLimits { overflow: Overflow::Error, ..limits });
        let (mut rows, mut samples, mut cut) = (Vec::new(), 0, 0);
        for (question, Choices { texts, gold }) in questions.rows.iter().zip(choices) {
            for text in &texts {
                let continuation = format!("{}{text}", question.delimiter);
                let encoded = encode_pair(tokenizer, question, &continuation)?;
                let (ids, scored) = cut_left(encoded, limits.max_tokens as usize).map_err(|tokens| {
                    Failure::data(format!(
                        "{}: the choice `{}` has {tokens} tokens, `data.max_tokens = {}` leaves no room for the question",
                        question.place, shortened(text), limits.max_tokens
                    ))
                })?;
                cut += usize::from(ids.len() < scored.whole);
                let Question { file, unit, number, .. } = *question;
                let place = RowPlace { file: &files[file], unit, number };
                let span = ids.len() - scored.tokens..ids.len();
                builder.push_spans(place, &ids, &[span]).map_err(Failure::data)?;
            }
            let (place, id) = (question.place.clone(), question.fields.get("id").cloned());
            let count = texts.len();
            rows.push(ChoiceRow { place, id, texts, first_sample: samples, gold });
            samples += count;
        }
        let set = builder.finish().map_err(Failure::data)?;
        assert_eq!(set.len(), samples, "every choice is a sample");
        let mut warnings = Vec::new();
        if cut > 0 {
            warnings.push(format!(
                "{cut} of {samples} questions with a choice are longer than `data.max_tokens = {}` and lose their beginning",
                limits.max_tokens
            ));
        }
        Ok(ChoiceSet { set, rows, found, warnings })
    }

    pub fn heap_bytes(&self) -> usize {
        let texts =
            |row: &ChoiceRow| row.texts.iter().map(|text| text.len() + size_of::<String>()).sum::<usize>();
        let rows = self.rows.iter().map(|row| size_of::<ChoiceRow>() + row.place.len() + texts(row));
        self.set.heap_bytes() + rows.sum::<usize>()
    }

    /// `log_likelihoods` has one entry per sample.
    pub fn score(&self, log_likelihoods: &[f64]) -> ChoiceScores {
        assert_eq!(log_likelihoods.len(), self.set.len());
        let picked: Vec<Picked> = self
            .rows
            .iter()
            .map(|row| pick(&row.texts, &log_likelihoods[row.first_sample..][..row.texts.len()]))
            .collect();
        let right = |by: fn(&Picked) -> usize| {
            let right: Vec<bool> =
                picked.iter().zip(&self.rows).map(|(picked, row)| by(picked) == row.gold).collect();
            mean_of(&right)
        };
        let gold = || self.rows.iter().map(|row| row.first_sample + row.gold);
        ChoiceScores {
            acc: right(|picked| picked.by_likelihood),
            acc_norm: right(|picked| picked.by_characters),
            acc_bytes: right(|picked| picked.by_bytes),
            gold_nll: -gold().map(|sample| log_likelihoods[sample]).sum::<f64>(),
            gold_tokens: gold().map(|sample| u64::from(self.set.supervised(sample))).sum(),
            picked,
        }
    }
}

struct Choices {
    texts: Vec<String>,
    gold: usize,
}

/// The `choices` of a row.
fn own_choices(question: &Question) -> Result<Choices, Failure> {
    let wrong = |what: String| Failure::data(format!("{}: {what}", question.place));
    let Some(value) = question.fields.get("choices") else {
        return Err(wrong("`choices` is missing, the first row has it".into()));
    };
    // A table cell holds a list as JSON text.
    let parsed = value.as_str().and_then(|text| serde_json::from_str::<Json>(text).ok());
    let (texts, labels) = match parsed.as_ref().unwrap_or(value) {
        Json::Array(texts) => (strings(texts), None),
        Json::Object(columns) => {
            let column =
                |name: &str| columns.get(name).and_then(Json::as_array).and_then(|list| strings(list));
            (column("text"), column("label"))
        }
        _ => (None, None),
    };
    let Some(texts) = texts else {
        return Err(wrong("`choices` is neither a list of texts nor lists of `text` and `label`".into()));
    };
    let labels = labels.unwrap_or_else(|| (0..texts.len()).map(letter).collect());
    if texts.len() < 2 {
        return Err(wrong(format!("`choices` has {} entries, at least two are needed", texts.len())));
    }
    if labels.len() != texts.len() {
        return Err(wrong(format!(
            "`choices` has {} entries of `text` and {} of `label`",
            texts.len(),
            labels.len()
        )));
    }
    if let Some(empty) = texts.iter().position(|text| text.trim().is_empty()) {
        return Err(wrong(format!("`choices[{empty}]` is empty")));
    }
    let gold = gold_of(&question.fields, &texts, &labels).map_err(wrong)?;
    Ok(Choices { texts, gold })
}

fn strings(list: &[Json]) -> Option<Vec<String>> {
    list.iter().map(|text| text.as_str().map(str::to_owned)).collect()
}

/// The default label of a choice: A, B, C and so on.
fn letter(place: usize) -> String {
    char::from_u32('A' as u32 + place as u32).map(String::from).unwrap_or_default()
}

const GOLD_NAMES: [&str; 4] = ["answerKey", "answer", "label", "gold"];

/// The index of the right choice, which the row gives as an index from 0, a label or a text.
fn gold_of(fields: &Map<String, Json>, texts: &[String], labels: &[String]) -> Result<usize, String> {
    let Some((name, value)) = GOLD_NAMES.iter().find_map(|name| Some((*name, fields.get(*name)?))) else {
        return Err("the row has `choices`, but none of `answerKey`, `answer`, `label` and `gold`".into());
    };
    let place = match value {
        Json::Number(number) => number.as_u64().map(|place| place as usize),
        Json::String(word) => {
            let among = |list: &[String]| list.iter().position(|one| one == word);
            among(labels).or_else(|| among(texts)).or_else(|| word.parse().ok())
        }
        _ => None,
    };
    place.filter(|place| *place < texts.len()).ok_or_else(|| {
        let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let known: Vec<&str> = labels.iter().map(String::as_str).collect();
        format!(
            "`{name}` is `{}`: not one of the choices {} (0 to {}), and not the text of one",
            shortened(&shown),
            known.join(", "),
            texts.len() - 1
        )
    })
}

/// The choices of each row: its output with every answer of the file in place of its own.
fn found_choices(questions: &[Question], answer: &str) -> Result<Vec<Choices>, Failure> {
    let pattern = answer_pattern(answer)?;
    let mut places = Vec::with_capacity(questions.len());
    for question in questions {
        let expected = expected_of(question)?;
        let range = answer_in(pattern.as_ref(), expected).ok_or_else(|| {
            Failure::data(format!(
                "{}: `eval.answer` (`{answer}`) finds nothing in the expected output `{}`",
                question.place,
                shortened(expected)
            ))
        })?;
        places.push((expected, range));
    }
    let answers = distinct(places.iter().map(|(expected, range)| expected[range.clone()].to_owned()))?;
    let choices = questions.iter().zip(&places).map(|(question, (expected, range))| {
        // With a pattern, the field `answer` names the right answer. Without one, the choices are whole outputs.
        let named = question.fields.get("answer").and_then(Json::as_str).filter(|_| pattern.is_some());
        let right = named.unwrap_or(&expected[range.clone()]);
        let gold = answers.iter().position(|answer| answer == right).ok_or_else(|| {
            Failure::data(format!(
                "{}: `answer` is `{}`: not one of the answers {}",
                question.place,
                shortened(right),
                answers.join(", ")
            ))
        })?;
        let (before, behind) = (&expected[..range.start], &expected[range.end..]);
        Ok(Choices {
            texts: answers.iter().map(|answer| format!("{before}{answer}{behind}")).collect(),
            gold,
        })
    });
    choices.collect()
}

/// The expected output of a row.
pub fn expected_of(question: &Question) -> Result<&str, Failure> {
    question.expected.as_deref().ok_or_else(|| {
        Failure::data(format!("{}: the row has neither an expected answer nor `choices`", question.place))
    })
}

/// The beginning of a text, for a message.
pub fn shortened(text: &str) -> String {
    const MOST: usize = 60;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

struct Scored {
    /// Tokens of question and choice.
    whole: usize,
    /// Tokens of the choice.
    tokens: usize,
}

fn encode_pair(
    tokenizer: &Tokenizer,
    question: &Question,
    continuation: &str,
) -> Result<(Vec<i64>, Scored), Failure> {
    let context = question.prompt.trim_end();
    let encode = |text: &str, special: bool| tokenizer.encode(text, special).map_err(Failure::model);
    let (whole, context) = if context.is_empty() {
        // The first token needs a token before it: BOS, or the separator of texts.
        let ids = tokenizer.special_ids();
        let first = ids.bos.or(ids.eos).ok_or_else(|| {
            Failure::data(format!("{}: the question is empty, and the tokenizer has no BOS", question.place))
        })?;
        let mut whole = vec![first];
        whole.extend(encode(continuation, false)?);
        (whole, 1)
    } else {
        let moved = &question.prompt[context.len()..];
        let whole = encode(&format!("{context}{moved}{continuation}"), question.add_special)?;
        // The harness counts the tokens of the context alone, even if the last one differs in the whole text.
        let context = encode(context, question.add_special)?;
        let behind = whole.get(context.len()..).unwrap_or_default();
        ([context.as_slice(), behind].concat(), context.len())
    };
    if whole.len() <= context {
        return Err(Failure::data(format!(
            "{}: the choice `{}` adds no token to the question",
            question.place,
            shortened(continuation)
        )));
    }
    let scored = Scored { whole: whole.len(), tokens: whole.len() - context };
    Ok((whole.into_iter().map(i64::from).collect(), scored))
}

/// The last `most` tokens; `Err` has the number of scored tokens if they leave no room for another one.
fn cut_left((mut ids, scored): (Vec<i64>, Scored), most: usize) -> Result<(Vec<i64>, Scored), usize> {
    if scored.tokens >= most {
        return Err(scored.tokens);
    }
    ids.drain(..ids.len().saturating_sub(most));
    Ok((ids, scored))
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
