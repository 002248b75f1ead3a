//! The memory choices as the solver searches them: which are open, which policy a point stands for, how points vary.
//!
//! A [`Point`] describes a policy with a few numbers. [`Freedom`] turns points into policies that obey the pins, so a
//! search may vary points freely. Everything that the search knows about a single choice is in this file: its first value,
//! its rungs on a ladder, how it is varied, when it is in use and which pins are refused. The ladders (`ladder.rs`), the
//! search for the leanest policy (`lean.rs`) and the search for the fastest (`improve.rs`) know no choice by name.

use crate::offloaded_weights::layer_bytes;
use crate::passes::head_pieces;
use crate::question::Demand;
use crate::request::{Master, Request, loss_chunks};
use smidgen_ir::policy::{LayerRule, LayerSet, Order, Pins, Policy, Sharding};
use smidgen_ir::{DeviceKind, Extent, Space};

/// Layers of offloaded weights that may be on the device at the same time, if memory allows.
pub const USUAL_WINDOW: usize = 2;

/// A policy, described by a few numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    pub loss_chunk: usize,
    /// How many layers are recomputed, counted from the first.
    pub recomputed: usize,
    /// How many layers have offloaded weights; they are spread evenly.
    pub weights: usize,
    /// Whether the embedding alone is offloaded.
    pub embedding: bool,
    /// Whether embedding and head are offloaded.
    pub tables: bool,
    /// Whether an offloaded head is fetched in pieces.
    pub split_head: bool,
    pub activations: Offload,
    /// Whether optimizer state is offloaded.
    pub optimizer_state: bool,
    /// Whether gradients of trained weights are offloaded.
    pub gradients: bool,
    /// How many layers keep optimizer state and gradients on the device if those are offloaded; they are spread evenly.
    pub resident_state: usize,
    pub order: Order,
    /// Used in breadth-first order only.
    pub layers_per_lap: usize,
    /// Whether parameters whose tensors are all in host memory are updated there.
    pub updates_on_host: bool,
    pub tile_tokens: Option<usize>,
    /// Layers (or laps) of offloaded weights that may be on the device at the same time; 0 fetches each when it is needed.
    pub window_layers: usize,
}

/// Which activations are offloaded until the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    None,
    /// The inputs of recomputed layers.
    OfRecomputed,
    /// The activations of this many layers, spread evenly.
    Some(usize),
    /// The activations of all layers.
    All,
}

impl Point {
    /// Whether anything is fetched through the window.
    pub fn streams(&self) -> bool {
        self.weights > 0 || self.tables || self.optimizer_state || self.gradients
    }

    pub fn with_window(self, window_layers: usize) -> Point {
        Point { window_layers, ..self }
    }

    pub fn with_laps(self, layers_per_lap: usize) -> Point {
        Point { layers_per_lap, ..self }
    }

    /// Windows to try at a point: its own if something streams, otherwise the usual one and a small one.
    pub fn windows(&self) -> Vec<usize> {
        if self.streams() { vec![self.window_layers] } else { vec![USUAL_WINDOW, 1] }
    }
}

/// Copies one choice from the second point to the first.
pub type Copy = fn(&mut Point, &Point);

pub fn weights_are_open(pins: &Pins) -> bool {
    pins.offloaded_weights.is_none() && pins.weights != Some(Space::Device)
}

pub fn tables_are_open(pins: &Pins) -> bool {
    pins.tables_offloaded.is_none() && pins.weights != Some(Space::Device)
}

pub fn embedding_is_open(pins: &Pins) -> bool {
    pins.embedding_offloaded.is_none() && tables_are_open(pins)
}

pub fn activations_are_open(pins: &Pins) -> bool {
    pins.offloaded_activations.is_none() && pins.activations != Some(Space::Device)
}

/// Whether some layers may keep optimizer state and gradients on the device. A pinned memory space applies to all layers.
fn is_state_open(pins: &Pins) -> bool {
    let are_layers_open = pins.offloaded_moments.is_none() && pins.offloaded_gradients.is_none();
    are_layers_open && pins.optimizer_state.is_none() && pins.gradients.is_none()
}

/// Why pins are refused: a plan cannot obey them, or they would have no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    LapsInDepthFirstOrder,
    MoreLayersPerLap { pinned: usize, layers: usize },
}

/// Why the pins are refused for this run, if they are.
pub fn refuse(pins: &Pins, request: &Request) -> Option<Refusal> {
    let (per_lap, layers) = (pins.layers_per_lap.unwrap_or(0), request.spec.layers.len());
    match pins.order {
        Some(Order::Depth) if per_lap > 1 => Some(Refusal::LapsInDepthFirstOrder),
        _ if per_lap > layers => Some(Refusal::MoreLayersPerLap { pinned: per_lap, layers }),
        _ => None,
    }
}

/// One choice, and points that differ from some other point in that choice alone.
#[derive(Clone, Debug)]
pub struct Axis {
    pub copy: Copy,
    pub points: Vec<Point>,
}

/// What the pins leave to the solver at one size of micro-batch; it maps points to policies.
#[derive(Clone, Debug)]
pub struct Freedom<'a> {
    pub pins: &'a Pins,
    pub layers: usize,
    micro_tokens: usize,
    tokens: usize,
    /// Chunks of the loss in rows, largest first.
    chunks: Vec<usize>,
    /// Bytes on the device of a layer of fetched weights.
    layer_bytes: usize,
    /// Whether the embedding can be offloaded without the head.
    pub has_own_embedding: bool,
    /// Pieces in which the head can be fetched; 0 if it must be fetched whole.
    pub head_pieces: usize,
    pub head_bytes: usize,
    device: DeviceKind,
    sharding: Sharding,
    /// Whether weights of the base are trained. Their gradients may be offloaded.
    pub trains_base: bool,
    /// Whether breadth-first order is possible.
    pub has_laps: bool,
    /// Whether updates can run on the host: the device is a GPU, and trained weights are in f32.
    has_host_updates: bool,
}

impl<'a> Freedom<'a> {
    /// `request` must have the extent of the demand.
    pub fn of(request: &Request, demand: &Demand, pins: &'a Pins) -> Freedom<'a> {
        let sharding = match request.rank.is_only() {
            true => Sharding::None,
            false => pins.sharding.unwrap_or_default(),
        };
        Freedom {
            pins,
            layers: request.layers(),
            micro_tokens: demand.micro_tokens,
            tokens: demand.extent.tokens,
            chunks: loss_chunks(request, pins),
            layer_bytes: layer_bytes(request, sharding == Sharding::Weights),
            has_own_embedding: !request.spec.head.is_tied,
            // A divided head is gathered whole.
            head_pieces: if sharding == Sharding::Weights { 0 } else { head_pieces::count(request) },
            head_bytes: request
                .storage_of(request.spec.head_tensor())
                .bytes(request.spec.vocabulary, request.spec.hidden),
            device: request.device,
            sharding,
            trains_base: !request.trained.is_empty(),
            // Memory alone must not change the order of a tied head's sums.
            has_laps: !request.trains_tied_head() || pins.order == Some(Order::Breadth),
            has_host_updates: request.device == DeviceKind::Cuda && request.optimizer.master == Master::F32,
        }
    }

    /// Whether breadth-first order is possible and open.
    pub fn may_go_breadth_first(&self) -> bool {
        self.has_laps && self.pins.order != Some(Order::Depth)
    }

    /// Whether sketches apply: the order is depth-first, and no pin treats layers differently.
    pub fn can_be_sketched(&self) -> bool {
        let pins = self.pins;
        let are_layers_open = pins.recompute.is_none()
            && pins.offloaded_weights.is_none()
            && pins.offloaded_activations.is_none();
        let is_depth_first = self.pinned(self.start()).order == Order::Depth;
        are_layers_open && is_depth_first && pins.window_bytes.is_none() && self.layers > 3
    }

    /// Layers per lap to try, smallest first.
    pub fn lap_sizes(&self) -> Vec<usize> {
        match self.pins.layers_per_lap {
            Some(pinned) => vec![pinned.max(1)],
            None => vec![1, 2],
        }
    }

    /// Whether weights that are not resident are gathered from the other ranks.
    pub fn gathers_weights(&self) -> bool {
        self.sharding == Sharding::Weights
    }

    /// Everything on the device as far as the pins allow: the fastest point.
    pub fn start(&self) -> Point {
        self.start_with(self.chunks[0])
    }

    fn start_with(&self, loss_chunk: usize) -> Point {
        self.pinned(Point {
            loss_chunk,
            recomputed: 0,
            weights: 0,
            embedding: false,
            tables: false,
            split_head: false,
            activations: Offload::None,
            optimizer_state: false,
            gradients: false,
            resident_state: 0,
            order: Order::Depth,
            layers_per_lap: 0,
            updates_on_host: false,
            tile_tokens: None,
            window_layers: USUAL_WINDOW,
        })
    }

    /// The point that needs the least memory in almost every model.
    pub fn leanest(&self) -> Point {
        Point {
            loss_chunk: self.fewest_rows(),
            recomputed: self.layers.saturating_sub(1),
            weights: self.layers,
            embedding: false,
            tables: true,
            split_head: self.head_pieces > 1,
            activations: Offload::OfRecomputed,
            optimizer_state: true,
            gradients: self.trains_base,
            resident_state: 0,
            order: Order::Depth,
            layers_per_lap: 0,
            updates_on_host: false,
            tile_tokens: self.tile(),
            window_layers: 0,
        }
    }

    /// A point of another size at this one: chunks and tiles depend on the size.
    pub fn at_this_size(&self, point: Point) -> Point {
        let tile_tokens = point.tile_tokens.and(self.tile());
        Point { loss_chunk: self.fewest_rows(), tile_tokens, ..point }
    }

    /// A point in breadth-first order: every layer is recomputed from its input, and weights are offloaded, trained ones
    /// with their gradients and optimizer state.
    pub fn breadth_first(&self, activations: Offload, window_layers: usize) -> Point {
        Point {
            recomputed: self.layers,
            weights: self.layers,
            tables: self.trains_base,
            activations,
            optimizer_state: self.trains_base,
            gradients: self.trains_base,
            order: Order::Breadth,
            layers_per_lap: 1,
            window_layers,
            ..self.start()
        }
    }

    /// `point` with everything offloaded that can be streamed.
    pub fn all_streamed(&self, point: Point) -> Point {
        let gradients = self.trains_base;
        Point {
            weights: self.layers,
            tables: true,
            optimizer_state: true,
            gradients,
            window_layers: 1,
            ..point
        }
    }

    fn fewest_rows(&self) -> usize {
        *self.chunks.last().expect("there is a chunk of the loss")
    }

    /// The chunks that a search for faster points tries.
    pub fn largest_and_smallest_chunk(&self) -> Vec<usize> {
        self.chunks.first().into_iter().chain(self.chunks[1..].last()).copied().collect()
    }

    pub fn chunks(&self) -> &[usize] {
        &self.chunks
    }

    pub fn has_tiles(&self) -> bool {
        self.tile().is_some()
    }

    /// The point adjusted to the pins, with unused choices set to fixed values, so that points of the same policy become
    /// equal as far as a search relies on it.
    pub fn pinned(&self, point: Point) -> Point {
        let pins = self.pins;
        let count = |rule: &LayerRule| rule.layers(self.layers).len();
        let is_in_use = |space: Space| space != Space::Device;
        // Divided weights stay on the device, and still count as offloaded here.
        let on_device = pins.weights == Some(Space::Device) && !self.gathers_weights();
        let weights = match &pins.offloaded_weights {
            _ if on_device => 0,
            Some(rule) => count(rule),
            None => point.weights,
        };
        let tables = if on_device { false } else { pins.tables_offloaded.unwrap_or(point.tables) };
        let activations = match &pins.offloaded_activations {
            _ if pins.activations == Some(Space::Device) => Offload::None,
            Some(rule) if count(rule) == 0 => Offload::None,
            Some(_) => Offload::All,
            None => point.activations,
        };
        let split_head = pins.head_pieces.map_or(point.split_head, |pieces| pieces > 1);
        let point = Point {
            loss_chunk: point.loss_chunk,
            recomputed: if pins.recompute.is_some() { 0 } else { point.recomputed },
            weights,
            embedding: if embedding_is_open(pins) {
                point.embedding
            } else {
                pins.embedding_offloaded == Some(true) && !tables
            },
            tables,
            split_head: split_head && tables && self.head_pieces > 1,
            activations,
            optimizer_state: pins.optimizer_state.map_or(point.optimizer_state, is_in_use),
            gradients: self.trains_base && pins.gradients.map_or(point.gradients, is_in_use),
            resident_state: if is_state_open(pins) { point.resident_state } else { 0 },
            order: pins.order.filter(|_| self.has_laps).unwrap_or(point.order),
            layers_per_lap: pins.layers_per_lap.unwrap_or(point.layers_per_lap),
            updates_on_host: pins.updates.map_or(point.updates_on_host, is_in_use),
            tile_tokens: pins.tile_tokens.unwrap_or(point.tile_tokens),
            window_layers: point.window_layers,
        };
        let has_state = point.optimizer_state || point.gradients;
        let resident_state = if has_state { point.resident_state } else { 0 };
        // In laps the head is fetched once for all micro-batches.
        let split_head = point.split_head && point.order == Order::Depth;
        let updates_on_host = point.updates_on_host
            && point.order == Order::Breadth
            && self.has_host_updates
            && point.optimizer_state
            && point.gradients;
        let layers_per_lap = match point.order {
            Order::Depth => 0,
            // With tiles, laps of several layers round other sums than laps of one layer: only if both are pinned.
            Order::Breadth if point.tile_tokens.is_some() && pins.layers_per_lap.is_none() => 1,
            Order::Breadth => point.layers_per_lap.clamp(1, self.layers.max(1)),
        };
        let point = Point { resident_state, split_head, updates_on_host, layers_per_lap, ..point };
        let is_window_open = point.streams() && pins.window_bytes.is_none();
        Point { window_layers: if is_window_open { point.window_layers } else { USUAL_WINDOW }, ..point }
    }

    /// Whether each rank offloads its rows of divided trained weights: with their gradients and optimizer state, unless a
    /// space is pinned. Its part of frozen ones stays on the device.
    fn offloads_own_rows(&self, point: &Point) -> bool {
        let follows = point.optimizer_state && point.gradients;
        self.trains_base && self.pins.weights.map_or(follows, |space| space != Space::Device)
    }

    pub fn policy(&self, point: &Point) -> Policy {
        let (pins, layers) = (self.pins, self.layers);
        let point = self.pinned(*point);
        let recompute = match &pins.recompute {
            Some(rule) => rule.layers(layers),
            None => LayerSet::first(point.recomputed),
        };
        let per_lap = point.layers_per_lap.max(1);
        let offloaded_activations = match (&pins.offloaded_activations, point.activations) {
            (_, Offload::None) => LayerSet::none(),
            (Some(rule), _) => rule.layers(layers),
            (None, Offload::OfRecomputed) => recompute.clone(),
            (None, Offload::Some(count)) => {
                let laps = LayerSet::spread(count.div_ceil(per_lap), layers.div_ceil(per_lap));
                (0..layers).filter(|layer| laps.contains(layer / per_lap)).collect()
            }
            (None, Offload::All) => LayerSet::all(layers),
        };
        let offloaded_weights = match &pins.offloaded_weights {
            _ if point.weights == 0 => LayerSet::none(),
            Some(rule @ (LayerRule::All | LayerRule::Every(_) | LayerRule::List(_))) => rule.layers(layers),
            // In the middle of a step the link is busy with the head, so the last layer is offloaded last.
            _ if point.tables => LayerSet::spread(point.weights, layers).mirrored(layers),
            _ => LayerSet::spread(point.weights, layers),
        };
        let embedding_offloaded = point.tables || (point.embedding && self.has_own_embedding);
        let space = |is_in_use: bool, pinned: Option<Space>| match pinned {
            _ if !is_in_use => Space::Device,
            Some(Space::Device) | None => Space::Host,
            Some(space) => space,
        };
        let window_layers = if point.streams() { point.window_layers * per_lap } else { 0 };
        let window_bytes = window_layers * self.layer_bytes;
        // An empty set means all layers and everything outside the layers.
        let offloaded_state = match point.resident_state {
            0 => LayerSet::none(),
            resident => LayerSet::spread(layers - resident.min(layers - 1), layers),
        };
        let state = |is_in_use: bool, pinned: &Option<LayerRule>| match pinned {
            _ if !is_in_use => LayerSet::none(),
            Some(rule) => rule.layers(layers),
            None => offloaded_state.clone(),
        };
        let head_pieces = if point.split_head { self.head_pieces } else { 0 };
        let policy = Policy {
            micro_tokens: self.micro_tokens,
            loss_chunk: point.loss_chunk,
            tile_tokens: point.tile_tokens,
            activations: space(!offloaded_activations.is_empty(), pins.activations),
            weights: space(
                (embedding_offloaded || !offloaded_weights.is_empty())
                    && (!self.gathers_weights() || self.offloads_own_rows(&point)),
                pins.weights,
            ),
            optimizer_state: space(point.optimizer_state, pins.optimizer_state),
            offloaded_moments: state(point.optimizer_state, &pins.offloaded_moments),
            gradients: space(point.gradients, pins.gradients),
            offloaded_gradients: state(point.gradients, &pins.offloaded_gradients),
            updates: if point.updates_on_host { Space::Host } else { Space::Device },
            order: point.order,
            layers_per_lap: point.layers_per_lap,
            sharding: self.sharding,
            head_pieces: pins.head_pieces.unwrap_or(head_pieces),
            window_bytes: pins.window_bytes.unwrap_or(window_bytes),
            tables_offloaded: point.tables,
            recompute,
            offloaded_activations,
            offloaded_weights,
            embedding_offloaded,
        };
        policy.on(self.device)
    }

    /// Tokens of the tile to try: a fourth of the micro-batch, if that leaves matmuls enough rows. Smaller tiles save
    /// nothing, because attention then needs more memory than a tile, and every tile adds steps to the plan.
    fn tile(&self) -> Option<usize> {
        let fewest = match self.device {
            DeviceKind::Cpu => 256,
            DeviceKind::Cuda => 2048,
        };
        let size = self.tokens.div_ceil(4).next_multiple_of(128);
        Some(size).filter(|size| *size >= fewest && *size < self.tokens)
    }
}

/// Rungs of ladders.
impl Freedom<'_> {
    /// The first two rungs. Looking up rows of an offloaded embedding costs next to nothing, because they are few.
    pub fn first_rungs(&self, loss_chunk: usize) -> [Point; 2] {
        let start = self.start_with(loss_chunk);
        [start, Point { embedding: self.has_own_embedding, ..start }]
    }

    pub fn with_recomputed(&self, loss_chunk: usize, recomputed: usize) -> Point {
        Point { recomputed, ..self.start_with(loss_chunk) }
    }

    /// Recomputes more and more layers, then offloads their inputs.
    pub fn recompute_rungs(&self, from: Point, most: usize) -> Vec<Vec<Point>> {
        let counts = (1..=most).map(|recomputed| Point { recomputed, ..from });
        vec![counts.collect(), vec![Point { recomputed: most, activations: Offload::OfRecomputed, ..from }]]
    }

    pub fn tile_rungs(&self, from: Point) -> Vec<Vec<Point>> {
        vec![self.tile().map(|tokens| Point { tile_tokens: Some(tokens), ..from }).into_iter().collect()]
    }

    /// Offloads the weights of more and more layers, then embedding and head, then fetches the head in pieces.
    pub fn stream_rungs(&self, from: Point) -> Vec<Vec<Point>> {
        let counts = (1..=self.layers).map(|weights| Point { weights, ..from });
        let tables = Point { weights: self.layers, tables: true, ..from };
        vec![counts.collect(), vec![tables], vec![Point { split_head: true, ..tables }]]
    }

    /// Offloads optimizer state, then gradients, then shrinks the window to nothing.
    pub fn last_rungs(&self, from: Point) -> Vec<Point> {
        let moments = Point { optimizer_state: true, ..from };
        let offloaded = Point { gradients: self.trains_base, ..moments };
        vec![moments, offloaded, offloaded.with_window(0)]
    }

    /// The start with the recompute and tiles of a rung, but without its offloading.
    pub fn without_offload(&self, rung: Point) -> Point {
        let Point { loss_chunk, recomputed, tile_tokens, .. } = rung;
        Point { recomputed, tile_tokens, ..self.start_with(loss_chunk) }
    }
}

/// How a search for the leanest policy varies points.
impl Freedom<'_> {
    /// Activations recomputed, offloaded, or both, whole or in tiles.
    pub fn variants_of_activations(&self, first: Point) -> Vec<Point> {
        let counts = [self.layers, self.layers.saturating_sub(1), 0];
        let mut all = Vec::new();
        for tile_tokens in [first.tile_tokens, None] {
            for activations in [Offload::OfRecomputed, Offload::All] {
                all.extend(counts.map(|recomputed| Point { recomputed, activations, tile_tokens, ..first }));
            }
        }
        // Without either, a point is never the leanest.
        all.retain(|point| point.recomputed > 0 || point.activations == Offload::All);
        all
    }

    /// Points with little offloaded, for models so small that a transfer needs more memory than it saves.
    pub fn little_offloaded(&self) -> Vec<Point> {
        let start = self.start_with(self.fewest_rows());
        let here = Point { recomputed: self.layers.saturating_sub(1), ..start };
        let weights = Point { weights: self.layers, window_layers: 0, ..here };
        vec![here, Point { embedding: self.has_own_embedding, ..here }, weights]
    }

    /// Points with other values of one choice, given by `axis`; for a number of layers, only the ends. A large model needs
    /// only the first [`Freedom::AXES_OF_LARGE`]: everything is offloaded already, and activations were varied before.
    pub fn lean_variants(&self, axis: usize, point: Point, chunks: &[usize]) -> Vec<Point> {
        match axis {
            0 => {
                let tables = Point { tables: true, split_head: false, embedding: false, ..point };
                let here = Point { tables: false, ..tables };
                let split = Point { split_head: self.head_pieces > 1, ..tables };
                vec![tables, split, here, Point { embedding: self.has_own_embedding, ..here }]
            }
            1 => chunks.iter().map(|chunk| Point { loss_chunk: *chunk, ..point }).collect(),
            2 => {
                let counts = [self.layers, self.layers.saturating_sub(1), point.recomputed / 2, 0];
                counts.map(|recomputed| Point { recomputed, ..point }).to_vec()
            }
            3 => {
                let all = [Offload::None, Offload::OfRecomputed, Offload::All];
                all.map(|activations| Point { activations, ..point }).to_vec()
            }
            4 => [self.layers, 0].map(|weights| Point { weights, ..point }).to_vec(),
            5 => {
                let state = [(false, false), (true, false), (true, true)];
                let with = |(optimizer_state, gradients)| Point { optimizer_state, gradients, ..point };
                state.map(with).to_vec()
            }
            6 => [None, self.tile()].map(|tile_tokens| Point { tile_tokens, ..point }).to_vec(),
            _ => [0, 1].map(|window_layers| point.with_window(window_layers)).to_vec(),
        }
    }

    pub const AXES: usize = 8;
    pub const AXES_OF_LARGE: usize = 2;
}

/// How a search for the fastest policy varies a point, except for numbers of layers (`counts.rs`).
impl Freedom<'_> {
    pub fn axes(&self, point: Point) -> Vec<Axis> {
        let pins = self.pins;
        let windows = match point.streams() {
            true => vec![0, 1, USUAL_WINDOW, 2 * USUAL_WINDOW],
            false => vec![point.window_layers],
        };
        let tiles = [None].into_iter().chain(self.tile().map(Some));
        let usual = [Offload::None, Offload::OfRecomputed, Offload::All];
        let own = Some(point.activations).filter(|own| !usual.contains(own));
        let offloads = usual.into_iter().chain(own);
        let has_embedding = self.has_own_embedding && !point.tables;
        let can_split = self.head_pieces > 1 && point.tables;
        let has_offloaded_inputs = point.order == Order::Breadth && point.activations != Offload::None;
        let flags = [false, true];
        macro_rules! axis {
            ($choice:ident in $values:expr, if $is_open:expr) => {{
                let points = $values.into_iter().map(|$choice| Point { $choice, ..point });
                let open = points.filter(|other| $is_open || *other == point).collect();
                Axis { copy: |to, from| to.$choice = from.$choice, points: open }
            }};
        }
        let all = vec![
            axis!(embedding in flags, if embedding_is_open(pins) && has_embedding),
            axis!(tile_tokens in tiles, if pins.tile_tokens.is_none()),
            axis!(tables in flags, if tables_are_open(pins)),
            axis!(split_head in flags, if pins.head_pieces.is_none() && can_split),
            axis!(activations in offloads, if activations_are_open(pins)),
            axis!(optimizer_state in flags, if pins.optimizer_state.is_none()),
            axis!(gradients in flags, if pins.gradients.is_none() && self.trains_base),
            axis!(window_layers in windows, if pins.window_bytes.is_none()),
            axis!(layers_per_lap in self.lap_sizes(), if has_offloaded_inputs),
            axis!(loss_chunk in self.chunks.iter().copied(), if pins.loss_chunk.is_none()),
        ];
        all.into_iter().filter(|axis| !axis.points.is_empty()).collect()
    }
}

/// A key for the graph after the compute passes of `stages.rs`: policies with the same key have the same graph. Tiles
/// also depend on the number of tokens.
pub fn compute_key(policy: &Policy, extent: &Extent) -> (Policy, Option<usize>) {
    let Policy { recompute, tile_tokens, order, layers_per_lap, .. } = policy.clone();
    let tokens = tile_tokens.map(|_| extent.tokens);
    let (order, layers_per_lap) =
        if layers_per_lap > 1 { (order, layers_per_lap) } else { Default::default() };
    (Policy { recompute, tile_tokens, order, layers_per_lap, ..Policy::default() }, tokens)
}
