//! `smidgen eval RECIPE|RUN`: the evaluation rows of a recipe, scored by the base model and by the trained one.
//!
//! The two models run one after the other, with plans of the same sizes. Their scores go to stdout, the budget table of
//! `--plan` to stderr, and the record of every row to a file: the file of `--out`, or `eval.json` in the folder of a
//! run, which holds the last results of each task.

use super::original::{open_adapter, trained_model};
use super::recipe_args::read_recipe;
use crate::console::colour::NOTE;
use crate::console::downloads::hub_access;
use crate::console::progress;
use crate::console::stdout::{print_json, print_text};
use crate::eval::evaluation::{Evaluation, LargestPlan};
use crate::failure::Failure;
use crate::machine::host;
use crate::plan::artifact::Artifact;
use crate::plan::budget::budget_on;
use crate::plan::devices::JobDevice;
use crate::plan::job::check_compute;
use crate::plan::model::open_model;
use crate::report::evaluation_table::render_evaluation_table;
use crate::report::generation_table::render_generation_table;
use crate::report::score_table::render_score_table;
use serde_json::{Map, Value as Json};
use smidgen_formats::peft::AdapterFile;
use smidgen_formats::whole_file::write_whole;
use smidgen_hub::Want;
use smidgen_recipe::{BaseFormat, EvalTask, Init, ModelPath, Recipe};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// A recipe, or the folder of a run
    #[arg(value_name = "RECIPE|RUN")]
    target: PathBuf,
    /// Keys of the recipe to override, as `section.key=value`
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// The folder of the adapter, or of its run [default: the adapter of the run, or of the recipe's `output.dir`]
    #[arg(long, value_name = "DIR", conflicts_with = "base")]
    adapter: Option<PathBuf>,
    /// Evaluate only the base model
    #[arg(long)]
    base: bool,
    /// Task: loss, choice, generate or wer [default: the recipe's `eval.task`]
    #[arg(long)]
    task: Option<String>,
    /// Maximum rows (0 = all) [default: the recipe's `eval.limit`]
    #[arg(long, value_name = "ROWS")]
    limit: Option<usize>,
    /// Number of beams for `--task generate` (1 = greedy)
    #[arg(long, default_value_t = 1)]
    beams: usize,
    /// Print the budget table before the evaluation
    #[arg(long)]
    plan: bool,
    /// Print JSON with the record of each row, instead of the table
    #[arg(long)]
    json: bool,
    /// File for that JSON [default: `eval.json` in the folder of the run, under the name of the task]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    if args.beams == 0 {
        return Err(Failure::command("`--beams` must be at least 1"));
    }
    let say = |line: &str| {
        if !quiet {
            progress::say(line);
        }
    };
    let (mut recipe, run_folder) = read_target(args)?;
    if recipe.data.eval.is_empty() && recipe.data.split == 0.0 {
        return Err(Failure::recipe("nothing to evaluate: `data.eval` names no file")
            .hint("set it in the recipe or on the command line: `data.eval=test.json`"));
    }
    if args.beams > 1 && recipe.eval.task != EvalTask::Generate {
        return Err(Failure::command(format!(
            "`--beams` needs `--task generate`, the task is `{}`",
            recipe.eval.task
        )));
    }
    let made = evaluated_model(args, &recipe, run_folder.as_deref());
    if let Some(made) = &made {
        say(&format!("the run trained the base weights: evaluating `{}`", made.display()));
        (recipe.model.path, recipe.model.base) = (ModelPath::folder(made), BaseFormat::AsStored);
    }
    let mut model = open_model(&recipe.model.path, Want::Weights, &hub_access(quiet))?;
    if recipe.adapter.init == Init::BuiltinSpeech {
        model.stop_merging_speech();
    }
    if !model.has_weights() {
        let place = model.path().display();
        return Err(Failure::model(format!("`{place}` has a config but no weights")));
    }
    let adapter = match made {
        Some(_) => None,
        None => find_adapter(args, &recipe, run_folder.as_deref(), &say)?,
    };
    let mut place = JobDevice::find(recipe.memory.device, true)?;
    check_compute(recipe.model.compute, &place)?;
    let budget = budget_on(&place, recipe.memory.budget)?;
    let arithmetic = place.arithmetic(recipe.model.compute);
    let arithmetic = match recipe.eval.task {
        EvalTask::Loss | EvalTask::Choice => arithmetic,
        EvalTask::Generate | EvalTask::Wer => arithmetic.token_by_token(),
    };
    let threads = host::threads(recipe.memory.threads)?;
    // Opened before planning, because the plan includes the memory of the driver's context.
    let device = place.open_and_measure(threads, arithmetic)?;
    budget.note().into_iter().for_each(|note| say(&format!("{NOTE} {note}")));
    let evaluation = Evaluation {
        recipe: &recipe,
        model: &model,
        adapter: adapter.as_ref(),
        place: &place,
        arithmetic,
        threads,
        budget,
        beams: args.beams,
        access: &hub_access(quiet),
        quiet,
        say: &say,
        on_plan: &|plan| {
            let table = match plan {
                LargestPlan::Likelihood(plan, means) => render_evaluation_table(plan, means),
                LargestPlan::Generation(plan) => render_generation_table(plan),
            };
            if args.plan {
                say(table.trim_end());
            }
        },
    };
    let results = evaluation.run(device)?;
    let json = results.render_json();
    let text = format!("{json:#}\n");
    let out = match (&args.out, run_folder) {
        (Some(out), _) => Some((out.clone(), text.clone())),
        (None, Some(folder)) => {
            let out = folder.join("eval.json");
            let all = with_earlier_tasks(&out, &recipe.eval.task.to_string(), json);
            Some((out, format!("{all:#}\n")))
        }
        (None, None) => None,
    };
    if let Some((out, text)) = &out {
        write_whole(out, |file| file.write_all(text.as_bytes())).map_err(Failure::disk)?;
    }
    if args.json {
        print_json(&text)?;
    } else {
        print_text(&render_score_table(&results))?;
    }
    if let Some((out, _)) = out {
        say(&format!("results of each row are in `{}`", out.display()));
    }
    Ok(())
}

/// Adds the results of this task to those of other tasks in the file. A file from before 0.11 holds a single result,
/// which names its task.
fn with_earlier_tasks(path: &Path, task: &str, result: Json) -> Json {
    let earlier = std::fs::read_to_string(path).ok().and_then(|text| serde_json::from_str(&text).ok());
    let mut tasks = match earlier {
        Some(Json::Object(old)) => match old.get("task") {
            Some(Json::String(name)) => Map::from_iter([(name.clone(), Json::Object(old))]),
            _ => old,
        },
        _ => Map::new(),
    };
    tasks.insert(task.to_owned(), result);
    Json::Object(tasks)
}

fn read_target(args: &Args) -> Result<(Recipe, Option<PathBuf>), Failure> {
    let is_run = args.target.is_dir();
    let path = if is_run { args.target.join("job.toml") } else { args.target.clone() };
    if is_run && !path.is_file() {
        let place = args.target.display();
        return Err(Failure::command(format!("`{place}` is not the folder of a run: it has no `job.toml`")));
    }
    let mut overrides = args.overrides.clone();
    let names = |key: &str| {
        args.overrides.iter().any(|word| word.strip_prefix(key).is_some_and(|value| !value.is_empty()))
    };
    if names("data.eval=") && !names("data.split=") {
        // The rows that the recipe holds out are not those to evaluate.
        overrides.push("data.split=0".to_owned());
    }
    overrides.extend(args.task.iter().map(|task| format!("eval.task={task}")));
    overrides.extend(args.limit.map(|limit| format!("eval.limit={limit}")));
    let (_, recipe) = read_recipe(&path, &overrides)?;
    Ok((recipe, is_run.then(|| args.target.clone())))
}

/// The model that a run made by training the base weights; `None` if `--base` or `--adapter` selects something else.
fn evaluated_model(args: &Args, recipe: &Recipe, run_folder: Option<&Path>) -> Option<PathBuf> {
    let is_wanted = !args.base && args.adapter.is_none() && Artifact::of(recipe) == Artifact::Model;
    trained_model(run_folder.unwrap_or(&recipe.output.dir.resolved)).filter(|_| is_wanted)
}

fn find_adapter(
    args: &Args,
    recipe: &Recipe,
    run_folder: Option<&Path>,
    say: &dyn Fn(&str),
) -> Result<Option<AdapterFile>, Failure> {
    let open = |path: &Path| open_adapter(path).map(Some);
    if args.base {
        return Ok(None);
    }
    if let Some(path) = &args.adapter {
        return open(path);
    }
    let trained = run_folder.unwrap_or(&recipe.output.dir.resolved);
    if trained.join("adapter").is_dir() {
        return open(trained);
    }
    let artifact = Artifact::of(recipe).folder();
    say(&format!("there is no {artifact} in `{}` yet: evaluating the base model only", trained.display()));
    Ok(None)
}
