//! `smidgen train`: plan, check, train and save, with one line per step and a report at the end.
//!
//! The run itself is in `train/`; this file has the arguments, the printed lines and the exit status.

use super::plan::print_warnings;
use super::recipe_args::{RecipeArgs, STDIN, read_recipe, working_directory};
use super::report;
use crate::console::colour::WARNING;
use crate::console::downloads::hub_access;
use crate::console::progress;
use crate::failure::{Failure, FailureKind};
use crate::logs::metrics::MetricsRow;
use crate::plan::artifact::Artifact;
use crate::plan::job::{Job, Purpose};
use crate::plan::rank_layout::RankLayout;
use crate::ranks::join::{Joined, engine_of};
use crate::ranks::launch::launch_of_this_process;
use crate::ranks::spawn::{Engine, Spawn};
use crate::report::adapter_summary::fourier_rows;
use crate::report::fourier_table::render_fourier_table;
use crate::run_folder::contents::PROGRAM;
use crate::run_folder::history;
use crate::run_folder::kept_defaults::keep_defaults;
use crate::run_folder::outcome::{Ending, Outcome, RunResult};
use crate::run_folder::resume::JOB_FILE;
use crate::run_folder::run_dir::RunDir;
use crate::train::replanning::RunOptions;
use crate::train::run::{claim_folder, run_job};
use smidgen_formats::peft::AdapterFile;
use smidgen_ir::DeviceKind;
use smidgen_ir::bytes::format_bytes;
use smidgen_recipe::{AdapterKind, Recipe, RecipePath, render_job};
use smidgen_runtime::comm;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Continue the run in the output folder; RECIPE may then be the folder of the run
    #[arg(long)]
    pub resume: bool,
    /// Continue even if data, weights, config, tokenizer or template have changed
    #[arg(long, requires = "resume")]
    pub accept_changes: bool,
    /// Start this many ranks on this machine: one per GPU, or CPU ranks with `mpiexec`
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Print the report as JSON when the run ends, as `report --json` does
    #[arg(long)]
    pub json: bool,
    /// Print every step's row of `metrics.jsonl` as a line of JSON while the run goes on; if nobody reads them any more, the
    /// run saves its state and ends
    #[arg(long)]
    pub rows: bool,
    /// Do not sample memory after every step, to measure what sampling costs
    #[arg(long, hide = true)]
    pub unmonitored: bool,
}

impl Args {
    /// Reads the recipe from a file, or with `--resume` from a run folder: its text as written, and resolved.
    fn read(&self) -> Result<(String, Recipe), Failure> {
        let path = &self.recipe.recipe;
        match (path.is_dir(), self.resume) {
            (true, true) => read_run_recipe(path, &self.recipe.overrides),
            (true, false) => Err(Failure::command(format!("`{}` is a folder, not a recipe", path.display()))
                .hint("`--resume` continues the run in a folder")),
            (false, _) => self.recipe.read().map(|(source, recipe)| (source.text, recipe)),
        }
    }
}

/// Reads the recipe of an existing run. The output folder is where the run is now, even if it was moved.
fn read_run_recipe(folder: &Path, overrides: &[String]) -> Result<(String, Recipe), Failure> {
    let job = folder.join(JOB_FILE);
    if !job.exists() {
        return Err(Failure::command(format!(
            "`{}` is not the folder of a run: it has no `{JOB_FILE}`",
            folder.display()
        ))
        .hint(
            "a run is continued from its `output.dir`, or with its recipe: `smidgen train RECIPE --resume`",
        ));
    }
    if overrides.iter().any(|word| word.starts_with("output.dir=")) {
        return Err(Failure::command("`output.dir` cannot change: a run continues in its own folder"));
    }
    let (source, mut recipe) = read_recipe(&job, overrides)?;
    recipe.output.dir = RecipePath::at(&working_directory()?.join(folder));
    let written = std::fs::read_to_string(folder.join("recipe.toml")).ok();
    if let Some(text) = &written {
        history::refuse_edited_recipe(folder, text)?;
    }
    Ok((written.unwrap_or(source.text), recipe))
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let (recipe_text, recipe) = args.read()?;
    let launch = launch_of_this_process()?;
    if let (Some(count), None) = (args.ranks, &launch)
        && count != 1
    {
        if args.recipe.recipe == Path::new(STDIN) {
            return Err(Failure::command("a recipe from stdin is read once, and every rank needs it")
                .hint("write it into a file"));
        }
        return start_ranks(count, &recipe);
    }
    let Some(launch) = launch else { return run_rank(args, &recipe_text, recipe, quiet, None) };
    let mut joined = Joined::open(&launch, &recipe)?;
    let (output, is_here) = (recipe.output.dir.resolved.clone(), launch.local_size == launch.size);
    let ranks = if is_here { format!(" --ranks {}", launch.size) } else { String::new() };
    joined.team.link().set_remedy(format!("continue with `{}{ranks}`", resume_command(args, &output)));
    let quiet = quiet || launch.rank > 0;
    let result = run_rank(args, &recipe_text, recipe, quiet, Some(&mut joined));
    joined.leave(result)
}

fn start_ranks(count: usize, recipe: &Recipe) -> Result<(), Failure> {
    let spawn = Spawn::this_program(count)?;
    RankLayout::planned(count, 1, true)?.check_batch(recipe)?;
    run_ranks(spawn, engine_of(recipe))
}

/// Starts the ranks of this machine, waits for them, and exits with their exit code if they failed.
pub fn run_ranks(spawn: Spawn, engine: Engine) -> Result<(), Failure> {
    match spawn.run(engine)? {
        0 => Ok(()),
        // The ranks have already printed their errors.
        code => comm::quit(code),
    }
}

fn run_rank(
    args: &Args,
    recipe_text: &str,
    mut recipe: Recipe,
    quiet: bool,
    mut joined: Option<&mut Joined>,
) -> Result<(), Failure> {
    let world = joined.as_ref().map_or(RankLayout::ALONE, |joined| joined.world);
    let say = |line: &str| {
        if !quiet {
            progress::say(line);
        }
    };
    let output = recipe.output.dir.resolved.clone();
    let (dir, lock) = claim_folder(&output, args.resume, world.is_first())?;
    if args.resume && !args.recipe.recipe.is_dir() {
        let kept = keep_defaults(&mut recipe, recipe_text, &args.recipe.overrides, &output);
        kept.iter().for_each(|line| say(&format!("{WARNING} {line}")));
    }
    if let Some(joined) = &mut joined {
        let job = render_job(&recipe);
        let keys = recipe_facts(&job);
        let mut facts = vec![("program version", PROGRAM.to_owned())];
        facts.extend(keys.iter().map(|(name, value)| (name.as_str(), value.clone())));
        joined.team.link().agree(&facts)?;
    }
    let job = Job::prepare_in(world, recipe, Purpose::Train, &hub_access(quiet))?;
    if !quiet {
        print_warnings(&job);
    }
    let (recipe, device) = (job.recipe.clone(), job.request.device);
    let options = RunOptions {
        recipe_text,
        resumes: args.resume,
        accepts_changes: args.accept_changes,
        quiet,
        is_monitored: !args.unmonitored,
        owns_process: true,
        say: &say,
        on_step: &mut |row| {
            if args.rows && world.is_first() { print_row(row) } else { ControlFlow::Continue(()) }
        },
    };
    let went = run_job(job, &dir, joined, options);
    drop(lock);
    let is_reported = matches!(went, Ok(None)) || dir.file(history::FILE_NAME).exists();
    if args.json && world.is_first() && is_reported {
        report::print_run(&output)?;
    }
    let Some(RunResult { outcome, total_steps: total, planned_bytes, .. }) =
        went.map_err(|failure| lost_device(failure, &output, args))?
    else {
        return Ok(());
    };
    match outcome.ending {
        Ending::Interrupted => return Err(interrupted(args, &output, &outcome, total)),
        Ending::Exceeded { bytes } => {
            let resume = resume_command(args, &output);
            return Err(exceeded(&resume, &outcome, bytes, planned_bytes, world, device));
        }
        Ending::Done | Ending::StoppedEarly | Ending::MemoryMoved { .. } => {}
    }
    for line in render_outcome(&outcome, &recipe, total) {
        say(&line);
    }
    if recipe.adapter.kind == AdapterKind::LsLora && !quiet {
        let file = AdapterFile::open(&output.join("adapter")).map_err(Failure::model)?;
        say(render_fourier_table(&fourier_rows(&file)?).trim_end());
    }
    Ok(())
}

/// The keys of a resolved recipe with their values, so that an error can name the key in which ranks differ.
fn recipe_facts(job: &str) -> Vec<(String, String)> {
    job.lines()
        .filter_map(|line| line.split_once(" = "))
        .map(|(key, value)| (format!("recipe's `{key}`"), value.to_owned()))
        .collect()
}

/// The last lines of a completed run: whether it stopped early, then its losses and what was saved where.
fn render_outcome(outcome: &Outcome, recipe: &Recipe, total: u64) -> Vec<String> {
    let evaluations = &outcome.evaluations;
    let mut lines = Vec::new();
    if outcome.ending == Ending::StoppedEarly {
        let evaluations = evaluations.since_best;
        lines.push(format!("stopped early: no improvement in {evaluations} evaluations"));
    }
    let steps = match outcome.ending {
        Ending::StoppedEarly => format!("{} of {total} steps", outcome.steps),
        Ending::Done | Ending::Interrupted | Ending::Exceeded { .. } | Ending::MemoryMoved { .. } => {
            format!("{total} steps")
        }
    };
    // There is no loss if a resumed run had no step left and only wrote its result.
    let losses = if outcome.last_loss.is_nan() {
        String::new()
    } else {
        format!(", loss {:.4} to {:.4}", outcome.first_loss, outcome.last_loss)
    };
    let state = match evaluations.best_saved {
        Some(best) if recipe.train.early_stop > 0 => format!(" of step {}", best.step),
        _ => String::new(),
    };
    let artifact = Artifact::of(recipe).folder();
    let made = recipe.output.dir.resolved.join(artifact);
    let best = evaluations.best_saved.map_or(String::new(), |best| {
        format!("; best eval_loss {:.4} in `checkpoint-{}`", best.eval_loss, best.step)
    });
    lines.push(format!("done: {steps}{losses}, {artifact}{state} in `{}`{best}", made.display()));
    lines
}

/// An interrupted run is not a success: a script that continues only after success must stop here.
fn interrupted(args: &Args, output: &Path, outcome: &Outcome, total: u64) -> Failure {
    let steps = outcome.steps;
    let resume = resume_command(args, output);
    Failure::interrupted(format!(
        "interrupted after step {steps} of {total}; state saved in `checkpoint-{steps}`"
    ))
    .hint(format!("continue with `{resume}`"))
}

/// The run, or one of its ranks, uses more memory than planned, which is a bug of the planner unless another process
/// uses the GPU. `bytes` is the memory in use.
fn exceeded(
    resume: &str,
    outcome: &Outcome,
    bytes: u64,
    planned_bytes: u64,
    world: RankLayout,
    device: DeviceKind,
) -> Failure {
    let steps = outcome.steps;
    let who = if world.is_alone() { "the run" } else { "a rank" };
    Failure::memory(format!(
        "after step {steps} {who} uses {}, more than the planned {}: stopped, state saved in `checkpoint-{steps}`",
        format_bytes(bytes),
        format_bytes(planned_bytes)
    ))
    .hint(match device {
        // The driver does not say which process uses the memory.
        DeviceKind::Cuda => format!("another process uses the GPU, or smidgen's plan is wrong: `{resume}` makes a new plan for the memory that is free then"),
        DeviceKind::Cpu => format!("smidgen's plan is wrong, please report it; `{resume} memory.budget=...` continues with a larger budget"),
    })
}

/// Adds a hint with the last saved state if a device or a disk failed during training.
fn lost_device(failure: Failure, output: &Path, args: &Args) -> Failure {
    let is_lost = matches!(failure.kind, FailureKind::Device | FailureKind::Disk);
    let saved = RunDir::at(output).ok().and_then(|dir| dir.checkpoints().last().copied());
    match saved.filter(|_| is_lost) {
        Some(step) => {
            let resume = resume_command(args, output);
            failure
                .hint(format!("the state of step {step} is in `checkpoint-{step}`; continue with `{resume}`"))
        }
        None => failure,
    }
}

/// Prints a step's row as a line of JSON. If that fails, nobody follows the run any more.
fn print_row(row: &MetricsRow) -> ControlFlow<()> {
    let line = serde_json::to_string(row).expect("a row has only numbers and names");
    let mut stdout = std::io::stdout().lock();
    match writeln!(stdout, "{line}").and_then(|()| stdout.flush()) {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()),
    }
}

/// The command that continues a run.
fn resume_command(args: &Args, output: &Path) -> String {
    if args.recipe.recipe == Path::new(STDIN) {
        return format!("smidgen resume {}", quoted(&output.to_string_lossy()));
    }
    let overrides: String = args.recipe.overrides.iter().map(|word| format!(" {}", quoted(word))).collect();
    let recipe = quoted(&args.recipe.recipe.to_string_lossy());
    if args.recipe.recipe.is_dir() {
        format!("smidgen resume {recipe}{overrides}")
    } else {
        format!("smidgen train {recipe}{overrides} --resume")
    }
}

/// Quotes a word for the shell if necessary.
fn quoted(word: &str) -> String {
    let is_plain = |it: char| it.is_ascii_alphanumeric() || "-_./:=,@%+".contains(it);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.into()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_device_names_what_was_saved() {
        let folder = tempfile::tempdir().unwrap();
        let args = Args {
            recipe: RecipeArgs { recipe: "my run.toml".into(), overrides: vec!["train.lr=1e-3".into()] },
            resume: false,
            accept_changes: false,
            ranks: None,
            json: false,
            rows: false,
            unmonitored: false,
        };
        let lost = || Failure::device("cuda: cuLaunchKernel failed: an illegal address");
        assert!(lost_device(lost(), folder.path(), &args).hints.is_empty());
        for step in [5, 40] {
            std::fs::create_dir(folder.path().join(format!("checkpoint-{step}"))).unwrap();
        }
        let hints = lost_device(lost(), folder.path(), &args).hints;
        let command = "smidgen train 'my run.toml' train.lr=1e-3 --resume";
        assert_eq!(hints, [format!("the state of step 40 is in `checkpoint-40`; continue with `{command}`")]);
        let full = Failure::disk("cannot write `run/x`: no space");
        assert_eq!(lost_device(full, folder.path(), &args).hints, hints);
        assert!(
            lost_device(Failure::training("the loss is not finite"), folder.path(), &args).hints.is_empty()
        );
    }
}
