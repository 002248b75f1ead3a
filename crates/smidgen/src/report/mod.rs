//! What a user sees: of a plan, a table for people and JSON for programs; of an adapter or a model, what is in it.
//!
//! A plan's reports read its own buffer table, so neither can say anything else than what the run takes.
//! Of a run: what its folder tells (`run_folder.rs`), in short (`run_summary.rs`) and as a page (`html`), while it goes
//! on and afterwards.

pub mod adapter_summary;
pub mod adapter_table;
pub mod choices;
pub mod command_reference;
pub mod doctor_table;
pub mod eval_table;
pub mod evaluation_table;
pub mod fourier_table;
pub mod generation_table;
pub mod html;
pub mod model_table;
pub mod page_file;
pub mod plan_facts;
pub mod plan_json;
pub mod plan_table;
pub mod plan_texts;
pub mod preview_text;
pub mod run_folder;
pub mod run_summary;
pub mod series;
pub mod timeline;
