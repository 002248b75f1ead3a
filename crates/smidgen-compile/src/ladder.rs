//! Ladders: points from the fastest to the leanest. Each rung has less on the device than the rung before.
//!
//! There are two orders, because the device's rates decide which is faster: recompute first, which costs arithmetic, or
//! offload weights first, which costs transfers that may overlap with arithmetic. Pinned choices are the same on every
//! rung. If a model is so small that a transfer needs more memory than it saves, a higher rung may need more again; the
//! bytes start to rise only where one kind of choice ends and the next begins.
//! Mixtures of the two orders are left to the search in `improve.rs`, which starts from a rung.

use crate::choices::{Freedom, Point};
use smidgen_ir::Choice;

/// The ladders that the pins allow, each with at least one rung, for one chunk of the loss. `bytes` measures a point.
pub fn ladders(
    freedom: &Freedom,
    loss_chunk: usize,
    is_offload_limited: bool,
    bytes: impl Fn(&Point) -> u64,
) -> Vec<Ladder> {
    let most_recomputed = match freedom.pins.sets(Choice::Recompute) {
        false => leanest_count(freedom, loss_chunk, bytes),
        true => 0,
    };
    let build = |order: Order| {
        let rungs = rungs(freedom, loss_chunk, order, most_recomputed).into_iter();
        let allowed = |rung: Point| match order {
            Order::RecomputeFirst | Order::OffloadFirst => rung,
            Order::NoOffload => freedom.without_offload(rung),
        };
        Ladder::of(rungs.map(|(kind, rung)| (kind, freedom.pinned(allowed(rung)))).collect())
    };
    let orders = Order::ALL.into_iter().take(if is_offload_limited { 3 } else { 2 });
    let mut ladders: Vec<Ladder> = orders.map(build).collect();
    ladders.dedup();
    ladders
}

/// The number of recomputed layers that needs the least memory: all, or all but the last. The backward pass starts with the
/// last layer, when the inputs of all others are in memory, so recomputing it can need more than keeping its activations.
fn leanest_count(freedom: &Freedom, loss_chunk: usize, bytes: impl Fn(&Point) -> u64) -> usize {
    let layers = freedom.layers;
    let bytes = |recomputed| bytes(&freedom.with_recomputed(loss_chunk, recomputed));
    if bytes(layers - 1) < bytes(layers) { layers - 1 } else { layers }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    RecomputeFirst,
    OffloadFirst,
    /// Tried if offloading is limited.
    NoOffload,
}

impl Order {
    const ALL: [Order; 3] = [Order::RecomputeFirst, Order::OffloadFirst, Order::NoOffload];

    fn kinds(self) -> [Kind; 3] {
        match self {
            Order::RecomputeFirst | Order::NoOffload => [Kind::Recompute, Kind::Tile, Kind::Stream],
            Order::OffloadFirst => [Kind::Stream, Kind::Recompute, Kind::Tile],
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Recompute,
    Tile,
    Stream,
}

/// Points, and the index of the last one of each kind of choice. Repeated points are left out.
#[derive(Clone, Debug, PartialEq)]
pub struct Ladder {
    pub rungs: Vec<Point>,
    pub ends: Vec<usize>,
}

impl Ladder {
    fn of(points: Vec<(usize, Point)>) -> Ladder {
        let (mut rungs, mut kinds): (Vec<Point>, Vec<usize>) = (Vec::new(), Vec::new());
        for (kind, rung) in points {
            if rungs.last() != Some(&rung) {
                rungs.push(rung);
                kinds.push(kind);
            }
        }
        let ends = (0..kinds.len()).filter(|index| kinds.get(index + 1) != Some(&kinds[*index])).collect();
        Ladder { rungs, ends }
    }
}

/// The rungs, each with a number for the kind of choice that it varies.
fn rungs(freedom: &Freedom, loss_chunk: usize, order: Order, most_recomputed: usize) -> Vec<(usize, Point)> {
    let [start, mut last] = freedom.first_rungs(loss_chunk);
    let mut kinds: Vec<Vec<Point>> = vec![vec![start], vec![last]];
    for kind in order.kinds() {
        kinds.extend(match kind {
            Kind::Recompute => freedom.recompute_rungs(last, most_recomputed),
            Kind::Tile => freedom.tile_rungs(last),
            Kind::Stream => freedom.stream_rungs(last),
        });
        last = *kinds.iter().flatten().last().expect("the first rung is there");
    }
    kinds.push(freedom.last_rungs(last));
    let numbered = kinds.into_iter().enumerate();
    numbered.flat_map(|(kind, rungs)| rungs.into_iter().map(move |rung| (kind, rung))).collect()
}
