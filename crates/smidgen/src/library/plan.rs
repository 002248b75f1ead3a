//! The predicted memory and speed of a run, as plain data.
//!
//! [`plan`] runs the same solver as `smidgen plan` and copies its answer into [`Plan`], which holds no reference to
//! the job. Left out: buffers and steps, which only a run needs.

use crate::console::colour::plain;
use crate::failure::Failure;
use crate::plan::job::Job;
use crate::plan::planning::plan_job;
use crate::report::{plan_json, plan_table};

/// The predicted memory and speed of a run, from [`plan`].
///
/// The rows add up to `peak_bytes`. `to_string` gives the table that `smidgen plan` prints.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// Whether the run fits its budget. If not, this is the smallest plan, and `advice` says what would fit.
    pub fits: bool,
    /// The memory that the run may use on its device.
    pub budget_bytes: u64,
    /// The memory that it will use.
    pub peak_bytes: u64,
    /// The memory in use at the peak by category: `base_weights`, `adapters`, `gradients`, `optimizer`,
    /// `activations`, `workspace` and `context`, which is memory of the driver or the process itself.
    pub rows: Vec<(String, u64)>,
    /// Predicted time of an optimizer step; `None` for an unknown GPU.
    pub step_ms: Option<f64>,
    /// Predicted speed of training.
    pub tokens_per_s: Option<f64>,
    /// The smallest changes that would make the run fit.
    pub advice: Vec<String>,
    /// Remarks about the plan.
    pub notes: Vec<String>,
    /// The whole plan, with the solver's choices and the phases after training: the content of `plan.json`.
    pub json: serde_json::Value,
    table: String,
}

/// Plans a job: no weight is read and nothing is reserved.
///
/// [`train`](crate::train()) makes the same plan.
///
/// # Errors
/// Choices in the recipe's `[memory]` section that exclude each other. A run that does not fit is not an error: its
/// plan has `fits == false`.
pub fn plan(job: &Job) -> Result<Plan, Failure> {
    let planned = plan_job(job)?;
    let solution = &planned.solution;
    let peak = solution.plan.peak();
    let mut rows: Vec<(String, u64)> =
        peak.rows.iter().map(|(category, bytes)| (category.name().to_string(), *bytes as u64)).collect();
    rows.push(("context".to_string(), solution.context_bytes));
    Ok(Plan {
        fits: planned.fits,
        budget_bytes: planned.budget_bytes,
        peak_bytes: solution.peak_bytes,
        rows,
        step_ms: planned.speed().map(|speed| speed.step_ms),
        tokens_per_s: planned.speed().map(|speed| speed.tokens_per_s),
        json: plan_json::render_json(&planned),
        table: plain(&plan_table::render_table(job, &planned)),
        advice: planned.advice,
        notes: planned.notes,
    })
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.table)
    }
}
