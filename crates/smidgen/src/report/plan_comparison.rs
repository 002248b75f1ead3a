//! Two plans side by side: memory by category, speed and choices, with the differences.
//!
//! Both are read from their JSON, so a new plan can be compared with one in a run folder, even of an earlier version;
//! fields that a version did not write are left empty.

use super::choices::{LayerCounts, describe_changes};
use super::plan_facts::PlanFacts;
use serde_json::{Map, Value, json};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::grouped_digits::Grouped;
use std::fmt::Write;

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Bytes,
    Count,
    /// With one digit after the point.
    Decimal,
}

/// A figure of both plans.
#[derive(Clone, Debug)]
struct Figure {
    key: String,
    label: String,
    unit: Unit,
    this: Option<f64>,
    other: Option<f64>,
}

/// Every figure in both plans, then the choices that differ.
pub fn render_comparison(this: &PlanFacts, other: &PlanFacts) -> String {
    let mut text = format!("this:  {}\nother: {}\n\n", this.title, other.title);
    let mut line = |label: &str, columns: [String; 3]| {
        let [this, other, difference] = columns;
        writeln!(text, "{}", format!("  {label:<26}{this:>14}{other:>14}{difference:>14}").trim_end())
            .expect("writing to a string");
    };
    line("", ["this", "other", "this - other"].map(str::to_owned));
    for figure in figures(this, other) {
        let value = |value: Option<f64>| value.map_or("-".to_owned(), |value| figure.unit.render(value));
        let difference = figure.difference().map_or(String::new(), |difference| {
            let sign = if difference < 0.0 { "-" } else { "+" };
            format!("{sign}{}", figure.unit.render(difference.abs()))
        });
        line(&figure.label, [value(figure.this), value(figure.other), difference]);
    }
    let verdict = |plan: &PlanFacts| if plan.fits { "fits" } else { "does not fit" };
    line("budget", [verdict(this).to_owned(), verdict(other).to_owned(), String::new()]);
    let changes = describe_changes(&other.policy.chosen, &this.policy.chosen, this.layers);
    text + &format!("\n  this plan has {changes}\n")
}

/// The figures and choices that differ, by their names in a plan's JSON: both values and the difference.
pub fn render_differences(this: &PlanFacts, other: &PlanFacts) -> Value {
    let mut all: Map<String, Value> = Map::new();
    for figure in figures(this, other).into_iter().filter(|figure| figure.this != figure.other) {
        let Figure { key, this, other, .. } = &figure;
        all.insert(key.clone(), json!({"this": this, "other": other, "difference": figure.difference()}));
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

impl Unit {
    fn render(self, value: f64) -> String {
        match self {
            Unit::Bytes => format_bytes(value as u64),
            Unit::Count => Grouped(value.round() as u64).to_string(),
            Unit::Decimal => format!("{value:.1}"),
        }
    }
}

impl Figure {
    /// This minus other; `None` if they are equal or one is unknown.
    fn difference(&self) -> Option<f64> {
        let difference = self.this? - self.other?;
        (difference != 0.0).then_some(difference)
    }
}

fn figures(this: &PlanFacts, other: &PlanFacts) -> Vec<Figure> {
    let mut all = Vec::new();
    let mut add = |key: &str, label: &str, unit: Unit, value: &dyn Fn(&PlanFacts) -> Option<f64>| {
        let (key, label) = (key.to_owned(), label.to_owned());
        all.push(Figure { key, label, unit, this: value(this), other: value(other) });
    };
    for row in ROWS {
        add(&format!("rows.{row}"), this.label(row), Unit::Bytes, &|plan| {
            plan.rows.get(row).map(|bytes| *bytes as f64)
        });
    }
    add("peak_bytes", "peak", Unit::Bytes, &|plan| Some(plan.peak_bytes as f64));
    add("budget_bytes", "budget", Unit::Bytes, &|plan| Some(plan.budget_bytes as f64));
    for (space, label) in [("pinned", "pinned memory"), ("disk", "disk")] {
        add(&format!("spaces.{space}"), label, Unit::Bytes, &|plan| {
            plan.spaces.get(space).map(|bytes| *bytes as f64)
        });
    }
    add("extent.tokens", "tokens of a micro-batch", Unit::Count, &|plan| Some(plan.extent.tokens as f64));
    let mut add_layers = |key: &str, label, count: fn(LayerCounts) -> usize| {
        add(key, label, Unit::Count, &|plan| Some(count(LayerCounts::of(&plan.policy.chosen)) as f64));
    };
    add_layers("recompute", "layers recomputed", |counts| counts.recomputed);
    add_layers("weights_offloaded", "layers, weights offloaded", |counts| counts.weights_offloaded);
    add_layers("activations_offloaded", "layers, acts offloaded", |counts| counts.activations_offloaded);
    add("micro_steps", "micro-batches per step", Unit::Decimal, &|plan| Some(plan.micro_steps));
    let parameters = |plan: &PlanFacts| plan.trained_parameters.map(|count| count as f64);
    add("trained_parameters", "trained parameters", Unit::Count, &parameters);
    let each = |plan: &PlanFacts| plan.bytes_per_trained_parameter;
    add("bytes_per_trained_parameter", "bytes per trained param", Unit::Decimal, &each);
    add("step_ms", "ms per step, predicted", Unit::Decimal, &|plan| plan.step_ms);
    add("tokens_per_s", "tokens/s, predicted", Unit::Count, &|plan| plan.tokens_per_s);
    all
}

/// In the order of the plan table.
const ROWS: [&str; 7] =
    ["base_weights", "adapters", "gradients", "optimizer", "activations", "workspace", "context"];

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

    /// `plan.json` of 0.16 called what is offloaded "away".
    #[test]
    fn a_plan_of_an_earlier_version_has_the_same_choices() {
        let offloads = |ending: &str| {
            let layers = ["weights", "activations", "optimizer_state", "gradients"];
            let names = layers.map(|what| format!("{what}_{ending}"));
            let mut policy: Map<String, Value> =
                names.into_iter().enumerate().map(|(layer, name)| (name, json!([layer]))).collect();
            policy.extend(["embedding", "tables"].map(|what| (format!("{what}_{ending}"), json!(true))));
            PlanFacts { policy: serde_json::from_value(Value::Object(policy)).unwrap(), ..plan(1, &[], None) }
        };
        let (this, other) = (offloads("offloaded"), offloads("away"));
        assert_eq!(this.policy.chosen, other.policy.chosen);
        assert_ne!(this.policy.chosen, plan(1, &[], None).policy.chosen);
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
