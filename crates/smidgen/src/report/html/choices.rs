//! The solver's choices by layer, the reasons, and what each choice saves and costs.
//!
//! A layer's activations are kept until backward, recomputed or offloaded; its weights are on the device or prefetched.
//! `report/choices.rs` makes the sentences, as for the plan table.

use super::escape::{escape, marked};
use crate::report::choices::{ActivationChoice, LayerCounts, is_prefetched};
use crate::report::numbers::short;
use crate::report::plan_facts::{PlanFacts, PriceFacts};
use smidgen_ir::bytes::format_bytes;
use std::fmt::Write;

impl ActivationChoice {
    fn class(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::Recomputed => "recomputed",
            Self::Offloaded => "offloaded",
            Self::Both => "both",
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Kept => "activations kept",
            Self::Recomputed => "activations recomputed",
            Self::Offloaded => "activations offloaded",
            Self::Both => "activations recomputed from offloaded inputs",
        }
    }
}

pub fn render_choices(plan: &PlanFacts) -> String {
    format!(
        "{}<div class=\"pair\">{}{}</div>",
        render_layers(plan),
        render_reasons(plan),
        render_prices(plan)
    )
}

fn render_layers(plan: &PlanFacts) -> String {
    let policy = &plan.policy.chosen;
    if plan.layers == 0 {
        return String::new();
    }
    let (mut cells, mut table) = (String::new(), String::new());
    let layers: Vec<(usize, ActivationChoice, bool)> = (0..plan.layers)
        .map(|layer| (layer, ActivationChoice::of(policy, layer), is_prefetched(policy, layer)))
        .collect();
    for (layer, choice, is_prefetched) in &layers {
        let (class, streamed) = (choice.class(), if *is_prefetched { " streamed" } else { "" });
        let label = describe(*choice, *is_prefetched);
        write!(cells, "<li class=\"{class}{streamed}\" title=\"layer {layer}: {label}\">{layer}</li>")
            .expect("writing to a string");
    }
    for run in layers.chunk_by(|one, next| (one.1, one.2) == (next.1, next.2)) {
        let (first, last) = (run[0].0, run[run.len() - 1].0);
        let range = if first == last { format!("{first}") } else { format!("{first} to {last}") };
        let label = describe(run[0].1, run[0].2);
        write!(table, "<tr><th scope=\"row\">{range}</th><td>{label}</td></tr>")
            .expect("writing to a string");
    }
    let count = |choice: ActivationChoice| layers.iter().filter(|layer| layer.1 == choice).count();
    let mut legend: String = ActivationChoice::ALL
        .into_iter()
        .map(|choice| (choice, count(choice)))
        .filter(|(_, count)| *count > 0)
        .map(|(choice, count)| {
            format!("<li class=\"{}\">{} <small>× {count}</small></li>", choice.class(), choice.label())
        })
        .collect();
    let prefetched = LayerCounts::of(policy).weights_offloaded;
    if prefetched > 0 {
        write!(legend, "<li class=\"streamed\">weights prefetched <small>× {prefetched}</small></li>")
            .expect("writing to a string");
    }
    format!(
        "<h3>Layer by layer</h3><ul class=\"legend\">{legend}</ul><ol class=\"layers\" aria-hidden=\"true\">{cells}</ol>\
         <details id=\"layers-table\"><summary>As a table</summary>\
         <table><thead><tr><th scope=\"col\">layers</th><th scope=\"col\">choice</th></tr></thead>\
         <tbody>{table}</tbody></table></details>"
    )
}

fn describe(choice: ActivationChoice, is_prefetched: bool) -> String {
    let weights = if is_prefetched { "weights prefetched" } else { "weights on the device" };
    format!("{}, {weights}", choice.label())
}

fn render_reasons(plan: &PlanFacts) -> String {
    let mut items = String::new();
    for reason in &plan.policy.reasons {
        let (what, why) = reason.split_once(": ").unwrap_or(("", reason));
        let what =
            if what.is_empty() { String::new() } else { format!("<strong>{}</strong> ", escape(what)) };
        write!(items, "<li>{what}{}</li>", marked(why)).expect("writing to a string");
    }
    for note in plan.notes.iter().chain(&plan.advice) {
        write!(items, "<li><strong>note</strong> {}</li>", marked(note)).expect("writing to a string");
    }
    format!("<div><h3>Why</h3><ul class=\"reasons\">{items}</ul></div>")
}

fn render_prices(plan: &PlanFacts) -> String {
    let rows: String = plan.policy.prices.iter().map(render_price).collect();
    match rows.is_empty() {
        true => "<div><h3>What it costs</h3><p class=\"note\">Nothing: everything is on the device, and nothing is \
                 recomputed.</p></div>"
            .into(),
        false => format!(
            "<div><h3>What it costs</h3><table><thead><tr><th scope=\"col\">choice</th><th scope=\"col\">memory</th>\
             <th scope=\"col\">time per step</th></tr></thead><tbody>{rows}</tbody></table>\
             <p class=\"note\">Predicted, compared with the same plan without the choice.</p></div>"
        ),
    }
}

fn render_price(price: &PriceFacts) -> String {
    let size = format_bytes(price.saved_bytes.unsigned_abs());
    let saved = if price.saved_bytes >= 0 { format!("saves {size}") } else { format!("needs {size}") };
    let choice = escape(&price.choice);
    format!(
        "<tr><th scope=\"row\">{choice}</th><td>{saved}</td><td>+{} ms</td></tr>",
        short(price.cost_ms.max(0.0))
    )
}
