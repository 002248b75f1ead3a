//! The command line: words in, exit codes out.
//!
//! Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 failed, 2 the recipe or command is wrong.

use crate::checkpoint::peft::AdapterFile;
use crate::commands::pull::{self, PullArgs};
use crate::commands::{export, generate, inspect, merge, print};
use crate::failure::Failure;
use crate::hub::Access;
use crate::job::{Data, Job, Purpose};
use crate::planning::{Planned, plan_job, plan_job_as_before};
use crate::recipe::{
    AdapterKind, ReadRecipeError, Recipe, RecipeSource, parse_recipe, read_recipe_source, render_job,
};
use crate::report::adapter_summary::fourier_rows;
use crate::report::fourier_table::render_fourier_table;
use crate::report::{plan_json, plan_table};
use crate::train::adapters;
use crate::train::metrics::MetricsWriter;
use crate::train::progress::{self, Progress};
use crate::train::resume::{self, Start};
use crate::train::run_dir::RunDir;
use crate::train::trainer::{RunPolicy, Trainer};
use clap::{Args, Parser, Subcommand};
use smidgen_ir::text::render_plan;
use smidgen_runtime::Cpu;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(name = "smidgen", version, about = "Fine-tuning of large language models in a smidgen of memory")]
struct Cli {
    /// Say nothing but errors
    #[arg(long, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show what a run will take, before it takes anything
    Plan(PlanArgs),
    /// Plan, check, train and save
    Train(TrainArgs),
    /// Fold an adapter into its base model
    Merge(merge::Args),
    /// Write an adapter, or a model with it, as a GGUF file for llama.cpp
    Export(export::Args),
    /// Show what an adapter, a run or a model holds
    Inspect(inspect::Args),
    /// Continue a prompt, or talk with a model at the terminal
    Generate(generate::Args),
    /// Fetch a model, or say where it is
    Pull(PullArgs),
}

#[derive(Debug, Args)]
struct RecipeArgs {
    /// The recipe, a TOML file
    recipe: PathBuf,
    /// Keys that replace those of the recipe, as `section.key=value`
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

#[derive(Debug, Args)]
struct PlanArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// The plan as JSON
    #[arg(long, conflicts_with = "text")]
    json: bool,
    /// Every buffer and every step
    #[arg(long)]
    text: bool,
}

#[derive(Debug, Args)]
struct TrainArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Continue the run in the output folder
    #[arg(long)]
    resume: bool,
}

/// Parses the command line, runs the command and prints what went wrong.
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    let result = match &cli.command {
        Command::Plan(args) => plan(args, cli.quiet),
        Command::Train(args) => train(args, cli.quiet),
        Command::Merge(args) => merge::run(args, cli.quiet),
        Command::Export(args) => export::run(args, cli.quiet),
        Command::Inspect(args) => inspect::run(args),
        Command::Generate(args) => generate::run(args, cli.quiet),
        Command::Pull(args) => pull::run(args, cli.quiet),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            progress::say(&failure.to_string());
            ExitCode::from(failure.exit_code())
        }
    }
}

fn read_arguments(args: &RecipeArgs) -> Result<(RecipeSource, Recipe), Failure> {
    let source = read_recipe_source(&args.recipe).map_err(recipe_failure)?;
    let here = std::env::current_dir()
        .map_err(|error| Failure::world(format!("the working directory cannot be read: {error}")))?;
    let recipe = parse_recipe(&source, &args.overrides, &here).map_err(Failure::recipe)?;
    Ok((source, recipe))
}

fn recipe_failure(error: ReadRecipeError) -> Failure {
    Failure::recipe(error)
}

fn plan(args: &PlanArgs, quiet: bool) -> Result<(), Failure> {
    let (_, recipe) = read_arguments(&args.recipe)?;
    let job = Job::prepare_with(recipe, Purpose::Plan, &Access::from_environment(quiet))?;
    if !quiet {
        print_warnings(&job);
    }
    let planned = plan_job(&job)?;
    let text = if args.json {
        format!("{:#}\n", plan_json::render_json(&planned))
    } else if args.text {
        render_plan(&planned.solution.plan)
    } else {
        plan_table::render_table(&job, &planned)
    };
    print(&text)?;
    if planned.fits { Ok(()) } else { Err(planned.refusal()) }
}

fn print_warnings(job: &Job) {
    if let Data::Rows(rows) = &job.data {
        for warning in &rows.warnings {
            progress::say(&format!("warning: {warning}"));
        }
    }
}

fn train(args: &TrainArgs, quiet: bool) -> Result<(), Failure> {
    let (source, recipe) = read_arguments(&args.recipe)?;
    let say = |line: &str| {
        if !quiet {
            progress::say(line);
        }
    };
    let output = recipe.output.dir.resolved.clone();
    let dir = RunDir::at(&output)?;
    if !args.resume {
        dir.refuse_run()?;
    }
    let mut job = Job::prepare_with(recipe, Purpose::Train, &Access::from_environment(quiet))?;
    if !quiet {
        print_warnings(&job);
    }
    let start = if args.resume {
        check_resumed(&job, &dir, &say)?;
        if is_finished(&job, &dir) {
            say(&format!("the run in `{}` is finished", output.display()));
            return Ok(());
        }
        find_start(&dir, &say)?
    } else {
        Start::Beginning
    };
    let planned = plan_run(&job, &start, &say)?;
    if !planned.fits {
        return Err(planned.refusal());
    }
    adapters::check_start(&planned.solution.plan, &job, &start)?;
    let table = plan_table::render_table(&job, &planned);
    say(table.trim_end());
    // Everything that can be refused is refused above: from here on the folder is written.
    dir.make()?;
    dir.set_adapter_aside()?;
    write_run_files(&dir, &source, &job, &planned, &table)?;

    let first = start.updates_done();
    let Data::Rows(rows) = &mut job.data else { unreachable!("training without data is refused before") };
    // Moved, not copied: an epoch of a large data set is large, and the plan counts it once.
    let mut batches = std::mem::take(&mut rows.batches);
    let total = batches.total_steps();
    let (mut metrics, _) = MetricsWriter::resume(&dir.file("metrics.jsonl"), first)?;
    let solution = planned.solution;
    let run_policy = RunPolicy { micro_tokens: solution.demand.micro_tokens, policy: solution.policy };
    let device = Cpu::new(job.request.threads).map_err(Failure::world)?;
    let trainer = Trainer::load(&job, solution.plan, device, dir, run_policy, &start)?;
    let bar = Progress::new(total, first, job.recipe.train.log_every, quiet);
    let outcome = trainer.run(&mut batches, first, &mut metrics, &bar);
    bar.finish();
    let outcome = outcome?;
    // A run that was stopped after its last step has only the adapter left to write.
    let losses = match first < total {
        true => format!(", loss {:.4} to {:.4}", outcome.first_loss, outcome.last_loss),
        false => String::new(),
    };
    let adapter = output.join("adapter");
    say(&format!("done: {} steps{losses}, adapter in `{}`", outcome.steps, adapter.display()));
    if job.recipe.adapter.kind == AdapterKind::LsLora && !quiet {
        let file = AdapterFile::open(&adapter).map_err(Failure::world)?;
        say(render_fourier_table(&fourier_rows(&file)?).trim_end());
    }
    Ok(())
}

fn check_resumed(job: &Job, dir: &RunDir, say: &dyn Fn(&str)) -> Result<(), Failure> {
    for note in resume::check_job(dir, &job.recipe)? {
        say(&format!("warning: {note}"));
    }
    Ok(())
}

fn find_start(dir: &RunDir, say: &dyn Fn(&str)) -> Result<Start, Failure> {
    let start = resume::find_start(dir)?;
    match &start {
        Start::Beginning => say("there is no checkpoint: starting at step 0"),
        Start::Checkpoint { step, .. } => say(&format!("continuing after step {step}")),
    }
    Ok(start)
}

/// The final adapter is there and the run of before was as long as this one is to be.
fn is_finished(job: &Job, dir: &RunDir) -> bool {
    let Data::Rows(rows) = &job.data else { return false };
    resume::finished_steps(dir) == Some(rows.batches.total_steps())
}

/// A resumed run keeps the plan of its checkpoint while it fits; then the result is the same to the bit.
fn plan_run(job: &Job, start: &Start, say: &dyn Fn(&str)) -> Result<Planned, Failure> {
    let Start::Checkpoint { run_policy, folder, .. } = start else { return plan_job(job) };
    if resume::memory_changed(folder, &job.recipe) {
        say("the memory section changed: planning anew, results equal within rounding");
        return plan_job(job);
    }
    match plan_job_as_before(job, run_policy.micro_tokens, &run_policy.policy)? {
        Some(planned) => Ok(planned),
        None => {
            say("the checkpoint's plan no longer fits: planning anew, results equal within rounding");
            plan_job(job)
        }
    }
}

fn write_run_files(
    dir: &RunDir,
    source: &RecipeSource,
    job: &Job,
    planned: &Planned,
    table: &str,
) -> Result<(), Failure> {
    dir.write_text("recipe.toml", &source.text)?;
    dir.write_text("plan.json", &format!("{:#}\n", plan_json::render_json(planned)))?;
    dir.write_text("plan.txt", &format!("{table}\n{}", render_plan(&planned.solution.plan)))?;
    dir.write_text("job.toml", &render_job(&job.recipe))
}
