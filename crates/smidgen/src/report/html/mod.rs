//! A run, or a plan without a run, as one self-contained HTML file: no network, no font, no library.
//!
//! Charts are SVG that stretches to any width, with HTML labels over it. The script only adds a cursor that shows values;
//! every chart also has a table, for readers without scripts or with a screen reader.
//! Everything that comes from a file passes through `escape.rs`.

mod charts;
mod choices;
mod escape;
mod headline;
mod memory_timeline;
mod numbers;
pub mod page;
mod run_charts;

#[cfg(test)]
mod page_tests;

pub use page::{render_content, render_live_page, render_page};
