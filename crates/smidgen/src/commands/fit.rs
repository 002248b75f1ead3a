//! `smidgen fit`: the longest samples, the highest rank and the largest model that fit a budget.
//!
//! Length and rank are for the recipe's own model; the known shapes are tried with the recipe's adapter, storage and
//! length. Every answer is a plan: it fits, and the next larger value does not.
//! Left out: the data; every sample is assumed to have `max_tokens` tokens.

use super::recipe_args::{RecipeArgs, read_recipe};
use crate::bench::shapes::{SHAPES, Shape};
use crate::console::colour::{bad, good};
use crate::console::stdout::{print, print_text};
use crate::failure::Failure;
use crate::hub::Access;
use crate::plan::advice::{largest, one_sample, with_rank};
use crate::plan::demand::DemandShape;
use crate::plan::job::{Job, Purpose};
use crate::plan::planning::plan_job;
use crate::plan::terms::Terms;
use serde_json::{Value, json};
use smidgen_compile::Solution;
use smidgen_ir::bytes::format_bytes;
use smidgen_recipe::{ModelPath, Recipe};
use std::path::Path;
use textwrap::core::display_width;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Device memory, such as 8GiB [default: the recipe's]
    #[arg(long)]
    budget: Option<String>,
    /// Print the answers as JSON
    #[arg(long)]
    json: bool,
}

/// Granularity of the longest sample.
const TOKEN_STEP: usize = 64;

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let mut overrides = args.recipe.overrides.clone();
    overrides.extend(args.budget.iter().map(|budget| format!("memory.budget={budget}")));
    let (_, recipe) = read_recipe(&args.recipe.recipe, &overrides)?;
    let access = Access::from_environment(quiet);
    let job = Job::prepare_with(assumed(&recipe), Purpose::Plan, &access)?;
    let answers = answer(&job, &recipe, &access)?;
    match args.json {
        true => print(&format!("{answers:#}\n")),
        false => print_text(&render(&answers)),
    }
}

/// The recipe without its data.
fn assumed(recipe: &Recipe) -> Recipe {
    let mut recipe = recipe.clone();
    recipe.data.train.clear();
    recipe.data.eval.clear();
    recipe.data.mix.clear();
    recipe.data.split = 0.0;
    recipe.train.eval_every = 0;
    recipe.train.early_stop = 0;
    recipe
}

fn answer(job: &Job, recipe: &Recipe, access: &Access) -> Result<Value, Failure> {
    let planned = plan_job(job)?;
    let terms = Terms::of(job)?;
    let demands = DemandShape::of(job, None)?.demands;
    let one = |solution: Result<Solution, _>| solution.ok().map_or(0, |solution| solution.peak_bytes);
    let context = job.request.spec.max_positions;
    let fits = |steps: usize| terms.can_fit(&job.request, &one_sample(TOKEN_STEP * steps, 1));
    let max_tokens = largest(context / TOKEN_STEP, fits).map_or(0, |steps| steps * TOKEN_STEP);
    let smallest = demands.last().expect("there is a size of micro-batch");
    let most = job.request.spec.hidden;
    let rank = largest(most, |rank| terms.can_fit(&with_rank(&job.request, rank), smallest)).unwrap_or(0);
    let has_rank = job.request.trained.is_empty();
    let mut models = Vec::new();
    for shape in &SHAPES {
        models.push(fit_shape(shape, recipe, access)?);
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
        },
        "max_tokens": {
            "most": max_tokens,
            "peak_bytes": one(terms.solve(&job.request, &[one_sample(max_tokens.max(1), 1)])),
            "model_has": context,
        },
        "rank": has_rank.then(|| json!({
            "most": rank,
            "model_has": most,
            "peak_bytes": one(terms.solve(&with_rank(&job.request, rank.max(1)), std::slice::from_ref(smallest))),
        })),
        "largest_model": largest_model.map(|model| model["name"].clone()),
        "models": models,
    }))
}

/// A model of a known shape under the recipe.
fn fit_shape(shape: &Shape, recipe: &Recipe, access: &Access) -> Result<Value, Failure> {
    let mut recipe = assumed(recipe);
    recipe.model.path = ModelPath::folder(Path::new(shape.name));
    let planned = Job::prepare_model(recipe, shape.model(), Purpose::Plan, access)
        .and_then(|job| Ok((plan_job(&job)?, job)));
    let name = shape.name;
    Ok(match planned {
        Ok((planned, job)) => json!({
            "name": name,
            "parameters": job.request.spec.parameters(),
            "fits": planned.fits,
            "peak_bytes": planned.solution.peak_bytes,
            "tokens_per_s": planned.step_tokens / (planned.solution.step_ms / 1e3),
        }),
        // Its linear layers may have other names than the recipe's targets.
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
    let longest = &answers["max_tokens"];
    let most = match longest["most"].as_u64() == longest["model_has"].as_u64() {
        true => format!("{} (all)", longest["most"]),
        false => longest["most"].to_string(),
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
