//! Training: the loop, what it loads and saves, the learning rate, the metrics and the run folder.

pub mod feed;
pub mod lr;
pub mod metrics;
pub mod progress;
pub mod resume;
pub mod run_dir;
pub mod tensors;
pub mod trainer;
