//! The charts of a run over its steps: loss, speed, gradient norm, measured memory of the device and of the system, GPU
//! utilization, learning rate.
//!
//! Noisy series have two lines: a faint one of all values, and their moving average. Gradient norms of very different
//! sizes use a logarithmic axis. The axes of memory and speed start at zero, so that small changes look small.

use super::charts::{Chart, Level, Line, Look, render_chart, render_controls};
use crate::report::numbers::{Axis, Unit, grouped, short};
use crate::report::run_folder::{RunRecord, StepRow};
use crate::report::run_summary::RunSummary;
use crate::report::series::{Point, keep_extremes, keep_means, median, smooth, usual_span};
use smidgen_ir::bytes::format_bytes;

/// Number of intervals that a series is reduced to; each has at most two points.
pub const INTERVALS: usize = 300;

/// The loss chart, below switches that apply to all charts; `None` if no loss was finite.
pub fn render_loss(run: &RunRecord, summary: &RunSummary) -> Option<String> {
    let chart = loss(run, summary, &steps_axis(run))?;
    Some(format!("{}{}", render_controls(run.steps_done()), render_chart(&chart)))
}

pub fn render_run_charts(run: &RunRecord, summary: &RunSummary) -> String {
    let steps = grouped(run.steps_done() as i64);
    let x = steps_axis(run);
    let charts = [
        speed(run, summary, &x),
        norm(run, &x),
        memory(run, summary, &x),
        system_memory(run, summary, &x),
        utilization(run, summary, &x),
        learning_rate(run, &x),
    ];
    let rendered: String = charts.iter().flatten().map(render_chart).collect();
    format!(
        "<p class=\"lead\">{steps} optimizer steps. In long runs each interval shows its lowest and highest value.</p>\
         <div class=\"charts\">{rendered}</div>"
    )
}

fn steps_axis(run: &RunRecord) -> Axis {
    let (first, last) = (run.rows.first().map_or(0, |row| row.step - 1), run.steps_done().max(1));
    let mut axis = Axis::from_zero(last as f64, Unit::Plain);
    axis.ticks.retain(|(value, _)| value.fract() == 0.0 && *value >= first as f64);
    axis.low = first as f64;
    axis
}

pub fn points(run: &RunRecord, value: impl Fn(&StepRow) -> f64) -> Vec<Point> {
    run.rows.iter().map(|row| (row.step as f64, value(row))).collect()
}

/// All values and their moving average; a short run has no average.
fn with_trend(all: &[Point], name: &str) -> Vec<Line> {
    let every = Line { name: name.into(), points: keep_extremes(all, INTERVALS), ..Line::default() };
    match all.len() < 30 {
        true => vec![every],
        false => vec![Line { look: Look::Faint, ..every }, trend(all, "smoothed", all.len() as u64)],
    }
}

/// The average of a series over a span that suits this many steps.
pub fn trend(all: &[Point], name: &str, steps: u64) -> Line {
    Line {
        name: name.into(),
        points: keep_extremes(&smooth(all, usual_span(steps)), INTERVALS),
        averaged: keep_means(all, INTERVALS),
        ..Line::default()
    }
}

/// The y values of all lines.
pub fn values(lines: &[Line]) -> impl Iterator<Item = f64> + '_ {
    lines.iter().flat_map(|line| &line.points).map(|point| point.1)
}

/// The largest finite value, at least `least`.
fn finite_most(all: &[Point], least: f64) -> f64 {
    all.iter().map(|point| point.1).filter(|value| value.is_finite()).fold(least, f64::max)
}

fn loss(run: &RunRecord, summary: &RunSummary, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.loss);
    let (first, last) = (summary.loss.first?, summary.loss.last?);
    let mut lines = with_trend(&all, "loss");
    let evaluated: Vec<Point> = run.evaluations.iter().map(|row| (row.step as f64, row.eval_loss)).collect();
    let best = summary
        .loss
        .best_eval
        .map(|(step, loss)| format!("; best evaluation {} after step {}", short(loss), grouped(step as i64)));
    if !evaluated.is_empty() {
        let points = keep_extremes(&evaluated, INTERVALS);
        lines.push(Line { name: "evaluation".into(), look: Look::Dots, points, ..Line::default() });
    }
    let y = Axis::around(values(&lines));
    let caption = format!("from {} to {}{}", short(first), short(last), best.unwrap_or_default());
    let log = Axis::log_around(values(&lines));
    let chart = Chart::over_steps("chart-loss", "Loss", caption, x.clone(), y, lines);
    Some(Chart { log, ..chart })
}

fn learning_rate(run: &RunRecord, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.lr);
    let most = finite_most(&all, 0.0);
    let last = all.last()?.1;
    let caption = format!("at most {}, {} at the last step", short(most), short(last));
    let points = keep_extremes(&all, INTERVALS);
    let lines = vec![Line { name: "learning rate".into(), points, ..Line::default() }];
    let y = Axis::from_zero(most * 1.06, Unit::Plain);
    Some(Chart::over_steps("chart-lr", "Learning rate", caption, x.clone(), y, lines))
}

fn norm(run: &RunRecord, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.grad_norm);
    let median = median(all.iter().map(|point| point.1))?;
    let most = finite_most(&all, 0.0);
    let is_spread = median > 0.0 && most > 20.0 * median;
    let lines = with_trend(&all, "gradient norm");
    let log = Axis::log_around(values(&lines));
    let y = log.clone().filter(|_| is_spread).unwrap_or_else(|| Axis::from_zero(most * 1.06, Unit::Plain));
    let caption = format!("before clipping: median {}, at most {}", short(median), short(most));
    let chart = Chart::over_steps("chart-norm", "Gradient norm", caption, x.clone(), y, lines);
    Some(Chart { log, ..chart })
}

fn speed(run: &RunRecord, summary: &RunSummary, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.tokens_per_s);
    let (median, planned) = (summary.speed.tokens_per_s?, summary.speed.planned_tokens_per_s);
    let lines = with_trend(&all, "tokens/s");
    let caption = format!("median {} tokens/s; the plan predicts {}", short(median), short(planned));
    // A prediction far above the values would flatten their line.
    let is_near = planned.is_finite() && planned > 0.0 && planned < 3.0 * median;
    let levels = match is_near {
        true => vec![Level { value: planned, label: format!("predicted {}", short(planned)) }],
        false => vec![],
    };
    let most = finite_most(&all, if is_near { planned } else { 0.0 });
    let y = Axis::from_zero(most * 1.12, Unit::Plain);
    let chart = Chart::over_steps("chart-speed", "Throughput", caption, x.clone(), y, lines);
    Some(Chart { levels, ..chart })
}

fn memory(run: &RunRecord, summary: &RunSummary, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.device_bytes.map_or(f64::NAN, |bytes| bytes as f64));
    let (peak, planned) = (summary.memory.peak_bytes?, summary.memory.planned_bytes);
    let points = keep_extremes(&all, INTERVALS);
    let lines = vec![Line { name: "measured".into(), points, ..Line::default() }];
    let most = finite_most(&all, planned as f64);
    let caption =
        format!("after each step; at most {}, planned {}", format_bytes(peak), format_bytes(planned));
    let levels = vec![Level { value: planned as f64, label: format!("planned {}", format_bytes(planned)) }];
    let y = Axis::from_zero(most * 1.12, Unit::Bytes);
    let chart = Chart::over_steps("chart-memory", "Memory over the run", caption, x.clone(), y, lines);
    Some(Chart { unit: Unit::Bytes, levels, ..chart })
}

/// On a CPU the memory of the device is that of the process already.
fn system_memory(run: &RunRecord, summary: &RunSummary, x: &Axis) -> Option<Chart> {
    let most = summary.memory.host_bytes.filter(|_| run.plan.policy.device == "cuda")?;
    let process = points(run, |row| row.host_rss_bytes.map_or(f64::NAN, |bytes| bytes as f64));
    let pinned = points(run, |row| row.pinned_bytes as f64);
    let line = |name: &str, look: Look, all: &[Point]| Line {
        name: name.into(),
        look,
        points: keep_extremes(all, INTERVALS),
        ..Line::default()
    };
    let lines = vec![line("process", Look::Main, &process), line("pinned", Look::Faint, &pinned)];
    let high = finite_most(&pinned, finite_most(&process, 0.0));
    let pinned_bytes = format_bytes(summary.memory.pinned_bytes);
    let caption = format!(
        "host RAM after each step: the process at most {}, pinned {pinned_bytes}",
        format_bytes(most)
    );
    let y = Axis::from_zero(high * 1.12, Unit::Bytes);
    let chart = Chart::over_steps("chart-system", "System memory", caption, x.clone(), y, lines);
    Some(Chart { unit: Unit::Bytes, ..chart })
}

fn utilization(run: &RunRecord, summary: &RunSummary, x: &Axis) -> Option<Chart> {
    let mean = summary.speed.gpu_util?;
    let all = points(run, |row| row.gpu_util.map_or(f64::NAN, f64::from));
    let caption = format!("share of time in which a kernel ran, over the last second: mean {mean:.0} %");
    let (y, lines) = (Axis::from_zero(105.0, Unit::Percent), with_trend(&all, "utilization"));
    let chart = Chart::over_steps("chart-load", "GPU utilization", caption, x.clone(), y, lines);
    Some(Chart { unit: Unit::Percent, ..chart })
}
