//! Counts the exchanges of a rank, for the heartbeat that watches it.
//!
//! All ranks begin the same exchanges in the same order, so a rank that has reached fewer of them than another keeps the
//! others waiting. This finds a rank that still answers heartbeats but makes no progress.

use std::sync::atomic::{AtomicU64, Ordering};

/// Exchanges of a rank, counted from its start. One thread counts, others read.
#[derive(Debug, Default)]
pub struct Progress {
    reached: AtomicU64,
    done: AtomicU64,
}

impl Progress {
    /// Counts an exchange that this rank has reached.
    pub fn reach(&self) {
        self.reached.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an exchange that has finished.
    pub fn finish(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of exchanges that this rank has reached, and of those that have finished.
    pub fn counts(&self) -> (u64, u64) {
        (self.reached.load(Ordering::Relaxed), self.done.load(Ordering::Relaxed))
    }
}
