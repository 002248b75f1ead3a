//! The budget table of a generation: what is reserved for weights, the KV cache and one pass.
//!
//! The rows are those of the `decode` entry point; offloaded weights are listed below them.
//! Left out: the generated text and its speed.

use super::plan_table::{context_note, offload_lines};
use crate::console::colour::good;
use crate::plan::generation::GenerationPlan;
use smidgen_compile::DecodeShape;
use smidgen_ir::bytes::format_bytes;
use std::fmt::Write;

/// The budget table of a generation.
pub fn render_generation_table(generation: &GenerationPlan) -> String {
    let DecodeShape { slots, positions, cache_rows, new_tokens } = generation.shape;
    let budget = if generation.stated { "budget" } else { "free" };
    let mut text = String::new();
    let mut line = |content: String| writeln!(text, "{}", content.trim_end()).expect("writing to a string");
    let bytes = format_bytes(generation.budget_bytes);
    line(format!("{} · {budget} {bytes} · {}", generation.plan.title, generation.device));
    for (name, bytes) in generation.rows() {
        let note = match name {
            "keys and values" if slots == 1 => format!("{positions} tokens, and their logits"),
            "keys and values" => format!("{cache_rows} tokens of {slots} sequences, and their logits"),
            "activations" => format!("{new_tokens} tokens at the same time"),
            "context" => {
                context_note(generation.plan.device, generation.context_bytes, generation.margin_bytes)
            }
            _ => String::new(),
        };
        line(format!("  {name:<16}{:>12}   {note}", format_bytes(bytes)));
    }
    let spare = format_bytes(generation.budget_bytes - generation.peak_bytes);
    let verdict = format!("{}, {spare} to spare", good("fits"));
    line(format!("  {:<16}{:>12}   {verdict}", "peak", format_bytes(generation.peak_bytes)));
    text + &offload_lines(&generation.plan)
}
