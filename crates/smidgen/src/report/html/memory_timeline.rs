//! The memory of one step as stacked areas with the peak marked.
//!
//! All numbers come from the plan; measurements are in other sections. The dashed line is the planned peak, which is
//! reserved; the gap between it and the areas is unused.
//! If persistent data is much larger than the rest, a second chart shows only transient memory.

use super::charts::{at, evenly, grid, percent, tick_columns, tick_rows};
use crate::report::numbers::{Axis, Unit, short};
use crate::report::plan_facts::PlanFacts;
use crate::report::timeline::{ROWS, Timeline};
use serde_json::{Value, json};
use smidgen_ir::bytes::format_bytes;
use std::fmt::Write;

/// Height of a chart relative to the peak: leaves room for the label.
const HEADROOM: f64 = 1.3;

/// A category and its bytes in every interval, bottom to top.
type Column = (&'static str, Vec<u64>);

/// The charts; none for a plan of an earlier version, which has no timeline.
pub fn timeline_charts(plan: &PlanFacts) -> Vec<Value> {
    let timeline = &plan.timeline;
    if !timeline.is_whole() {
        return vec![];
    }
    let live = timeline.total_bytes(timeline.peak);
    let (in_use, unused) = (format_bytes(live), format_bytes(plan.peak_bytes.saturating_sub(live)));
    let batches = match plan.micro_steps {
        count if count > 1.05 => format!("one of about {} micro-batches, then the update", short(count)),
        _ => "one micro-batch, then the update".to_string(),
    };
    let peak = format_bytes(plan.peak_bytes);
    let caption = format!(
        "{batches}, as planned. {in_use} in use at the peak of {peak}; {unused} of the reserved memory is unused."
    );
    let columns: Vec<Column> = ROWS.iter().map(|row| (*row, timeline.bytes[*row].clone())).collect();
    let least = |column: &[u64]| column.iter().min().copied().unwrap_or(0);
    let persistent: u64 = columns.iter().map(|(_, column)| least(column)).sum();
    let reserved = plan.peak_bytes as f64;
    let mut whole = chart(plan, "timeline", "Memory of one step", &caption, &columns, reserved * HEADROOM);
    mark_peak(plan, &mut whole);
    let mut charts = vec![whole];
    if persistent as f64 > 0.6 * live as f64 {
        let above = |column: Vec<u64>| column.iter().map(|bytes| bytes - least(&column)).collect();
        let moving: Vec<Column> = columns.into_iter().map(|(row, column)| (row, above(column))).collect();
        let (kept, high) = (format_bytes(persistent), live - persistent);
        let caption = format!("without {kept} of persistent memory: at most {}", format_bytes(high));
        charts.push(chart(plan, "timeline-moving", "Transient memory", &caption, &moving, high as f64 * 1.1));
    }
    charts
}

fn chart(plan: &PlanFacts, id: &str, title: &str, caption: &str, columns: &[Column], high: f64) -> Value {
    let timeline = &plan.timeline;
    let (x, y) = (Axis::from_zero(timeline.end_ms, Unit::Milliseconds), Axis::from_zero(high, Unit::Bytes));
    let shown = || columns.iter().filter(|(_, column)| column.iter().any(|bytes| *bytes > 0));
    let mut below = vec![0u64; timeline.len()];
    let mut paths = Vec::new();
    for (row, column) in shown() {
        let above: Vec<u64> = below.iter().zip(column).map(|(low, bytes)| low + bytes).collect();
        paths.push((format!("area {row}"), area_path(timeline, &below, &above, (&x, &y))));
        below = above;
    }
    paths.push(grid(&y));
    let mut intervals: Vec<usize> = evenly(timeline.len()).chain([timeline.peak]).collect();
    intervals.sort_unstable();
    intervals.dedup();
    let table = intervals.into_iter().map(|interval| {
        let sizes = columns.iter().map(|(_, column)| format_bytes(column[interval]));
        let cells: Vec<String> = [timeline.place[interval].clone()].into_iter().chain(sizes).collect();
        let at = format!("{} ms", short(timeline.begin_ms[interval]));
        json!({"at": at, "cells": cells, "is_peak": interval == timeline.peak})
    });
    let headings = ["at", "where"].into_iter().chain(columns.iter().map(|(row, _)| plan.label(row)));
    let row = |(row, column): &Column| json!({"name": plan.label(row), "bytes": column});
    json!({
        "kind": "areas",
        "id": id,
        "title": title,
        "caption": caption,
        "legend": shown().map(|(row, _)| (row, plan.label(row))).rev().collect::<Vec<_>>(),
        "paths": paths,
        "rows": tick_rows(&y),
        "columns": tick_columns(&x),
        "parts": parts(timeline, &x),
        "headings": headings.collect::<Vec<_>>(),
        "table": table.collect::<Vec<Value>>(),
        "data": {
            "kind": "stretches",
            "high": timeline.end_ms,
            "begin": timeline.begin_ms,
            "place": timeline.place,
            "rows": columns.iter().map(row).collect::<Vec<_>>(),
        },
    })
}

fn end_ms(timeline: &Timeline, interval: usize) -> f64 {
    timeline.begin_ms.get(interval + 1).copied().unwrap_or(timeline.end_ms)
}

/// The outline of an area: the upper edge from left to right, then the lower edge back.
fn area_path(timeline: &Timeline, below: &[u64], above: &[u64], (x, y): (&Axis, &Axis)) -> String {
    let height = |bytes: u64| at(1.0 - y.place(bytes as f64));
    let mut path = format!("M0 {}", height(below[0]));
    let forth = above.iter().enumerate().map(|(interval, bytes)| (*bytes, end_ms(timeline, interval)));
    let back = below.iter().zip(&timeline.begin_ms).rev().map(|(bytes, begin_ms)| (*bytes, *begin_ms));
    let mut last = String::new();
    for (bytes, until_ms) in forth.chain(back) {
        let now = height(bytes);
        if now != last {
            write!(path, "V{now}").expect("writing to a string");
            last = now;
        }
        write!(path, "H{}", at(x.place(until_ms))).expect("writing to a string");
    }
    path + "Z"
}

/// Adds the line of reserved memory, a dot at the peak, and both numbers as labels.
fn mark_peak(plan: &PlanFacts, chart: &mut Value) {
    let timeline = &plan.timeline;
    let x = Axis::from_zero(timeline.end_ms, Unit::Milliseconds);
    let middle = (timeline.begin_ms[timeline.peak] + end_ms(timeline, timeline.peak)) / 2.0;
    let part = x.place(middle);
    let height = |bytes: u64| percent(bytes as f64 / (plan.peak_bytes.max(1) as f64 * HEADROOM));
    // The label is on the side with more room.
    let (side, from) = if part < 0.5 { ("left", part) } else { ("right", 1.0 - part) };
    chart["levels"] = json!([(height(plan.peak_bytes), "")]);
    chart["peak"] = json!({
        "left": percent(part),
        "line": height(plan.peak_bytes),
        "live": height(timeline.total_bytes(timeline.peak)),
        "side": side,
        "from": percent(from.min(0.45)),
        "bytes": plan.peak_bytes,
        "place": timeline.place[timeline.peak],
    });
}

/// Forward, backward and update as a band below the chart, labelled if there is room: name, left, width, label.
fn parts(timeline: &Timeline, x: &Axis) -> Vec<(String, String, String, String)> {
    let parts: Vec<(usize, &String)> = timeline.part.iter().enumerate().collect();
    let runs = parts.chunk_by(|one, next| one.1 == next.1).map(|run| {
        let (first, last, name) = (run[0].0, run[run.len() - 1].0, run[0].1.clone());
        let (left, right) = (x.place(timeline.begin_ms[first]), x.place(end_ms(timeline, last)));
        let label = if right - left > 0.13 { name.clone() } else { String::new() };
        (name, percent(left), percent(right - left), label)
    });
    runs.collect()
}
