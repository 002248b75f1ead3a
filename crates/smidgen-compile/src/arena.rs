//! The arena: gives every buffer of a schedule its offset.
//!
//! Persistent buffers are placed one after the other. The transient buffers of each entry point are packed separately, into
//! the same bytes: in some order, each is placed at the lowest offset that is free for its whole lifetime. Saved
//! activations nest like parentheses, so placing the longest lifetimes first stacks them without a gap; other orders are
//! better for other programs, so the best of a few is kept.

use crate::schedule::Schedule;
use smidgen_ir::plan::{SHARED_ALIGNMENT, align_up};
use smidgen_ir::{Buffer, Entry, Lifetime, Plan, Region, Space, SpaceSize, verify};
use std::cmp::Reverse;

pub fn plan_memory(schedule: Schedule) -> Plan {
    let plan = plan_memory_unchecked(schedule);
    verify::expect_sound("arena", &verify::plan(&plan));
    plan
}

/// [`plan_memory`] without the checks, for candidates of a search.
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
    let has_ranks = plan.has_ranks;
    let is_shared = |buffer: &Buffer| has_ranks && buffer.is_shareable();
    // Buffers that ranks share come first.
    for shared in [true, false] {
        let in_space = plan.buffers.iter_mut().filter(|buffer| buffer.space == space);
        let own = in_space.filter(|buffer| buffer.lifetime == Lifetime::Run && is_shared(buffer) == shared);
        for buffer in own {
            buffer.offset = size.persistent_bytes;
            size.persistent_bytes += align_up(buffer.bytes);
        }
        if shared {
            size.persistent_bytes = size.persistent_bytes.next_multiple_of(SHARED_ALIGNMENT);
            size.shared_bytes = size.persistent_bytes;
        }
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

/// A buffer to be placed: its aligned size and its first and last step.
#[derive(Clone, Copy, Debug)]
pub struct Life {
    pub buffer: usize,
    pub bytes: usize,
    pub first: usize,
    pub last: usize,
}

fn transient_lives(buffers: &[Buffer], entry: Entry, space: Space) -> Vec<Life> {
    let in_space = buffers.iter().enumerate().filter(|(_, buffer)| buffer.space == space);
    let own = in_space.filter_map(|(index, buffer)| match buffer.lifetime {
        Lifetime::Steps { entry: of, first, last } if of == entry => {
            debug_assert_eq!(buffer.lifetime.region(), Region::Transient);
            Some(Life { buffer: index, bytes: align_up(buffer.bytes), first, last })
        }
        _ => None,
    });
    own.collect()
}

/// The sort key of a buffer: two sizes, largest first, then its first step.
type Key = (Reverse<usize>, Reverse<usize>, usize);

/// Offsets in the order of `lives`, and the bytes that they span: the best of several orders.
pub fn pack(lives: &[Life]) -> (Vec<usize>, usize) {
    let least = peak_live_bytes(lives);
    let orders: [fn(&Life) -> Key; 3] = [
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

/// Bytes in use at the fullest step: no packing can need less.
pub fn peak_live_bytes(lives: &[Life]) -> usize {
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

/// Steps that share a list of placed buffers; most lifetimes are shorter.
const BLOCK_STEPS: usize = 128;
/// For a lifetime over more blocks than this, all placed buffers are searched.
const MOST_BLOCKS: usize = 3;

fn pack_in_order(lives: &[Life], key: fn(&Life) -> Key) -> (Vec<usize>, usize) {
    let mut order: Vec<u32> = (0..lives.len() as u32).collect();
    order.sort_by_cached_key(|&index| (key(&lives[index as usize]), index));
    let mut offsets = vec![0; lives.len()];
    let mut span = 0;
    // Buffers placed so far, and those of them that are in use in each block of steps; all sorted by offset.
    let mut placed: Vec<u32> = Vec::with_capacity(lives.len());
    let steps = lives.iter().map(|life| life.last + 1).max().unwrap_or(0);
    let mut blocks: Vec<Vec<u32>> = vec![Vec::new(); steps.div_ceil(BLOCK_STEPS)];
    for index in order {
        let life = &lives[index as usize];
        let own_blocks = life.first / BLOCK_STEPS..=life.last / BLOCK_STEPS;
        let offset = match &blocks[own_blocks.clone()] {
            [block] => lowest_gap(life, lives, &offsets, block.iter().copied()),
            few if few.len() <= MOST_BLOCKS => {
                lowest_gap(life, lives, &offsets, merged_by_offset(few, &offsets))
            }
            _ => lowest_gap(life, lives, &offsets, placed.iter().copied()),
        };
        offsets[index as usize] = offset;
        span = span.max(offset + life.bytes);
        for list in blocks[own_blocks].iter_mut().chain([&mut placed]) {
            let position = list.partition_point(|&other| offsets[other as usize] <= offset);
            list.insert(position, index);
        }
    }
    (offsets, span)
}

/// The lowest offset that overlaps none of `placed`, which are ordered by offset.
fn lowest_gap(life: &Life, lives: &[Life], offsets: &[usize], placed: impl Iterator<Item = u32>) -> usize {
    let mut offset = 0;
    for other in placed {
        let (at, other) = (offsets[other as usize], &lives[other as usize]);
        if other.first > life.last || other.last < life.first {
            continue;
        }
        if at >= offset + life.bytes {
            break;
        }
        offset = offset.max(at + other.bytes);
    }
    offset
}

/// Merges a few lists that are sorted by offset. Repeated items are not removed.
fn merged_by_offset<'a>(lists: &'a [Vec<u32>], offsets: &'a [usize]) -> impl Iterator<Item = u32> + 'a {
    let mut rests = [&[] as &[u32]; MOST_BLOCKS];
    rests.iter_mut().zip(lists).for_each(|(rest, list)| *rest = list);
    std::iter::from_fn(move || {
        let heads = rests.iter_mut().filter(|rest| !rest.is_empty());
        let lowest = heads.min_by_key(|rest| offsets[rest[0] as usize])?;
        let (first, rest) = lowest.split_first()?;
        *lowest = rest;
        Some(*first)
    })
}
