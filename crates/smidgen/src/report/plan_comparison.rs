//! Two plans side by side: memory by category, speed and choices, with the differences.
//!
//! Both are read from their JSON, so a new plan can be compared with one in a run folder, even of an earlier version;
//! fields that a version did not write are left empty.

use super::choices::describe_changes;
use super::plan_facts::PlanFacts;
use serde_json::{Map, Value, json};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::grouped_digits::Grouped;

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Bytes,
    Count,
    /// With one digit after the point.
    Decimal,
    /// The number of layers in a list of the policy.
    Layers,
}

/// Every figure by its place in a plan's JSON, in the order of the plan table; categories have their own labels.
const FIGURES: [(&str, &str, Unit); 20] = [
    ("rows.base_weights", "", Unit::Bytes),
    ("rows.adapters", "", Unit::Bytes),
    ("rows.gradients", "", Unit::Bytes),
    ("rows.optimizer", "", Unit::Bytes),
    ("rows.activations", "", Unit::Bytes),
    ("rows.workspace", "", Unit::Bytes),
    ("rows.context", "", Unit::Bytes),
    ("peak_bytes", "peak", Unit::Bytes),
    ("budget_bytes", "budget", Unit::Bytes),
    ("spaces.pinned", "pinned memory", Unit::Bytes),
    ("spaces.disk", "disk", Unit::Bytes),
    ("extent.tokens", "tokens of a micro-batch", Unit::Count),
    ("recompute", "layers recomputed", Unit::Layers),
    ("weights_offloaded", "layers, weights offloaded", Unit::Layers),
    ("activations_offloaded", "layers, acts offloaded", Unit::Layers),
    ("micro_steps", "micro-batches per step", Unit::Decimal),
    ("trained_parameters", "trained parameters", Unit::Count),
    ("bytes_per_trained_parameter", "bytes per trained param", Unit::Decimal),
    ("step_ms", "ms per step, predicted", Unit::Decimal),
    ("tokens_per_s", "tokens/s, predicted", Unit::Count),
];

impl Unit {
    fn render(self, value: f64) -> String {
        match self {
            Unit::Bytes => format_bytes(value as u64),
            Unit::Count | Unit::Layers => Grouped(value.round() as u64).to_string(),
            Unit::Decimal => format!("{value:.1}"),
        }
    }

    /// The figure with this name; `None` if the plan does not have it.
    fn read(self, plan: &Value, key: &str) -> Option<f64> {
        if self == Unit::Layers {
            return plan["policy"][key].as_array().map(|layers| layers.len() as f64);
        }
        key.split('.').fold(plan, |fields, name| &fields[name]).as_f64()
    }
}

/// This minus other; `None` if they are equal or one is unknown.
fn difference(this: Option<f64>, other: Option<f64>) -> Option<f64> {
    Some(this? - other?).filter(|difference| *difference != 0.0)
}

/// Every figure in both plans, then the choices that differ.
pub fn render_comparison(this: &PlanFacts, other: &PlanFacts) -> String {
    let mut text = format!("this:  {}\nother: {}\n\n", this.title, other.title);
    let mut line = |label: &str, [this, other, difference]: [String; 3]| {
        let line = format!("  {label:<26}{this:>14}{other:>14}{difference:>14}");
        text += &format!("{}\n", line.trim_end());
    };
    line("", ["this", "other", "this - other"].map(str::to_owned));
    let plans = [json!(this), json!(other)];
    for (key, label, unit) in FIGURES {
        let [mine, theirs] = [0, 1].map(|plan| unit.read(&plans[plan], key));
        let value = |value: Option<f64>| value.map_or("-".to_owned(), |value| unit.render(value));
        let difference = difference(mine, theirs).map_or(String::new(), |difference| {
            format!("{}{}", if difference < 0.0 { "-" } else { "+" }, unit.render(difference.abs()))
        });
        let label = key.strip_prefix("rows.").map_or(label, |row| this.label(row));
        line(label, [value(mine), value(theirs), difference]);
    }
    let verdict = |plan: &PlanFacts| if plan.fits { "fits" } else { "does not fit" };
    line("budget", [verdict(this).to_owned(), verdict(other).to_owned(), String::new()]);
    let changes = describe_changes(&other.policy.chosen, &this.policy.chosen, this.layers);
    text + &format!("\n  this plan has {changes}\n")
}

/// The figures and choices that differ, by their names in a plan's JSON: both values and the difference.
pub fn render_differences(this: &PlanFacts, other: &PlanFacts) -> Value {
    let mut all: Map<String, Value> = Map::new();
    let plans = [json!(this), json!(other)];
    for (key, _, unit) in FIGURES {
        let [this, other] = [0, 1].map(|plan| unit.read(&plans[plan], key));
        if this != other {
            let difference = difference(this, other);
            all.insert(key.into(), json!({"this": this, "other": other, "difference": difference}));
        }
    }
    let policies = [this, other].map(|plan| serde_json::to_value(&plan.policy.chosen).unwrap_or_default());
    let [Value::Object(mine), Value::Object(theirs)] = policies else { return Value::Object(all) };
    for (name, value) in mine {
        let their_value = theirs.get(&name).cloned().unwrap_or_default();
        if value != their_value {
            all.insert(format!("policy.{name}"), json!({"this": value, "other": their_value}));
        }
    }
    Value::Object(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(peak_bytes: u64, recomputed: &[usize], step_ms: Option<f64>) -> PlanFacts {
        let value = json!({
            "title": "m", "layers": 4, "fits": true, "budget_bytes": 4096u64 << 20, "peak_bytes": peak_bytes,
            "rows": {"activations": peak_bytes}, "policy": {"recompute": recomputed},
            "extent": {"tokens": 512}, "step_ms": step_ms, "tokens_per_s": step_ms.map(|ms| 1e6 / ms),
            "arena": {"reserved_bytes": 1, "peak_live_bytes": 1},
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn two_plans_stand_side_by_side_with_their_differences() {
        let (this, other) = (plan(1 << 30, &[0, 1], Some(500.0)), plan(2 << 30, &[], Some(400.0)));
        let text = render_comparison(&this, &other);
        for line in [
            "  activations                     1.00 GiB      2.00 GiB     -1.00 GiB\n",
            "  ms per step, predicted             500.0         400.0        +100.0\n",
            "  tokens/s, predicted                2,000         2,500          -500\n",
            "  tokens of a micro-batch              512           512\n",
            "\n  this plan has recompute of 2 of 4 layers (were 0)\n",
        ] {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
        let differences = render_differences(&this, &other);
        assert_eq!(differences["peak_bytes"]["difference"], json!(-1073741824.0));
        assert_eq!(differences["policy.recompute"], json!({"this": [0, 1], "other": []}));
        assert_eq!(differences.get("extent.tokens"), None);
    }

    #[test]
    fn what_one_of_them_does_not_know_is_left_empty() {
        let (this, other) = (plan(1 << 30, &[], None), plan(1 << 30, &[], Some(400.0)));
        let text = render_comparison(&this, &other);
        assert!(text.contains("  ms per step, predicted                 -         400.0\n"), "{text}");
        assert!(text.contains("this plan has the same choices"), "{text}");
        assert_eq!(render_differences(&this, &other)["step_ms"]["difference"], Value::Null);
    }
}
