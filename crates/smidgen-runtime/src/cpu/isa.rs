//! The instruction sets of the CPU device: which one runs, and one vector type for each.
//!
//! A loop is written once over [`Lanes`] and compiled three times: for AVX-512, for AVX2 with FMA, and for
//! the baseline of the target; `on_each_isa!` generates the three and chooses at run time.
//! Results of different instruction sets may differ in the last bits; one set always gives the same bits.
//! Left out: AMX, and vector types for NEON (the portable one compiles well there).

pub use super::isa_lanes::{Lanes, exp, exp_of_each, tanh};
pub use super::isa_portable::PortableLanes;
#[cfg(target_arch = "x86_64")]
pub use super::isa_x86::{Avx2Lanes, Avx512Lanes};

/// The instruction set that a call runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 F, BW, DQ and VL: 16 lanes, 32 registers.
    Avx512,
    /// AVX2, FMA and F16C: 8 lanes, 16 registers.
    Avx2,
    /// Plain Rust, vectorised by the compiler for the target's baseline.
    Portable,
}

impl Isa {
    /// Every instruction set, best first.
    pub const ALL: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Portable];

    /// The best instruction set of this machine.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().find(|isa| isa.is_supported()).unwrap_or(Isa::Portable)
    }

    /// Floats of one vector.
    pub fn width(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512Lanes::WIDTH,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2Lanes::WIDTH,
            _ => PortableLanes::WIDTH,
        }
    }

    /// Whether this machine can run it. The answer is cached by the standard library.
    pub fn is_supported(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && Isa::Avx2.is_supported()
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512 | Isa::Avx2 => false,
            Isa::Portable => true,
        }
    }
}

/// Prefetches the cache line of an address into all cache levels.
#[inline(always)]
pub fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint, never an access; SSE is part of the target.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Compiles a loop that is generic over [`Lanes`] once per instruction set, behind a function whose first
/// parameter is the [`Isa`]. The function is unsafe: the machine must support that set, and the caller must
/// meet the conditions of the loop. The loop may have constant parameters in `<>`, or one type parameter in `[]`.
/// Keep the loop small: it is inlined into one function per set, and compile time grows faster than its size.
macro_rules! on_each_isa {
    ($(#[$attribute:meta])* $visibility:vis unsafe fn $name:ident
        $(<$(const $constant:ident: $of:ty),+>)? $([$parameter:ident: $bound:path])?
        ($($argument:ident: $kind:ty),* $(,)?) = $body:ident;) => {
        $(#[$attribute])*
        $visibility unsafe fn $name<$($(const $constant: $of),+)? $($parameter: $bound)?>(
            isa: super::isa::Isa, $($argument: $kind),*
        ) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn avx512<$($(const $constant: $of),+)? $($parameter: $bound)?>($($argument: $kind),*) {
                // SAFETY: the caller's conditions are those of the body, and the features are on.
                unsafe {
                    $body::<super::isa::Avx512Lanes, $($($constant),+)? $($parameter)?>($($argument),*)
                }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2<$($(const $constant: $of),+)? $($parameter: $bound)?>($($argument: $kind),*) {
                // SAFETY: the caller's conditions are those of the body, and the features are on.
                unsafe {
                    $body::<super::isa::Avx2Lanes, $($($constant),+)? $($parameter)?>($($argument),*)
                }
            }
            // SAFETY: the caller promises that the machine supports `isa`, and the body's conditions.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    super::isa::Isa::Avx512 => {
                        avx512::<$($($constant),+)? $($parameter)?>($($argument),*)
                    }
                    #[cfg(target_arch = "x86_64")]
                    super::isa::Isa::Avx2 => avx2::<$($($constant),+)? $($parameter)?>($($argument),*),
                    _ => $body::<super::isa::PortableLanes, $($($constant),+)? $($parameter)?>($($argument),*),
                }
            }
        }
    };
}
pub(crate) use on_each_isa;
