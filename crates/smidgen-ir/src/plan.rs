//! A plan: steps in order over buffers whose places in memory are fixed.
//!
//! The plan *is* the allocation. One reservation of `reserved_bytes` has a persistent region (leaves, for the whole run)
//! and after it a transient region that the entry points overlay. Host memory and disk space for offloaded values are
//! reserved in the same way. The peak is computed from the buffer table, not estimated.

use crate::cost::Cost;
use crate::graph::{Entry, Lap, LeafKind, Phase, Space, ValueId, ValueRole};
use crate::op::Op;
use crate::shape::{Dim, Extent, Type};
use std::ops::Range;

pub use crate::shape::{ALIGNMENT, align_up};
pub use crate::target::{DeviceKind, Precision};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

impl BufferId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The rows of the budget table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    BaseWeights,
    Adapters,
    Gradients,
    Optimizer,
    Activations,
    Workspace,
}

impl Category {
    pub const ALL: [Category; 6] = [
        Category::BaseWeights,
        Category::Adapters,
        Category::Gradients,
        Category::Optimizer,
        Category::Activations,
        Category::Workspace,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Category::BaseWeights => "base_weights",
            Category::Adapters => "adapters",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Activations => "activations",
            Category::Workspace => "workspace",
        }
    }

    pub fn of_leaf(kind: LeafKind) -> Category {
        match kind {
            LeafKind::Weight => Category::BaseWeights,
            LeafKind::Adapter | LeafKind::Derived => Category::Adapters,
            LeafKind::Gradient | LeafKind::Partial(_) => Category::Gradients,
            LeafKind::Moment => Category::Optimizer,
            LeafKind::Input | LeafKind::State => Category::Workspace,
            LeafKind::Cache | LeafKind::Carried(_) => Category::Activations,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    Persistent,
    Transient,
}

/// When a buffer is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lifetime {
    Run,
    /// From the beginning of step `first` to the end of step `last` of one entry point.
    Steps {
        entry: Entry,
        first: usize,
        last: usize,
    },
}

impl Lifetime {
    pub fn region(self) -> Region {
        match self {
            Lifetime::Run => Region::Persistent,
            Lifetime::Steps { .. } => Region::Transient,
        }
    }

    pub fn covers(self, entry: Entry, step: usize) -> bool {
        match self {
            Lifetime::Run => true,
            Lifetime::Steps { entry: own, first, last } => own == entry && (first..=last).contains(&step),
        }
    }

    /// Whether the two lifetimes overlap.
    pub fn meets(self, other: Lifetime) -> bool {
        match (self, other) {
            (Lifetime::Run, _) | (_, Lifetime::Run) => true,
            (
                Lifetime::Steps { entry: a, first: a_first, last: a_last },
                Lifetime::Steps { entry: b, first: b_first, last: b_last },
            ) => a == b && a_first <= b_last && b_first <= a_last,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    pub space: Space,
    /// From the start of the space's reservation.
    pub offset: usize,
    pub bytes: usize,
    pub category: Category,
    pub lifetime: Lifetime,
}

impl Buffer {
    pub fn end(&self) -> usize {
        self.offset + self.bytes
    }

    /// Whether all ranks of a machine hold the same bytes here for the whole run: a frozen weight in pinned memory.
    pub fn is_shareable(&self) -> bool {
        self.space == Space::Host && self.lifetime == Lifetime::Run && self.category == Category::BaseWeights
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct PlannedValue {
    pub name: String,
    pub ty: Type,
    pub role: ValueRole,
    /// `None` for a value that no step of the plan touches.
    pub buffer: Option<BufferId>,
    /// Offset in the buffer.
    pub first_byte: usize,
    /// Row stride in elements, if it is larger than a row.
    pub stride: Option<usize>,
}

impl PlannedValue {
    /// Bytes from the start of the buffer to the end of the last row. Includes the spare columns of a temporary, because a
    /// step may write them.
    pub fn end_byte(&self, extent: &Extent) -> usize {
        let dense = self.role.stored_bytes(&self.ty, extent);
        let (rows, columns) = self.ty.shape.at(extent);
        let spread = match (self.stride, self.ty.storage.plain()) {
            (Some(stride), Some(dtype)) => {
                let gaps = if self.role == ValueRole::Temp { rows } else { rows.saturating_sub(1) };
                gaps * (stride - columns) * dtype.bytes()
            }
            _ => 0,
        };
        self.first_byte + dense + spread
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub op: Op,
    pub inputs: Vec<ValueId>,
    pub outputs: Vec<ValueId>,
    pub updates: Vec<ValueId>,
    pub workspace: Option<BufferId>,
    /// Earlier steps of the entry point whose transfers must be complete before this step begins.
    pub awaits: Vec<usize>,
    pub phase: Phase,
    pub layer: Option<usize>,
    /// Work of the step for a typical micro-batch of the planned size.
    pub cost: Cost,
}

/// For each transfer, the first computation that waits for it, directly or through another transfer that has waited for it;
/// `steps.len()` if there is none. From that step on the transfer is complete for every step. Before it, the transfer is
/// complete only for the transfers that have waited for it.
pub fn ends_of_transfers<'a>(steps: impl Iterator<Item = (&'a Op, &'a [usize])>) -> Vec<usize> {
    let steps: Vec<(&Op, &[usize])> = steps.collect();
    let mut ends = vec![steps.len(); steps.len()];
    for (index, (_, awaits)) in steps.iter().enumerate().filter(|(_, (op, _))| !op.is_transfer()) {
        let mut complete = awaits.to_vec();
        while let Some(transfer) = complete.pop() {
            if ends[transfer] > index {
                ends[transfer] = index;
                complete.extend(steps[transfer].1);
            }
        }
    }
    ends
}

#[derive(Clone, Debug, PartialEq)]
pub struct EntryPlan {
    pub entry: Entry,
    pub steps: Vec<Step>,
    /// The laps of `micro_step` in breadth-first order; otherwise empty.
    pub laps: Vec<Lap>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub title: String,
    pub extent: Extent,
    pub device: DeviceKind,
    pub precision: Precision,
    /// The largest sizes of a run of `decode`, if the plan has one.
    pub decode_extent: Option<Extent>,
    /// Threads for which workspaces are sized.
    pub threads: usize,
    /// Blocks of the audio encoder. In [`Step::layer`] they come before the layers of the decoder.
    pub encoder_layers: usize,
    pub persistent_bytes: usize,
    pub transient_bytes: usize,
    /// Whether this is the plan of one of several ranks.
    pub has_ranks: bool,
    /// Host memory for offloaded values.
    pub host: SpaceSize,
    /// Disk space for offloaded values.
    pub disk: SpaceSize,
    pub values: Vec<PlannedValue>,
    pub buffers: Vec<Buffer>,
    pub entries: Vec<EntryPlan>,
}

/// The reservation in one memory space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceSize {
    pub persistent_bytes: usize,
    pub transient_bytes: usize,
    /// Bytes at the start of the persistent ones that all ranks of a machine share: frozen weights in pinned memory.
    pub shared_bytes: usize,
}

/// Shared bytes are a multiple of this, and so of the page size of any machine.
pub const SHARED_ALIGNMENT: usize = 64 << 10;

impl SpaceSize {
    pub fn bytes(&self) -> usize {
        self.persistent_bytes + self.transient_bytes
    }

    /// Bytes that this many ranks of a machine reserve together.
    pub fn of_machine(&self, ranks: usize) -> usize {
        self.shared_bytes + ranks * (self.bytes() - self.shared_bytes)
    }
}

/// The step with the most bytes in use.
#[derive(Clone, Debug, PartialEq)]
pub struct Peak {
    pub entry: Entry,
    pub step: usize,
    /// Bytes in use in the transient region, each buffer at its aligned size.
    pub transient_live_bytes: usize,
    /// Bytes in use by category; workspace includes alignment and unused space, so that the sum is the whole reservation.
    pub rows: Vec<(Category, usize)>,
    /// Largest values in use, largest first.
    pub largest: Vec<(String, usize)>,
}

impl Plan {
    pub fn reserved_bytes(&self) -> usize {
        self.persistent_bytes + self.transient_bytes
    }

    pub fn size(&self, space: Space) -> SpaceSize {
        let Plan { persistent_bytes, transient_bytes, .. } = *self;
        match space {
            Space::Device => SpaceSize { persistent_bytes, transient_bytes, shared_bytes: 0 },
            Space::Host => self.host,
            Space::Disk => self.disk,
        }
    }

    /// The largest run of an entry point.
    pub fn extent_of(&self, entry: Entry) -> Extent {
        match (entry, self.decode_extent) {
            (Entry::Decode, Some(extent)) => extent,
            _ => self.extent,
        }
    }

    /// The extent that sizes the buffers of a lifetime: that of its entry point, or the largest of all entry points.
    pub fn extent_of_lifetime(&self, lifetime: Lifetime) -> Extent {
        match lifetime {
            Lifetime::Run => self.decode_extent.map_or(self.extent, |decode| self.extent.union(&decode)),
            Lifetime::Steps { entry, .. } => self.extent_of(entry),
        }
    }

    pub fn value(&self, id: ValueId) -> &PlannedValue {
        &self.values[id.index()]
    }

    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.index()]
    }

    pub fn entry(&self, entry: Entry) -> &EntryPlan {
        self.entries.iter().find(|plan| plan.entry == entry).expect("every entry point is planned")
    }

    /// The buffer of a value, and the bytes of it that the value occupies; the whole buffer if its rows are not contiguous.
    pub fn bytes_of(&self, id: ValueId) -> Option<(BufferId, Range<usize>)> {
        let value = self.value(id);
        let buffer = value.buffer?;
        let bytes = match (&value.role, value.ty.shape.0.first()) {
            (ValueRole::Slice(slice), Some(Dim::Const(rows)))
                if value.stride.is_none() && value.ty.storage.has_contiguous_rows() =>
            {
                let (_, columns) = value.ty.shape.at(&self.extent);
                let first = value.first_byte + value.ty.storage.bytes(slice.first_row, columns);
                first..first + value.ty.storage.bytes(*rows, columns)
            }
            _ => 0..usize::MAX,
        };
        Some((buffer, bytes))
    }

    /// Whether a step moves data between memory spaces or ranks. Copies of carried values may stay on the device.
    pub fn uses_a_link(&self, step: &Step) -> bool {
        let mut operands = step.inputs.iter().chain(&step.outputs).chain(&step.updates);
        let is_offloaded = |id: &ValueId| {
            self.value(*id).buffer.is_some_and(|buffer| self.buffer(buffer).space != Space::Device)
        };
        let is_copy = step.op.is_copy() && operands.any(is_offloaded);
        is_copy || step.op.is_collective()
    }

    /// Leaves in order, with their ids.
    pub fn leaves(&self, kind: LeafKind) -> impl Iterator<Item = (ValueId, &PlannedValue)> {
        self.values.iter().enumerate().filter_map(move |(i, value)| match &value.role {
            ValueRole::Leaf(leaf) if leaf.kind == kind => Some((ValueId(i as u32), value)),
            _ => None,
        })
    }

    pub fn leaf_named(&self, name: &str) -> Option<ValueId> {
        let found = self
            .values
            .iter()
            .position(|value| value.name == name && matches!(value.role, ValueRole::Leaf(_)));
        found.map(|i| ValueId(i as u32))
    }

    /// Transient bytes in use on the device at each step of an entry point.
    pub fn live_bytes(&self, entry: Entry) -> Vec<usize> {
        let steps = self.entry(entry).steps.len();
        let mut change = vec![0isize; steps + 1];
        for buffer in &self.buffers {
            if let Lifetime::Steps { entry: own, first, last } = buffer.lifetime
                && own == entry
                && buffer.space == Space::Device
            {
                let bytes = align_up(buffer.bytes) as isize;
                change[first] += bytes;
                change[last + 1] -= bytes;
            }
        }
        let mut live = 0isize;
        change[..steps]
            .iter()
            .map(|delta| {
                live += delta;
                live as usize
            })
            .collect()
    }

    pub fn peak(&self) -> Peak {
        let (entry, step, transient_live_bytes) = self
            .entries
            .iter()
            .flat_map(|plan| {
                self.live_bytes(plan.entry)
                    .into_iter()
                    .enumerate()
                    .map(|(step, live)| (plan.entry, step, live))
            })
            .fold((Entry::MicroStep, 0, 0), |best, next| if next.2 > best.2 { next } else { best });
        let mut sums = [0usize; Category::ALL.len()];
        let on_device = self.buffers.iter().filter(|buffer| buffer.space == Space::Device);
        for buffer in on_device.filter(|buffer| buffer.lifetime.covers(entry, step)) {
            sums[buffer.category as usize] += buffer.bytes;
        }
        let joined = self.joined_bytes();
        sums[Category::BaseWeights as usize] -= joined;
        sums[Category::Adapters as usize] += joined;
        let used: usize = sums.iter().sum();
        sums[Category::Workspace as usize] += self.reserved_bytes() - used;
        let rows = Category::ALL.into_iter().map(|category| (category, sums[category as usize])).collect();
        Peak { entry, step, transient_live_bytes, rows, largest: self.largest_at(entry, step) }
    }

    /// Bytes on the device that hold an adapter's matrices inside the buffer of a weight.
    fn joined_bytes(&self) -> usize {
        let weights = self.leaves(LeafKind::Weight).filter(|(_, value)| value.stride.is_some());
        let joined = weights.filter_map(|(_, value)| {
            let buffer = self.buffer(value.buffer?);
            let own = value.ty.bytes(&self.extent);
            (buffer.space == Space::Device).then(|| buffer.bytes.saturating_sub(own))
        });
        joined.sum()
    }

    fn largest_at(&self, entry: Entry, step: usize) -> Vec<(String, usize)> {
        let mut seen = vec![false; self.buffers.len()];
        let mut weights = 0;
        let mut largest: Vec<(String, usize)> = Vec::new();
        for value in &self.values {
            let Some(id) = value.buffer else { continue };
            let buffer = self.buffer(id);
            let is_in_use = buffer.space == Space::Device && buffer.lifetime.covers(entry, step);
            if !is_in_use || std::mem::replace(&mut seen[id.index()], true) {
                continue;
            }
            match buffer.category {
                Category::BaseWeights => weights += buffer.bytes,
                _ => largest.push((value.name.clone(), buffer.bytes)),
            }
        }
        if let Some(id) = self.entry(entry).steps.get(step).and_then(|step| step.workspace) {
            largest.push((format!("workspace of {}", self.place(entry, step)), self.buffer(id).bytes));
        }
        largest.push(("base weights".into(), weights.saturating_sub(self.joined_bytes())));
        largest.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        largest.truncate(5);
        largest
    }

    /// Where in the model a step is, in words: `backward of layers.27 attention_grad`.
    pub fn place(&self, entry: Entry, step: usize) -> String {
        let Some(step) = self.entry(entry).steps.get(step) else { return entry.to_string() };
        let phase = match step.phase {
            Phase::Forward => "forward",
            Phase::Recompute => "recompute",
            Phase::Backward => "backward",
            Phase::Update => "update",
        };
        match step.layer {
            Some(block) if block < self.encoder_layers => {
                format!("{phase} of encoder.{block}, {}", step.op.name())
            }
            Some(layer) => format!("{phase} of layers.{}, {}", layer - self.encoder_layers, step.op.name()),
            None => format!("{phase}, {}", step.op.name()),
        }
    }

    /// Bytes in use on the device at the peak.
    pub fn peak_live_bytes(&self) -> usize {
        let live = self.entries.iter().flat_map(|plan| self.live_bytes(plan.entry));
        self.persistent_bytes + live.max().unwrap_or(0)
    }

    /// Largest number of bytes in use ÷ reserved bytes, in the transient region.
    pub fn utilization(&self) -> f64 {
        if self.transient_bytes == 0 {
            return 1.0;
        }
        self.peak().transient_live_bytes as f64 / self.transient_bytes as f64
    }
}
