//! `smidgen plan`: memory and speed of a run, predicted without starting it.
//!
//! Nothing is reserved and no weight is read. A plan that does not fit is printed, and the command fails.

use super::recipe_args::{RecipeArgs, read_recipe};
use crate::console::colour::{WARNING, plain};
use crate::console::downloads::hub_access;
use crate::console::progress::say;
use crate::console::stdout::{print_json, print_lines, print_text};
use crate::failure::Failure;
use crate::plan::job::Job;
use crate::plan::model::warnings;
use crate::plan::planning::plan_job;
use crate::plan::rank_layout::RankLayout;
use crate::report::page_file::write_page;
use crate::report::plan_comparison::{render_comparison, render_differences};
use crate::report::plan_facts::PlanFacts;
use crate::report::run_folder::RunRecord;
use crate::report::{plan_json, plan_table};
use crate::rows::data::Data;
use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use smidgen_compile::links::{self, LINKS, Link, NamedLink};
use smidgen_ir::text::render_plan;
use smidgen_recipe::{Recipe, render_job};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Print the plan as JSON
    #[arg(long, conflicts_with = "text")]
    json: bool,
    /// Also put the table into the JSON, for programs that show it
    #[arg(long, requires = "json", hide = true)]
    table: bool,
    /// Print every buffer and every step
    #[arg(long)]
    text: bool,
    /// Compare with another plan: a recipe, a `plan.json`, the folder of a run, or `section.key=value` to change in
    /// this recipe (may be repeated)
    #[arg(long, value_name = "OTHER", conflicts_with = "text")]
    against: Vec<String>,
    /// Number of ranks; the plan is for one of them
    #[arg(long, value_name = "N", default_value_t = 1)]
    ranks: usize,
    /// Number of machines that the ranks are spread over
    #[arg(long, value_name = "M", default_value_t = 1)]
    nodes: usize,
    /// Network between machines, such as ethernet-100g [default: the profile's]
    #[arg(long, value_name = "NAME")]
    network: Option<String>,
    /// Also write the plan as an HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

impl Args {
    fn prepare(&self, recipe: Recipe, quiet: bool) -> Result<Job, Failure> {
        let network = self.network.as_deref().map(find_link).transpose()?;
        if network.is_some() && self.nodes < 2 {
            return Err(Failure::command(
                "`--network` is the link between machines, but the plan is for one machine",
            )
            .hint("`--nodes 2` plans for two machines"));
        }
        let world = RankLayout::asked_for(self.ranks, self.nodes, &recipe)?;
        Job::prepare_over(world, network, recipe, &hub_access(quiet))
    }
}

fn find_link(name: &str) -> Result<Link, Failure> {
    links::find(name).map(NamedLink::link).ok_or_else(|| {
        let known: Vec<&str> = LINKS.iter().map(|link| link.name).collect();
        Failure::command(format!("`--network {name}`: unknown link\n  known: {}", known.join(", ")))
    })
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let (_, recipe) = args.recipe.read()?;
    let job = args.prepare(recipe, quiet)?;
    if !quiet {
        print_warnings(&job);
    }
    let planned = plan_job(&job)?;
    let facts = |json: &Value| -> PlanFacts {
        serde_json::from_value(json.clone()).expect("plan JSON has the fields of `PlanFacts`")
    };
    if let Some(path) = &args.html {
        let facts = facts(&plan_json::render_json(&planned));
        write_page(path, &RunRecord::of_plan(facts, render_job(&job.recipe)))?;
    }
    let other = if args.against.is_empty() { None } else { Some(read_other(args, quiet)?) };
    if args.json {
        let mut json = plan_json::render_json(&planned);
        if let Some((other, other_facts)) = other {
            json["differences"] = render_differences(&facts(&json), &other_facts);
            json["against"] = other;
        }
        if let Some(end) = end_of(planned.total_seconds()) {
            json["ends_at"] = json!(end.to_rfc3339());
        }
        if args.table {
            json["table"] = json!(plain(&plan_table::render_table(&job, &planned)));
        }
        print_json(&plan_json::render_text(&json))?;
    } else if let Some((_, other)) = &other {
        print_text(&render_comparison(&facts(&plan_json::render_json(&planned)), other))?;
    } else if args.text {
        print_lines(&render_plan(&planned.solution.plan))?;
    } else {
        let end = end_of(planned.total_seconds()).filter(|_| planned.fits);
        let end = end.map(|end| format!("  started now, it ends at {}\n", end.format("%Y-%m-%d %H:%M UTC")));
        print_text(&(plan_table::render_table(&job, &planned) + &end.unwrap_or_default()))?;
    }
    if planned.fits { Ok(()) } else { Err(planned.refusal()) }
}

/// When a run that starts now ends, to the minute; `None` for a run of seconds.
fn end_of(total_seconds: Option<f64>) -> Option<DateTime<Utc>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    let end = now + total_seconds.filter(|seconds| *seconds >= 60.0)?;
    DateTime::from_timestamp((end / 60.0).round() as i64 * 60, 0)
}

/// The plan to compare with: its JSON, and the same parsed.
fn read_other(args: &Args, quiet: bool) -> Result<(Value, PlanFacts), Failure> {
    let is_change = |other: &String| other.contains('=') && !Path::new(other).exists();
    let json = match &args.against[..] {
        changes if changes.iter().all(is_change) => {
            let overrides: Vec<String> = args.recipe.overrides.iter().chain(changes).cloned().collect();
            plan_of(args, read_recipe(&args.recipe.recipe, &overrides)?.1, quiet)?
        }
        [path] => {
            let path = Path::new(path);
            let file = if path.is_dir() { path.join("plan.json") } else { path.to_owned() };
            if file.extension().is_some_and(|extension| extension == "json") {
                read_plan(&file)?
            } else {
                plan_of(args, read_recipe(&file, &[])?.1, quiet)?
            }
        }
        _ => {
            return Err(Failure::command("`--against` takes one recipe, plan or run")
                .hint("only changes as `section.key=value` may be repeated"));
        }
    };
    let facts = serde_json::from_value(json.clone()).map_err(|error| {
        Failure::disk(error).context(format!("`{}` is not a plan", args.against.join(" ")))
    })?;
    Ok((json, facts))
}

fn plan_of(args: &Args, recipe: Recipe, quiet: bool) -> Result<Value, Failure> {
    let job = args.prepare(recipe, quiet)?;
    Ok(plan_json::render_json(&plan_job(&job)?))
}

fn read_plan(file: &Path) -> Result<Value, Failure> {
    let unreadable = |failure: Failure| failure.context(format!("cannot read the plan `{}`", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| unreadable(Failure::disk(error)))?;
    serde_json::from_str(&text).map_err(|error| unreadable(Failure::disk(error)))
}

/// Prints the warnings about the model and the rows of a job.
pub fn print_warnings(job: &Job) {
    for warning in warnings(&job.model, &job.request.spec) {
        say(&format!("{WARNING} {warning}"));
    }
    if let Data::Rows(rows) = &job.data {
        for warning in &rows.warnings {
            say(&format!("{WARNING} {warning}"));
        }
    }
}
