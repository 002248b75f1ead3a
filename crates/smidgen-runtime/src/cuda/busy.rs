//! The load of a GPU, read at most once per second, so that reading it does not slow down short steps.
//!
//! The driver averages over up to a second, so a shorter interval would return the same value again.

use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(1);

/// The last reading.
#[derive(Debug, Default)]
pub struct Busy {
    read_at: Option<Instant>,
    percent: Option<u32>,
}

impl Busy {
    /// Percent of time in which the GPU computed; `read` is called only if the last reading is old.
    pub fn at(&mut self, now: Instant, read: impl FnOnce() -> Option<u32>) -> Option<u32> {
        let is_old = self.read_at.is_none_or(|before| now.duration_since(before) >= INTERVAL);
        if is_old {
            (self.read_at, self.percent) = (Some(now), read());
        }
        self.percent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_holds_for_a_second() {
        let (mut busy, begun) = (Busy::default(), Instant::now());
        assert_eq!(busy.at(begun, || Some(97)), Some(97));
        let soon = begun + Duration::from_millis(999);
        assert_eq!(busy.at(soon, || unreachable!("it was just read")), Some(97));
        assert_eq!(busy.at(begun + INTERVAL, || Some(40)), Some(40));
        assert_eq!(busy.at(begun + 3 * INTERVAL, || None), None);
    }
}
