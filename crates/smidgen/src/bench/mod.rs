//! Measures speed and memory of a run on synthetic weights and tokens of a named shape.
//!
//! A benchmark follows the stages of a run: recipe, job, plan, executor. Only weights and tokens are synthetic, so
//! nothing has to be downloaded. Two references are printed with the figures: the FLOPs per second, and the plan's
//! prediction.

pub mod decode;
pub mod synthetic;
pub mod timing;
