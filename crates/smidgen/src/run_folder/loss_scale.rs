//! The loss scale, for gradients that pass through f16: if it is too small they vanish, if too large they overflow.
//!
//! It is a power of two, so `Op::GradNorm` divides by it exactly. A step that overflows changes nothing and is
//! repeated with half the scale; after many steps without overflow the scale doubles, as in PyTorch's `GradScaler`.
//! Checkpoints store it, because it decides which small gradients vanish.

use serde::{Deserialize, Serialize};
use smidgen_ir::Precision;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    scale: f64,
    /// Steps in a row that did not overflow.
    steps: u32,
}

/// The initial and the largest scale. Starting too large costs a few repeated steps; too small would lose gradients
/// unnoticed.
const MOST: f64 = 16_777_216.0;
/// Steps without an overflow after which the scale doubles.
const DOUBLES_AFTER: u32 = 2000;

impl LossScale {
    /// `None` if gradients have the range of f32.
    pub fn of(precision: Precision) -> Option<LossScale> {
        match precision {
            Precision::F16 => Some(LossScale { scale: MOST, steps: 0 }),
            Precision::F32 | Precision::Bf16 | Precision::Fp8 => None,
        }
    }

    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Halves the scale after an overflow; `false` if it cannot get smaller.
    pub fn shrink(&mut self) -> bool {
        let can_shrink = self.scale > 1.0;
        if can_shrink {
            *self = LossScale { scale: self.scale / 2.0, steps: 0 };
        }
        can_shrink
    }

    /// Counts a step that did not overflow.
    pub fn see_finite(&mut self) {
        self.steps += 1;
        if self.steps == DOUBLES_AFTER {
            *self = LossScale { scale: (2.0 * self.scale).min(MOST), steps: 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_halves_at_overflows_down_to_one_and_doubles_after_many_steps() {
        assert_eq!(LossScale::of(Precision::Bf16), None);
        let mut scale = LossScale::of(Precision::F16).unwrap();
        let halvings = std::iter::from_fn(|| scale.shrink().then_some(())).count();
        assert_eq!((halvings, scale.scale()), (24, 1.0));
        for _ in 1..DOUBLES_AFTER {
            scale.see_finite();
        }
        assert_eq!(scale.scale(), 1.0);
        scale.see_finite();
        assert_eq!(scale.scale(), 2.0);
        for _ in 0..100 * DOUBLES_AFTER {
            scale.see_finite();
        }
        assert_eq!(scale.scale(), MOST);
    }
}
