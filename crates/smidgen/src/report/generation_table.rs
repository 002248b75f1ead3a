//! The budget table of a generation: memory reserved for weights, the KV cache and one forward pass.
//!
//! The rows are those of the `decode` entry point; offloaded weights are listed below them.
//! Left out: the generated text and its speed.

use super::plan_table::{context_note, offload_lines, render_row};
use crate::console::colour::good;
use crate::plan::generation::GenerationPlan;
use smidgen_compile::DecodeShape;
use smidgen_ir::bytes::format_bytes;

pub fn render_generation_table(generation: &GenerationPlan) -> String {
    let DecodeShape { slots, positions, cache_rows, new_tokens } = generation.shape;
    let budget = if generation.stated { "budget" } else { "free" };
    let bytes = format_bytes(generation.budget_bytes);
    let mut text = format!("{} · {budget} {bytes} · {}\n", generation.plan.title, generation.device);
    for (name, bytes) in generation.rows() {
        let note = match name {
            "keys and values" if slots == 1 => format!("{positions} tokens, and their logits"),
            "keys and values" => format!("{cache_rows} tokens of {slots} sequences, and their logits"),
            "activations" => format!("{new_tokens} tokens at a time"),
            "context" => {
                context_note(generation.plan.device, generation.context_bytes, generation.margin_bytes)
            }
            _ => String::new(),
        };
        text += &render_row(name, bytes, &note);
    }
    let spare = format_bytes(generation.budget_bytes - generation.peak_bytes);
    text += &render_row("peak", generation.peak_bytes, &format!("{}, {spare} to spare", good("fits")));
    text + &offload_lines(&generation.plan)
}
