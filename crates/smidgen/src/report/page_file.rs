//! `report.html`: the page of a run or of a plan as a file, and the page of a run that has ended.
//!
//! Left out: what is on the page (`html/`), and what is said about it.

use super::html::render_page;
use super::run_folder::{RunRecord, read_run};
use super::run_summary::{RunSummary, summarize};
use crate::failure::Failure;
use smidgen_formats::whole_file::write_whole;
use std::path::Path;

pub const FILE_NAME: &str = "report.html";

pub fn write_page(path: &Path, record: &RunRecord) -> Result<(), Failure> {
    let page = render_page(record);
    write_whole(path, |out| out.write_all(page.as_bytes())).map_err(Failure::disk)
}

/// Writes the page of a run into its folder.
pub fn write_report(folder: &Path) -> Result<RunSummary, Failure> {
    let record = read_run(folder)?;
    write_page(&folder.join(FILE_NAME), &record)?;
    Ok(summarize(&record))
}
