//! `trainer_state.json` next to every saved adapter, in the format of Hugging Face's trainer.
//!
//! Keys are sorted, with two spaces of indent. The history is thinned (`log_history.rs`), so the file stays small
//! however long a run is.
//! Left out: fields without a meaning here (`total_flos` is 0), and `eval_steps_per_second`, because evaluation
//! batches differ in size.

use super::evaluations::Evaluations;
use super::log_history::{LogHistory, Totals, rounded};
use crate::failure::Failure;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value, json};
use smidgen_formats::whole_file::write_whole;
use smidgen_recipe::{Batch, Train};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

pub const FILE_NAME: &str = "trainer_state.json";

/// The state of a run when it saves.
#[derive(Clone, Debug)]
pub struct Moment<'a> {
    pub step: u64,
    /// Epochs finished.
    pub epoch: f64,
    pub total_steps: u64,
    /// Epochs of the whole run, rounded up.
    pub epochs: u64,
    pub samples: usize,
    pub settings: &'a Train,
    pub evaluations: Evaluations,
    /// Whether no step follows.
    pub is_end: bool,
    pub run_folder: &'a Path,
}

/// Writes the state into a folder; `history` covers all steps so far.
pub fn write_trainer_state(folder: &Path, moment: &Moment<'_>, history: &LogHistory) -> Result<(), Failure> {
    let state = State {
        best_global_step: moment.evaluations.best.map(|best| best.step),
        best_metric: moment.evaluations.best.map(|best| best.eval_loss),
        best_model_checkpoint: moment
            .evaluations
            .best_saved
            .map(|best| moment.run_folder.join(format!("checkpoint-{}", best.step))),
        epoch: moment.epoch,
        eval_steps: moment.settings.eval_every,
        global_step: moment.step,
        is_hyper_param_search: false,
        is_local_process_zero: true,
        is_world_process_zero: true,
        log_history: Logs { history, moment },
        logging_steps: history.logging_steps(),
        max_steps: moment.total_steps,
        num_input_tokens_seen: history.totals.tokens,
        num_train_epochs: moment.epochs,
        save_steps: moment.settings.save_every,
        stateful_callbacks: callbacks(moment),
        total_flos: 0,
        train_batch_size: match moment.settings.batch {
            Batch::Samples(samples) => Some(samples),
            Batch::Tokens(_) => None,
        },
        trial_name: None,
        trial_params: None,
    };
    write_whole(&folder.join(FILE_NAME), |out| {
        serde_json::to_writer_pretty(&mut *out, &state)?;
        out.write_all(b"\n")
    })
    .map_err(Failure::disk)
}

/// Whether the state in a folder is of a run that early stopping ended.
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
    log_history: Logs<'a>,
    logging_steps: u64,
    max_steps: u64,
    num_input_tokens_seen: u64,
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
    match moment.settings.early_stop {
        0 => json!({ "TrainerControl": control }),
        patience => json!({
            "EarlyStoppingCallback": {
                "args": { "early_stopping_patience": patience, "early_stopping_threshold": 0.0 },
                "attributes": { "early_stopping_patience_counter": moment.evaluations.since_best },
            },
            "TrainerControl": control,
        }),
    }
}

/// The history, and at the end of a run a row with totals.
struct Logs<'a> {
    history: &'a LogHistory,
    moment: &'a Moment<'a>,
}

impl Serialize for Logs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let last = self.moment.is_end.then(|| final_log(&self.history.totals, self.moment));
        let entries = self.history.entries().map(|entry| json!(entry));
        serializer.collect_seq(entries.chain(last))
    }
}

fn final_log(totals: &Totals, moment: &Moment<'_>) -> Value {
    let (seconds, steps) = (totals.step_ms / 1e3, totals.steps as f64);
    json!({
        "epoch": totals.epoch,
        "step": moment.step,
        "total_flos": 0,
        "train_loss": totals.loss / steps.max(1.0),
        "train_runtime": rounded(seconds, 4),
        "train_samples_per_second": rounded(totals.epoch * moment.samples as f64 / seconds, 3),
        "train_steps_per_second": rounded(steps / seconds, 3),
    })
}

#[cfg(test)]
mod tests {
    use super::super::evaluations::Evaluated;
    use super::*;

    const METRICS: &str = r#"{"step":1,"epoch":0.5,"loss":2.5,"reg_loss":0.125,"grad_norm":1.5,"lr":0.001,"tokens":40,"supervised_tokens":20,"step_ms":500.0}
{"step":2,"epoch":1.0,"loss":1.5,"grad_norm":0.75,"lr":0.0005,"tokens":60,"supervised_tokens":20,"step_ms":1500.0}
{"step":2,"epoch":1.0,"eval_loss":1.25,"eval_samples":10,"eval_tokens":99,"eval_supervised_tokens":50,"eval_ms":2000.0,"acc":0.5}
{"step":3,"epoch":1.5,"loss":9.0,"grad_norm":9.0,"lr":9.0,"tokens":9,"supervised_tokens":9,"step_ms":9.0}
"#;

    fn settings(early_stop: u64) -> Train {
        let defaults = smidgen_recipe::Recipe::new("base".parse().unwrap()).train;
        Train { batch: Batch::Samples(5), eval_every: 2, save_every: 2, early_stop, ..defaults }
    }

    fn moment<'a>(folder: &'a Path, settings: &'a Train) -> Moment<'a> {
        let mut evaluations = Evaluations::default();
        evaluations.record(Evaluated { step: 2, eval_loss: 1.25 });
        evaluations.note_saved(2);
        Moment {
            step: 2,
            epoch: 1.0,
            total_steps: 8,
            epochs: 4,
            samples: 10,
            settings,
            evaluations,
            is_end: false,
            run_folder: folder,
        }
    }

    fn written(moment: &Moment<'_>, metrics: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, metrics).unwrap();
        write_trainer_state(folder.path(), moment, &LogHistory::read(&path, moment.step).unwrap()).unwrap();
        std::fs::read_to_string(folder.path().join(FILE_NAME)).unwrap()
    }

    #[test]
    fn the_file_has_the_format_of_hugging_faces_trainer() {
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
        expected.assert_eq(&written(&moment(Path::new("run"), &settings(0)), METRICS));
    }

    /// Rows after the step are ignored; the last row has the totals.
    #[test]
    fn the_end_of_a_run_has_its_totals() {
        let settings = settings(0);
        let text = written(&Moment { is_end: true, ..moment(Path::new("run"), &settings) }, METRICS);
        let state: Value = serde_json::from_str(&text).unwrap();
        let expected = json!({
            "epoch": 1.0, "step": 2, "total_flos": 0, "train_loss": 2.0, "train_runtime": 2.0,
            "train_samples_per_second": 5.0, "train_steps_per_second": 1.0,
        });
        assert_eq!(state["log_history"].as_array().unwrap().last(), Some(&expected));
    }

    #[test]
    fn early_stopping_is_recognized() {
        let check = |early_stop, is_end, total_steps, expected| {
            let folder = tempfile::tempdir().unwrap();
            let settings = settings(early_stop);
            let moment = Moment { is_end, total_steps, ..moment(folder.path(), &settings) };
            write_trainer_state(folder.path(), &moment, &LogHistory::default()).unwrap();
            assert_eq!(was_stopped_early(folder.path()), expected, "{early_stop} {is_end} {total_steps}");
        };
        check(1, true, 8, true);
        check(1, true, 2, false);
        check(1, false, 8, false);
        check(0, true, 8, false);
        assert!(!was_stopped_early(Path::new("nowhere")));
    }
}
