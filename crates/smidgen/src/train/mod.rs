//! Training: the loop over steps, and the run around it.
//!
//! `run.rs` goes from a claimed folder to the report, for the command and for the library. `replanning.rs` runs a job
//! with one plan after another, `trainer.rs` is the loop over steps, `steps.rs` computes a step, and `rollouts.rs` generates the
//! answers that a step trains on. The loop decides
//! nothing about memory: it feeds the plan's entry points and reads their report.
//! Left out: checkpoints and resume (`run_folder/`), metrics (`logs/`), and evaluations other than the loss and the
//! accuracy on choices (`eval/`).

mod cautions;
mod evaluation;
pub mod free_memory;
pub mod interrupt;
mod liveness;
mod lr;
mod memory_watch;
mod objective_numbers;
mod prepare;
pub mod replanning;
mod replay;
mod rollouts;
pub mod run;
mod saving;
mod steps;
pub mod trainer;
