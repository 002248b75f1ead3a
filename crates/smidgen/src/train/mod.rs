//! Training: the loop, what it loads and saves, the learning rate, the metrics and the run folder.
//!
//! The loop (`trainer.rs`) decides nothing about memory: it feeds the plan's entry points and reads their report.
//! Left out: evaluations other than the loss.

pub mod adapt;
pub mod begin;
pub mod begun_step;
pub mod cautions;
pub mod check_start;
pub mod course;
mod dry_step;
mod evaluation;
pub mod events;
pub mod free_memory;
mod gathered;
pub mod history;
pub mod interrupt;
pub mod journal;
pub mod kept_defaults;
pub mod liveness;
pub mod log_history;
pub mod loss_scale;
pub mod lr;
pub mod made_of;
pub mod metrics;
pub mod micro_steps;
pub mod moments;
pub mod monitor;
pub mod outcome;
pub mod phases;
pub mod replay;
mod replay_step;
pub mod resume;
pub mod run_dir;
pub mod run_lock;
pub mod standing;
pub mod trained_state;
pub mod trained_weights;
pub mod trainer;
pub mod trainer_state;
