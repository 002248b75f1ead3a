//! The budget table of an evaluation.
//!
//! Weights, activations and workspace of the `eval` entry point, and where offloaded weights are stored.
//! Left out: the scores (`eval_table.rs`).

use super::plan_table::{context_note, offload_lines};
use crate::console::colour::good;
use crate::eval::evaluator::{EvalPlan, Means};
use smidgen_ir::Category;
use smidgen_ir::bytes::format_bytes;
use std::fmt::Write;

/// The budget table.
pub fn render_evaluation_table(evaluation: &EvalPlan, means: Means<'_>) -> String {
    let budget = if means.stated { "budget" } else { "free" };
    let mut text = format!(
        "{} · evaluation · {budget} {} · {}\n",
        evaluation.plan.title,
        format_bytes(means.budget_bytes),
        means.place.describe()
    );
    let mut line = |name: &str, bytes: u64, note: &str| {
        let content = format!("  {name:<16}{:>12}   {note}", format_bytes(bytes));
        writeln!(text, "{}", content.trim_end()).expect("writing to a string");
    };
    for (category, bytes) in &evaluation.plan.peak().rows {
        let note = match category {
            Category::Activations => format!("{} tokens at the same time", evaluation.plan.extent.tokens),
            _ => String::new(),
        };
        if *bytes > 0 {
            line(&category.name().replace('_', " "), *bytes as u64, &note);
        }
    }
    let margin_bytes = means.place.overhead().margin_bytes;
    let note = context_note(evaluation.plan.device, evaluation.context_bytes, margin_bytes);
    line("context", evaluation.context_bytes, &note);
    let spare = format_bytes(means.budget_bytes - evaluation.peak_bytes);
    line("peak", evaluation.peak_bytes, &format!("{}, {spare} to spare", good("fits")));
    text + &offload_lines(&evaluation.plan)
}
