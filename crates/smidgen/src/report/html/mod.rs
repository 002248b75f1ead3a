//! A run, a plan without a run, or several runs as one self-contained HTML file: no network, fonts or libraries.
//!
//! Charts are SVG that stretches to any width, with HTML labels over it. The script only adds a cursor that shows
//! values, and switches for the axis and the smoothing; every chart also has a table, for readers without scripts or
//! with a screen reader.
//! All text from files passes through `escape.rs`.

mod charts;
mod compare_charts;
mod escape;
mod memory_timeline;
pub mod page;
mod run_charts;

#[cfg(test)]
mod page_tests;

pub use page::{render_comparison, render_content, render_live_page, render_page};
