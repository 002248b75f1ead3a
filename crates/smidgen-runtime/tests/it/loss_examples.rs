//! The fused loss: its own gradients to rows, head, and an adapter on the head.
//!
//! Chunks of rows divide the rows evenly, leave a rest, or hold all of them; the gradients must not care.

use crate::draft::Draft;
use crate::examples::{Example, gradient};
use smidgen_ir::{DType, LossHead};

pub fn examples() -> Vec<Example> {
    let mut examples = Vec::new();
    for (chunk, dtype) in [(4, DType::F32), (5, DType::Bf16), (100, DType::F16), (1, DType::F32)] {
        for rank in [0, 3] {
            for train_head in [false, true] {
                examples.push(loss(chunk, dtype, rank, train_head));
            }
        }
    }
    examples
}

/// 10 of 19 tokens over a vocabulary of 29; rank 0 is no adapter.
fn loss(chunk: usize, dtype: DType, rank: usize, train_head: bool) -> Example {
    let mut draft = Draft::new(&[9, 10], 2);
    assert_eq!(draft.extent().rows, 10);
    let x = draft.rows("x", 15);
    let table = match train_head {
        true => draft.matrix("head", 29, 15, dtype),
        false => draft.frozen_matrix("head", 29, 15, dtype),
    };
    let adapter = (rank > 0).then(|| (draft.rows("h", rank), draft.matrix("b", 29, rank, DType::F32)));
    let lora = (rank > 0).then_some(0.5);
    draft.loss(LossHead { chunk, gradient: true, lora, train_head }, x, table, adapter);
    let name = format!("loss chunk={chunk} {dtype} rank={rank} train_head={train_head}");
    gradient(&["lm_head_loss"], draft.gradient_of_loss(&name))
}
