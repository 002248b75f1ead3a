//! A plan as JSON: the fields of the contract, for `plan --json` and the run folder's `plan.json`.
//!
//! Every size is in bytes, and the rows add up to `peak_bytes`. `timeline` holds the data of the page's memory chart
//! (`timeline.rs`), a few hundred numbers per column, so that a page can be made without planning again.
//! Left out: buffers and steps (`plan --text`).

use super::choices::{describe, layer_count, render_reasons};
use super::timeline::draw_timeline;
use crate::plan::context::pinned_bytes;
use crate::plan::phases::must_fit;
use crate::plan::planning::Planned;
use crate::plan::weight_kinds::KindOfWeights;
use serde_json::{Map, Value, json};
use smidgen_compile::Solution;
use smidgen_ir::Entry;

pub fn render_json(planned: &Planned) -> Value {
    let (solution, plan) = (&planned.solution, &planned.solution.plan);
    let peak = plan.peak();
    let mut rows: Map<String, Value> =
        peak.rows.iter().map(|(category, bytes)| (category.name().to_string(), json!(bytes))).collect();
    rows.insert("context".into(), json!(planned.solution.context_bytes));
    let live = |entry: Entry| plan.live_bytes(entry).into_iter().max().unwrap_or(0);
    let at_rest = planned.solution.context_bytes + plan.persistent_bytes as u64;
    let phase = |entry: Entry| at_rest + live(entry) as u64;
    let life: Map<String, Value> =
        planned.life.iter().map(|phase| (phase.name.to_string(), phase.needs.render_json())).collect();
    let profile = planned.profile.device.at(plan.precision);
    let (speed, trained) = (planned.speed(), planned.trained());
    json!({
        "title": plan.title,
        "ranks": planned.world.rank.of,
        "nodes": planned.world.machines,
        "layers": layer_count(plan),
        "trains_base": planned.trains_base,
        "fits": planned.fits,
        "budget_bytes": planned.budget_bytes,
        "peak_bytes": solution.peak_bytes,
        "peak_at": plan.place(peak.entry, peak.step),
        "largest_at_peak": peak.largest.iter().map(|(name, bytes)| json!({"name": name, "bytes": bytes})).collect::<Vec<_>>(),
        "spaces": {
            "device": solution.peak_bytes,
            "pinned": pinned_bytes(plan),
            "host": 0,
            "disk": plan.disk.bytes(),
        },
        "rows": rows,
        "policy": render_policy(solution),
        "micro_steps": solution.demand.micro_steps,
        "extent": { "tokens": plan.extent.tokens, "rows": plan.extent.rows, "segments": plan.extent.segments },
        "step_ms": speed.map(|speed| speed.step_ms),
        "tokens_per_s": speed.map(|speed| speed.tokens_per_s),
        "total_steps": planned.total_steps,
        "epoch_steps": planned.epoch_steps,
        "total_seconds": planned.total_seconds(),
        "exchange": planned.exchange.map(|exchange| exchange.render_json()),
        "efficiency": planned.exchange.filter(|_| speed.is_some()).map(|exchange| exchange.efficiency),
        "trained_parameters": trained.parameters,
        "bytes_per_trained_parameter": trained.bytes_per_parameter(),
        "weights": planned.kinds.iter().map(KindOfWeights::render_json).collect::<Vec<_>>(),
        "host_memory": planned.host_bytes.map(|needed_bytes| json!({
            "needed_bytes": needed_bytes,
            "shared_bytes": plan.host.shared_bytes,
            "offload_limit_bytes": Some(planned.offload_budget_bytes).filter(|limit| *limit < u64::MAX),
        })),
        "arena": {
            "reserved_bytes": plan.reserved_bytes(),
            "peak_live_bytes": plan.persistent_bytes + peak.transient_live_bytes,
            "transient_reserved_bytes": plan.transient_bytes,
            "transient_peak_live_bytes": peak.transient_live_bytes,
        },
        "phases": {
            "load": at_rest,
            "micro_step": phase(Entry::MicroStep),
            "update": phase(Entry::Update),
            "refresh": phase(Entry::Refresh),
            "eval": phase(Entry::Eval),
            "save": at_rest,
        },
        "profile": planned.profile.render_json(),
        "life": life,
        "must_fit": must_fit(&planned.life).render_json(),
        "advice": planned.advice,
        "notes": planned.notes,
        "timeline": draw_timeline(plan, solution.context_bytes, &profile, planned.trains_base),
    })
}

/// The memory choices, the device that computes, and the reasons and prices of the choices.
fn render_policy(solution: &Solution) -> Value {
    let mut policy = serde_json::to_value(&solution.policy).expect("a policy has plain fields");
    policy["device"] = json!(solution.plan.device.name());
    policy["threads"] = json!(solution.plan.threads);
    policy["reasons"] = json!(render_reasons(solution));
    let prices = solution.prices.iter().map(|price| {
        json!({
            "choice": describe(price.choice),
            "saved_bytes": price.saved_bytes,
            "cost_ms": price.cost_ms,
        })
    });
    policy["prices"] = prices.collect();
    policy
}

/// Readable JSON: one line per field, and lists of plain values on one line.
pub fn render_text(value: &Value) -> String {
    let mut text = String::new();
    write_value(value, 0, &mut text);
    text.push('\n');
    text
}

fn write_value(value: &Value, depth: usize, text: &mut String) {
    let is_plain = |it: &Value| !it.is_array() && !it.is_object();
    let line = |text: &mut String, depth: usize| {
        text.push('\n');
        text.push_str(&"  ".repeat(depth));
    };
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            text.push('{');
            for (number, (name, field)) in fields.iter().enumerate() {
                text.push_str(if number > 0 { "," } else { "" });
                line(text, depth + 1);
                text.push_str(&format!("{}: ", Value::from(name.as_str())));
                write_value(field, depth + 1, text);
            }
            line(text, depth);
            text.push('}');
        }
        Value::Array(items) if !items.iter().all(is_plain) => {
            text.push('[');
            for (number, item) in items.iter().enumerate() {
                text.push_str(if number > 0 { "," } else { "" });
                line(text, depth + 1);
                write_value(item, depth + 1, text);
            }
            line(text, depth);
            text.push(']');
        }
        // Plain values, and lists of plain values.
        other => text.push_str(&other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_plain_values_are_one_line() {
        let value =
            json!({"a": [1, 2.5, "x"], "b": {"c": [], "d": {}}, "e": [{"f": null}, [3]], "g \"": true});
        let text = render_text(&value);
        assert_eq!(
            text,
            "{\n  \"a\": [1,2.5,\"x\"],\n  \"b\": {\n    \"c\": [],\n    \"d\": {}\n  },\n  \"e\": [\n    {\n      \"f\": null\n    },\n    [3]\n  ],\n  \"g \\\"\": true\n}\n"
        );
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
