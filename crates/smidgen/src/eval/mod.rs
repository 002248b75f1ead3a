//! Evaluation: scores of a model on rows with known answers.
//!
//! There are four tasks: the loss of the expected answers, and multiple choice by likelihood as in
//! lm-evaluation-harness (both in `evaluator.rs`); generated answers (`generation.rs`); the word error rate of
//! transcripts (`transcription.rs`).
//! `results.rs` renders the scores as JSON.
//! Left out: few-shot examples, and task descriptions other than the rows.

pub mod evaluator;
pub mod generation;
pub mod results;
pub mod transcription;
