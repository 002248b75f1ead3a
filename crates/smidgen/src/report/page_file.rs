//! Writes pages to files: the page of a run or a plan, and the page of several runs.
//!
//! Left out: the content of the pages (`html/`).

use super::compare::Comparison;
use super::html::{render_comparison, render_page};
use super::run_folder::{RunRecord, read_run};
use super::run_summary::{RunSummary, summarize};
use crate::failure::Failure;
use smidgen_formats::whole_file::write_whole;
use std::path::Path;

pub const FILE_NAME: &str = "report.html";

/// The file for the page of several runs, in the working directory.
pub const COMPARISON_NAME: &str = "compare.html";

pub fn write_page(path: &Path, record: &RunRecord) -> Result<(), Failure> {
    write_text(path, &render_page(record))
}

pub fn write_comparison(path: &Path, compared: &Comparison) -> Result<(), Failure> {
    write_text(path, &render_comparison(compared))
}

fn write_text(path: &Path, page: &str) -> Result<(), Failure> {
    write_whole(path, |out| out.write_all(page.as_bytes())).map_err(Failure::disk)
}

/// Writes the page of a run into its folder.
pub fn write_report(folder: &Path) -> Result<RunSummary, Failure> {
    let record = read_run(folder)?;
    write_page(&folder.join(FILE_NAME), &record)?;
    Ok(summarize(&record))
}
