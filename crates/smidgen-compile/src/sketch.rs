//! A sketch predicts in microseconds what any point needs at one size of micro-batch, from a few schedules.
//!
//! All layers have the same shape, so a few numbers describe a layer for each way to treat it: activations kept or
//! recomputed, on the device or offloaded. The numbers come from schedules that treat all layers alike, at the largest size
//! and at small ones; sizes in between are interpolated. A mixture is predicted layer by layer: bytes are added up, and
//! transfers overlap with computation, one at a time in each direction. Sketches only rank points; decisions are made by
//! schedules.

use crate::attempt::Attempt;
use crate::choices::{Freedom, Offload, Point, USUAL_WINDOW};
use crate::schedule::Schedule;
use smidgen_ir::{Choice, Entry, Op, Phase, Plan, Space};

/// Ways to treat a layer: bit 0 is set if it is recomputed, bit 1 if its activations are offloaded.
const KINDS: usize = 4;
const RECOMPUTED: usize = 1;
const OFFLOADED: usize = 2;

/// Time and bytes of one layer that is treated in one way. All numbers are linear in the tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Layer {
    forward_s: f64,
    backward_s: f64,
    /// Bytes that stay on the device from forward to backward.
    kept_bytes: f64,
    /// Peak of the forward pass, above what earlier layers keep.
    forward_bytes: f64,
    /// Peak of the backward pass, above what earlier layers keep.
    backward_bytes: f64,
    /// Peak outside the layers, above what all layers keep.
    head_bytes: f64,
    /// Offloaded bytes.
    stowed_bytes: f64,
}

/// Numbers that depend on the size of the micro-batch.
#[derive(Clone, Copy, Debug, Default)]
struct Sized {
    kinds: [Layer; KINDS],
    /// Seconds outside the layers.
    head_s: f64,
    /// Seconds that a head in pieces adds.
    split_s: f64,
    /// Bytes that the loss needs more with the largest chunk than with the smallest.
    chunk_bytes: f64,
    /// Seconds that the loss takes longer with the smallest chunk than with the largest.
    chunk_s: f64,
    /// Peak of the entry points other than `micro_step`.
    other_bytes: f64,
    /// Bytes of that peak that the smallest chunk would save.
    other_chunk_bytes: f64,
}

/// Numbers that are the same at every size.
#[derive(Clone, Copy, Debug, Default)]
struct Fixed {
    /// On the device from the first step to the last.
    bytes: f64,
    /// Outside the arena, if nothing is offloaded and if something is.
    context_bytes: [f64; 2],
    /// Bytes freed by offloading the weights of one layer.
    layer_bytes: f64,
    /// Bytes freed by offloading the embedding alone.
    embedding_bytes: f64,
    /// Bytes freed by offloading embedding and head.
    tables_bytes: f64,
    /// Bytes freed by offloading optimizer state.
    moment_bytes: f64,
    update_s: f64,
    /// Seconds of the update if optimizer state is offloaded.
    streamed_update_s: f64,
    head_bytes: f64,
}

/// The sketches of all sizes of a question.
pub struct Sketches {
    fixed: Fixed,
    /// By tokens, ascending.
    sized: Vec<(f64, Sized)>,
}

/// The sketch of one size.
pub struct Sketch<'a> {
    attempt: &'a Attempt<'a>,
    fixed: Fixed,
    sized: Sized,
}

/// A point with its predicted peak and time.
#[derive(Clone, Copy, Debug)]
pub struct Predicted {
    pub point: Point,
    pub bytes: f64,
    pub ms: f64,
}

impl Sketches {
    /// Schedules the points that the sketches are made from; `None` if pins treat layers differently.
    pub fn of(attempts: &[Attempt]) -> Option<Sketches> {
        let (largest, smallest) = (attempts.first()?, attempts.last()?);
        if !smallest.freedom.can_be_sketched() {
            return None;
        }
        let mut measured = vec![smallest, largest];
        // Micro-batches of a few samples are likely, and not everything is linear from there to the whole batch.
        measured.extend((attempts.len() > 3).then(|| &attempts[attempts.len() - 3]));
        measured.sort_by_key(|attempt| attempt.request.extent.tokens);
        measured.dedup_by_key(|attempt| attempt.request.extent.tokens);
        let sized = |attempt: &Attempt| (attempt.request.extent.tokens as f64, measure_sized(attempt));
        let sized = measured.into_iter().map(sized).collect();
        Some(Sketches { fixed: measure_fixed(smallest), sized })
    }

    pub fn at<'a>(&self, attempt: &'a Attempt<'a>) -> Sketch<'a> {
        let tokens = attempt.request.extent.tokens as f64;
        let upper = self.sized.iter().position(|(own, _)| *own >= tokens).unwrap_or(self.sized.len() - 1);
        let ((fewest, below), (most, above)) = (self.sized[upper.saturating_sub(1)], self.sized[upper]);
        let share = if most > fewest { (tokens - fewest) / (most - fewest) } else { 1.0 };
        Sketch { attempt, fixed: self.fixed, sized: below.towards(above, share) }
    }
}

impl Sized {
    /// Linear interpolation: `share` 0 is `self`, 1 is `other`.
    fn towards(self, other: Sized, share: f64) -> Sized {
        let line = |of: fn(&Sized) -> f64| of(&self) + (of(&other) - of(&self)) * share;
        Sized {
            kinds: std::array::from_fn(|kind| self.kinds[kind].towards(other.kinds[kind], share)),
            head_s: line(|sized| sized.head_s),
            split_s: line(|sized| sized.split_s),
            chunk_bytes: line(|sized| sized.chunk_bytes),
            chunk_s: line(|sized| sized.chunk_s),
            other_bytes: line(|sized| sized.other_bytes),
            other_chunk_bytes: line(|sized| sized.other_chunk_bytes),
        }
    }
}

impl Layer {
    fn towards(self, other: Layer, share: f64) -> Layer {
        let line = |of: fn(&Layer) -> f64| of(&self) + (of(&other) - of(&self)) * share;
        Layer {
            forward_s: line(|layer| layer.forward_s),
            backward_s: line(|layer| layer.backward_s),
            kept_bytes: line(|layer| layer.kept_bytes),
            forward_bytes: line(|layer| layer.forward_bytes),
            backward_bytes: line(|layer| layer.backward_bytes),
            head_bytes: line(|layer| layer.head_bytes),
            stowed_bytes: line(|layer| layer.stowed_bytes),
        }
    }
}

fn measure_fixed(attempt: &Attempt) -> Fixed {
    let start = attempt.freedom.start();
    let profile = attempt.question.profile;
    // Persistent bytes, seconds of the update, and bytes outside the arena.
    let measure = |point: &Point| {
        let schedule = attempt.scheduled(&attempt.freedom.policy(point));
        let update_s = profile.entry_seconds(&schedule.plan, Entry::Update);
        let bytes = schedule.persistent_bytes() as f64;
        (bytes, update_s, attempt.question.context.bytes_for(&schedule.plan) as f64)
    };
    let (bytes, update_s, context_bytes) = measure(&start);
    let layers = attempt.freedom.layers;
    let freed = |point: Point| bytes - measure(&point).0;
    let (streamed, _, offloading_bytes) = measure(&Point { weights: layers, ..start });
    let (moments, streamed_update_s, _) = measure(&Point { optimizer_state: true, ..start });
    let (embedding_bytes, tables_bytes) =
        (freed(Point { embedding: true, ..start }), freed(Point { tables: true, ..start }));
    Fixed {
        bytes,
        context_bytes: [context_bytes, offloading_bytes],
        layer_bytes: (bytes - streamed) / layers as f64,
        embedding_bytes,
        tables_bytes,
        moment_bytes: bytes - moments,
        update_s,
        streamed_update_s,
        head_bytes: attempt.freedom.head_bytes as f64,
    }
}

fn measure_sized(attempt: &Attempt) -> Sized {
    let freedom = &attempt.freedom;
    let start = freedom.start();
    let schedule = |point: Point| attempt.scheduled(&freedom.policy(&point));
    let usual = schedule(start);
    let mut sized = Sized::default();
    sized.kinds[0] = measure_layer(attempt, &usual);
    for (kind, layer) in sized.kinds.iter_mut().enumerate().skip(1) {
        let recomputed = if kind & RECOMPUTED > 0 { freedom.layers } else { 0 };
        let activations = if kind & OFFLOADED > 0 { Offload::All } else { Offload::None };
        *layer = measure_layer(attempt, &schedule(Point { recomputed, activations, ..start }));
    }
    let chunks = freedom.chunks();
    let smallest = schedule(Point { loss_chunk: chunks[chunks.len() - 1], ..start });
    sized.head_s = head_seconds(attempt, &usual.plan);
    if freedom.pinned(Point { tables: true, split_head: true, ..start }).split_head {
        let split = schedule(Point { tables: true, split_head: true, ..start });
        sized.split_s = head_seconds(attempt, &split.plan) - sized.head_s;
    }
    sized.chunk_s = head_seconds(attempt, &smallest.plan) - sized.head_s;
    sized.chunk_bytes = sized.kinds[0].head_bytes - measure_layer(attempt, &smallest).head_bytes;
    let other_bytes = |plan: &Plan| {
        let others = plan.entries.iter().filter(|entry| entry.entry != Entry::MicroStep);
        others.flat_map(|entry| plan.live_bytes(entry.entry)).max().unwrap_or(0) as f64
    };
    sized.other_bytes = other_bytes(&usual.plan);
    sized.other_chunk_bytes = sized.other_bytes - other_bytes(&smallest.plan);
    sized
}

fn head_seconds(attempt: &Attempt, plan: &Plan) -> f64 {
    let steps = plan.entry(Entry::MicroStep).steps.iter();
    let outside = steps.filter(|step| step.layer.is_none() && !step.op.is_transfer());
    outside.map(|step| attempt.question.profile.seconds(&step.op, step.cost)).sum()
}

/// The average layer of a schedule that treats all layers alike.
fn measure_layer(attempt: &Attempt, schedule: &Schedule) -> Layer {
    let (plan, layers) = (&schedule.plan, attempt.freedom.layers);
    let steps = &plan.entry(Entry::MicroStep).steps;
    let live = plan.live_bytes(Entry::MicroStep);
    let mut sum = Layer::default();
    // Bytes in use at the end of each layer's forward pass, and the peaks of its forward and backward pass.
    let mut ends = vec![0.0; layers];
    let mut peaks = vec![[0.0f64; 2]; layers];
    let mut head_peak = 0.0f64;
    for (step, live) in steps.iter().zip(live) {
        let live = live as f64;
        let is_backward = step.phase != Phase::Forward;
        if step.op == Op::Stow {
            sum.stowed_bytes += step.cost.bytes;
        }
        let seconds = match step.op.is_transfer() {
            true => 0.0,
            false => attempt.question.profile.seconds(&step.op, step.cost),
        };
        let Some(layer) = step.layer else {
            head_peak = head_peak.max(live);
            continue;
        };
        let peak = &mut peaks[layer][usize::from(is_backward)];
        *peak = peak.max(live);
        match is_backward {
            true => sum.backward_s += seconds,
            false => {
                sum.forward_s += seconds;
                ends[layer] = live;
            }
        }
    }
    // Only the middle layers count: near the ends fewer transfers are in progress, or those of the backward pass start.
    let (first, last) = (layers / 4, (3 * layers / 4).min(layers - 1));
    let kept_bytes = match last > first {
        true => ((ends[last] - ends[first]) / (last - first) as f64).max(0.0),
        false => ends[layers - 1] / layers as f64,
    };
    let above = |half: usize| {
        let peaks = peaks.iter().enumerate().map(|(layer, peaks)| peaks[half] - kept_bytes * layer as f64);
        peaks.fold(0.0, f64::max)
    };
    let count = layers as f64;
    Layer {
        forward_s: sum.forward_s / count,
        backward_s: sum.backward_s / count,
        kept_bytes,
        forward_bytes: above(0),
        backward_bytes: above(1),
        head_bytes: head_peak - kept_bytes * count,
        stowed_bytes: sum.stowed_bytes / count,
    }
}

impl Sketch<'_> {
    /// How each layer is treated.
    fn kinds(&self, point: &Point) -> Vec<usize> {
        let layers = self.attempt.freedom.layers;
        let kind = |layer: usize| {
            let is_recomputed = layer < point.recomputed;
            let is_offloaded = match point.activations {
                Offload::None => false,
                Offload::OfRecomputed => is_recomputed,
                Offload::All => true,
                Offload::Some(count) => is_spread(layer, count, layers),
            };
            usize::from(is_recomputed) * RECOMPUTED + usize::from(is_offloaded) * OFFLOADED
        };
        (0..layers).map(kind).collect()
    }

    /// Peak of the transient region, without a window.
    fn transient_bytes(&self, kinds: &[usize], chunk_share: f64) -> f64 {
        let mut kept = 0.0f64;
        let smaller = 1.0 - chunk_share;
        let (mut peak, mut head) = (self.sized.other_bytes - smaller * self.sized.other_chunk_bytes, 0.0f64);
        for kind in kinds {
            let layer = &self.sized.kinds[*kind];
            peak = peak.max(kept + layer.forward_bytes).max(kept + layer.backward_bytes);
            kept += layer.kept_bytes;
            head = layer.head_bytes;
        }
        peak.max(kept + head - smaller * self.sized.chunk_bytes)
    }

    /// The fastest point with these offloaded activations that is predicted to fit `budget_bytes`; `None` if no point is
    /// predicted to be faster than `below_ms`.
    pub fn fastest(&self, activations: Offload, budget_bytes: f64, below_ms: f64) -> Option<Predicted> {
        let freedom = &self.attempt.freedom;
        let mut best: Option<Predicted> = None;
        for recomputed in 0..=freedom.layers {
            for &loss_chunk in freedom.chunks() {
                let first = Point { recomputed, activations, loss_chunk, ..freedom.start() };
                let point = freedom.pinned(first);
                if point.activations != activations {
                    return None;
                }
                let kinds = self.kinds(&first);
                let transient_bytes = self.transient_bytes(&kinds, self.chunk_share(loss_chunk));
                let chunk_s = self.chunk_seconds(loss_chunk);
                let least_ms = self.step_ms(self.compute_seconds(&kinds) + chunk_s, false);
                for other in freedom.with_tables_and_moments(first) {
                    let best_ms = best.map_or(below_ms, |best| best.ms);
                    if least_ms >= best_ms {
                        continue;
                    }
                    // A small window is slower but needs less, so it is tried second.
                    let windows = [other.window_layers, other.window_layers.min(1)];
                    let fitted = windows.into_iter().find_map(|window_layers| {
                        self.fitted(other.with_window(window_layers), transient_bytes, budget_bytes)
                    });
                    let Some((point, bytes)) = fitted else { continue };
                    if self.offloaded_bytes(&point, &kinds)
                        > self.attempt.question.budget.offload_bytes as f64
                    {
                        continue;
                    }
                    let seconds = self.micro_seconds(&point, &kinds) + chunk_s;
                    let ms = self.step_ms(seconds, point.optimizer_state);
                    if ms < best_ms {
                        best = Some(Predicted { point, bytes, ms });
                    }
                }
            }
        }
        best
    }

    /// The point with the fewest layers of offloaded weights that fits, and the bytes that it needs.
    fn fitted(&self, point: Point, transient_bytes: f64, budget_bytes: f64) -> Option<(Point, f64)> {
        let (fixed, freedom) = (&self.fixed, &self.attempt.freedom);
        let freed = self.tables_and_moments_bytes(&point);
        let head_bytes = if point.tables && !point.split_head { fixed.head_bytes } else { 0.0 };
        let [resident, offloading] =
            fixed.context_bytes.map(|context| fixed.bytes + context - freed + transient_bytes);
        let is_offloading = point.streams() || point.activations != Offload::None;
        let bytes = if is_offloading { offloading } else { resident };
        let window_bytes = (point.window_layers as f64 * fixed.layer_bytes).max(head_bytes);
        let needed_bytes = bytes + if point.streams() { window_bytes } else { 0.0 };
        if needed_bytes <= budget_bytes {
            return Some((point, needed_bytes));
        }
        let excess = offloading + window_bytes - budget_bytes;
        let weights = (excess / fixed.layer_bytes).ceil();
        let is_open = matches!(freedom.pinned(Point { weights: 1, ..point }), Point { weights: 1, .. });
        if !is_open || fixed.layer_bytes <= 0.0 || weights > freedom.layers as f64 {
            return None;
        }
        let fitted = Point { weights: weights as usize, ..point };
        Some((fitted, offloading + window_bytes - weights * fixed.layer_bytes))
    }

    fn offloaded_bytes(&self, point: &Point, kinds: &[usize]) -> f64 {
        let stowed: f64 = kinds.iter().map(|kind| self.sized.kinds[*kind].stowed_bytes).sum();
        let ranks = self.attempt.question.budget.local_ranks as f64;
        if self.attempt.freedom.gathers_weights() {
            return ranks * stowed;
        }
        let moments = if point.optimizer_state { self.fixed.moment_bytes } else { 0.0 };
        let tables = self.tables_and_moments_bytes(point) - moments;
        let weights = point.weights as f64 * self.fixed.layer_bytes + tables;
        // Frozen weights exist once per machine.
        let copies = if self.attempt.freedom.trains_base { ranks } else { 1.0 };
        copies * weights + ranks * (moments + stowed)
    }

    /// Bytes of embedding, head and optimizer state that a point offloads.
    fn tables_and_moments_bytes(&self, point: &Point) -> f64 {
        let fixed = &self.fixed;
        let tables = match (point.tables, point.embedding) {
            (true, _) => fixed.tables_bytes,
            (false, true) => fixed.embedding_bytes,
            (false, false) => 0.0,
        };
        tables + if point.optimizer_state { fixed.moment_bytes } else { 0.0 }
    }

    /// The position of a chunk between the smallest, 0, and the largest, 1.
    fn chunk_share(&self, loss_chunk: usize) -> f64 {
        let chunks = self.attempt.freedom.chunks();
        let (most, fewest) = (chunks[0] as f64, chunks[chunks.len() - 1] as f64);
        if most > fewest { (loss_chunk as f64 - fewest) / (most - fewest) } else { 1.0 }
    }

    fn chunk_seconds(&self, loss_chunk: usize) -> f64 {
        let chunks = self.attempt.freedom.chunks();
        let (most, fewest) = (chunks[0] as f64, chunks[chunks.len() - 1] as f64);
        // The head is read once for each chunk.
        let reads = |rows: f64| 1.0 / rows - 1.0 / most;
        if most > fewest { self.sized.chunk_s * reads(loss_chunk as f64) / reads(fewest) } else { 0.0 }
    }

    fn step_ms(&self, micro_seconds: f64, is_update_streamed: bool) -> f64 {
        let update_s = if is_update_streamed { self.fixed.streamed_update_s } else { self.fixed.update_s };
        1e3 * (micro_seconds * self.attempt.demand.micro_steps + update_s)
    }

    fn compute_seconds(&self, kinds: &[usize]) -> f64 {
        let layers = kinds.iter().map(|kind| &self.sized.kinds[*kind]);
        self.sized.head_s + layers.map(|layer| layer.forward_s + layer.backward_s).sum::<f64>()
    }

    /// Seconds of one micro-step. Transfers in each direction run one after the other and overlap with computation.
    fn micro_seconds(&self, point: &Point, kinds: &[usize]) -> f64 {
        let (fixed, profile) = (&self.fixed, self.attempt.question.profile);
        let layers = kinds.len();
        let weights_per_s = match self.attempt.freedom.pins.space_of(Choice::Weights) {
            // Divided weights are gathered from the other ranks.
            _ if self.attempt.freedom.gathers_weights() => profile.link.bytes_per_s,
            Some(Space::Disk) => profile.disk_bytes_per_s,
            _ => profile.fetch_bytes_per_s,
        };
        let mut lanes = Lanes { window: point.window_layers, ..Lanes::default() };
        let is_streamed = |layer: usize| is_spread(layer, point.weights, layers);
        let mut stow_ends = vec![0.0f64; layers];
        for (layer, kind) in kinds.iter().enumerate() {
            let figures = &self.sized.kinds[*kind];
            if is_streamed(layer) {
                lanes.fetch_weights(fixed.layer_bytes / weights_per_s);
            }
            // The activations of two layers before must have been offloaded by now.
            if layer >= 2 {
                lanes.now = lanes.now.max(stow_ends[layer - 2]);
            }
            lanes.compute(figures.forward_s, is_streamed(layer));
            lanes.outward = lanes.outward.max(lanes.now) + figures.stowed_bytes / profile.stow_bytes_per_s;
            stow_ends[layer] = lanes.outward;
        }
        lanes.now = stow_ends.iter().copied().fold(lanes.now, f64::max);
        if point.tables {
            let (passes, pieces) =
                if point.split_head { (2.0, self.attempt.freedom.head_pieces) } else { (1.0, 1) };
            // A piece that exceeds the window is not prefetched.
            if fixed.head_bytes / pieces as f64 > point.window_layers as f64 * fixed.layer_bytes {
                lanes.inward = lanes.inward.max(lanes.now);
            }
            lanes.fetch_weights(passes * fixed.head_bytes / weights_per_s);
        }
        let split_s = if point.split_head { self.sized.split_s } else { 0.0 };
        lanes.compute(self.sized.head_s + split_s, point.tables);
        let mut backward_ends = vec![lanes.now; layers + 2];
        for (layer, kind) in kinds.iter().enumerate().rev() {
            let figures = &self.sized.kinds[*kind];
            if figures.stowed_bytes > 0.0 {
                let start = lanes.inward.max(backward_ends[layer + 2]);
                lanes.inward = start + figures.stowed_bytes / profile.fetch_bytes_per_s;
                lanes.now = lanes.now.max(lanes.inward);
            }
            if is_streamed(layer) {
                lanes.fetch_weights(fixed.layer_bytes / weights_per_s);
            }
            lanes.compute(figures.backward_s, is_streamed(layer));
            backward_ends[layer] = lanes.now;
        }
        let stowed: f64 = kinds.iter().map(|kind| self.sized.kinds[*kind].stowed_bytes).sum();
        let head_bytes = if point.tables { fixed.head_bytes } else { 0.0 };
        let moved = 2.0 * (stowed + point.weights as f64 * fixed.layer_bytes) + head_bytes;
        lanes.now + moved * profile.transfer_s_per_byte
    }
}

/// How a sketch varies points.
impl Freedom<'_> {
    /// `point` with every allowed combination of offloaded optimizer state, embedding and head, and of windows.
    pub fn with_tables_and_moments(&self, point: Point) -> Vec<Point> {
        let mut all = Vec::new();
        for optimizer_state in [false, true] {
            let point = Point { optimizer_state, ..point };
            let tables = Point { tables: true, ..point };
            let embedding = Point { embedding: self.has_own_embedding, ..point };
            for point in [point, embedding, tables, Point { split_head: true, ..tables }] {
                all.extend([USUAL_WINDOW, 1].map(|window| point.with_window(window)));
            }
        }
        all.retain(|point| self.pinned(*point).with_window(point.window_layers) == *point);
        all.dedup();
        all
    }
}

/// Whether a layer is one of `count` layers that are spread evenly.
fn is_spread(layer: usize, count: usize, layers: usize) -> bool {
    (layer + 1) * count / layers > layer * count / layers
}

/// A simulation of computation with one transfer at a time in each direction, in seconds.
#[derive(Clone, Debug, Default)]
struct Lanes {
    /// When the computation so far ends.
    now: f64,
    /// When the transfers to the device so far end.
    inward: f64,
    /// When the transfers from the device so far end.
    outward: f64,
    /// Layers of weights that may be on the device at the same time.
    window: usize,
    /// Start and end of each computation with fetched weights.
    visits: Vec<(f64, f64)>,
}

impl Lanes {
    /// Fetches weights as soon as the window has room for them. The computation waits for them.
    fn fetch_weights(&mut self, seconds: f64) {
        let before = |count: usize| self.visits.len().checked_sub(count).map(|visit| self.visits[visit]);
        let room_at = match self.window {
            0 => self.now,
            // The layer before frees its matrices one after the other, on average halfway through.
            1 => before(1).map_or(0.0, |(began, ended)| began.midpoint(ended)),
            window => before(window).map_or(0.0, |(_, ended)| ended),
        };
        self.inward = self.inward.max(room_at) + seconds;
        self.now = self.now.max(self.inward);
    }

    fn compute(&mut self, seconds: f64, is_visit: bool) {
        let began = self.now;
        self.now += seconds;
        if is_visit {
            self.visits.push((began, self.now));
        }
    }
}
