//! Rewards of generated answers: rules that are built in, and programs of the user's.
//!
//! `rules.rs` has the kinds of `[[train.reward]]` that need no program, `command.rs` starts programs once and asks them about
//! each answer. The reward of an answer is the sum of its scores, each times its weight.
//! Left out: advantages, which compare the answers to one prompt.

mod command;
mod rules;

use self::command::Command;
pub use self::command::RewardError;
use self::rules::Rule;
use crate::failure::Failure;
use crate::rows::data::Rows;
use crate::rows::prompts::Prompt;
use serde_json::{Value as Json, json};
use smidgen_recipe::{Recipe, RewardRule};

/// An answer to score.
#[derive(Clone, Debug)]
pub struct Candidate<'a> {
    pub prompt: &'a Prompt,
    pub text: &'a str,
    /// Tokens, the one that ended the answer included.
    pub tokens: usize,
    /// Why the answer ended.
    pub stopped_by: &'a str,
}

/// Everything that scores an answer.
#[derive(Debug)]
pub struct Rewards {
    scores: Vec<Score>,
}

#[derive(Debug)]
struct Score {
    name: String,
    weight: f64,
    scorer: Scorer,
}

#[derive(Debug)]
enum Scorer {
    Rule(Rule),
    Command(Command),
}

impl Rewards {
    /// The rewards of a recipe. Nothing is started yet.
    ///
    /// # Errors
    /// A pattern that is no regular expression.
    pub fn of(recipe: &Recipe) -> Result<Rewards, Failure> {
        let mut scores: Vec<Score> = Vec::new();
        for reward in recipe.rewards() {
            let kind = reward.rule.kind().to_string();
            let number = 1 + recipe.rewards()[..scores.len()]
                .iter()
                .filter(|before| before.rule.kind() == reward.rule.kind())
                .count();
            let name = if number == 1 { kind } else { format!("{kind}_{number}") };
            let scorer = match &reward.rule {
                RewardRule::Command { command, workers, timeout_s } => {
                    Scorer::Command(Command::of(command, *workers, *timeout_s))
                }
                rule => Scorer::Rule(Rule::of(rule)?),
            };
            scores.push(Score { name, weight: reward.weight, scorer });
        }
        Ok(Rewards { scores })
    }

    /// Names of the scores, in the order of the recipe; a kind that occurs again has a number.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.scores.iter().map(|score| score.name.as_str())
    }

    /// Starts the programs, so that one that cannot run is refused before anything is generated.
    pub fn start(&mut self) -> Result<(), Failure> {
        self.scores.iter_mut().try_for_each(|score| match &mut score.scorer {
            Scorer::Rule(_) => Ok(()),
            Scorer::Command(command) => command.start(),
        })
    }

    /// The scores of each answer, and their weighted sum.
    pub fn score(&mut self, answers: &[Candidate<'_>]) -> Result<Vec<(Vec<f64>, f64)>, Failure> {
        let mut found = vec![(Vec::with_capacity(self.scores.len()), 0.0); answers.len()];
        for Score { weight, scorer, .. } in &mut self.scores {
            let scores: Vec<f64> = match scorer {
                Scorer::Rule(rule) => answers.iter().map(|answer| rule.score(answer)).collect(),
                Scorer::Command(command) => {
                    command.score(&answers.iter().map(request).collect::<Vec<_>>())?
                }
            };
            for ((own, sum), score) in found.iter_mut().zip(scores) {
                own.push(score);
                *sum += *weight * score;
            }
        }
        Ok(found)
    }
}

/// The line that a program reads about an answer.
fn request(answer: &Candidate<'_>) -> String {
    let Candidate { prompt, text, tokens, stopped_by } = answer;
    json!({
        "prompt": prompt.shown,
        "completion": text,
        "tokens": tokens,
        "stopped_by": stopped_by,
        "row": prompt.fields,
    })
    .to_string()
}

/// Refuses rewards that cannot be computed of these rows: patterns, and columns that a row does not have.
pub fn check_rewards(recipe: &Recipe, rows: Option<&Rows>) -> Result<(), Failure> {
    let rewards = Rewards::of(recipe)?;
    let Some((rows, prompts)) = rows.and_then(|rows| Some((rows, rows.prompts.as_ref()?))) else {
        return Ok(());
    };
    for (index, prompt) in prompts.rows.iter().enumerate() {
        for score in &rewards.scores {
            let Scorer::Rule(rule) = &score.scorer else { continue };
            let Err(what) = rule.check(prompt) else { continue };
            let columns: Vec<&str> = prompt.fields.keys().map(String::as_str).collect();
            let place = rows.train.place(index);
            return Err(Failure::data(format!(
                "{place} {what}, which the reward `{}` compares with",
                score.name
            ))
            .hint(match columns.as_slice() {
                [] => "the row has no other column than its prompt".to_owned(),
                columns => {
                    format!(
                        "`column` of the reward names another one; the row has `{}`",
                        columns.join("`, `")
                    )
                }
            }));
        }
    }
    Ok(())
}

/// A column as text: a string, or a number.
fn text_of(value: &Json) -> Option<String> {
    match value {
        Json::String(text) => Some(text.clone()),
        Json::Number(number) => Some(number.to_string()),
        Json::Bool(yes) => Some(yes.to_string()),
        Json::Null | Json::Array(_) | Json::Object(_) => None,
    }
}
