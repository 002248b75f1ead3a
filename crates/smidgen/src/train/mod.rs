//! Training: the loop, what it loads and saves, the learning rate, the metrics and the run folder.
//!
//! The loop (`trainer.rs`) decides nothing about memory: it feeds the plan's entry points and reads
//! their report. Left out: early stopping, and evaluations other than the loss.

pub mod adapters;
pub mod feed;
pub mod lr;
pub mod metrics;
pub mod progress;
pub mod resume;
pub mod run_dir;
pub mod trainer;
pub mod weights;
