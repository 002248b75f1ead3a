//! The nouns of smidgen: what a fine-tuning run is made of, as plain data.
//!
//! A [`Graph`] says what is computed, a [`Plan`] says in which order and where in memory.
//! One crate makes plans and touches nothing, another obeys them and decides nothing; this one
//! holds what both must agree on, and the checks (`verify`) that keep them honest.
//! It reads no file, knows no device and computes no number of a model.

#![forbid(unsafe_code)]

pub mod by_value;
pub mod bytes;
pub mod cost;
pub mod graph;
pub mod grouped_digits;
pub mod op;
mod op_shapes;
pub mod plan;
pub mod quant;
pub mod rope;
pub mod shape;
pub mod storage;
pub mod text;
pub mod verify;
pub mod words;
pub mod workspace;
pub mod workspace_cuda;

pub use by_value::{ByValue, ValueSet};
pub use cost::{Cost, Workload};
pub use graph::{
    Entry, Graph, Leaf, LeafKind, Node, Phase, Rounded, Shard, Slice, Space, Value, ValueId, ValueRole,
};
pub use op::{Activation, AdamW, AttentionShape, HeadPiece, LossHead, Norm, Op, ShapeError};
pub use plan::{
    Buffer, BufferId, Category, DeviceKind, EntryPlan, Lifetime, Peak, Plan, PlannedValue, Precision, Region,
    SpaceSize, Step,
};
pub use rope::{RopeScaling, RopeSpec};
pub use shape::{Dim, Extent, Shape, Type};
pub use storage::{Block, Code4, DType, Storage};
