//! Cuts row operations into chunks for the current thread pool.
//!
//! Chunks depend only on the shape, and each chunk is computed the same way on any thread, so the number of
//! threads never changes a result. Nothing here allocates.
//! Left out: matmuls, which have their own tiling.

use super::pool::run_tasks;
use std::ops::Range;

/// Elements of a chunk: 64 KiB of f32, whose computation takes far longer than starting a task.
pub const CHUNK_ELEMENTS: usize = 16_384;

/// Columns of a chunk when rows must be summed in order: four cache lines of f32.
pub const CHUNK_COLUMNS: usize = 64;

/// A part of an index range, `start..start + len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub index: usize,
    pub start: usize,
    pub len: usize,
}

impl Chunk {
    #[inline(always)]
    pub fn range(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// The number of whole rows with about `CHUNK_ELEMENTS` elements, at least one.
pub fn rows_per_chunk(columns: usize) -> usize {
    (CHUNK_ELEMENTS / columns.max(1)).max(1)
}

/// Runs `work` on every chunk of `0..total`; all but the last are `chunk_len` long.
pub fn for_each_chunk(total: usize, chunk_len: usize, work: impl Fn(Chunk) + Sync) {
    let chunk = |index: usize| {
        let start = index * chunk_len;
        let len = (total - start).min(chunk_len);
        Chunk { index, start, len }
    };
    run_tasks(total.div_ceil(chunk_len), |index| work(chunk(index)));
}

/// Runs `work` on every chunk of `rows` rows.
pub fn for_each_row_chunk(rows: usize, columns: usize, work: impl Fn(Chunk) + Sync) {
    for_each_chunk(rows, rows_per_chunk(columns), work);
}

/// Runs `work` on every row.
pub fn for_each_row(rows: usize, columns: usize, work: impl Fn(usize) + Sync) {
    for_each_row_chunk(rows, columns, |chunk| chunk.range().for_each(&work));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn chunks_cover_the_range_once() {
        for (total, chunk_len) in [(0, 4), (1, 4), (4, 4), (5, 4), (1001, 10)] {
            let seen = Mutex::new(vec![0; total]);
            for_each_chunk(total, chunk_len, |chunk| {
                assert_eq!(chunk.start, chunk.index * chunk_len);
                let mut seen = seen.lock().expect("no panic while held");
                for index in chunk.range() {
                    seen[index] += 1;
                }
            });
            let seen = seen.into_inner().expect("no panic while held");
            assert!(seen.iter().all(|count| *count == 1));
        }
    }

    #[test]
    fn a_row_longer_than_a_chunk_is_a_chunk() {
        assert_eq!(rows_per_chunk(262_144), 1);
        assert_eq!(rows_per_chunk(576), 28);
        assert_eq!(rows_per_chunk(0), CHUNK_ELEMENTS);
    }
}
