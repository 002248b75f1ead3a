//! The charts of several runs: their curves over each other.
//!
//! A run has the same colour everywhere. The loss is shown over steps and over time, because runs with different batch
//! sizes or speeds rank differently by each.

use super::charts::{Chart, Line, Look};
use super::run_charts::{
    EVALUATION, INTERVALS, LOAD, LOAD_CAPTION, LOSS, LOSS_OVER_TIME, MEMORY, SPEED, Series, steps_axis, trend,
};
use crate::report::compare::{Compared, Comparison};
use crate::report::numbers::{Axis, Unit};
use crate::report::series::{Point, keep_extremes};

pub fn losses(compared: &Comparison) -> Vec<Chart> {
    let loss = overlaid(&LOSS, compared, "of every step, and its moving average");
    [loss, evaluation(compared), loss_over_time(compared)].into_iter().flatten().collect()
}

pub fn speed_and_memory(compared: &Comparison) -> Vec<Chart> {
    let charts = [
        overlaid(&SPEED, compared, "tokens/s"),
        overlaid(&MEMORY, compared, "measured after each step"),
        overlaid(&LOAD, compared, LOAD_CAPTION),
    ];
    charts.into_iter().flatten().collect()
}

/// The steps of the longest run.
pub fn most_steps(compared: &Comparison) -> u64 {
    compared.runs.iter().map(|run| run.summary.steps).max().unwrap_or(0)
}

/// For each run a line of its values; if they are noisy, of their average, in front of a faint line of all values.
fn overlaid(series: &Series, compared: &Comparison, caption: &str) -> Option<Chart> {
    let (mut lines, mut trends) = (Vec::new(), Vec::new());
    for (index, run) in compared.runs.iter().enumerate() {
        let all = series.points(&run.record);
        if all.iter().any(|point| point.1.is_finite()) {
            let line = Line { run: Some(index), points: keep_extremes(&all, INTERVALS), ..Line::default() };
            if series.is_noisy {
                lines.push(Line { look: Look::Faint, ..line });
                trends.push(Line { run: Some(index), ..trend(&all, &run.name, most_steps(compared)) });
            } else {
                lines.push(Line { name: run.name.clone(), ..line });
            }
        }
    }
    lines.extend(trends);
    series.chart(caption.into(), &steps_axis(0, most_steps(compared)), lines, vec![])
}

fn evaluation(compared: &Comparison) -> Option<Chart> {
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
    let caption = "of the evaluation rows, which may differ between runs";
    EVALUATION.chart(caption.into(), &steps_axis(0, most_steps(compared)), lines, vec![])
}

fn loss_over_time(compared: &Comparison) -> Option<Chart> {
    let longest_s = compared.runs.iter().map(|run| run.summary.speed.seconds).fold(0.0, f64::max);
    let (x_name, unit, unit_s) = match longest_s {
        ..120.0 => ("s", "seconds", 1.0),
        120.0..7200.0 => ("min", "minutes", 60.0),
        _ => ("h", "hours", 3600.0),
    };
    let caption = format!("in {unit} spent in steps, without evaluations and checkpoints");
    let chart = overlaid(&LOSS_OVER_TIME, compared, &caption)?;
    let mut lines = chart.lines;
    // The average is over steps; then steps are replaced by times.
    for line in &mut lines {
        let ends = ends_of_steps(&compared.runs[line.run.unwrap_or(0)], unit_s);
        for point in &mut line.points {
            let index = ends.partition_point(|(step, _)| *step < point.0).min(ends.len().saturating_sub(1));
            point.0 = ends.get(index).map_or(0.0, |(_, time)| *time);
        }
        line.averaged.clear();
    }
    Some(Chart { x_name, x: Axis::from_zero(longest_s / unit_s, Unit::Plain), lines, ..chart })
}

/// Each step with the time spent in steps until its end.
fn ends_of_steps(run: &Compared, unit_s: f64) -> Vec<Point> {
    let mut until = 0.0;
    let rows = run.record.rows.iter().map(|row| {
        until += row.steps as f64 * row.step_ms / 1e3 / unit_s;
        (row.step as f64, until)
    });
    rows.collect()
}
