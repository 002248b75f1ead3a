//! Rows on disk to micro-batches in memory.
//!
//! Files (`source.rs`) hold rows, whose format (`format.rs`) says what each of them teaches (`example.rs`).
//! Rows of tokens (`token_row.rs`) become samples (`tokens.rs`), steps (`batch.rs`) and packed arrays
//! (`micro_batch.rs`).

pub mod batch;
mod chat_row;
pub mod compressed;
mod csv_rows;
pub mod example;
pub mod format;
mod format_error;
#[cfg(test)]
mod format_tests;
mod json_rows;
pub mod micro_batch;
mod parquet_pages;
mod parquet_rows;
pub mod source;
#[cfg(test)]
mod source_tests;
mod text_rows;
pub mod token_row;
pub mod tokens;
mod utf8_reader;
