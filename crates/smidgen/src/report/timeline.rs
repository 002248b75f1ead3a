//! The memory of one step over time: live bytes by category, from the plan's buffers.
//!
//! It covers one micro-batch, then the update, and another entry point if the peak is in that one. Times are predicted.
//! The thousands of steps of a plan are divided into intervals; each interval shows the step with the most memory, so
//! that the peak is exact. The context is at the bottom. Alignment counts as workspace, as in the budget table, but
//! unused gaps do not. The contents of the peak are listed too, largest first; they add up to the peak.

use serde::{Deserialize, Serialize};
use smidgen_compile::Profile;
use smidgen_ir::{Category, Entry, Lifetime, Phase, Plan, Space};
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
    let persistent = persistent_bytes(plan);
    let mut timeline = Timeline {
        steps: moments.len(),
        end_ms: rounded(end_ms),
        bytes: ROWS.iter().map(|row| ((*row).to_string(), Vec::new())).collect(),
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
        for row in ROWS {
            let category = Category::ALL.into_iter().find(|category| category.name() == row);
            let bytes = match category {
                None => context_bytes,
                Some(category) => (persistent[category as usize] + highest.sums[category as usize]) as u64,
            };
            timeline.bytes.entry(row.to_string()).or_default().push(bytes);
        }
    }
    timeline
}

/// Rounds to microseconds, to keep the JSON short.
fn rounded(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

/// A plan step with its predicted time and its memory.
#[derive(Clone, Debug)]
struct Moment {
    entry: Entry,
    step: usize,
    begin_ms: f64,
    end_ms: f64,
    /// Bytes of transient buffers by category.
    sums: [usize; Category::ALL.len()],
    live: usize,
}

fn moments(plan: &Plan, entries: &[Entry], profile: &Profile) -> Vec<Moment> {
    let mut moments = Vec::new();
    let mut begin_ms = 0.0;
    for entry in entries {
        let ends = profile.step_ends(plan, *entry);
        let begin_of_entry = begin_ms;
        let (changes, live) = (transient_changes(plan, *entry), plan.live_bytes(*entry));
        let mut sums = [0isize; Category::ALL.len()];
        for (step, end_s) in ends.iter().enumerate() {
            sums.iter_mut().zip(changes[step]).for_each(|(sum, change)| *sum += change);
            let end_ms = begin_of_entry + end_s * 1e3;
            let mut now = sums.map(|bytes| bytes as usize);
            // Alignment counts as workspace, as in the budget table.
            now[Category::Workspace as usize] += live[step] - now.iter().sum::<usize>();
            moments.push(Moment { entry: *entry, step, begin_ms, end_ms, sums: now, live: live[step] });
            begin_ms = end_ms;
        }
    }
    moments
}

/// The change of live bytes per category at each step of an entry point.
fn transient_changes(plan: &Plan, entry: Entry) -> Vec<[isize; Category::ALL.len()]> {
    let mut changes = vec![[0isize; Category::ALL.len()]; plan.entry(entry).steps.len() + 1];
    for buffer in plan.buffers.iter().filter(|buffer| buffer.space == Space::Device) {
        if let Lifetime::Steps { entry: own, first, last } = buffer.lifetime
            && own == entry
        {
            changes[first][buffer.category as usize] += buffer.bytes as isize;
            changes[last + 1][buffer.category as usize] -= buffer.bytes as isize;
        }
    }
    changes
}

/// Bytes by category that stay on the device for the whole run.
fn persistent_bytes(plan: &Plan) -> [usize; Category::ALL.len()] {
    let mut sums = [0; Category::ALL.len()];
    let on_device = plan.buffers.iter().filter(|buffer| buffer.space == Space::Device);
    for buffer in on_device.filter(|buffer| buffer.lifetime == Lifetime::Run) {
        sums[buffer.category as usize] += buffer.bytes;
    }
    let used: usize = sums.iter().sum();
    sums[Category::Workspace as usize] += plan.persistent_bytes - used;
    sums
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
    let (mut named, mut groups): (Vec<Content>, BTreeMap<Category, (usize, usize)>) =
        (Vec::new(), BTreeMap::new());
    let mut used = 0;
    for (index, buffer) in plan.buffers.iter().enumerate() {
        if buffer.space != Space::Device || !buffer.lifetime.covers(entry, step) {
            continue;
        }
        used += buffer.bytes;
        let name = match names[index] {
            _ if workspace.is_some_and(|id| id.index() == index) => Some("scratch of this step"),
            name => name,
        };
        match (buffer.lifetime, name) {
            (Lifetime::Steps { .. }, Some(name)) => {
                named.push(line(name.to_string(), buffer.category, buffer.bytes as u64, 1));
            }
            _ => {
                let group = groups.entry(buffer.category).or_default();
                *group = (group.0 + buffer.bytes, group.1 + 1);
            }
        }
    }
    let by_size = |a: &Content, b: &Content| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name));
    named.sort_by(by_size);
    let small = named.split_off(NAMED.min(named.len()));
    for category in Category::ALL {
        let rest: Vec<&Content> = small.iter().filter(|it| it.category == category.name()).collect();
        if !rest.is_empty() {
            let bytes = rest.iter().map(|it| it.bytes).sum();
            named.push(line(
                format!("smaller {}", label(category, trains_base)),
                category,
                bytes,
                rest.len(),
            ));
        }
    }
    for (category, (bytes, count)) in groups {
        named.push(line(format!("all {}", label(category, trains_base)), category, bytes as u64, count));
    }
    let live = plan.persistent_bytes + plan.live_bytes(entry).get(step).copied().unwrap_or(0);
    named.push(Content {
        name: "context".into(),
        category: "context".into(),
        bytes: context_bytes,
        count: 1,
    });
    named.push(line("alignment".into(), Category::Workspace, (live - used) as u64, 0));
    named.retain(|it| it.bytes > 0);
    named.sort_by(by_size);
    named
}

fn line(name: String, category: Category, bytes: u64, count: usize) -> Content {
    Content { name, category: category.name().to_string(), bytes, count }
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
