//! The text form of graphs and plans: one line per node, made to be read, diffed and kept in snapshots.
//!
//! A line has the node's index, phase (F, R, B or U), layer, operation, inputs, outputs and updates:
//!
//! ```text
//! entry micro_step
//!      7 F   0 rope[heads=2](layers.0.attn.q, rope) -> layers.0.attn.q_turned f32 (T, 16)
//! ```

use crate::graph::{Graph, Node, Phase, Space, ValueId, ValueRole};
use crate::plan::{Buffer, Lifetime, Plan, Step};
use std::fmt::Write;

/// Every leaf, then every entry point with its nodes.
pub fn render_graph(graph: &Graph) -> String {
    let mut text = String::new();
    for value in graph.values.iter().filter(|value| value.leaf().is_some()) {
        let trained = if value.leaf().is_some_and(|leaf| leaf.gradient.is_some()) { " trained" } else { "" };
        line(&mut text, format_args!("leaf {} {}{trained}", value.name, value.ty));
    }
    for (entry, nodes) in &graph.entries {
        line(&mut text, format_args!("entry {entry}"));
        for (index, node) in nodes.iter().enumerate() {
            let name = |id: ValueId| graph.value(id).name.as_str();
            let results = node.outputs.iter().map(|id| format!("{} {}", name(*id), graph.value(*id).ty));
            line(&mut text, format_args!("  {index:>4} {}", render_node(node, &name, results)));
        }
    }
    text
}

/// The reservation, every leaf with its place in memory, and every step with the places of its results.
pub fn render_plan(plan: &Plan) -> String {
    let mut text = String::new();
    let extent = plan.extent;
    line(&mut text, format_args!("plan {}", plan.title));
    line(&mut text, format_args!("extent T<={} S<={} G<={}", extent.tokens, extent.rows, extent.segments));
    if let Some(extent) = plan.decode_extent {
        line(&mut text, format_args!("extent of decode T<={} S<={}", extent.tokens, extent.rows));
    }
    line(
        &mut text,
        format_args!(
            "reserve {} = persistent {} + transient {}",
            plan.reserved_bytes(),
            plan.persistent_bytes,
            plan.transient_bytes
        ),
    );
    for space in [Space::Host, Space::Disk] {
        let size = plan.size(space);
        if size.bytes() > 0 {
            let (persistent, transient) = (size.persistent_bytes, size.transient_bytes);
            let name = space.name();
            line(
                &mut text,
                format_args!("{name} {} = persistent {persistent} + transient {transient}", size.bytes()),
            );
        }
    }
    for value in plan.values.iter().filter(|value| matches!(value.role, ValueRole::Leaf(_))) {
        if let Some(buffer) = value.buffer.map(|id| plan.buffer(id)) {
            let category = buffer.category.name();
            let at = render_place(buffer);
            line(&mut text, format_args!("leaf {at} {category} {} {}", value.name, value.ty));
        }
    }
    for entry in &plan.entries {
        let live = plan.live_bytes(entry.entry);
        line(&mut text, format_args!("entry {} peak {}", entry.entry, live.iter().max().unwrap_or(&0)));
        for (index, step) in entry.steps.iter().enumerate() {
            if entry.laps.iter().any(|lap| lap.each.start == index) {
                line(&mut text, format_args!("  for each micro-batch"));
            }
            line(&mut text, format_args!("  {index:>4} {}", render_step(plan, step)));
            if entry.laps.iter().any(|lap| lap.each.end == index + 1) {
                line(&mut text, format_args!("  until the last micro-batch"));
            }
        }
    }
    text
}

fn render_step(plan: &Plan, step: &Step) -> String {
    let name = |id: ValueId| plan.value(id).name.as_str();
    let place = |id: ValueId| match plan.value(id).buffer.map(|id| plan.buffer(id)) {
        Some(buffer) => {
            let extent = plan.extent_of_lifetime(buffer.lifetime);
            format!("{} {}+{}", name(id), render_place(buffer), plan.value(id).ty.bytes(&extent))
        }
        None => format!("{} nowhere", name(id)),
    };
    let node = Node {
        op: step.op.clone(),
        inputs: step.inputs.clone(),
        outputs: step.outputs.clone(),
        updates: step.updates.clone(),
        phase: step.phase,
        layer: step.layer,
    };
    let mut text = render_node(&node, &name, step.outputs.iter().map(|id| place(*id)));
    if let Some(buffer) = step.workspace.map(|id| plan.buffer(id)) {
        debug_assert!(matches!(buffer.lifetime, Lifetime::Steps { .. }));
        text += &format!(" work @{}+{}", buffer.offset, buffer.bytes);
    }
    if !step.awaits.is_empty() {
        text += &format!(" awaits {:?}", step.awaits);
    }
    text
}

/// `@offset`, preceded by the space if that is not the device.
fn render_place(buffer: &Buffer) -> String {
    match buffer.space {
        Space::Device => format!("@{}", buffer.offset),
        Space::Host | Space::Disk => format!("{}@{}", buffer.space.name(), buffer.offset),
    }
}

fn render_node<'a>(
    node: &Node,
    name: &dyn Fn(ValueId) -> &'a str,
    results: impl Iterator<Item = String>,
) -> String {
    let phase = match node.phase {
        Phase::Forward => 'F',
        Phase::Recompute => 'R',
        Phase::Backward => 'B',
        Phase::Update => 'U',
    };
    let layer = node.layer.map_or_else(|| "-".into(), |layer| layer.to_string());
    let inputs: Vec<&str> = node.inputs.iter().map(|id| name(*id)).collect();
    let mut attributes = node.op.attributes();
    if !attributes.is_empty() {
        attributes = format!("[{attributes}]");
    }
    let mut text = format!("{phase} {layer:>3} {}{attributes}({})", node.op.name(), inputs.join(", "));
    let results: Vec<String> = results.collect();
    if !results.is_empty() {
        text += &format!(" -> {}", results.join(", "));
    }
    if !node.updates.is_empty() {
        let updates: Vec<&str> = node.updates.iter().map(|id| name(*id)).collect();
        text += &format!(" += {}", updates.join(", "));
    }
    text
}

fn line(text: &mut String, content: std::fmt::Arguments<'_>) {
    writeln!(text, "{content}").expect("writing to a string cannot fail");
}
