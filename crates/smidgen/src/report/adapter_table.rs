//! An adapter's summary as text in 80 columns, and as JSON.
//! A value that is the same in all rows is stated once above the table and has no column.
//! Left out: the numbers themselves (`adapter_summary`).

use super::adapter_summary::{AdapterSummary, Magnitude, ModuleSummary};
use super::fourier_table::{FourierRow, fourier_json, last_name, render_fourier_table};
use crate::console::columns::{Side, render_columns, render_field, short};
use serde_json::{Value, json};
use smidgen_formats::peft::{Bias, split_layer};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::grouped_digits::Grouped;
use std::collections::BTreeSet;

pub fn render_adapter(summary: &AdapterSummary) -> String {
    let modules = &summary.modules;
    let mut text = format!("{} adapter in `{}`\n", summary.kind, summary.path.display());
    let mut field = |name: &str, value: &str| text.push_str(&render_field(name, value));
    field("base", summary.base.as_deref().unwrap_or("not named"));
    field("rank", &range(modules.iter().map(|module| module.rank as f64)));
    field("alpha", &range(modules.iter().map(|module| module.alpha)));
    field("scale", &range(modules.iter().map(|module| module.scale)));
    let layers: BTreeSet<usize> = modules.iter().filter_map(|module| module.layer).collect();
    let names: BTreeSet<&str> = modules.iter().map(|module| split_layer(&module.path).1).collect();
    let names: Vec<&str> = names.into_iter().collect();
    field("modules", &format!("{} in {}: {}", modules.len(), count(layers.len(), "layer"), names.join(", ")));
    if summary.bias != Bias::None || summary.biases > 0 {
        field("biases", &summary.biases.to_string());
    }
    field("parameters", &Grouped(summary.parameters).to_string());
    let elements: Vec<String> = summary.elements.keys().map(|name| name.to_lowercase()).collect();
    field("tensors", &format!("{}, {}", format_bytes(summary.bytes), elements.join(" and ")));
    text.push('\n');
    text.push_str(&render_modules(modules));
    let fourier = fourier(summary);
    if !fourier.is_empty() {
        text.push('\n');
        text.push_str(&render_fourier_table(&fourier));
    }
    text
}

pub fn adapter_json(summary: &AdapterSummary) -> Value {
    let mut object = json!(summary);
    let fourier = fourier(summary);
    if !fourier.is_empty() {
        object["fourier"] = fourier_json(&fourier);
    }
    object
}

fn fourier(summary: &AdapterSummary) -> Vec<FourierRow> {
    summary.modules.iter().filter_map(|module| module.fourier.clone()).collect()
}

type Cell = fn(&ModuleSummary) -> String;

fn render_modules(modules: &[ModuleSummary]) -> String {
    let mut columns: Vec<(&str, Side, Cell)> = vec![
        ("layer", Side::Right, |module| module.layer.map_or(String::new(), |layer| layer.to_string())),
        if last_names_tell_apart(modules) {
            ("module", Side::Left, |module| last_name(&module.path).to_string())
        } else {
            ("module", Side::Left, |module| split_layer(&module.path).1.to_string())
        },
    ];
    let optional: [(&str, Cell); 2] =
        [("rank", |module| module.rank.to_string()), ("scale", |module| short(module.scale))];
    for (heading, cell) in optional {
        if modules.iter().any(|module| cell(module) != cell(&modules[0])) {
            columns.push((heading, Side::Right, cell));
        }
    }
    let norms: [(&str, Cell); 3] = [
        ("‖A‖", |module| short(module.a_norm)),
        ("‖B‖", |module| short(module.b_norm)),
        ("‖s·B·A‖", |module| short(module.product_norm)),
    ];
    let magnitudes: &[(&str, Cell)] = match modules.first().and_then(|module| module.magnitude) {
        None => &[],
        Some(Magnitude::Norm(_)) => &[("‖m‖", |module| magnitude(module)[0].clone())],
        Some(Magnitude::Change { .. }) => &[
            ("mean Δm", |module| magnitude(module)[0].clone()),
            ("max Δm", |module| magnitude(module)[1].clone()),
        ],
    };
    columns.extend(norms.iter().chain(magnitudes).map(|(heading, cell)| (*heading, Side::Right, *cell)));
    let headings: Vec<(&str, Side)> = columns.iter().map(|(heading, side, _)| (*heading, *side)).collect();
    let rows: Vec<Vec<String>> =
        modules.iter().map(|module| columns.iter().map(|(_, _, cell)| cell(module)).collect()).collect();
    render_columns(&headings, &rows)
}

/// The norm of a magnitude, or the mean and the largest change of its rows.
fn magnitude(module: &ModuleSummary) -> [String; 2] {
    let percent = |fraction: f64| format!("{:.2} %", 100.0 * fraction);
    match module.magnitude {
        None => Default::default(),
        Some(Magnitude::Norm(norm)) => [short(norm), String::new()],
        Some(Magnitude::Change { mean, max }) => [percent(mean), percent(max)],
    }
}

/// Whether the last part of the name, such as `q_proj`, identifies a module within its layer.
fn last_names_tell_apart(modules: &[ModuleSummary]) -> bool {
    let names: BTreeSet<(Option<usize>, &str)> =
        modules.iter().map(|module| (module.layer, last_name(&module.path))).collect();
    names.len() == modules.len()
}

/// One number if all are equal, else the smallest and the largest.
fn range(values: impl Iterator<Item = f64> + Clone) -> String {
    let least = values.clone().fold(f64::INFINITY, f64::min);
    let most = values.fold(f64::NEG_INFINITY, f64::max);
    let text = |value: f64| match value.to_string() {
        exact if exact.len() <= 6 => exact,
        _ => short(value),
    };
    if least == most { text(least) } else { format!("{} to {}", text(least), text(most)) }
}

fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}
