//! Reports: plans as tables and JSON, runs as a summary and an HTML page, the contents of adapters and models.
//!
//! Reports of a plan are computed from its buffer table, so they state what the run will reserve. Reports of a run are
//! made from its folder (`run_folder.rs`), during the run and afterwards.

pub mod adapter_summary;
pub mod adapter_table;
pub mod choices;
pub mod command_reference;
pub mod compare;
pub mod doctor_table;
pub mod evaluation_table;
pub mod fourier_table;
pub mod generation_table;
pub mod html;
pub mod leak;
pub mod model_table;
pub mod numbers;
pub mod page_file;
pub mod plan_comparison;
pub mod plan_facts;
pub mod plan_json;
pub mod plan_table;
pub mod plan_texts;
pub mod preview_text;
pub mod run_folder;
pub mod run_summary;
pub mod score_table;
pub mod series;
pub mod timeline;
