//! Recorded transformers + PEFT runs, replayed: logits, loss, every adapter gradient, ten optimizer steps.
//!
//! Each folder of `fixtures/` is one case; `fixtures/README.md` says how it was recorded. The tolerances
//! stand about ten times above the recorded distance between f32 and f64 in the reference itself.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::Value;
use smidgen::checkpoint::safetensors::SafetensorsFile;
use smidgen::data::micro_batch::MicroBatch;
use smidgen::job::{Data, Job, Purpose, Rows};
use smidgen::recipe::{RecipeSource, parse_recipe};
use smidgen::train::feed::Feed;
use smidgen::train::tensors;
use smidgen_compile::{Policy, Recompute, compile};
use smidgen_ir::{Entry, Extent, LeafKind, Op, Plan, workspace};
use smidgen_runtime::{Cpu, Device, Executor};
use std::path::{Path, PathBuf};

const SEED: u64 = 42;

#[test]
fn llama_mha() {
    replay("llama-mha");
}

#[test]
fn llama_gqa_tied() {
    replay("llama-gqa-tied");
}

#[test]
fn llama_bias_linear() {
    replay("llama-bias-linear");
}

#[test]
fn llama_f16_some_layers() {
    replay("llama-f16-some-layers");
}

#[test]
fn qwen2() {
    replay("qwen2");
}

#[test]
fn qwen3() {
    replay("qwen3");
}

#[test]
fn mistral_window() {
    replay("mistral-window");
}

#[test]
fn every_fixture_is_replayed() {
    let folders = std::fs::read_dir(fixtures()).unwrap().filter_map(|entry| {
        let entry = entry.unwrap();
        entry.path().join("expected.json").exists().then(|| entry.file_name().into_string().unwrap())
    });
    let mut names: Vec<String> = folders.collect();
    names.sort();
    let llamas = ["llama-bias-linear", "llama-f16-some-layers", "llama-gqa-tied", "llama-mha"];
    assert_eq!(names, [&llamas[..], &["mistral-window", "qwen2", "qwen3"]].concat());
}

fn replay(name: &str) {
    for recompute in [Recompute::none(), Recompute::first(1)] {
        let case = Case::open(name);
        let job = case.job();
        let Data::Rows(rows) = &job.data else { panic!("the data was not read") };
        let mut replay = Replay::load(&case, &job, rows, recompute);
        replay.compare_logits();
        replay.compare_eval_loss();
        replay.compare_steps();
        replay.compare_final_adapter();
    }
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

struct Case {
    folder: PathBuf,
    expected: Value,
    tensors: SafetensorsFile,
}

impl Case {
    fn open(name: &str) -> Case {
        let folder = fixtures().join(name).canonicalize().unwrap();
        let text = std::fs::read_to_string(folder.join("expected.json")).unwrap();
        let tensors = SafetensorsFile::open(&folder.join("expected.safetensors")).unwrap();
        Case { expected: serde_json::from_str(&text).unwrap(), folder, tensors }
    }

    fn job(&self) -> Job {
        let mut text = String::new();
        for (section, keys) in self.expected["recipe"].as_object().unwrap() {
            text += &format!("[{section}]\n");
            for (key, value) in keys.as_object().unwrap() {
                text += &format!("{key} = {}\n", toml_value(value));
            }
        }
        text += "[output]\ndir = \"unused\"\n";
        let source = RecipeSource { file: "recipe.toml".into(), folder: self.folder.clone(), text };
        let recipe = parse_recipe(&source, &[], &self.folder).unwrap_or_else(|errors| panic!("{errors}"));
        Job::prepare(recipe, Purpose::Train).unwrap_or_else(|failure| panic!("{failure}"))
    }

    fn numbers(&self, key: &str) -> Vec<f64> {
        self.expected[key].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    }

    fn tensor(&self, name: &str) -> Vec<f32> {
        let entry = self.tensors.tensor(name).unwrap_or_else(|| panic!("no recorded tensor `{name}`"));
        let mut bytes = vec![0; entry.bytes as usize];
        self.tensors.read_at(entry, 0, &mut bytes).unwrap();
        floats(&bytes)
    }
}

fn toml_value(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let entries: Vec<String> = map
                .iter()
                .map(|(key, value)| format!("{} = {}", Value::from(key.as_str()), toml_value(value)))
                .collect();
            format!("{{ {} }}", entries.join(", "))
        }
        other => other.to_string(),
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

struct Replay<'a> {
    case: &'a Case,
    job: &'a Job,
    rows: &'a Rows,
    executor: Executor<Cpu>,
    feed: Feed,
    batch: MicroBatch,
}

impl<'a> Replay<'a> {
    fn load(case: &'a Case, job: &'a Job, rows: &'a Rows, recompute: Recompute) -> Replay<'a> {
        let mut request = job.request.clone();
        request.extent = Extent { tokens: 256, rows: 256, segments: 8 };
        request.threads = 2;
        let plan = compile(&request, &Policy { recompute, loss_chunk: 48 });
        let feed = Feed::of(&plan, SEED);
        let mut executor = Executor::load(plan, Cpu::new(2).unwrap()).unwrap();
        tensors::load_weights(&mut executor, &job.model).unwrap_or_else(|failure| panic!("{failure}"));
        tensors::start_adapters(&mut executor, job).unwrap_or_else(|failure| panic!("{failure}"));
        Replay { case, job, rows, executor, feed, batch: MicroBatch::default() }
    }

    /// Runs an entry point over some samples as one micro-batch.
    fn run(&mut self, entry: Entry, samples: impl IntoIterator<Item = u32>) {
        self.batch.fill(&self.rows.train, samples);
        self.feed.write_micro_batch(&mut self.executor, &self.batch, 0);
        self.executor.run(entry, &self.batch.extent()).unwrap();
    }

    /// `eval` leaves the last chunk of logits where it computed them.
    fn compare_logits(&mut self) {
        let vocabulary = self.job.request.spec.vocabulary;
        for row in 0..2 {
            let expected = self.case.tensor(&format!("logits.{row}"));
            let tokens = self.rows.train.length(row) as usize;
            self.batch.fill(&self.rows.train, [row as u32]);
            self.batch.rows = (0..tokens as i32).collect();
            self.batch.labels = vec![0; tokens];
            self.feed.write_loss_weight(&mut self.executor, 1.0);
            self.feed.write_micro_batch(&mut self.executor, &self.batch, 0);
            self.executor.run(Entry::Eval, &self.batch.extent()).unwrap();
            assert!(tokens <= 48, "the sample's logits are one chunk");
            let offset = loss_workspace(self.executor.plan());
            let mut bytes = vec![0; 4 * tokens * vocabulary];
            for (row, bytes) in bytes.chunks_mut(4 * vocabulary).enumerate() {
                let first = 4 * row * workspace::logit_stride(vocabulary);
                self.executor.device_mut().read(offset + first, bytes);
            }
            let worst = floats(&bytes)
                .iter()
                .zip(&expected)
                .map(|(got, want)| (got - want).abs())
                .fold(0.0, f32::max);
            assert!(worst < 1e-4, "logits of row {row}: off by {worst}");
        }
    }

    fn compare_eval_loss(&mut self) {
        let count = self.rows.train.len() as u32;
        let mut supervised = 0;
        self.feed.clear_eval_loss(&mut self.executor);
        for sample in 0..count {
            self.run(Entry::Eval, [sample]);
            supervised += self.batch.rows.len();
        }
        let got = self.feed.read_eval_loss(&mut self.executor) / supervised as f64;
        close("eval loss", got, self.case.expected["eval_loss"].as_f64().unwrap(), 1e-6);
    }

    fn compare_steps(&mut self) {
        let (losses, norms) = (self.case.numbers("losses"), self.case.numbers("grad_norms"));
        let batch = self.case.expected["recipe"]["train"]["batch"].as_u64().unwrap() as u32;
        let samples = self.rows.train.len() as u32;
        for step in 0..losses.len() {
            let first = step as u32 * batch % samples;
            let supervised: u32 =
                (first..first + batch).map(|i| self.rows.train.supervised(i as usize)).sum();
            assert_eq!(u64::from(supervised), self.case.numbers("supervised_tokens")[step] as u64);
            self.feed.write_loss_weight(&mut self.executor, 1.0 / f64::from(supervised));
            // One micro-batch of all but one sample, and one of the last: a split like the solver's.
            self.run(Entry::MicroStep, first..first + batch - 1);
            self.run(Entry::MicroStep, [first + batch - 1]);
            if step == 0 {
                self.compare_gradients();
            }
            self.feed.write_hyper(&mut self.executor, self.job.recipe.train.lr, step as u64 + 1);
            let extent = self.batch.extent();
            self.executor.run(Entry::Update, &extent).unwrap();
            let report = self.feed.read_report(&mut self.executor);
            assert!(report.finite);
            close(&format!("loss of step {step}"), report.loss, losses[step], 2e-6);
            close(&format!("gradient norm of step {step}"), report.grad_norm, norms[step], 1e-5);
        }
    }

    fn compare_gradients(&mut self) {
        self.compare_leaves(LeafKind::Gradient, "grad ", "grad.base_model.model.", 3e-5);
    }

    fn compare_final_adapter(&mut self) {
        self.compare_leaves(LeafKind::Adapter, "", "final.base_model.model.", 6e-5);
    }

    /// Every leaf of a kind against its recorded tensor: norm of the difference ÷ norm.
    fn compare_leaves(&mut self, kind: LeafKind, prefix: &str, recorded: &str, tolerance: f32) {
        let leaves = tensors::leaf_names(self.executor.plan(), kind);
        assert!(leaves.len() >= 6, "{} leaves", leaves.len());
        for (id, name) in leaves {
            let path = name.strip_prefix(prefix).unwrap();
            let expected = self.case.tensor(&format!("{recorded}{path}"));
            let mut bytes = vec![0; 4 * expected.len()];
            self.executor.read(id, &mut bytes);
            let got = floats(&bytes);
            let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
            let size = norm(&mut expected.iter().copied());
            let distance = norm(&mut got.iter().zip(&expected).map(|(a, b)| a - b));
            assert!(size > 0.0, "`{name}` is recorded as zero");
            assert!(distance <= tolerance * size, "`{name}`: off by {distance} of {size}");
        }
    }
}

fn loss_workspace(plan: &Plan) -> usize {
    let steps = &plan.entry(Entry::Eval).steps;
    let step = steps.iter().find(|step| matches!(step.op, Op::LmHeadLoss(_))).expect("eval has a loss");
    plan.buffer(step.workspace.expect("the loss has a workspace")).offset
}

fn close(what: &str, got: f64, expected: f64, relative: f64) {
    assert!((got - expected).abs() <= relative * expected.abs(), "{what}: got {got}, expected {expected}");
}
