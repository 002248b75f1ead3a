//! The precision of a run's matmuls, and the unit of the processor that computes them.
//!
//! `model.compute` is a preference: bf16 needs instructions that not every processor has, and without them the run
//! computes in f32. Units sum in different orders, so a checkpoint keeps the name of the unit that computed it, and a
//! run that continues on another unit can say that its results are equal within rounding only.

use smidgen_ir::{DeviceKind, Precision};
use smidgen_recipe::Compute;
use smidgen_runtime::cpu::bf16_unit::{Bf16Unit, F32Unit};

/// The properties of a processor that decide the precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processor {
    Cpu,
    /// GPUs before Ampere have no bf16 and compute in f16.
    Gpu {
        has_bf16: bool,
    },
}

impl Processor {
    pub fn kind(self) -> DeviceKind {
        match self {
            Processor::Cpu => DeviceKind::Cpu,
            Processor::Gpu { .. } => DeviceKind::Cuda,
        }
    }
}

/// What computes the matmuls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    F32(F32Unit),
    /// Operands rounded to bf16, sums in f32.
    Bf16(Bf16Unit),
    /// On a GPU, where activations have the precision of the matmuls.
    Cuda(Precision),
}

impl Arithmetic {
    /// Resolves `model.compute`. `auto` is bf16 if the processor has it, otherwise f16 on a GPU and f32 on a CPU.
    pub fn of(compute: Compute, processor: Processor) -> Arithmetic {
        if let Processor::Gpu { has_bf16 } = processor {
            return Arithmetic::Cuda(match compute {
                Compute::Auto if !has_bf16 => Precision::F16,
                Compute::Auto | Compute::Bf16 => Precision::Bf16,
                Compute::F32 => Precision::F32,
                Compute::F16 => Precision::F16,
                Compute::Fp8 => Precision::Fp8,
            });
        }
        match (compute, Bf16Unit::detect()) {
            (Compute::Auto | Compute::Bf16 | Compute::Fp8, Some(unit)) => Arithmetic::Bf16(unit),
            (Compute::Auto | Compute::Bf16 | Compute::Fp8, None) | (Compute::F32 | Compute::F16, _) => {
                Arithmetic::F32(F32Unit::detect())
            }
        }
    }

    /// Resolves `model.compute` for a run that continues a checkpoint of the arithmetic `name`: with `auto`, f32 stays
    /// f32, on the same unit if this machine has it.
    pub fn continuing(compute: Compute, processor: Processor, name: &str) -> Arithmetic {
        let of_f32 = [F32Unit::Vectors, F32Unit::detect()].map(Arithmetic::F32);
        match (compute, processor) {
            (Compute::Auto | Compute::F32, Processor::Cpu) if name.starts_with("f32") => {
                of_f32.into_iter().find(|it| it.name() == name).unwrap_or(Arithmetic::F32(F32Unit::Vectors))
            }
            _ => Arithmetic::of(compute, processor),
        }
    }

    /// For generating token by token: splitting weights for AMX would take longer than it saves with a single row.
    pub fn token_by_token(self) -> Arithmetic {
        match self {
            Arithmetic::F32(_) => Arithmetic::F32(F32Unit::Vectors),
            Arithmetic::Bf16(_) | Arithmetic::Cuda(_) => self,
        }
    }

    pub fn precision(self) -> Precision {
        match self {
            Arithmetic::F32(_) => Precision::F32,
            Arithmetic::Bf16(_) => Precision::Bf16,
            Arithmetic::Cuda(precision) => precision,
        }
    }

    /// As messages and checkpoints have it.
    pub fn name(self) -> String {
        match self {
            Arithmetic::F32(F32Unit::Vectors) => "f32".to_owned(),
            Arithmetic::F32(F32Unit::Amx) => "f32 (AMX)".to_owned(),
            Arithmetic::Bf16(unit) => format!("bf16 ({})", unit.name()),
            Arithmetic::Cuda(precision) => format!("{} (CUDA)", precision.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: Processor = Processor::Cpu;

    #[test]
    fn bf16_is_used_where_the_processor_has_it() {
        let f32 = Arithmetic::F32(F32Unit::detect());
        assert_eq!(Arithmetic::of(Compute::F32, CPU), f32);
        let best = Bf16Unit::detect().map_or(f32, Arithmetic::Bf16);
        assert_eq!(Arithmetic::of(Compute::Bf16, CPU), best);
        assert_eq!(Arithmetic::of(Compute::Auto, CPU), best);
    }

    #[test]
    fn a_gpu_without_bf16_computes_in_f16_by_default() {
        let of = |compute, has_bf16| Arithmetic::of(compute, Processor::Gpu { has_bf16 }).precision();
        assert_eq!((of(Compute::Auto, true), of(Compute::Auto, false)), (Precision::Bf16, Precision::F16));
        assert_eq!((of(Compute::F32, false), of(Compute::F16, true)), (Precision::F32, Precision::F16));
    }

    #[test]
    fn a_continued_f32_run_stays_f32_unless_bf16_is_requested() {
        for compute in [Compute::Auto, Compute::F32] {
            assert_eq!(Arithmetic::continuing(compute, CPU, "f32"), Arithmetic::F32(F32Unit::Vectors));
            let by_amx = Arithmetic::continuing(compute, CPU, "f32 (AMX)");
            assert_eq!(by_amx, Arithmetic::F32(F32Unit::detect()));
        }
        assert_eq!(Arithmetic::continuing(Compute::Bf16, CPU, "f32"), Arithmetic::of(Compute::Bf16, CPU));
        assert_eq!(
            Arithmetic::continuing(Compute::Auto, CPU, "bf16 (AMX)"),
            Arithmetic::of(Compute::Auto, CPU)
        );
    }

    #[test]
    fn the_names_in_checkpoints_do_not_change() {
        let f32 = [F32Unit::Vectors, F32Unit::Amx].map(|unit| Arithmetic::F32(unit).name());
        assert_eq!(f32, ["f32", "f32 (AMX)"]);
        let bf16 = [Bf16Unit::Amx, Bf16Unit::Avx512].map(|unit| Arithmetic::Bf16(unit).name());
        assert_eq!(bf16, ["bf16 (AMX)", "bf16 (AVX-512)"]);
    }
}
