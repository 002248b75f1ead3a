//! What this process takes of a GPU that others use too.
//!
//! The driver tells what is free, whoever took the rest. When that changes, the management library is asked what this
//! process holds: only if that moved, too, is the change our own. Where it does not know this process, as in containers
//! that hide numbers of processes, all of a change counts as ours.

/// Bytes as they were told last.
#[derive(Debug, Default)]
pub struct OwnMemory {
    /// Taken of the GPU by anybody since the device was opened.
    taken: u64,
    /// Held by this process.
    held: Option<u64>,
    /// What of `taken` is ours.
    own: u64,
}

impl OwnMemory {
    /// Our share of `taken`, which anybody took; `held` is asked only where that has changed.
    pub fn of(&mut self, taken: u64, held: impl FnOnce() -> Option<u64>) -> u64 {
        if taken == self.taken {
            return self.own;
        }
        let now = held();
        self.own = match (self.held, now) {
            (Some(before), Some(now)) => (self.own + now).saturating_sub(before),
            _ => (self.own + taken).saturating_sub(self.taken),
        };
        (self.taken, self.held) = (taken, now);
        self.own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_take_is_not_ours() {
        let mut own = OwnMemory::default();
        assert_eq!(own.of(500, || Some(480)), 500, "opened: the driver's count is the better one");
        assert_eq!(own.of(500, || unreachable!("nothing changed")), 500);
        assert_eq!(own.of(2500, || Some(2480)), 2500, "reserved");
        assert_eq!(own.of(9500, || Some(2480)), 2500, "another program came");
        assert_eq!(own.of(9600, || Some(2580)), 2600, "it was us");
        assert_eq!(own.of(2600, || Some(2580)), 2600, "the other went");
        assert_eq!(own.of(100, || Some(80)), 100, "given back");
    }

    #[test]
    fn where_nobody_tells_all_of_it_is_ours() {
        let mut own = OwnMemory::default();
        assert_eq!((own.of(500, || None), own.of(700, || None), own.of(600, || None)), (500, 700, 600));
        assert_eq!(own.of(800, || Some(1)), 800, "one number alone says nothing of a change");
    }
}
