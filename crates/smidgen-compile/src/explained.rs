//! The memory choices that a plan explains: which are in use, which are pinned, which a purpose does not have, and a policy
//! without one of them.
//!
//! What the choices are and which points of a search they make is in `choices.rs`; the words are the caller's.

use crate::choices::{activations_are_open, embedding_is_open, tables_are_open, weights_are_open};
use crate::request::Purpose;
use smidgen_ir::Space;
use smidgen_ir::policy::{LayerRule, LayerSet, Order, Pins, Policy, Sharding};

/// The memory choices that a plan explains, in the order in which it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Recompute,
    MicroBatch,
    LossChunk,
    Tiles,
    /// Weights of layers, or embedding and head.
    Weights,
    HeadPieces,
    /// The embedding alone.
    Embedding,
    Activations,
    OptimizerState,
    /// Gradients of trained weights.
    Gradients,
    /// Breadth-first.
    Order,
    /// Several layers in a lap of breadth-first order.
    Laps,
    /// Updates on the host.
    Updates,
    /// What is divided over ranks.
    Sharding,
}

impl Choice {
    const ALL: [Choice; 14] = [
        Choice::Recompute,
        Choice::MicroBatch,
        Choice::LossChunk,
        Choice::Tiles,
        Choice::Weights,
        Choice::HeadPieces,
        Choice::Embedding,
        Choice::Activations,
        Choice::OptimizerState,
        Choice::Gradients,
        Choice::Order,
        Choice::Laps,
        Choice::Updates,
        Choice::Sharding,
    ];

    /// The policy without this choice, where it is in use and can be left out.
    pub fn left_out(self, policy: &Policy) -> Option<Policy> {
        let mut other = policy.clone();
        match self {
            Choice::Recompute => other.recompute = LayerSet::none(),
            Choice::MicroBatch | Choice::LossChunk => {}
            Choice::Tiles => other = other.without_tiles(),
            Choice::Weights => {
                other.offloaded_weights = LayerSet::none();
                if policy.tables_offloaded {
                    (other.tables_offloaded, other.embedding_offloaded) = (false, false);
                    other.head_pieces = 0;
                }
            }
            Choice::HeadPieces => other.head_pieces = 0,
            Choice::Embedding => other.embedding_offloaded = policy.tables_offloaded,
            Choice::Activations => other.offloaded_activations = LayerSet::none(),
            Choice::OptimizerState => {
                (other.optimizer_state, other.offloaded_moments) = (Space::Device, LayerSet::none());
            }
            Choice::Gradients => {
                (other.gradients, other.offloaded_gradients) = (Space::Device, LayerSet::none());
            }
            Choice::Order => (other.order, other.layers_per_lap) = (Order::Depth, 0),
            Choice::Laps => other.layers_per_lap = other.layers_per_lap.min(1),
            Choice::Updates => other.updates = Space::Device,
            // Without ranks to gather from, weights would have to be somewhere else.
            Choice::Sharding if policy.sharding == Sharding::Weights => {}
            Choice::Sharding => other.sharding = Sharding::None,
        }
        (other != *policy).then_some(other)
    }

    /// Whether work of this purpose has the choice at all.
    fn is_of(self, purpose: Purpose) -> bool {
        match (self, purpose) {
            (_, Purpose::Training) => true,
            (
                Choice::Recompute
                | Choice::Activations
                | Choice::OptimizerState
                | Choice::Gradients
                | Choice::Order
                | Choice::Laps
                | Choice::Updates,
                _,
            ) => false,
            (Choice::MicroBatch | Choice::LossChunk | Choice::Tiles, _) => purpose == Purpose::Evaluation,
            (Choice::Weights | Choice::HeadPieces | Choice::Embedding | Choice::Sharding, _) => true,
        }
    }

    /// Those that work of this purpose has.
    pub fn all_of(purpose: Purpose) -> impl Iterator<Item = Choice> {
        Choice::ALL.into_iter().filter(move |choice| choice.is_of(purpose))
    }

    pub fn is_pinned(self, pins: &Pins) -> bool {
        match self {
            Choice::Recompute => pins.recompute.is_some(),
            Choice::MicroBatch => pins.micro_tokens.is_some(),
            Choice::LossChunk => pins.loss_chunk.is_some(),
            Choice::Tiles => pins.says_tiles(),
            Choice::Weights => !weights_are_open(pins) || !tables_are_open(pins),
            Choice::HeadPieces => pins.head_pieces.is_some(),
            Choice::Embedding => !embedding_is_open(pins),
            Choice::Activations => !activations_are_open(pins),
            Choice::OptimizerState => pins.optimizer_state.is_some(),
            Choice::Gradients => pins.gradients.is_some(),
            Choice::Order => pins.order.is_some(),
            Choice::Laps => pins.layers_per_lap.is_some(),
            Choice::Updates => pins.updates.is_some(),
            Choice::Sharding => pins.sharding.is_some(),
        }
    }
}

/// The pins, and those of choices that a purpose does not have: fixed, so that no search varies them.
pub fn pins_for(purpose: Purpose, pins: &Pins) -> Pins {
    let pins = pins.clone();
    match purpose {
        Purpose::Training => pins,
        Purpose::Evaluation => Pins {
            recompute: Some(LayerRule::None),
            activations: Some(Space::Device),
            optimizer_state: Some(Space::Device),
            gradients: Some(Space::Device),
            order: Some(Order::Depth),
            updates: Some(Space::Device),
            ..pins
        },
        Purpose::Generation | Purpose::Logits | Purpose::Encoding => {
            Pins { loss_chunk: Some(1), ..pins_for(Purpose::Evaluation, &pins) }.without_tiles()
        }
    }
}
