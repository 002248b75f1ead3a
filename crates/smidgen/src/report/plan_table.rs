//! The budget table of a plan: memory by category, the peak, and the solver's choices.
//!
//! Rows are the bytes in use at the peak; the last lines are the choices and their reasons.
//! The verdict is coloured; code that writes the table to a file removes the colour.

use super::choices::{LayerCounts, render_price, render_reasons};
use super::numbers::{duration, milliseconds};
use crate::console::colour::{NOTE, bad, good};
use crate::plan::exchange::Exchange;
use crate::plan::job::Job;
use crate::plan::planning::{Planned, Speed};
use crate::plan::weight_kinds::describe_weights;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::grouped_digits::Grouped;
use smidgen_ir::{Category, DeviceKind, Extent, Plan, SpaceSize};
use smidgen_recipe::BaseFormat;
use std::cmp::Reverse;
use std::collections::BTreeMap;

pub fn render_table(job: &Job, planned: &Planned) -> String {
    let (solution, plan) = (&planned.solution, &planned.solution.plan);
    let peak = plan.peak();
    let budget = if job.budget.stated { "budget" } else { "free" };
    let (free, device) = (format_bytes(planned.budget_bytes), job.place.describe());
    let mut text = format!("{} · {budget} {free} · {device}\n", plan.title);
    if !planned.world.is_alone() {
        text += &format!("  per rank, {}\n", planned.world.describe());
    }
    for (category, bytes) in &peak.rows {
        let name = match category {
            Category::Adapters if job.request.adapters.is_empty() => "trained weights".to_owned(),
            _ => category.name().replace('_', " "),
        };
        text += &render_row(&name, *bytes as u64, &note(*category, planned, job));
    }
    let margin_bytes = job.place.overhead().margin_bytes;
    let note = context_note(plan.device, solution.context_bytes, margin_bytes);
    text += &render_row("context", solution.context_bytes, &note);
    let spare = planned.budget_bytes as i128 - solution.peak_bytes as i128;
    let verdict = if planned.fits {
        format!("{}, {} to spare", good("fits"), format_bytes(spare as u64))
    } else if spare >= 0 {
        let offload = format_bytes(planned.offload_budget_bytes);
        format!("{}: only {offload} for offloaded tensors", bad("does not fit"))
    } else {
        format!("{}, {} too much", bad("does not fit"), format_bytes((-spare) as u64))
    };
    let place = plan.place(peak.entry, peak.step);
    text += &render_row("peak", solution.peak_bytes, &format!("{verdict} (at: {place})"));
    text += &offload_lines(plan);
    let largest = peak.largest.iter().take(4);
    let largest = largest.map(|(name, bytes)| format!("{name} {}", format_bytes(*bytes as u64)));
    let mut lines = vec![format!("largest at the peak: {}", largest.collect::<Vec<_>>().join(", "))];
    lines.extend(render_reasons(solution));
    lines.extend(solution.prices.iter().map(render_price));
    let (trained, by) = (planned.trained(), planned.profile.describe());
    lines.push(format!(
        "trained: {} parameters, {:.1} bytes each with gradient and optimizer state",
        Grouped(trained.parameters),
        trained.bytes_per_parameter()
    ));
    lines.push(describe_weights(&planned.kinds));
    lines.push(match planned.speed() {
        Some(Speed { step_ms, tokens_per_s }) => {
            let all = if planned.world.is_alone() { "" } else { " of all ranks" };
            let step = milliseconds(step_ms, 0);
            format!("predicted: {step} per step, {tokens_per_s:.0} tokens/s{all} ({by})")
        }
        None => {
            format!(
                "predicted: no speed ({by}); set `memory.profile` to a card's name, such as `\"rtx-4090\"`"
            )
        }
    });
    lines.extend(time_line(planned));
    lines.extend(planned.exchange.iter().flat_map(|exchange| exchange_lines(exchange, planned)));
    lines.extend(planned.notes.iter().chain(&planned.advice).map(|note| format!("{NOTE} {note}")));
    text + "\n" + &lines.iter().map(|line| format!("  {}\n", line.trim_end())).collect::<String>()
}

/// How long the run is, in steps and in hours.
fn time_line(planned: &Planned) -> Option<String> {
    let steps = |count: u64| format!("{} {}", Grouped(count), if count == 1 { "step" } else { "steps" });
    let total = planned.total_steps?;
    let per_epoch =
        planned.epoch_steps.map_or(String::new(), |count| format!(", {} per epoch", Grouped(count)));
    let time = planned.total_seconds().map_or(String::new(), |seconds| {
        format!(": {} without evaluations and checkpoints", duration(seconds))
    });
    Some(format!("run: {}{per_epoch}{time}", steps(total)))
}

/// A row of a budget table.
pub fn render_row(name: &str, bytes: u64, note: &str) -> String {
    let row = format!("  {name:<16}{:>12}   {note}", format_bytes(bytes));
    format!("{}\n", row.trim_end())
}

/// The parts of the row `context`: a known part, and a margin for memory that a run may use beyond it.
pub fn context_note(device: DeviceKind, context_bytes: u64, margin_bytes: u64) -> String {
    let known = format_bytes(context_bytes - margin_bytes);
    let margin = format_bytes(margin_bytes);
    match device {
        DeviceKind::Cpu => format!("process and data {known}, margin {margin}"),
        DeviceKind::Cuda => format!("driver {known}, margin {margin}"),
    }
}

/// Bytes over each link per step by kind, and the efficiency.
fn exchange_lines(exchange: &Exchange, planned: &Planned) -> Vec<String> {
    let bytes = |bytes: f64| format_bytes(bytes.round() as u64);
    let kinds = [
        ("gradient sums", exchange.gradient_bytes),
        ("gathered weights", exchange.weight_bytes),
        ("updated weights", exchange.update_bytes),
    ];
    let parts = kinds.into_iter().filter(|(_, kind_bytes)| *kind_bytes > 0.0);
    let parts = parts.map(|(what, kind_bytes)| format!("{what} {}", bytes(kind_bytes)));
    let rate = exchange.link.bytes_per_s / 1e9;
    let link = exchange.link_name().unwrap_or("the slowest link");
    let mut lines = vec![format!(
        "over each link per step: {} ({}), {link} at {rate:.1} GB/s",
        bytes(exchange.bytes()),
        parts.collect::<Vec<_>>().join(", ")
    )];
    if planned.speed().is_some() {
        lines.push(format!(
            "efficiency: {:.1} % of the speed of {} ranks with equal shares and no communication",
            100.0 * exchange.efficiency,
            planned.world.rank.of
        ));
    }
    lines
}

/// Pinned memory and disk space of a plan, one line each; nothing if they are not used.
pub fn offload_lines(plan: &Plan) -> String {
    let line = |(name, size): (&str, SpaceSize)| {
        let shared = match size.shared_bytes {
            0 => String::new(),
            shared => format!(", {} shared by the ranks of a machine", format_bytes(shared as u64)),
        };
        render_row(name, size.bytes() as u64, &format!("for offloaded tensors{shared}"))
    };
    let places = [("pinned memory", plan.host), ("disk", plan.disk)];
    places.into_iter().filter(|(_, size)| size.bytes() > 0).map(line).collect()
}

fn note(category: Category, planned: &Planned, job: &Job) -> String {
    let policy = &planned.solution.policy;
    let layers = job.request.layers();
    match category {
        Category::BaseWeights => storages(job),
        Category::Adapters if job.request.rounds_trained() => {
            format!("f32 masters and {} copies", job.request.activations())
        }
        Category::Adapters => "f32 masters".into(),
        Category::Activations => {
            let recomputed = LayerCounts::of(policy).recomputed;
            let tokens = planned.solution.demand.extent.tokens;
            format!("{tokens} tokens, recompute {recomputed} of {layers} layers")
        }
        Category::Gradients | Category::Optimizer | Category::Workspace => String::new(),
    }
}

/// The storage formats of the frozen base weights, most bytes first.
fn storages(job: &Job) -> String {
    let mut bytes: BTreeMap<String, usize> = BTreeMap::new();
    let tensors = job.request.spec.tensors().into_iter();
    for tensor in tensors.filter(|tensor| !job.request.trained.contains(&tensor.name)) {
        let storage = job.request.storage_of(&tensor.name);
        let (rows, columns) = tensor.shape.at(&Extent::default());
        *bytes.entry(storage.to_string()).or_default() += storage.bytes(rows, columns);
    }
    let mut names: Vec<(String, usize)> = bytes.into_iter().collect();
    names.sort_by_key(|(_, bytes)| Reverse(*bytes));
    if names.is_empty() {
        return "all weights are trained".into();
    }
    let names: Vec<String> = names.into_iter().map(|(name, _)| name).collect();
    let origin = match (job.model.has_weights(), job.recipe.model.storage()) {
        (false, _) => ", from config.json (weights not downloaded)",
        (true, BaseFormat::AsStored) => ", as stored",
        (true, _) => "",
    };
    format!("{}{origin}", names.join(" and "))
}
