//! Charts as coordinates: a picture that stretches to the width of the page, and labels of a fixed size.
//!
//! The SVG has no text and no fixed aspect ratio: it is drawn in a square of 1000 by 1000 and stretched, with lines
//! that keep their width. Ticks, marks and labels are HTML elements over it, positioned in percent, so the same page
//! works on a phone and on a wide screen. `page.html` makes the elements, and `page.js` draws a chart again when the
//! reader changes the axis or the smoothing.

use crate::report::numbers::{Axis, Unit};
use crate::report::series::Point;
use serde_json::{Value, json};
use std::fmt::Write;

/// Side of the square in which charts are drawn.
const SIDE: f64 = 1000.0;

/// Rows of the table below a chart.
pub const TABLE_ROWS: usize = 24;

/// The style of a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Look {
    /// The main line of the chart.
    #[default]
    Main,
    /// Every value, behind the trend.
    Faint,
    /// Another series to compare with, drawn as points.
    Dots,
}

#[derive(Clone, Debug, Default)]
pub struct Line {
    /// A line without a name is drawn, but not in the legend, the cursor or the table.
    pub name: String,
    pub look: Look,
    /// The index of its run in a comparison, which selects the colour.
    pub run: Option<usize>,
    pub points: Vec<Point>,
    /// If `points` is an average: what the page's script averages when the reader changes the smoothing.
    pub averaged: Vec<Point>,
}

impl Line {
    fn class(&self) -> String {
        let look = match self.look {
            Look::Main => "main",
            Look::Faint => "faint",
            Look::Dots => "dots",
        };
        format!("{look}{}", self.run.map_or(String::new(), colour_class))
    }

    /// The value at a step: the last one up to it for lines, the exact one for dots; empty after the series ends.
    fn render_at(&self, step: f64, unit: Unit) -> String {
        let end = self.points.partition_point(|point| point.0 <= step);
        let before = end.checked_sub(1).map(|index| self.points[index]);
        let is_line = self.look != Look::Dots && end < self.points.len();
        let value = before.filter(|point| is_line || point.0 == step);
        value.map_or(String::new(), |point| unit.render(point.1))
    }

    fn data(&self) -> Value {
        let point = |point: &Point| json!([digits(point.0), point.1.is_finite().then(|| digits(point.1))]);
        let points = |points: &[Point]| points.iter().map(point).collect::<Vec<Value>>();
        let is_dots = self.look == Look::Dots;
        let mut data = json!({"name": self.name, "dots": is_dots, "points": points(&self.points)});
        if !self.averaged.is_empty() {
            data["averaged"] = json!(points(&self.averaged));
        }
        data
    }
}

#[derive(Clone, Debug)]
pub struct Chart {
    /// Unique in the page.
    pub id: &'static str,
    pub title: &'static str,
    /// Also read by screen readers.
    pub caption: String,
    /// What x is: `step`, or a unit of time.
    pub x_name: &'static str,
    pub x: Axis,
    pub y: Axis,
    /// A logarithmic y axis that the reader can switch to.
    pub log: Option<Axis>,
    pub unit: Unit,
    pub lines: Vec<Line>,
    /// Horizontal lines across the chart: their values and labels.
    pub levels: Vec<(f64, String)>,
}

impl Chart {
    /// The coordinates for the page's template, and the numbers for its script.
    pub fn view(&self) -> Value {
        let Chart { x, y, unit, .. } = self;
        let named = || self.lines.iter().filter(|line| !line.name.is_empty());
        let path = |line: &Line| (format!("line {}", line.class()), line_path(line, x, y));
        let paths = [grid(y)].into_iter().chain(self.lines.iter().map(path));
        let row = |step: &f64| {
            let cells: Vec<String> = named().map(|line| line.render_at(*step, *unit)).collect();
            json!({"at": digits(*step).to_string(), "cells": cells})
        };
        let headings = [self.x_name].into_iter().chain(named().map(|line| line.name.as_str()));
        let mut steps: Vec<f64> = named().flat_map(|line| line.points.iter().map(|point| point.0)).collect();
        steps.sort_by(f64::total_cmp);
        steps.dedup();
        json!({
            "kind": "lines",
            "id": self.id,
            "title": self.title,
            "caption": self.caption,
            "legend": named().map(|line| (line.class(), &line.name)).collect::<Vec<_>>(),
            "paths": paths.collect::<Vec<_>>(),
            "levels": self.levels.iter().map(|(value, label)| (percent(y.place(*value)), label)).collect::<Vec<_>>(),
            "rows": tick_rows(y),
            "columns": tick_columns(x),
            "headings": headings.collect::<Vec<_>>(),
            "table": evenly(steps.len()).map(|index| row(&steps[index])).collect::<Vec<_>>(),
            "data": {
                "kind": "lines",
                "unit": unit.name(),
                "x": {"name": self.x_name, "low": x.low, "high": x.high},
                "y": axis_data(y),
                "log": self.log.as_ref().map(axis_data),
                "levels": self.levels.iter().map(|(value, _)| value).collect::<Vec<_>>(),
                "lines": self.lines.iter().map(Line::data).collect::<Vec<_>>(),
            },
        })
    }
}

fn axis_data(axis: &Axis) -> Value {
    json!({"low": axis.low, "high": axis.high, "log": axis.is_log, "ticks": axis.ticks})
}

/// Evenly spaced places in a list of this length, the first and the last included: the rows of a table.
pub fn evenly(length: usize) -> impl Iterator<Item = usize> {
    let rows = length.min(TABLE_ROWS);
    (0..rows).map(move |row| row * (length - 1) / rows.saturating_sub(1).max(1))
}

/// The CSS classes of a run's colour, after a space; from the ninth run on, colours repeat with dashed lines.
pub fn colour_class(run: usize) -> String {
    const COLOURS: usize = 8;
    let again = if run < COLOURS { "" } else { " again" };
    format!(" c{}{again}", run % COLOURS)
}

/// Lines at the ticks of the y axis.
pub fn grid(y: &Axis) -> (String, String) {
    let line = |value: &f64| format!("M0 {}H1000", at(1.0 - y.place(*value)));
    ("grid".into(), y.ticks.iter().map(|(value, _)| line(value)).collect())
}

/// The labels of the y axis: places from the bottom.
pub fn tick_rows(y: &Axis) -> Vec<(String, &str)> {
    y.ticks.iter().map(|(value, label)| (percent(y.place(*value)), label.as_str())).collect()
}

/// A label beyond this fraction of the axis ends at its tick instead of being centred on it.
const LAST_PART: f64 = 0.94;

/// The labels of the x axis: places from the left, and CSS classes. A phone hides the labels that would touch the next
/// one; the last one is always shown.
pub fn tick_columns(x: &Axis) -> Vec<(String, &str, String)> {
    // In pixels: the narrowest plot of `page.css`, a character, and the gap between labels.
    const PLOT: f64 = 300.0;
    const CHARACTER: f64 = 7.0;
    const BETWEEN: f64 = 8.0;
    let mut next = f64::INFINITY;
    let mut columns = Vec::with_capacity(x.ticks.len());
    for (value, label) in x.ticks.iter().rev() {
        let (part, width) = (x.place(*value), CHARACTER * label.chars().count() as f64);
        let is_last = part > LAST_PART;
        let right = PLOT * part + if is_last { 0.0 } else { width / 2.0 };
        let is_crowded = right + BETWEEN > next;
        if !is_crowded {
            next = right - width;
        }
        let end = if is_last { " end" } else { "" };
        let class = format!("{end}{}", if is_crowded { " crowded" } else { "" });
        columns.push((percent(part), label.as_str(), class));
    }
    columns.reverse();
    columns
}

fn line_path(line: &Line, x: &Axis, y: &Axis) -> String {
    let mut path = String::new();
    let mut is_down = false;
    for (step, value) in &line.points {
        if value.is_finite() {
            let command = if is_down && line.look != Look::Dots { 'L' } else { 'M' };
            write!(path, "{command}{} {}", at(x.place(*step)), at(1.0 - y.place(*value)))
                .expect("writing to a string");
            // Lines of length zero, which round caps turn into dots.
            path.push_str(if line.look == Look::Dots || line.points.len() == 1 { "h0" } else { "" });
        }
        is_down = value.is_finite();
    }
    path
}

/// A coordinate in the picture, with one decimal.
pub fn at(part: f64) -> String {
    let tenths = (part * SIDE * 10.0).round() as i64;
    match tenths % 10 {
        0 => (tenths / 10).to_string(),
        tenth => format!("{}.{tenth}", tenths / 10),
    }
}

pub fn percent(part: f64) -> String {
    format!("{:.2}%", 100.0 * part)
}

/// Rounds to six significant digits, which is more than the cursor shows.
fn digits(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powi(5 - value.abs().log10().floor() as i32);
    let rounded = (value * scale).round() / scale;
    if rounded.is_finite() { rounded } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten thousand steps: on a phone `8,000` would touch `10,000`, which is left of its tick.
    #[test]
    fn labels_that_would_touch_are_left_out_where_it_is_narrow() {
        let x = Axis::from_zero(10_000.0, Unit::Plain);
        let columns = tick_columns(&x);
        let classes: Vec<(&str, &str)> =
            columns.iter().map(|(_, label, class)| (*label, class.as_str())).collect();
        let expected = [
            ("0", ""),
            ("2,000", ""),
            ("4,000", ""),
            ("6,000", ""),
            ("8,000", " crowded"),
            ("10,000", " end"),
        ];
        assert_eq!(classes, expected);
        assert_eq!([&*columns[4].0, &*columns[5].0], ["80.00%", "100.00%"]);
        // Labels that are far enough apart are all shown.
        let few = Axis::from_zero(60.0, Unit::Plain);
        assert!(tick_columns(&few).iter().all(|(_, _, class)| !class.contains("crowded")), "{:?}", few.ticks);
    }

    #[test]
    fn a_table_has_the_first_and_the_last_row() {
        assert_eq!(evenly(0).count(), 0);
        assert_eq!(evenly(1).collect::<Vec<_>>(), [0]);
        assert_eq!(evenly(3).collect::<Vec<_>>(), [0, 1, 2]);
        let rows: Vec<usize> = evenly(1000).collect();
        assert_eq!((rows.len(), rows[0], rows[TABLE_ROWS - 1]), (TABLE_ROWS, 0, 999));
    }
}
