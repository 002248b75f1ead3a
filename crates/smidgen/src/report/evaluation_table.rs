//! The budget table of an evaluation.
//!
//! Weights, activations and workspace of the `eval` entry point, and where offloaded weights are stored.
//! Left out: the scores (`score_table.rs`).

use super::plan_table::{context_note, offload_lines, render_row};
use crate::console::colour::good;
use crate::eval::evaluator::{EvalPlan, EvalResources};
use smidgen_ir::Category;
use smidgen_ir::bytes::format_bytes;

pub fn render_evaluation_table(evaluation: &EvalPlan, means: EvalResources<'_>) -> String {
    let budget = if means.stated { "budget" } else { "free" };
    let mut text = format!(
        "{} · evaluation · {budget} {} · {}\n",
        evaluation.plan.title,
        format_bytes(means.budget_bytes),
        means.place.describe()
    );
    for (category, bytes) in &evaluation.plan.peak().rows {
        let note = match category {
            Category::Activations => format!("{} tokens at a time", evaluation.plan.extent.tokens),
            _ => String::new(),
        };
        if *bytes > 0 {
            text += &render_row(&category.name().replace('_', " "), *bytes as u64, &note);
        }
    }
    let margin_bytes = means.place.overhead().margin_bytes;
    let note = context_note(evaluation.plan.device, evaluation.context_bytes, margin_bytes);
    text += &render_row("context", evaluation.context_bytes, &note);
    let spare = format_bytes(means.budget_bytes - evaluation.peak_bytes);
    text += &render_row("peak", evaluation.peak_bytes, &format!("{}, {spare} to spare", good("fits")));
    text + &offload_lines(&evaluation.plan)
}
