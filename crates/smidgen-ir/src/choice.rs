//! The memory choices that a plan explains.
//!
//! A choice is what a user sees as one decision; it has one or several fields of a `Policy`, which says which. The words
//! for it are the caller's.

/// In the order in which a plan explains them.
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
    pub const ALL: [Choice; 14] = [
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
}
