//! Fills `page.html`, the template of every page, with the JSON of a run, a plan or a comparison.
//!
//! The page is one file with styles and script; its content security policy forbids loading anything else. The same
//! content is used for `report.html`, `plan --html` and the live page, which reloads it during a run.

use super::charts::{Chart, colour_class, percent};
use super::compare_charts::{losses, most_steps, speed_and_memory};
use super::escape::{escape, escape_data, marked};
use super::memory_timeline::timeline_charts;
use super::run_charts::{loss, run_charts};
use crate::plan::budget::measurable_peak;
use crate::report::choices::{ActivationChoice, is_prefetched};
use crate::report::compare::Comparison;
use crate::report::numbers::{duration, grouped, short};
use crate::report::plan_facts::PlanFacts;
use crate::report::run_folder::{RunRecord, State};
use crate::report::run_summary::summarize;
use crate::report::series::{spans, usual_span};
use crate::report::timeline::ROWS;
use crate::run_folder::history::PartEnd;
use chrono::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, UndefinedBehavior, Value as Shown, escape_formatter};
use serde_json::{Map, Value, json};
use smidgen_ir::bytes::format_bytes;
use std::sync::LazyLock;

/// The template with its filters: numbers as the terminal shows them, `–` for a number that is unknown.
static PAGES: LazyLock<Environment<'static>> = LazyLock::new(|| {
    fn known(value: Option<f64>, render: impl Fn(f64) -> String) -> String {
        value.map_or("–".into(), render)
    }
    let mut pages = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    pages.set_syntax(syntax.expect("the usual delimiters are valid"));
    pages.set_undefined_behavior(UndefinedBehavior::Chainable);
    pages.set_formatter(|out, state, value| match value.as_str() {
        Some(text) if !value.is_safe() => out.write_str(&escape(text)).map_err(Into::into),
        _ => escape_formatter(out, state, value),
    });
    pages.add_filter("bytes", |bytes: Option<f64>| known(bytes, |bytes| format_bytes(bytes as u64)));
    pages.add_filter("short", |value: Option<f64>| known(value, short));
    pages.add_filter("grouped", |count: Option<f64>| known(count, |count| grouped(count as i64)));
    pages.add_filter("duration", |seconds: Option<f64>| known(seconds, duration));
    pages.add_filter("share", percent);
    pages.add_filter("colour", colour_class);
    pages.add_filter("utc", |unix_s: u64| {
        let time = i64::try_from(unix_s).ok().and_then(|unix_s| DateTime::from_timestamp(unix_s, 0));
        time.map_or("–".into(), |time| time.format("%Y-%m-%d %H:%M UTC").to_string())
    });
    pages.add_filter("marked", |text: String| Shown::from_safe_string(marked(&text)));
    pages.add_filter("data", |data: Shown| Shown::from_safe_string(escape_data(&json!(data))));
    pages.add_template("page.html", include_str!("page.html")).expect("the template of pages can be parsed");
    pages
});

fn render(view: &Value) -> String {
    let page = PAGES.get_template("page.html").expect("the template was added");
    page.render(Shown::from(Serde(view)))
        .unwrap_or_else(|error| panic!("the template of pages does not fit its data: {error:#}"))
}

/// A self-contained page of a run or a plan.
pub fn render_page(run: &RunRecord) -> String {
    render_file(view(run), &title(run), false)
}

/// A page that polls its server for updates.
pub fn render_live_page(run: &RunRecord) -> String {
    render_file(view(run), &title(run), true)
}

/// Everything that changes during a run.
pub fn render_content(run: &RunRecord) -> String {
    render(&view(run))
}

/// A self-contained page of several runs.
pub fn render_comparison(compared: &Comparison) -> String {
    let view = json!({
        "compared": compared.render_json(),
        "facts": compared.facts(),
        "losses": losses(compared).iter().map(Chart::view).collect::<Vec<_>>(),
        "charts": speed_and_memory(compared).iter().map(Chart::view).collect::<Vec<_>>(),
        "smoothing": smoothing(most_steps(compared).max(1)),
    });
    render_file(view, &format!("{} runs · smidgen report", compared.runs.len()), false)
}

/// A complete HTML file.
fn render_file(mut view: Value, title: &str, is_live: bool) -> String {
    view["frame"] = json!({
        "title": title,
        "version": env!("CARGO_PKG_VERSION"),
        "style": include_str!("page.css"),
        "script": include_str!("page.js"),
        "live": is_live.then_some(include_str!("live.js")),
    });
    render(&view)
}

fn title(run: &RunRecord) -> String {
    let name = run.folder.as_ref().and_then(|folder| folder.file_name());
    name.map_or("smidgen plan".into(), |name| format!("{} · smidgen report", name.to_string_lossy()))
}

/// The run's JSON, and what the page shows besides it.
fn view(run: &RunRecord) -> Value {
    let (summary, plan, state) = (summarize(run), &run.plan, run.state());
    let class = match state {
        State::Running => "running",
        State::Ended(PartEnd::Done | PartEnd::StoppedEarly) => "done",
        State::Planned | State::Unknown | State::Ended(PartEnd::PlanChanged) => "plain",
        State::Killed | State::Ended(PartEnd::Interrupted | PartEnd::AbovePlan | PartEnd::Failed) => {
            "stopped"
        }
    };
    let steps = run.steps_done();
    let labels: Map<String, Value> = ROWS.iter().map(|row| ((*row).into(), plan.label(row).into())).collect();
    json!({
        "summary": summary,
        "plan": plan,
        "labels": labels,
        "state": class,
        "has_ended": class == "done" || state == State::Planned,
        "is_run": run.folder.is_some(),
        "has_steps": steps > 0,
        "is_torn": run.has_torn_line && !run.is_running,
        "efficiency": summary.memory.render_efficiency(),
        "leak_per_step": summary.memory.leak.bytes_per_step().map(f64::round),
        "measurable_peak_bytes": measurable_peak(summary.memory.planned_bytes),
        "stability": summary.stability.render(),
        "is_stable": summary.stability.is_stable(),
        "loss_chart": loss(run, &summary).as_ref().map(Chart::view),
        "charts": run_charts(run, &summary).iter().map(Chart::view).collect::<Vec<_>>(),
        "smoothing": smoothing(steps),
        "timelines": timeline_charts(plan),
        "layers": layers(plan),
        "layer_runs": layer_runs(&layers(plan)),
        "spaces": spaces(run),
        "phases": phases(run),
        "rank_bytes": run.rank_bytes,
        "rollouts": run.answers,
        "parts": run.history.as_ref().map_or(&[][..], |history| &history.parts),
        "job": run.job,
    })
}

/// The steps over which the reader can average, and the index of the usual one.
fn smoothing(steps: u64) -> Value {
    let spans: Vec<u64> = spans(steps).collect();
    json!({"spans": spans, "usual": spans.iter().position(|span| *span == usual_span(steps)).unwrap_or(0)})
}

/// What the plan does with each layer.
fn layers(plan: &PlanFacts) -> Vec<Value> {
    let layer = |layer| {
        let is_prefetched = is_prefetched(&plan.policy.chosen, layer);
        let (class, activations) = match ActivationChoice::of(&plan.policy.chosen, layer) {
            ActivationChoice::Kept => ("kept", "activations kept"),
            ActivationChoice::Recomputed => ("recomputed", "activations recomputed"),
            ActivationChoice::Offloaded => ("offloaded", "activations offloaded"),
            ActivationChoice::Both => ("both", "activations recomputed from offloaded inputs"),
        };
        let weights = if is_prefetched { "weights prefetched" } else { "weights on the device" };
        let label = format!("{activations}, {weights}");
        json!({"class": class, "activations": activations, "is_prefetched": is_prefetched, "label": label})
    };
    (0..plan.layers).map(layer).collect()
}

/// Neighbouring layers that are treated alike, such as `0 to 5`, and how.
fn layer_runs(layers: &[Value]) -> Vec<(String, &Value)> {
    let mut first = 0;
    let runs = layers.chunk_by(|one, next| one == next).map(|run| {
        let (begin, last) = (first, first + run.len() - 1);
        first = last + 1;
        (if begin == last { begin.to_string() } else { format!("{begin} to {last}") }, &run[0]["label"])
    });
    runs.collect()
}

/// The memory of each phase as planned, and as measured by a run.
fn phases(run: &RunRecord) -> Vec<Value> {
    let names =
        ["prepare", "load", "resume", "rollout", "train", "eval", "save", "merge", "export", "generate"];
    let phase = |name| {
        let own = run.phases.get(name);
        let planned = own.and_then(|phase| phase.planned.as_ref()).or_else(|| run.plan.life.get(name));
        (own.is_some() || planned.is_some())
            .then(|| json!({"name": name, "planned": planned, "measured": own.map(|phase| &phase.measured)}))
    };
    names.into_iter().filter_map(phase).collect()
}

/// The memory spaces of the table of phases: the device, and others that a phase uses.
fn spaces(run: &RunRecord) -> Vec<&'static str> {
    let phases = phases(run);
    let is_used = |space: &str| phases.iter().any(|phase| phase["planned"][space].as_u64() > Some(0));
    ["device", "pinned", "host", "disk"]
        .into_iter()
        .filter(|space| *space == "device" || is_used(space))
        .collect()
}
