//! `trainer_state.json` next to every saved adapter, in the format of Hugging Face's trainer.
//!
//! Keys are sorted, with two spaces of indent. The history is streamed from `metrics.jsonl` row by row, so it is never
//! held in memory. Every step has a row, so `logging_steps` is 1.
//! Left out: what has no meaning here (`total_flos` is 0) and `eval_steps_per_second`, because evaluations are not
//! cut into steps of one size.

use super::standing::Standing;
use crate::failure::Failure;
use serde::ser::{Error, SerializeSeq};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value, json};
use smidgen_formats::whole_file::write_whole;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

pub const FILE_NAME: &str = "trainer_state.json";

/// The state of a run when it saves.
#[derive(Clone, Debug)]
pub struct Moment<'a> {
    pub step: u64,
    /// Epochs done.
    pub epoch: f64,
    pub total_steps: u64,
    /// Of the whole run, rounded up.
    pub epochs: u64,
    pub samples: usize,
    pub batch: Option<usize>,
    pub eval_every: u64,
    pub save_every: u64,
    pub early_stop: u64,
    pub standing: Standing,
    /// No further step will follow.
    pub is_end: bool,
    pub run_folder: &'a Path,
}

/// Writes the state into a folder; `metrics` must be on disk up to the step.
pub fn write_trainer_state(folder: &Path, moment: &Moment<'_>, metrics: &Path) -> Result<(), Failure> {
    let totals = Totals::default();
    let state = State {
        best_global_step: moment.standing.best.map(|best| best.step),
        best_metric: moment.standing.best.map(|best| best.eval_loss),
        best_model_checkpoint: moment
            .standing
            .best_saved
            .map(|best| moment.run_folder.join(format!("checkpoint-{}", best.step))),
        epoch: moment.epoch,
        eval_steps: moment.eval_every,
        global_step: moment.step,
        is_hyper_param_search: false,
        is_local_process_zero: true,
        is_world_process_zero: true,
        log_history: History { metrics, moment, totals: &totals },
        logging_steps: 1,
        max_steps: moment.total_steps,
        num_input_tokens_seen: &totals.tokens,
        num_train_epochs: moment.epochs,
        save_steps: moment.save_every,
        stateful_callbacks: callbacks(moment),
        total_flos: 0,
        train_batch_size: moment.batch,
        trial_name: None,
        trial_params: None,
    };
    write_whole(&folder.join(FILE_NAME), |out| {
        serde_json::to_writer_pretty(&mut *out, &state)?;
        out.write_all(b"\n")
    })
    .map_err(Failure::disk)
}

/// Whether the state in a folder is that of a run that early stopping ended.
pub fn was_stopped_early(folder: &Path) -> bool {
    #[derive(Deserialize)]
    struct Ended {
        global_step: u64,
        max_steps: u64,
        stateful_callbacks: Map<String, Value>,
    }
    let Ok(file) = File::open(folder.join(FILE_NAME)) else { return false };
    let Ok(ended) = serde_json::from_reader::<_, Ended>(BufReader::new(file)) else { return false };
    let stopped =
        &ended.stateful_callbacks.get("TrainerControl").map(|it| &it["args"]["should_training_stop"]);
    ended.stateful_callbacks.contains_key("EarlyStoppingCallback")
        && ended.global_step < ended.max_steps
        && *stopped == Some(&Value::Bool(true))
}

/// The fields are sorted by name, as in the file.
#[derive(Serialize)]
struct State<'a> {
    best_global_step: Option<u64>,
    best_metric: Option<f64>,
    best_model_checkpoint: Option<PathBuf>,
    epoch: f64,
    eval_steps: u64,
    global_step: u64,
    is_hyper_param_search: bool,
    is_local_process_zero: bool,
    is_world_process_zero: bool,
    log_history: History<'a>,
    logging_steps: u64,
    max_steps: u64,
    /// Known once the history is written.
    num_input_tokens_seen: &'a Cell<u64>,
    num_train_epochs: u64,
    save_steps: u64,
    stateful_callbacks: Value,
    total_flos: u64,
    train_batch_size: Option<usize>,
    trial_name: Option<String>,
    trial_params: Option<String>,
}

fn callbacks(moment: &Moment<'_>) -> Value {
    let control = json!({
        "args": {
            "should_epoch_stop": false,
            "should_evaluate": false,
            "should_log": false,
            "should_save": true,
            "should_training_stop": moment.is_end,
        },
        "attributes": {},
    });
    match moment.early_stop {
        0 => json!({ "TrainerControl": control }),
        patience => json!({
            "EarlyStoppingCallback": {
                "args": { "early_stopping_patience": patience, "early_stopping_threshold": 0.0 },
                "attributes": { "early_stopping_patience_counter": moment.standing.since_best },
            },
            "TrainerControl": control,
        }),
    }
}

/// Totals over the history.
#[derive(Default)]
struct Totals {
    tokens: Cell<u64>,
    step_ms: Cell<f64>,
    loss: Cell<f64>,
    steps: Cell<u64>,
    epoch: Cell<f64>,
}

struct History<'a> {
    metrics: &'a Path,
    moment: &'a Moment<'a>,
    totals: &'a Totals,
}

impl Serialize for History<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut rows = serializer.serialize_seq(None)?;
        for row in read_rows(self.metrics, self.moment.step).map_err(S::Error::custom)? {
            let row = row.map_err(S::Error::custom)?;
            match row.contains_key("eval_loss") {
                true => rows.serialize_element(&eval_log(&row))?,
                false => {
                    self.totals.add(&row);
                    rows.serialize_element(&train_log(&row))?;
                }
            }
        }
        if self.moment.is_end {
            rows.serialize_element(&self.totals.final_log(self.moment))?;
        }
        rows.end()
    }
}

impl Totals {
    fn add(&self, row: &Map<String, Value>) {
        let number = |name: &str| row.get(name).and_then(Value::as_f64).unwrap_or(0.0);
        self.tokens.set(self.tokens.get() + number("tokens") as u64);
        self.step_ms.set(self.step_ms.get() + number("step_ms"));
        self.loss.set(self.loss.get() + number("loss"));
        self.steps.set(self.steps.get() + 1);
        self.epoch.set(number("epoch"));
    }

    fn final_log(&self, moment: &Moment<'_>) -> Value {
        let (seconds, steps) = (self.step_ms.get() / 1e3, self.steps.get() as f64);
        json!({
            "epoch": self.epoch.get(),
            "step": moment.step,
            "total_flos": 0,
            "train_loss": self.loss.get() / steps.max(1.0),
            "train_runtime": rounded(seconds, 4),
            "train_samples_per_second": rounded(self.epoch.get() * moment.samples as f64 / seconds, 3),
            "train_steps_per_second": rounded(steps / seconds, 3),
        })
    }
}

fn train_log(row: &Map<String, Value>) -> BTreeMap<&str, &Value> {
    let names = [
        ("epoch", "epoch"),
        ("grad_norm", "grad_norm"),
        ("learning_rate", "lr"),
        ("loss", "loss"),
        ("reg_loss", "reg_loss"),
        ("step", "step"),
    ];
    names.into_iter().filter_map(|(name, own)| Some((name, row.get(own)?))).collect()
}

/// Scores get the prefix `eval_`, like all other fields of an evaluation.
fn eval_log(row: &Map<String, Value>) -> BTreeMap<String, Value> {
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

/// NaN becomes `null`.
fn rounded(number: f64, decimals: i32) -> f64 {
    let scale = 10f64.powi(decimals);
    (number * scale).round() / scale
}

/// Rows up to a step, one at a time.
fn read_rows(
    metrics: &Path,
    step: u64,
) -> io::Result<impl Iterator<Item = io::Result<Map<String, Value>>> + use<>> {
    let rows = BufReader::with_capacity(16 << 10, File::open(metrics)?).lines();
    let rows = rows.map(|line| Ok(serde_json::from_str::<Map<String, Value>>(&line?)?));
    Ok(rows.take_while(move |row| {
        row.as_ref()
            .map_or(true, |row| row.get("step").and_then(Value::as_u64).is_some_and(|own| own <= step))
    }))
}

#[cfg(test)]
mod tests {
    use super::super::standing::Evaluated;
    use super::*;

    const METRICS: &str = r#"{"step":1,"epoch":0.5,"loss":2.5,"reg_loss":0.125,"grad_norm":1.5,"lr":0.001,"tokens":40,"supervised_tokens":20,"step_ms":500.0}
{"step":2,"epoch":1.0,"loss":1.5,"grad_norm":0.75,"lr":0.0005,"tokens":60,"supervised_tokens":20,"step_ms":1500.0}
{"step":2,"epoch":1.0,"eval_loss":1.25,"eval_samples":10,"eval_tokens":99,"eval_supervised_tokens":50,"eval_ms":2000.0,"acc":0.5}
{"step":3,"epoch":1.5,"loss":9.0,"grad_norm":9.0,"lr":9.0,"tokens":9,"supervised_tokens":9,"step_ms":9.0}
"#;

    fn moment(folder: &Path) -> Moment<'_> {
        let mut standing = Standing::default();
        standing.record(Evaluated { step: 2, eval_loss: 1.25 });
        standing.note_saved(2);
        Moment {
            step: 2,
            epoch: 1.0,
            total_steps: 8,
            epochs: 4,
            samples: 10,
            batch: Some(5),
            eval_every: 2,
            save_every: 2,
            early_stop: 0,
            standing,
            is_end: false,
            run_folder: folder,
        }
    }

    fn written(moment: &Moment<'_>, metrics: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, metrics).unwrap();
        write_trainer_state(folder.path(), moment, &path).unwrap();
        std::fs::read_to_string(folder.path().join(FILE_NAME)).unwrap()
    }

    #[test]
    fn the_file_has_the_shape_that_people_know() {
        let expected = expect_test::expect![[r#"
            {
              "best_global_step": 2,
              "best_metric": 1.25,
              "best_model_checkpoint": "run/checkpoint-2",
              "epoch": 1.0,
              "eval_steps": 2,
              "global_step": 2,
              "is_hyper_param_search": false,
              "is_local_process_zero": true,
              "is_world_process_zero": true,
              "log_history": [
                {
                  "epoch": 0.5,
                  "grad_norm": 1.5,
                  "learning_rate": 0.001,
                  "loss": 2.5,
                  "reg_loss": 0.125,
                  "step": 1
                },
                {
                  "epoch": 1.0,
                  "grad_norm": 0.75,
                  "learning_rate": 0.0005,
                  "loss": 1.5,
                  "step": 2
                },
                {
                  "epoch": 1.0,
                  "eval_acc": 0.5,
                  "eval_loss": 1.25,
                  "eval_runtime": 2.0,
                  "eval_samples_per_second": 5.0,
                  "step": 2
                }
              ],
              "logging_steps": 1,
              "max_steps": 8,
              "num_input_tokens_seen": 100,
              "num_train_epochs": 4,
              "save_steps": 2,
              "stateful_callbacks": {
                "TrainerControl": {
                  "args": {
                    "should_epoch_stop": false,
                    "should_evaluate": false,
                    "should_log": false,
                    "should_save": true,
                    "should_training_stop": false
                  },
                  "attributes": {}
                }
              },
              "total_flos": 0,
              "train_batch_size": 5,
              "trial_name": null,
              "trial_params": null
            }
        "#]];
        expected.assert_eq(&written(&moment(Path::new("run")), METRICS));
    }

    /// Rows after the step are those of a run that went on; the last row sums up.
    #[test]
    fn the_end_of_a_run_has_its_totals() {
        let text = written(&Moment { is_end: true, ..moment(Path::new("run")) }, METRICS);
        let state: Value = serde_json::from_str(&text).unwrap();
        let expected = json!({
            "epoch": 1.0, "step": 2, "total_flos": 0, "train_loss": 2.0, "train_runtime": 2.0,
            "train_samples_per_second": 5.0, "train_steps_per_second": 1.0,
        });
        assert_eq!(state["log_history"].as_array().unwrap().last(), Some(&expected));
    }

    #[test]
    fn a_run_that_was_stopped_early_says_so() {
        let check = |early_stop, is_end, total_steps, expected| {
            let folder = tempfile::tempdir().unwrap();
            let metrics = folder.path().join("metrics.jsonl");
            std::fs::write(&metrics, METRICS).unwrap();
            let moment = Moment { early_stop, is_end, total_steps, ..moment(folder.path()) };
            write_trainer_state(folder.path(), &moment, &metrics).unwrap();
            assert_eq!(was_stopped_early(folder.path()), expected, "{early_stop} {is_end} {total_steps}");
        };
        check(1, true, 8, true);
        check(1, true, 2, false);
        check(1, false, 8, false);
        check(0, true, 8, false);
        assert!(!was_stopped_early(Path::new("nowhere")));
    }
}
