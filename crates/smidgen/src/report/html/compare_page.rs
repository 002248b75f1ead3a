//! Several runs on one page: curves in the same charts, figures side by side, and the keys that differ.
//!
//! A run has the same colour everywhere. The loss is shown over steps and over time, because runs with different batch
//! sizes or speeds rank differently by each.

use super::charts::{Chart, Line, Look, colour_class, render_chart, render_controls};
use super::escape::escape;
use super::page::render_frame;
use super::run_charts::{INTERVALS, points, trend, values};
use crate::report::compare::{Compared, Comparison, Difference, Fact};
use crate::report::numbers::{Axis, Unit};
use crate::report::run_folder::RunRecord;
use crate::report::series::{Point, keep_extremes};
use std::fmt::Write;

/// A self-contained page.
pub fn render_comparison(compared: &Comparison) -> String {
    let count = compared.runs.len();
    let steps = compared.runs.iter().map(|run| run.summary.steps).max().unwrap_or(0);
    let mut text = render_header(compared);
    let mut section = |id: &str, heading: &str, body: String| {
        write!(text, "<section id=\"{id}\"><h2>{heading}</h2>\n{body}</section>\n")
            .expect("writing to a string");
    };
    let losses = [loss(compared, steps), evaluation(compared, steps), loss_over_time(compared, steps)];
    let drawn: String = losses.iter().flatten().map(render_chart).collect();
    section("loss", "Loss", format!("{}<div class=\"charts\">{drawn}</div>", render_controls(steps.max(1))));
    section("figures", "Side by side", render_facts(compared));
    section("differences", "Differences", render_differences(compared));
    let rest = [speed(compared, steps), memory(compared, steps), utilization(compared, steps)];
    let drawn: String = rest.iter().flatten().map(render_chart).collect();
    section("course", "Speed and memory", format!("<div class=\"charts\">{drawn}</div>"));
    render_frame(&format!("{count} runs · smidgen report"), &text, "")
}

fn render_header(compared: &Comparison) -> String {
    let run = |(colour, run): (usize, &Compared)| {
        format!(
            "<li><span class=\"run main{}\">{}</span> <small>{} · {}</small></li>",
            colour_class(colour),
            escape(&run.name),
            escape(&run.summary.title),
            escape(&run.summary.status)
        )
    };
    let runs: String = compared.runs.iter().enumerate().map(run).collect();
    format!("<header><h1>{} runs compared</h1><ul class=\"runs\">{runs}</ul></header>\n", compared.runs.len())
}

/// The runs as column headings, in their colours.
fn render_headings(compared: &Comparison) -> String {
    let heading = |(colour, run): (usize, &Compared)| {
        let (class, name) = (colour_class(colour), escape(&run.name));
        format!("<th scope=\"col\"><span class=\"run main{class}\">{name}</span></th>")
    };
    compared.runs.iter().enumerate().map(heading).collect()
}

fn render_facts(compared: &Comparison) -> String {
    let row = |Fact { name, values, best }: &Fact| {
        let cell = |(run, value): (usize, &String)| {
            let class = if *best == Some(run) { " class=\"best\"" } else { "" };
            format!("<td{class}>{}</td>", escape(value))
        };
        let cells: String = values.iter().enumerate().map(cell).collect();
        format!("<tr><th scope=\"row\">{name}</th>{cells}</tr>")
    };
    let rows: String = compared.facts().iter().map(row).collect();
    format!(
        "<div class=\"scroll\"><table class=\"side\"><thead><tr><td></td>{}</tr></thead><tbody>{rows}</tbody></table></div>",
        render_headings(compared)
    )
}

fn render_differences(compared: &Comparison) -> String {
    let same = format!("<p class=\"note\">{} keys have the same value in all runs.</p>", compared.same_keys);
    if compared.differences.is_empty() {
        return format!("<p class=\"lead\">The recipes are the same.</p>{same}");
    }
    let row = |Difference { key, values }: &Difference| {
        let cell = |value: &Option<String>| match value {
            Some(value) => format!("<td><code>{}</code></td>", escape(value)),
            None => "<td>–</td>".into(),
        };
        let cells: String = values.iter().map(cell).collect();
        format!("<tr><th scope=\"row\"><code>{}</code></th>{cells}</tr>", escape(key))
    };
    let rows: String = compared.differences.iter().map(row).collect();
    format!(
        "<div class=\"scroll\"><table class=\"side\"><thead><tr><td></td>{}</tr></thead><tbody>{rows}</tbody></table></div>{same}",
        render_headings(compared)
    )
}

/// For each run its moving average as a named line, in front of a faint line of all values.
fn overlaid(compared: &Comparison, steps: u64, series: impl Fn(&RunRecord) -> Vec<Point>) -> Vec<Line> {
    let all: Vec<(usize, &str, Vec<Point>)> = compared
        .runs
        .iter()
        .enumerate()
        .map(|(colour, run)| (colour, run.name.as_str(), series(&run.record)))
        .filter(|(_, _, points)| points.iter().any(|point| point.1.is_finite()))
        .collect();
    let faint = |(run, _, all): &(usize, &str, Vec<Point>)| {
        let (look, points) = (Look::Faint, keep_extremes(all, INTERVALS));
        Line { look, run: Some(*run), points, ..Line::default() }
    };
    let main =
        |(run, name, all): &(usize, &str, Vec<Point>)| Line { run: Some(*run), ..trend(all, name, steps) };
    all.iter().map(faint).chain(all.iter().map(main)).collect()
}

/// A chart over steps; `None` if no run has a line.
fn chart(
    id: &'static str,
    title: &'static str,
    caption: &str,
    x: Axis,
    y: Axis,
    lines: Vec<Line>,
) -> Option<Chart> {
    (!lines.is_empty()).then(|| Chart::over_steps(id, title, caption.to_owned(), x, y, lines))
}

fn steps_axis(steps: u64) -> Axis {
    let mut axis = Axis::from_zero(steps.max(1) as f64, Unit::Plain);
    axis.ticks.retain(|(value, _)| value.fract() == 0.0);
    axis
}

fn loss(compared: &Comparison, steps: u64) -> Option<Chart> {
    let lines = overlaid(compared, steps, |run| points(run, |row| row.loss));
    let (y, log) = (Axis::around(values(&lines)), Axis::log_around(values(&lines)));
    let caption = "of every step, and its moving average";
    Some(Chart { log, ..chart("chart-loss", "Loss", caption, steps_axis(steps), y, lines)? })
}

fn evaluation(compared: &Comparison, steps: u64) -> Option<Chart> {
    let mut lines = Vec::new();
    for (index, run) in compared.runs.iter().enumerate() {
        let evaluations = &run.record.evaluations;
        let points: Vec<Point> = evaluations.iter().map(|row| (row.step as f64, row.eval_loss)).collect();
        if !points.is_empty() {
            let line = Line { name: run.name.clone(), run: Some(index), points, ..Line::default() };
            lines.push(Line { name: String::new(), look: Look::Dots, ..line.clone() });
            lines.push(line);
        }
    }
    let (y, log) = (Axis::around(values(&lines)), Axis::log_around(values(&lines)));
    let caption = "of the evaluation rows, which may differ between runs";
    Some(Chart { log, ..chart("chart-eval", "Evaluation loss", caption, steps_axis(steps), y, lines)? })
}

/// The unit of time for the longest run.
struct Clock {
    unit: &'static str,
    name: &'static str,
    unit_s: f64,
    longest: f64,
}

impl Clock {
    fn of(runs: &[Compared]) -> Clock {
        let longest_s = runs.iter().map(|run| run.summary.speed.seconds).fold(0.0, f64::max);
        let (unit, name, unit_s) = match longest_s {
            ..120.0 => ("s", "seconds", 1.0),
            120.0..7200.0 => ("min", "minutes", 60.0),
            _ => ("h", "hours", 3600.0),
        };
        Clock { unit, name, unit_s, longest: longest_s / unit_s }
    }
}

fn loss_over_time(compared: &Comparison, steps: u64) -> Option<Chart> {
    let clock = Clock::of(&compared.runs);
    // The average is over steps; then steps are replaced by times.
    let mut lines = overlaid(compared, steps, |run| points(run, |row| row.loss));
    for line in &mut lines {
        let rows = &compared.runs[line.run.unwrap_or(0)].record.rows;
        let mut until = 0.0;
        let ends: Vec<(f64, f64)> = rows
            .iter()
            .map(|row| {
                until += row.steps as f64 * row.step_ms / 1e3 / clock.unit_s;
                (row.step as f64, until)
            })
            .collect();
        let time = |step: f64| {
            let index = ends.partition_point(|(end, _)| *end < step).min(ends.len().saturating_sub(1));
            ends.get(index).map_or(0.0, |(_, time)| *time)
        };
        line.points.iter_mut().for_each(|point| point.0 = time(point.0));
        line.averaged.clear();
    }
    let (x, y) = (Axis::from_zero(clock.longest, Unit::Plain), Axis::around(values(&lines)));
    let log = Axis::log_around(values(&lines));
    let caption = format!("in {} spent in steps, without evaluations and checkpoints", clock.name);
    let chart = chart("chart-loss-time", "Loss over time", &caption, x, y, lines)?;
    Some(Chart { x_name: clock.unit, log, ..chart })
}

fn speed(compared: &Comparison, steps: u64) -> Option<Chart> {
    let lines = overlaid(compared, steps, |run| points(run, |row| row.tokens_per_s));
    let y = Axis::from_zero(1.12 * most(&lines), Unit::Plain);
    chart("chart-speed", "Throughput", "tokens/s", steps_axis(steps), y, lines)
}

fn memory(compared: &Comparison, steps: u64) -> Option<Chart> {
    let measured =
        |run: &RunRecord| points(run, |row| row.device_bytes.map_or(f64::NAN, |bytes| bytes as f64));
    let mut lines = overlaid(compared, steps, measured);
    // Memory is not noisy, so the values are drawn instead of their average.
    lines.retain(|line| !line.name.is_empty());
    for line in &mut lines {
        line.points = keep_extremes(&measured(&compared.runs[line.run.unwrap_or(0)].record), INTERVALS);
        line.averaged.clear();
    }
    let y = Axis::from_zero(1.12 * most(&lines), Unit::Bytes);
    let chart = chart("chart-memory", "Memory", "measured after each step", steps_axis(steps), y, lines)?;
    Some(Chart { unit: Unit::Bytes, ..chart })
}

fn utilization(compared: &Comparison, steps: u64) -> Option<Chart> {
    let lines = overlaid(compared, steps, |run| points(run, |row| row.gpu_util.map_or(f64::NAN, f64::from)));
    let (x, y) = (steps_axis(steps), Axis::from_zero(105.0, Unit::Percent));
    let caption = "share of time in which a kernel ran, over the last second";
    Some(Chart { unit: Unit::Percent, ..chart("chart-load", "GPU utilization", caption, x, y, lines)? })
}

fn most(lines: &[Line]) -> f64 {
    values(lines).filter(|value| value.is_finite()).fold(0.0, f64::max)
}
