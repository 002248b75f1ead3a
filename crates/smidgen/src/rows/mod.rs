//! The rows that a recipe names, as token sets: samples to train on, samples to evaluate, questions with choices.
//!
//! `data.rs` reads everything that a job needs, with `sets.rs`. Rows become questions in `question.rs`; multiple choice
//! is scored by likelihood as in lm-evaluation-harness (`choice.rs`, `score.rs`); `answer.rs` finds answers in texts.
//! Prompts to which a run generates the answers are in `prompts.rs`.
//! Left out: reading and tokenizing files (`smidgen-data`).

pub mod answer;
pub mod choice;
pub mod data;
pub mod forms;
pub mod keys;
pub mod prompting;
pub mod prompts;
pub mod question;
pub mod score;
pub mod sets;
