//! A run, or a plan alone, as one HTML file that needs nothing else: no network, no font, no library.
//!
//! Charts are drawn here, as SVG that stretches to any width, with labels outside it that do not; what the page's script
//! adds is a cursor that reads values off. Without it, or without seeing, every chart has its table.
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
