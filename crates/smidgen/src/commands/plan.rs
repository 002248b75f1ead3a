//! `smidgen plan`: memory and speed of a run, predicted without starting it.
//!
//! Nothing is reserved and no weight is read. A plan that does not fit is printed, and the command fails.

use super::recipe_args::RecipeArgs;
use crate::console::colour::WARNING;
use crate::console::progress::say;
use crate::console::stdout::{print, print_text};
use crate::failure::Failure;
use crate::hub::Access;
use crate::plan::job::{Job, Purpose};
use crate::plan::planning::plan_job;
use crate::report::page_file::write_page;
use crate::report::plan_facts::PlanFacts;
use crate::report::run_folder::RunRecord;
use crate::report::{plan_json, plan_table};
use crate::rows::data::Data;
use smidgen_ir::text::render_plan;
use smidgen_recipe::render_job;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Print the plan as JSON
    #[arg(long, conflicts_with = "text")]
    json: bool,
    /// Print every buffer and every step
    #[arg(long)]
    text: bool,
    /// Also write the plan as an HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let (_, recipe) = args.recipe.read()?;
    let job = Job::prepare_with(recipe, Purpose::Plan, &Access::from_environment(quiet))?;
    if !quiet {
        print_warnings(&job);
    }
    let planned = plan_job(&job)?;
    if let Some(path) = &args.html {
        let facts: PlanFacts = serde_json::from_value(plan_json::render_json(&planned))
            .expect("a page reads what plans are written as");
        write_page(path, &RunRecord::of_plan(facts, render_job(&job.recipe)))?;
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

/// Prints the warnings about the rows of a job.
pub fn print_warnings(job: &Job) {
    if let Data::Rows(rows) = &job.data {
        for warning in &rows.warnings {
            say(&format!("{WARNING} {warning}"));
        }
    }
}
