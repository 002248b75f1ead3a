//! The results of an evaluation as JSON: metrics of each model, and a record of each row.
//!
//! The records allow comparisons row by row. They have the row's place in the data, the summed log-likelihoods, and
//! the predicted and the right choice.

use super::answers::{AnswerKey, GenerationScores};
use super::transcription::WordScores;
use crate::rows::choice::{ChoiceScores, ChoiceSet};
use crate::rows::score::{Flips, Mean, count_flips};
use serde_json::{Map, Value as Json, json};
use smidgen_data::tokens::TokenSet;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    pub name: &'static str,
    pub value: f64,
    pub stderr: Option<f64>,
}

/// The results of one model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    pub metrics: Vec<Metric>,
    /// Whether each row was answered correctly; empty if the task has no right answers.
    pub right: Vec<bool>,
    /// One record per row.
    pub records: Vec<Json>,
}

/// The results of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    /// The task, the model and the data.
    pub about: Map<String, Json>,
    /// One question per row.
    pub questions: Vec<Json>,
    pub base: Measured,
    pub adapter: Option<Measured>,
}

impl Measured {
    /// Adds loss and perplexity.
    pub fn add_loss(&mut self, nll: f64, tokens: u64) {
        let loss = nll / tokens as f64;
        self.metrics.push(Metric { name: "loss", value: loss, stderr: None });
        self.metrics.push(Metric { name: "perplexity", value: loss.exp(), stderr: None });
    }

    /// Adds the records of a task that has only a loss.
    pub fn add_loss_records(&mut self, log_likelihoods: &[f64]) {
        self.records = log_likelihoods.iter().map(|sum| json!({"log_likelihood": sum})).collect();
    }

    pub fn add_choices(&mut self, set: &ChoiceSet, scores: &ChoiceScores, log_likelihoods: &[f64]) {
        self.add_mean("acc", scores.acc);
        self.add_mean("acc_norm", scores.acc_norm);
        self.add_mean("acc_bytes", scores.acc_bytes);
        for (row, picked) in set.rows.iter().zip(&scores.picked) {
            self.right.push(picked.by_likelihood == row.gold);
            self.records.push(json!({
                "log_likelihoods": log_likelihoods[row.first_sample..][..row.texts.len()],
                "prediction": picked.by_likelihood,
                "prediction_norm": picked.by_characters,
                "prediction_bytes": picked.by_bytes,
            }));
        }
    }

    pub fn add_generation(&mut self, scores: &GenerationScores) {
        self.add_mean("acc", scores.acc);
        let share = scores.unanswered as f64 / scores.rows.len() as f64;
        self.metrics.push(Metric { name: "unanswered", value: share, stderr: None });
        for row in &scores.rows {
            self.right.push(row.right);
            self.records.push(json!({"text": row.text, "prediction": row.answer, "right": row.right}));
        }
    }

    pub fn add_transcripts(&mut self, scores: &WordScores) {
        self.metrics.push(Metric { name: "wer", value: scores.rate(), stderr: None });
        for (text, errors) in &scores.rows {
            self.right.push(*errors == 0);
            self.records.push(json!({"text": text, "word_errors": errors}));
        }
    }

    fn add_mean(&mut self, name: &'static str, mean: Mean) {
        self.metrics.push(Metric { name, value: mean.value, stderr: mean.stderr });
    }

    fn json(&self) -> Map<String, Json> {
        let mut all = Map::new();
        for metric in &self.metrics {
            all.insert(metric.name.into(), json!(metric.value));
            if let Some(stderr) = metric.stderr {
                all.insert(format!("{}_stderr", metric.name), json!(stderr));
            }
        }
        all
    }
}

/// The rows of a loss evaluation.
pub fn questions_of_loss(set: &TokenSet, rows: usize) -> Vec<Json> {
    let row =
        |sample: usize| json!({"place": set.place(sample).to_string(), "tokens": set.supervised(sample)});
    (0..rows).map(row).collect()
}

pub fn questions_of_choices(set: &ChoiceSet) -> Vec<Json> {
    let row = |row: &crate::rows::choice::ChoiceRow| {
        let samples = row.first_sample..row.first_sample + row.texts.len();
        let tokens: Vec<u32> = samples.map(|sample| set.set.supervised(sample)).collect();
        json!({"place": row.place, "id": row.id, "choices": row.texts, "tokens": tokens, "gold": row.gold})
    };
    set.rows.iter().map(row).collect()
}

pub fn questions_of_key(key: &AnswerKey) -> Vec<Json> {
    let row = |row: &super::answers::KeyRow| json!({"place": row.place, "id": row.id, "prompt_tokens": row.prompt.len(), "gold": row.gold});
    key.rows.iter().map(row).collect()
}

impl Results {
    /// Rows that only the adapter or only the base answered correctly; `None` without right answers.
    pub fn flips(&self) -> Option<Flips> {
        let adapter = self.adapter.as_ref()?;
        (!adapter.right.is_empty()).then(|| count_flips(&self.base.right, &adapter.right))
    }

    /// The content of the results file.
    pub fn render_json(&self) -> Json {
        let mut all = self.about.clone();
        all.insert("rows".into(), json!(self.questions.len()));
        all.insert("base".into(), Json::Object(self.base.json()));
        if let Some(adapter) = &self.adapter {
            all.insert("adapter".into(), Json::Object(adapter.json()));
        }
        if let Some(flips) = self.flips() {
            all.insert("to_right".into(), json!(flips.to_right));
            all.insert("to_wrong".into(), json!(flips.to_wrong));
        }
        let samples = self.questions.iter().enumerate().map(|(row, question)| {
            let mut sample = question.clone();
            sample["base"] = self.base.records[row].clone();
            if let Some(adapter) = &self.adapter {
                sample["adapter"] = adapter.records[row].clone();
            }
            sample
        });
        all.insert("samples".into(), samples.collect());
        Json::Object(all)
    }
}
