//! `smidgen resume`: continues a run, given only its folder.
//!
//! The recipe is read from the run's `job.toml`; the rest is `train --resume`.

use super::recipe_args::RecipeArgs;
use super::train;
use crate::failure::Failure;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of a run
    run: PathBuf,
    /// Keys of the recipe to override, as `section.key=value`: memory, logging and saving intervals, more steps
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Continue even if data, weights, config, tokenizer or template have changed
    #[arg(long)]
    accept_changes: bool,
    /// Start this many ranks on this machine; the same number as before gives identical results, another one differs by
    /// rounding
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Print the report as JSON when the run ends, as `report --json` does
    #[arg(long)]
    json: bool,
    /// Print every step's row of `metrics.jsonl` as a line of JSON while the run goes on; if nobody reads them any more, the
    /// run saves its state and ends
    #[arg(long)]
    rows: bool,
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let run = &args.run;
    if !run.is_dir() {
        let what = if run.exists() { "is not a folder" } else { "does not exist" };
        return Err(Failure::command(format!("`{}` {what}", run.display())).hint(
            "`smidgen resume` needs the folder of a run; with a recipe, use `smidgen train RECIPE --resume`",
        ));
    }
    let args = train::Args {
        recipe: RecipeArgs { recipe: run.clone(), overrides: args.overrides.clone() },
        resume: true,
        accept_changes: args.accept_changes,
        ranks: args.ranks,
        json: args.json,
        rows: args.rows,
        unmonitored: false,
    };
    train::run(&args, quiet)
}
