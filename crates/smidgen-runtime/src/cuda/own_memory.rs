//! Estimates how much memory of a shared GPU this process uses.
//!
//! The driver reports free memory, but not which process uses the rest. When free memory changes, NVML is asked how
//! much this process uses, and only the change of that number is counted. If NVML does not know this process, as in
//! containers with their own process ids, every change is counted.

/// The last readings.
#[derive(Debug, Default)]
pub struct OwnMemory {
    /// Bytes by which the use of all processes together has grown since the device was opened.
    taken: u64,
    /// Bytes of this process according to NVML.
    held: Option<u64>,
    /// This process's part of `taken`.
    own: u64,
}

impl OwnMemory {
    /// This process's part of `taken`. `held` asks NVML, and is called only if `taken` has changed.
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
    fn memory_of_other_processes_is_not_counted() {
        let mut own = OwnMemory::default();
        assert_eq!(own.of(500, || Some(480)), 500, "opened: the driver's figure counts");
        assert_eq!(own.of(500, || unreachable!("nothing changed")), 500);
        assert_eq!(own.of(2500, || Some(2480)), 2500, "reserved");
        assert_eq!(own.of(9500, || Some(2480)), 2500, "another process started");
        assert_eq!(own.of(9600, || Some(2580)), 2600, "we took 100 more");
        assert_eq!(own.of(2600, || Some(2580)), 2600, "the other process ended");
        assert_eq!(own.of(100, || Some(80)), 100, "freed");
    }

    #[test]
    fn without_nvml_every_change_is_ours() {
        let mut own = OwnMemory::default();
        assert_eq!((own.of(500, || None), own.of(700, || None), own.of(600, || None)), (500, 700, 600));
        assert_eq!(own.of(800, || Some(1)), 800, "one reading shows no change");
    }
}
