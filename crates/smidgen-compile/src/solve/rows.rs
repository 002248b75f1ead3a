//! The rows of the table, read from schedules of the first layers of a model, in which all layers are treated alike.
//!
//! Layers with the same description, adapters and storages are a class. As many layers are scheduled as have every class
//! several times; what all layers need together comes from schedules of the whole model.

use super::choices::with_activations;
use super::question::Question;
use super::size::{SearchState, Size};
use crate::request::Request;
use crate::schedule::Schedule;
use smidgen_ir::policy::{LayerSet, Policy};
use smidgen_ir::{Entry, Op, Phase, Plan, Property, Route, Space, Step};
use std::collections::HashMap;

/// Ways to treat a layer: bit 0 is set if it is recomputed, bit 1 if its activations are offloaded.
const TREATMENTS: usize = 4;
const RECOMPUTED: usize = 1;
const OFFLOADED: usize = 2;

/// The first layers of a model that has this many of each class stand for all of them.
const OF_EACH_CLASS: usize = 8;

/// Time and bytes of one layer that is treated in one way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Row {
    pub forward_s: f64,
    pub backward_s: f64,
    /// Bytes that stay on the device from forward to backward.
    pub kept_bytes: f64,
    /// Peak of the forward pass, above what earlier layers keep.
    pub forward_bytes: f64,
    /// Peak of the backward pass, above what earlier layers keep.
    pub backward_bytes: f64,
    /// Offloaded activations.
    pub stowed_bytes: f64,
}

impl Row {
    fn fields(&mut self) -> [&mut f64; 6] {
        let Row { forward_s, backward_s, kept_bytes, forward_bytes, backward_bytes, stowed_bytes } = self;
        [forward_s, backward_s, kept_bytes, forward_bytes, backward_bytes, stowed_bytes]
    }
}

/// What depends on the size of the micro-batch.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    /// For each class and treatment.
    pub of_classes: Vec<[Row; TREATMENTS]>,
    /// Bytes in use before the first layer.
    pub base_bytes: f64,
    /// Peak outside the layers above what all layers keep, by the treatment of the last layer.
    pub head_bytes: [f64; TREATMENTS],
    /// Seconds outside the layers.
    pub head_s: f64,
    /// Peak of the other entry points.
    pub other_bytes: f64,
}

/// Sets of layers that are recomputed and whose activations are offloaded.
#[derive(Clone, Debug, PartialEq)]
pub struct Activations {
    pub recompute: LayerSet,
    pub offloaded: LayerSet,
    pub treatments: Vec<u8>,
}

impl Activations {
    pub fn of(recompute: LayerSet, offloaded: LayerSet, layers: usize) -> Activations {
        let treatment = |layer: usize| {
            let recomputed = if recompute.contains(layer) { RECOMPUTED } else { 0 };
            (recomputed + if offloaded.contains(layer) { OFFLOADED } else { 0 }) as u8
        };
        Activations { treatments: (0..layers).map(treatment).collect(), recompute, offloaded }
    }
}

/// What one number of rows per chunk of the loss changes, compared with the largest chunk.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chunk {
    pub rows: usize,
    pub saved_bytes: f64,
    pub saved_other_bytes: f64,
    /// Per token.
    pub added_s: f64,
}

/// What is the same at every size.
#[derive(Clone, Debug, Default)]
pub struct Fixed {
    /// On the device from the first step to the last.
    pub bytes: f64,
    /// Outside the arena, if nothing is offloaded and if something is.
    pub context_bytes: [f64; 2],
    /// Bytes of the weights of each layer, freed if they are offloaded.
    pub weights_bytes: Vec<f64>,
    pub embedding_bytes: f64,
    pub tables_bytes: f64,
    pub moment_bytes: f64,
    pub gradient_bytes: f64,
    /// What offloading gradients adds to the peak, because partial gradients meet fetched ones.
    pub gradient_peak_bytes: f64,
    pub update_s: f64,
    /// Seconds of the update if optimizer state is offloaded.
    pub streamed_update_s: f64,
    pub head_bytes: f64,
    /// Seconds per token that a head in pieces adds.
    pub split_s: f64,
    pub chunks: Vec<Chunk>,
}

/// The class of each layer. The layers of an encoder come first and are one class.
pub fn classes(request: &Request) -> Vec<usize> {
    let mut descriptions: Vec<String> = vec![String::new(); request.layers()];
    let first = request.encoder_layers();
    for (index, layer) in request.spec.layers.iter().enumerate() {
        descriptions[first + index] = format!("{layer:?}");
    }
    for tensor in request.spec.tensors() {
        let Some(layer) = tensor.layer else { continue };
        let (storage, is_trained) =
            (request.storage_of(&tensor.name), request.trained.contains(&tensor.name));
        descriptions[first + layer] += &format!("{:?} {storage:?} {is_trained};", tensor.shape);
    }
    let adapters: HashMap<&str, usize> =
        request.adapters.iter().map(|module| (module.path.as_str(), module.rank)).collect();
    for linear in request.spec.linears() {
        let Some(layer) = linear.layer else { continue };
        descriptions[first + layer] += &format!("{:?};", adapters.get(linear.path.as_str()));
    }
    let mut known: Vec<&String> = Vec::new();
    let class = |description| {
        known.iter().position(|own| *own == description).unwrap_or_else(|| {
            known.push(description);
            known.len() - 1
        })
    };
    descriptions.iter().map(class).collect()
}

/// The first layers of a model.
pub struct Short {
    layers: usize,
    /// The state of all sizes of the short model.
    state: SearchState,
}

impl Short {
    /// As few layers as have every class often enough; all of them if a pin names layers.
    pub fn of(size: &Size, classes: &[usize]) -> Short {
        let all = classes.len();
        let has_enough = |count: &usize| {
            let seen = |class: usize| classes[..*count].iter().filter(|own| **own == class).count();
            let total = |class: usize| classes.iter().filter(|own| **own == class).count();
            classes.iter().all(|class| seen(*class) >= OF_EACH_CLASS.min(total(*class)))
        };
        let first = size.request.encoder_layers() + 1;
        let layers = if size.freedom.pins_layers() { None } else { (first..all).find(has_enough) };
        Short { layers: layers.unwrap_or(all), state: SearchState::default() }
    }

    /// Calls `measure` with the short model at a size.
    pub fn at<T>(&self, size: &Size, measure: impl FnOnce(&Size) -> T) -> T {
        if self.layers == size.freedom.layers {
            return measure(size);
        }
        let mut request = size.request.clone();
        request.spec.layers.truncate(self.layers - size.request.encoder_layers());
        let linears: Vec<String> = request.spec.linears().into_iter().map(|linear| linear.path).collect();
        let tensors: Vec<String> = request.spec.tensors().into_iter().map(|tensor| tensor.name).collect();
        let before = size.request.spec.linears();
        let is_gone =
            |path: &String| before.iter().any(|linear| linear.path == *path) && !linears.contains(path);
        request.adapters.retain(|module| !is_gone(&module.path));
        let all = size.request.spec.tensors();
        let is_gone =
            |name: &String| all.iter().any(|tensor| tensor.name == *name) && !tensors.contains(name);
        request.trained.retain(|name| !is_gone(name));
        let question = Question { request: &request, ..*size.question };
        measure(&Size::new(&question, &size.demand, &self.state))
    }
}

pub fn interpolated(found: &[(f64, Rows)], tokens: f64) -> Rows {
    let upper = found.iter().position(|(own, _)| *own >= tokens).unwrap_or(found.len() - 1);
    let ((fewest, below), (most, above)) = (&found[upper.saturating_sub(1)], &found[upper]);
    let share = if most > fewest { (tokens - fewest) / (most - fewest) } else { 1.0 };
    let line = |from: f64, to: f64| from + (to - from) * share;
    let mut rows = below.clone();
    for (own, other) in rows.of_classes.iter_mut().flatten().zip(above.of_classes.iter().flatten()) {
        let mut other = *other;
        for (own, other) in own.fields().into_iter().zip(other.fields()) {
            *own = line(*own, *other);
        }
    }
    Rows {
        base_bytes: line(below.base_bytes, above.base_bytes),
        head_bytes: std::array::from_fn(|kind| line(below.head_bytes[kind], above.head_bytes[kind])),
        head_s: line(below.head_s, above.head_s),
        other_bytes: line(below.other_bytes, above.other_bytes),
        ..rows
    }
}

/// Schedules policies that treat all layers alike, as far as pins allow.
pub fn measure_rows(size: &Size, classes: &[usize], tile_tokens: Option<usize>) -> Rows {
    let freedom = &size.freedom;
    let count = classes.iter().max().map_or(0, |most| most + 1);
    let mut rows = Rows { of_classes: vec![[Row::default(); TREATMENTS]; count], ..Rows::default() };
    let mut seen: Vec<Policy> = Vec::new();
    for treatment in 0..TREATMENTS {
        let set =
            |bit: usize| if treatment & bit > 0 { LayerSet::all(freedom.layers) } else { LayerSet::none() };
        let first = Policy { recompute: set(RECOMPUTED), tile_tokens, ..freedom.first() };
        let policy = freedom.obeyed(with_activations(first, set(OFFLOADED)));
        if seen.contains(&policy) {
            continue;
        }
        let schedule = size.scheduled(&policy);
        let (head_s, base_bytes) = add_rows(size, &schedule, &policy, classes, &mut rows);
        if seen.is_empty() {
            (rows.head_s, rows.base_bytes) = (head_s, base_bytes);
            rows.other_bytes = other_bytes(&schedule.plan, size.entries().0);
        }
        seen.push(policy);
    }
    rows
}

/// Seconds of each step that is no transfer, as `Profile` counts them.
fn step_seconds(size: &Size, steps: &[Step]) -> Vec<f64> {
    let profile = size.question.profile;
    let seconds = |index: usize| {
        let op = &steps[index].op;
        let before = index.checked_sub(1).map(|before| &steps[before].op);
        let is_launched = before.is_some_and(|before| op.joins(before));
        let saved_s = if is_launched { profile.rates.step_s } else { 0.0 };
        let is_computed = !op.is_transfer() && !op.has(Property::Waits) && op.route().is_none();
        if is_computed { profile.seconds(op, steps[index].cost) - saved_s } else { 0.0 }
    };
    (0..steps.len()).map(seconds).collect()
}

/// Reads the rows of the treatments of a policy from its schedule; returns the seconds outside the layers and the bytes in
/// use before them.
fn add_rows(
    size: &Size,
    schedule: &Schedule,
    policy: &Policy,
    classes: &[usize],
    rows: &mut Rows,
) -> (f64, f64) {
    let (plan, layers) = (&schedule.plan, size.freedom.layers);
    let entry = size.entries().0;
    let steps = &plan.entry(entry).steps;
    let (live, seconds) = (plan.live_bytes(entry), step_seconds(size, steps));
    let treatments =
        Activations::of(policy.recompute.clone(), policy.offloaded_activations.clone(), layers).treatments;
    let mut found = vec![Row::default(); layers];
    // Bytes in use at the end of each layer's forward pass.
    let mut ends = vec![0.0; layers];
    let (mut head_peak, mut head_s, mut base_bytes) = (0.0f64, 0.0, None);
    for (index, step) in steps.iter().enumerate() {
        let live_bytes = live[index] as f64;
        let Some(layer) = step.layer else {
            head_peak = head_peak.max(live_bytes);
            head_s += seconds[index];
            continue;
        };
        base_bytes.get_or_insert(if index == 0 { 0.0 } else { live[index - 1] as f64 });
        let row = &mut found[layer];
        if step.op == Op::Stow {
            row.stowed_bytes += step.cost.bytes;
        }
        if step.phase == Phase::Forward {
            row.forward_s += seconds[index];
            row.forward_bytes = row.forward_bytes.max(live_bytes);
            ends[layer] = live_bytes;
        } else {
            row.backward_s += seconds[index];
            row.backward_bytes = row.backward_bytes.max(live_bytes);
        }
    }
    let base_bytes = base_bytes.unwrap_or(0.0);
    for layer in 0..layers {
        let before = if layer == 0 { base_bytes } else { ends[layer - 1] };
        found[layer].kept_bytes = ends[layer] - before;
    }
    let alike = |layer: usize| -> Vec<&Row> {
        let is_alike =
            |other: &usize| classes[*other] == classes[layer] && treatments[*other] == treatments[layer];
        (0..layers).filter(is_alike).map(|other| &found[other]).collect()
    };
    // The median, because the ends differ: fewer transfers are in progress, or those of the backward pass start.
    let median = |rows: &[&Row], field: fn(&Row) -> f64| {
        let mut all: Vec<f64> = rows.iter().map(|row| field(row)).collect();
        all.sort_by(f64::total_cmp);
        all[(all.len() - 1) / 2]
    };
    let usual = |layer: usize| {
        let rows = alike(layer);
        Row {
            forward_s: median(&rows, |row| row.forward_s),
            backward_s: median(&rows, |row| row.backward_s),
            stowed_bytes: median(&rows, |row| row.stowed_bytes),
            kept_bytes: median(&rows, |row| row.kept_bytes).max(0.0),
            ..Row::default()
        }
    };
    let usual: Vec<Row> = (0..layers).map(usual).collect();
    let mut kept_bytes = base_bytes;
    for layer in 0..layers {
        let row = &mut rows.of_classes[classes[layer]][usize::from(treatments[layer])];
        let (forward_bytes, backward_bytes) = (row.forward_bytes, row.backward_bytes);
        *row = Row {
            forward_bytes: forward_bytes.max(found[layer].forward_bytes - kept_bytes),
            backward_bytes: backward_bytes.max(found[layer].backward_bytes - kept_bytes),
            ..usual[layer]
        };
        kept_bytes += usual[layer].kept_bytes;
    }
    let last = treatments.last().map_or(0, |treatment| usize::from(*treatment));
    rows.head_bytes[last] = head_peak - kept_bytes;
    (head_s, base_bytes)
}

fn other_bytes(plan: &Plan, entry: Entry) -> f64 {
    let others = plan.entries.iter().filter(|other| other.entry != entry);
    others.flat_map(|other| plan.live_bytes(other.entry)).max().unwrap_or(0) as f64
}

pub fn measure_fixed(size: &Size, short: &Short) -> Fixed {
    let question = size.question;
    let scheduled = |size: &Size, policy: Policy| {
        let schedule = size.scheduled(&size.freedom.obeyed(policy));
        let bytes = schedule.persistent_bytes() as f64;
        (bytes, schedule)
    };
    let update_s = |schedule: &Schedule| {
        let once =
            size.entries().1.filter(|entry| schedule.plan.entries.iter().any(|own| own.entry == *entry));
        once.map_or(0.0, |entry| question.profile.entry_seconds(&schedule.plan, entry))
    };
    let context_bytes = |schedule: &Schedule| question.context.bytes_for(&schedule.plan) as f64;
    let first = size.freedom.first();
    let all = LayerSet::all(size.freedom.layers);
    let (bytes, resident) = scheduled(size, first.clone());
    let (streamed, streaming) = scheduled(size, Policy { offloaded_weights: all, ..first.clone() });
    let (moments, streamed_moments) =
        scheduled(size, Policy { optimizer_state: Space::Host, ..first.clone() });
    let (mut gradient_bytes, mut gradient_peak_bytes) = (0.0, 0.0);
    if size.freedom.trains_base {
        let (own_bytes, schedule) = scheduled(size, Policy { gradients: Space::Host, ..first });
        let peak = |schedule: &Schedule| {
            schedule.plan.live_bytes(size.entries().0).into_iter().max().unwrap_or(0) as f64
        };
        (gradient_bytes, gradient_peak_bytes) =
            (bytes - own_bytes, (peak(&schedule) - peak(&resident)).max(0.0));
    }
    let shares = short.at(size, |size| {
        let all = LayerSet::all(size.freedom.layers);
        let (_, schedule) = scheduled(size, Policy { offloaded_weights: all, ..size.freedom.first() });
        fetched_bytes(size, &schedule)
    });
    let classes = classes(&size.request);
    let of_class = |class: usize| {
        let own: Vec<f64> = shares
            .iter()
            .enumerate()
            .filter(|(layer, _)| classes[*layer] == class)
            .map(|(_, bytes)| *bytes)
            .collect();
        own.iter().sum::<f64>() / own.len().max(1) as f64
    };
    let weights_bytes: Vec<f64> = classes.iter().map(|class| of_class(*class)).collect();
    let scale = (bytes - streamed) / weights_bytes.iter().sum::<f64>().max(1.0);
    Fixed {
        bytes,
        context_bytes: [context_bytes(&resident), context_bytes(&streaming)],
        weights_bytes: weights_bytes.into_iter().map(|bytes| bytes * scale).collect(),
        moment_bytes: bytes - moments,
        gradient_bytes,
        gradient_peak_bytes,
        update_s: update_s(&resident),
        streamed_update_s: update_s(&streamed_moments),
        head_bytes: size.freedom.head_bytes as f64,
        ..Fixed::default()
    }
}

/// Bytes of weights that are fetched, or gathered from other ranks, in the forward pass of each layer.
fn fetched_bytes(size: &Size, schedule: &Schedule) -> Vec<f64> {
    let mut bytes = vec![0.0; size.freedom.layers];
    for step in &schedule.plan.entry(size.entries().0).steps {
        let is_inward = matches!(step.op.route(), Some(Route::ToDevice | Route::Ranks { is_sum: false, .. }));
        if let (Some(layer), true, Phase::Forward) = (step.layer, is_inward, step.phase) {
            bytes[layer] += step.cost.bytes;
        }
    }
    bytes
}

/// Adds what does not depend on the number of layers: embedding, head, and chunks of the loss.
pub fn measure_tables(size: &Size, fixed: Fixed) -> Fixed {
    let (freedom, entry) = (&size.freedom, size.entries().0);
    let tokens = size.request.extent.tokens as f64;
    let outside = |policy: Policy| {
        let schedule = size.scheduled(&freedom.obeyed(policy));
        let steps = &schedule.plan.entry(entry).steps;
        let is_outside = |index: &usize| steps[*index].layer.is_none();
        let (live, seconds) = (schedule.plan.live_bytes(entry), step_seconds(size, steps));
        let peak = (0..steps.len()).filter(is_outside).map(|index| live[index]).max().unwrap_or(0) as f64;
        let head_s: f64 = (0..steps.len()).filter(is_outside).map(|index| seconds[index]).sum();
        (schedule.persistent_bytes() as f64, peak, head_s, other_bytes(&schedule.plan, entry))
    };
    let first = freedom.first();
    let (bytes, peak, head_s, other) = outside(first.clone());
    let freed = |policy: Policy| bytes - outside(policy).0;
    let split = Policy { tables_offloaded: true, head_pieces: freedom.head_pieces, ..first.clone() };
    let tables = Policy { head_pieces: 0, ..split.clone() };
    let is_split = freedom.obeyed(split.clone()).head_pieces > 1;
    let chunk = |rows: &usize| {
        let (_, own_peak, own_s, own_other) = outside(Policy { loss_chunk: *rows, ..first.clone() });
        Chunk {
            rows: *rows,
            saved_bytes: peak - own_peak,
            saved_other_bytes: other - own_other,
            added_s: (own_s - head_s) / tokens,
        }
    };
    Fixed {
        embedding_bytes: freed(Policy { embedding_offloaded: true, ..first.clone() }),
        tables_bytes: freed(tables),
        split_s: if is_split { (outside(split).2 - head_s) / tokens } else { 0.0 },
        chunks: freedom.chunks().iter().map(chunk).collect(),
        ..fixed
    }
}
