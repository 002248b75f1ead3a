//! The row table of the KV cache: which rows hold which positions of which sequence.
//!
//! A row belongs to one position of one slot, or of several slots whose sequences share a prefix. It is free when the
//! last of them releases it. A shared row is never written. Results do not depend on which row a position gets.
//! Left out: the device's copy of the table (`decoder.rs`).

use std::ops::Range;

#[derive(Clone, Debug)]
pub struct Slots {
    positions: usize,
    /// The row of each position of each slot; entries beyond a slot's length are undefined.
    table: Vec<i32>, // (L, P)
    lengths: Vec<usize>,
    /// The number of slots that hold each row.
    holders: Vec<u32>, // (N)
    /// Free rows; the last one is used next.
    free: Vec<i32>,
}

impl Slots {
    pub fn new(slots: usize, positions: usize, cache_rows: usize) -> Slots {
        Slots {
            positions,
            table: vec![0; slots * positions],
            lengths: vec![0; slots],
            holders: vec![0; cache_rows],
            free: (0..cache_rows as i32).rev().collect(),
        }
    }

    pub fn count(&self) -> usize {
        self.lengths.len()
    }

    pub fn length(&self, slot: usize) -> usize {
        self.lengths[slot]
    }

    pub fn rows(&self, slot: usize, positions: Range<usize>) -> &[i32] {
        assert!(positions.end <= self.lengths[slot], "slot {slot} has {} positions", self.lengths[slot]);
        let first = slot * self.positions;
        &self.table[first + positions.start..first + positions.end]
    }

    /// Gives the slot `count` more positions and returns them.
    pub fn extend(&mut self, slot: usize, count: usize) -> Range<usize> {
        let first = self.lengths[slot];
        assert!(
            first + count <= self.positions,
            "{} positions in a slot of {}",
            first + count,
            self.positions
        );
        for position in first..first + count {
            let row = self.free.pop().expect("a sequence is admitted only if there are rows for it");
            self.holders[row as usize] = 1;
            self.table[slot * self.positions + position] = row;
        }
        self.lengths[slot] += count;
        first..first + count
    }

    /// Releases all positions from `length` on.
    pub fn truncate(&mut self, slot: usize, length: usize) {
        for position in (length..self.lengths[slot]).rev() {
            let row = self.table[slot * self.positions + position];
            let holders = &mut self.holders[row as usize];
            *holders -= 1;
            if *holders == 0 {
                self.free.push(row);
            }
        }
        self.lengths[slot] = self.lengths[slot].min(length);
    }

    /// Gives slot `to` the sequence of `from`; they share its rows.
    pub fn share(&mut self, from: usize, to: usize) {
        if from == to {
            return;
        }
        let length = self.lengths[from];
        // The new rows are acquired before the old ones are released, because the slots may already share rows.
        for position in 0..length {
            self.holders[self.table[from * self.positions + position] as usize] += 1;
        }
        self.truncate(to, 0);
        let source = from * self.positions;
        self.table.copy_within(source..source + length, to * self.positions);
        self.lengths[to] = length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_free_when_the_last_holder_releases_them() {
        let mut slots = Slots::new(3, 4, 6);
        assert_eq!(slots.extend(0, 3), 0..3);
        slots.share(0, 1);
        assert_eq!(slots.rows(1, 0..3), slots.rows(0, 0..3).to_vec());
        assert_eq!(slots.free.len(), 3);
        slots.extend(1, 1);
        slots.extend(0, 1);
        assert_ne!(slots.rows(0, 3..4), slots.rows(1, 3..4).to_vec());
        slots.truncate(0, 1);
        // Two rows of the common prefix are still held by slot 1; only the fourth is free.
        assert_eq!((slots.length(0), slots.free.len()), (1, 2));
        slots.truncate(1, 0);
        assert_eq!(slots.free.len(), 5);
        slots.truncate(0, 0);
        assert_eq!(slots.free.len(), 6);
    }

    /// In a beam search a beam is often its own parent, and several have the same parent.
    #[test]
    fn sharing_again_loses_no_rows() {
        let mut slots = Slots::new(2, 8, 8);
        slots.extend(0, 5);
        slots.share(0, 1);
        slots.share(1, 1);
        slots.share(1, 0);
        slots.share(0, 1);
        assert_eq!((slots.length(0), slots.length(1), slots.free.len()), (5, 5, 3));
        slots.truncate(0, 0);
        slots.truncate(1, 0);
        assert_eq!(slots.free.len(), 8);
    }

    #[test]
    #[should_panic(expected = "5 positions in a slot of 4")]
    fn a_slot_has_a_limit() {
        Slots::new(1, 4, 9).extend(0, 5);
    }
}
