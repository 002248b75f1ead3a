//! Several runs side by side: their figures, and the keys of their jobs that differ.
//!
//! `job.toml` is compared line by line, so that jobs of different versions can be compared. `output.dir` always differs
//! and is left out.

use super::numbers::{duration, grouped, short};
use super::run_folder::{RunRecord, read_run};
use super::run_summary::{RunSummary, summarize};
use crate::console::columns::{Side, render_columns};
use crate::failure::Failure;
use serde::Serialize;
use serde_json::{Map, Value, json};
use smidgen_ir::bytes::format_bytes;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
pub struct Comparison {
    pub runs: Vec<Compared>,
    pub differences: Vec<Difference>,
    /// Keys with the same value in all runs.
    pub same_keys: usize,
}

#[derive(Clone, Debug)]
pub struct Compared {
    /// The path without the folders that all runs share.
    pub name: String,
    pub record: RunRecord,
    pub summary: RunSummary,
}

/// A key of the recipe and its value in each run, as TOML; `None` if the run does not have the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub key: String,
    pub values: Vec<Option<String>>,
}

/// A figure of each run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fact {
    pub name: &'static str,
    pub values: Vec<String>,
    /// The index of the run with the best value; `None` if no value is better than the others.
    pub best: Option<usize>,
}

/// Reads the folders of at least two runs.
pub fn read_runs(folders: &[PathBuf]) -> Result<Comparison, Failure> {
    let records = folders.iter().map(|folder| read_run(folder)).collect::<Result<Vec<_>, _>>()?;
    let paths: Vec<PathBuf> =
        folders.iter().map(|folder| folder.canonicalize().unwrap_or(folder.clone())).collect();
    for (index, path) in paths.iter().enumerate() {
        if paths[..index].contains(path) {
            return Err(Failure::command(format!("the run `{}` is given twice", folders[index].display())));
        }
    }
    Ok(compare(names(&paths).into_iter().zip(records).collect()))
}

pub fn compare(runs: Vec<(String, RunRecord)>) -> Comparison {
    let runs: Vec<Compared> = runs
        .into_iter()
        .map(|(name, record)| Compared { name, summary: summarize(&record), record })
        .collect();
    let jobs: Vec<Vec<(String, String)>> =
        runs.iter().map(|run| read_keys(run.record.job.as_deref().unwrap_or(""))).collect();
    let mut keys: Vec<&str> = Vec::new();
    for (key, _) in jobs.iter().flatten() {
        if key != "output.dir" && !keys.contains(&key.as_str()) {
            keys.push(key);
        }
    }
    let value = |job: &Vec<(String, String)>, key: &str| {
        job.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    };
    let all = keys.iter().map(|key| Difference {
        key: (*key).to_owned(),
        values: jobs.iter().map(|job| value(job, key)).collect(),
    });
    let differences: Vec<Difference> = all
        .filter(|difference| difference.values.iter().any(|value| *value != difference.values[0]))
        .collect();
    let same_keys = keys.len() - differences.len();
    Comparison { runs, differences, same_keys }
}

/// The paths without the folders that all of them share.
fn names(paths: &[PathBuf]) -> Vec<String> {
    let parents = || paths.iter().filter_map(|path| path.parent());
    let mut shared = parents().next().unwrap_or(Path::new("")).to_path_buf();
    while !parents().all(|parent| parent.starts_with(&shared)) && shared.pop() {}
    let name = |path: &PathBuf| path.strip_prefix(&shared).unwrap_or(path).display().to_string();
    paths.iter().map(name).collect()
}

/// Keys and values of a `job.toml`; repeated sections are numbered.
fn read_keys(job: &str) -> Vec<(String, String)> {
    let (mut keys, mut section, mut repeated): (Vec<(String, String)>, String, usize) = Default::default();
    for line in job.lines() {
        if let Some(name) = line.strip_prefix("[[").and_then(|rest| rest.strip_suffix("]]")) {
            repeated += 1;
            section = format!("{name}.{repeated}");
        } else if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = name.to_owned();
        } else if let Some((key, value)) = line.split_once(" = ") {
            keys.push((format!("{section}.{}", key.trim()), value.trim().to_owned()));
        }
    }
    keys
}

#[derive(Clone, Copy, PartialEq)]
enum Better {
    Lower,
    Higher,
    Neither,
}

/// A figure: its name, which value is better, where it is in a summary, and its text.
type Figure = (&'static str, Better, fn(&RunSummary) -> Option<f64>, fn(f64) -> String);

const FIGURES: [Figure; 12] = {
    use Better::{Higher, Lower, Neither};
    const BYTES: fn(f64) -> String = |bytes| format_bytes(bytes as u64);
    [
        ("loss, first", Neither, |run| run.loss.first, short),
        ("loss, last", Lower, |run| run.loss.last, short),
        ("eval loss, best", Lower, |run| run.loss.best_eval.map(|best| best.eval_loss), short),
        ("eval loss, last", Lower, |run| run.loss.last_eval, short),
        ("tokens/s", Higher, |run| run.speed.tokens_per_s, short),
        ("ms per step", Neither, |run| run.speed.step_ms, short),
        ("time in steps", Neither, |run| Some(run.speed.seconds), duration),
        ("tokens", Neither, |run| Some(run.speed.tokens as f64), |count| grouped(count as i64)),
        ("peak memory", Lower, |run| run.memory.peak_bytes.map(|bytes| bytes as f64), BYTES),
        ("planned peak", Neither, |run| Some(run.memory.planned_bytes as f64), BYTES),
        ("pinned memory", Neither, |run| Some(run.memory.pinned_bytes as f64).filter(|it| *it > 0.0), BYTES),
        ("GPU utilization", Higher, |run| run.speed.gpu_util, |percent| format!("{percent:.0} %")),
    ]
};

impl Comparison {
    /// The figures of all runs; figures that no run has are left out.
    pub fn facts(&self) -> Vec<Fact> {
        let steps = self.runs.iter().map(|run| render_steps(&run.summary)).collect();
        let steps = Fact { name: "steps", values: steps, best: None };
        [steps].into_iter().chain(FIGURES.into_iter().filter_map(|figure| self.fact(figure))).collect()
    }

    fn fact(&self, (name, better, value, render): Figure) -> Option<Fact> {
        let values: Vec<Option<f64>> = self.runs.iter().map(|run| value(&run.summary)).collect();
        let known: Vec<(usize, f64)> =
            values.iter().enumerate().filter_map(|(run, value)| Some((run, (*value)?))).collect();
        let is_shared = known.iter().all(|(_, value)| *value == known[0].1);
        let sign = if better == Better::Higher { -1.0 } else { 1.0 };
        let best = known.iter().min_by(|one, other| (sign * one.1).total_cmp(&(sign * other.1)));
        let best = best.filter(|_| !is_shared && better != Better::Neither).map(|(run, _)| *run);
        let values = values.iter().map(|value| value.map_or("–".into(), render)).collect();
        (!known.is_empty()).then_some(Fact { name, values, best })
    }

    /// For a terminal: the status of each run, a table of figures, and the keys that differ.
    pub fn render_text(&self) -> String {
        /// Runs per table, so that a table fits 80 columns.
        const RUNS_PER_TABLE: usize = 3;
        let mut text: String =
            self.runs.iter().map(|run| format!("{}: {}\n", run.name, run.summary.state)).collect();
        let facts = self.facts();
        for first in (0..self.runs.len()).step_by(RUNS_PER_TABLE) {
            let shown = first..(first + RUNS_PER_TABLE).min(self.runs.len());
            let mut headings = vec![("", Side::Left)];
            headings.extend(self.runs[shown.clone()].iter().map(|run| (run.name.as_str(), Side::Right)));
            let row = |fact: &Fact| {
                let cells = fact.values[shown.clone()].iter().cloned();
                [fact.name.to_owned()].into_iter().chain(cells).collect::<Vec<String>>()
            };
            text += &render_columns(&headings, &facts.iter().map(row).collect::<Vec<_>>());
        }
        text += &if self.differences.is_empty() {
            "the recipes are the same\n".into()
        } else {
            format!("the recipes differ ({} other keys are the same):\n", self.same_keys)
        };
        for Difference { key, values } in &self.differences {
            let each: Vec<String> = self
                .runs
                .iter()
                .zip(values)
                .map(|(run, value)| format!("{} {}", run.name, value.as_deref().unwrap_or("–")))
                .collect();
            text += &format!("  {key}: {}\n", each.join(" · "));
        }
        text
    }

    pub fn render_json(&self) -> Value {
        let run = |run: &Compared| {
            let mut value = json!(run.summary);
            value["name"] = json!(run.name);
            value["folder"] = json!(run.record.folder);
            value
        };
        let differences: Map<String, Value> =
            self.differences.iter().map(|it| (it.key.clone(), json!(it.values))).collect();
        json!({
            "runs": self.runs.iter().map(run).collect::<Vec<_>>(),
            "differences": differences,
            "same_keys": self.same_keys,
        })
    }
}

fn render_steps(summary: &RunSummary) -> String {
    let (done, total) = (summary.steps, summary.total_steps);
    let all = grouped(total as i64);
    if done == total { all } else { format!("{} of {all}", grouped(done as i64)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_runs_apart() {
        let named = |paths: &[&str]| names(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(named(&["/a/runs/x", "/a/runs/y"]), ["x", "y"]);
        assert_eq!(named(&["/a/x/run", "/a/y/run"]), ["x/run", "y/run"]);
        assert_eq!(named(&["/a/runs", "/a/runs/y"]), ["runs", "runs/y"]);
    }

    fn record(job: &str) -> RunRecord {
        RunRecord { job: Some(job.into()), ..RunRecord::default() }
    }

    #[test]
    fn keys_that_differ_are_listed_in_order() {
        let one = "[train]\nlr = 0.1\nsteps = 5\n\n[output]\ndir = \"a\"\n\n[[data.mix]]\npath = \"x\"\n";
        let other = "[train]\nlr = 0.2\nsteps = 5\nclip = 1.0\n[output]\ndir = \"b\"\n";
        let runs = vec![("a".into(), record(one)), ("b".into(), record(other)), ("c".into(), record(one))];
        let compared = compare(runs);
        let text = |it: &str| Some(it.to_owned());
        let wanted = [
            ("train.lr", vec![text("0.1"), text("0.2"), text("0.1")]),
            ("data.mix.1.path", vec![text("\"x\""), None, text("\"x\"")]),
            ("train.clip", vec![None, text("1.0"), None]),
        ];
        let wanted = wanted.map(|(key, values)| Difference { key: key.into(), values });
        assert_eq!((&compared.differences[..], compared.same_keys), (&wanted[..], 1));
        let lines = compared.render_text();
        assert!(lines.contains("the recipes differ (1 other keys are the same):\n"), "{lines}");
        assert!(lines.contains("  train.lr: a 0.1 · b 0.2 · c 0.1\n"), "{lines}");
        assert_eq!(compared.render_json()["differences"]["train.clip"], json!([null, "1.0", null]));
    }

    #[test]
    fn the_best_run_of_a_figure_is_marked() {
        let mut compared = compare(vec![("a".into(), record("")), ("b".into(), record(""))]);
        let best = |compared: &Comparison, name: &str| {
            compared.facts().into_iter().find(|fact| fact.name == name).and_then(|fact| fact.best)
        };
        for (run, loss, speed, peak) in [(0, 2.0, 900.0, 5u64), (1, 1.5, 800.0, 7)] {
            let summary = &mut compared.runs[run].summary;
            (summary.loss.last, summary.speed.tokens_per_s) = (Some(loss), Some(speed));
            summary.memory.peak_bytes = Some(peak);
        }
        let of = |compared: &Comparison| {
            ["loss, last", "tokens/s", "peak memory", "planned peak"].map(|name| best(compared, name))
        };
        assert_eq!(of(&compared), [Some(1), Some(0), Some(0), None]);
        compared.runs[0].summary.loss.last = Some(1.5);
        compared.runs[1].summary.speed.tokens_per_s = None;
        assert_eq!(of(&compared)[..2], [None, None]);
        assert!(compared.facts().iter().all(|fact| fact.name != "GPU utilization"));
    }
}
