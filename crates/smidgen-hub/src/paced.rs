//! A reader that gives up a connection which is too slow to be of use.
//!
//! A server that sends a byte now and then is never silent, so the limit on silence alone would let a download last for
//! ever. Too slow is less than 1 KiB/s over as long a time as a connection may be silent.
//! Left out: attempts, which continue where a connection was given up (`hf_download.rs`).

use std::io::{self, Read};
use std::time::{Duration, Instant};

const LEAST_BYTES_PER_S: u64 = 1 << 10;

pub struct Paced<R> {
    source: R,
    pace: Pace,
}

impl<R: Read> Paced<R> {
    pub fn new(source: R, window: Duration) -> Paced<R> {
        Paced { source, pace: Pace { window, waited: Duration::ZERO, bytes: 0 } }
    }
}

impl<R: Read> Read for Paced<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Only the time of the call counts, not that of writing what it returned.
        let begun = Instant::now();
        let count = self.source.read(buffer)?;
        if count > 0 && self.pace.is_too_slow(begun.elapsed(), count as u64) {
            Err(io::Error::new(io::ErrorKind::TimedOut, self.pace.reason()))
        } else {
            Ok(count)
        }
    }
}

/// What came in the current window.
struct Pace {
    window: Duration,
    waited: Duration,
    bytes: u64,
}

impl Pace {
    /// Counts bytes and the time that they took. A window that ends without enough of them is too slow.
    fn is_too_slow(&mut self, took: Duration, bytes: u64) -> bool {
        self.waited += took;
        self.bytes += bytes;
        if self.waited < self.window {
            return false;
        }
        let is_too_slow = (self.bytes as f64) < LEAST_BYTES_PER_S as f64 * self.waited.as_secs_f64();
        (self.waited, self.bytes) = (Duration::ZERO, 0);
        is_too_slow
    }

    fn reason(&self) -> String {
        format!("less than 1 KiB/s for {} s", self.window.as_secs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_with_too_few_bytes_is_too_slow() {
        let mut pace = Pace { window: Duration::from_secs(60), waited: Duration::ZERO, bytes: 0 };
        let mut add = |seconds, bytes| pace.is_too_slow(Duration::from_secs(seconds), bytes);
        // A byte a second.
        assert!((0..59).all(|_| !add(1, 1)));
        assert!(add(1, 1));
        // A pause within the window is made up for.
        assert!(!add(59, 1) && !add(1, 100_000));
        // What came before the window does not count.
        assert!(!add(1, 1 << 30) && !add(59, 1));
        assert!(!add(59, 1) && add(1, 1));
        assert_eq!(pace.reason(), "less than 1 KiB/s for 60 s");
    }
}
