//! The charts of a run over its steps: loss, speed, gradient norm, measured memory, GPU utilization, learning rate.
//!
//! Noisy series are shown twice: every value faintly, and their moving average. Gradient norms of very different sizes
//! use a logarithmic axis. The axes of memory and speed start at zero, so that small changes look small.

use super::charts::{Chart, Level, Line, Look, render_chart, render_controls};
use crate::report::numbers::{Axis, Unit, grouped, short};
use crate::report::run_folder::{RunRecord, StepRow};
use crate::report::run_summary::RunSummary;
use crate::report::series::{Point, keep_extremes, keep_means, median, smooth, usual_span};
use smidgen_ir::bytes::format_bytes;

/// Number of intervals; each has at most two points.
pub const STRETCHES: usize = 300;

/// The loss with its switches, which the other charts follow; `None` if no loss was finite.
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
        load(run, summary, &x),
        rate(run, &x),
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

/// Every value and the trend; a short run has no trend.
fn with_trend(all: &[Point], name: &str) -> Vec<Line> {
    let every = Line { name: name.into(), points: keep_extremes(all, STRETCHES), ..Line::default() };
    match all.len() < 30 {
        true => vec![every],
        false => vec![Line { look: Look::Faint, ..every }, trend(all, "smoothed", all.len() as u64)],
    }
}

/// The average of a series over a span that suits this many steps.
pub fn trend(all: &[Point], name: &str, steps: u64) -> Line {
    Line {
        name: name.into(),
        points: keep_extremes(&smooth(all, usual_span(steps)), STRETCHES),
        averaged: keep_means(all, STRETCHES),
        ..Line::default()
    }
}

/// The y values of all lines.
pub fn values(lines: &[Line]) -> impl Iterator<Item = f64> + '_ {
    lines.iter().flat_map(|line| &line.points).map(|point| point.1)
}

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
        let points = keep_extremes(&evaluated, STRETCHES);
        lines.push(Line { name: "evaluation".into(), look: Look::Dots, points, ..Line::default() });
    }
    let y = Axis::around(values(&lines));
    let caption = format!("from {} to {}{}", short(first), short(last), best.unwrap_or_default());
    Some(Chart {
        id: "chart-loss",
        title: "Loss",
        caption,
        x_name: "step",
        x: x.clone(),
        y,
        log: Axis::log_around(values(&lines)),
        unit: Unit::Plain,
        lines,
        levels: vec![],
    })
}

fn rate(run: &RunRecord, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.lr);
    let most = finite_most(&all, 0.0);
    let last = all.last()?.1;
    let caption = format!("at most {}, {} at the last step", short(most), short(last));
    let points = keep_extremes(&all, STRETCHES);
    let lines = vec![Line { name: "learning rate".into(), points, ..Line::default() }];
    let y = Axis::from_zero(most * 1.06, Unit::Plain);
    Some(Chart {
        id: "chart-lr",
        title: "Learning rate",
        caption,
        x_name: "step",
        x: x.clone(),
        y,
        log: None,
        unit: Unit::Plain,
        lines,
        levels: vec![],
    })
}

fn norm(run: &RunRecord, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.grad_norm);
    let usual = median(all.iter().map(|point| point.1))?;
    let most = finite_most(&all, 0.0);
    let is_spread = usual > 0.0 && most > 20.0 * usual;
    let lines = with_trend(&all, "gradient norm");
    let log = Axis::log_around(values(&lines));
    let y = log.clone().filter(|_| is_spread).unwrap_or_else(|| Axis::from_zero(most * 1.06, Unit::Plain));
    let caption = format!("before clipping: median {}, at most {}", short(usual), short(most));
    Some(Chart {
        id: "chart-norm",
        title: "Gradient norm",
        caption,
        x_name: "step",
        x: x.clone(),
        y,
        log,
        unit: Unit::Plain,
        lines,
        levels: vec![],
    })
}

fn speed(run: &RunRecord, summary: &RunSummary, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.tokens_per_s);
    let (usual, planned) = (summary.speed.tokens_per_s?, summary.speed.planned_tokens_per_s);
    let lines = with_trend(&all, "tokens/s");
    let caption = format!("median {} tokens/s; the plan predicts {}", short(usual), short(planned));
    // A prediction far above the values would flatten their line.
    let is_near = planned.is_finite() && planned > 0.0 && planned < 3.0 * usual;
    let levels = match is_near {
        true => vec![Level { value: planned, label: format!("predicted {}", short(planned)) }],
        false => vec![],
    };
    let most = finite_most(&all, if is_near { planned } else { 0.0 });
    let y = Axis::from_zero(most * 1.12, Unit::Plain);
    Some(Chart {
        id: "chart-speed",
        title: "Throughput",
        caption,
        x_name: "step",
        x: x.clone(),
        y,
        log: None,
        unit: Unit::Plain,
        lines,
        levels,
    })
}

fn memory(run: &RunRecord, summary: &RunSummary, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.device_bytes.map_or(f64::NAN, |bytes| bytes as f64));
    let (peak, planned) = (summary.memory.peak_bytes?, summary.memory.planned_bytes);
    let points = keep_extremes(&all, STRETCHES);
    let lines = vec![Line { name: "measured".into(), points, ..Line::default() }];
    let most = finite_most(&all, planned as f64);
    let caption =
        format!("after each step; at most {}, planned {}", format_bytes(peak), format_bytes(planned));
    let levels = vec![Level { value: planned as f64, label: format!("planned {}", format_bytes(planned)) }];
    let y = Axis::from_zero(most * 1.12, Unit::Bytes);
    Some(Chart {
        id: "chart-memory",
        title: "Memory over the run",
        caption,
        x_name: "step",
        x: x.clone(),
        y,
        log: None,
        unit: Unit::Bytes,
        lines,
        levels,
    })
}

fn load(run: &RunRecord, summary: &RunSummary, x: &Axis) -> Option<Chart> {
    let mean = summary.speed.gpu_util?;
    let all = points(run, |row| row.gpu_util.map_or(f64::NAN, f64::from));
    Some(Chart {
        id: "chart-load",
        title: "GPU utilization",
        caption: format!("time in which a kernel ran, over the last second: mean {mean:.0} %"),
        x_name: "step",
        x: x.clone(),
        y: Axis::from_zero(105.0, Unit::Percent),
        log: None,
        unit: Unit::Percent,
        lines: with_trend(&all, "utilization"),
        levels: vec![],
    })
}
