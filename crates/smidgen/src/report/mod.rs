//! What a user sees: of a plan, a table for people and JSON for programs; of an adapter or a model, what is in it.
//!
//! A plan's reports read its own buffer table, so neither can say anything else than what the run takes.
//! Left out: HTML, and anything about a run that is under way.

pub mod adapter_summary;
pub mod adapter_table;
pub mod columns;
pub mod command_reference;
pub mod doctor_table;
pub mod eval_table;
pub mod fourier_table;
pub mod model_table;
pub mod plan_json;
pub mod plan_table;
pub mod preview_text;
pub mod wrap;
