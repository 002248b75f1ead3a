//! The run folder: its lock, its parts, checkpoints, and what a run needs to continue from one.
//!
//! `run_dir.rs` has the names and writes every folder completely or not at all. `resume.rs` says what a checkpoint
//! holds and which one a run continues from; `contents.rs` compares data and model with those of the checkpoint.
//! Left out: the logs in the folder (`logs/`), and the loop that fills it (`train/`).

pub mod check_start;
mod checkpoint_file;
pub mod checksums;
pub mod contents;
pub mod history;
pub mod kept_defaults;
pub mod loss_scale;
mod moments;
pub mod outcome;
pub mod resume;
pub mod run_dir;
pub mod run_lock;
pub mod trained_state;
pub mod trained_weights;
