//! Rows on disk to micro-batches in memory.

pub mod batch;
pub mod micro_batch;
pub mod source;
pub mod token_row;
pub mod tokens;
