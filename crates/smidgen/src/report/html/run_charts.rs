//! The charts of a run over its steps: loss, learning rate, gradient norm, speed, and the memory that was measured.
//!
//! Noisy series are shown twice: every value faintly, and the trend over them. Gradient norms of very different sizes
//! use a logarithmic axis. The axes of memory and speed start at zero, so that small changes look small.

use super::charts::{Chart, Level, Line, Look, render_chart};
use super::numbers::{Axis, Unit, grouped, short};
use crate::report::run_folder::{RunRecord, StepRow};
use crate::report::run_summary::RunSummary;
use crate::report::series::{Point, keep_extremes, median, smooth};
use smidgen_ir::bytes::format_bytes;

/// Number of intervals; each has at most two points.
const STRETCHES: usize = 300;

pub fn render_run_charts(run: &RunRecord, summary: &RunSummary) -> String {
    let steps = grouped(run.steps_done() as i64);
    let x = steps_axis(run);
    let charts = [
        loss(run, summary, &x),
        rate(run, &x),
        norm(run, &x),
        speed(run, summary, &x),
        memory(run, summary, &x),
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

fn points(run: &RunRecord, value: impl Fn(&StepRow) -> f64) -> Vec<Point> {
    run.rows.iter().map(|row| (row.step as f64, value(row))).collect()
}

/// Every value and the trend; a short run has no trend.
fn with_trend(all: &[Point], name: &'static str, trend: &'static str) -> Vec<Line> {
    let every = keep_extremes(all, STRETCHES);
    match all.len() < 30 {
        true => vec![Line { name, look: Look::Main, points: every }],
        false => vec![
            Line { name, look: Look::Faint, points: every },
            Line { name: trend, look: Look::Main, points: keep_extremes(&smooth(all), STRETCHES) },
        ],
    }
}

fn loss(run: &RunRecord, summary: &RunSummary, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.loss);
    let (first, last) = (summary.loss.first?, summary.loss.last?);
    let mut lines = with_trend(&all, "loss", "loss, smoothed");
    let evaluated: Vec<Point> = run.evaluations.iter().map(|row| (row.step as f64, row.eval_loss)).collect();
    let best = summary
        .loss
        .best_eval
        .map(|(step, loss)| format!("; best evaluation {} after step {}", short(loss), grouped(step as i64)));
    if !evaluated.is_empty() {
        lines.push(Line {
            name: "evaluation",
            look: Look::Dots,
            points: keep_extremes(&evaluated, STRETCHES),
        });
    }
    let y = Axis::around(lines.iter().flat_map(|line| &line.points).map(|point| point.1));
    let caption = format!("from {} to {}{}", short(first), short(last), best.unwrap_or_default());
    Some(Chart {
        id: "chart-loss",
        title: "Loss",
        caption,
        x: x.clone(),
        y,
        unit: Unit::Plain,
        lines,
        levels: vec![],
    })
}

fn rate(run: &RunRecord, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.lr);
    let most = all.iter().map(|point| point.1).filter(|lr| lr.is_finite()).fold(0.0, f64::max);
    let last = all.last()?.1;
    let caption = format!("at most {}, {} at the last step", short(most), short(last));
    let lines =
        vec![Line { name: "learning rate", look: Look::Main, points: keep_extremes(&all, STRETCHES) }];
    let y = Axis::from_zero(most * 1.06, Unit::Plain);
    Some(Chart {
        id: "chart-lr",
        title: "Learning rate",
        caption,
        x: x.clone(),
        y,
        unit: Unit::Plain,
        lines,
        levels: vec![],
    })
}

fn norm(run: &RunRecord, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.grad_norm);
    let usual = median(all.iter().map(|point| point.1))?;
    let most = all.iter().map(|point| point.1).filter(|norm| norm.is_finite()).fold(0.0, f64::max);
    let is_spread = usual > 0.0 && most > 20.0 * usual;
    let lines = with_trend(&all, "gradient norm", "smoothed");
    let values = lines.iter().flat_map(|line| &line.points).map(|point| point.1);
    let y = if is_spread { Axis::log_around(values) } else { Axis::from_zero(most * 1.06, Unit::Plain) };
    let caption = format!("before clipping: median {}, at most {}", short(usual), short(most));
    Some(Chart {
        id: "chart-norm",
        title: "Gradient norm",
        caption,
        x: x.clone(),
        y,
        unit: Unit::Plain,
        lines,
        levels: vec![],
    })
}

fn speed(run: &RunRecord, summary: &RunSummary, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.tokens_per_s);
    let (usual, planned) = (summary.speed.tokens_per_s?, summary.speed.planned_tokens_per_s);
    let most = all.iter().map(|point| point.1).filter(|speed| speed.is_finite()).fold(planned, f64::max);
    let lines = with_trend(&all, "tokens/s", "smoothed");
    let caption = format!("median {} tokens/s; the plan predicts {}", short(usual), short(planned));
    // A prediction far above the values would flatten their line.
    let is_near = planned.is_finite() && planned > 0.0 && planned < 3.0 * usual;
    let levels = match is_near {
        true => vec![Level { value: planned, label: format!("predicted {}", short(planned)) }],
        false => vec![],
    };
    let high = if is_near {
        most
    } else {
        all.iter().map(|point| point.1).filter(|it| it.is_finite()).fold(0.0, f64::max)
    };
    let y = Axis::from_zero(high * 1.12, Unit::Plain);
    Some(Chart {
        id: "chart-speed",
        title: "Throughput",
        caption,
        x: x.clone(),
        y,
        unit: Unit::Plain,
        lines,
        levels,
    })
}

fn memory(run: &RunRecord, summary: &RunSummary, x: &Axis) -> Option<Chart> {
    let all = points(run, |row| row.device_bytes.map_or(f64::NAN, |bytes| bytes as f64));
    let (peak, planned) = (summary.memory.peak_bytes?, summary.memory.planned_bytes);
    let lines = vec![Line { name: "measured", look: Look::Main, points: keep_extremes(&all, STRETCHES) }];
    let most = all.iter().map(|point| point.1).filter(|it| it.is_finite()).fold(planned as f64, f64::max);
    let caption =
        format!("after each step; at most {}, planned {}", format_bytes(peak), format_bytes(planned));
    let levels = vec![Level { value: planned as f64, label: format!("planned {}", format_bytes(planned)) }];
    let y = Axis::from_zero(most * 1.12, Unit::Bytes);
    Some(Chart {
        id: "chart-memory",
        title: "Memory over the run",
        caption,
        x: x.clone(),
        y,
        unit: Unit::Bytes,
        lines,
        levels,
    })
}
