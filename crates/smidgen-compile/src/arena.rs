//! The arena: lifetimes become offsets.
//!
//! Persistent buffers lie side by side. Each entry point packs its transient buffers by itself, into the
//! same bytes: buffers are taken in an order and laid at the lowest place that is free for their whole
//! life. Saved activations nest like parentheses, so taking the longest lives first stacks them without
//! a gap; other orders win on other programs, so the best of a few is kept.

use crate::schedule::Schedule;
use smidgen_ir::plan::align_up;
use smidgen_ir::{Buffer, Entry, Lifetime, Plan, Region, Space, SpaceSize, verify};
use std::cmp::Reverse;

pub fn plan_memory(schedule: Schedule) -> Plan {
    let plan = plan_memory_unchecked(schedule);
    verify::expect_sound("arena", &verify::plan(&plan));
    plan
}

/// The same for candidates of a search.
pub fn plan_memory_unchecked(schedule: Schedule) -> Plan {
    let mut plan = schedule.plan;
    let size = pack_space(&mut plan, Space::Device);
    (plan.persistent_bytes, plan.transient_bytes) = (size.persistent_bytes, size.transient_bytes);
    plan.host = pack_space(&mut plan, Space::Host);
    plan.disk = pack_space(&mut plan, Space::Disk);
    plan
}

fn pack_space(plan: &mut Plan, space: Space) -> SpaceSize {
    let mut size = SpaceSize::default();
    let here = plan.buffers.iter_mut().filter(|buffer| buffer.space == space);
    for buffer in here.filter(|buffer| buffer.lifetime == Lifetime::Run) {
        buffer.offset = size.persistent_bytes;
        size.persistent_bytes += align_up(buffer.bytes);
    }
    for entry in plan.entries.iter().map(|entry| entry.entry) {
        let lives = transient_lives(&plan.buffers, entry, space);
        let (offsets, bytes) = pack(&lives);
        for (life, offset) in lives.iter().zip(offsets) {
            plan.buffers[life.buffer].offset = size.persistent_bytes + offset;
        }
        size.transient_bytes = size.transient_bytes.max(bytes);
    }
    size
}

/// A buffer to be placed: its aligned size and the steps during which it lives.
#[derive(Clone, Copy, Debug)]
pub struct Life {
    pub buffer: usize,
    pub bytes: usize,
    pub first: usize,
    pub last: usize,
}

fn transient_lives(buffers: &[Buffer], entry: Entry, space: Space) -> Vec<Life> {
    let here = buffers.iter().enumerate().filter(|(_, buffer)| buffer.space == space);
    let own = here.filter_map(|(index, buffer)| match buffer.lifetime {
        Lifetime::Steps { entry: of, first, last } if of == entry => {
            debug_assert_eq!(buffer.lifetime.region(), Region::Transient);
            Some(Life { buffer: index, bytes: align_up(buffer.bytes), first, last })
        }
        _ => None,
    });
    own.collect()
}

/// Where a buffer stands in an order: two sizes, largest first, then its first step.
type Rank = (Reverse<usize>, Reverse<usize>, usize);

/// Offsets in the order of `lives`, and the bytes that they span: the best of several orders.
pub fn pack(lives: &[Life]) -> (Vec<usize>, usize) {
    let least = most_alive(lives);
    let orders: [fn(&Life) -> Rank; 3] = [
        |life| (Reverse(life.last - life.first), Reverse(life.bytes), life.first),
        |life| (Reverse(life.bytes), Reverse(life.last - life.first), life.first),
        |life| (Reverse((life.last - life.first + 1) * life.bytes), Reverse(life.bytes), life.first),
    ];
    let mut best: Option<(Vec<usize>, usize)> = None;
    for order in orders {
        let candidate = pack_in_order(lives, order);
        if best.as_ref().is_none_or(|(_, bytes)| candidate.1 < *bytes) {
            best = Some(candidate);
        }
        if best.as_ref().is_some_and(|(_, bytes)| *bytes == least) {
            break;
        }
    }
    best.unwrap_or_default()
}

/// Bytes alive at the fullest step: no packing can need less.
pub fn most_alive(lives: &[Life]) -> usize {
    let steps = lives.iter().map(|life| life.last + 2).max().unwrap_or(0);
    let mut change = vec![0isize; steps];
    for life in lives {
        change[life.first] += life.bytes as isize;
        change[life.last + 1] -= life.bytes as isize;
    }
    let mut live = 0;
    let totals = change.into_iter().map(|delta| {
        live += delta;
        live as usize
    });
    totals.max().unwrap_or(0)
}

/// Steps that share a list of what is placed: most lives are shorter.
const BLOCK_STEPS: usize = 32;
/// A life over more blocks looks at everything that is placed.
const MOST_BLOCKS: usize = 4;

fn pack_in_order<K: Ord>(lives: &[Life], key: impl Fn(&Life) -> K) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..lives.len()).collect();
    order.sort_by_cached_key(|&index| (key(&lives[index]), index));
    let mut offsets = vec![0; lives.len()];
    let mut span = 0;
    // Placed so far, by offset; and those that are alive in a block of steps, in any order.
    let mut placed: Vec<usize> = Vec::with_capacity(lives.len());
    let steps = lives.iter().map(|life| life.last + 1).max().unwrap_or(0);
    let mut blocks: Vec<Vec<usize>> = vec![Vec::new(); steps.div_ceil(BLOCK_STEPS)];
    let mut near: Vec<usize> = Vec::new();
    for index in order {
        let life = &lives[index];
        let own_blocks = life.first / BLOCK_STEPS..=life.last / BLOCK_STEPS;
        let is_beside = |other: &usize| lives[*other].first <= life.last && lives[*other].last >= life.first;
        near.clear();
        if own_blocks.clone().count() <= MOST_BLOCKS {
            let blocks = blocks[own_blocks.clone()].iter().flatten().copied();
            near.extend(blocks.filter(is_beside));
            near.sort_unstable_by_key(|&other| offsets[other]);
        } else {
            near.extend(placed.iter().copied().filter(is_beside));
        }
        let mut offset = 0;
        for &other in &near {
            if offsets[other] >= offset + life.bytes {
                break;
            }
            offset = offset.max(offsets[other] + lives[other].bytes);
        }
        offsets[index] = offset;
        span = span.max(offset + life.bytes);
        let position = placed.partition_point(|&other| offsets[other] <= offset);
        placed.insert(position, index);
        blocks[own_blocks].iter_mut().for_each(|block| block.push(index));
    }
    (offsets, span)
}
