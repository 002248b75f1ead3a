//! `smidgen fit` without a recipe: which known models a device trains, how, how fast, and with what length of samples.
//!
//! Every known shape is planned with 4-bit weights and LoRA (QLoRA), with LoRA on weights as published, and with all
//! weights trained. Speed and memory are those of a plan with one sample or the whole step as a micro-batch, found without
//! a whole search: `plan` may find a faster one. The longest sample is a power of two, or the whole context, and was shown to fit by a plan.
//! Overrides change the recipe that is planned, such as `adapter.rank=64`.

use crate::console::columns::{Side, render_columns};
use crate::console::progress::CountedProgress;
use crate::failure::Failure;
use crate::machine::host;
use crate::plan::conditions::{Conditions, HOST_OF_A_CARD_BYTES};
use crate::plan::demand::{DemandShape, samples_at_once};
use crate::plan::facts::MemoryFacts;
use crate::plan::job::{Job, Profiles};
use crate::plan::planning::host_bytes;
use crate::plan::shapes::{SHAPES, Shape, names};
use crate::report::numbers::duration;
use serde::Serialize;
use serde_json::{Value, json};
use smidgen_compile::{Demand, Look};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::grouped_digits::Grouped;
use smidgen_ir::{DeviceKind, Extent};
use smidgen_recipe::{AdapterKind, BaseFormat, Batch, Budget, ModelPath, Recipe};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

/// How a model is trained: the name, the storage of frozen weights, and what is trained.
const METHODS: [(&str, BaseFormat, AdapterKind); 3] = [
    ("QLoRA", BaseFormat::Nf4, AdapterKind::Lora),
    ("LoRA", BaseFormat::AsStored, AdapterKind::Lora),
    ("full", BaseFormat::AsStored, AdapterKind::Full),
];
/// Samples of a step, and their tokens, unless overrides say otherwise.
const BATCH: usize = 8;
const MAX_TOKENS: usize = 2048;
/// The shortest sample that a search for the longest tries.
const SHORTEST: usize = 256;

/// What one model needs and reaches when it is trained one way.
#[derive(Clone, Debug, Serialize)]
struct Fit {
    name: &'static str,
    /// What `model.path` calls it.
    path: &'static str,
    parameters: u64,
    method: &'static str,
    /// The tokens of the longest sample that fits, and whether the model has no longer ones.
    longest: usize,
    is_whole_context: bool,
    /// Of samples with `max_tokens` tokens, or with `longest` if that is shorter.
    max_tokens: usize,
    peak_bytes: u64,
    /// Host memory on a machine with a GPU.
    host_bytes: Option<u64>,
    tokens_per_s: Option<f64>,
    seconds_per_million_tokens: Option<f64>,
}

/// The answers for every known model. `overrides` change the recipe; relative paths in them start at `folder`.
pub fn answer(
    overrides: &[String],
    models: Option<&str>,
    folder: &Path,
    quiet: bool,
) -> Result<Value, Failure> {
    let mut recipe = Recipe::new(ModelPath::folder(Path::new("a model")));
    recipe.train.batch = Batch::Samples(BATCH);
    recipe.data.max_tokens = MAX_TOKENS;
    for text in overrides {
        let (key, value) = text
            .split_once('=')
            .ok_or_else(|| Failure::command(format!("`{text}` is not of the form `section.key=value`")))?;
        if ["model.path", "model.base", "adapter.kind"].contains(&key) {
            return Err(Failure::command(format!("`{key}`: without a recipe, `fit` tries all of them"))
                .hint("`smidgen fit RECIPE` asks about one model"));
        }
        recipe.set(key, value, folder).map_err(Failure::recipe)?;
    }
    let is_wanted = |shape: &&Shape| models.is_none_or(|text| shape.name.contains(&text.to_lowercase()));
    let shapes: Vec<&Shape> = SHAPES.iter().filter(is_wanted).collect();
    let Some(smallest) = shapes.first() else {
        let text = models.unwrap_or_default();
        return Err(Failure::command(format!("`--models {text}`: no known model has this in its name"))
            .hint(format!("known models: {}", names())));
    };
    // A device or a value that is refused is refused before the search.
    let first = prepare(&recipe, smallest, METHODS[0])?;
    let questions: Vec<_> = shapes.iter().flat_map(|shape| METHODS.map(|method| (*shape, method))).collect();
    let progress = CountedProgress::new("planning known models", questions.len(), quiet);
    let mut fits: Vec<(usize, Fit)> = Vec::new();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (sender, answers) = channel();
        for _ in 0..host::processors() {
            let (sender, next, questions, recipe) = (sender.clone(), &next, &questions, &recipe);
            scope.spawn(move || {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some((shape, method)) = questions.get(number) else { break };
                    // The receiver is gone only if it panicked.
                    let _ = sender.send((number, fit(recipe, shape, *method)));
                }
            });
        }
        drop(sender);
        for (done, (number, answer)) in answers.iter().enumerate() {
            fits.extend(answer?.map(|fit| (number, fit)));
            progress.done(done + 1);
        }
        Ok::<(), Failure>(())
    })?;
    fits.sort_by_key(|(number, _)| *number);
    let fits: Vec<Fit> = fits.into_iter().map(|(_, fit)| fit).collect();
    let is_left = |shape: &&&Shape| !fits.iter().any(|fit| fit.name == shape.name);
    let conditions = Conditions::of(&first, &MemoryFacts::of(&first))?;
    Ok(json!({
        "device": first.place.describe(),
        "budget_bytes": first.budget.bytes,
        "offload_limit_bytes": Some(conditions.budget.offload_bytes).filter(|limit| *limit < u64::MAX),
        "is_host_assumed": conditions.budget.offload_bytes == HOST_OF_A_CARD_BYTES
            && recipe.memory.host_budget == Budget::Auto,
        "profile": first.profile.render_json(),
        "predicted_by": first.profile.describe(),
        "rank": recipe.adapter.rank,
        "batch": samples(&recipe),
        "max_tokens": recipe.data.max_tokens,
        "fits": fits,
        "does_not_fit": shapes.iter().filter(is_left).map(|shape| shape.name).collect::<Vec<_>>(),
    }))
}

/// Samples of a step.
fn samples(recipe: &Recipe) -> usize {
    match recipe.train.batch {
        Batch::Samples(samples) => samples,
        Batch::Tokens(tokens) => (tokens / recipe.data.max_tokens).max(1),
    }
}

fn prepare(
    recipe: &Recipe,
    shape: &Shape,
    (_, base, kind): (&str, BaseFormat, AdapterKind),
) -> Result<Job, Failure> {
    let mut recipe = recipe.clone();
    recipe.model.path = ModelPath::folder(Path::new(shape.name));
    (recipe.model.base, recipe.adapter.kind) = (base, kind);
    Job::prepare_model(recipe, shape.model(), Profiles::Measured)
}

/// `None` if not even short samples fit, or the model cannot be trained like this.
fn fit(
    recipe: &Recipe,
    shape: &'static Shape,
    method: (&'static str, BaseFormat, AdapterKind),
) -> Result<Option<Fit>, Failure> {
    // The first shape was accepted, so this model cannot be trained in this way.
    let Ok(mut job) = prepare(recipe, shape, method) else { return Ok(None) };
    let conditions = Conditions::of(&job, &MemoryFacts::of(&job))?;
    let context = job.request.spec.max_positions;
    // Weights alone that exceed all memory need no search.
    let weights = job.request.spec.tensors().into_iter().map(|tensor| {
        let (rows, columns) = tensor.shape.at(&Extent::default());
        job.request.storage_of(&tensor.name).bytes(rows, columns) as u64
    });
    let memory_bytes = conditions.budget.device_bytes.saturating_add(conditions.budget.offload_bytes);
    if weights.sum::<u64>() > memory_bytes {
        return Ok(None);
    }
    let fitting = conditions.fitting(&job.request);
    // Powers of two below the context, and the context.
    let length = |power: usize| (SHORTEST << (power - 1)).min(context);
    let powers: Vec<usize> = (1..).take_while(|power| *power == 1 || length(power - 1) < context).collect();
    let one_of = |power: &usize| samples_at_once(1, length(*power));
    let mut fitting_powers = powers.partition_point(|power| fitting.fits(&one_of(power), Look::Quick));
    if fitting_powers == 0 {
        // The policy that is usually the leanest offloads everything, which may be more than the host has room for.
        let has_plan = |power: &usize| conditions.fits_with_little_offloaded(&job.request, one_of(power));
        fitting_powers = powers.partition_point(has_plan);
    }
    if fitting_powers == 0 {
        return Ok(None);
    }
    let longest = length(fitting_powers);
    job.recipe.data.max_tokens = job.recipe.data.max_tokens.min(longest);
    let steps = DemandShape::of(&job, None)?;
    // The longest sample fits alone, so a shorter one does, unless a step of several needs more host memory.
    let (all, one) = (steps.demands.first(), steps.demands.last());
    let mut demands: Vec<Demand> = all.into_iter().chain(one).copied().collect();
    demands.dedup();
    let Some(solution) = conditions.solve_quickly(&job.request, &demands) else { return Ok(None) };
    let tokens_per_s = job.profile.has_rates().then(|| steps.all_tokens / (solution.step_ms / 1e3));
    Ok(Some(Fit {
        name: shape.name,
        path: shape.published[0],
        parameters: shape.parameters(),
        method: method.0,
        longest,
        is_whole_context: longest == context,
        max_tokens: job.recipe.data.max_tokens,
        peak_bytes: solution.peak_bytes,
        host_bytes: (job.request.device == DeviceKind::Cuda).then(|| host_bytes(&job, &solution)),
        tokens_per_s,
        seconds_per_million_tokens: tokens_per_s.map(|tokens_per_s| 1e6 / tokens_per_s),
    }))
}

pub fn render(answers: &Value) -> String {
    let bytes = |value: &Value| value.as_u64().map_or_else(String::new, format_bytes);
    let host = match (answers["offload_limit_bytes"].as_u64(), answers["is_host_assumed"] == json!(true)) {
        (None, _) => String::new(),
        (Some(limit), true) => format!(
            " · up to {} of host memory (assumed for a card by name; `--ram` sets it)",
            format_bytes(limit)
        ),
        (Some(limit), false) => format!(" · up to {} of host memory", format_bytes(limit)),
    };
    let mut text = format!(
        "{} · budget {}{host}\nLoRA r={} on all linear layers, {} samples of {} tokens per step\n",
        answers["device"].as_str().unwrap_or_default(),
        bytes(&answers["budget_bytes"]),
        answers["rank"],
        answers["batch"],
        answers["max_tokens"],
    );
    let fits = answers["fits"].as_array().map(Vec::as_slice).unwrap_or_default();
    let has_host = fits.iter().any(|fit| !fit["host_bytes"].is_null());
    let headings: Vec<(&str, Side)> = [
        ("model", Side::Left),
        ("params", Side::Right),
        ("method", Side::Left),
        ("longest", Side::Right),
        ("tokens/s", Side::Right),
        ("device", Side::Right),
        ("host", Side::Right),
        ("1M tokens", Side::Right),
    ]
    .into_iter()
    .filter(|(heading, _)| has_host || *heading != "host")
    .collect();
    let mut before = "";
    let rows = fits.iter().map(|fit| {
        let (name, is_first) = (fit["name"].as_str().unwrap_or_default(), fit["name"] != before);
        before = name;
        let once = |text: String| if is_first { text } else { String::new() };
        let number = |key: &str, text: fn(f64) -> String| fit[key].as_f64().map_or("-".to_owned(), text);
        let cells = [
            once(name.to_owned()),
            once(number("parameters", parameters)),
            fit["method"].as_str().unwrap_or_default().to_owned(),
            number("longest", |tokens| Grouped(tokens as u64).to_string()),
            number("tokens_per_s", |rate| Grouped(rate.round() as u64).to_string()),
            number("peak_bytes", gib),
            number("host_bytes", gib),
            number("seconds_per_million_tokens", duration),
        ];
        cells.into_iter().enumerate().filter(|(column, _)| has_host || *column != 6).map(|(_, cell)| cell)
    });
    let rows: Vec<Vec<String>> = rows.map(Iterator::collect).collect();
    text += &render_columns(&headings, &rows);
    let names: Vec<&str> =
        answers["does_not_fit"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if !names.is_empty() {
        text += &format!("  does not fit: {}\n", names.join(", "));
    }
    text += &format!(
        "  longest: tokens of the longest sample that fits; device and host: memory in GiB\n  predicted by {}\n  `smidgen plan RECIPE model.path=NAME` has the plan of each, without a download\n",
        answers["predicted_by"].as_str().unwrap_or_default()
    );
    text
}

/// `7.6B`, `135M`.
fn parameters(count: f64) -> String {
    if count >= 1e9 { format!("{:.1}B", count / 1e9) } else { format!("{:.0}M", count / 1e6) }
}

fn gib(bytes: f64) -> String {
    format!("{:.1}", bytes / (1u64 << 30) as f64)
}
