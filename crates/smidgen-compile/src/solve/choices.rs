//! What the pins leave to the solver at one size of micro-batch, and the values of each memory choice that it tries.
//!
//! Searches change a [`Policy`] field by field without asking what is pinned or what applies; [`Freedom::obeyed`] turns the
//! result into a policy that obeys the pins and has no choice that is not in use. Everything that the search knows about a
//! single choice is in this file: the first value, the values to try, when it applies, and which pins are refused.

use super::offloaded_weights::layer_bytes;
use super::question::Demand;
use crate::passes::head_pieces;
use crate::request::{Master, Request, loss_chunks};
use smidgen_ir::policy::{LayerRule, LayerSet, Order, Pins, Policy, Sharding};
use smidgen_ir::{DeviceKind, Extent, Space};

/// Layers of offloaded weights that may be on the device at the same time, if memory allows: one is used while the next is
/// fetched.
pub const USUAL_WINDOW: usize = 2;

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

/// What the pins leave to the solver at one size of micro-batch.
#[derive(Clone, Debug)]
pub struct Freedom<'a> {
    pub pins: &'a Pins,
    pub layers: usize,
    micro_tokens: usize,
    tokens: usize,
    /// Chunks of the loss in rows, largest first.
    chunks: Vec<usize>,
    /// Bytes on the device of the largest layer of fetched weights.
    layer_bytes: usize,
    has_own_embedding: bool,
    /// Pieces in which the head can be fetched; 0 if it must be fetched whole.
    pub head_pieces: usize,
    pub head_bytes: usize,
    device: DeviceKind,
    sharding: Sharding,
    /// Whether weights of the base are trained. Their gradients may be offloaded.
    pub trains_base: bool,
    /// Whether breadth-first order is possible.
    has_laps: bool,
    /// Whether updates can run on the host: the device is a GPU, and trained weights are in f32.
    has_host_updates: bool,
}

impl<'a> Freedom<'a> {
    /// `request` must have the extent of the demand.
    pub fn of(request: &Request, demand: &Demand, pins: &'a Pins) -> Freedom<'a> {
        let sharding =
            if request.rank.is_only() { Sharding::None } else { pins.sharding.unwrap_or_default() };
        Freedom {
            pins,
            layers: request.layers(),
            micro_tokens: demand.micro_tokens,
            tokens: demand.extent.tokens,
            chunks: loss_chunks(request, pins),
            layer_bytes: layer_bytes(request, sharding == Sharding::Weights).into_iter().max().unwrap_or(0),
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

    /// Whether a pin names layers.
    pub fn pins_layers(&self) -> bool {
        let Pins { recompute, offloaded_weights, offloaded_activations, .. } = self.pins;
        recompute.is_some() || offloaded_weights.is_some() || offloaded_activations.is_some()
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

    /// Chunks of the loss in rows, largest first.
    pub fn chunks(&self) -> &[usize] {
        &self.chunks
    }

    pub fn fewest_rows(&self) -> usize {
        self.chunks[self.chunks.len() - 1]
    }

    /// Bytes of a window of this many layers.
    pub fn window(&self, layers: usize) -> usize {
        layers * self.layer_bytes
    }

    /// Tokens of the tile to try: a fourth of the micro-batch, if that leaves matmuls enough rows. Smaller tiles save
    /// nothing, because attention then needs more memory than a tile, and every tile adds steps to the plan.
    pub fn tile(&self) -> Option<usize> {
        let fewest = match self.device {
            DeviceKind::Cpu => 256,
            DeviceKind::Cuda => 2048,
        };
        let size = self.tokens.div_ceil(4).next_multiple_of(128);
        Some(size).filter(|size| *size >= fewest && *size < self.tokens)
    }

    /// Everything on the device as far as the pins allow: the fastest policy.
    pub fn resident(&self) -> Policy {
        self.obeyed(self.first())
    }

    /// The resident policy before the pins, with a window for whatever will be offloaded.
    pub fn first(&self) -> Policy {
        let window_bytes = self.window(USUAL_WINDOW);
        Policy { loss_chunk: self.chunks[0], window_bytes, ..Policy::default() }
    }

    /// The policy that needs the least memory in almost every model.
    pub fn usually_leanest(&self) -> Policy {
        let recompute = LayerSet::first(self.layers.saturating_sub(1));
        self.obeyed(Policy {
            loss_chunk: self.fewest_rows(),
            activations: Space::Host,
            offloaded_activations: recompute.clone(),
            recompute,
            offloaded_weights: LayerSet::all(self.layers),
            tables_offloaded: true,
            head_pieces: self.head_pieces,
            optimizer_state: Space::Host,
            gradients: Space::Host,
            tile_tokens: self.tile(),
            ..Policy::default()
        })
    }

    /// A policy of another size at this one: chunks and tiles depend on the size.
    pub fn at_this_size(&self, policy: Policy) -> Policy {
        let tile_tokens = policy.tile_tokens.and(self.tile());
        self.obeyed(Policy { loss_chunk: self.fewest_rows(), tile_tokens, ..policy })
    }

    /// A policy in breadth-first order before the pins: every layer is recomputed from its input, and weights are offloaded,
    /// trained ones with their gradients and optimizer state.
    pub fn breadth_first(&self, inputs: usize, window_layers: usize, layers_per_lap: usize) -> Policy {
        let state = if self.trains_base { Space::Host } else { Space::Device };
        let all = LayerSet::all(self.layers);
        let laps = LayerSet::spread(inputs.div_ceil(layers_per_lap), self.layers.div_ceil(layers_per_lap));
        Policy {
            recompute: all.clone(),
            offloaded_weights: all,
            tables_offloaded: self.trains_base,
            activations: Space::Host,
            offloaded_activations: (0..self.layers)
                .filter(|layer| laps.contains(layer / layers_per_lap))
                .collect(),
            optimizer_state: state,
            gradients: state,
            order: Order::Breadth,
            layers_per_lap,
            window_bytes: self.window(window_layers * layers_per_lap),
            ..self.first()
        }
    }

    /// This many layers with offloaded weights. In the middle of a step the link is busy with an offloaded head, so the last
    /// layer is then offloaded last.
    pub fn spread_weights(&self, count: usize, tables_offloaded: bool) -> LayerSet {
        let layers = LayerSet::spread(count, self.layers);
        if tables_offloaded { layers.mirrored(self.layers) } else { layers }
    }

    /// The policy adjusted to the pins, with nothing set that is not in use.
    pub fn obeyed(&self, policy: Policy) -> Policy {
        let (pins, layers) = (self.pins, self.layers);
        let is_offloaded = |space: Space| space != Space::Device;
        let ruled = |rule: &Option<LayerRule>, own: LayerSet| match rule {
            Some(rule) => rule.layers(layers),
            None => own,
        };
        // Divided weights stay on the device, and still count as offloaded here.
        let on_device = pins.weights == Some(Space::Device) && !self.gathers_weights();
        let tables_offloaded = !on_device && pins.tables_offloaded.unwrap_or(policy.tables_offloaded);
        let embedding_is_open =
            pins.embedding_offloaded.is_none() && pins.tables_offloaded.is_none() && !on_device;
        let embedding = if embedding_is_open {
            policy.embedding_offloaded
        } else {
            pins.embedding_offloaded == Some(true)
        };
        let offloaded_weights = match &pins.offloaded_weights {
            _ if on_device => LayerSet::none(),
            Some(rule @ LayerRule::Share(_)) => {
                self.spread_weights(rule.layers(layers).len(), tables_offloaded)
            }
            rule => ruled(rule, policy.offloaded_weights),
        };
        let recompute = ruled(&pins.recompute, policy.recompute);
        let offloaded_activations = if pins.activations == Some(Space::Device) {
            LayerSet::none()
        } else {
            ruled(&pins.offloaded_activations, policy.offloaded_activations)
        };
        let optimizer_state = is_offloaded(pins.optimizer_state.unwrap_or(policy.optimizer_state));
        let gradients = self.trains_base && is_offloaded(pins.gradients.unwrap_or(policy.gradients));
        let order = pins.order.filter(|_| self.has_laps).unwrap_or(policy.order);
        let tile_tokens = pins.tile_tokens.unwrap_or(policy.tile_tokens);
        let layers_per_lap = match order {
            Order::Depth => 0,
            // With tiles, laps of several layers round other sums than laps of one layer: only if both are pinned.
            Order::Breadth if tile_tokens.is_some() && pins.layers_per_lap.is_none() => 1,
            Order::Breadth => pins.layers_per_lap.unwrap_or(policy.layers_per_lap).clamp(1, layers.max(1)),
        };
        let updates_on_host = is_offloaded(pins.updates.unwrap_or(policy.updates))
            && order == Order::Breadth
            && self.has_host_updates
            && optimizer_state
            && gradients;
        // In laps the head is fetched once for all micro-batches.
        let splits_head = policy.head_pieces > 1 && tables_offloaded && order == Order::Depth;
        let has_weights =
            tables_offloaded || (embedding && self.has_own_embedding) || !offloaded_weights.is_empty();
        // Each rank offloads its rows of divided trained weights with their gradients and optimizer state, unless a space is
        // pinned. Its part of frozen ones stays on the device.
        let offloads_own_rows =
            self.trains_base && pins.weights.map_or(optimizer_state && gradients, is_offloaded);
        let space = |is_in_use: bool, pinned: Option<Space>| match pinned {
            _ if !is_in_use => Space::Device,
            Some(Space::Device) | None => Space::Host,
            Some(space) => space,
        };
        // A pinned memory space applies to all layers.
        let is_state_open = pins.offloaded_moments.is_none()
            && pins.offloaded_gradients.is_none()
            && pins.optimizer_state.is_none()
            && pins.gradients.is_none();
        let state_of = |is_in_use: bool, rule: &Option<LayerRule>, own: LayerSet| {
            let own = if is_state_open { own } else { LayerSet::none() };
            if is_in_use { ruled(rule, own) } else { LayerSet::none() }
        };
        let obeyed = Policy {
            micro_tokens: self.micro_tokens,
            loss_chunk: policy.loss_chunk,
            tile_tokens,
            activations: space(!offloaded_activations.is_empty(), pins.activations),
            weights: space(has_weights && (!self.gathers_weights() || offloads_own_rows), pins.weights),
            optimizer_state: space(optimizer_state, pins.optimizer_state),
            offloaded_moments: state_of(optimizer_state, &pins.offloaded_moments, policy.offloaded_moments),
            gradients: space(gradients, pins.gradients),
            offloaded_gradients: state_of(gradients, &pins.offloaded_gradients, policy.offloaded_gradients),
            updates: if updates_on_host { Space::Host } else { Space::Device },
            order,
            layers_per_lap,
            sharding: self.sharding,
            head_pieces: pins.head_pieces.unwrap_or(if splits_head { self.head_pieces } else { 0 }),
            window_bytes: 0,
            tables_offloaded,
            recompute,
            offloaded_activations,
            offloaded_weights,
            embedding_offloaded: tables_offloaded || (embedding && self.has_own_embedding),
        };
        let window_bytes = if obeyed.streams() { policy.window_bytes } else { 0 };
        Policy { window_bytes: pins.window_bytes.unwrap_or(window_bytes), ..obeyed }.on(self.device)
    }
}

/// The choices that are made once for all layers, as the search for the fastest policy combines them.
impl Freedom<'_> {
    /// Every combination that the pins allow, before the pins are obeyed. All keep the window even if nothing streams yet.
    pub fn combinations(&self) -> Vec<Policy> {
        let spaces = [Space::Device, Space::Host];
        let mut all = vec![self.first()];
        fn vary<T>(all: Vec<Policy>, values: &[T], with: impl Fn(&Policy, &T) -> Policy) -> Vec<Policy> {
            all.iter()
                .flat_map(|policy| values.iter().map(|value| with(policy, value)).collect::<Vec<_>>())
                .collect()
        }
        all = vary(all, &self.chunks, |policy, rows| Policy { loss_chunk: *rows, ..policy.clone() });
        let tables = [(false, false, 0), (true, false, 0), (true, true, 0), (true, true, self.head_pieces)];
        all = vary(all, &tables, |policy, (embedding_offloaded, tables_offloaded, head_pieces)| Policy {
            embedding_offloaded: *embedding_offloaded,
            tables_offloaded: *tables_offloaded,
            head_pieces: *head_pieces,
            ..policy.clone()
        });
        all = vary(all, &spaces, |policy, space| Policy { optimizer_state: *space, ..policy.clone() });
        all = vary(all, &spaces, |policy, space| Policy { gradients: *space, ..policy.clone() });
        all = vary(all, &[USUAL_WINDOW, 1, 0], |policy, window| Policy {
            window_bytes: self.window(*window),
            ..policy.clone()
        });
        // Those that are the same once the pins are obeyed are one.
        let mut seen: Vec<Policy> = Vec::new();
        all.retain(|policy| {
            let offloaded_weights = LayerSet::all(self.layers);
            let obeyed = self.obeyed(Policy { offloaded_weights, ..policy.clone() });
            let is_new = !seen.contains(&obeyed);
            seen.push(obeyed);
            is_new
        });
        all
    }

    /// Whether the weights of some layers may be offloaded, and which ones is open.
    pub fn may_offload_weights(&self) -> bool {
        let is_closed = self.pins.weights == Some(Space::Device) && !self.gathers_weights();
        self.pins.offloaded_weights.is_none() && !is_closed
    }
}

/// How a descent varies a policy.
impl Freedom<'_> {
    /// Activations recomputed, offloaded, or both, whole or in tiles.
    pub fn variants_of_activations(&self, first: &Policy) -> Vec<Policy> {
        let mut all = Vec::new();
        for tile_tokens in [first.tile_tokens, None] {
            for count in [self.layers, self.layers.saturating_sub(1), 0] {
                let recompute = LayerSet::first(count);
                // Without either, a policy is never the leanest.
                for offloaded in [recompute.clone(), LayerSet::all(self.layers)] {
                    all.extend((!offloaded.is_empty()).then(|| {
                        let with = Policy { tile_tokens, recompute: recompute.clone(), ..first.clone() };
                        self.obeyed(with_activations(with, offloaded))
                    }));
                }
            }
        }
        all
    }

    /// Policies with little offloaded, for models so small that a transfer needs more memory than it saves.
    pub fn little_offloaded(&self) -> Vec<Policy> {
        let recompute = LayerSet::first(self.layers.saturating_sub(1));
        let here = Policy { loss_chunk: self.fewest_rows(), recompute, ..self.first() };
        let embedding = Policy { embedding_offloaded: true, ..here.clone() };
        let weights =
            Policy { offloaded_weights: LayerSet::all(self.layers), window_bytes: 0, ..here.clone() };
        [here, embedding, weights].map(|policy| self.obeyed(policy)).to_vec()
    }

    /// Policies that differ in one choice, given by `axis`; for a set of layers, only the ends. A large model needs only the
    /// first [`Freedom::AXES_OF_LARGE`]: everything is offloaded already, and activations were varied before.
    pub fn variants(&self, axis: usize, policy: &Policy) -> Vec<Policy> {
        let layers = self.layers;
        let other = || policy.clone();
        let all: Vec<Policy> = match axis {
            0 => {
                let tables = Policy { tables_offloaded: true, head_pieces: 0, ..other() };
                let here = Policy { tables_offloaded: false, embedding_offloaded: false, ..tables.clone() };
                let split = Policy { head_pieces: self.head_pieces, ..tables.clone() };
                vec![tables, split, here.clone(), Policy { embedding_offloaded: true, ..here }]
            }
            1 => self.chunks.iter().map(|rows| Policy { loss_chunk: *rows, ..other() }).collect(),
            2 => {
                let counts = [layers, layers.saturating_sub(1), policy.recompute.len() / 2, 0];
                counts.map(|count| with_recomputed(other(), count)).to_vec()
            }
            3 => {
                let sets = [LayerSet::none(), policy.recompute.clone(), LayerSet::all(layers)];
                sets.map(|set| with_activations(other(), set)).to_vec()
            }
            4 => [LayerSet::all(layers), LayerSet::none()]
                .map(|offloaded_weights| Policy { offloaded_weights, ..other() })
                .to_vec(),
            5 => {
                let (here, host) = (Space::Device, Space::Host);
                [(here, here), (host, here), (host, host)]
                    .map(|(optimizer_state, gradients)| Policy { optimizer_state, gradients, ..other() })
                    .to_vec()
            }
            6 => [None, self.tile()].map(|tile_tokens| Policy { tile_tokens, ..other() }).to_vec(),
            _ => [0, 1, USUAL_WINDOW]
                .map(|layers| Policy { window_bytes: self.window(layers), ..other() })
                .to_vec(),
        };
        all.into_iter().map(|policy| self.obeyed(policy)).collect()
    }

    pub const AXES: usize = 8;
    pub const AXES_OF_LARGE: usize = 2;

    /// The two numbers of layers that can be varied step by step: recomputed ones, and ones with offloaded weights.
    pub fn count(&self, which: usize, policy: &Policy) -> usize {
        if which == 0 { policy.recompute.len() } else { policy.offloaded_weights.len() }
    }

    pub fn with_count(&self, which: usize, policy: &Policy, count: usize) -> Policy {
        self.obeyed(if which == 0 {
            with_recomputed(policy.clone(), count)
        } else {
            let offloaded_weights = self.spread_weights(count, policy.tables_offloaded);
            Policy { offloaded_weights, ..policy.clone() }
        })
    }
}

/// Recomputes the first layers. If exactly the inputs of recomputed layers are offloaded, that stays so.
fn with_recomputed(policy: Policy, count: usize) -> Policy {
    let recompute = LayerSet::first(count);
    let follows = policy.offloaded_activations == policy.recompute && !policy.recompute.is_empty();
    let offloaded = if follows { recompute.clone() } else { policy.offloaded_activations.clone() };
    with_activations(Policy { recompute, ..policy }, offloaded)
}

pub fn with_activations(policy: Policy, offloaded_activations: LayerSet) -> Policy {
    Policy { activations: Space::Host, offloaded_activations, ..policy }
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
