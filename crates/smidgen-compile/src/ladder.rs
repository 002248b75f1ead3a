//! Ladders: policies from the fastest to the leanest, each rung with less on the device than the one before.
//!
//! Two orders, because which is faster follows from the rates of the device: layers computed again first, whose
//! price is arithmetic, or weights sent away first, whose price is the link and may hide behind the arithmetic. What
//! is pinned is the same on every rung.

use crate::options::{Away, Policy, Recompute, Request, spread};
use crate::passes::stream::FEWEST_BYTES;
use crate::solve::Pins;
use smidgen_ir::Extent;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    RecomputeFirst,
    StreamFirst,
}

impl Order {
    pub const ALL: [Order; 2] = [Order::RecomputeFirst, Order::StreamFirst];
}

/// The choices of a rung. None of them is made on the first.
#[derive(Clone, Copy, Debug, Default)]
struct Rung {
    recomputed: usize,
    weights_away: usize,
    tables_away: bool,
    /// Activations of recomputed layers.
    activations_away: bool,
    moments_away: bool,
    /// Weights come when they are needed and not ahead.
    is_late: bool,
}

/// The ladders that the pins leave, each with at least one rung. `least_bytes` is what so many recomputed layers need.
pub fn all(
    request: &Request,
    pins: &Pins,
    loss_chunk: usize,
    least_bytes: impl Fn(usize) -> u64,
) -> Vec<Vec<Policy>> {
    if let Some(policy) = &pins.policy {
        return vec![vec![policy.clone()]];
    }
    let layers = request.spec.layers;
    let most_recomputed = match &pins.recompute {
        Some(_) => 0,
        None => leanest_count(layers, least_bytes),
    };
    let build = |order: Order| {
        let rungs = rungs(request, pins, order, most_recomputed);
        let mut ladder: Vec<Policy> =
            rungs.into_iter().map(|rung| policy(request, pins, loss_chunk, rung)).collect();
        ladder.dedup();
        ladder
    };
    let mut ladders: Vec<Vec<Policy>> = Order::ALL.into_iter().map(build).collect();
    ladders.dedup();
    ladders
}

/// How many recomputed layers need least. Backward begins with the last layer, beside the kept inputs
/// of all the others: running it again there can take more than keeping it does.
fn leanest_count(layers: usize, least_bytes: impl Fn(usize) -> u64) -> usize {
    if least_bytes(layers - 1) < least_bytes(layers) { layers - 1 } else { layers }
}

fn rungs(request: &Request, pins: &Pins, order: Order, most_recomputed: usize) -> Vec<Rung> {
    let mut rung = Rung::default();
    let mut rungs = vec![rung];
    let recompute = |rung: &mut Rung, rungs: &mut Vec<Rung>| {
        for recomputed in 1..=most_recomputed {
            *rung = Rung { recomputed, ..*rung };
            rungs.push(*rung);
        }
        *rung = Rung { activations_away: true, ..*rung };
        rungs.push(*rung);
    };
    let stream = |rung: &mut Rung, rungs: &mut Vec<Rung>| {
        for weights_away in 1..=request.spec.layers {
            *rung = Rung { weights_away, ..*rung };
            rungs.push(*rung);
        }
        *rung = Rung { tables_away: true, ..*rung };
        rungs.push(*rung);
    };
    match order {
        Order::RecomputeFirst => {
            recompute(&mut rung, &mut rungs);
            stream(&mut rung, &mut rungs);
        }
        Order::StreamFirst => {
            stream(&mut rung, &mut rungs);
            recompute(&mut rung, &mut rungs);
        }
    }
    rungs.push(Rung { moments_away: true, ..rung });
    let streams = pins.weights_away != Some(0) || pins.tables_away != Some(false);
    if streams {
        rungs.push(Rung { moments_away: true, is_late: true, ..rung });
    }
    rungs
}

fn policy(request: &Request, pins: &Pins, loss_chunk: usize, rung: Rung) -> Policy {
    let layers = request.spec.layers;
    let recompute = pins.recompute.clone().unwrap_or(Recompute::first(rung.recomputed));
    let activations = match pins.activations_away {
        Some(true) => (0..layers).collect(),
        None if rung.activations_away => recompute.layers.clone(),
        Some(false) | None => vec![],
    };
    let weights = spread(pins.weights_away.unwrap_or(rung.weights_away), layers);
    let tables = pins.tables_away.unwrap_or(rung.tables_away);
    let window_bytes = match rung.is_late || (weights.is_empty() && !tables) {
        true => 0,
        false => 2 * layer_bytes(request),
    };
    let moments = pins.moments_away.unwrap_or(rung.moments_away);
    Policy { recompute, loss_chunk, away: Away { weights, tables, activations, moments, window_bytes } }
}

/// Bytes of the weights of a layer that can be sent away.
fn layer_bytes(request: &Request) -> usize {
    let tensors = request.spec.tensors().into_iter().filter(|tensor| tensor.name.contains("layers.0."));
    let bytes = tensors.map(|tensor| {
        let (rows, columns) = tensor.shape.at(&Extent::default());
        request.storage_of(&tensor.name).bytes(rows, columns)
    });
    bytes.filter(|bytes| *bytes >= FEWEST_BYTES).sum()
}
