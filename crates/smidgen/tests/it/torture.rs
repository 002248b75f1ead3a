//! Exact resume under torture: SIGKILL at random instants, over and over, with everything that a run can have.
//!
//! A run is killed before its first checkpoint, inside the writing of one (each step writes one), between its last
//! save and its end, and resumed each time; at the end everything that it left is what a run that was never touched
//! left: metrics, events, adapter, trainer state, checkpoints, and nothing else.
//! `SMIDGEN_KILLS=200 cargo test -p smidgen --test it torture -- --nocapture` kills that often in each case.

use crate::event_file::read_scalars;
use crate::scratch::Scratch;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A name and what its runs have beside [`COMMON`].
const CASES: &[(&str, &[&str])] = &[
    ("adamw-lora", &["train.early_stop=3"]),
    ("adamw-ls-lora", &["train.early_stop=9", "adapter.kind=ls-lora", "train.batch_tokens=70"]),
    ("adamw-8bit-lora", &["train.optimizer=adamw-8bit", "adapter.rank=128", "model.compute=bf16"]),
    ("away", &["memory.weights=disk", "memory.activations=host", "memory.optimizer_state=host"]),
];

/// Dropout, shuffling, a schedule, evaluations, a checkpoint after every step.
const COMMON: &[&str] = &[
    "train.epochs=12",
    "train.schedule=cosine",
    "train.save_every=1",
    "train.eval_every=3",
    "train.keep=2",
    "train.log_every=0",
    "train.lr=0.03",
    "data.eval=other.jsonl",
    "adapter.dropout=0.1",
];

/// Kills of a case where nobody asks for more.
const KILLS: usize = 8;

#[test]
fn killed_over_and_over_a_run_leaves_what_an_untouched_one_leaves() {
    let kills = std::env::var("SMIDGEN_KILLS").map_or(KILLS, |text| text.parse().unwrap());
    for (case, own) in CASES {
        let scratch = Scratch::new();
        // Rows that training does not see, so that their loss rises again some day.
        scratch.write_rows("other.jsonl", 6, 12);
        let overrides = [COMMON, own].concat();
        let started = Instant::now();
        scratch.train("clean", &overrides);
        let clean = left_behind(&scratch, "clean");
        let mut torture = Torture { random: 0x5eed, span: started.elapsed(), kills: vec![] };
        let mut runs = 0;
        while torture.kills.len() < kills {
            runs += 1;
            let output = format!("run-{runs}");
            torture.run(&scratch, &output, &overrides, kills);
            let left = left_behind(&scratch, &output);
            for (name, value) in &clean {
                assert!(left.get(name) == Some(value), "{case}: {name} after {:?}", torture.kills);
            }
            let more: Vec<&String> = left.keys().filter(|name| !clean.contains_key(*name)).collect();
            assert!(more.is_empty(), "{case}: {more:?} after {:?}", torture.kills);
            std::fs::remove_dir_all(scratch.path(&output)).unwrap();
        }
        let at = |kind: &str| torture.kills.iter().filter(|(own, _)| *own == kind).count();
        println!(
            "{case}: {} kills in {runs} runs: {} before the first checkpoint, {} while one was written, {} after the last",
            torture.kills.len(),
            at("begin"),
            at("write"),
            at("end")
        );
    }
}

struct Torture {
    random: u64,
    /// How long an untouched run takes.
    span: Duration,
    /// What was going on, and steps in the metrics.
    kills: Vec<(&'static str, usize)>,
}

impl Torture {
    fn below(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.random >> 33) % bound
    }

    /// Starts and kills until the run is done or has been killed often enough.
    fn run(&mut self, scratch: &Scratch, output: &str, overrides: &[&str], kills: usize) {
        let dir = format!("output.dir={output}");
        let arguments = [&["train", "recipe.toml", "--resume", &dir][..], overrides].concat();
        let last = scratch.metrics("clean").len();
        loop {
            if self.kills.len() >= kills {
                scratch.train(output, &[overrides, &["--resume"]].concat());
                return;
            }
            let mut child = scratch.start(&arguments);
            // One in two waits for what takes little of a run's time: a checkpoint or the end being written, or
            // comes before there is any.
            let hunt = self.below(6);
            let longest = if hunt == 2 { self.span / 16 } else { self.span / 2 };
            let patience = Duration::from_micros(self.below(longest.as_micros() as u64));
            let begun = Instant::now();
            let ended = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    assert!(status.success(), "{output}: {status} after {:?}", self.kills);
                    break true;
                }
                let hunted = match hunt {
                    0 => is_writing(scratch, output),
                    1 => rows(scratch, output) >= last,
                    _ => true,
                };
                if begun.elapsed() >= patience && hunted {
                    break false;
                }
                std::thread::yield_now();
            };
            if ended {
                return;
            }
            child.kill().unwrap();
            child.wait().unwrap();
            let kind = match () {
                () if is_writing(scratch, output) => "write",
                () if rows(scratch, output) >= last => "end",
                () if rows(scratch, output) < 2 => "begin",
                () => "between",
            };
            self.kills.push((kind, rows(scratch, output)));
        }
    }
}

fn rows(scratch: &Scratch, output: &str) -> usize {
    let text = std::fs::read(scratch.path(&format!("{output}/metrics.jsonl"))).unwrap_or_default();
    text.iter().filter(|byte| **byte == b'\n').count()
}

fn is_writing(scratch: &Scratch, output: &str) -> bool {
    let Ok(entries) = std::fs::read_dir(scratch.path(output)) else { return false };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with(".checkpoint-")
    })
}

/// Every file of a run folder by name, without times, speeds and memory, which no two runs share.
fn left_behind(scratch: &Scratch, output: &str) -> BTreeMap<String, Vec<u8>> {
    let root = scratch.path(output);
    let files = scratch.files().into_iter().filter_map(|(path, bytes)| {
        let name = path.strip_prefix(&root).ok()?.to_str().unwrap().to_string();
        Some(match name.rsplit('/').next().unwrap() {
            // Why a choice was made is told otherwise where it comes from a checkpoint.
            "plan.json" | "plan.txt" => return None,
            // What was measured.
            "phases.json" | "run.json" | "report.html" => return None,
            "metrics.jsonl" => {
                let rows: Vec<Value> = scratch.metrics(output).into_iter().map(timeless).collect();
                (name, serde_json::to_vec(&rows).unwrap())
            }
            "smidgen_state.json" => {
                let mut state: Value = serde_json::from_slice(&bytes).unwrap();
                state["totals"] = timeless(state["totals"].take());
                (name, serde_json::to_vec(&state).unwrap())
            }
            "trainer_state.json" => {
                let mut state: Value = serde_json::from_slice(&bytes).unwrap();
                let best = state["best_model_checkpoint"].as_str().map(|it| it.replace(output, "RUN"));
                state["best_model_checkpoint"] = best.into();
                for row in state["log_history"].as_array_mut().unwrap() {
                    *row = timeless(row.take());
                }
                (name, serde_json::to_vec(&state).unwrap())
            }
            last if last.starts_with("events.out.tfevents.") => {
                let scalars =
                    read_scalars(&root).into_iter().filter(|(_, tag, _)| tag != "train/tokens_per_s");
                (String::from("events"), format!("{:?}", scalars.collect::<Vec<_>>()).into_bytes())
            }
            "job.toml" => (name, String::from_utf8(bytes).unwrap().replace(output, "RUN").into_bytes()),
            // The hashes of files with times in them.
            "SHA256SUMS" => {
                let text = String::from_utf8(bytes).unwrap();
                let names: Vec<&str> = text.lines().map(|line| line.split_once("  ").unwrap().1).collect();
                (name, names.join("\n").into_bytes())
            }
            _ => (name, bytes),
        })
    });
    files.collect()
}

fn timeless(mut row: Value) -> Value {
    let measured = |name: &str| {
        ["_ms", "_per_s", "_bytes", "_runtime", "_per_second"].iter().any(|end| name.ends_with(end))
    };
    row.as_object_mut().unwrap().retain(|name, _| !measured(name));
    row
}
