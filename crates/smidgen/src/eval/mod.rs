//! Evaluation: scores of a model on rows with known answers.
//!
//! `evaluation.rs` evaluates the base and the adapter one after the other. There are four tasks: the loss of the
//! expected answers, and multiple choice by likelihood as in lm-evaluation-harness (both in `evaluator.rs`); generated
//! answers (`answers.rs`); the word error rate of transcripts (`transcription.rs`).
//! `results.rs` renders the scores as JSON.
//! Left out: few-shot examples, and task descriptions other than the rows.

pub mod answers;
pub mod evaluation;
pub mod evaluator;
pub mod results;
pub mod transcription;
