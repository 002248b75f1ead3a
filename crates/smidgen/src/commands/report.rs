//! `smidgen report`: a run in a few lines and as an HTML page, or several runs side by side.
//!
//! The page of one run is written into its folder, the page of several runs into the working directory, unless `--out`
//! names a file; `--json` without `--out` writes no file. A run that has not ended is reported up to its last step.

use crate::console::stdout::{print_json, print_text};
use crate::failure::Failure;
use crate::report::compare::read_runs;
use crate::report::page_file::{COMPARISON_NAME, FILE_NAME, write_comparison, write_page};
use crate::report::plan_json::render_text;
use crate::report::run_folder::{RunRecord, read_run};
use crate::report::run_summary::{RunSummary, summarize};
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of a run; with several runs the report compares them
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Print the report as JSON; then the page is written only with `--out`
    #[arg(long)]
    json: bool,
    /// File for the page [default: `report.html` in the run folder; for several runs `compare.html` in the working
    /// directory]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    match &args.runs[..] {
        [run] => report_one(run, args),
        runs => report_several(runs, args),
    }
}

/// The file for the page, or `None` if no page is to be written.
fn page_path(args: &Args, default: impl FnOnce() -> PathBuf) -> Option<PathBuf> {
    args.out.clone().or_else(|| (!args.json).then(default))
}

fn report_one(folder: &Path, args: &Args) -> Result<(), Failure> {
    let record = read_run(folder)?;
    let summary = summarize(&record);
    let page = page_path(args, || folder.join(FILE_NAME));
    if let Some(path) = &page {
        write_page(path, &record)?;
    }
    if args.json {
        return print_record(&record, &summary, page.as_deref());
    }
    let mut lines = summary.render_lines();
    lines.extend(page.map(|path| format!("page: `{}`", path.display())));
    print_text(&format!("{}\n", lines.join("\n")))
}

fn report_several(folders: &[PathBuf], args: &Args) -> Result<(), Failure> {
    let compared = read_runs(folders)?;
    let page = page_path(args, || COMPARISON_NAME.into());
    if let Some(path) = &page {
        write_comparison(path, &compared)?;
    }
    if args.json {
        let mut value = compared.render_json();
        value["page"] = json!(page);
        return print_json(&render_text(&value));
    }
    let named = page.map_or(String::new(), |path| format!("page: `{}`\n", path.display()));
    print_text(&format!("{}{named}", compared.render_text()))
}

fn print_record(record: &RunRecord, summary: &RunSummary, page: Option<&Path>) -> Result<(), Failure> {
    let mut value = json!(summary);
    value["phases"] = json!(record.phases);
    value["page"] = json!(page);
    print_json(&render_text(&value))
}

/// The output of `train --json`: the same as `report --json`.
pub fn print_run(folder: &Path) -> Result<(), Failure> {
    let record = read_run(folder)?;
    print_record(&record, &summarize(&record), Some(&folder.join(FILE_NAME)))
}
