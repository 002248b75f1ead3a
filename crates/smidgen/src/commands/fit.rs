//! `smidgen fit`: the smallest budget, GPU and number of ranks for a recipe, and the largest values that fit a budget.
//!
//! The longest sample, highest rank and largest micro-batch are for the recipe's own model; known shapes are tried with
//! the recipe's adapter, storage and length. Every answer is checked by a plan: it fits, and the next larger value does
//! not.
//! Left out: the data; every sample is assumed to have `max_tokens` tokens.

use super::fit_models;
use super::recipe_args::{read_recipe, working_directory};
use crate::console::colour::{bad, good};
use crate::console::downloads::hub_access;
use crate::console::progress::CountedProgress;
use crate::console::stdout::{print_json, print_text};
use crate::failure::Failure;
use crate::plan::advice::with_rank;
use crate::plan::budget::free_budget;
use crate::plan::conditions::Conditions;
use crate::plan::demand::{DemandShape, samples_at_once};
use crate::plan::facts::MemoryFacts;
use crate::plan::job::{Job, Profiles, Purpose};
use crate::plan::planning::plan_without_advice;
use crate::plan::rank_layout::RankLayout;
use crate::plan::shapes::Shape;
use serde_json::{Value, json};
use smidgen_compile::cards::{CARDS, Card};
use smidgen_compile::{Budget, Demand, Request, Solution, largest};
use smidgen_hub::Access;
use smidgen_ir::DeviceKind;
use smidgen_ir::bytes::format_bytes;
use smidgen_recipe::{Budget as RecipeBudget, DeviceChoice, ModelPath, ProfileChoice, Recipe};
use smidgen_runtime::cuda::gpu_generation::LEAST_WITH_BF16;
use std::cmp::Ordering;
use std::path::Path;
use textwrap::core::display_width;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The recipe, a TOML file [default: a table of known models]
    recipe: Option<String>,
    /// Keys of the recipe to override, as `section.key=value`
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Plan for this card, such as rtx-4090 [default: the recipe's, or the device of this machine]
    #[arg(long, value_name = "NAME")]
    card: Option<String>,
    /// Host memory for offloaded tensors, such as 64GiB [default: the recipe's; for a card by name 32GiB]
    #[arg(long, value_name = "SIZE")]
    ram: Option<String>,
    /// Device memory, such as 8GiB [default: the recipe's]
    #[arg(long)]
    budget: Option<String>,
    /// Without a recipe: only models whose name contains this text, such as qwen3
    #[arg(long, value_name = "TEXT")]
    models: Option<String>,
    /// Print the answers as JSON
    #[arg(long)]
    json: bool,
}

/// The longest sample is a multiple of this.
const TOKEN_STEP: usize = 64;

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let is_override = |text: &String| text.contains('=') && !Path::new(text).exists();
    let recipe = args.recipe.as_ref().filter(|recipe| !is_override(recipe));
    let first = args.recipe.iter().filter(|recipe| is_override(recipe));
    let mut overrides: Vec<String> = first.chain(&args.overrides).cloned().collect();
    let keys =
        [("memory.profile", &args.card), ("memory.host_budget", &args.ram), ("memory.budget", &args.budget)];
    overrides.extend(keys.iter().filter_map(|(key, value)| Some(format!("{key}={}", value.as_ref()?))));
    let Some(recipe) = recipe else {
        let answers = fit_models::answer(&overrides, args.models.as_deref(), &working_directory()?, quiet)?;
        let text = || fit_models::render(&answers);
        return if args.json { print_json(&format!("{answers:#}\n")) } else { print_text(&text()) };
    };
    if args.models.is_some() {
        return Err(Failure::command("`--models` chooses from the known models, and a recipe names its own"));
    }
    let (_, recipe) = read_recipe(Path::new(recipe), &overrides)?;
    let access = hub_access(quiet);
    let job = Job::prepare_with(without_data(&recipe), Purpose::Plan, &access)?;
    let answers = answer(&job, &recipe, &access, quiet)?;
    if args.json { print_json(&format!("{answers:#}\n")) } else { print_text(&render(&answers)) }
}

fn without_data(recipe: &Recipe) -> Recipe {
    let mut recipe = recipe.clone();
    recipe.data.train.clear();
    recipe.data.eval.clear();
    recipe.data.mix.clear();
    recipe.data.split = 0.0;
    recipe.train.eval_every = 0;
    recipe.train.early_stop = 0;
    recipe
}

fn answer(job: &Job, recipe: &Recipe, access: &Access, quiet: bool) -> Result<Value, Failure> {
    let progress = CountedProgress::new("searching", 5 + Shape::few().count(), quiet);
    let planned = plan_without_advice(job)?;
    let conditions = Conditions::of(job, &MemoryFacts::of(job))?;
    let demands = DemandShape::of(job, None)?.demands;
    let peak_bytes = |solution: Result<Solution, _>| solution.map_or(0, |solution| solution.peak_bytes);
    let context = job.request.spec.max_positions;
    let fitting = conditions.fitting(&job.request);
    let fits = |steps: usize, look| fitting.fits(&samples_at_once(1, TOKEN_STEP * steps), look);
    let max_tokens = largest(context / TOKEN_STEP, fits).map_or(0, |steps| steps * TOKEN_STEP);
    let smallest = demands.last().expect("there is a size of micro-batch");
    let most = job.request.spec.hidden;
    let fits = |rank: usize, look| fitting.fits_with(&with_rank(&job.request, rank), smallest, look);
    progress.done(1);
    let rank = largest(most, fits).unwrap_or(0);
    progress.done(2);
    let has_rank = !job.request.adapters.is_empty();
    let at_once = |samples: usize| samples_at_once(samples, recipe.data.max_tokens);
    let samples = largest(MOST_SAMPLES, |count, look| fitting.fits(&at_once(count), look)).unwrap_or(0);
    progress.done(3);
    let smallest_card = smallest_card(recipe, access);
    progress.done(4);
    let ranks = ranks_needed(recipe, access)?;
    progress.done(5);
    let mut models = Vec::new();
    for (number, shape) in Shape::few().enumerate() {
        models.push(fit_shape(shape, recipe)?);
        progress.done(6 + number);
    }
    models.sort_by_key(|model| model["parameters"].as_u64());
    let largest_model = models.iter().rev().find(|model| model["fits"] == json!(true));
    Ok(json!({
        "budget_bytes": planned.budget_bytes,
        "recipe": {
            "title": planned.solution.plan.title,
            "fits": planned.fits,
            "peak_bytes": planned.solution.peak_bytes,
            "max_tokens": recipe.data.max_tokens,
            "rank": has_rank.then_some(recipe.adapter.rank),
            "needs_bytes": least_bytes(&conditions, &job.request, &demands),
        },
        "smallest_card": smallest_card,
        "ranks": ranks,
        "batch": {
            "most_at_once": samples,
            "peak_bytes": peak_bytes(conditions.solve(&job.request, &[at_once(samples.max(1))])),
        },
        "max_tokens": {
            "most": max_tokens,
            "peak_bytes": peak_bytes(conditions.solve(&job.request, &[samples_at_once(1, max_tokens.max(1))])),
            "model_has": context,
        },
        "rank": has_rank.then(|| json!({
            "most": rank,
            "model_has": most,
            "peak_bytes": peak_bytes(conditions.solve(&with_rank(&job.request, rank.max(1)), std::slice::from_ref(smallest))),
        })),
        "largest_model": largest_model.map(|model| model["name"].clone()),
        "models": models,
    }))
}

/// The search for the largest micro-batch ends at this many samples.
const MOST_SAMPLES: usize = 4096;

/// The smallest budget that one of the demands fits in.
fn least_bytes(conditions: &Conditions, request: &Request, demands: &[Demand]) -> u64 {
    let budget = Budget { device_bytes: 1, ..conditions.budget };
    let solved = Conditions { budget, ..conditions.clone() }.solve(request, demands);
    solved.map_or_else(|error| error.leanest.peak_bytes, |solution| solution.peak_bytes)
}

/// The built-in GPU with the least memory that the recipe fits on, with its predicted speed; null if there is none.
fn smallest_card(recipe: &Recipe, access: &Access) -> Value {
    let with_profile = |name: &str| {
        let mut recipe = without_data(recipe);
        recipe.memory.profile = ProfileChoice::Named(name.to_owned());
        (recipe.memory.device, recipe.memory.budget) = (DeviceChoice::Auto, RecipeBudget::Auto);
        Job::prepare_with(recipe, Purpose::Plan, access)
    };
    let mut all: Vec<&Card> = CARDS.iter().collect();
    // Among cards with the same memory (in whole GiB), slower ones come first.
    all.sort_by(|one, other| {
        let size = |card: &Card| (card.memory_bytes() >> 30, card.half_tflops);
        size(one).partial_cmp(&size(other)).unwrap_or(Ordering::Equal)
    });
    let least_of = |job: Job| {
        let demands = DemandShape::of(&job, None)?.demands;
        let conditions = Conditions::of(&job, &MemoryFacts::of(&job))?;
        Ok::<u64, Failure>(least_bytes(&conditions, &job.request, &demands))
    };
    // The memory that a run needs depends on its precision, and the precision only on whether the card has bf16.
    let least_with = |has_bf16: bool| {
        let card = CARDS.iter().find(|card| has_bf16 == (card.capability >= LEAST_WITH_BF16))?;
        with_profile(card.name).and_then(least_of).ok()
    };
    let (older, newer) = (least_with(false), least_with(true));
    let needs = |card: &Card| if card.capability < LEAST_WITH_BF16 { older } else { newer };
    let has_room = |card: &&Card| {
        needs(card).is_some_and(|bytes| free_budget(DeviceKind::Cuda, card.memory_bytes()).bytes >= bytes)
    };
    let Some(card) = all.into_iter().find(has_room) else { return Value::Null };
    let needs_bytes = needs(card);
    let planned = with_profile(card.name).and_then(|job| plan_without_advice(&job));
    planned.map_or(Value::Null, |planned| {
        json!({
            "name": card.name,
            "memory_bytes": card.memory_bytes(),
            "needs_bytes": needs_bytes,
            "peak_bytes": planned.solution.peak_bytes,
            "tokens_per_s": planned.speed().map(|speed| speed.tokens_per_s),
        })
    })
}

/// The numbers of ranks to try.
const RANKS: [usize; 4] = [1, 2, 4, 8];

/// The number of ranks that the recipe needs if each has the budget, and what they shard. Null if eight are too few, or
/// if a step has fewer samples than ranks.
fn ranks_needed(recipe: &Recipe, access: &Access) -> Result<Value, Failure> {
    for count in RANKS {
        let recipe = without_data(recipe);
        let Ok(world) = RankLayout::asked_for(count, 1, &recipe) else { break };
        let planned = plan_without_advice(&Job::prepare_in(world, recipe, Purpose::Plan, access)?)?;
        if planned.fits {
            return Ok(json!({
                "needed": count,
                "shard": json!(planned.solution.policy)["shard"],
                "peak_bytes": planned.solution.peak_bytes,
                "tokens_per_s": planned.speed().map(|speed| speed.tokens_per_s),
            }));
        }
    }
    Ok(Value::Null)
}

/// Plans the recipe with a model of a known shape.
fn fit_shape(shape: &Shape, recipe: &Recipe) -> Result<Value, Failure> {
    let mut recipe = without_data(recipe);
    recipe.model.path = ModelPath::folder(Path::new(shape.name));
    let planned = Job::prepare_model(recipe, shape.model(), Profiles::Measured)
        .and_then(|job| Ok((plan_without_advice(&job)?, job)));
    let name = shape.name;
    Ok(match planned {
        Ok((planned, job)) => json!({
            "name": name,
            "parameters": job.request.spec.parameters(),
            "fits": planned.fits,
            "peak_bytes": planned.solution.peak_bytes,
            "tokens_per_s": planned.speed().map(|speed| speed.tokens_per_s),
        }),
        // The recipe's targets may not be names of its linear layers.
        Err(failure) => json!({ "name": name, "parameters": 0, "fits": false, "error": failure.message }),
    })
}

fn render(answers: &Value) -> String {
    let bytes = |value: &Value| value.as_u64().map_or_else(String::new, format_bytes);
    let recipe = &answers["recipe"];
    let mut text = format!(
        "{} · budget {}\n",
        recipe["title"].as_str().unwrap_or_default(),
        bytes(&answers["budget_bytes"])
    );
    let mut row = |question: &str, answer: String, peak: &Value| {
        let space = " ".repeat(14usize.saturating_sub(display_width(&answer)));
        text += &format!("  {question:<34}{space}{answer}   {:>12}\n", bytes(peak));
    };
    let verdict = |fits: &Value| if *fits == json!(true) { good("fits") } else { bad("does not fit") };
    row("the recipe", verdict(&recipe["fits"]), &recipe["peak_bytes"]);
    row("smallest `memory.budget`", String::new(), &recipe["needs_bytes"]);
    let card = &answers["smallest_card"];
    let name = card["name"].as_str().unwrap_or("none").to_owned();
    row("smallest built-in card", name, &card["peak_bytes"]);
    let ranks = &answers["ranks"];
    let needed = match (ranks["needed"].as_u64(), ranks["shard"].as_str()) {
        (None, _) => "no number up to 8".to_owned(),
        (Some(count), None | Some("none")) => count.to_string(),
        (Some(count), Some(shard)) => format!("{count} ({shard})"),
    };
    if recipe["fits"] != json!(true) {
        row("ranks with this budget each", needed, &ranks["peak_bytes"]);
    }
    let batch = &answers["batch"];
    row("largest micro-batch, in samples", batch["most_at_once"].to_string(), &batch["peak_bytes"]);
    let longest = &answers["max_tokens"];
    let most = if longest["most"].as_u64() == longest["model_has"].as_u64() {
        format!("{} (all)", longest["most"])
    } else {
        longest["most"].to_string()
    };
    row("longest `data.max_tokens`", most, &longest["peak_bytes"]);
    if let Some(most) = answers["rank"]["most"].as_u64() {
        row("highest `adapter.rank`", most.to_string(), &answers["rank"]["peak_bytes"]);
    }
    for model in answers["models"].as_array().into_iter().flatten() {
        let verdict = match &model["error"] {
            Value::String(_) => "other layer names".to_string(),
            _ => verdict(&model["fits"]),
        };
        let name = format!("with the model {}", model["name"].as_str().unwrap_or_default());
        row(&name, verdict, &model["peak_bytes"]);
    }
    text
}
