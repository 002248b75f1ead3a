//! Rows on disk to micro-batches in memory.
//!
//! Files (`source.rs`) hold rows (`token_row.rs`), which become samples (`tokens.rs`), steps (`batch.rs`) and
//! packed arrays (`micro_batch.rs`). Left out: text. Rows are tokenized already.

pub mod batch;
pub mod example;
pub mod micro_batch;
pub mod source;
pub mod token_row;
pub mod tokens;
