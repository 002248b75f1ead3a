//! The log of a run in the form of Hugging Face's trainer, thinned so that it stays small however long the run is.
//!
//! Up to a thousand steps, every step is kept; beyond that every second step, then every fourth, and so on, as
//! `logging_steps` says. Evaluations are thinned in the same way. What is kept depends only on the rows, so a resumed
//! run has the same log as one that was never stopped: `metrics.jsonl` of a very long run is thinned too, but less.
//! Totals are over all steps; a checkpoint stores them.
//! Left out: the file itself (`trainer_state.rs`).

use super::thinning::DENSE_STEPS;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

const MOST_STEPS: usize = 1000;
const MOST_EVALUATIONS: usize = 250;
// So the steps kept here are among those that have a row in `metrics.jsonl`: both strides are powers of two.
const _: () = assert!(DENSE_STEPS >= 16 * MOST_STEPS as u64);

type Row = Map<String, Value>;

/// The kept rows, and sums over all rows.
#[derive(Debug)]
pub struct LogHistory {
    steps: Thinned<StepLog>,
    evaluations: Thinned<EvalLog>,
    /// The number of evaluations so far.
    evaluated: u64,
    /// The newest step, which is always part of the log.
    newest: Option<StepLog>,
    pub totals: Totals,
}

/// Sums over the steps of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    pub tokens: u64,
    pub step_ms: f64,
    pub loss: f64,
    pub steps: u64,
    pub epoch: f64,
}

#[derive(Clone, Copy, Debug)]
struct StepLog {
    step: u64,
    epoch: f64,
    grad_norm: f64,
    lr: f64,
    loss: f64,
    reg_loss: Option<f64>,
}

#[derive(Clone, Debug)]
struct EvalLog {
    step: u64,
    fields: BTreeMap<String, Value>,
}

/// Keeps the items whose number is a multiple of a stride. The stride doubles when there are too many.
#[derive(Debug)]
struct Thinned<T> {
    stride: u64,
    most: usize,
    kept: Vec<(u64, T)>,
}

impl<T> Thinned<T> {
    fn new(most: usize) -> Thinned<T> {
        Thinned { stride: 1, most, kept: Vec::new() }
    }

    fn add(&mut self, number: u64, item: T) {
        if !number.is_multiple_of(self.stride) {
            return;
        }
        self.kept.push((number, item));
        while self.kept.len() > self.most {
            self.stride *= 2;
            let stride = self.stride;
            self.kept.retain(|(number, _)| number.is_multiple_of(stride));
        }
    }
}

impl Default for LogHistory {
    fn default() -> LogHistory {
        LogHistory {
            steps: Thinned::new(MOST_STEPS),
            evaluations: Thinned::new(MOST_EVALUATIONS),
            evaluated: 0,
            newest: None,
            totals: Totals::default(),
        }
    }
}

impl LogHistory {
    /// Reads the rows of `metrics.jsonl` up to a step. A missing file has no rows.
    pub fn read(metrics: &Path, step: u64) -> io::Result<LogHistory> {
        let mut history = LogHistory::default();
        let file = match File::open(metrics) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(history),
            Err(error) => return Err(error),
        };
        for line in BufReader::with_capacity(16 << 10, file).lines() {
            let row: Row = serde_json::from_str(&line?)?;
            if row.get("step").and_then(Value::as_u64).is_none_or(|own| own > step) {
                break;
            }
            history.add(&row);
        }
        Ok(history)
    }

    /// Adds a row of `metrics.jsonl`: a step or an evaluation.
    pub fn add(&mut self, row: &Row) {
        let number = |name: &str| row.get(name).and_then(Value::as_f64);
        let step = row.get("step").and_then(Value::as_u64).unwrap_or(0);
        if row.contains_key("eval_loss") {
            self.evaluated += 1;
            self.evaluations.add(self.evaluated, EvalLog { step, fields: eval_fields(row) });
            return;
        }
        let float = |name: &str| number(name).unwrap_or(f64::NAN);
        let log = StepLog {
            step,
            epoch: float("epoch"),
            grad_norm: float("grad_norm"),
            lr: float("lr"),
            loss: float("loss"),
            reg_loss: number("reg_loss"),
        };
        self.steps.add(step, log);
        self.newest = Some(log);
        let totals = &mut self.totals;
        totals.tokens += row.get("tokens").and_then(Value::as_u64).unwrap_or(0);
        totals.step_ms += number("step_ms").unwrap_or(0.0);
        totals.loss += number("loss").unwrap_or(0.0);
        totals.steps += 1;
        totals.epoch = number("epoch").unwrap_or(0.0);
    }

    /// Every this many steps, a step is kept.
    pub fn logging_steps(&self) -> u64 {
        self.steps.stride
    }

    /// The kept rows in order of steps; an evaluation comes after its step.
    pub fn entries(&self) -> impl Iterator<Item = BTreeMap<String, Value>> {
        let newest = self.newest.filter(|newest| !newest.step.is_multiple_of(self.steps.stride));
        let steps = self.steps.kept.iter().map(|(_, log)| *log).chain(newest);
        let mut evaluations = self.evaluations.kept.iter().map(|(_, log)| log).peekable();
        let mut steps = steps.peekable();
        std::iter::from_fn(move || {
            let step = steps.peek().map(|log| log.step);
            match evaluations.next_if(|log| step.is_none_or(|step| log.step < step)) {
                Some(log) => Some(log.fields.clone()),
                None => steps.next().map(step_fields),
            }
        })
    }
}

fn step_fields(log: StepLog) -> BTreeMap<String, Value> {
    let StepLog { step, epoch, grad_norm, lr, loss, reg_loss } = log;
    let named = [("epoch", epoch), ("grad_norm", grad_norm), ("learning_rate", lr), ("loss", loss)];
    let named = named.into_iter().chain(reg_loss.map(|loss| ("reg_loss", loss)));
    let mut fields: BTreeMap<String, Value> =
        named.map(|(name, value)| (name.to_owned(), json!(value))).collect();
    fields.insert("step".into(), json!(step));
    fields
}

/// Scores get the prefix `eval_`, like all other fields of an evaluation.
fn eval_fields(row: &Row) -> BTreeMap<String, Value> {
    let mut log = BTreeMap::new();
    let seconds = row.get("eval_ms").and_then(Value::as_f64).unwrap_or(0.0) / 1e3;
    let samples = row.get("eval_samples").and_then(Value::as_f64).unwrap_or(0.0);
    for (name, value) in row {
        let name = match name.as_str() {
            "eval_ms" | "eval_samples" | "eval_tokens" | "eval_supervised_tokens" => continue,
            "step" | "epoch" => name.clone(),
            name if name.starts_with("eval_") => name.into(),
            name => format!("eval_{name}"),
        };
        log.insert(name, value.clone());
    }
    log.insert("eval_runtime".into(), json!(rounded(seconds, 4)));
    log.insert("eval_samples_per_second".into(), json!(rounded(samples / seconds, 3)));
    log
}

pub fn rounded(number: f64, decimals: i32) -> f64 {
    let scale = 10f64.powi(decimals);
    (number * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(row: Value) -> Row {
        row.as_object().cloned().unwrap()
    }

    fn long(steps: u64, eval_every: u64) -> LogHistory {
        let mut history = LogHistory::default();
        for step in 1..=steps {
            history.add(&row(json!({"step": step, "epoch": 0.5, "loss": 2.0, "tokens": 3, "step_ms": 1.0})));
            if step.is_multiple_of(eval_every) {
                history.add(&row(json!({"step": step, "epoch": 0.5, "eval_loss": 1.0})));
            }
        }
        history
    }

    fn steps(history: &LogHistory, name: &str) -> Vec<u64> {
        let named = history.entries().filter(|entry| entry.contains_key(name));
        named.map(|entry| entry["step"].as_u64().unwrap()).collect()
    }

    #[test]
    fn short_runs_are_kept_whole() {
        let history = long(1000, 4);
        assert_eq!(history.logging_steps(), 1);
        assert_eq!(steps(&history, "loss"), (1..=1000).collect::<Vec<u64>>());
        assert_eq!(steps(&history, "eval_loss").len(), 250);
        let all: Vec<u64> = history.entries().map(|entry| entry["step"].as_u64().unwrap()).collect();
        assert!(all.is_sorted());
        // An evaluation comes after its step.
        let fourth: Vec<_> = history.entries().skip(3).take(2).collect();
        assert!(fourth[0].contains_key("loss") && fourth[1].contains_key("eval_loss"));
    }

    #[test]
    fn long_runs_are_thinned_and_their_totals_are_not() {
        for (count, stride) in [(1001, 2), (2002, 4), (282_003, 512)] {
            let history = long(count, 7);
            assert_eq!(history.logging_steps(), stride, "{count}");
            let kept = steps(&history, "loss");
            assert!(kept.len() <= 1001, "{count}: {}", kept.len());
            assert_eq!((kept[0], *kept.last().unwrap()), (stride, count));
            assert!(kept[..kept.len() - 1].iter().all(|step| step.is_multiple_of(stride)));
            assert!(steps(&history, "eval_loss").len() <= 250, "{count}");
            let totals = history.totals;
            assert_eq!((totals.steps, totals.tokens, totals.loss), (count, 3 * count, 2.0 * count as f64));
        }
    }

    /// A resumed run reads what an uninterrupted one has in memory.
    #[test]
    fn rows_read_from_the_file_give_the_same_log() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        assert_eq!(LogHistory::read(&path, 9).unwrap().entries().count(), 0);
        let line = |step: u64| {
            format!("{{\"step\":{step},\"epoch\":0.5,\"loss\":2.0,\"tokens\":3,\"step_ms\":1.0}}\n")
        };
        std::fs::write(&path, (1..=1500).map(line).collect::<String>()).unwrap();
        let (read, held) = (LogHistory::read(&path, 1203).unwrap(), long(1203, 9999));
        assert!(read.entries().eq(held.entries()));
        assert_eq!(read.totals, held.totals);
    }
}
