//! The memory choices of a run: one type from recipe to report.
//!
//! A [`Policy`] says how a plan uses memory. Checkpoints store it and `plan.json` shows it, both under the JSON names given
//! here; a name after `or` is that of versions before 0.17. [`Pins`] is the same list with every choice optional: what a
//! recipe fixes; the solver chooses the rest.
//! No choice changes what is computed; tiles and a split head change the order of sums, so results differ by rounding.
//! A field belongs to the [`Choice`] that the list names after `of`. Code that explains choices goes by [`Choice`] and needs
//! no field names. To add a choice: a line in the list below, a pass that carries it out, its place in the search
//! (`smidgen-compile/src/solve/choices.rs`), its recipe key and its words in `report/choices.rs`.

use crate::graph::Space;
use crate::plan::DeviceKind;
use serde::{Deserialize, Serialize};

macro_rules! explained_choices {
    ($($(#[$about:meta])* $name:ident: $part:ident,)+) => {
        /// A decision that plans explain, made of one or several fields of a [`Policy`]; plans list them in this order.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Choice {
            $($(#[$about])* $name,)+
        }

        impl Choice {
            pub const ALL: &[Choice] = &[$(Choice::$name,)+];

            /// The part of the work that the choice is about; work without that part does not have the choice.
            pub fn part(self) -> Part {
                match self {
                    $(Choice::$name => Part::$part,)+
                }
            }
        }
    };
}

explained_choices! {
    Recompute: Training,
    MicroBatch: Loss,
    LossChunk: Loss,
    Tiles: Loss,
    /// Weights of layers, or embedding and head.
    Weights: Forward,
    HeadPieces: Forward,
    /// The embedding alone.
    Embedding: Forward,
    Activations: Training,
    OptimizerState: Training,
    /// Gradients of trained weights.
    Gradients: Training,
    /// Depth-first or breadth-first.
    Order: Training,
    /// How many layers a lap of breadth-first order has.
    Laps: Training,
    /// Whether optimizer updates run on the host.
    Updates: Training,
    /// What is divided over ranks.
    Sharding: Forward,
}

/// Parts of the work of a run; a run that has one also has those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    Forward,
    Loss,
    /// Backward and update.
    Training,
}

macro_rules! memory_choices {
    ($($(#[$about:meta])* $name:ident: $chosen:ty, pin $pinned:ty, json $json:literal $(or $earlier:literal)? $(, of $choice:ident)?;)+) => {
        /// Every memory choice of a plan.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Policy {
            $($(#[$about])* #[serde(rename = $json $(, alias = $earlier)?)] pub $name: $chosen,)+
        }

        /// The memory choices that a recipe fixes; the solver makes those that are `None`.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct Pins {
            $($(#[$about])* pub $name: Option<$pinned>,)+
        }

        impl Pins {
            /// Whether nothing is left to the solver.
            pub fn is_complete(&self) -> bool {
                [$(self.$name.is_some()),+].into_iter().all(|is_pinned| is_pinned)
            }

            /// Whether any field of a choice is fixed.
            pub fn sets(&self, choice: Choice) -> bool {
                [$($((Choice::$choice, self.$name.is_some()),)?)+].contains(&(choice, true))
            }

            /// Whether `others` fix a choice differently.
            pub fn differ_in(&self, others: &Pins, choice: Choice) -> bool {
                [$($((Choice::$choice, self.$name != others.$name),)?)+].contains(&(choice, true))
            }

            /// These pins with one choice left to the solver.
            pub fn without_pin(&self, choice: Choice) -> Pins {
                let mut pins = self.clone();
                $($(if choice == Choice::$choice { pins.$name = None; })?)+
                pins
            }

            /// These pins with one choice fixed to the value that it has when it is not used; the loss chunk is then 1 row.
            pub fn without(&self, choice: Choice) -> Pins {
                let (mut pins, unused) = (self.clone(), Pins::from(Policy::resident(LayerSet::none(), 1)));
                $($(if choice == Choice::$choice { pins.$name = unused.$name; })?)+
                pins
            }
        }

        impl Policy {
            fn reset(&mut self, choice: Choice) {
                $($(if choice == Choice::$choice { self.$name = Default::default(); })?)+
            }
        }

        /// Pins every choice to what a policy says.
        impl From<Policy> for Pins {
            fn from(policy: Policy) -> Pins {
                Pins { $($name: Some(policy.$name.into())),+ }
            }
        }
    };
}

memory_choices! {
    /// Most tokens in a micro-batch.
    micro_tokens: usize, pin usize, json "micro_tokens", of MicroBatch;
    /// Layers whose activations are recomputed in the backward pass.
    recompute: LayerSet, pin LayerRule, json "recompute", of Recompute;
    /// Rows whose logits exist at the same time.
    loss_chunk: usize, pin usize, json "loss_chunk", of LossChunk;
    /// Tokens that a feed-forward block processes at the same time; `None` means the whole micro-batch.
    tile_tokens: Option<usize>, pin Option<usize>, json "tile_tokens", of Tiles;
    /// The memory space of offloaded activations.
    activations: Space, pin Space, json "activations", of Activations;
    /// Layers whose activations are offloaded.
    offloaded_activations: LayerSet, pin LayerRule, json "activations_offloaded" or "activations_away", of Activations;
    /// The memory space of offloaded weights.
    weights: Space, pin Space, json "weights", of Weights;
    /// Layers whose weights are offloaded.
    offloaded_weights: LayerSet, pin LayerRule, json "weights_offloaded" or "weights_away", of Weights;
    /// Whether the embedding is offloaded. Its rows are then looked up in place, unless it is also the head.
    embedding_offloaded: bool, pin bool, json "embedding_offloaded" or "embedding_away", of Embedding;
    /// Whether embedding and head are both offloaded.
    tables_offloaded: bool, pin bool, json "tables_offloaded" or "tables_away", of Weights;
    /// Pieces in which an offloaded head is fetched; below 2 it is fetched whole.
    head_pieces: usize, pin usize, json "head_pieces", of HeadPieces;
    /// The memory space of offloaded optimizer state (AdamW's moments).
    optimizer_state: Space, pin Space, json "optimizer_state", of OptimizerState;
    /// Layers whose optimizer state is offloaded; an empty set means all of them, embedding and head included.
    offloaded_moments: LayerSet, pin LayerRule, json "optimizer_state_offloaded" or "optimizer_state_away", of OptimizerState;
    /// The memory space of offloaded gradients of trained weights.
    gradients: Space, pin Space, json "gradients", of Gradients;
    /// Layers whose gradients are offloaded; an empty set means all of them, embedding and head included.
    offloaded_gradients: LayerSet, pin LayerRule, json "gradients_offloaded" or "gradients_away", of Gradients;
    /// Where offloaded parameters are updated: on the device, or on the host if all of their tensors are in host memory.
    updates: Space, pin Space, json "updates", of Updates;
    /// Whether a step finishes one micro-batch after the other or one layer after the other.
    order: Order, pin Order, json "order", of Order;
    /// Layers per lap in breadth-first order; 0 means 1. Only the first layer of a lap keeps its input.
    layers_per_lap: usize, pin usize, json "layers_per_lap", of Laps;
    /// What is divided over ranks. If weights are, the offloaded ones are gathered from the other ranks instead of fetched
    /// from host memory.
    sharding: Sharding, pin Sharding, json "shard", of Sharding;
    /// Bytes of offloaded weights, prefetched ones included, that may be on the device at the same time. What a single
    /// operation needs may exceed it.
    window_bytes: usize, pin usize, json "window_bytes";
}

impl Policy {
    /// Keeps everything on the device and recomputes these layers.
    pub fn resident(recompute: LayerSet, loss_chunk: usize) -> Policy {
        Policy { recompute, loss_chunk, ..Policy::default() }
    }

    /// Whether the policy saves no memory: it neither recomputes nor tiles nor offloads.
    pub fn saves_nothing(&self) -> bool {
        !self.offloads() && self.recompute.is_empty() && self.tile_tokens.is_none()
    }

    /// Whether anything is offloaded.
    pub fn offloads(&self) -> bool {
        self.streams() || self.embedding_offloaded || self.offloads_activations()
    }

    /// Whether weights, moments or gradients are fetched through the window.
    pub fn streams(&self) -> bool {
        self.tables_offloaded
            || !self.offloaded_weights.is_empty()
            || self.optimizer_state != Space::Device
            || self.gradients != Space::Device
    }

    /// Whether the optimizer state of a layer is offloaded, or of what is outside the layers.
    pub fn offloads_moments_of(&self, layer: Option<usize>) -> bool {
        self.optimizer_state != Space::Device && includes(&self.offloaded_moments, layer)
    }

    /// Whether the gradients of trained weights of a layer are offloaded, or of those outside the layers.
    pub fn offloads_gradients_of(&self, layer: Option<usize>) -> bool {
        self.gradients != Space::Device && includes(&self.offloaded_gradients, layer)
    }

    /// Whether all micro-batches pass a layer before the next one begins.
    pub fn is_breadth_first(&self) -> bool {
        self.order == Order::Breadth
    }

    /// The lap that a layer is in, if there are laps.
    pub fn lap_of(&self, layer: usize) -> Option<usize> {
        self.is_breadth_first().then(|| layer / self.layers_per_lap.max(1))
    }

    pub fn offloads_activations(&self) -> bool {
        !self.offloaded_activations.is_empty()
    }

    /// The memory space that holds the activations of a layer until the backward pass.
    pub fn space_of_activations(&self, layer: usize) -> Space {
        if self.offloaded_activations.contains(layer) { self.activations } else { Space::Device }
    }

    /// Whether the embedding is offloaded, the head, or a table that is both.
    pub fn offloads_table(&self, is_embedding: bool, is_head: bool) -> bool {
        ((is_embedding || is_head) && self.tables_offloaded)
            || (is_embedding && !is_head && self.embedding_offloaded)
    }

    /// Whether at least this is divided over ranks.
    pub fn divides(&self, sharding: Sharding) -> bool {
        self.sharding >= sharding
    }

    /// Whether gradients of any trained weights are offloaded.
    pub fn offloads_gradients(&self) -> bool {
        self.gradients != Space::Device
    }

    /// Whether each rank keeps only its rows of a gradient. If each updates only its own rows, it offloads no others.
    pub fn divides_gradients(&self) -> bool {
        let offloads_own = self.divides(Sharding::Moments) && self.offloads_gradients();
        offloads_own || self.divides(Sharding::Gradients)
    }

    /// The policy without one choice, or `None` if the choice is not used or cannot be undone alone.
    pub fn without(&self, choice: Choice) -> Option<Policy> {
        let mut other = self.clone();
        match choice {
            Choice::MicroBatch | Choice::LossChunk => {}
            Choice::Weights => {
                other.offloaded_weights = LayerSet::none();
                if self.tables_offloaded {
                    (other.tables_offloaded, other.embedding_offloaded) = (false, false);
                    other.reset(Choice::HeadPieces);
                }
            }
            Choice::Embedding => other.embedding_offloaded = self.tables_offloaded,
            Choice::Order => [Choice::Order, Choice::Laps].into_iter().for_each(|choice| other.reset(choice)),
            Choice::Laps => other.layers_per_lap = self.layers_per_lap.min(1),
            // Weights that are not divided would need another place.
            Choice::Sharding if self.divides(Sharding::Weights) => {}
            _ => other.reset(choice),
        }
        (other != *self).then_some(other)
    }

    /// This policy with half the tokens per micro-batch, but at least `fewest`; `None` if it has no more than these.
    pub fn with_halved_micro_batches(&self, fewest: usize) -> Option<Policy> {
        let micro_tokens = (self.micro_tokens / 2).max(fewest);
        (self.micro_tokens > fewest).then(|| Policy { micro_tokens, ..self.clone() })
    }

    /// This policy with all weights in host memory, the head in pieces, and a window for prefetched weights.
    pub fn with_all_weights_offloaded(
        self,
        layers: usize,
        head_pieces: usize,
        window_bytes: usize,
    ) -> Policy {
        Policy {
            weights: Space::Host,
            offloaded_weights: LayerSet::all(layers),
            embedding_offloaded: true,
            tables_offloaded: true,
            head_pieces,
            window_bytes,
            ..self
        }
    }

    /// This policy with every memory space replaced by the one that the device uses for it; see [`DeviceKind::resolve`].
    pub fn on(mut self, device: DeviceKind) -> Policy {
        let Policy { activations, weights, optimizer_state, gradients, .. } = &mut self;
        for space in [activations, weights, optimizer_state, gradients] {
            *space = device.resolve(*space);
        }
        self
    }
}

impl Pins {
    /// Whether a choice is fixed, by its own fields or by those of another choice.
    pub fn is_pinned(&self, choice: Choice) -> bool {
        let is_of_tables = choice == Choice::Embedding
            && (self.tables_offloaded.is_some() || self.weights == Some(Space::Device));
        is_of_tables || self.sets(choice)
    }

    /// The memory space that is fixed for the tensors of a choice.
    pub fn space_of(&self, choice: Choice) -> Option<Space> {
        match choice {
            Choice::Activations => self.activations,
            Choice::Weights => self.weights,
            Choice::OptimizerState => self.optimizer_state,
            Choice::Gradients => self.gradients,
            _ => None,
        }
    }

    /// These pins with a memory space for the tensors of a choice; `None` if one is fixed already.
    pub fn with_space_of(&self, choice: Choice, space: Space) -> Option<Pins> {
        let (space, pins) = (Some(space), self.clone());
        let pins = match choice {
            Choice::Activations => Pins { activations: space, ..pins },
            Choice::Weights => Pins { weights: space, ..pins },
            Choice::OptimizerState => Pins { optimizer_state: space, ..pins },
            Choice::Gradients => Pins { gradients: space, ..pins },
            _ => return None,
        };
        self.space_of(choice).is_none().then_some(pins)
    }

    /// Whether a choice is fixed to a value with which plans may need more memory.
    pub fn keep_on_device(&self, choice: Choice) -> bool {
        let is_part =
            choice == Choice::Weights && matches!(self.offloaded_weights, Some(LayerRule::Share(_)));
        let is_recompute = choice == Choice::Recompute && self.sets(choice);
        is_part || is_recompute || self.space_of(choice) == Some(Space::Device)
    }

    /// The layers to recompute, if they are given as a list.
    pub fn recompute_list(&mut self) -> Option<&mut Vec<usize>> {
        match &mut self.recompute {
            Some(LayerRule::List(list)) => Some(list),
            _ => None,
        }
    }

    /// These pins with `sharding` fixed; `all_weights` divides the weights of every layer, embedding and head included.
    pub fn with_divided(&self, sharding: Sharding, all_weights: bool) -> Pins {
        let mut pins = Pins { sharding: Some(sharding), ..self.clone() };
        if all_weights {
            pins.offloaded_weights.get_or_insert(LayerRule::All);
            pins.tables_offloaded.get_or_insert(true);
        }
        pins
    }
}

/// Whether a set includes a layer. An empty set means all layers; tensors outside the layers are always included.
fn includes(layers: &LayerSet, layer: Option<usize>) -> bool {
    layers.is_empty() || layer.is_none_or(|layer| layers.contains(layer))
}

/// How checkpoints of version 1 describe offloaded tensors; later versions store it in the policy.
#[derive(Deserialize)]
pub struct OffloadV1 {
    weights: Vec<usize>,
    #[serde(default)]
    embedding: bool,
    tables: bool,
    #[serde(default)]
    on_disk: bool,
    #[serde(default)]
    head_pieces: usize,
    activations: Vec<usize>,
    moments: bool,
    window_bytes: usize,
}

impl OffloadV1 {
    pub fn added_to(self, policy: Policy) -> Policy {
        let space = |is_used: bool| if is_used { Space::Host } else { Space::Device };
        let has_weights = !self.weights.is_empty() || self.embedding || self.tables;
        Policy {
            weights: if self.on_disk { Space::Disk } else { space(has_weights) },
            offloaded_weights: self.weights.into_iter().collect(),
            embedding_offloaded: self.embedding || self.tables,
            tables_offloaded: self.tables,
            head_pieces: self.head_pieces,
            activations: space(!self.activations.is_empty()),
            offloaded_activations: self.activations.into_iter().collect(),
            optimizer_state: space(self.moments),
            window_bytes: self.window_bytes,
            ..policy
        }
    }
}

/// The order of work in an optimizer step. Sums are formed in the same order in both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// A micro-batch passes all layers, forward and backward, before the next one begins.
    #[default]
    Depth,
    /// All micro-batches pass a layer before the next layer begins, so the weights of a layer are fetched once per pass.
    Breadth,
}

impl Order {
    pub const ALL: [Order; 2] = [Order::Depth, Order::Breadth];

    pub fn name(self) -> &'static str {
        match self {
            Order::Depth => "depth",
            Order::Breadth => "breadth",
        }
    }
}

/// What is divided over ranks; each includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharding {
    #[default]
    None,
    /// AdamW's moments: a rank updates its own rows and receives the other rows from the other ranks.
    Moments,
    /// Gradients too: those of a layer are summed right after its backward pass, and each rank keeps its rows.
    Gradients,
    /// Weights too, frozen and trained: a layer is gathered before it is used.
    Weights,
}

impl Sharding {
    pub const ALL: [Sharding; 4] =
        [Sharding::None, Sharding::Moments, Sharding::Gradients, Sharding::Weights];

    pub fn name(self) -> &'static str {
        match self {
            Sharding::None => "none",
            Sharding::Moments => "moments",
            Sharding::Gradients => "gradients",
            Sharding::Weights => "weights",
        }
    }
}

/// Layers of a model, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerSet(Vec<usize>);

impl LayerSet {
    pub fn none() -> LayerSet {
        LayerSet::default()
    }

    pub fn all(layers: usize) -> LayerSet {
        LayerSet::first(layers)
    }

    pub fn first(count: usize) -> LayerSet {
        LayerSet((0..count).collect())
    }

    /// Layers 0, n, 2n ...
    pub fn every(n: usize, layers: usize) -> LayerSet {
        LayerSet((0..layers).step_by(n).collect())
    }

    /// `count` of `layers` layers, spread evenly: each can then be fetched while several others are computed.
    pub fn spread(count: usize, layers: usize) -> LayerSet {
        (0..layers).filter(|layer| (layer + 1) * count / layers > layer * count / layers).collect()
    }

    /// The same pattern counted from the last layer.
    pub fn mirrored(&self, layers: usize) -> LayerSet {
        self.0.iter().map(|layer| layers - 1 - layer).collect()
    }

    pub fn contains(&self, layer: usize) -> bool {
        self.0.binary_search(&layer).is_ok()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }

    pub fn last(&self) -> Option<usize> {
        self.0.last().copied()
    }
}

impl FromIterator<usize> for LayerSet {
    fn from_iter<I: IntoIterator<Item = usize>>(layers: I) -> LayerSet {
        let mut layers: Vec<usize> = layers.into_iter().collect();
        layers.sort_unstable();
        layers.dedup();
        LayerSet(layers)
    }
}

/// Which layers a choice applies to, stated before the model is known.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerRule {
    None,
    All,
    /// Layers 0, n, 2n ...
    Every(usize),
    /// A share of the layers, above 0 and at most 1, spread evenly.
    Share(f64),
    /// Layers counted from 0, in any order.
    List(Vec<usize>),
}

impl LayerRule {
    /// The set of layers, for a model with this many.
    pub fn layers(&self, layers: usize) -> LayerSet {
        match self {
            LayerRule::None => LayerSet::none(),
            LayerRule::All => LayerSet::all(layers),
            LayerRule::Every(n) => LayerSet::every(*n, layers),
            LayerRule::Share(share) => LayerSet::spread((share * layers as f64).round() as usize, layers),
            LayerRule::List(list) => list.iter().copied().collect(),
        }
    }
}

impl From<LayerSet> for LayerRule {
    fn from(layers: LayerSet) -> LayerRule {
        LayerRule::List(layers.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_spread_evenly() {
        assert_eq!(LayerSet::spread(2, 6), [2, 5].into_iter().collect());
        assert_eq!(LayerSet::spread(2, 6).mirrored(6), [0, 3].into_iter().collect());
        assert_eq!(LayerSet::spread(6, 6), LayerSet::all(6));
        assert_eq!(LayerSet::spread(0, 6), LayerSet::none());
    }

    #[test]
    fn a_rule_names_layers_of_a_model() {
        let layers = |rule: LayerRule| rule.layers(5);
        assert_eq!(layers(LayerRule::Every(2)), [0, 2, 4].into_iter().collect());
        assert_eq!(layers(LayerRule::Share(0.5)).len(), 3);
        assert_eq!(layers(LayerRule::List(vec![3, 1, 3])), [1, 3].into_iter().collect());
        assert_eq!(layers(LayerRule::from(LayerSet::first(2))), LayerSet::first(2));
    }

    #[test]
    fn pins_of_a_policy_leave_nothing_open() {
        let pins = Pins::from(Policy::resident(LayerSet::first(2), 64));
        assert!(pins.is_complete() && !Pins::default().is_complete());
        assert!(!Pins { window_bytes: None, ..pins }.is_complete());
    }

    #[test]
    fn layers_of_a_lap_are_neighbours() {
        let laps = |policy: Policy| [0, 1, 2].map(|layer| policy.lap_of(layer));
        let single = Policy { order: Order::Breadth, ..Policy::default() };
        let pairs = Policy { layers_per_lap: 2, ..single.clone() };
        assert_eq!(laps(single), [Some(0), Some(1), Some(2)]);
        assert_eq!(laps(pairs.clone()), [Some(0), Some(0), Some(1)]);
        assert_eq!(laps(Policy { order: Order::Depth, ..pairs }), [None; 3]);
    }

    #[test]
    fn a_cpu_offloads_to_disk() {
        let host = Policy { weights: Space::Host, activations: Space::Device, ..Policy::default() };
        assert_eq!(host.clone().on(DeviceKind::Cuda), host);
        assert_eq!(host.clone().on(DeviceKind::Cpu), Policy { weights: Space::Disk, ..host });
    }
}
