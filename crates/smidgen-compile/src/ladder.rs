//! Ladders: policies from the fastest to the leanest, each rung with less on the device than the one before.
//!
//! Two orders, because which is faster follows from the rates of the device: layers computed again first, whose
//! price is arithmetic, or weights sent away first, whose price is the link and may hide behind the arithmetic. What
//! is pinned is the same on every rung. Where a model is so small that a transfer takes more than it saves, higher
//! rungs may need more again: bytes turn only where one kind of choice ends and the next begins.

use crate::options::{Away, Policy, Recompute, Request, spread};
use crate::passes::stream::FEWEST_BYTES;
use crate::solve::Pins;
use smidgen_ir::{DeviceKind, Extent};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    RecomputeFirst,
    StreamFirst,
}

impl Order {
    pub const ALL: [Order; 2] = [Order::RecomputeFirst, Order::StreamFirst];

    fn choices(self) -> [Choice; 3] {
        match self {
            Order::RecomputeFirst => [Choice::Recompute, Choice::Tile, Choice::Stream],
            Order::StreamFirst => [Choice::Stream, Choice::Recompute, Choice::Tile],
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Choice {
    Recompute,
    /// Wide activations exist for some tokens at a time.
    Tile,
    Stream,
}

/// Policies, and the last of each kind of choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Ladder {
    pub rungs: Vec<Policy>,
    pub ends: Vec<usize>,
}

impl Ladder {
    fn of(choices: Vec<(usize, Policy)>) -> Ladder {
        let (mut rungs, mut kinds): (Vec<Policy>, Vec<usize>) = (Vec::new(), Vec::new());
        for (kind, policy) in choices {
            if rungs.last() != Some(&policy) {
                rungs.push(policy);
                kinds.push(kind);
            }
        }
        let ends = (0..kinds.len()).filter(|index| kinds.get(index + 1) != Some(&kinds[*index])).collect();
        Ladder { rungs, ends }
    }
}

/// The choices of a rung. None of them is made on the first.
#[derive(Clone, Copy, Debug, Default)]
struct Rung {
    recomputed: usize,
    weights_away: usize,
    embedding_away: bool,
    tables_away: bool,
    /// Activations of recomputed layers.
    activations_away: bool,
    moments_away: bool,
    tile_tokens: Option<usize>,
    /// Weights come when they are needed and not ahead.
    is_late: bool,
}

/// The ladders that the pins leave, each with at least one rung. `least_bytes` is what so many recomputed layers need.
pub fn all(
    request: &Request,
    pins: &Pins,
    loss_chunk: usize,
    least_bytes: impl Fn(usize) -> u64,
) -> Vec<Ladder> {
    if let Some(policy) = &pins.policy {
        return vec![Ladder { rungs: vec![policy.clone()], ends: vec![0] }];
    }
    let layers = request.spec.layers;
    let most_recomputed = match &pins.recompute {
        Some(_) => 0,
        None => leanest_count(layers, least_bytes),
    };
    let build = |order: Order| {
        let rungs = rungs(request, pins, order, most_recomputed);
        let choices = rungs.into_iter().map(|(kind, rung)| (kind, policy(request, pins, loss_chunk, rung)));
        Ladder::of(choices.collect())
    };
    let mut ladders: Vec<Ladder> = Order::ALL.into_iter().map(build).collect();
    ladders.dedup();
    ladders
}

/// How many recomputed layers need least. Backward begins with the last layer, beside the kept inputs
/// of all the others: running it again there can take more than keeping it does.
fn leanest_count(layers: usize, least_bytes: impl Fn(usize) -> u64) -> usize {
    if least_bytes(layers - 1) < least_bytes(layers) { layers - 1 } else { layers }
}

/// Rungs with a number for the kind of choice that each adds to the one before.
fn rungs(request: &Request, pins: &Pins, order: Order, most_recomputed: usize) -> Vec<(usize, Rung)> {
    let recompute = |from: Rung| {
        let layers = (1..=most_recomputed).map(|recomputed| Rung { recomputed, ..from });
        let away = Rung { recomputed: most_recomputed, activations_away: true, ..from };
        vec![layers.collect(), vec![away]]
    };
    let stream = |from: Rung| {
        let layers = (1..=request.spec.layers).map(|weights_away| Rung { weights_away, ..from });
        let tables = Rung { weights_away: request.spec.layers, tables_away: true, ..from };
        vec![layers.collect(), vec![tables]]
    };
    let tile = |from: Rung| {
        let sizes = tile_choices(request.device, request.extent.tokens).into_iter();
        vec![sizes.map(|tokens| Rung { tile_tokens: Some(tokens), ..from }).collect()]
    };
    // Rows of the embedding are few: looking them up elsewhere costs next to nothing.
    let mut last = Rung { embedding_away: !request.spec.tied_head, ..Rung::default() };
    let mut kinds: Vec<Vec<Rung>> = vec![vec![Rung::default()], vec![last]];
    for choice in order.choices() {
        kinds.extend(match choice {
            Choice::Recompute => recompute(last),
            Choice::Tile => tile(last),
            Choice::Stream => stream(last),
        });
        last = *kinds.iter().flatten().last().expect("the first rung is there");
    }
    let mut ends = vec![Rung { moments_away: true, ..last }];
    if pins.weights_away != Some(0) || pins.tables_away != Some(false) {
        ends.push(Rung { moments_away: true, is_late: true, ..last });
    }
    kinds.push(ends);
    let numbered = kinds.into_iter().enumerate();
    numbered.flat_map(|(kind, rungs)| rungs.into_iter().map(move |rung| (kind, rung))).collect()
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
    let embedding = pins.tables_away.unwrap_or(rung.embedding_away) && !tables;
    let window_bytes = match rung.is_late || (weights.is_empty() && !tables) {
        true => 0,
        false => 2 * layer_bytes(request),
    };
    let moments = pins.moments_away.unwrap_or(rung.moments_away);
    let tile_tokens = match pins.tile_tokens {
        Some(tokens) => Some(tokens).filter(|tokens| *tokens > 0),
        None => rung.tile_tokens,
    };
    let on_disk = pins.weights_on_disk;
    let away = Away { weights, embedding, tables, on_disk, activations, moments, window_bytes };
    Policy { recompute, loss_chunk, tile_tokens, away }
}

/// Tokens of a tile to try, the most first: a fourth of them and a sixteenth, as long as products have rows enough.
pub fn tile_choices(device: DeviceKind, tokens: usize) -> Vec<usize> {
    let fewest = match device {
        DeviceKind::Cpu => 256,
        DeviceKind::Cuda => 2048,
    };
    let sizes = [4, 16].map(|tiles| tokens.div_ceil(tiles).next_multiple_of(128));
    sizes.into_iter().filter(|size| *size >= fewest && *size < tokens).collect()
}

/// All weights elsewhere, so many layers of them on the device at the same time.
pub fn all_weights_away(request: &Request, layers_here: usize) -> Away {
    Away {
        weights: (0..request.spec.layers).collect(),
        tables: true,
        window_bytes: layers_here * layer_bytes(request),
        ..Away::default()
    }
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
