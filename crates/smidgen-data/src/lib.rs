//! Reads training data, tokenizes it, and packs the samples into micro-batches.
//!
//! Files (`source.rs`) hold rows (`format.rs`), which become examples (`example.rs`), text (`template.rs`), tokens
//! of which some are supervised (`mask.rs`, `tokenize.rs`), samples (`tokens.rs`), steps (`batch.rs`, `mix.rs`) and
//! packed arrays (`micro_batch.rs`). Read `prepare.rs` first: it goes from files to samples.

#![forbid(unsafe_code)]

pub mod audio_text;
pub mod bad_rows;
pub mod batch;
pub mod cache;
mod chat_row;
pub mod clip_row;
pub mod clips;
mod compared_batch;
pub mod compressed;
mod csv_rows;
mod document_rows;
mod encode_error;
pub mod eval_batch;
pub mod example;
pub mod format;
mod format_error;
#[cfg(test)]
mod format_tests;
mod json_rows;
pub mod mask;
mod message_form;
pub mod micro_batch;
pub mod mix;
mod parquet_limits;
mod parquet_rows;
mod permutation;
mod preference_row;
pub mod prepare;
mod prepare_error;
pub mod prompt_row;
mod row_fields;
mod row_group;
mod row_place;
pub mod share;
pub mod source;
mod source_error;
#[cfg(test)]
mod source_tests;
pub mod template;
pub mod token_builder;
pub mod token_file;
pub mod token_record;
pub mod token_row;
pub mod token_split;
pub mod tokenize;
pub mod tokens;
mod turns;
mod utf8_reader;
