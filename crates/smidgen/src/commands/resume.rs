//! `smidgen resume`: continues a run, and needs nothing but its folder.
//!
//! The recipe is the one that the run was started with, as resolved in `job.toml`; everything else is `train --resume`.

use super::train;
use crate::failure::Failure;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of a run
    run: PathBuf,
    /// Keys of the recipe to override, as `section.key=value`: memory, how often to save, more steps
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Continue although data, weights, config, tokenizer or template have changed
    #[arg(long)]
    accept_changes: bool,
    /// Start this many ranks on this machine: as many as before continue exactly, others within rounding
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Print the report as JSON when the run ends, as `report --json` does
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let Args { run, overrides, accept_changes, ranks, json } = args;
    if !run.is_dir() {
        let what = if run.exists() { "is not a folder" } else { "does not exist" };
        return Err(Failure::command(format!("`{}` {what}", run.display()))
            .hint("`smidgen resume` takes the folder of a run; with its recipe it is `smidgen train RECIPE --resume`"));
    }
    let args = train::Args::of_run(run.clone(), overrides.clone(), *accept_changes, *ranks, *json);
    train::run(&args, quiet)
}
