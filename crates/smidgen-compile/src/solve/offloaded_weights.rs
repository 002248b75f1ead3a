//! The bytes that the fetched weights of a layer need on the device, and the policy that offloads all weights.
//!
//! Windows of prefetched weights are counted in layers of this size. Small tensors always stay on the device and are left
//! out.

use crate::passes::head_pieces;
use crate::passes::place::FEWEST_BYTES;
use crate::request::Request;
use smidgen_ir::policy::Policy;
use smidgen_ir::{DType, Extent};

/// A policy with all weights offloaded and a window of this many layers. Without a window the head is fetched in pieces.
pub fn offload_all_weights(policy: Policy, request: &Request, window_layers: usize) -> Policy {
    let pieces = if window_layers == 0 { head_pieces::count(request) } else { 0 };
    let window_bytes = window_layers * layer_bytes(request, false).into_iter().max().unwrap_or(0);
    policy.with_all_weights_offloaded(request.layers(), pieces, window_bytes).on(request.device)
}

/// Bytes on the device of the weights of each layer that are fetched, or gathered from other ranks.
pub fn layer_bytes(request: &Request, is_gathered: bool) -> Vec<usize> {
    let mut layers_bytes = vec![0; request.spec.layers.len()];
    for tensor in request.spec.tensors() {
        let Some(layer) = tensor.layer else { continue };
        let (rows, columns) = tensor.shape.at(&Extent::default());
        let bytes = match request.trained.contains(&tensor.name) {
            // A trained weight is fetched in f32 and then rounded; ranks round before they gather.
            true => {
                let rounded = if request.rounds_trained() { request.activations().bytes() } else { 0 };
                let trained = if is_gathered && rounded > 0 { 0 } else { DType::F32.bytes() };
                (trained + rounded) * rows * columns
            }
            false => request.storage_of(&tensor.name).bytes(rows, columns),
        };
        if bytes >= FEWEST_BYTES {
            layers_bytes[layer] += bytes;
        }
    }
    layers_bytes
}
