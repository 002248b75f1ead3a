//! Recorded transformers + PEFT runs, replayed: logits, loss, the gradient of everything trained, ten optimizer steps.
//!
//! Each folder of `fixtures/` is one case; `fixtures/README.md` says how it was recorded. The tolerances
//! stand about ten times above the recorded distance between f32 and f64 in the reference itself, but for the cases of `COARSE`.

use serde_json::Value;
use smidgen::internal::{
    AdapterPlace, Data, Feed, Job, LogitsRun, Purpose, Rows, adapters, trained_state, weights,
};
use smidgen_compile::{AdapterForm, compile};
use smidgen_data::micro_batch::MicroBatch;
use smidgen_formats::peft::{AdapterKey, key_in_file};
use smidgen_formats::safetensors::SafetensorsFile;
use smidgen_formats::text_names::wrapped_name;
use smidgen_ir::{DeviceKind, Entry, Extent, LayerSet, Policy, ValueId, ValueRole};
use smidgen_recipe::{RecipeSource, parse_recipe};
use smidgen_runtime::{AnyDevice, Executor};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const SEED: u64 = 42;
/// Cases whose tolerances are three times the recorded distance where that is more than usual, and ten times on a GPU, which
/// sums in another order: in scans transformers rounds to f32 in both records, and decays make a sum of many tokens of these
/// roundings.
const COARSE: &[&str] = &[
    "falcon-h1",
    "granite-hybrid",
    "granite-hybrid-full",
    "olmo-hybrid",
    "olmo-hybrid-full",
    "qwen3-5",
    "qwen3-5-full",
    "qwen3-next",
];
/// The usual tolerances, by what is recorded.
const TOLERANCES: [(&str, f64); 4] =
    [("losses", 2e-6), ("grad_norms", 1e-5), ("grad_tensor", 3e-5), ("final_tensor", 6e-5)];
/// How keys of PEFT's files begin.
const PEFT_PREFIX: &str = "base_model.model.";

macro_rules! replays {
    ($($test:ident = $name:literal,)+) => {
        $(#[test]
        fn $test() {
            replay($name, "cpu");
        })+

        const REPLAYED: &[&str] = &[$($name),+];
    };
}

replays! {
    cohere2 = "cohere2",
    cohere2_full = "cohere2-full",
    deepseek_v2 = "deepseek-v2",
    deepseek_v3 = "deepseek-v3",
    falcon_h1 = "falcon-h1",
    gemma = "gemma",
    gemma2 = "gemma2",
    gemma3_full = "gemma3-full",
    gemma3_text = "gemma3-text",
    gemma3_v4 = "gemma3-v4",
    gemma3_wrapped = "gemma3-wrapped",
    gemma4 = "gemma4",
    gemma4_e = "gemma4-e",
    gemma4_moe = "gemma4-moe",
    gguf_full = "gguf-full",
    gguf_gemma2 = "gguf-gemma2",
    gguf_gemma3 = "gguf-gemma3",
    gguf_kquants = "gguf-kquants",
    gguf_lfm2 = "gguf-lfm2",
    gguf_llama = "gguf-llama",
    gguf_llama3_rope = "gguf-llama3-rope",
    gguf_phi3 = "gguf-phi3",
    gguf_qwen2 = "gguf-qwen2",
    gguf_qwen3 = "gguf-qwen3",
    glm4 = "glm4",
    glm4_lite = "glm4-lite",
    glm4_moe = "glm4-moe",
    gpt_oss = "gpt-oss",
    granite = "granite",
    granite_hybrid = "granite-hybrid",
    granite_hybrid_full = "granite-hybrid-full",
    granitemoe = "granitemoe",
    lfm2 = "lfm2",
    lfm2_full = "lfm2-full",
    lfm2_moe = "lfm2-moe",
    llama_bias_linear = "llama-bias-linear",
    llama_bnb_fp4 = "llama-bnb-fp4",
    llama_bnb_nf4 = "llama-bnb-nf4",
    llama_dora = "llama-dora",
    llama_dynamic = "llama-dynamic",
    llama_f16_some_layers = "llama-f16-some-layers",
    llama_full = "llama-full",
    llama_full_last = "llama-full-last",
    llama_gqa_tied = "llama-gqa-tied",
    llama_head128 = "llama-head128",
    llama_head256 = "llama-head256",
    llama_head64 = "llama-head64",
    llama_head80 = "llama-head80",
    llama_head96 = "llama-head96",
    llama_int8 = "llama-int8",
    llama_lslora = "llama-lslora",
    llama_mha = "llama-mha",
    llama_nf4_single = "llama-nf4-single",
    minimax_m2 = "minimax-m2",
    ministral3 = "ministral3",
    mistral_full = "mistral-full",
    mistral_window = "mistral-window",
    mistral3_wrapped = "mistral3-wrapped",
    mistral4_wrapped = "mistral4-wrapped",
    mixtral = "mixtral",
    muse_glimmer = "muse-glimmer",
    muse_glimmer_full = "muse-glimmer-full",
    olmo_hybrid = "olmo-hybrid",
    olmo_hybrid_full = "olmo-hybrid-full",
    olmo2 = "olmo2",
    olmo3 = "olmo3",
    olmoe = "olmoe",
    phi3 = "phi3",
    phi3_dora = "phi3-dora",
    phi3_full = "phi3-full",
    phi3_longrope = "phi3-longrope",
    phi3_lslora = "phi3-lslora",
    phi4_mini = "phi4-mini",
    phi4_mini_v4 = "phi4-mini-v4",
    qwen2 = "qwen2",
    qwen2_bias_all = "qwen2-bias-all",
    qwen2_bias_lora_only = "qwen2-bias-lora-only",
    qwen2_dora = "qwen2-dora",
    qwen2_moe = "qwen2-moe",
    qwen2_nf4 = "qwen2-nf4",
    qwen3 = "qwen3",
    qwen3_5 = "qwen3-5",
    qwen3_5_full = "qwen3-5-full",
    qwen3_5_moe = "qwen3-5-moe",
    qwen3_full = "qwen3-full",
    qwen3_moe = "qwen3-moe",
    qwen3_next = "qwen3-next",
    seed_oss = "seed-oss",
    smollm3 = "smollm3",
}

#[test]
fn every_fixture_is_replayed() {
    let folders = std::fs::read_dir(fixtures()).unwrap().filter_map(|entry| {
        let entry = entry.unwrap();
        entry.path().join("expected.json").exists().then(|| entry.file_name().into_string().unwrap())
    });
    let mut names: Vec<String> = folders.collect();
    names.sort();
    assert_eq!(names, REPLAYED);
}

/// No record but those of the list needs more than the usual tolerances, and each of the list does.
#[test]
fn coarse_records_are_listed() {
    let is_coarse = |name: &&&str| {
        let case = Case::open(name, "cpu");
        TOLERANCES.iter().any(|(what, usual)| 3.0 * case.distance(what) > *usual)
    };
    assert_eq!(REPLAYED.iter().filter(is_coarse).copied().collect::<Vec<_>>(), COARSE);
}

/// All of them, and which fail.
#[test]
#[ignore = "needs a GPU"]
fn every_fixture_is_replayed_on_a_gpu() {
    let fails = |name: &&&str| std::panic::catch_unwind(|| replay(name, "cuda:0")).is_err();
    let failed: Vec<&&str> = REPLAYED.iter().filter(fails).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

fn replay(name: &str, device: &str) {
    for recompute in [LayerSet::none(), LayerSet::first(1)] {
        let case = Case::open(name, device);
        let job = case.job();
        let Data::Rows(rows) = &job.data else { panic!("the data was not read") };
        let mut replay = Replay::load(&case, &job, rows, recompute);
        // The logits of all rows are for looking at a model, which the CPU does.
        if job.place.kind() == DeviceKind::Cpu {
            replay.compare_logits();
        }
        replay.compare_eval_loss();
        replay.compare_steps();
        replay.compare_final_tensors();
    }
}

/// Where the test runs, which may be another machine than the one that built it.
fn fixtures() -> PathBuf {
    let package = std::env::var("CARGO_MANIFEST_DIR").unwrap_or(env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).join("../../fixtures")
}

struct Case {
    folder: PathBuf,
    device: String,
    expected: Value,
    tensors: SafetensorsFile,
}

impl Case {
    fn open(name: &str, device: &str) -> Case {
        let folder = fixtures().join(name).canonicalize().unwrap();
        let text = std::fs::read_to_string(folder.join("expected.json")).unwrap();
        let tensors = SafetensorsFile::open(&folder.join("expected.safetensors")).unwrap();
        let expected = serde_json::from_str(&text).unwrap();
        Case { folder, device: device.to_owned(), expected, tensors }
    }

    /// The recorded distance between f32 and f64.
    fn distance(&self, what: &str) -> f64 {
        let recorded = self.expected["rounding"][format!("{what}_relative")].as_f64();
        recorded.expect("a recorded distance")
    }

    fn tolerance(&self, what: &str) -> f64 {
        let (_, usual) = TOLERANCES.iter().find(|(name, _)| *name == what).expect("a usual tolerance");
        let is_coarse = self.folder.file_name().is_some_and(|name| COARSE.iter().any(|case| name == *case));
        let times = if self.device == "cpu" { 3.0 } else { 10.0 };
        if is_coarse { usual.max(times * self.distance(what)) } else { *usual }
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
        let on_device = [format!("memory.device={}", self.device)];
        let recipe =
            parse_recipe(&source, &on_device, &self.folder).unwrap_or_else(|errors| panic!("{errors}"));
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
    executor: Executor<AnyDevice>,
    feed: Feed,
    batch: MicroBatch,
}

impl<'a> Replay<'a> {
    fn load(case: &'a Case, job: &'a Job, rows: &'a Rows, recompute: LayerSet) -> Replay<'a> {
        let mut request = job.request.clone();
        request.extent = Extent { tokens: 256, rows: 256, segments: 8, audio: 0 };
        request.threads = 2;
        let plan = compile(&request, &Policy::resident(recompute, 48));
        let feed = Feed::of(&plan, SEED);
        let device = job.place.open(2, job.arithmetic).unwrap_or_else(|failure| panic!("{failure}"));
        let mut executor = Executor::load(plan, device).unwrap();
        weights::load_weights(&mut executor, &job.model, 2).unwrap_or_else(|failure| panic!("{failure}"));
        trained_state::start(&mut executor, job).unwrap_or_else(|failure| panic!("{failure}"));
        executor.run(Entry::Refresh, &request.extent).unwrap();
        Replay { case, job, rows, executor, feed, batch: MicroBatch::default() }
    }

    /// Runs an entry point over some samples as one micro-batch.
    fn run(&mut self, entry: Entry, samples: impl IntoIterator<Item = u32>) {
        self.batch.fill(&self.rows.train, samples).unwrap();
        self.feed.write_micro_batch(&mut self.executor, &self.batch, 0).unwrap();
        self.executor.run(entry, &self.batch.extent()).unwrap();
    }

    fn compare_logits(&mut self) {
        let extent = Extent { tokens: 64, rows: 64, segments: 1, audio: 0 };
        let mut run = LogitsRun::load(&self.job.request, &self.job.model, extent)
            .unwrap_or_else(|failure| panic!("{failure}"));
        trained_state::start(run.executor_mut(), self.job).unwrap_or_else(|failure| panic!("{failure}"));
        run.refresh().unwrap_or_else(|failure| panic!("{failure}"));
        for row in 0..2 {
            let expected = self.case.tensor(&format!("logits.{row}"));
            self.batch.fill(&self.rows.train, [row as u32]).unwrap();
            let ids: Vec<u32> = self.batch.ids.iter().map(|id| *id as u32).collect();
            let all: Vec<u32> = (0..ids.len() as u32).collect();
            let got = run.logits(&ids, &all).unwrap_or_else(|failure| panic!("{failure}"));
            assert_eq!(got.len(), expected.len());
            let worst = got.iter().zip(&expected).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-4, "logits of row {row}: off by {worst}");
        }
    }

    fn compare_eval_loss(&mut self) {
        let count = self.rows.train.len() as u32;
        let mut supervised = 0;
        self.feed.write_loss_weight(&mut self.executor, 1.0);
        self.feed.clear_eval_loss(&mut self.executor);
        for sample in 0..count {
            self.run(Entry::Eval, [sample]);
            supervised += self.batch.rows.len();
        }
        let got = self.feed.read_eval_loss(&mut self.executor).unwrap() / supervised as f64;
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
            self.feed.write_hyper(&mut self.executor, self.job.recipe.train.lr, step as u64 + 1, 1.0);
            let extent = self.batch.extent();
            self.executor.run(Entry::Update, &extent).unwrap();
            self.executor.run(Entry::Refresh, &extent).unwrap();
            let report = self.feed.read_report(&mut self.executor).unwrap();
            assert!(report.finite);
            close(&format!("loss of step {step}"), report.loss, losses[step], self.case.tolerance("losses"));
            let tolerance = self.case.tolerance("grad_norms");
            close(&format!("gradient norm of step {step}"), report.grad_norm, norms[step], tolerance);
            if let Some(reg_loss) = report.reg_loss {
                close(
                    &format!("regularizer of step {step}"),
                    reg_loss,
                    self.case.numbers("reg_losses")[step],
                    1e-5,
                );
            }
        }
    }

    fn read(&mut self, leaf: ValueId, place: &AdapterPlace) -> Vec<f32> {
        let mut bytes = vec![0; place.bytes];
        self.executor.read_at(leaf, place.offset, &mut bytes).unwrap();
        floats(&bytes)
    }

    fn compare_gradients(&mut self) {
        self.compare_tensors(true, "grad", self.case.tolerance("grad_tensor") as f32);
    }

    fn compare_final_tensors(&mut self) {
        self.compare_tensors(false, "final", self.case.tolerance("final_tensor") as f32);
    }

    /// The name that transformers and PEFT have for a trained tensor: a text model beside towers has its own prefix.
    fn recorded_name(&self, name: &str) -> String {
        let (peft, path) = match name.strip_prefix(PEFT_PREFIX) {
            Some(path) => (PEFT_PREFIX, path),
            None => ("", name),
        };
        if self.job.model.is_wrapped() { format!("{peft}{}", wrapped_name(path)) } else { name.into() }
    }

    /// Every trained tensor, or its gradient, against the record: norm of the difference ÷ norm.
    fn compare_tensors(&mut self, gradient: bool, recorded: &str, tolerance: f32) {
        let places = adapters::adapter_places(self.executor.plan(), &self.job.request);
        assert!(places.len() >= 2, "{} tensors", places.len());
        let keys: Vec<AdapterKey> = places.iter().map(|place| place.tensor.key.clone()).collect();
        let modules: BTreeSet<&str> = keys.iter().filter_map(AdapterKey::module).collect();
        for place in places {
            let leaf = match &self.executor.plan().value(place.leaf).role {
                ValueRole::Leaf(leaf) if gradient => leaf.gradient.expect("it is trained"),
                _ => place.leaf,
            };
            // Full training names tensors as the model does.
            let name = if self.job.request.adapters.is_empty() {
                self.executor.plan().value(place.leaf).name.clone()
            } else {
                match key_in_file(&place.tensor.key, &modules) {
                    AdapterKey::BaseTensor(name) => name,
                    key => key.to_string(),
                }
            };
            let name = format!("{recorded}.{}", self.recorded_name(&name));
            let expected = self.case.tensor(&name);
            let mut got = place.in_file_order(self.read(leaf, &place));
            if let (AdapterForm::Fourier { reg }, AdapterKey::FourierWeight(_), true) =
                (self.job.request.form, &place.tensor.key, gradient)
            {
                // The record has the regularizer's share, which `update` adds later here.
                let weight = reg / (4 * self.job.request.adapters.len()) as f64;
                let coefficients = self.read(place.leaf, &place);
                for ((got, a), neutral) in got.iter_mut().zip(coefficients).zip([0.0, 1.0, 0.0, 0.0]) {
                    *got += (2.0 * weight * f64::from(a - neutral)) as f32;
                }
            }
            assert_eq!(got.len(), expected.len(), "`{name}`");
            let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
            let size = norm(&mut expected.iter().copied());
            let distance = norm(&mut got.iter().zip(&expected).map(|(a, b)| a - b));
            assert!(size > 0.0, "`{name}` is recorded as zero");
            assert!(distance <= tolerance * size, "`{name}`: off by {distance} of {size}");
        }
    }
}

fn close(what: &str, got: f64, expected: f64, relative: f64) {
    assert!((got - expected).abs() <= relative * expected.abs(), "{what}: got {got}, expected {expected}");
}
