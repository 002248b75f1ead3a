//! Decides which leaves are offloaded, and to which memory space. Later passes fetch them where they are needed.
//!
//! Weights are offloaded layer by layer, embedding and head separately; trained weights, their gradients and their
//! optimizer state belong to the layer that computes with them. Vectors and small matrices stay on the device: they are not
//! worth a transfer. Of divided weights each rank keeps bytes of frozen ones, rows of trained ones (`shard.rs`); only the
//! rows of trained ones may be offloaded. On a GPU the frozen table of embeddings for each layer is always in host memory: it
//! is larger than the model, and a step reads few of its rows. A trained weight that is offloaded has no rounded copy: it is rounded after each
//! fetch.

use super::prefetch::source_of;
use crate::model::spec::PER_LAYER_EMBEDDING;
use smidgen_ir::policy::{Policy, Sharding};
use smidgen_ir::{
    ByValue, Cut, DeviceKind, Entry, Extent, Graph, Leaf, LeafKind, Op, Property, Rank, Shard, Space,
    ValueId, ValueRole, ValueSet,
};

/// Matrices of fewer bytes stay on the device.
pub const FEWEST_BYTES: usize = 1 << 10;

/// Offloads matrices of at least `fewest_bytes` as the policy says.
pub fn apply(
    graph: &mut Graph,
    policy: &Policy,
    extent: &Extent,
    (device, rank): (DeviceKind, Rank),
    fewest_bytes: usize,
) {
    let uses = Uses::of(graph);
    let mut offloaded = offloaded_leaves(graph, &uses, policy, extent, fewest_bytes);
    let in_host: Vec<ValueId> = graph.ids().filter(|id| is_per_layer_table(graph, *id)).collect();
    let in_host = if device == DeviceKind::Cuda { in_host } else { vec![] };
    if policy.divides(Sharding::Weights) && !rank.is_only() {
        let weights: Vec<ValueId> = offloaded.iter().filter(|id| is_frozen(graph, *id)).collect();
        let trained: Vec<ValueId> = offloaded.iter().filter(|id| is_trained(graph, *id)).collect();
        for id in weights {
            offloaded.remove(&id);
            graph.leaf_mut(id).shard = Some(Shard { rank, cut: Cut::Bytes });
        }
        let shard = Shard { rank, cut: Cut::Rows };
        let matrices: ValueSet = divided_matrices(graph, policy, shard).into_iter().collect();
        for id in trained.into_iter().filter(|id| policy.weights == Space::Device || !matrices.contains(id)) {
            offloaded.remove(&id);
        }
        for id in graph.ids() {
            if graph.value(id).leaf().is_some() && matrices.contains(&source_of(graph, id)) {
                graph.leaf_mut(id).shard = Some(shard);
            }
        }
    }
    for id in in_host {
        graph.leaf_mut(id).shard = None;
        offloaded.insert(id);
    }
    for id in graph.ids() {
        let whole = graph.whole(id);
        if offloaded.contains(&whole) {
            graph.values[id.index()].space = match graph.value(whole).leaf().map(|leaf| leaf.kind) {
                Some(LeafKind::Moment) => device.resolve(policy.optimizer_state),
                Some(LeafKind::Gradient) => device.resolve(policy.gradients),
                // The device looks up rows in place, so they must be in memory that it can access.
                _ if uses.looked_up.contains(&whole) => device.offload_space(),
                _ => device.resolve(policy.weights),
            };
        }
    }
    if let Some(mut nodes) = graph.take_nodes(Entry::Refresh) {
        let is_offloaded = |id: ValueId| graph.value(id).space != Space::Device;
        nodes.retain(|node| !matches!(node.op, Op::Round { .. }) || !is_offloaded(node.inputs[0]));
        graph.set_nodes(Entry::Refresh, nodes);
    }
}

/// Trained matrices of the base model that the policy divides over ranks. One that is too small for two ranks stays whole.
pub fn divided_matrices(graph: &Graph, policy: &Policy, shard: Shard) -> Vec<ValueId> {
    let uses = Uses::of(graph);
    let is_divided = |id: &ValueId| {
        let value = graph.value(*id);
        value.leaf().is_some_and(|leaf| leaf.is_of_base)
            && value.ty.shape.0.len() == 2
            && !shard.rows(&value.ty)[1].is_empty()
            && is_weight_chosen(graph, &uses, policy, *id, uses.layers.get(id).copied())
    };
    graph.trainable().map(|(leaf, _)| leaf).filter(is_divided).collect()
}

fn is_trained(graph: &Graph, id: ValueId) -> bool {
    graph.value(id).leaf().is_some_and(|leaf| leaf.kind == LeafKind::Adapter)
}

fn is_frozen(graph: &Graph, id: ValueId) -> bool {
    graph.value(id).leaf().is_some_and(|leaf| leaf.kind == LeafKind::Weight)
}

fn is_per_layer_table(graph: &Graph, id: ValueId) -> bool {
    is_frozen(graph, id) && graph.value(id).name == PER_LAYER_EMBEDDING
}

/// How leaves, or their rounded copies, are used.
struct Uses {
    /// The layer in which a leaf is used.
    layers: ByValue<usize>,
    /// Embeddings, whose rows are looked up.
    looked_up: ValueSet,
    heads: ValueSet,
}

impl Uses {
    fn of(graph: &Graph) -> Uses {
        let (mut layers, mut looked_up, mut heads) =
            (ByValue::default(), ValueSet::default(), ValueSet::default());
        for node in graph.entries.iter().flat_map(|(_, nodes)| nodes) {
            let source = |id: ValueId| source_of(graph, graph.whole(id));
            if let Some(layer) = node.layer {
                layers.extend(node.reads().map(|id| (source(id), layer)));
            }
            if let Op::Embed { .. } = node.op {
                looked_up.insert(source(node.inputs[1]));
            } else if node.op.has(Property::ReadsHead) {
                heads.insert(source(node.inputs[1]));
            }
        }
        // `update.rs` adds two moments for each trained leaf, in their order. A rank may have no update for a leaf, and
        // must still decide like the others.
        let is_moment =
            |id: &ValueId| graph.value(*id).leaf().is_some_and(|leaf| leaf.kind == LeafKind::Moment);
        let mut moments = graph.ids().filter(is_moment);
        for (leaf, gradient) in graph.trainable() {
            let own = [Some(gradient), moments.next(), moments.next()];
            if let Some(layer) = layers.get(&leaf).copied() {
                layers.extend(own.into_iter().flatten().map(|id| (id, layer)));
            }
        }
        Uses { layers, looked_up, heads }
    }
}

fn offloaded_leaves(
    graph: &Graph,
    uses: &Uses,
    policy: &Policy,
    extent: &Extent,
    fewest_bytes: usize,
) -> ValueSet {
    // Gradients of trained weights of the base model.
    let of_base: ValueSet = graph
        .trainable()
        .filter(|(leaf, _)| graph.value(*leaf).leaf().is_some_and(|leaf| leaf.is_of_base))
        .map(|(_, gradient)| gradient)
        .collect();
    let mut offloaded = ValueSet::default();
    for id in graph.ids() {
        let ValueRole::Leaf(Leaf { kind, is_of_base, .. }) = graph.value(id).role else { continue };
        let layer = uses.layers.get(&id).copied();
        let is_chosen = match kind {
            LeafKind::Weight => is_weight_chosen(graph, uses, policy, id, layer),
            LeafKind::Adapter => is_of_base && is_weight_chosen(graph, uses, policy, id, layer),
            LeafKind::Moment => policy.offloads_moments_of(layer),
            LeafKind::Gradient => of_base.contains(&id) && policy.offloads_gradients_of(layer),
            LeafKind::Partial(_)
            | LeafKind::Derived
            | LeafKind::Input
            | LeafKind::State
            | LeafKind::Cache
            | LeafKind::Carried(_) => false,
        };
        let ty = &graph.value(id).ty;
        let (rows, columns) = ty.shape.at(extent);
        if is_chosen && rows.min(columns) > 1 && ty.bytes(extent) >= fewest_bytes {
            offloaded.insert(id);
        }
    }
    offloaded
}

/// Whether the policy offloads a weight, or divides it over ranks.
fn is_weight_chosen(graph: &Graph, uses: &Uses, policy: &Policy, id: ValueId, layer: Option<usize>) -> bool {
    if let Some(layer) = layer {
        return policy.offloaded_weights.contains(layer);
    }
    let is_chosen = policy.offloads_table(uses.looked_up.contains(&id), uses.heads.contains(&id));
    // Rows of an offloaded table are looked up in place, so they must be contiguous.
    is_chosen && (graph.value(id).ty.storage.has_contiguous_rows() || policy.divides(Sharding::Weights))
}
