//! In which numbers the products of a run are formed, and what forms them.
//!
//! `model.compute` is a wish: bf16 takes instructions that not every processor has, and without them the run
//! computes in f32. Two units for bf16 form their sums in different orders, so a checkpoint keeps the name of what
//! computed it, and a run that continues elsewhere can say that its results are equal within rounding only.

use crate::recipe::Compute;
use smidgen_ir::{DeviceKind, Precision};
use smidgen_runtime::cpu::bf16_unit::Bf16Unit;

/// What multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    F32,
    /// Operands rounded to bf16, sums in f32.
    Bf16(Bf16Unit),
    /// On a GPU, where activations lie in the numbers of products.
    Cuda(Precision),
}

impl Arithmetic {
    /// What a wish comes to on this machine: bf16 where it is wanted or left open and there is a unit for it.
    pub fn of(compute: Compute, device: DeviceKind) -> Arithmetic {
        if device == DeviceKind::Cuda {
            return Arithmetic::Cuda(match compute {
                Compute::Auto | Compute::Bf16 => Precision::Bf16,
                Compute::F32 => Precision::F32,
                Compute::F16 => Precision::F16,
            });
        }
        match (compute, Bf16Unit::detect()) {
            (Compute::Auto | Compute::Bf16, Some(unit)) => Arithmetic::Bf16(unit),
            (Compute::Auto | Compute::Bf16, None) | (Compute::F32 | Compute::F16, _) => Arithmetic::F32,
        }
    }

    /// What continues a checkpoint that `name` computed, if the wish leaves it open.
    pub fn continuing(compute: Compute, device: DeviceKind, name: &str) -> Arithmetic {
        match (compute, device, name == Arithmetic::F32.name()) {
            (Compute::Auto, DeviceKind::Cpu, true) => Arithmetic::F32,
            _ => Arithmetic::of(compute, device),
        }
    }

    pub fn precision(self) -> Precision {
        match self {
            Arithmetic::F32 => Precision::F32,
            Arithmetic::Bf16(_) => Precision::Bf16,
            Arithmetic::Cuda(precision) => precision,
        }
    }

    /// For people and for checkpoints.
    pub fn name(self) -> String {
        match self {
            Arithmetic::F32 => "f32".to_owned(),
            Arithmetic::Bf16(unit) => format!("bf16 ({})", unit.name()),
            Arithmetic::Cuda(precision) => format!("{} (CUDA)", precision.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: DeviceKind = DeviceKind::Cpu;

    #[test]
    fn a_wish_is_kept_where_it_can_be() {
        assert_eq!(Arithmetic::of(Compute::F32, CPU), Arithmetic::F32);
        let best = Bf16Unit::detect().map_or(Arithmetic::F32, Arithmetic::Bf16);
        assert_eq!(Arithmetic::of(Compute::Bf16, CPU), best);
        assert_eq!(Arithmetic::of(Compute::Auto, CPU), best);
    }

    #[test]
    fn what_was_f32_stays_f32_unless_bf16_is_asked_for() {
        assert_eq!(Arithmetic::continuing(Compute::Auto, CPU, "f32"), Arithmetic::F32);
        assert_eq!(Arithmetic::continuing(Compute::Bf16, CPU, "f32"), Arithmetic::of(Compute::Bf16, CPU));
        assert_eq!(
            Arithmetic::continuing(Compute::Auto, CPU, "bf16 (AMX)"),
            Arithmetic::of(Compute::Auto, CPU)
        );
    }

    #[test]
    fn names_are_those_that_checkpoints_hold() {
        let names = [Arithmetic::F32, Arithmetic::Bf16(Bf16Unit::Amx), Arithmetic::Bf16(Bf16Unit::Avx512)];
        assert_eq!(names.map(Arithmetic::name), ["f32", "bf16 (AMX)", "bf16 (AVX-512)"]);
    }
}
