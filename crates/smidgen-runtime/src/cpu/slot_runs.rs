//! New tokens of generation, as runs of neighbouring tokens that continue one sequence.
//!
//! Recurrent mixers of generation read and write the state of a slot once per run.

/// The slot and the position of each new token.
#[derive(Clone, Copy)]
pub struct SlotRuns<'a> {
    pub slots: &'a [i32],
    pub positions: &'a [i32],
}

/// Neighbouring tokens of one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRun {
    pub slot: usize,
    /// The first token.
    pub first: usize,
    pub count: usize,
    /// Whether the run begins its sequence.
    pub begins: bool,
}

impl<'a> SlotRuns<'a> {
    pub fn iter(self) -> impl Iterator<Item = SlotRun> + 'a {
        let mut first = 0;
        self.slots.chunk_by(|one, other| one == other).map(move |slots| {
            let (begins, count) = (self.positions[first] == 0, slots.len());
            let run = SlotRun { slot: slots[0] as usize, first, count, begins };
            first += count;
            run
        })
    }
}
