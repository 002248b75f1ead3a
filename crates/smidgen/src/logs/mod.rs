//! The logs of a run: one row per step and per evaluation, the state for Hugging Face's trainer, and measured memory.
//!
//! `journal.rs` writes each row to `metrics.jsonl` and TensorBoard's event file, and adds it to the history of
//! `trainer_state.json`. `monitor.rs` measures memory, and `phases.rs` keeps the peak of each phase.
//! Left out: `run.json`, which is about the run folder (`run_folder/history.rs`), and reports (`report/`).

pub mod appended;
pub mod evaluations;
mod events;
pub mod journal;
pub mod log_history;
pub mod metrics;
pub mod monitor;
pub mod phases;
pub mod thinning;
pub mod trainer_state;
