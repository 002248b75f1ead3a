//! The table: what a layer of each class needs for each way to treat it, and what that predicts for a whole policy.
//!
//! Layers with the same description, adapters and storages are a class. The rows come from a few schedules of the first
//! layers of the model, enough that every class is there several times; what all layers need together comes from schedules
//! of the whole model. Rows are linear in the tokens, so sizes between two measured ones are interpolated. The bytes of a
//! policy are sums over its layers, its time is that of `lanes.rs`. Predictions choose what is scheduled and nothing else.

use super::choices::with_activations;
use super::lanes::{Lanes, Visit};
use super::question::Question;
use super::size::{SearchState, Size};
use crate::request::Request;
use crate::schedule::Schedule;
use smidgen_ir::policy::{LayerSet, Policy};
use smidgen_ir::{Choice, Entry, Op, Phase, Plan, Property, Route, Space, Step};

/// Ways to treat a layer: bit 0 is set if it is recomputed, bit 1 if its activations are offloaded.
const TREATMENTS: usize = 4;
const RECOMPUTED: usize = 1;
const OFFLOADED: usize = 2;

/// The first layers of a model that has this many of each class stand for all of them.
const OF_EACH_CLASS: usize = 8;

/// Time and bytes of one layer that is treated in one way.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    forward_s: f64,
    backward_s: f64,
    /// Bytes that stay on the device from forward to backward.
    kept_bytes: f64,
    /// Peak of the forward pass, above what earlier layers keep.
    forward_bytes: f64,
    /// Peak of the backward pass, above what earlier layers keep.
    backward_bytes: f64,
    /// Offloaded activations.
    stowed_bytes: f64,
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
    of_classes: Vec<[Row; TREATMENTS]>,
    /// Bytes in use before the first layer.
    base_bytes: f64,
    /// Peak outside the layers above what all layers keep, by the treatment of the last layer.
    head_bytes: [f64; TREATMENTS],
    /// Seconds outside the layers.
    head_s: f64,
    /// Peak of the other entry points.
    other_bytes: f64,
}

/// What one number of rows per chunk of the loss changes, compared with the largest chunk.
#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    rows: usize,
    saved_bytes: f64,
    saved_other_bytes: f64,
    /// Per token.
    added_s: f64,
}

/// What is the same at every size.
#[derive(Clone, Debug, Default)]
struct Fixed {
    /// On the device from the first step to the last.
    bytes: f64,
    /// Outside the arena, if nothing is offloaded and if something is.
    context_bytes: [f64; 2],
    /// Bytes of the weights of each layer, freed if they are offloaded.
    weights_bytes: Vec<f64>,
    embedding_bytes: f64,
    tables_bytes: f64,
    moment_bytes: f64,
    gradient_bytes: f64,
    /// What offloading gradients adds to the peak, because partial gradients meet fetched ones.
    gradient_peak_bytes: f64,
    update_s: f64,
    /// Seconds of the update if optimizer state is offloaded.
    streamed_update_s: f64,
    head_bytes: f64,
    /// Seconds per token that a head in pieces adds.
    split_s: f64,
    chunks: Vec<Chunk>,
}

pub struct Table<'a> {
    sizes: &'a [Size<'a>],
    /// The class of each layer.
    classes: Vec<usize>,
    fixed: Fixed,
    /// One for each size.
    rows: Vec<Rows>,
    short: Short,
}

/// Sets of layers that are recomputed and whose activations are offloaded.
#[derive(Clone, Debug, PartialEq)]
pub struct Activations {
    pub recompute: LayerSet,
    pub offloaded: LayerSet,
    treatments: Vec<u8>,
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

/// What activations need at one size.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// Peak in the layers.
    layers_bytes: f64,
    /// Peak outside the layers, with the usual chunk.
    head_bytes: f64,
    pub stowed_bytes: f64,
    /// Seconds in the layers.
    layers_s: f64,
}

/// What the choices for all layers need at one size.
#[derive(Clone, Copy, Debug)]
pub struct Outside {
    /// On the device for the whole run, all weights of layers included.
    bytes: f64,
    window_bytes: f64,
    saved_head_bytes: f64,
    other_bytes: f64,
    /// Whether something streams, even if no layer's weights do.
    pub streams: bool,
    offloaded_bytes: f64,
    /// Bytes on the machine for each offloaded byte of weights and of activations.
    offloaded_per_byte: [f64; 2],
    fetched_head_bytes: f64,
    gradient_bytes: f64,
    moment_bytes: f64,
    seconds: f64,
    update_s: f64,
}

/// What a policy is predicted to need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predicted {
    pub bytes: f64,
    pub ms: f64,
}

/// A set of layers with offloaded weights and the bytes that it frees.
#[derive(Clone, Debug)]
pub struct Weights {
    pub layers: LayerSet,
    pub bytes: f64,
    is_offloaded: Vec<bool>,
}

/// The class of each layer. The layers of an encoder come first and are one class.
fn classes(request: &Request) -> Vec<usize> {
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
    let adapters: std::collections::HashMap<&str, usize> =
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
struct Short {
    layers: usize,
    /// The state of all sizes of the short model.
    state: SearchState,
}

impl Short {
    /// As few layers as have every class often enough; all of them if a pin names layers.
    fn of(size: &Size, classes: &[usize]) -> Short {
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
    fn at<T>(&self, size: &Size, measure: impl FnOnce(&Size) -> T) -> T {
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

impl<'a> Table<'a> {
    pub fn of(sizes: &'a [Size<'a>]) -> Table<'a> {
        let (largest, smallest) = (0, sizes.len() - 1);
        let classes = classes(&sizes[smallest].request);
        let short = Short::of(&sizes[smallest], &classes);
        // Micro-batches of a few samples are likely, and not everything is linear from there to the whole batch.
        let mut measured = vec![smallest, largest];
        measured.extend((sizes.len() > 3).then(|| sizes.len() - 3));
        measured.sort_by_key(|size| sizes[*size].request.extent.tokens);
        measured.dedup();
        let tokens = |size: usize| sizes[size].request.extent.tokens as f64;
        let found: Vec<(f64, Rows)> = (measured.iter())
            .map(|size| (tokens(*size), short.at(&sizes[*size], |size| measure_rows(size, &classes, None))))
            .collect();
        let rows = (0..sizes.len()).map(|size| interpolated(&found, tokens(size))).collect();
        let fixed = measure_fixed(&sizes[smallest], &short);
        let fixed = short.at(&sizes[largest], |size| measure_tables(size, fixed));
        Table { sizes, classes, fixed, rows, short }
    }

    /// The table of one size.
    pub fn at(&self, size: usize) -> AtSize<'_> {
        self.with_rows(size, &self.rows[size])
    }

    /// The rows of one size with tiles.
    pub fn tiled(&self, size: usize) -> Rows {
        let tile = self.sizes[size].freedom.tile();
        self.short.at(&self.sizes[size], |size| measure_rows(size, &self.classes, tile))
    }

    pub fn with_rows<'t>(&'t self, size: usize, rows: &'t Rows) -> AtSize<'t> {
        AtSize { table: self, size: &self.sizes[size], rows }
    }

    /// Layers in the order in which recomputing them costs the fewest seconds per byte, equal ones from the first on; `None`
    /// if that is the order in the model.
    pub fn cheapest_to_recompute(&self) -> Option<Vec<usize>> {
        let rows = &self.rows[self.rows.len() - 1].of_classes;
        let price = |layer: &usize| {
            let [kept, recomputed, ..] = rows[self.classes[*layer]];
            let saved_bytes = (kept.kept_bytes - recomputed.kept_bytes).max(1.0);
            (recomputed.backward_s - kept.backward_s) / saved_bytes
        };
        let in_order: Vec<usize> = (0..self.classes.len()).collect();
        let mut layers = in_order.clone();
        layers.sort_by(|one, other| price(one).total_cmp(&price(other)));
        (layers != in_order).then_some(layers)
    }

    /// These sets of layers, by the bytes that offloading their weights frees.
    pub fn weights(&self, sets: Vec<LayerSet>) -> Vec<Weights> {
        let layers = self.classes.len();
        let weights = |set: LayerSet| Weights {
            bytes: set.iter().map(|layer| self.fixed.weights_bytes[layer]).sum(),
            is_offloaded: (0..layers).map(|layer| set.contains(layer)).collect(),
            layers: set,
        };
        let mut all: Vec<Weights> = sets.into_iter().map(weights).collect();
        all.sort_by(|one, other| one.bytes.total_cmp(&other.bytes));
        all
    }
}

fn interpolated(found: &[(f64, Rows)], tokens: f64) -> Rows {
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
fn measure_rows(size: &Size, classes: &[usize], tile_tokens: Option<usize>) -> Rows {
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

fn measure_fixed(size: &Size, short: &Short) -> Fixed {
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
fn measure_tables(size: &Size, fixed: Fixed) -> Fixed {
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

/// The table at one size.
#[derive(Clone, Copy)]
pub struct AtSize<'t> {
    table: &'t Table<'t>,
    pub size: &'t Size<'t>,
    rows: &'t Rows,
}

impl AtSize<'_> {
    fn row(&self, activations: &Activations, layer: usize) -> &Row {
        &self.rows.of_classes[self.table.classes[layer]][usize::from(activations.treatments[layer])]
    }

    pub fn needs(&self, activations: &Activations) -> Needs {
        let mut kept = self.rows.base_bytes;
        let mut needs = Needs { layers_bytes: 0.0, head_bytes: 0.0, stowed_bytes: 0.0, layers_s: 0.0 };
        for layer in 0..activations.treatments.len() {
            let row = self.row(activations, layer);
            needs.layers_bytes = needs.layers_bytes.max(kept + row.forward_bytes.max(row.backward_bytes));
            needs.stowed_bytes += row.stowed_bytes;
            needs.layers_s += row.forward_s + row.backward_s;
            kept += row.kept_bytes;
        }
        let last = activations.treatments.last().map_or(0, |treatment| usize::from(*treatment));
        needs.head_bytes = kept + self.rows.head_bytes[last];
        needs
    }

    /// What a chunk changes, compared with the usual one of this size.
    fn chunk(&self, loss_chunk: usize) -> Chunk {
        let chunks = &self.table.fixed.chunks;
        let of = |rows: usize| {
            let nearest = chunks.iter().min_by_key(|chunk| chunk.rows.abs_diff(rows));
            nearest.copied().unwrap_or_default()
        };
        let (own, usual) = (of(loss_chunk), of(self.size.freedom.chunks()[0]));
        Chunk {
            rows: loss_chunk,
            saved_bytes: own.saved_bytes - usual.saved_bytes,
            saved_other_bytes: own.saved_other_bytes - usual.saved_other_bytes,
            added_s: (own.added_s - usual.added_s) * self.size.request.extent.tokens as f64,
        }
    }

    /// What a combination of the choices for all layers needs, apart from the layers.
    pub fn outside(&self, policy: &Policy) -> Outside {
        let (fixed, freedom) = (&self.table.fixed, &self.size.freedom);
        let chunk = self.chunk(policy.loss_chunk);
        let table_bytes = match (policy.tables_offloaded, policy.embedding_offloaded) {
            (true, _) => fixed.tables_bytes,
            (false, true) => fixed.embedding_bytes,
            (false, false) => 0.0,
        };
        let offloaded = |space: Space, bytes: f64| if space == Space::Device { 0.0 } else { bytes };
        let moment_bytes = offloaded(policy.optimizer_state, fixed.moment_bytes);
        let gradient_bytes = offloaded(policy.gradients, fixed.gradient_bytes);
        let state_bytes = moment_bytes + gradient_bytes;
        let gradient_peak_bytes = offloaded(policy.gradients, fixed.gradient_peak_bytes);
        // Gradients of embedding and head cross the link when nothing else runs.
        let all_bytes = fixed.tables_bytes + fixed.weights_bytes.iter().sum::<f64>();
        let outside_bytes = gradient_bytes * fixed.tables_bytes / all_bytes.max(1.0);
        let profile = self.size.question.profile;
        let crossing_s = outside_bytes / profile.fetch_bytes_per_s + outside_bytes / profile.stow_bytes_per_s;
        let is_split = policy.head_pieces > 1;
        let head_bytes = if policy.tables_offloaded { fixed.head_bytes } else { 0.0 };
        let whole_head = if is_split { 0.0 } else { head_bytes };
        let tokens = self.size.request.extent.tokens as f64;
        let split_s = if is_split { fixed.split_s * tokens } else { 0.0 };
        let is_streamed = policy.optimizer_state != Space::Device;
        // Frozen weights exist once per machine.
        let ranks = self.size.question.budget.local_ranks as f64;
        let copies = if freedom.trains_base { ranks } else { 1.0 };
        let gathers = freedom.gathers_weights();
        Outside {
            bytes: fixed.bytes - table_bytes - state_bytes + gradient_peak_bytes,
            window_bytes: whole_head.max(policy.window_bytes as f64),
            saved_head_bytes: chunk.saved_bytes,
            other_bytes: self.rows.other_bytes - chunk.saved_other_bytes,
            streams: policy.tables_offloaded || state_bytes > 0.0,
            offloaded_bytes: if gathers { 0.0 } else { copies * table_bytes + ranks * state_bytes },
            offloaded_per_byte: [if gathers { 0.0 } else { copies }, ranks],
            fetched_head_bytes: if is_split { 2.0 * head_bytes } else { head_bytes },
            gradient_bytes,
            moment_bytes,
            seconds: self.rows.head_s + split_s + chunk.added_s + crossing_s,
            update_s: if is_streamed { fixed.streamed_update_s } else { fixed.update_s },
        }
    }

    /// Bytes on the device before weights of layers are offloaded, with room for the window if something streams.
    pub fn bytes(&self, outside: &Outside, needs: &Needs, is_streaming: bool) -> f64 {
        let transient_bytes =
            (needs.layers_bytes).max(needs.head_bytes - outside.saved_head_bytes).max(outside.other_bytes);
        let is_offloading = is_streaming || needs.stowed_bytes > 0.0;
        let window_bytes = if is_streaming { outside.window_bytes } else { 0.0 };
        let context_bytes = self.table.fixed.context_bytes[usize::from(is_offloading)];
        outside.bytes + context_bytes + transient_bytes + window_bytes
    }

    pub fn offloaded_bytes(&self, outside: &Outside, needs: &Needs, weights: &Weights) -> f64 {
        let [copies, ranks] = outside.offloaded_per_byte;
        outside.offloaded_bytes + copies * weights.bytes + ranks * needs.stowed_bytes
    }

    /// Passes of a micro-batch through the layers: forward, and in training backward.
    fn passes(&self) -> f64 {
        if self.size.entries().1.is_some() { 2.0 } else { 1.0 }
    }

    /// Bytes that are transferred per step.
    pub fn moved_bytes(&self, outside: &Outside, needs: &Needs, weights: &Weights) -> f64 {
        let layers = self.passes() * weights.bytes + 2.0 * needs.stowed_bytes;
        let each = layers + outside.fetched_head_bytes + 2.0 * outside.gradient_bytes;
        self.size.demand.micro_steps * each + 2.0 * outside.moment_bytes
    }

    fn fetch_rate(&self) -> f64 {
        let (freedom, profile) = (&self.size.freedom, self.size.question.profile);
        match freedom.pins.space_of(Choice::Weights) {
            // Divided weights are gathered from the other ranks.
            _ if freedom.gathers_weights() => profile.link.bytes_per_s,
            Some(Space::Disk) => profile.disk_bytes_per_s,
            _ => profile.fetch_bytes_per_s,
        }
    }

    /// The time of the busiest of computation, copies in and copies out: no step takes less.
    pub fn busiest_ms(&self, outside: &Outside, needs: &Needs, weights_bytes: f64) -> f64 {
        let profile = self.size.question.profile;
        let weights_s = (self.passes() * weights_bytes + outside.fetched_head_bytes) / self.fetch_rate();
        let inward_s = weights_s + needs.stowed_bytes / profile.fetch_bytes_per_s;
        let outward_s = needs.stowed_bytes / profile.stow_bytes_per_s;
        self.step_ms(outside, (needs.layers_s + outside.seconds).max(inward_s).max(outward_s))
    }

    fn step_ms(&self, outside: &Outside, micro_seconds: f64) -> f64 {
        1e3 * (micro_seconds * self.size.demand.micro_steps + outside.update_s)
    }

    /// The time of a step. Transfers in each direction run one after the other and overlap with computation.
    pub fn ms(
        &self,
        policy: &Policy,
        outside: &Outside,
        activations: &Activations,
        weights: &Weights,
    ) -> f64 {
        let (fixed, profile) = (&self.table.fixed, self.size.question.profile);
        let (layers, weights_per_s) = (activations.treatments.len(), self.fetch_rate());
        let all_bytes = fixed.tables_bytes + fixed.weights_bytes.iter().sum::<f64>();
        let in_layers = 1.0 - fixed.tables_bytes / all_bytes.max(1.0);
        let gradient_bytes = in_layers * outside.gradient_bytes / layers.max(1) as f64;
        let gradient_s =
            [gradient_bytes / profile.fetch_bytes_per_s, gradient_bytes / profile.stow_bytes_per_s];
        let visit = |layer: usize| {
            let row = self.row(activations, layer);
            let weights_bytes = if weights.is_offloaded[layer] { fixed.weights_bytes[layer] } else { 0.0 };
            Visit {
                forward_s: row.forward_s,
                backward_s: row.backward_s,
                weights_s: weights_bytes / weights_per_s,
                stow_s: row.stowed_bytes / profile.stow_bytes_per_s,
                back_s: row.stowed_bytes / profile.fetch_bytes_per_s,
                gradient_s,
            }
        };
        let largest = fixed.weights_bytes.iter().copied().fold(1.0, f64::max);
        let mut lanes = Lanes::with_window((policy.window_bytes as f64 / largest).round() as usize);
        let visits: Vec<Visit> = (0..layers).map(visit).collect();
        lanes.forward(&visits);
        // A piece that exceeds the window is not prefetched.
        let piece_bytes = fixed.head_bytes / policy.head_pieces.max(1) as f64;
        let is_prefetched = piece_bytes <= policy.window_bytes as f64;
        lanes.head(outside.seconds, outside.fetched_head_bytes / weights_per_s, is_prefetched);
        if self.passes() > 1.0 {
            lanes.backward(&visits);
        }
        let stowed: f64 = (0..layers).map(|layer| self.row(activations, layer).stowed_bytes).sum();
        let moved = 2.0 * stowed + self.passes() * weights.bytes + outside.fetched_head_bytes;
        self.step_ms(outside, lanes.end() + moved * profile.transfer_s_per_byte)
    }
}
