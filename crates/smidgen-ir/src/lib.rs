//! The data types that all crates share: what a fine-tuning run consists of, as plain data.
//!
//! A [`Graph`] says what is computed: nodes over values, each node one [`Op`] of the op table (`op.rs`). A [`Plan`] says
//! in which order, and where in memory. `smidgen-compile` makes plans and touches nothing else; `smidgen-runtime` obeys
//! them and decides nothing. This crate holds what both must agree on: shapes, storage formats, costs, scratch sizes, the
//! text form, and the checks between stages (`verify`). It reads no file, knows no device and computes no number of a model.

#![forbid(unsafe_code)]

pub mod audio_rows;
pub mod by_value;
pub mod bytes;
pub mod cost;
mod expert_attributes;
pub mod graph;
pub mod grouped_digits;
mod loss_head;
pub mod objective;
pub mod op;
mod op_attributes;
mod op_questions;
mod op_shapes;
mod op_table;
pub mod plan;
pub mod policy;
pub mod quant;
pub mod rank;
mod recurrence;
pub mod rope;
pub mod shape;
pub mod storage;
mod target;
pub mod text;
pub mod verify;
pub mod words;
pub mod workspace;
pub mod workspace_cpu;
pub mod workspace_cuda;

pub use audio_rows::{MARK_COLUMNS, PlainActivation, StridedConv};
pub use by_value::{ByValue, ValueSet};
pub use cost::{Cost, Operands, Workload};
pub use expert_attributes::{ExpertRows, Router, RouterGroups, RouterScores};
pub use graph::{
    Entry, Graph, Lap, Leaf, LeafKind, Node, Phase, Rounded, Slice, Space, Value, ValueId, ValueRole,
};
pub use loss_head::{HeadPiece, LossHead};
pub use objective::Objective;
pub use op::Op;
pub use op_attributes::{ACTIVITY_COLUMNS, Activation, AdamW, AttentionShape, HeadPart, Norm, RandomPlace};
pub use op_shapes::ShapeError;
pub use op_table::{Batching, BoundBy, Fusion, Property, Route};
pub use plan::{
    Buffer, BufferId, Category, DeviceKind, EntryPlan, Lifetime, Peak, Plan, PlannedValue, Precision, Region,
    SpaceSize, Step,
};
pub use policy::{Choice, LayerRule, LayerSet, OffloadV1, Order, Pins, Policy, Sharding};
pub use rank::{Cut, Rank, Shard};
pub use recurrence::{DecayShape, ScanShape};
pub use rope::{PositionScale, RopeScaling, RopeSpec, Stretch};
pub use shape::{Dim, Extent, Shape, Type};
pub use storage::{Block, Code4, DType, Storage};
