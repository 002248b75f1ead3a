//! `smidgen report`: a run in a few lines, and as an HTML page.
//!
//! The page goes into the run folder, or to `--out`; `--json` without `--out` writes no file. A run that has not
//! ended is reported up to its last step.

use crate::console::stdout::{print, print_text};
use crate::failure::Failure;
use crate::report::page_file::{FILE_NAME, write_page};
use crate::report::plan_json::render_text;
use crate::report::run_folder::{RunRecord, read_run};
use crate::report::run_summary::{RunSummary, summarize};
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of a run
    run: PathBuf,
    /// Print the report as JSON; the page is then written only with `--out`
    #[arg(long)]
    json: bool,
    /// File for the page [default: `report.html` in the run folder]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let record = read_run(&args.run)?;
    let summary = summarize(&record);
    let page = match (&args.out, args.json) {
        (Some(path), _) => Some(path.clone()),
        (None, true) => None,
        (None, false) => Some(args.run.join(FILE_NAME)),
    };
    if let Some(path) = &page {
        write_page(path, &record)?;
    }
    if args.json {
        return print_json(&record, &summary, page.as_deref());
    }
    let mut lines = summary.render_lines();
    lines.extend(page.map(|path| format!("page: `{}`", path.display())));
    print_text(&format!("{}\n", lines.join("\n")))
}

fn print_json(record: &RunRecord, summary: &RunSummary, page: Option<&Path>) -> Result<(), Failure> {
    let mut value = summary.render_json();
    value["phases"] = record.phases.iter().map(|(name, phase)| (name.clone(), phase.render_json())).collect();
    value["page"] = json!(page);
    print(&render_text(&value))
}

/// The output of `train --json`: the same as `report --json`.
pub fn print_run(folder: &Path) -> Result<(), Failure> {
    let record = read_run(folder)?;
    print_json(&record, &summarize(&record), Some(&folder.join(FILE_NAME)))
}
