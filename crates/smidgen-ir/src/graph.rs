//! A graph: values, and for each entry point the nodes that compute with them, in order.
//!
//! Leaves (weights, adapters, gradients, moments, inputs) are shared by all entry points and exist for the whole run.
//! Temporaries belong to one entry point and are written exactly once, as a whole or tile by tile.
//! Whether a leaf is trainable is a property of the leaf, not of its kind. A graph says nothing about memory: see `plan.rs`.

use crate::op::Op;
use crate::rank::Shard;
use crate::shape::{Dim, Extent, Type};
use std::fmt;
use std::ops::Range;

pub use crate::target::Space;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

impl ValueId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The programs of a run. All share the leaves; their temporaries reuse the same memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Entry {
    /// Forward and backward of one micro-batch, gradients added up.
    MicroStep,
    /// One optimizer step from the gradients, which are then set to zero.
    Update,
    /// Recomputes what is derived from trainable leaves; runs after load, resume and each update.
    Refresh,
    /// The loss of one micro-batch without gradients or dropout.
    Eval,
    /// Log-probabilities of one micro-batch by the model that an objective compares with, without gradients.
    Reference,
    /// The logits of chosen rows; only in plans made for inspecting a model.
    Logits,
    /// One step of generation: new tokens of some sequences over their KV cache, and the logits of chosen rows.
    Decode,
    /// Gathers the divided tensors that a checkpoint stores, one per step; the host reads each before the next step.
    Collect,
    /// Turns sound into audio rows; only in plans that prepare clips.
    Encode,
}

impl Entry {
    pub const ALL: [Entry; 9] = [
        Entry::MicroStep,
        Entry::Update,
        Entry::Refresh,
        Entry::Eval,
        Entry::Reference,
        Entry::Logits,
        Entry::Decode,
        Entry::Collect,
        Entry::Encode,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Entry::MicroStep => "micro_step",
            Entry::Update => "update",
            Entry::Refresh => "refresh",
            Entry::Eval => "eval",
            Entry::Reference => "reference",
            Entry::Logits => "logits",
            Entry::Decode => "decode",
            Entry::Collect => "collect",
            Entry::Encode => "encode",
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeafKind {
    Weight,
    Adapter,
    Gradient,
    /// What one layer or lap adds to a gradient that is divided over ranks or offloaded. The id is the destination: the
    /// rows that this rank keeps, or the offloaded gradient. Exists only while that layer or lap runs.
    Partial(ValueId),
    Moment,
    /// What `refresh` computes from adapters.
    Derived,
    /// Written by the host before an entry point runs.
    Input,
    /// Small state shared by entry points: the accumulated loss, the report.
    State,
    /// What one run of `decode` leaves for the next run or for the host: keys, values, logits. Other entry points
    /// overwrite it.
    Cache,
    /// Rows of all micro-batches of a step, at most this many, that one lap writes and a later one reads. The type is that
    /// of one micro-batch; the rows of one micro-batch follow those of the micro-batch before.
    Carried(usize),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Leaf {
    pub kind: LeafKind,
    /// The leaf that holds the gradient, if this one is trained.
    pub gradient: Option<ValueId>,
    /// Set if `refresh` computes this leaf by rounding another one; gradients then go to that other leaf.
    pub rounded: Option<Rounded>,
    /// Set if this rank stores only a part of the leaf. The type is that of the whole.
    pub shard: Option<Shard>,
    /// Whether this is a trained tensor of the base model, which may be offloaded.
    pub is_of_base: bool,
}

impl Leaf {
    /// A leaf that is neither trained nor computed from another leaf.
    pub fn new(kind: LeafKind) -> Leaf {
        Leaf { kind, gradient: None, rounded: None, shard: None, is_of_base: false }
    }
}

/// `scale` times another leaf, rounded to the element type of matmuls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rounded {
    pub of: ValueId,
    pub scale: f32,
}

/// A value that is some rows of another one: a projection that a checkpoint stores in a matrix with others, or a tile of
/// an activation's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    pub of: ValueId,
    pub first_row: usize,
    /// The same rows of the leaf's gradient, if it is trained.
    pub gradient: Option<ValueId>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ValueRole {
    Leaf(Leaf),
    Slice(Slice),
    Temp,
}

impl ValueRole {
    /// The value that this one is a slice of, or the value itself.
    pub fn whole(&self, own: ValueId) -> ValueId {
        match self {
            ValueRole::Slice(slice) => slice.of,
            ValueRole::Leaf(_) | ValueRole::Temp => own,
        }
    }

    /// The row of the whole value at which a slice starts; 0 if this is not a slice.
    pub fn first_row(&self) -> usize {
        match self {
            ValueRole::Slice(slice) => slice.first_row,
            ValueRole::Leaf(_) | ValueRole::Temp => 0,
        }
    }

    /// How the value is divided over ranks, if it is.
    pub fn shard(&self) -> Option<Shard> {
        match self {
            ValueRole::Leaf(leaf) => leaf.shard,
            ValueRole::Slice(_) | ValueRole::Temp => None,
        }
    }

    /// Bytes of a value of this type that this rank stores.
    pub fn stored_bytes(&self, ty: &Type, extent: &Extent) -> usize {
        if let ValueRole::Leaf(Leaf { kind: LeafKind::Carried(rows), .. }) = self {
            return ty.storage.bytes(*rows, ty.shape.at(extent).1);
        }
        self.shard().map_or_else(|| ty.bytes(extent), |shard| shard.own_bytes(ty).len())
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    pub name: String,
    pub ty: Type,
    pub role: ValueRole,
    pub space: Space,
}

impl Value {
    pub fn leaf(&self) -> Option<&Leaf> {
        match &self.role {
            ValueRole::Leaf(leaf) => Some(leaf),
            ValueRole::Slice(_) | ValueRole::Temp => None,
        }
    }

    pub fn is_temp(&self) -> bool {
        self.role == ValueRole::Temp
    }

    /// Bytes that this rank stores.
    pub fn stored_bytes(&self, extent: &Extent) -> usize {
        self.role.stored_bytes(&self.ty, extent)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    Forward,
    /// A forward node run again for the backward pass.
    Recompute,
    Backward,
    Update,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub op: Op,
    pub inputs: Vec<ValueId>,
    pub outputs: Vec<ValueId>,
    pub updates: Vec<ValueId>,
    pub phase: Phase,
    /// The layer that the node belongs to: first the blocks of the audio encoder, if there is one, then decoder layers.
    pub layer: Option<usize>,
}

impl Node {
    /// Everything that the node reads, updates included.
    pub fn reads(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.inputs.iter().chain(&self.updates).copied()
    }

    /// The loss, if the node adds to it.
    pub fn updated_loss(&self) -> Option<ValueId> {
        self.updates.first().copied().filter(|_| self.op.is_loss())
    }

    /// Every operand; one that occurs twice is listed twice.
    pub fn operands(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.inputs.iter().chain(&self.outputs).chain(&self.updates).copied()
    }
}

/// Nodes or steps of `micro_step` that run for all micro-batches of a step before the next lap begins. Those between the
/// end of the lap before and `each` run once, then `each` runs for every micro-batch, then those up to `end` run once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lap {
    pub each: Range<usize>,
    pub end: usize,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    pub values: Vec<Value>,
    pub entries: Vec<(Entry, Vec<Node>)>,
    /// The laps of `micro_step`, in breadth-first order; none in depth-first order.
    pub laps: Vec<Lap>,
}

impl Graph {
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// Every value, in order.
    pub fn ids(&self) -> impl Iterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    pub fn has_entry(&self, entry: Entry) -> bool {
        self.entries.iter().any(|(own, _)| *own == entry)
    }

    /// The nodes of an entry point; none if the graph does not have it.
    pub fn nodes(&self, entry: Entry) -> &[Node] {
        self.entries.iter().find(|(own, _)| *own == entry).map_or(&[], |(_, nodes)| nodes)
    }

    fn nodes_mut(&mut self, entry: Entry) -> Option<&mut Vec<Node>> {
        self.entries.iter_mut().find(|(own, _)| *own == entry).map(|(_, nodes)| nodes)
    }

    /// Takes the nodes of an entry point out of the graph, to be rewritten and given back with [`Graph::set_nodes`].
    pub fn take_nodes(&mut self, entry: Entry) -> Option<Vec<Node>> {
        self.nodes_mut(entry).map(std::mem::take)
    }

    /// # Panics
    /// When the graph does not have the entry point.
    pub fn set_nodes(&mut self, entry: Entry, nodes: Vec<Node>) {
        *self.nodes_mut(entry).unwrap_or_else(|| panic!("the graph has no `{entry}`")) = nodes;
    }

    /// The value that `id` is a slice of, or `id` itself.
    pub fn whole(&self, id: ValueId) -> ValueId {
        self.value(id).role.whole(id)
    }

    /// A name derived from that of a value; empty after [`Graph::forget_names`].
    pub fn name_from(&self, id: ValueId, make: impl FnOnce(&str) -> String) -> String {
        match self.value(id).name.as_str() {
            "" => String::new(),
            name => make(name),
        }
    }

    /// Drops all names: they are the larger part of a graph, and nothing depends on them once it is built.
    pub fn forget_names(&mut self) {
        self.values.iter_mut().for_each(|value| value.name = String::new());
    }

    pub fn add_value(&mut self, name: impl Into<String>, ty: Type, role: ValueRole) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        self.values.push(Value { name: name.into(), ty, role, space: Space::Device });
        id
    }

    pub fn add_leaf(&mut self, name: impl Into<String>, ty: Type, kind: LeafKind) -> ValueId {
        self.add_value(name, ty, ValueRole::Leaf(Leaf::new(kind)))
    }

    /// # Panics
    /// When the value is not a leaf.
    pub fn leaf_mut(&mut self, id: ValueId) -> &mut Leaf {
        match &mut self.values[id.index()].role {
            ValueRole::Leaf(leaf) => leaf,
            other => panic!("{other:?} is not a leaf"),
        }
    }

    /// Rows `first_row..first_row + rows` of a leaf, and of its gradient.
    pub fn add_slice(&mut self, of: ValueId, first_row: usize, rows: usize) -> ValueId {
        let gradient = self.gradient_of(of).map(|gradient| self.add_slice(gradient, first_row, rows));
        let name = self.name_from(of, |name| format!("{name}[{first_row}..{}]", first_row + rows));
        let mut ty = self.value(of).ty.clone();
        ty.shape.0[0] = Dim::Const(rows);
        let id = self.add_value(name, ty, ValueRole::Slice(Slice { of, first_row, gradient }));
        self.values[id.index()].space = self.value(of).space;
        id
    }

    /// A tile of the tokens of an activation or an input.
    pub fn add_tile(&mut self, of: ValueId, tile: Dim) -> ValueId {
        let Dim::Tile { first, .. } = tile else { panic!("{tile} is not a tile") };
        let name = self.name_from(of, |name| format!("{name}[{first}..]"));
        let value = self.value(of);
        let mut ty = value.ty.clone();
        assert_eq!(ty.shape.0[0], Dim::Tokens, "`{}` is not over tokens", value.name);
        ty.shape.0[0] = tile;
        self.add_value(name, ty, ValueRole::Slice(Slice { of, first_row: first, gradient: None }))
    }

    /// Appends a node to `nodes`, with outputs whose types follow from the operands.
    ///
    /// # Panics
    /// When the operands do not fit the operation: a bug of the caller.
    pub fn emit(
        &mut self,
        nodes: &mut Vec<Node>,
        op: Op,
        inputs: Vec<ValueId>,
        updates: Vec<ValueId>,
        output_names: &[String],
        place: (Phase, Option<usize>),
    ) -> Vec<ValueId> {
        let types = |ids: &[ValueId]| ids.iter().map(|id| &self.values[id.index()].ty).collect::<Vec<_>>();
        let outputs = match op.infer(&types(&inputs), &types(&updates)) {
            Ok(outputs) => outputs,
            Err(error) => panic!("{error} (while emitting {output_names:?})"),
        };
        assert_eq!(
            outputs.len(),
            output_names.len(),
            "`{}` does not have the outputs {output_names:?}",
            op.name()
        );
        let ids: Vec<ValueId> = outputs
            .into_iter()
            .zip(output_names)
            .map(|(ty, name)| self.add_value(name.clone(), ty, ValueRole::Temp))
            .collect();
        let (phase, layer) = place;
        nodes.push(Node { op, inputs, outputs: ids.clone(), updates, phase, layer });
        ids
    }

    /// The gradient of a leaf or slice, if it is trained. A rounded leaf has the gradient of the leaf it is rounded from.
    pub fn gradient_of(&self, id: ValueId) -> Option<ValueId> {
        match &self.value(id).role {
            ValueRole::Leaf(Leaf { rounded: Some(rounded), .. }) => self.gradient_of(rounded.of),
            ValueRole::Leaf(leaf) => leaf.gradient,
            ValueRole::Slice(slice) => slice.gradient,
            ValueRole::Temp => None,
        }
    }

    /// The factor by which a gradient with respect to this value is multiplied when it is added to
    /// [`Graph::gradient_of`] the value.
    pub fn gradient_scale(&self, id: ValueId) -> f32 {
        match &self.value(id).role {
            ValueRole::Leaf(leaf) => leaf.rounded.map_or(1.0, |rounded| rounded.scale),
            ValueRole::Slice(slice) => self.gradient_scale(slice.of),
            ValueRole::Temp => 1.0,
        }
    }

    /// Trained leaves with their gradients, in order.
    pub fn trainable(&self) -> impl Iterator<Item = (ValueId, ValueId)> + '_ {
        self.ids().filter_map(|id| Some((id, self.value(id).leaf()?.gradient?)))
    }
}
