//! The charts of a run over its steps: loss, speed, gradient norm, measured memory of the device and of the system, GPU
//! utilization, learning rate.
//!
//! Noisy series have two lines: a faint one of all values, and their moving average. Gradient norms of very different
//! sizes use a logarithmic axis. The axes of memory and speed start at zero, so that small changes look small.

use super::charts::{Chart, Line, Look};
use crate::report::numbers::{Axis, Unit, grouped, short};
use crate::report::run_folder::{RunRecord, StepRow};
use crate::report::run_summary::RunSummary;
use crate::report::series::{Point, keep_extremes, keep_means, median, smooth, usual_span};
use smidgen_ir::bytes::format_bytes;

/// Number of intervals that a series is reduced to; each has at most two points.
pub const INTERVALS: usize = 300;

/// A number of every step that has a chart.
#[derive(Clone, Copy)]
pub struct Series {
    id: &'static str,
    title: &'static str,
    name: &'static str,
    unit: Unit,
    value: fn(&StepRow) -> f64,
    /// How far the y axis reaches, as a multiple of the largest value; `None` for an axis around the values.
    headroom: Option<f64>,
    pub is_noisy: bool,
    has_log: bool,
}

const fn series(
    id: &'static str,
    title: &'static str,
    name: &'static str,
    value: fn(&StepRow) -> f64,
) -> Series {
    Series { id, title, name, unit: Unit::Plain, value, headroom: Some(1.12), is_noisy: true, has_log: false }
}

const fn in_bytes(series: Series) -> Series {
    Series { unit: Unit::Bytes, is_noisy: false, ..series }
}

pub const LOSS: Series =
    Series { headroom: None, has_log: true, ..series("chart-loss", "Loss", "loss", |row| row.loss) };
pub const EVALUATION: Series = Series { id: "chart-eval", title: "Evaluation loss", ..LOSS };
pub const LOSS_OVER_TIME: Series = Series { id: "chart-loss-time", title: "Loss over time", ..LOSS };
pub const SPEED: Series = series("chart-speed", "Throughput", "tokens/s", |row| row.tokens_per_s);
const NORM: Series =
    Series { has_log: true, ..series("chart-norm", "Gradient norm", "gradient norm", |row| row.grad_norm) };
pub const MEMORY: Series = in_bytes(series("chart-memory", "Memory over the run", "measured", |row| {
    row.device_bytes.map_or(f64::NAN, |bytes| bytes as f64)
}));
const SYSTEM: Series = in_bytes(series("chart-system", "System memory", "process", |row| {
    row.host_rss_bytes.map_or(f64::NAN, |bytes| bytes as f64)
}));
pub const LOAD: Series = Series {
    unit: Unit::Percent,
    ..series("chart-load", "GPU utilization", "utilization", |row| row.gpu_util.map_or(f64::NAN, f64::from))
};
const LEARNING_RATE: Series =
    Series { is_noisy: false, ..series("chart-lr", "Learning rate", "learning rate", |row| row.lr) };

impl Series {
    pub fn points(&self, run: &RunRecord) -> Vec<Point> {
        run.rows.iter().map(|row| (row.step as f64, (self.value)(row))).collect()
    }

    /// A chart over steps; `None` without a line.
    pub fn chart(
        &self,
        caption: String,
        x: &Axis,
        lines: Vec<Line>,
        levels: Vec<(f64, String)>,
    ) -> Option<Chart> {
        let heights = || lines.iter().flat_map(|line| &line.points).map(|point| point.1);
        let most = finite_most(heights().chain(levels.iter().map(|level| level.0)));
        let y = match (self.unit, self.headroom) {
            (Unit::Percent, _) => Axis::from_zero(105.0, self.unit),
            (unit, Some(times)) => Axis::from_zero(times * most, unit),
            (_, None) => Axis::around(heights()),
        };
        let log = if self.has_log { Axis::log_around(heights()) } else { None };
        let (Series { id, title, unit, .. }, x) = (*self, x.clone());
        (!lines.is_empty()).then_some(Chart {
            id,
            title,
            caption,
            x_name: "step",
            x,
            y,
            log,
            unit,
            lines,
            levels,
        })
    }

    /// The chart of one run: all values and, if they are noisy and not few, their moving average.
    fn of_run(
        &self,
        run: &RunRecord,
        caption: String,
        more: Vec<Line>,
        levels: Vec<(f64, String)>,
    ) -> Option<Chart> {
        let all = self.points(run);
        let every =
            Line { name: self.name.into(), points: keep_extremes(&all, INTERVALS), ..Line::default() };
        let mut lines = if self.is_noisy && all.len() >= 30 {
            vec![Line { look: Look::Faint, ..every }, trend(&all, "smoothed", all.len() as u64)]
        } else {
            vec![every]
        };
        lines.extend(more);
        self.chart(
            caption,
            &steps_axis(run.rows.first().map_or(0, |row| row.step - 1), run.steps_done()),
            lines,
            levels,
        )
    }
}

/// An axis of whole steps.
pub fn steps_axis(first: u64, last: u64) -> Axis {
    let mut axis = Axis::from_zero(last.max(1) as f64, Unit::Plain);
    axis.ticks.retain(|(value, _)| value.fract() == 0.0 && *value >= first as f64);
    axis.low = first as f64;
    axis
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

fn finite_most(values: impl Iterator<Item = f64>) -> f64 {
    values.filter(|value| value.is_finite()).fold(0.0, f64::max)
}

/// The loss with its evaluations; `None` if no loss was finite.
pub fn loss(run: &RunRecord, summary: &RunSummary) -> Option<Chart> {
    let (first, last) = (short(summary.loss.first?), short(summary.loss.last?));
    let evaluated: Vec<Point> = run.evaluations.iter().map(|row| (row.step as f64, row.eval_loss)).collect();
    let best = summary.loss.best_eval.map(|best| {
        format!("; best evaluation {} after step {}", short(best.eval_loss), grouped(best.step as i64))
    });
    let caption = format!("from {first} to {last}{}", best.unwrap_or_default());
    let points = keep_extremes(&evaluated, INTERVALS);
    let dots = Line { name: "evaluation".into(), look: Look::Dots, points, ..Line::default() };
    LOSS.of_run(run, caption, if evaluated.is_empty() { vec![] } else { vec![dots] }, vec![])
}

/// The other charts that the run has numbers for.
pub fn run_charts(run: &RunRecord, summary: &RunSummary) -> Vec<Chart> {
    let charts = [
        speed(run, summary),
        norm(run),
        memory(run, summary),
        system_memory(run, summary),
        utilization(run, summary),
        learning_rate(run),
    ];
    charts.into_iter().flatten().collect()
}

fn speed(run: &RunRecord, summary: &RunSummary) -> Option<Chart> {
    let (median, planned) = (summary.speed.tokens_per_s?, summary.speed.planned_tokens_per_s);
    let predicted = planned.map_or("no speed".into(), short);
    let caption = format!("median {} tokens/s; the plan predicts {predicted}", short(median));
    // A prediction far above the values would flatten their line.
    let near = planned.filter(|planned| *planned > 0.0 && *planned < 3.0 * median);
    let levels = near.map(|planned| (planned, format!("predicted {}", short(planned))));
    SPEED.of_run(run, caption, vec![], levels.into_iter().collect())
}

fn norm(run: &RunRecord) -> Option<Chart> {
    let norms = || run.rows.iter().map(|row| row.grad_norm);
    let (median, most) = (median(norms())?, finite_most(norms()));
    let caption = format!("before clipping: median {}, at most {}", short(median), short(most));
    let mut chart = NORM.of_run(run, caption, vec![], vec![])?;
    if median > 0.0
        && most > 20.0 * median
        && let Some(log) = &chart.log
    {
        chart.y = log.clone();
    }
    Some(chart)
}

fn memory(run: &RunRecord, summary: &RunSummary) -> Option<Chart> {
    let (peak, bytes) = (format_bytes(summary.memory.peak_bytes?), summary.memory.planned_bytes);
    let planned = format!("planned {}", format_bytes(bytes));
    let caption = format!("after each step; at most {peak}, {planned}");
    MEMORY.of_run(run, caption, vec![], vec![(bytes as f64, planned)])
}

/// On a CPU the memory of the device is that of the process already.
fn system_memory(run: &RunRecord, summary: &RunSummary) -> Option<Chart> {
    let most = summary.memory.host_bytes.filter(|_| run.plan.policy.device == "cuda")?;
    let pinned: Vec<Point> = run.rows.iter().map(|row| (row.step as f64, row.pinned_bytes as f64)).collect();
    let points = keep_extremes(&pinned, INTERVALS);
    let line = Line { name: "pinned".into(), look: Look::Faint, points, ..Line::default() };
    let (most, pinned) = (format_bytes(most), format_bytes(summary.memory.pinned_bytes));
    let caption = format!("host RAM after each step: the process at most {most}, pinned {pinned}");
    SYSTEM.of_run(run, caption, vec![line], vec![])
}

/// What a GPU's driver reports as its utilization.
pub const LOAD_CAPTION: &str = "share of time in which a kernel ran, over the last second";

fn utilization(run: &RunRecord, summary: &RunSummary) -> Option<Chart> {
    let mean = summary.speed.gpu_util?;
    LOAD.of_run(run, format!("{LOAD_CAPTION}: mean {mean:.0} %"), vec![], vec![])
}

fn learning_rate(run: &RunRecord) -> Option<Chart> {
    let (most, last) = (finite_most(run.rows.iter().map(|row| row.lr)), run.rows.last()?.lr);
    let caption = format!("at most {}, {} at the last step", short(most), short(last));
    LEARNING_RATE.of_run(run, caption, vec![], vec![])
}
