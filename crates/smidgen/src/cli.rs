//! The command line: words in, exit codes out.
//!
//! Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 failed or interrupted, 2 the recipe or command is wrong;
//! a second signal ends the program at once with 130, as shells expect of one that a signal ended.

use crate::commands::pull::{self, PullArgs};
use crate::commands::{
    bench, completions, dash, doctor, eval, export, fit, generate, import, inspect, merge, preview, print,
    print_text, report,
};
use crate::console::progress;
use crate::failure::Failure;
use crate::hub::Access;
use crate::plan::arithmetic::Arithmetic;
use crate::plan::job::{Job, Purpose};
use crate::plan::planning::{Planned, plan_job, plan_job_as_before};
use crate::plan::product::Product;
use crate::report::adapter_summary::fourier_rows;
use crate::report::fourier_table::render_fourier_table;
use crate::report::plan_facts::PlanFacts;
use crate::report::plan_texts::render_plan_texts;
use crate::report::run_folder::RunRecord;
use crate::report::{plan_json, plan_table};
use crate::rows::data::Data;
use crate::train::cautions::{Facts, cautions};
use crate::train::check_start::check_start;
use crate::train::course::Course;
use crate::train::free_memory::Machine;
use crate::train::history;
use crate::train::outcome::{Ending, Outcome, Went};
use crate::train::resume::{self, Start};
use crate::train::run_dir::RunDir;
use clap::{Args, CommandFactory, Parser, Subcommand};
use smidgen_formats::peft::AdapterFile;
use smidgen_ir::DeviceKind;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::text::render_plan;
use smidgen_recipe::{
    AdapterKind, ReadRecipeError, Recipe, RecipeSource, parse_recipe, read_recipe_source, render_job,
};
use smidgen_runtime::cpu::heap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(name = "smidgen", version, about = "Fine-tuning of large language models in a smidgen of memory")]
#[command(max_term_width = 80)]
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
    /// Ask what is the most that a budget holds: tokens, rank, model
    Fit(fit::Args),
    /// Show samples as the model sees them, supervised tokens marked
    Preview(PreviewArgs),
    /// Plan, check, train and save
    Train(TrainArgs),
    /// Show what a run took and did, in short and as one page
    Report(report::Args),
    /// Serve the page of a run on this machine while it goes on
    Dash(dash::Args),
    /// Score the base model and the trained one on rows with known answers
    Eval(eval::Args),
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
    /// Measure speed and memory of a run on made-up weights of a named shape
    Bench(bench::Args),
    /// Turn another tool's configuration into a recipe
    Import(import::Args),
    /// Write a script that completes commands in a shell
    Completions(completions::Args),
    /// Check what a run needs, and measure this machine for plans
    Doctor(doctor::Args),
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
    /// The plan as a page, beside what is printed
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct PreviewArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// How many samples to show
    #[arg(long, default_value_t = 3)]
    rows: usize,
    /// The same as JSON, with ids and labels
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct TrainArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Continue the run in the output folder
    #[arg(long)]
    resume: bool,
    /// What the run took and did as JSON, once it ends: the same as `report --json`
    #[arg(long)]
    json: bool,
    /// Do not look at memory after every step: for measuring what looking costs
    #[arg(long, hide = true)]
    unmonitored: bool,
}

/// The definitions of the command line.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Parses the command line, runs the command and prints what went wrong.
pub fn run() -> ExitCode {
    heap::begin();
    let cli = Cli::parse();
    let result = match &cli.command {
        Command::Plan(args) => plan(args, cli.quiet),
        Command::Fit(args) => {
            let source = read_recipe_source(args.recipe()).map_err(recipe_failure);
            source.and_then(|source| fit::run(args, &source, cli.quiet))
        }
        Command::Preview(args) => preview(args, cli.quiet),
        Command::Train(args) => train(args, cli.quiet),
        Command::Report(args) => report::run(args),
        Command::Dash(args) => dash::run(args),
        Command::Eval(args) => eval::run(args, cli.quiet),
        Command::Bench(args) => bench::run(args),
        Command::Completions(args) => completions::run(args, command()),
        Command::Doctor(args) => doctor::run(args, cli.quiet),
        Command::Import(args) => import::run(args, cli.quiet),
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
    if let Some(path) = &args.html {
        let facts: PlanFacts = serde_json::from_value(plan_json::render_json(&planned))
            .expect("a page reads what plans are written as");
        report::write_page(path, &RunRecord::of_plan(facts, render_job(&job.recipe)))?;
    }
    if args.json {
        print(&plan_json::render_text(&plan_json::render_json(&planned)))?;
    } else if args.text {
        print(&render_plan(&planned.solution.plan))?;
    } else {
        print_text(&plan_table::render_table(&job, &planned))?;
    }
    if planned.fits { Ok(()) } else { Err(planned.refusal()) }
}

fn preview(args: &PreviewArgs, quiet: bool) -> Result<(), Failure> {
    let (_, recipe) = read_arguments(&args.recipe)?;
    let job = Job::prepare_with(recipe, Purpose::Preview, &Access::from_environment(quiet))?;
    preview::run(&job, preview::Options { rows: args.rows, json: args.json })
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
    if Product::of(&job.recipe) == Product::Model {
        dir.refuse_foreign_model(job.model.path())?;
    }
    if !quiet {
        print_warnings(&job);
    }
    let start = if args.resume {
        check_resumed(&job, &dir, &say)?;
        if is_finished(&job, &dir) {
            say(&format!("the run in `{}` is finished", output.display()));
            tidy_finished(&dir, &say)?;
            return if args.json { report::print_run(&output) } else { Ok(()) };
        }
        find_start(&dir, &say)?
    } else {
        Start::Beginning
    };
    if let (Data::Rows(rows), Start::Beginning) = (&job.data, &start) {
        for caution in cautions(&Facts::of(&job, rows)) {
            say(&format!("warning: {caution}"));
        }
    }
    keep_arithmetic(&mut job, &start, &say);
    // Before the plan, which counts what the driver's context takes.
    let device = job.place.open_and_measure(job.request.threads, job.arithmetic)?;
    let planned = plan_run(&job, &start, &say)?;
    if !planned.fits {
        return Err(planned.refusal());
    }
    check_start(&planned.solution.plan, &job, &start)?;
    let device = device.with_spill_folder(output.clone());
    let course = Course {
        dir: dir.clone(),
        recipe_text: &source.text,
        free_memory: &mut Machine,
        quiet,
        is_monitored: !args.unmonitored,
        say: &say,
        render_plan: &render_plan_texts,
    };
    let went = course.run(&mut job, planned, device, start);
    report_run(&dir, &went, &say);
    if args.json && dir.file(history::FILE_NAME).exists() {
        report::print_run(&output)?;
    }
    let Went { outcome, total_steps: total, planned_bytes, .. } =
        went.map_err(|failure| lost_device(failure, &output, args))?;
    match outcome.ending {
        Ending::Interrupted => return Err(interrupted(args, &outcome, total)),
        Ending::Exceeded { bytes } => {
            let is_gpu = job.request.device == DeviceKind::Cuda;
            return Err(exceeded(args, &outcome, bytes, planned_bytes, is_gpu));
        }
        Ending::Done | Ending::StoppedEarly | Ending::MemoryMoved { .. } => {}
    }
    let adapter = output.join("adapter");
    for line in render_outcome(&outcome, &job.recipe, total) {
        say(&line);
    }
    if job.recipe.adapter.kind == AdapterKind::LsLora && !quiet {
        let file = AdapterFile::open(&adapter).map_err(Failure::world)?;
        say(render_fourier_table(&fourier_rows(&file)?).trim_end());
    }
    Ok(())
}

/// Notes how the run ended, writes its page and says what it took. What was trained is worth more: a failure is only
/// said.
fn report_run(dir: &RunDir, went: &Result<Went, Failure>, say: &dyn Fn(&str)) {
    // A run that was refused has no part and no rows.
    if !dir.file(history::FILE_NAME).exists() {
        return;
    }
    let written = history::end_run(dir, went).and_then(|()| report::write_report(dir.path()));
    match written {
        Ok(summary) => {
            if summary.steps > 0 {
                summary.render_memory_lines().iter().for_each(|line| say(line));
            }
            say(&format!("report in `{}`", dir.file(report::FILE_NAME).display()));
        }
        Err(failure) => say(&format!("warning: there is no report: {}", failure.message)),
    }
}

/// What is left to do where a run was killed when everything was trained and saved: its page.
fn tidy_finished(dir: &RunDir, say: &dyn Fn(&str)) -> Result<(), Failure> {
    dir.sweep()?;
    if !dir.file(report::FILE_NAME).exists()
        && let Err(failure) = report::write_report(dir.path())
    {
        say(&format!("warning: there is no report: {}", failure.message));
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
        Start::Checkpoint { step, lost_best, .. } => {
            say(&format!("continuing after step {step}"));
            if let Some(best) = lost_best {
                say(&format!(
                    "warning: `checkpoint-{best}`, the best evaluated, is gone: the best is sought anew"
                ));
            }
        }
    }
    Ok(start)
}

fn is_finished(job: &Job, dir: &RunDir) -> bool {
    let Data::Rows(rows) = &job.data else { return false };
    resume::is_finished(dir, &job.recipe, rows.batches.total_steps())
}

/// What is said of a run that came to its end: how evaluations went, then which state was saved.
fn render_outcome(outcome: &Outcome, recipe: &Recipe, total: u64) -> Vec<String> {
    let (standing, early_stop) = (&outcome.standing, recipe.train.early_stop);
    let mut lines = Vec::new();
    if outcome.ending == Ending::StoppedEarly {
        let evaluations = standing.since_best;
        lines.push(format!("stopped early: {evaluations} evaluations brought no improvement"));
    }
    if let Some(best) = standing.best {
        let saved = match standing.best_saved == standing.best {
            true => format!(", in `checkpoint-{}`", best.step),
            false => String::new(),
        };
        lines.push(format!("best eval_loss {:.4} after step {}{saved}", best.eval_loss, best.step));
    }
    let steps = match outcome.ending {
        Ending::StoppedEarly => format!("{} of {total} steps", outcome.steps),
        Ending::Done | Ending::Interrupted | Ending::Exceeded { .. } | Ending::MemoryMoved { .. } => {
            format!("{total} steps")
        }
    };
    // A run that was stopped after its last step has only its result left to write.
    let losses = match outcome.last_loss.is_nan() {
        false => format!(", loss {:.4} to {:.4}", outcome.first_loss, outcome.last_loss),
        true => String::new(),
    };
    let state = match standing.best_saved {
        Some(best) if early_stop > 0 => format!(" of step {}", best.step),
        _ => String::new(),
    };
    let product = Product::of(recipe).folder();
    let made = recipe.output.dir.resolved.join(product);
    lines.push(format!("done: {steps}{losses}, {product}{state} in `{}`", made.display()));
    lines
}

/// Not done, so that it is no success: a script that goes on only after success must not go on here.
fn interrupted(args: &TrainArgs, outcome: &Outcome, total: u64) -> Failure {
    let steps = outcome.steps;
    let resume = resume_command(args);
    Failure::world(format!("interrupted after step {steps} of {total}; its state is in `checkpoint-{steps}`"))
        .hint(format!("`{resume}` goes on from there"))
}

/// Measured above the plan: a fault of the plan, and better known than hidden.
fn exceeded(args: &TrainArgs, outcome: &Outcome, bytes: u64, planned_bytes: u64, is_gpu: bool) -> Failure {
    let (steps, resume) = (outcome.steps, resume_command(args));
    Failure::world(format!(
        "after step {steps} the run takes {}, its plan has {}: stopped, with the state in `checkpoint-{steps}`",
        format_bytes(bytes),
        format_bytes(planned_bytes)
    ))
    .hint(match is_gpu {
        // The driver does not say whose memory is taken.
        true => format!("another program on the GPU, or a fault of smidgen's plan: `{resume}` goes on, in what is free then"),
        false => format!("this is a fault of smidgen's plan; `{resume} memory.budget=...` with more room goes on"),
    })
}

/// A device that failed under way: what was saved before is named.
fn lost_device(failure: Failure, output: &Path, args: &TrainArgs) -> Failure {
    let is_device =
        failure.message.starts_with("cuda: ") || failure.message.contains("the file beside the memory");
    let saved = RunDir::at(output).ok().and_then(|dir| dir.checkpoints().last().copied());
    match saved.filter(|_| is_device) {
        Some(step) => {
            let resume = resume_command(args);
            failure.hint(format!(
                "the state of step {step} is in `checkpoint-{step}`; `{resume}` goes on from there"
            ))
        }
        None => failure,
    }
}

/// The command that continues a run.
fn resume_command(args: &TrainArgs) -> String {
    let overrides: String = args.recipe.overrides.iter().map(|word| format!(" {}", quoted(word))).collect();
    let recipe = quoted(&args.recipe.recipe.to_string_lossy());
    format!("smidgen train {recipe}{overrides} --resume")
}

/// A word as a shell reads it back.
fn quoted(word: &str) -> String {
    let is_plain = |it: char| it.is_ascii_alphanumeric() || "-_./:=,@%+".contains(it);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// A resumed run computes as its checkpoint did, where this machine can.
fn keep_arithmetic(job: &mut Job, start: &Start, say: &dyn Fn(&str)) {
    let Start::Checkpoint { compute, .. } = start else { return };
    job.set_arithmetic(Arithmetic::continuing(job.recipe.model.compute, job.request.device, compute));
    let now = job.arithmetic.name();
    if now != *compute {
        say(&format!(
            "the checkpoint was computed in {compute}, this run computes in {now}: results equal within rounding"
        ));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_device_names_what_was_saved() {
        let folder = tempfile::tempdir().unwrap();
        let args = TrainArgs {
            recipe: RecipeArgs { recipe: "my run.toml".into(), overrides: vec!["train.lr=1e-3".into()] },
            resume: false,
            json: false,
            unmonitored: false,
        };
        let lost = || Failure::world("cuda: cuLaunchKernel failed: an illegal address");
        assert!(lost_device(lost(), folder.path(), &args).hints.is_empty());
        for step in [5, 40] {
            std::fs::create_dir(folder.path().join(format!("checkpoint-{step}"))).unwrap();
        }
        let hints = lost_device(lost(), folder.path(), &args).hints;
        let command = "smidgen train 'my run.toml' train.lr=1e-3 --resume";
        assert_eq!(
            hints,
            [format!("the state of step 40 is in `checkpoint-40`; `{command}` goes on from there")]
        );
        let full = Failure::world("cannot write the file beside the memory, `run/x`: no space");
        assert_eq!(lost_device(full, folder.path(), &args).hints, hints);
        assert!(lost_device(Failure::world("the loss is not finite"), folder.path(), &args).hints.is_empty());
    }
}
