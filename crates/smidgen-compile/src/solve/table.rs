//! The table: what a layer of each class needs for each way to treat it, and what that predicts for a whole policy.
//!
//! `rows.rs` reads it from a few schedules. Rows are linear in the tokens, so sizes between two measured ones are
//! interpolated. The bytes of a policy are sums over its layers, its time is that of `lanes.rs`. Predictions choose what is
//! scheduled and nothing else.

use super::lanes::{Lanes, Visit};
use super::rows::{
    Activations, Chunk, Fixed, Row, Rows, Short, classes, interpolated, measure_fixed, measure_rows,
    measure_tables,
};
use super::size::Size;
use smidgen_ir::policy::{LayerSet, Policy};
use smidgen_ir::{Choice, Space};

pub struct Table<'a> {
    sizes: &'a [Size<'a>],
    /// The class of each layer.
    classes: Vec<usize>,
    fixed: Fixed,
    /// One for each size.
    rows: Vec<Rows>,
    short: Short,
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
