//! The memory of one step over time: live bytes by category, from the plan's buffers.
//!
//! It covers one micro-batch, then the update, and another entry point if the peak is in that one. Times are predicted.
//! The thousands of steps of a plan are divided into intervals; each interval shows the step with the most memory, so
//! that the peak is exact. The context is at the bottom. Alignment counts as workspace, as in the budget table, but
//! unused gaps do not. The contents of the peak are listed too, largest first; they add up to the peak.

use serde::{Deserialize, Serialize};
use smidgen_compile::Profile;
use smidgen_ir::{Buffer, Category, Entry, Lifetime, Phase, Plan, Space};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Number of intervals; there are a few more because each entry point begins a new one.
const INTERVALS: usize = 200;
/// Number of buffers that are listed by name at the peak; the others are one line per category.
const NAMED: usize = 12;

/// The categories of a chart, bottom to top.
pub const ROWS: [&str; 7] =
    ["context", "base_weights", "adapters", "gradients", "optimizer", "activations", "workspace"];

/// Columns of equal length, one number per interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// Number of plan steps.
    pub steps: usize,
    /// The interval of the peak.
    pub peak: usize,
    /// When each interval begins; the last one ends at `end_ms`.
    pub begin_ms: Vec<f64>,
    pub end_ms: f64,
    /// `forward`, `backward`, `update`, `refresh` or `eval`.
    pub part: Vec<String>,
    /// Place in the model of the step with the most memory.
    pub place: Vec<String>,
    /// Live bytes at that step, by the names of [`ROWS`].
    pub bytes: BTreeMap<String, Vec<u64>>,
    /// The live buffers at the peak.
    pub contents: Vec<Content>,
}

/// A buffer at the peak, or several in one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    pub name: String,
    pub category: String,
    pub bytes: u64,
    /// Number of buffers in this line.
    pub count: usize,
}

impl Timeline {
    pub fn len(&self) -> usize {
        self.begin_ms.len()
    }

    /// Live bytes in an interval, summed over all rows.
    pub fn total_bytes(&self, interval: usize) -> u64 {
        self.bytes.values().filter_map(|column| column.get(interval)).sum()
    }

    /// Whether all columns have the same length; they may not if the file was edited.
    pub fn is_whole(&self) -> bool {
        let length = self.len();
        let columns = ROWS.iter().all(|row| self.bytes.get(*row).is_some_and(|bytes| bytes.len() == length));
        columns && self.part.len() == length && self.place.len() == length && self.peak < length
    }
}

pub fn draw_timeline(plan: &Plan, context_bytes: u64, profile: &Profile, trains_base: bool) -> Timeline {
    let peak = plan.peak();
    let mut entries = vec![Entry::MicroStep, Entry::Update];
    if !entries.contains(&peak.entry) {
        entries.push(peak.entry);
    }
    entries.retain(|entry| plan.entries.iter().any(|own| own.entry == *entry));
    let moments = moments(plan, &entries, profile);
    let end_ms = moments.last().map_or(0.0, |last| last.end_ms);
    let mut timeline = Timeline {
        steps: moments.len(),
        end_ms: rounded(end_ms),
        contents: contents(plan, peak.entry, peak.step, context_bytes, trains_base),
        ..Timeline::default()
    };
    let interval_of =
        |moment: &Moment| (moment.entry, (moment.begin_ms / end_ms * INTERVALS as f64) as usize);
    for interval in moments.chunk_by(|one, next| interval_of(one) == interval_of(next)) {
        // The first of equal peaks, as in the plan.
        let highest =
            interval.iter().fold(&interval[0], |best, it| if it.live > best.live { it } else { best });
        if interval.iter().any(|it| (it.entry, it.step) == (peak.entry, peak.step)) {
            timeline.peak = timeline.len();
        }
        timeline.begin_ms.push(rounded(interval[0].begin_ms));
        timeline.part.push(part_of(plan, highest).to_string());
        timeline.place.push(plan.place(highest.entry, highest.step));
        let mut sums: BTreeMap<&str, u64> = BTreeMap::from([("context", context_bytes)]);
        for buffer in live_buffers(plan, highest.entry, highest.step).map(|(_, buffer)| buffer) {
            *sums.entry(buffer.category.name()).or_default() += buffer.bytes as u64;
        }
        // Alignment counts as workspace, as in the budget table.
        let used: u64 = sums.values().sum::<u64>() - context_bytes;
        *sums.entry(Category::Workspace.name()).or_default() +=
            (plan.persistent_bytes + highest.live) as u64 - used;
        for row in ROWS {
            timeline.bytes.entry(row.into()).or_default().push(sums.get(row).copied().unwrap_or(0));
        }
    }
    timeline
}

/// The buffers on the device that are in use at a step, with their numbers.
fn live_buffers(plan: &Plan, entry: Entry, step: usize) -> impl Iterator<Item = (usize, &Buffer)> {
    let buffers = plan.buffers.iter().enumerate();
    buffers.filter(move |(_, it)| it.space == Space::Device && it.lifetime.covers(entry, step))
}

/// Rounds to microseconds, to keep the JSON short.
fn rounded(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

/// A plan step with its predicted time and its transient bytes.
#[derive(Clone, Debug)]
struct Moment {
    entry: Entry,
    step: usize,
    begin_ms: f64,
    end_ms: f64,
    live: usize,
}

fn moments(plan: &Plan, entries: &[Entry], profile: &Profile) -> Vec<Moment> {
    let mut moments: Vec<Moment> = Vec::new();
    for &entry in entries {
        let entry_ms = moments.last().map_or(0.0, |last| last.end_ms);
        let steps = profile.step_ends(plan, entry).into_iter().zip(plan.live_bytes(entry));
        let mut begin_ms = entry_ms;
        for (step, (end_s, live)) in steps.enumerate() {
            let end_ms = entry_ms + end_s * 1e3;
            moments.push(Moment { entry, step, begin_ms, end_ms, live });
            begin_ms = end_ms;
        }
    }
    moments
}

/// Prefetches for backward run during forward, so forward ends with the last step of phase `Forward`.
fn part_of(plan: &Plan, moment: &Moment) -> &'static str {
    let last_forward =
        |entry: Entry| plan.entry(entry).steps.iter().rposition(|it| it.phase == Phase::Forward);
    match moment.entry {
        Entry::MicroStep if Some(moment.step) <= last_forward(Entry::MicroStep) => "forward",
        Entry::MicroStep => "backward",
        entry => entry.name(),
    }
}

/// The live buffers at a step: transient ones by name, persistent ones by category.
fn contents(plan: &Plan, entry: Entry, step: usize, context_bytes: u64, trains_base: bool) -> Vec<Content> {
    let mut names: Vec<Option<&str>> = vec![None; plan.buffers.len()];
    for value in &plan.values {
        if let Some(id) = value.buffer {
            names[id.index()].get_or_insert(&value.name);
        }
    }
    let workspace = plan.entry(entry).steps.get(step).and_then(|step| step.workspace);
    let (mut named, mut used) = (Vec::new(), 0);
    let mut groups: BTreeMap<(&str, Category), (usize, usize)> = BTreeMap::new();
    let mut add = |word, category, bytes| {
        let group = groups.entry((word, category)).or_default();
        *group = (group.0 + bytes, group.1 + 1);
    };
    for (index, buffer) in live_buffers(plan, entry, step) {
        used += buffer.bytes;
        let is_scratch = workspace.is_some_and(|id| id.index() == index);
        match (buffer.lifetime, if is_scratch { Some("scratch of this step") } else { names[index] }) {
            (Lifetime::Steps { .. }, Some(name)) => named.push((buffer.bytes, name, buffer.category)),
            _ => add("all", buffer.category, buffer.bytes),
        }
    }
    named.sort_by_key(|(bytes, name, _)| (Reverse(*bytes), *name));
    for (bytes, _, category) in named.split_off(NAMED.min(named.len())) {
        add("smaller", category, bytes);
    }
    let live = plan.persistent_bytes + plan.live_bytes(entry).get(step).copied().unwrap_or(0);
    let line = |name: String, category: &str, bytes: u64, count: usize| Content {
        name,
        category: category.into(),
        bytes,
        count,
    };
    let mut lines = vec![
        line("context".into(), "context", context_bytes, 1),
        line("alignment".into(), Category::Workspace.name(), (live - used) as u64, 0),
    ];
    lines.extend(
        named.iter().map(|(bytes, name, category)| line((*name).into(), category.name(), *bytes as u64, 1)),
    );
    lines.extend(groups.into_iter().map(|((word, category), (bytes, count))| {
        line(format!("{word} {}", label(category, trains_base)), category.name(), bytes as u64, count)
    }));
    lines.retain(|it| it.bytes > 0);
    lines.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    lines
}

fn label(category: Category, trains_base: bool) -> &'static str {
    match category {
        Category::BaseWeights => "base weights",
        Category::Adapters if trains_base => "trained weights",
        Category::Adapters => "adapters",
        Category::Gradients => "gradients",
        Category::Optimizer => "optimizer state",
        Category::Activations => "activations",
        Category::Workspace => "inputs and scratch",
    }
}
