//! Training: the loop, checkpoints and resume, the learning rate, the metrics and the run folder.
//!
//! `course.rs` runs a job with one plan after another, `trainer.rs` is the loop over steps. The loop decides nothing
//! about memory: it feeds the plan's entry points and reads their report.
//! Left out: evaluations other than the loss and the accuracy on choices.

pub mod adapt;
pub mod begin;
mod begin_step;
pub mod cautions;
pub mod check_start;
mod checkpoint_file;
pub mod checksums;
pub mod course;
mod dry_step;
mod evaluation;
pub mod events;
mod finish_step;
pub mod free_memory;
pub mod history;
pub mod interrupt;
pub mod journal;
pub mod kept_defaults;
pub mod liveness;
mod loading;
pub mod log_history;
pub mod loss_scale;
pub mod lr;
pub mod made_of;
pub mod metrics;
pub mod moments;
pub mod monitor;
pub mod outcome;
pub mod phases;
pub mod replay;
mod replay_step;
pub mod resume;
pub mod run_dir;
pub mod run_lock;
mod saving;
pub mod standing;
pub mod thinning;
pub mod trained_state;
pub mod trained_weights;
pub mod trainer;
pub mod trainer_state;
