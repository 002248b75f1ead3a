//! The frame of a chart: a picture that stretches to the width of the page, and labels of a fixed size.
//!
//! The SVG has no text and no fixed aspect ratio: it is drawn in a square of 1000 by 1000 and stretched, with lines
//! that keep their width. Ticks, marks and labels are HTML elements over it, positioned in percent, so the same page
//! works on a phone and on a wide screen.

use super::escape::{escape, render_data};
use crate::report::numbers::{Axis, Unit};
use crate::report::series::{Point, spans, usual_span};
use serde_json::{Value, json};
use std::fmt::Write;

/// Side of the square in which charts are drawn.
const SIDE: f64 = 1000.0;

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

impl Look {
    fn class(self) -> &'static str {
        match self {
            Look::Main => "main",
            Look::Faint => "faint",
            Look::Dots => "dots",
        }
    }
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

/// A labelled horizontal line across the chart.
#[derive(Clone, Debug)]
pub struct Level {
    pub value: f64,
    pub label: String,
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
    pub levels: Vec<Level>,
}

impl Chart {
    /// A chart over steps, with plain numbers, no second axis and no levels.
    pub fn over_steps(
        id: &'static str,
        title: &'static str,
        caption: String,
        x: Axis,
        y: Axis,
        lines: Vec<Line>,
    ) -> Chart {
        Chart {
            id,
            title,
            caption,
            x_name: "step",
            x,
            y,
            log: None,
            unit: Unit::Plain,
            lines,
            levels: vec![],
        }
    }

    fn named(&self) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(|line| !line.name.is_empty())
    }
}

/// The switches for axis and smoothing, for a run of this many steps; hidden until the script runs.
pub fn render_controls(steps: u64) -> String {
    let spans: Vec<u64> = spans(steps).collect();
    let usual = spans.iter().position(|span| *span == usual_span(steps)).unwrap_or(0);
    let texts: Vec<String> = spans.iter().map(u64::to_string).collect();
    format!(
        "<div class=\"controls\" hidden><label><input type=\"checkbox\" class=\"log\"> log axis</label>\
         <label>smoothing <input type=\"range\" class=\"span\" min=\"0\" max=\"{}\" value=\"{usual}\" \
         data-spans=\"{}\"> <output></output></label></div>",
        spans.len() - 1,
        texts.join(",")
    )
}

/// Rows of the table below a chart.
const TABLE_ROWS: usize = 24;

pub fn render_chart(chart: &Chart) -> String {
    let Chart { x, y, unit, .. } = chart;
    let mut picture = String::new();
    for line in &chart.lines {
        let path = match line.look {
            Look::Dots => dots_path(&line.points, x, y),
            Look::Main | Look::Faint => line_path(&line.points, x, y),
        };
        write!(
            picture,
            "<path class=\"line {}{}\" d=\"{path}\"/>",
            line.look.class(),
            line.run.map_or(String::new(), colour_class)
        )
        .expect("writing to a string");
    }
    let data = json!({
        "kind": "lines",
        "unit": unit.name(),
        "x": {"name": chart.x_name, "low": x.low, "high": x.high},
        "y": axis_data(y),
        "log": chart.log.as_ref().map(axis_data),
        "levels": chart.levels.iter().map(|level| level.value).collect::<Vec<_>>(),
        "lines": chart.lines.iter().map(line_data).collect::<Vec<_>>(),
    });
    let body = format!("{}{}", render_levels(&chart.levels, y), render_ticks(x, y));
    let figure = Figure {
        id: chart.id,
        title: chart.title,
        caption: &chart.caption,
        legend: &render_legend(chart),
        picture: &format!("{}{picture}", grid(y)),
        over: &body,
        class: "lines",
    };
    figure.render(&render_table(chart), &data)
}

fn axis_data(axis: &Axis) -> Value {
    json!({"low": axis.low, "high": axis.high, "log": axis.is_log, "ticks": axis.ticks})
}

fn line_data(line: &Line) -> Value {
    let point = |point: &Point| json!([digits(point.0), point.1.is_finite().then(|| digits(point.1))]);
    let points = |points: &[Point]| points.iter().map(point).collect::<Vec<Value>>();
    let mut data =
        json!({"name": line.name, "dots": line.look == Look::Dots, "points": points(&line.points)});
    if !line.averaged.is_empty() {
        data["averaged"] = json!(points(&line.averaged));
    }
    data
}

/// The CSS classes of a run's colour, after a space; from the ninth run on, colours repeat with dashed lines.
pub fn colour_class(run: usize) -> String {
    const COLOURS: usize = 8;
    let again = if run < COLOURS { "" } else { " again" };
    format!(" c{}{again}", run % COLOURS)
}

/// A picture with its caption, legend, table and data.
pub struct Figure<'a> {
    pub id: &'a str,
    pub title: &'a str,
    pub caption: &'a str,
    /// HTML next to the title.
    pub legend: &'a str,
    /// Content of the SVG.
    pub picture: &'a str,
    /// HTML over it.
    pub over: &'a str,
    pub class: &'a str,
}

impl Figure<'_> {
    /// `table` is HTML; `data` is for the page's script.
    pub fn render(&self, table: &str, data: &Value) -> String {
        let Figure { id, picture, over, class, legend, .. } = self;
        let (title, caption) = (escape(self.title), escape(self.caption));
        format!(
            "<figure class=\"chart {class}\" id=\"{id}\" aria-labelledby=\"{id}-title\">\
             <figcaption><h3 id=\"{id}-title\">{title}</h3><p>{caption}</p>{legend}</figcaption>\
             <div class=\"plot\"><svg viewBox=\"0 0 1000 1000\" preserveAspectRatio=\"none\" role=\"img\" \
             aria-label=\"{title}: {caption}\">{picture}</svg>{over}\
             <div class=\"cursor\" hidden></div><div class=\"readout\" hidden></div></div>\
             <details id=\"{id}-table\"><summary>As a table</summary><div class=\"scroll\">{table}</div></details>{}\
             </figure>\n",
            render_data(data)
        )
    }
}

/// Lines at the ticks of the y axis.
pub fn grid(y: &Axis) -> String {
    let lines: String =
        y.ticks.iter().map(|(value, _)| format!("M0 {}H1000", at(1.0 - y.place(*value)))).collect();
    format!("<path class=\"grid\" d=\"{lines}\"/>")
}

pub fn render_ticks(x: &Axis, y: &Axis) -> String {
    let mut text = String::new();
    for (value, label) in &y.ticks {
        let place = percent(y.place(*value));
        write!(text, "<span class=\"tick y\" style=\"bottom:{place}\">{}</span>", escape(label))
            .expect("writing to a string");
    }
    for ((value, label), is_crowded) in x.ticks.iter().zip(crowded_ticks(x)) {
        let part = x.place(*value);
        let end = if part > LAST_PART { " end" } else { "" };
        let crowded = if is_crowded { " crowded" } else { "" };
        let place = percent(part);
        write!(text, "<span class=\"tick x{end}{crowded}\" style=\"left:{place}\">{}</span>", escape(label))
            .expect("writing to a string");
    }
    text
}

/// A label beyond this fraction of the axis ends at its tick instead of being centred on it.
const LAST_PART: f64 = 0.94;

/// Labels of the x axis that would touch the next one on a phone, which hides them; the last one is always shown.
fn crowded_ticks(x: &Axis) -> Vec<bool> {
    // In pixels: the narrowest plot of `page.css`, a character, and the gap between labels.
    const PLOT: f64 = 300.0;
    const CHARACTER: f64 = 7.0;
    const BETWEEN: f64 = 8.0;
    let mut next = f64::INFINITY;
    let mut crowded: Vec<bool> = Vec::with_capacity(x.ticks.len());
    for (value, label) in x.ticks.iter().rev() {
        let (part, width) = (x.place(*value), CHARACTER * label.chars().count() as f64);
        let right = PLOT * part + if part > LAST_PART { 0.0 } else { width / 2.0 };
        let is_crowded = right + BETWEEN > next;
        if !is_crowded {
            next = right - width;
        }
        crowded.push(is_crowded);
    }
    crowded.reverse();
    crowded
}

fn render_levels(levels: &[Level], y: &Axis) -> String {
    let level = |level: &Level| {
        let (place, label) = (percent(y.place(level.value)), escape(&level.label));
        format!("<div class=\"level\" style=\"bottom:{place}\"><span>{label}</span></div>")
    };
    levels.iter().map(level).collect()
}

fn render_legend(chart: &Chart) -> String {
    if chart.named().count() < 2 {
        return String::new();
    }
    let item = |line: &Line| {
        let (look, colour, name) =
            (line.look.class(), line.run.map_or(String::new(), colour_class), escape(&line.name));
        format!("<li class=\"{look}{colour}\">{name}</li>")
    };
    let items: String = chart.named().map(item).collect();
    format!("<ul class=\"legend\">{items}</ul>")
}

/// A table of some values of each line, at evenly spaced steps.
fn render_table(chart: &Chart) -> String {
    let mut steps: Vec<f64> =
        chart.named().flat_map(|line| line.points.iter().map(|point| point.0)).collect();
    steps.sort_by(f64::total_cmp);
    steps.dedup();
    let chosen: Vec<f64> = match steps.len() {
        count if count <= TABLE_ROWS => steps,
        count => (0..TABLE_ROWS).map(|row| steps[row * (count - 1) / (TABLE_ROWS - 1)]).collect(),
    };
    let headings: String =
        chart.named().map(|line| format!("<th scope=\"col\">{}</th>", escape(&line.name))).collect();
    let mut rows = String::new();
    for step in chosen {
        let cells: String = chart.named().map(|line| cell(line, step, chart.unit)).collect();
        write!(rows, "<tr><th scope=\"row\">{}</th>{cells}</tr>", digits(step)).expect("writing to a string");
    }
    format!(
        "<table><thead><tr><th scope=\"col\">{}</th>{headings}</tr></thead><tbody>{rows}</tbody></table>",
        chart.x_name
    )
}

/// The value of a series at a step: the last one up to it for lines, the exact one for dots; empty after the series
/// ends.
fn cell(line: &Line, step: f64, unit: Unit) -> String {
    let end = line.points.partition_point(|point| point.0 <= step);
    let before = end.checked_sub(1).map(|index| line.points[index]);
    let is_line = line.look != Look::Dots && end < line.points.len();
    let value = before.filter(|point| is_line || point.0 == step);
    let text = value.map_or(String::new(), |point| unit.render(point.1));
    format!("<td>{}</td>", escape(&text))
}

fn line_path(points: &[Point], x: &Axis, y: &Axis) -> String {
    let mut path = String::new();
    let mut is_down = false;
    for (step, value) in points {
        if !value.is_finite() {
            is_down = false;
            continue;
        }
        let command = if is_down { 'L' } else { 'M' };
        let (x, y) = (at(x.place(*step)), at(1.0 - y.place(*value)));
        write!(path, "{command}{x} {y}").expect("writing to a string");
        is_down = true;
    }
    // A single point has no line to show it.
    if points.len() == 1 { format!("{path}h0") } else { path }
}

/// Lines of length zero, which round caps turn into dots.
fn dots_path(points: &[Point], x: &Axis, y: &Axis) -> String {
    let finite = points.iter().filter(|point| point.1.is_finite());
    finite.map(|point| format!("M{} {}h0", at(x.place(point.0)), at(1.0 - y.place(point.1)))).collect()
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
    match value == 0.0 || !value.is_finite() {
        true => 0.0,
        false => {
            let scale = 10f64.powi(5 - value.abs().log10().floor() as i32);
            let rounded = (value * scale).round() / scale;
            if rounded.is_finite() { rounded } else { value }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten thousand steps: on a phone `8,000` would touch `10,000`, which is left of its tick.
    #[test]
    fn labels_that_would_touch_are_left_out_where_it_is_narrow() {
        let x = Axis::from_zero(10_000.0, Unit::Plain);
        let labels: Vec<&str> = x.ticks.iter().map(|(_, label)| label.as_str()).collect();
        assert_eq!(labels, ["0", "2,000", "4,000", "6,000", "8,000", "10,000"]);
        assert_eq!(crowded_ticks(&x), [false, false, false, false, true, false]);
        let text = render_ticks(&x, &Axis::from_zero(1.0, Unit::Plain));
        assert!(text.contains("<span class=\"tick x crowded\" style=\"left:80.00%\">8,000</span>"), "{text}");
        assert!(text.contains("<span class=\"tick x end\" style=\"left:100.00%\">10,000</span>"), "{text}");
        // Labels that are far enough apart are all shown.
        let few = Axis::from_zero(60.0, Unit::Plain);
        assert!(crowded_ticks(&few).iter().all(|is_crowded| !is_crowded), "{:?}", few.ticks);
    }
}
