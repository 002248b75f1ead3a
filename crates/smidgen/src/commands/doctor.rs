//! `smidgen doctor`: checks before a run, and the measurement of the machine.
//!
//! Without a recipe it shows the devices and their speed; with a recipe also whether it can run on this machine. The
//! measurement is saved, and later plans use it; no other command measures.

use super::recipe_args::working_directory;
use super::train::run_ranks;
use crate::console::downloads::hub_access;
use crate::console::progress;
use crate::console::stdout::{print_json, print_text};
use crate::doctor::load::Reach;
use crate::doctor::machine::{self, Measuring};
use crate::doctor::measure::Effort;
use crate::doctor::{self, Check, all_reduce, environment, ranks, run};
use crate::failure::Failure;
use crate::machine::host;
use crate::plan::devices::JobDevice;
use crate::plan::profiles::{self, saved};
use crate::ranks::launch::{Launch, launch_of_this_process};
use crate::ranks::spawn::{Engine, Spawn};
use crate::report::doctor_table::render_table;
use serde_json::{Value, json};
use smidgen_compile::DeviceProfile;
use smidgen_ir::DeviceKind;
use smidgen_recipe::{DeviceChoice, Recipe, parse_recipe, read_recipe_source};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// A recipe to check as well, a TOML file
    recipe: Option<PathBuf>,
    /// Keys of the recipe to override, as `section.key=value`
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// The device to check: auto, cpu or cuda:N [default: the recipe's, or auto]
    #[arg(long)]
    device: Option<String>,
    /// Do not measure; show the saved measurement
    #[arg(long)]
    no_measure: bool,
    /// Measure faster but less exactly, for slow machines
    #[arg(long, conflicts_with = "no_measure")]
    brief: bool,
    /// Read all weights of the recipe's model, however large
    #[arg(long)]
    whole: bool,
    /// Only check what runs with several ranks need (NCCL, MPI, `mpiexec`, GPUs); with N above 1, also time the
    /// all-reduce of N CPU ranks
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "1", conflicts_with_all = ["recipe", "no_measure", "brief", "whole"])]
    ranks: Option<usize>,
    /// Print the checks as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    // Without `--ranks`, incomplete launcher variables are only a warning, in the check of the environment.
    let launch = match (launch_of_this_process(), args.ranks) {
        (Err(_), None) => None,
        (launch, _) => launch?,
    };
    match (launch, args.ranks) {
        (Some(launch), _) => return measure_ranks(args, &launch),
        (None, Some(1)) => return finish(args, &ranks::check(), None),
        (None, Some(count)) => return run_ranks(Spawn::this_program(count)?, Engine::Mpi),
        (None, None) => {}
    }
    let here = working_directory()?;
    let recipe = args.recipe.as_ref().map(|path| -> Result<Recipe, Failure> {
        let source = read_recipe_source(path).map_err(Failure::recipe)?;
        parse_recipe(&source, &args.overrides, &here).map_err(Failure::recipe)
    });
    let known = recipe.as_ref().and_then(|recipe| recipe.as_ref().ok());
    let device = device(args, known)?;
    // The checks of the recipe report a number that is too large.
    let threads = host::threads(known.map_or(0, |recipe| recipe.memory.threads));
    let threads = threads.unwrap_or_else(|_| host::processors());
    // The nearest existing folder, because `doctor` creates none.
    let output = known.map_or(here.clone(), |recipe| recipe.output.dir.resolved.clone());
    let folder = output.ancestors().find(|folder| folder.is_dir()).map_or(here, PathBuf::from);

    let mut checks = vec![machine::program(), machine::processor(threads), machine::memory()];
    checks.push(machine::container());
    checks.push(environment::check(matches!(device, DeviceChoice::Cuda(_))));
    checks.extend(machine::gpu(device));
    checks.extend([machine::disk_room(&folder), machine::cache()]);
    let measuring = match (args.no_measure, args.brief) {
        (true, _) => Measuring::Never,
        (false, true) => Measuring::Now(Effort::Brief),
        (false, false) => Measuring::Now(Effort::Full),
    };
    if measuring != Measuring::Never && !quiet {
        progress::say("measuring for half a minute; other programs on this machine distort the result");
    }
    let mut measured = None;
    // If the GPU was not found, the check of the GPU has already failed.
    if let Ok(mut place) = JobDevice::detect(device) {
        let (check, found) = machine::profile(&mut place, threads, measuring, &folder);
        checks.push(check);
        measured = found;
    }
    match &recipe {
        None => {}
        Some(Err(failure)) => checks.push(Check::of_failure("recipe", failure)),
        Some(Ok(recipe)) => {
            checks.push(Check::pass("recipe", "valid"));
            let reach = if args.whole { Reach::Whole } else { Reach::BySize };
            checks.extend(run::check(recipe, &hub_access(quiet), reach));
        }
    }
    finish(args, &checks, measured.as_ref())
}

/// Measures the all-reduce on every rank; only the first rank prints.
fn measure_ranks(args: &Args, launch: &Launch) -> Result<(), Failure> {
    let measured = all_reduce::measure(launch.rank, launch.size)?;
    if launch.rank > 0 {
        return Ok(());
    }
    let mut checks = ranks::check();
    checks.push(measured);
    finish(args, &checks, None)
}

fn finish(args: &Args, checks: &[Check], measured: Option<&(PathBuf, DeviceProfile)>) -> Result<(), Failure> {
    let ending = doctor::ending(checks);
    if args.json {
        print_json(&format!("{:#}\n", render_json(checks, ending.is_ok(), measured)))?;
    } else {
        print_text(&render_table(checks))?;
    }
    ending
}

/// The device to check: from `--device`, or from the recipe. A recipe with the profile of a GPU means a GPU.
fn device(args: &Args, recipe: Option<&Recipe>) -> Result<DeviceChoice, Failure> {
    if let Some(text) = &args.device {
        return DeviceChoice::parse(text).ok_or_else(|| {
            Failure::command(format!(
                "`--device {text}` must be `auto`, `cpu` or `cuda:N` with the number of a GPU"
            ))
        });
    }
    let Some(recipe) = recipe else { return Ok(DeviceChoice::Auto) };
    // A profile that cannot be read is reported by the checks of the recipe.
    let profile = profiles::named(&recipe.memory).ok().flatten();
    let is_of_gpu = profile.is_some_and(|profile| profile.device.device == DeviceKind::Cuda);
    Ok(match recipe.memory.device {
        DeviceChoice::Auto if is_of_gpu => DeviceChoice::Cuda(0),
        device => device,
    })
}

fn render_json(checks: &[Check], is_fine: bool, measured: Option<&(PathBuf, DeviceProfile)>) -> Value {
    let profile = measured.map(|(path, device)| {
        let mut value = saved::render(device);
        value["path"] = json!(path);
        value
    });
    json!({ "fine": is_fine, "checks": checks, "profile": profile })
}
