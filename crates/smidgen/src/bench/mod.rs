//! Measured speed and memory of a run, on synthetic weights and tokens of a named shape.
//!
//! A bench goes the way of a run: recipe, job, plan, executor. Only the sources differ: weights and tokens are made
//! up, so nothing has to be fetched. What it prints beside its figures is what they can be held against: the work a
//! token takes by counting, and the plan's own prediction.

pub mod shapes;
pub mod synthetic;
pub mod timing;
