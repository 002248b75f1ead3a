//! Attributes of the operations of the LM head: the fused loss, and the head in pieces.
//!
//! Left out: the operations themselves, which are rows of the op table.

use crate::cost::{Cost, Operands};
use std::fmt;

/// ` cap=30` if scores or logits are capped.
pub(crate) fn cap_text(softcap: Option<f32>) -> String {
    softcap.map(|cap| format!(" cap={cap}")).unwrap_or_default()
}

/// Attributes of [`crate::Op::LmHeadLoss`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossHead {
    /// Rows whose logits exist at the same time.
    pub chunk: usize,
    pub gradient: bool,
    /// Scale of an adapter on the head.
    pub lora: Option<f32>,
    pub train_head: bool,
    /// Logits z become cap·tanh(z/cap).
    pub softcap: Option<f32>,
    /// The last update receives the negative log-likelihood of each row; only without a gradient.
    pub row_losses: bool,
}

impl LossHead {
    /// One pass over the head for the logits, one for the gradient of x, one for the gradient of the head.
    pub(crate) fn cost(&self, step: &Operands<'_>) -> Cost {
        let head_passes = 1 + usize::from(self.gradient);
        let passes = head_passes + usize::from(self.train_head);
        let head_gradient = step.matmul_flops(self.train_head.then_some(1));
        let adapter = (0..passes).map(|_| step.matmul_flops(self.lora.map(|_| 5))).sum();
        step.traffic() + step.chunked_matmul(1, self.chunk, head_passes) + head_gradient + adapter
    }
}

impl fmt::Display for LossHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match (self.gradient, self.row_losses) {
            (true, _) => " gradient",
            (false, true) => " rows",
            (false, false) => "",
        };
        write!(f, "chunk={}{kind}{}", self.chunk, cap_text(self.softcap))
    }
}

/// Attributes of operations on a few rows of the head, for plans in which the whole head is never on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadPiece {
    /// Rows of x whose logits exist at the same time.
    pub chunk: usize,
    /// The token id of the piece's first row.
    pub first_word: usize,
    /// Logits z become cap·tanh(z/cap).
    pub softcap: Option<f32>,
    /// Whether there are pieces before this one; the last input is then their result.
    pub continues: bool,
}

impl fmt::Display for HeadPiece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chunk={} from={}{}", self.chunk, self.first_word, cap_text(self.softcap))
    }
}
