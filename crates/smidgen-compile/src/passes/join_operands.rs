//! Joined operands: an adapter's matrices are stored next to the weight of its linear, so that both are one matmul.
//!
//! y = x·Wᵀ + h·Bᵀ is `[x | h]·[W | B]ᵀ`, and dx = dy·W + dh·A is `[dy | dh]·[W ; A]`. A GPU runs each as one matmul if
//! x and dy have spare columns for h and dh, and W's buffer has room for B after its columns and for A below its rows.
//! Only the memory layout is decided here; the graph stays unchanged, and a device may run two matmuls instead. On a CPU
//! nothing is joined, because its matmuls sum several terms.

use crate::request::Request;
use smidgen_ir::workspace_cuda::{COLUMN_STEP, spare_columns};
use smidgen_ir::{ByValue, DType, DeviceKind, Dim, Extent, Graph, Node, Op, Storage, Type, ValueId};
use std::collections::BTreeMap;

/// Values whose rows are not contiguous.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    /// Spare columns after each row of a temporary, for its steps.
    pub spare: BTreeMap<ValueId, usize>,
    /// Leaves with room after their columns and below their rows.
    pub room: BTreeMap<ValueId, Room>,
    /// Leaves that are stored in that room.
    pub inside: BTreeMap<ValueId, Inside>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Elements from one row to the next.
    pub stride: usize,
    pub rows_beneath: usize,
}

impl Room {
    pub fn bytes(&self, ty: &Type) -> usize {
        let (rows, _) = ty.shape.at(&Extent::default());
        let element = ty.storage.plain().map_or(0, DType::bytes);
        (rows + self.rows_beneath) * self.stride * element
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inside {
    pub host: ValueId,
    pub first_row: usize,
    pub first_column: usize,
}

/// Bytes of a value with spare columns after each row.
pub fn strided_bytes(ty: &Type, spare: usize, extent: &Extent) -> usize {
    let (rows, _) = ty.shape.at(extent);
    ty.bytes(extent) + rows * spare * ty.storage.plain().map_or(0, DType::bytes)
}

pub fn find(graph: &Graph, request: &Request) -> Layout {
    let mut layout = Layout::default();
    if request.device == DeviceKind::Cpu || !request.rounds_trained() {
        return layout;
    }
    let nodes: Vec<&Node> = graph.entries.iter().flat_map(|(_, nodes)| nodes).collect();
    let producer: ByValue<&Node> =
        nodes.iter().flat_map(|node| node.outputs.iter().map(|output| (*output, *node))).collect();
    // The weight below which each A may be stored.
    let mut weight_of: ByValue<ValueId> = ByValue::default();
    for node in &nodes {
        let Op::Linear { lora: Some(_), .. } = node.op else { continue };
        let [x, weight, .., h, b] = node.inputs[..] else { unreachable!("an adapted linear has h and b") };
        let Some(&[_, a]) = producer.get(&h).map(|node| &node.inputs[..]) else { continue };
        let (weight, b) = (graph.whole(weight), graph.whole(b));
        let (rows, columns) = graph.value(weight).ty.shape.at(&Extent::default());
        if !columns.is_multiple_of(COLUMN_STEP) {
            continue;
        }
        let rank = graph.value(a).ty.shape.at(&Extent::default()).0;
        weight_of.insert(a, weight);
        widen(&mut layout, graph, x, rank);
        // A fetched copy has no room for the adapter.
        let stays = graph.value(weight).leaf().is_some();
        let is_alike = |id: &ValueId| graph.value(*id).ty.storage == Storage::Plain(request.activations());
        if stays && [weight, a, b].iter().all(is_alike) {
            let spare = spare_columns(rank);
            layout.room.insert(weight, Room { stride: columns + spare, rows_beneath: spare });
            layout.inside.insert(b, Inside { host: weight, first_row: 0, first_column: columns });
            layout.inside.insert(a, Inside { host: weight, first_row: rows, first_column: 0 });
        }
    }
    for node in &nodes {
        let Op::LinearGrad { .. } = node.op else { continue };
        let terms: Vec<(ValueId, ValueId)> = node.inputs.chunks(2).map(|term| (term[0], term[1])).collect();
        for &(_, a) in &terms {
            let Some(&weight) = weight_of.get(&a) else { continue };
            let last = terms.iter().filter(|(_, matrix)| graph.whole(*matrix) == weight);
            let rank = graph.value(a).ty.shape.at(&Extent::default()).0;
            if let Some(&(d, _)) = last.max_by_key(|(_, matrix)| graph.value(*matrix).role.first_row()) {
                widen(&mut layout, graph, d, rank);
            }
        }
    }
    layout
}

/// Gives a temporary of plain numbers spare columns, if rows stay aligned.
fn widen(layout: &mut Layout, graph: &Graph, value: ValueId, rank: usize) {
    let value = graph.whole(value);
    let value_columns = match graph.value(value).ty.shape.0.as_slice() {
        [_, Dim::Const(columns)] => *columns,
        _ => return,
    };
    let of = graph.value(value);
    if of.is_temp() && of.ty.storage.plain().is_some() && value_columns.is_multiple_of(COLUMN_STEP) {
        let spare = layout.spare.entry(value).or_insert(0);
        *spare = (*spare).max(spare_columns(rank));
    }
}
