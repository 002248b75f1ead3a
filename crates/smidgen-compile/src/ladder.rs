//! Ladders: choices from the fastest to the leanest, each rung with less on the device than the one before.
//!
//! Two orders, because which is faster follows from the rates of the device: layers computed again first, whose
//! price is arithmetic, or weights sent away first, whose price is the link and may hide behind the arithmetic. What
//! is pinned is the same on every rung. Where a model is so small that a transfer takes more than it saves, higher
//! rungs may need more again: bytes turn only where one kind of choice ends and the next begins.
//! Mixtures of the two are not here: the search (`improve.rs`) finds them, beginning at a rung.

use crate::passes::head_pieces;
use crate::passes::stream::FEWEST_BYTES;
use crate::question::Pins;
use crate::request::{Away, Policy, Recompute, Request, spread};
use smidgen_ir::{DeviceKind, Extent};

/// Layers of weights that may be on the device at the same time, unless memory presses.
pub const USUAL_WINDOW: usize = 2;

/// A policy in few numbers: what is searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    pub loss_chunk: usize,
    /// The first so many layers.
    pub recomputed: usize,
    /// So many layers, spread evenly.
    pub weights_away: usize,
    /// The embedding alone, of which rows are looked up where it lies.
    pub embedding_away: bool,
    pub tables_away: bool,
    /// The head comes in pieces, where the tables are away.
    pub head_in_pieces: bool,
    pub activations: Waiting,
    pub moments_away: bool,
    /// Tokens for which wide activations exist at the same time.
    pub tile_tokens: Option<usize>,
    /// Layers of weights that may be there at the same time; 0 where they come when they are needed.
    pub window_layers: usize,
}

/// Which activations wait elsewhere for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    None,
    /// What recomputed layers begin with.
    OfRecomputed,
    All,
}

/// The choices that pins leave, and what policy they make.
#[derive(Clone, Debug)]
pub struct Freedom<'a> {
    pub pins: &'a Pins,
    pub layers: usize,
    layer_bytes: usize,
    /// Whether the embedding can be away while the head is not.
    pub has_own_embedding: bool,
    /// Pieces in which the head can come; 0 where it comes whole.
    pub head_pieces: usize,
    device: DeviceKind,
}

impl<'a> Freedom<'a> {
    pub fn of(request: &Request, pins: &'a Pins) -> Freedom<'a> {
        Freedom {
            pins,
            layers: request.spec.layers,
            layer_bytes: layer_bytes(request),
            has_own_embedding: !request.spec.tied_head,
            head_pieces: head_pieces::count(request),
            device: request.device,
        }
    }

    /// Everything on the device, as far as it is free.
    pub fn start(&self, loss_chunk: usize) -> Choices {
        Choices {
            loss_chunk,
            recomputed: 0,
            weights_away: self.pins.weights_away.unwrap_or(0),
            embedding_away: false,
            tables_away: self.pins.tables_away.unwrap_or(false),
            head_in_pieces: false,
            activations: match self.pins.activations_away {
                Some(true) => Waiting::All,
                Some(false) | None => Waiting::None,
            },
            moments_away: self.pins.moments_away.unwrap_or(false),
            tile_tokens: self.pins.tile_tokens.filter(|tokens| *tokens > 0),
            window_layers: USUAL_WINDOW,
        }
    }

    /// Any choices, with what is pinned put right.
    fn pinned(&self, choices: Choices) -> Choices {
        let (start, pins) = (self.start(choices.loss_chunk), self.pins);
        if pins.policy.is_some() {
            return start;
        }
        let choices = Choices {
            recomputed: if pins.recompute.is_some() { 0 } else { choices.recomputed },
            weights_away: pins.weights_away.unwrap_or(choices.weights_away),
            embedding_away: choices.embedding_away && pins.tables_away.is_none(),
            tables_away: pins.tables_away.unwrap_or(choices.tables_away),
            tile_tokens: if pins.tile_tokens.is_some() { start.tile_tokens } else { choices.tile_tokens },
            activations: if pins.activations_away.is_some() {
                start.activations
            } else {
                choices.activations
            },
            moments_away: pins.moments_away.unwrap_or(choices.moments_away),
            ..choices
        };
        let head_in_pieces = choices.head_in_pieces && choices.tables_away && self.head_pieces > 1;
        let choices = Choices { head_in_pieces, ..choices };
        let streams = choices.weights_away > 0 || choices.tables_away || choices.moments_away;
        Choices { window_layers: if streams { choices.window_layers } else { USUAL_WINDOW }, ..choices }
    }

    pub fn policy(&self, choices: &Choices) -> Policy {
        if let Some(policy) = &self.pins.policy {
            return policy.clone();
        }
        let choices = self.pinned(*choices);
        let recompute = self.pins.recompute.clone().unwrap_or(Recompute::first(choices.recomputed));
        let activations = match choices.activations {
            Waiting::None => vec![],
            Waiting::OfRecomputed => recompute.layers.clone(),
            Waiting::All => (0..self.layers).collect(),
        };
        let mut weights = spread(choices.weights_away, self.layers);
        // In the middle of a step the link brings the head: the last layers would wait behind it.
        if choices.tables_away {
            weights = weights.into_iter().rev().map(|layer| self.layers - 1 - layer).collect();
        }
        let (tables, moments) = (choices.tables_away, choices.moments_away);
        let window_bytes = match weights.is_empty() && !tables && !moments {
            true => 0,
            false => choices.window_layers * self.layer_bytes,
        };
        let embedding = choices.embedding_away && self.has_own_embedding && !tables;
        let on_disk = self.pins.weights_on_disk;
        let head_pieces = if choices.head_in_pieces { self.head_pieces } else { 0 };
        let away =
            Away { weights, embedding, tables, on_disk, head_pieces, activations, moments, window_bytes };
        let (loss_chunk, tile_tokens) = (choices.loss_chunk, choices.tile_tokens);
        Policy { recompute, loss_chunk, tile_tokens, away }
    }

    /// Tokens of a tile to try: a fourth of all, as long as products have rows enough. With fewer still, attention needs
    /// more than a tile does, and the plan grows by its steps.
    pub fn tile(&self, tokens: usize) -> Option<usize> {
        let fewest = match self.device {
            DeviceKind::Cpu => 256,
            DeviceKind::Cuda => 2048,
        };
        let size = tokens.div_ceil(4).next_multiple_of(128);
        Some(size).filter(|size| *size >= fewest && *size < tokens)
    }

    /// The ladders that the pins leave, each with at least one rung, for micro-batches of so many tokens.
    /// `least_bytes` is what choices need.
    pub fn ladders(
        &self,
        loss_chunk: usize,
        tokens: usize,
        is_short_elsewhere: bool,
        least_bytes: impl Fn(&Choices) -> u64,
    ) -> Vec<Ladder> {
        let is_free = self.pins.policy.is_none() && self.pins.recompute.is_none();
        let most_recomputed = if is_free { self.leanest_count(loss_chunk, least_bytes) } else { 0 };
        let build = |order: Order| {
            let start = self.start(loss_chunk);
            let rungs = rungs(self, start, tokens, order, most_recomputed).into_iter();
            let here = |rung: Choices| match order {
                Order::RecomputeFirst | Order::StreamFirst => rung,
                Order::NothingAway => {
                    let Choices { recomputed, tile_tokens, .. } = rung;
                    Choices { recomputed, tile_tokens, ..start }
                }
            };
            Ladder::of(rungs.map(|(kind, rung)| (kind, self.pinned(here(rung)))).collect())
        };
        let orders = Order::ALL.into_iter().take(if is_short_elsewhere { 3 } else { 2 });
        let mut ladders: Vec<Ladder> = orders.map(build).collect();
        ladders.dedup();
        ladders
    }

    /// How many recomputed layers need least. Backward begins with the last layer, beside the kept inputs
    /// of all the others: running it again there can take more than keeping it does.
    fn leanest_count(&self, loss_chunk: usize, least_bytes: impl Fn(&Choices) -> u64) -> usize {
        let bytes = |recomputed| least_bytes(&Choices { recomputed, ..self.start(loss_chunk) });
        if bytes(self.layers - 1) < bytes(self.layers) { self.layers - 1 } else { self.layers }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    RecomputeFirst,
    StreamFirst,
    /// For where there is little room elsewhere.
    NothingAway,
}

impl Order {
    const ALL: [Order; 3] = [Order::RecomputeFirst, Order::StreamFirst, Order::NothingAway];

    fn kinds(self) -> [Kind; 3] {
        match self {
            Order::RecomputeFirst | Order::NothingAway => [Kind::Recompute, Kind::Tile, Kind::Stream],
            Order::StreamFirst => [Kind::Stream, Kind::Recompute, Kind::Tile],
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Recompute,
    /// Wide activations exist for some tokens at a time.
    Tile,
    Stream,
}

/// Choices, and the last of each kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Ladder {
    pub rungs: Vec<Choices>,
    pub ends: Vec<usize>,
}

impl Ladder {
    fn of(choices: Vec<(usize, Choices)>) -> Ladder {
        let (mut rungs, mut kinds): (Vec<Choices>, Vec<usize>) = (Vec::new(), Vec::new());
        for (kind, rung) in choices {
            if rungs.last() != Some(&rung) {
                rungs.push(rung);
                kinds.push(kind);
            }
        }
        let ends = (0..kinds.len()).filter(|index| kinds.get(index + 1) != Some(&kinds[*index])).collect();
        Ladder { rungs, ends }
    }
}

/// Rungs with a number for the kind of choice that each adds to the one before.
fn rungs(
    freedom: &Freedom,
    start: Choices,
    tokens: usize,
    order: Order,
    most_recomputed: usize,
) -> Vec<(usize, Choices)> {
    let layers = freedom.layers;
    let recompute = |from: Choices| {
        let counts = (1..=most_recomputed).map(|recomputed| Choices { recomputed, ..from });
        let activations = Waiting::OfRecomputed;
        vec![counts.collect(), vec![Choices { recomputed: most_recomputed, activations, ..from }]]
    };
    let stream = |from: Choices| {
        let counts = (1..=layers).map(|weights_away| Choices { weights_away, ..from });
        let tables = Choices { weights_away: layers, tables_away: true, ..from };
        vec![counts.collect(), vec![tables], vec![Choices { head_in_pieces: true, ..tables }]]
    };
    let tile = |from: Choices| {
        let size = freedom.tile(tokens);
        vec![size.map(|tokens| Choices { tile_tokens: Some(tokens), ..from }).into_iter().collect()]
    };
    // Rows of the embedding are few: looking them up elsewhere costs next to nothing.
    let mut last = Choices { embedding_away: freedom.has_own_embedding, ..start };
    let mut kinds: Vec<Vec<Choices>> = vec![vec![start], vec![last]];
    for kind in order.kinds() {
        kinds.extend(match kind {
            Kind::Recompute => recompute(last),
            Kind::Tile => tile(last),
            Kind::Stream => stream(last),
        });
        last = *kinds.iter().flatten().last().expect("the first rung is there");
    }
    let moments = Choices { moments_away: true, ..last };
    kinds.push(vec![moments, Choices { window_layers: 0, ..moments }]);
    let numbered = kinds.into_iter().enumerate();
    numbered.flat_map(|(kind, rungs)| rungs.into_iter().map(move |rung| (kind, rung))).collect()
}

/// All weights elsewhere, so many layers of them on the device at the same time; the head in pieces where that is none.
pub fn all_weights_away(request: &Request, layers_here: usize) -> Away {
    Away {
        weights: (0..request.spec.layers).collect(),
        tables: true,
        head_pieces: if layers_here == 0 { head_pieces::count(request) } else { 0 },
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
