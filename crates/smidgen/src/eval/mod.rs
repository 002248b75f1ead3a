//! Evaluation: what a model scores on rows whose answers are known.
//!
//! Three tasks. The loss of the expected answers; multiple choice by likelihood, as lm-evaluation-harness scores it
//! (`choice.rs`, `score.rs`, `sets.rs`); and generation, where the answer is looked for in what the model says
//! (`generation.rs`, `answer.rs`). Rows become questions in `question.rs`; `likelihood.rs` reads the log-likelihood of
//! samples off the entry point `eval`, of a training run or of a plan made for evaluating alone (`evaluator.rs`); `results.rs` is what is said of it.
//! Left out: few-shot examples, and task descriptions other than the rows themselves.

pub mod evaluator;
pub mod generation;
pub mod results;
