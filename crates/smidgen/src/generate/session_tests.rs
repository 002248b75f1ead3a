//! Generation compared with recomputation of whole sequences, for every family, storage and adapter of the fixtures.
//!
//! The texts of tiny random models are noise, so only equal logits give equal texts.
//! Beam searches are compared with those of transformers, recorded by `fixtures/beams/generate.py`.

use super::*;
use crate::generate::beam::BeamSettings;
use crate::generate::sampler::Sampling;
use crate::generate::sampler::most_likely;
use crate::plan::budget::JobBudget;
use crate::plan::generation::SHORTEST;
use crate::plan::shapes::Shape;
use crate::session::logits::LogitsRun;
use serde_json::Value as Json;
use smidgen_compile::names::state;
use smidgen_ir::{DeviceKind, Entry, Extent, Op, Precision, verify};
use smidgen_recipe::{Compute, DeviceChoice};
use smidgen_runtime::cpu::bf16_unit::F32Unit;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const FAMILIES: [&str; 21] = [
    "gemma2",
    "gemma3-text",
    "gguf-gemma2",
    "gguf-kquants",
    "gguf-llama",
    "gguf-llama3-rope",
    "gguf-phi3",
    "gguf-qwen3",
    "llama-bias-linear",
    "llama-bnb-nf4",
    "llama-dora",
    "llama-gqa-tied",
    "llama-head80",
    "llama-lslora",
    "mistral-window",
    "phi3",
    "phi3-longrope",
    "phi3-lslora",
    "phi4-mini",
    "qwen2-dora",
    "qwen3",
];

/// Where the test runs, which may be another machine than the one that built it.
fn fixture(name: &str) -> PathBuf {
    let package = std::env::var("CARGO_MANIFEST_DIR").unwrap_or(env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).join("../../fixtures").join(name)
}

fn open_model(name: &str) -> Model {
    let folder = fixture(name);
    let gguf = folder.join("model.gguf");
    Model::open(&if gguf.is_file() { gguf } else { folder.join("model") }).unwrap()
}

fn stated(bytes: u64) -> JobBudget {
    JobBudget { bytes, stated: true, cut_to_free: None, reserve_bytes: 0 }
}

fn sizes(slots: usize, cache_tokens: Option<usize>) -> Sizes {
    Sizes {
        slots,
        context: Some(40),
        cache_tokens,
        new_tokens: 16,
        budget: stated(1 << 30),
        has_audio: false,
    }
}

fn opening<'a>(model: &'a Model, adapter: Option<&'a AdapterFile>, sizes: Sizes) -> Opening<'a> {
    let (base, place, arithmetic) =
        (BaseFormat::AsStored, &JobDevice::Cpu, Arithmetic::F32(F32Unit::Vectors));
    Opening { model, adapter, base, place, arithmetic, threads: 1, sizes }
}

fn open(model: &Model, adapter: Option<&AdapterFile>, sizes: Sizes, threads: usize) -> TokenSession {
    let opening = Opening { threads, ..opening(model, adapter, sizes) };
    let device = opening.place.open(opening.threads, opening.arithmetic).unwrap();
    TokenSession::open(&opening, device, |_| Ok(())).unwrap_or_else(|failure| panic!("{failure}"))
}

fn settings(sampling: Sampling, max_new: usize) -> Settings {
    Settings { sampling, max_new, stop_ids: BTreeSet::new() }
}

/// Prompts of several lengths; the longest grows over the limit of the fixture with LongRoPE, 24.
fn prompts(vocabulary: u32) -> Vec<Vec<u32>> {
    let prompt =
        |length: u32, factor: u32| (0..length).map(|i| (factor * i + i * i + 3) % vocabulary).collect();
    vec![prompt(5, 7), prompt(20, 11), prompt(1, 1), prompt(17, 5)]
}

fn by_recomputation(model: &Model, adapter: Option<&AdapterFile>, prompts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let extent = Extent { tokens: 40, rows: 1, segments: 1, audio: 0 };
    let request = build_adapted_request(model, adapter).unwrap();
    let mut run = LogitsRun::load(&request, model, extent).unwrap();
    if let Some(adapter) = adapter {
        read_adapter(run.executor_mut(), &request, adapter.path()).unwrap();
        run.refresh().unwrap();
    }
    let text = |prompt: &Vec<u32>| {
        let mut ids = prompt.clone();
        for _ in 0..9 {
            let logits = run.logits(&ids, &[ids.len() as u32 - 1]).unwrap();
            ids.push(most_likely(&logits).unwrap());
        }
        ids[prompt.len()..].to_vec()
    };
    prompts.iter().map(text).collect()
}

#[test]
fn texts_are_those_of_recomputed_sequences() {
    for name in FAMILIES {
        let model = open_model(name);
        let adapter = AdapterFile::open(&fixture(name).join("adapter")).ok();
        let vocabulary = crate::plan::model::read_decoder(&model).unwrap().vocabulary as u32;
        let prompts = prompts(vocabulary);
        let want = by_recomputation(&model, adapter.as_ref(), &prompts);
        // Two slots for four prompts, and too few rows for two of the longest.
        let mut session = open(&model, adapter.as_ref(), sizes(2, Some(50)), 1);
        let mut streamed = vec![Vec::new(); prompts.len()];
        let settings = settings(Sampling::default(), 9);
        let got = session.generate_batch(&prompts, &settings, |index, id| streamed[index].push(id)).unwrap();
        let texts: Vec<Vec<u32>> = got.iter().map(|generated| generated.ids.clone()).collect();
        assert_eq!(texts, want, "{name}");
        assert_eq!(streamed, want, "{name}: as they come");
        assert!(got.iter().all(|generated| generated.stopped_by == StoppedBy::MaxTokens), "{name}");
    }
}

#[test]
fn a_text_depends_on_neither_threads_nor_other_prompts() {
    let model = open_model("llama-gqa-tied");
    let prompts = prompts(64);
    let sampling = Sampling { temperature: 1.5, top_k: 40, top_p: 0.95, seed: 11, ..Sampling::default() };
    let settings = settings(sampling, 12);
    let together =
        open(&model, None, sizes(4, None), 2).generate_batch(&prompts, &settings, |_, _| {}).unwrap();
    let mut session = open(&model, None, sizes(1, None), 1);
    for (prompt, together) in prompts.iter().zip(&together) {
        let alone = session.generate_batch(std::slice::from_ref(prompt), &settings, |_, _| {}).unwrap();
        assert_eq!(&alone[0], together);
    }
    let other = Settings { sampling: Sampling { seed: 12, ..sampling }, ..settings };
    let other = session.generate_batch(&prompts[..1], &other, |_, _| {}).unwrap();
    assert_ne!(other[0], together[0]);
}

/// Answers to one prompt share its rows of the cache; each text is that of its prompt alone, also where LongRoPE changes in
/// the middle of an answer, and with states of recurrent layers, which are not shared.
#[test]
fn answers_to_one_prompt_are_those_of_each_alone() {
    for name in ["llama-gqa-tied", "phi3-longrope", "mistral-window", "lfm2"] {
        let model = open_model(name);
        let settings = |number: u64| {
            let sampling = Sampling { temperature: 1.5, seed: 3 + number, ..Sampling::default() };
            settings(sampling, 12)
        };
        let prompts = prompts(60);
        let prompt = |number: usize| Prompt {
            number,
            ids: prompts[number / 3].clone(),
            settings: settings(number as u64),
            top: None,
        };
        // Fewer slots than answers, and more than one prompt at a time.
        let mut session = open(&model, None, sizes(5, None), 1);
        let mut together = vec![Vec::new(); 12];
        let (executor, decoder) = session.parts();
        let on_news = |news: &News| {
            together[news.number].extend(news.token);
            Ok(true)
        };
        continue_all(executor, decoder, (0..12).map(prompt), true, &mut |_, _, _| Ok(()), on_news).unwrap();
        let mut alone = open(&model, None, sizes(1, None), 1);
        for (number, together) in together.iter().enumerate() {
            let own = std::slice::from_ref(&prompts[number / 3]);
            let want = alone.generate_batch(own, &settings(number as u64), |_, _| {}).unwrap();
            assert_eq!(&want[0].ids, together, "{name}: answer {number}");
        }
        assert_ne!(together[0], together[1], "{name}");
    }
}

#[test]
fn a_text_ends_where_it_should() {
    let model = open_model("llama-gqa-tied");
    let mut session = open(&model, None, sizes(1, None), 1);
    let prompt = vec![3, 1, 4, 1, 5];
    let all =
        session.generate_batch(std::slice::from_ref(&prompt), &settings(Sampling::default(), 100), |_, _| {});
    let all = all.unwrap().remove(0);
    // The tokens at forty positions, and the one that follows them.
    assert_eq!((all.ids.len(), all.stopped_by), (36, StoppedBy::Context));
    let last = all.ids[4];
    let first_of_it = all.ids.iter().position(|id| *id == last).unwrap();
    let ended = Settings { stop_ids: BTreeSet::from([last]), ..settings(Sampling::default(), 100) };
    let got = session.generate_batch(std::slice::from_ref(&prompt), &ended, |_, _| {}).unwrap().remove(0);
    assert_eq!((got.ids.as_slice(), got.stopped_by), (&all.ids[..first_of_it], StoppedBy::Token(last)));
    let long = session.generate_batch(&[vec![1; 41]], &ended, |_, _| {}).unwrap_err();
    assert_eq!(long.message, "prompt 0 has 41 tokens, the context holds 40");
}

/// A conversation computes only its new tokens, and gives the same answer as computing all.
#[test]
fn a_conversation_continues_from_the_cache() {
    let model = open_model("phi3-longrope");
    let settings = settings(Sampling::default(), 6);
    let mut session = open(&model, None, sizes(1, None), 1);
    let mut ids = vec![9, 8, 7, 6];
    for turn in 0..3 {
        let (got, timing) = session.continue_sequence(&ids, &settings, |_| true).unwrap();
        let mut fresh = open(&model, None, sizes(1, None), 1);
        assert_eq!(fresh.continue_sequence(&ids, &settings, |_| true).unwrap().0, got, "turn {turn}");
        // The last token of an answer has not been computed when the answer ends.
        assert_eq!(timing.prompt_tokens, if turn == 0 { 4 } else { 3 }, "turn {turn}");
        ids.extend(&got.ids);
        ids.extend([1, 2]);
    }
    let changed = [9, 8, 7, 5, 5];
    let (got, timing) = session.continue_sequence(&changed, &settings, |_| true).unwrap();
    assert_eq!(timing.prompt_tokens, 2);
    let mut fresh = open(&model, None, sizes(1, None), 1);
    assert_eq!(fresh.continue_sequence(&changed, &settings, |_| true).unwrap().0, got);
}

#[test]
fn beam_searches_are_those_of_transformers() {
    let cases: Vec<Json> =
        serde_json::from_slice(&std::fs::read(fixture("beams/cases.json")).unwrap()).unwrap();
    let model = open_model("llama-gqa-tied");
    let ids = |value: &Json| value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let mut session = open(&model, None, sizes(4, Some(60)), 1);
    for (number, case) in cases.iter().enumerate() {
        let (prompt, mut want): (Vec<u32>, Vec<u32>) = (ids(&case["prompt"]), ids(&case["text"]));
        let ending = case["ending"].as_u64().unwrap() as u32;
        let settings = BeamSettings {
            beams: case["beams"].as_u64().unwrap() as usize,
            max_new: case["max_new"].as_u64().unwrap() as usize,
            length_penalty: 1.0,
            stop_ids: BTreeSet::from([ending]),
        };
        let got = session.search_beams(&prompt, &settings).unwrap();
        if let StoppedBy::Token(id) = got.stopped_by {
            assert_eq!(want.pop(), Some(id), "case {number}: {:?}", got.ids);
        }
        assert_eq!(got.ids, want, "case {number}");
    }
}

#[test]
fn a_refusal_offers_the_longest_context_that_fits() {
    let model = open_model("llama-gqa-tied");
    let opening = |context: Option<usize>, budget_bytes: u64| {
        let sizes = Sizes { context, budget: stated(budget_bytes), ..sizes(1, None) };
        let opening = opening(&model, None, sizes);
        TokenSession::open(&opening, opening.place.open(opening.threads, opening.arithmetic).unwrap(), |_| {
            Ok(())
        })
        .map(|session| (session.planned_bytes(), session.shape().positions))
    };
    let (mut whole, longest) = opening(None, 1 << 30).unwrap();
    // The solver moves weights to disk before it shortens the context.
    let refused = loop {
        match opening(Some(longest), whole - 1) {
            Ok((less, _)) => whole = less,
            Err(refused) => break refused,
        }
    };
    let hint = &refused.hints[0];
    let offered: usize = hint.trim_start_matches("`--context ").split('`').next().unwrap().parse().unwrap();
    let (bytes, context) = opening(Some(offered), whole - 1).unwrap();
    assert!(bytes < whole && context == offered && offered < longest, "{hint}");
    assert!(opening(Some(offered + 8), bytes).is_err(), "the offer is the longest");
    let (bytes, open) = opening(None, whole - 1).unwrap();
    assert!(bytes < whole && (SHORTEST..=offered).contains(&open), "left open, weights stay: {open}");
    assert!(opening(None, 1 << 20).unwrap_err().hints[0].starts_with("no context fits"));
    assert!(opening(Some(1 << 20), 1 << 40).unwrap_err().message.contains("more than the model's maximum"));
}

/// In f32 a GPU differs only in the order of sums, so greedy texts are the same. All models run on one device, one
/// after the other.
#[test]
#[ignore = "needs a GPU"]
fn cuda_generates_as_the_cpu_does() {
    let _alone = crate::plan::devices::alone();
    let mut place = JobDevice::detect(DeviceChoice::Cuda(0)).unwrap();
    let arithmetic = place.arithmetic(Compute::F32);
    let mut device = place.open_and_measure(1, arithmetic).unwrap();
    let mut largest_bytes = 0;
    for name in FAMILIES {
        let model = open_model(name);
        let adapter = AdapterFile::open(&fixture(name).join("adapter")).ok();
        let prompts = prompts(crate::plan::model::read_decoder(&model).unwrap().vocabulary as u32);
        let want = by_recomputation(&model, adapter.as_ref(), &prompts);
        let opening =
            Opening { place: &place, arithmetic, ..opening(&model, adapter.as_ref(), sizes(2, Some(50))) };
        let mut session =
            TokenSession::open(&opening, device, |_| Ok(())).unwrap_or_else(|error| panic!("{error}"));
        let got = session.generate_batch(&prompts, &settings(Sampling::default(), 9), |_, _| {}).unwrap();
        let texts: Vec<Vec<u32>> = got.into_iter().map(|generated| generated.ids).collect();
        assert_eq!(texts, want, "{name}");
        // The memory of one model is freed before the next one reserves any.
        largest_bytes = session.planned_bytes().max(largest_bytes);
        let measured_bytes = session.measured_bytes().unwrap();
        assert!(measured_bytes <= largest_bytes, "{name}: {measured_bytes} of {largest_bytes}");
        device = session.into_device();
    }
}

/// If not all weights fit, only as many as necessary are offloaded.
#[test]
fn a_generation_offloads_what_it_must() {
    let place = JobDevice::Cuda { ordinal: 0, facts: None, context_bytes: Some(300 << 20) };
    let arithmetic = place.arithmetic(Compute::Auto);
    let model = Shape::find("qwen2.5-7b").unwrap().model();
    let roomy = sizes(1, None);
    let request = Opening { place: &place, arithmetic, ..opening(&model, None, roomy) }.request().unwrap();
    let fetched_layers = |budget_bytes: u64| {
        let budget = JobBudget { bytes: budget_bytes, ..roomy.budget };
        let planned = plan_generation(&request, &model, &place, &Sizes { budget, ..roomy }).unwrap();
        assert!(planned.peak_bytes <= budget_bytes);
        let steps = planned.plan.entry(Entry::Decode).steps.iter();
        let fetched: BTreeSet<usize> =
            steps.filter(|step| step.op == Op::Fetch).filter_map(|step| step.layer).collect();
        (fetched.len(), planned.peak_bytes)
    };
    let (none, resident_bytes) = fetched_layers(u64::MAX);
    assert_eq!(none, 0);
    let (some, _) = fetched_layers(resident_bytes - (2 << 30));
    let (more, _) = fetched_layers(resident_bytes / 2);
    assert!(0 < some && some < more && more < 28, "{some} and {more} of 28 layers");
}

/// Planning a generation for a GPU needs neither the GPU nor weights.
#[test]
fn a_generation_is_planned_without_the_gpu() {
    let measured = 300 << 20;
    let place = JobDevice::Cuda { ordinal: 1, facts: None, context_bytes: Some(measured) };
    let arithmetic = place.arithmetic(Compute::Auto);
    for name in FAMILIES {
        let model = open_model(name);
        let adapter = AdapterFile::open(&fixture(name).join("adapter")).ok();
        let opening =
            Opening { place: &place, arithmetic, ..opening(&model, adapter.as_ref(), sizes(2, None)) };
        let request = opening.request().unwrap();
        let planned = plan_generation(&request, &model, &place, &opening.sizes).unwrap();
        assert_eq!(
            (planned.plan.device, planned.plan.precision),
            (DeviceKind::Cuda, Precision::Bf16),
            "{name}"
        );
        assert_eq!(verify::plan(&planned.plan), Vec::<String>::new(), "{name}");
        assert!((measured..measured + (16 << 20)).contains(&planned.context_bytes), "{name}");
        assert_eq!(planned.rows().iter().map(|(_, bytes)| bytes).sum::<u64>(), planned.peak_bytes, "{name}");
        let table = crate::report::generation_table::render_generation_table(&planned);
        assert!(table.lines().next().unwrap().ends_with(" · cuda:1 (not found on this machine)"), "{table}");
        assert!(table.contains("driver "), "{table}");
        // Keys and values take half as much memory as on the CPU, because an element has half the bytes.
        let cpu = Request { device: DeviceKind::Cpu, precision: Precision::F32, ..request.clone() };
        let cpu = plan_generation(&cpu, &model, &JobDevice::Cpu, &opening.sizes).unwrap();
        let caches = |plan: &smidgen_ir::Plan| {
            let logits = plan.value(plan.leaf_named(state::DECODED_LOGITS).unwrap()).buffer.unwrap();
            crate::plan::generation::cache_bytes(plan) - plan.buffer(logits).bytes
        };
        assert_eq!(2 * caches(&planned.plan), caches(&cpu.plan), "{name}");
    }
}
