//! Evaluation: scores of a model on rows with known answers.
//!
//! There are four tasks: the loss of the expected answers; multiple choice by likelihood, as in lm-evaluation-harness
//! (both `evaluator.rs`, with the rows of `rows/`); generated answers (`generation.rs`); and the word error rate of
//! transcripts (`transcription.rs`). `results.rs` turns the scores into JSON.
//! Left out: few-shot examples, and task descriptions other than the rows.

pub mod evaluator;
pub mod generation;
pub mod results;
pub mod transcription;
