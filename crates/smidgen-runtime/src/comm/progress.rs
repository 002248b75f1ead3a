//! How far a rank has come with its exchanges, for whoever watches it.
//!
//! All ranks begin the same exchanges in the same order. A rank that has reached fewer of them than another keeps the
//! others waiting, whatever it does; that is how a rank is found that answers and makes no progress.

use std::sync::atomic::{AtomicU64, Ordering};

/// Exchanges of a rank, counted from its start. One thread counts, others read.
#[derive(Debug, Default)]
pub struct Progress {
    reached: AtomicU64,
    done: AtomicU64,
}

impl Progress {
    /// The rank is ready for its next exchange.
    pub fn reach(&self) {
        self.reached.fetch_add(1, Ordering::Relaxed);
    }

    /// The exchange is over.
    pub fn finish(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// Exchanges that the rank has reached, and those that are over.
    pub fn counts(&self) -> (u64, u64) {
        (self.reached.load(Ordering::Relaxed), self.done.load(Ordering::Relaxed))
    }
}
