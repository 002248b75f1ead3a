//! The memory of one step as stacked areas with the peak marked, and the contents of the peak.
//!
//! All numbers come from the plan; measurements are in other sections. The dashed line is the planned peak, which is
//! reserved; the gap between it and the areas is unused.
//! If persistent data is much larger than the rest, a second chart shows only transient memory.

use super::charts::{Figure, at, grid, percent, render_ticks};
use super::escape::escape;
use crate::report::numbers::{Axis, Unit, short};
use crate::report::plan_facts::PlanFacts;
use crate::report::timeline::{ROWS, Timeline};
use serde_json::json;
use smidgen_ir::bytes::format_bytes;
use std::fmt::Write;

/// Height of a chart relative to the peak: leaves room for the label.
const HEADROOM: f64 = 1.3;
/// Rows of the table below the chart.
const TABLE_ROWS: usize = 24;

pub fn render_memory(plan: &PlanFacts) -> String {
    let timeline = &plan.timeline;
    let drawn = match timeline.is_whole() {
        true => render_pictures(plan, timeline),
        false => "<p class=\"lead\">This plan was made by an earlier version and has no timeline.</p>".into(),
    };
    format!("{drawn}<div class=\"pair\">{}{}</div>", render_rows(plan), render_contents(plan))
}

fn render_pictures(plan: &PlanFacts, timeline: &Timeline) -> String {
    let peak = format_bytes(plan.peak_bytes);
    let live = timeline.total_bytes(timeline.peak);
    let unused = plan.peak_bytes.saturating_sub(live);
    let batches = match plan.micro_steps {
        count if count > 1.05 => format!("one of about {} micro-batches, then the update", short(count)),
        _ => "one micro-batch, then the update".to_string(),
    };
    let caption = format!(
        "{batches}, as planned. {} in use at the peak of {peak}; {} of the reserved memory is unused.",
        format_bytes(live),
        format_bytes(unused)
    );
    let columns: Vec<(&str, Vec<u64>)> =
        ROWS.iter().map(|row| (*row, timeline.bytes[*row].clone())).collect();
    let persistent: u64 = columns.iter().map(|(_, column)| column.iter().min().copied().unwrap_or(0)).sum();
    let whole = Picture {
        plan,
        id: "timeline",
        title: "Memory of one step",
        caption,
        columns: &columns,
        high: plan.peak_bytes as f64,
        label: Some((format!("peak {peak}"), timeline.place[timeline.peak].clone())),
    };
    let mut text = whole.render(timeline);
    if persistent as f64 > 0.6 * live as f64 {
        let moving: Vec<(&str, Vec<u64>)> = columns
            .iter()
            .map(|(row, column)| {
                let least = column.iter().min().copied().unwrap_or(0);
                (*row, column.iter().map(|bytes| bytes - least).collect())
            })
            .collect();
        let high = live - persistent;
        let caption = format!(
            "without {} of persistent memory: at most {}",
            format_bytes(persistent),
            format_bytes(high)
        );
        let (id, title) = ("timeline-moving", "Transient memory");
        text += &Picture {
            plan,
            id,
            title,
            caption,
            columns: &moving,
            high: high as f64 / HEADROOM * 1.1,
            label: None,
        }
        .render(timeline);
    }
    text
}

struct Picture<'a> {
    plan: &'a PlanFacts,
    id: &'a str,
    title: &'a str,
    caption: String,
    /// By row, bottom to top.
    columns: &'a [(&'a str, Vec<u64>)],
    high: f64,
    label: Option<(String, String)>,
}

impl Picture<'_> {
    fn render(&self, timeline: &Timeline) -> String {
        let x = Axis::from_zero(timeline.end_ms, Unit::Milliseconds);
        let y = Axis::from_zero(self.high * HEADROOM, Unit::Bytes);
        let mut below = vec![0u64; timeline.len()];
        let mut areas = String::new();
        for (row, column) in self.columns.iter().filter(|(_, column)| column.iter().any(|bytes| *bytes > 0)) {
            let above: Vec<u64> = below.iter().zip(column).map(|(low, bytes)| low + bytes).collect();
            let path = area_path(timeline, &below, &above, (&x, &y));
            write!(areas, "<path class=\"area {row}\" d=\"{path}\"/>").expect("writing to a string");
            below = above;
        }
        let mut over = render_ticks(&x, &y);
        if let Some((peak, place)) = &self.label {
            over += &render_peak(timeline, (&x, &y), self.high, (peak, place));
        }
        over += &render_parts(timeline, &x);
        let rows: Vec<_> = self
            .columns
            .iter()
            .map(|(row, column)| json!({"name": self.plan.label(row), "bytes": column}))
            .collect();
        let data = json!({
            "kind": "stretches", "high": timeline.end_ms, "begin": timeline.begin_ms, "place": timeline.place,
            "rows": rows,
        });
        let (table, legend) = (self.render_table(timeline), self.render_legend());
        let figure = Figure {
            id: self.id,
            title: self.title,
            caption: &self.caption,
            legend: &legend,
            picture: &format!("{areas}{}", grid(&y)),
            over: &over,
            class: "areas",
        };
        figure.render(&table, &data)
    }

    fn render_legend(&self) -> String {
        let shown = self.columns.iter().filter(|(_, column)| column.iter().any(|bytes| *bytes > 0));
        let items: String = shown
            .rev()
            .map(|(row, _)| format!("<li class=\"{row}\">{}</li>", self.plan.label(row)))
            .collect();
        format!("<ul class=\"legend\">{items}</ul>")
    }

    fn render_table(&self, timeline: &Timeline) -> String {
        let headings: String = self
            .columns
            .iter()
            .map(|(row, _)| format!("<th scope=\"col\">{}</th>", self.plan.label(row)))
            .collect();
        let count = timeline.len();
        let mut chosen: Vec<usize> = match count {
            0..=TABLE_ROWS => (0..count).collect(),
            _ => (0..TABLE_ROWS)
                .map(|row| row * (count - 1) / (TABLE_ROWS - 1))
                .chain([timeline.peak])
                .collect(),
        };
        chosen.sort_unstable();
        chosen.dedup();
        let mut rows = String::new();
        for interval in chosen {
            let cells: String = self
                .columns
                .iter()
                .map(|(_, column)| format!("<td>{}</td>", format_bytes(column[interval])))
                .collect();
            let (place, begin) = (escape(&timeline.place[interval]), short(timeline.begin_ms[interval]));
            let mark = if interval == timeline.peak { " class=\"peak\"" } else { "" };
            write!(rows, "<tr{mark}><th scope=\"row\">{begin} ms</th><td>{place}</td>{cells}</tr>")
                .expect("writing to a string");
        }
        format!(
            "<table><thead><tr><th scope=\"col\">at</th><th scope=\"col\">where</th>{headings}</tr></thead>\
             <tbody>{rows}</tbody></table>"
        )
    }
}

fn end_ms(timeline: &Timeline, interval: usize) -> f64 {
    timeline.begin_ms.get(interval + 1).copied().unwrap_or(timeline.end_ms)
}

/// The outline of an area: the upper edge from left to right, then the lower edge back.
fn area_path(timeline: &Timeline, below: &[u64], above: &[u64], (x, y): (&Axis, &Axis)) -> String {
    let height = |bytes: u64| at(1.0 - y.place(bytes as f64));
    let mut path = format!("M0 {}", height(below[0]));
    let mut last = String::new();
    for (interval, bytes) in above.iter().enumerate() {
        let now = height(*bytes);
        if now != last {
            write!(path, "V{now}").expect("writing to a string");
            last = now;
        }
        write!(path, "H{}", at(x.place(end_ms(timeline, interval)))).expect("writing to a string");
    }
    last.clear();
    for (interval, bytes) in below.iter().enumerate().rev() {
        let now = height(*bytes);
        if now != last {
            write!(path, "V{now}").expect("writing to a string");
            last = now;
        }
        write!(path, "H{}", at(x.place(timeline.begin_ms[interval]))).expect("writing to a string");
    }
    path.push('Z');
    path
}

/// The line of reserved memory, a dot at the peak, and both numbers as labels.
fn render_peak(
    timeline: &Timeline,
    (x, y): (&Axis, &Axis),
    reserved: f64,
    (peak, place): (&str, &str),
) -> String {
    let middle = (timeline.begin_ms[timeline.peak] + end_ms(timeline, timeline.peak)) / 2.0;
    let part = x.place(middle);
    let (left, live) = (percent(part), percent(y.place(timeline.total_bytes(timeline.peak) as f64)));
    let line = percent(y.place(reserved));
    // The label is on the side with more room.
    let (side, from) = match part < 0.5 {
        true => ("left", percent(part.min(0.45))),
        false => ("right", percent((1.0 - part).min(0.45))),
    };
    let (peak, place) = (escape(peak), escape(place));
    format!(
        "<div class=\"level\" style=\"bottom:{line}\"></div>\
         <div class=\"peak-line\" style=\"left:{left};height:{line}\"></div>\
         <div class=\"peak-dot\" style=\"left:{left};bottom:{live}\"></div>\
         <div class=\"peak-label {side}\" id=\"peak-label\" style=\"bottom:{line};{side}:{from}\">\
         <strong>{peak}</strong> <span>{place}</span></div>"
    )
}

/// Forward, backward and update as a band below the chart, labelled if there is room.
fn render_parts(timeline: &Timeline, x: &Axis) -> String {
    let mut text = String::from("<div class=\"parts\" aria-hidden=\"true\">");
    let parts: Vec<(usize, &String)> = timeline.part.iter().enumerate().collect();
    for run in parts.chunk_by(|one, next| one.1 == next.1) {
        let (first, last) = (run[0].0, run[run.len() - 1].0);
        let (left, right) = (x.place(timeline.begin_ms[first]), x.place(end_ms(timeline, last)));
        let name = escape(run[0].1);
        let label = if right - left > 0.13 { name.as_str() } else { "" };
        let (left, width) = (percent(left), percent(right - left));
        write!(
            text,
            "<span class=\"{name}\" title=\"{name}\" style=\"left:{left};width:{width}\">{label}</span>"
        )
        .expect("writing to a string");
    }
    text + "</div>"
}

fn render_rows(plan: &PlanFacts) -> String {
    let mut rows = String::new();
    for row in ROWS.iter().rev() {
        let bytes = plan.rows.get(*row).copied().unwrap_or(0);
        let part = bytes as f64 / plan.peak_bytes.max(1) as f64;
        let (width, size) = (percent(part), format_bytes(bytes));
        write!(
            rows,
            "<tr><th scope=\"row\"><i class=\"{row}\"></i>{}</th><td>{size}</td>\
             <td class=\"bar\"><b class=\"{row}\" style=\"width:{width}\"></b></td><td>{:.1} %</td></tr>",
            plan.label(row),
            100.0 * part
        )
        .expect("writing to a string");
    }
    let peak = format_bytes(plan.peak_bytes);
    format!(
        "<div><h3>By category, at the peak</h3><table class=\"rows\"><tbody>{rows}</tbody><tfoot><tr><th scope=\"row\">peak</th>\
         <td>{peak}</td><td></td><td></td></tr></tfoot></table>\
         <p class=\"note\">Workspace includes inputs, scratch, alignment and unused space; context is the memory of {}.</p></div>",
        match plan.policy.device.as_str() {
            "cpu" => "the process: program, stacks and data",
            _ => "the GPU driver",
        }
    )
}

fn render_contents(plan: &PlanFacts) -> String {
    let timeline = &plan.timeline;
    if timeline.contents.is_empty() {
        return String::new();
    }
    let mut rows = String::new();
    for content in &timeline.contents {
        let (name, size) = (escape(&content.name), format_bytes(content.bytes));
        let category = ROWS.iter().find(|row| **row == content.category).unwrap_or(&"workspace");
        let count =
            if content.count > 1 { format!(" <small>× {}</small>", content.count) } else { String::new() };
        write!(
            rows,
            "<tr><th scope=\"row\"><i class=\"{category}\" title=\"{}\"></i>{name}{count}</th><td>{size}</td></tr>",
            plan.label(category)
        )
        .expect("writing to a string");
    }
    format!(
        "<div><h3>In memory at the peak</h3><table class=\"rows contents\"><tbody>{rows}</tbody></table></div>"
    )
}
