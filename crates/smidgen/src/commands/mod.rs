//! The command line: one file per command; this file lists and dispatches them and sets the exit code.
//!
//! A command's file has its arguments and prints its output; other folders do the work. Data goes to stdout, messages
//! to stderr. Exit codes follow from the kind of a failure (`failure.rs`).

pub mod bench;
pub mod chat;
pub mod completions;
pub mod dash;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod fit;
pub mod fit_models;
pub mod generate;
pub mod import;
pub mod inspect;
pub mod man;
pub mod merge;
pub mod original;
pub mod plan;
pub mod preview;
pub mod pull;
pub mod recipe_args;
pub mod report;
pub mod resume;
pub mod schema;
pub mod serve;
pub mod train;

use crate::console::progress;
use clap::{CommandFactory, Parser, Subcommand};
use smidgen_runtime::cpu::heap;
use smidgen_runtime::signals::make_file_limits_errors;
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(name = "smidgen", version, about = "Fine-tuning of large language models in a smidgen of memory")]
#[command(max_term_width = 80)]
struct Cli {
    /// Print only errors
    #[arg(long, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Predict memory and speed without starting the run
    Plan(plan::Args),
    /// Find which models a card can train, or the longest samples, highest rank and largest model for a recipe
    Fit(fit::Args),
    /// Show samples as the model sees them, with supervised tokens marked
    Preview(preview::Args),
    /// Plan, check that it fits, train, and save the result
    Train(train::Args),
    /// Continue a run from its last checkpoint
    Resume(resume::Args),
    /// Summarize a run, or compare several, as text and as an HTML page
    Report(report::Args),
    /// Serve a live dashboard on localhost
    Dash(dash::Args),
    /// Score the base model and the trained one on rows with known answers
    Eval(eval::Args),
    /// Merge an adapter into its base model
    Merge(merge::Args),
    /// Write an adapter or a merged model as a GGUF file for llama.cpp
    Export(export::Args),
    /// Show the contents of an adapter, a run or a model
    Inspect(inspect::Args),
    /// Generate text from a prompt, or chat in the terminal
    Generate(generate::Args),
    /// Serve a model and adapters with OpenAI's interface, and a page to talk to them
    Serve(serve::Args),
    /// Download a model or a data set, or show where it is
    Pull(pull::Args),
    /// Measure speed and memory on random weights of a named shape
    Bench(bench::Args),
    /// Convert another tool's configuration into a recipe
    Import(import::Args),
    /// Print a JSON schema of recipes, for editors that complete and check them
    Schema(schema::Args),
    /// Write a completion script for a shell
    Completions(completions::Args),
    /// Write manual pages into a folder
    Man(man::Args),
    /// Check this machine and a recipe, and measure the device for the planner
    Doctor(doctor::Args),
}

/// The definitions of the command line.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Parses the command line, runs the command and prints its error, if any.
pub fn run() -> ExitCode {
    make_file_limits_errors();
    let cli = Cli::parse();
    // A search for a plan takes and frees many large blocks, and a process that only plans reserves no arena.
    if !matches!(cli.command, Command::Plan(_) | Command::Fit(_) | Command::Import(_)) {
        heap::return_freed_blocks();
    }
    let result = match &cli.command {
        Command::Plan(args) => plan::run(args, cli.quiet),
        Command::Fit(args) => fit::run(args, cli.quiet),
        Command::Preview(args) => preview::run(args, cli.quiet),
        Command::Train(args) => train::run(args, cli.quiet),
        Command::Resume(args) => resume::run(args, cli.quiet),
        Command::Report(args) => report::run(args),
        Command::Dash(args) => dash::run(args),
        Command::Eval(args) => eval::run(args, cli.quiet),
        Command::Bench(args) => bench::run(args),
        Command::Completions(args) => completions::run(args, command()),
        Command::Man(args) => man::run(args, command()),
        Command::Doctor(args) => doctor::run(args, cli.quiet),
        Command::Import(args) => import::run(args, cli.quiet),
        Command::Schema(args) => schema::run(args),
        Command::Merge(args) => merge::run(args, cli.quiet),
        Command::Export(args) => export::run(args, cli.quiet),
        Command::Inspect(args) => inspect::run(args),
        Command::Generate(args) => generate::run(args, cli.quiet),
        Command::Serve(args) => serve::run(args, cli.quiet),
        Command::Pull(args) => pull::run(args, cli.quiet),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            progress::say_failure(&failure);
            ExitCode::from(failure.exit_code())
        }
    }
}
