//! A run folder, read for a report: the plan, the rows of `metrics.jsonl`, the parts of the run, its phases and job.
//!
//! `plan.json` and `metrics.jsonl` are required; a report omits the others if they are missing. A last line without a
//! newline is skipped: it is still being written, or a killed run left it. Any other line that is not a row is an error
//! with its line number. Nothing is written or locked, so a running run can be read.

use super::plan_facts::PlanFacts;
use crate::failure::Failure;
use crate::logs::metrics::{ROLLOUTS_FILE, is_being_written};
use crate::logs::thinning::{DENSE_STEPS, stride};
use crate::run_folder::history::{History, PartEnd};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use smidgen_formats::json_file::read_json_file;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

const PLAN: &str = "plan.json";
const METRICS: &str = "metrics.jsonl";
const PHASES: &str = "phases.json";
const JOB: &str = "job.toml";
/// Usual files have about ten KiB.
const MAX_JSON_BYTES: u64 = 16_000_000;

/// A run, or a plan without a run (then without rows and folder).
#[derive(Clone, Debug, Default)]
pub struct RunRecord {
    pub folder: Option<PathBuf>,
    pub plan: PlanFacts,
    pub rows: Vec<StepRow>,
    pub evaluations: Vec<EvaluationRow>,
    pub history: Option<History>,
    pub phases: BTreeMap<String, PhaseFacts>,
    /// The job, as TOML.
    pub job: Option<String>,
    pub is_running: bool,
    /// Whether the last line of the metrics is incomplete.
    pub has_torn_line: bool,
    /// The peak memory of each rank, as measured; empty for a run without ranks.
    pub rank_bytes: Vec<u64>,
    /// Some answers of the last step that generated any.
    pub answers: Vec<Value>,
}

/// One optimizer step; a number that was not finite is `null` in the file, and NaN here.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct StepRow {
    pub step: u64,
    /// The steps since the row before: only some of a very long run's steps have a row, and this one stands for them.
    #[serde(skip)]
    pub steps: u64,
    #[serde(default = "nan", deserialize_with = "number")]
    pub loss: f64,
    #[serde(default = "nan", deserialize_with = "number")]
    pub grad_norm: f64,
    #[serde(default = "nan", deserialize_with = "number")]
    pub lr: f64,
    #[serde(default)]
    pub tokens: u64,
    #[serde(default = "nan", deserialize_with = "number")]
    pub step_ms: f64,
    #[serde(default = "nan", deserialize_with = "number")]
    pub tokens_per_s: f64,
    #[serde(default)]
    pub overflows: u64,
    pub device_bytes: Option<u64>,
    pub device_free_bytes: Option<u64>,
    pub device_peak_bytes: Option<u64>,
    #[serde(default)]
    pub pinned_bytes: u64,
    pub host_rss_bytes: Option<u64>,
    /// GPU utilization in percent.
    pub gpu_util: Option<u32>,
    /// Time spent measuring memory.
    #[serde(default)]
    pub monitor_ms: f64,
}

fn nan() -> f64 {
    f64::NAN
}

fn number<'de, D: Deserializer<'de>>(value: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or(f64::NAN))
}

#[derive(Clone, Debug)]
pub struct EvaluationRow {
    pub step: u64,
    pub eval_loss: f64,
    pub eval_ms: f64,
}

/// Bytes per memory space; `null` if it could not be measured.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct PhaseFacts {
    pub planned: Option<BTreeMap<String, u64>>,
    pub measured: BTreeMap<String, Option<u64>>,
}

/// The state of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// A plan without a run.
    Planned,
    Running,
    Ended(PartEnd),
    /// The process ended without recording why.
    Killed,
    /// Written by an earlier version, which did not record parts.
    Unknown,
}

impl RunRecord {
    pub fn of_plan(plan: PlanFacts, job: String) -> RunRecord {
        RunRecord { plan, job: Some(job), ..RunRecord::default() }
    }

    pub fn steps_done(&self) -> u64 {
        self.rows.last().map_or(0, |row| row.step)
    }

    /// Total steps of the run, or the completed steps if the total is unknown.
    pub fn total_steps(&self) -> u64 {
        self.history.as_ref().map_or(0, |history| history.total_steps).max(self.steps_done())
    }

    pub fn state(&self) -> State {
        match (&self.folder, self.is_running) {
            (None, _) => State::Planned,
            (Some(_), true) => State::Running,
            (Some(_), false) => match self.history.as_ref().map(|history| history.parts.last()) {
                Some(Some(part)) => part.ended.map_or(State::Killed, State::Ended),
                Some(None) | None => State::Unknown,
            },
        }
    }

    /// The rows of each part; a part is one process with one plan.
    pub fn parts(&self) -> Vec<&[StepRow]> {
        // A resumed run starts at a checkpoint: the rows that an earlier part wrote after it are gone.
        let begins = self.history.iter().flat_map(|history| &history.parts).map(|part| part.first_step);
        let begins: BTreeSet<u64> = begins.collect();
        self.rows.chunk_by(|one, _| !begins.contains(&one.step)).collect()
    }
}

pub fn read_run(folder: &Path) -> Result<RunRecord, Failure> {
    let has = |name: &str| folder.join(name).is_file();
    if !folder.is_dir() {
        let what = if folder.exists() { "is not a folder" } else { "does not exist" };
        return Err(Failure::command(format!("`{}` {what}", folder.display()))
            .hint("give the folder of a run: the `output.dir` of its recipe"));
    }
    if ![PLAN, METRICS, JOB].iter().any(|name| has(name)) {
        return Err(Failure::command(format!(
            "`{}` is not the folder of a run: it has none of `{PLAN}`, `{METRICS}` and `{JOB}`",
            folder.display()
        )));
    }
    if !has(PLAN) {
        return Err(Failure::disk(format!("`{}` has no `{PLAN}`", folder.display())));
    }
    let plan: PlanFacts = read_json_file(&folder.join(PLAN), MAX_JSON_BYTES).map_err(Failure::disk)?;
    let metrics = folder.join(METRICS);
    if !has(METRICS) {
        return Err(Failure::disk(format!(
            "`{}` has no `{METRICS}`: the run never reached its first step",
            folder.display()
        ))
        .hint("`smidgen plan RECIPE --html FILE` shows its plan"));
    }
    // Read before the rows: a run that ends in between is shown as running.
    let is_running = is_being_written(&metrics);
    let measured = read_metrics(&metrics)?;
    let history = History::read(folder).map_err(Failure::disk)?;
    let phases = if has(PHASES) {
        read_json_file(&folder.join(PHASES), MAX_JSON_BYTES).map_err(Failure::disk)?
    } else {
        BTreeMap::new()
    };
    let job = std::fs::read_to_string(folder.join(JOB)).ok();
    let answers = read_answers(&folder.join(ROLLOUTS_FILE)).unwrap_or_default();
    // An absolute path, because a page may be opened on another machine.
    let folder = Some(std::path::absolute(folder).unwrap_or(folder.to_path_buf()));
    Ok(RunRecord { folder, plan, history, phases, job, is_running, answers, ..measured })
}

/// The first answers of the last step in the end of a file, which may be large and still be written.
fn read_answers(path: &Path) -> std::io::Result<Vec<Value>> {
    const MOST_ANSWERS: usize = 8;
    const END_BYTES: u64 = 4 << 20;
    let mut file = File::open(path)?;
    let first = file.metadata()?.len().saturating_sub(END_BYTES);
    file.seek(SeekFrom::Start(first))?;
    let mut text = Vec::new();
    file.take(END_BYTES).read_to_end(&mut text)?;
    // The first line may begin in the middle, and the last one may be incomplete.
    let lines =
        text.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    let mut answers: Vec<Value> = lines.filter(|line| line["completion"].is_string()).collect();
    let last = answers.last().map(|answer| answer["step"].clone());
    answers.retain(|answer| Some(&answer["step"]) == last.as_ref());
    answers.truncate(MOST_ANSWERS);
    Ok(answers)
}

/// A line of the metrics: a step if it has `step_ms`, an evaluation if it has `eval_ms`.
#[derive(Deserialize)]
struct AnyRow {
    #[serde(flatten)]
    row: StepRow,
    #[serde(default)]
    rank_bytes: Vec<u64>,
    eval_loss: Option<f64>,
    eval_ms: Option<f64>,
}

/// A record with only the contents of `metrics.jsonl`.
fn read_metrics(path: &Path) -> Result<RunRecord, Failure> {
    let unreadable = |error| Failure::file("read", path, error);
    let mut reader = BufReader::new(File::open(path).map_err(unreadable)?);
    let mut metrics = RunRecord::default();
    let (mut line, mut number) = (Vec::new(), 0);
    loop {
        line.clear();
        if reader.read_until(b'\n', &mut line).map_err(unreadable)? == 0 {
            return Ok(metrics);
        }
        number += 1;
        if line.last() != Some(&b'\n') {
            metrics.has_torn_line = true;
            return Ok(metrics);
        }
        let bad_row = |failure: Failure| {
            failure
                .context(format!("`{}` line {number} is not a metrics row", path.display()))
                .hint("remove or repair the line; `smidgen train ... --resume` would refuse it too")
        };
        let AnyRow { row, rank_bytes, eval_loss, eval_ms } =
            serde_json::from_slice(&line).map_err(|error| bad_row(Failure::disk(error)))?;
        // A run may have been resumed with another number of ranks.
        if metrics.rank_bytes.len() < rank_bytes.len() {
            metrics.rank_bytes.resize(rank_bytes.len(), 0);
        }
        for (most, bytes) in metrics.rank_bytes.iter_mut().zip(&rank_bytes) {
            *most = (*most).max(*bytes);
        }
        let last = metrics.rows.last().map_or(0, |row| row.step);
        if row.step_ms.is_nan() {
            let missing = || bad_row(Failure::disk("it has neither `step_ms` nor `eval_ms`"));
            let (eval_loss, eval_ms) = (eval_loss.unwrap_or(f64::NAN), eval_ms.ok_or_else(missing)?);
            metrics.evaluations.push(EvaluationRow { step: row.step, eval_loss, eval_ms });
        } else if row.step <= last {
            return Err(bad_row(Failure::disk(format!("step {} comes after step {last}", row.step))));
        } else {
            // If the file was deleted during the run, steps before it are unknown.
            let steps = (row.step - last).min(stride(row.step, DENSE_STEPS));
            metrics.rows.push(StepRow { steps, ..row });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Step 65,540 was saved. The rows before 65,535 are missing.
    #[test]
    fn a_row_of_a_thinned_run_stands_for_the_steps_since_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(METRICS);
        let line = |step: u64| format!("{{\"step\":{step},\"step_ms\":1.0}}\n");
        std::fs::write(&path, [65_535, 65_536, 65_540, 65_552, 65_568].map(line).concat()).unwrap();
        let rows = read_metrics(&path).unwrap().rows;
        assert_eq!(rows.iter().map(|row| row.steps).collect::<Vec<_>>(), [1, 1, 4, 12, 16]);
    }
}
