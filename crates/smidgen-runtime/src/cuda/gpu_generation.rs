//! GPU generations, as far as kernels and arithmetic differ between them.
//!
//! Kernels exist for compute capability 7.0 and newer. GPUs before Ampere have no bf16 and no asynchronous copies, and
//! a block may use less shared memory. Volta lacks the matrix instruction of our kernels: cuBLASLt does its matmuls,
//! and attention multiplies in f32. `modules.rs` decides whether the Hopper-only kernels are used.

use smidgen_ir::Precision;

/// Such as (9, 0).
pub type Capability = (u32, u32);

/// The lowest compute capability with kernels, and the lowest with bf16.
pub const LEAST: Capability = (7, 0);
pub const LEAST_WITH_BF16: Capability = (8, 0);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Generation {
    /// 7.0 to 7.4.
    Volta,
    /// 7.5.
    Turing,
    /// 8.0 and newer.
    Ampere,
}

impl Generation {
    /// `None` for GPUs without kernels.
    pub fn of(capability: Capability) -> Option<Generation> {
        match capability {
            capability if capability < LEAST => None,
            (7, minor) if minor < 5 => Some(Generation::Volta),
            capability if capability < LEAST_WITH_BF16 => Some(Generation::Turing),
            _ => Some(Generation::Ampere),
        }
    }

    /// Shared memory that a block may use on every GPU of the generation.
    pub const fn most_shared_bytes(self) -> u32 {
        match self {
            Generation::Volta | Generation::Turing => 64 << 10,
            Generation::Ampere => 99 << 10,
        }
    }

    /// Whether kernels can copy to shared memory while they compute.
    pub const fn copies_asynchronously(self) -> bool {
        matches!(self, Generation::Ampere)
    }
}

/// Shared memory that a block may use on GPUs of this capability: of their generation, only data-center GPUs have more.
pub const fn most_shared_bytes(capability: Capability, generation: Generation) -> u32 {
    match capability {
        (8, 0) | (8, 7) => 163 << 10,
        (9, 0) | (10, _) => 227 << 10,
        _ => generation.most_shared_bytes(),
    }
}

/// Whether a GPU can train in a precision.
pub fn supports(capability: Capability, precision: Precision) -> bool {
    match precision {
        Precision::F32 | Precision::F16 => capability >= LEAST,
        Precision::Bf16 => capability >= LEAST_WITH_BF16,
        Precision::Fp8 => [(8, 9), (9, 0)].contains(&capability),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_belong_to_generations() {
        let of =
            [(5, 2), (6, 1), (7, 0), (7, 2), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)].map(Generation::of);
        let (volta, turing, ampere) =
            (Some(Generation::Volta), Some(Generation::Turing), Some(Generation::Ampere));
        assert_eq!(of, [None, None, volta, volta, turing, ampere, ampere, ampere, ampere]);
    }

    #[test]
    fn bf16_begins_with_ampere_and_fp8_is_for_ada_and_hopper() {
        let of = |capability| {
            [Precision::F32, Precision::F16, Precision::Bf16, Precision::Fp8]
                .map(|precision| supports(capability, precision))
        };
        assert_eq!(of((6, 1)), [false; 4]);
        assert_eq!(of((7, 0)), [true, true, false, false]);
        assert_eq!(of((7, 5)), [true, true, false, false]);
        assert_eq!(of((8, 6)), [true, true, true, false]);
        assert_eq!([(8, 9), (9, 0)].map(of), [[true; 4]; 2]);
        assert_eq!(of((12, 0)), [true, true, true, false]);
    }
}
