//! Instruction sets and the vector helpers that the row operations are written with.
//!
//! A body works on arrays of `LANES` floats; `kernel!` compiles it once per instruction set (level) and picks
//! one at run time. Bodies multiply and add with two roundings on every level, never fused: so results are
//! equal on all levels, and these operations are bound by memory, not by arithmetic.
//! Helpers are `#[inline(always)]` functions and not closures, because a body that is not inlined
//! into the `#[target_feature]` function loses the features.
//! Left out: explicit intrinsics, and tiles for matmuls.

pub use super::isa::Isa as Level;
use std::cell::Cell;

/// Floats that a body handles at once: one AVX-512 register, two AVX2 or four SSE2 registers.
pub const LANES: usize = 16;
pub type Lanes = [f32; LANES];

/// An instruction set that this machine supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Level);

thread_local! {
    static FORCED: Cell<Option<Isa>> = const { Cell::new(None) };
}

impl Isa {
    /// `None` if the CPU does not support the level.
    pub fn new(level: Level) -> Option<Isa> {
        level.is_supported().then_some(Isa(level))
    }

    /// The level of this thread: the one given to `with_isa`, else the best that the CPU supports.
    pub fn current() -> Isa {
        FORCED.with(Cell::get).unwrap_or_else(|| Isa(Level::detect()))
    }

    /// Every level that this machine supports, lowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Level::ALL.into_iter().rev().filter_map(Isa::new)
    }

    pub fn level(self) -> Level {
        self.0
    }
}

/// Runs `work` with a fixed level for operations that are called on this thread. An operation reads its level once, on
/// entry, and passes it to its chunks on all threads.
pub fn with_isa<R>(isa: Isa, work: impl FnOnce() -> R) -> R {
    struct Restore(Option<Isa>);
    impl Drop for Restore {
        fn drop(&mut self) {
            FORCED.with(|forced| forced.set(self.0));
        }
    }
    let _restore = Restore(FORCED.with(|forced| forced.replace(Some(isa))));
    work()
}

/// Defines a function whose body is compiled once per level; the caller passes an `Isa` first.
macro_rules! kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::cpu::simd::Isa, $($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body($($arg: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $type),*) $(-> $result)? {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $type),*) $(-> $result)? {
                body($($arg),*)
            }

            match isa.level() {
                // SAFETY: an `Isa` of this level exists only if the CPU has all its features.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::Level::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::Level::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use kernel;

/// Up to `LANES` neighbouring elements, `start..start + count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub start: usize,
    pub count: usize,
}

/// `for_each_block!(block in len => { body })` runs the body on the blocks of `0..len` in order; only the
/// last may be short. The body is instantiated twice, for full blocks and for the short one: with a constant
/// count, lanes stay in registers in the main loop. The start is hidden from the optimiser, which would
/// otherwise vectorise the loop over blocks and gather across blocks.
macro_rules! for_each_block {
    ($block:ident in $len:expr => $body:block) => {{
        let len: usize = $len;
        let short = len % $crate::cpu::simd::LANES;
        let mut start = 0;
        while start < len - short {
            let $block = $crate::cpu::simd::Block {
                start,
                count: $crate::cpu::simd::LANES,
            };
            $body
            start = $crate::cpu::simd::hidden(start + $crate::cpu::simd::LANES);
        }
        if short > 0 {
            let $block = $crate::cpu::simd::Block {
                start,
                count: short,
            };
            $body
        }
    }};
}
pub(crate) use for_each_block;

/// Returns `number` unchanged, but the optimiser cannot know its value.
#[inline(always)]
pub(crate) fn hidden(number: usize) -> usize {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        let mut number = number;
        // SAFETY: an empty instruction; the register keeps its value.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) number, options(pure, nomem, nostack, preserves_flags));
        }
        number
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::hint::black_box(number)
}

/// Adds the lanes as a tree, in a fixed order.
#[inline(always)]
pub fn sum_lanes(lanes: Lanes) -> f32 {
    sum_tree(&lanes)
}

/// Not inlined: otherwise the vectoriser arranges the accumulators of the caller's loop to suit this tree.
#[inline(never)]
fn sum_tree(lanes: &Lanes) -> f32 {
    let mut lanes = *lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `sum_lanes` in f64.
#[inline(always)]
pub fn sum_wide_lanes(mut lanes: [f64; LANES]) -> f64 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The largest lane; NaN lanes may be ignored.
#[inline(always)]
pub fn max_lanes(lanes: Lanes) -> f32 {
    let mut largest = lanes[0];
    for lane in lanes {
        largest = if lane > largest { lane } else { largest };
    }
    largest
}

/// e^x, relative error below 2e-7 where the result is a normal number; subnormal results are
/// rounded, not flushed; NaN stays NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r = 1 + r + r² q(r), q a degree 4 minimax fit with weight r²
/// (error 3.2e-9). 2^n is applied in two halves so that n may leave the range of one exponent.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Written as selects that keep `x` when the comparison is false, which a NaN always is.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUNDER: f32 = 12_582_912.0;
    let rounded = x * std::f32::consts::LOG2_E + ROUNDER;
    let n = (rounded.to_bits() as i32).wrapping_sub(ROUNDER.to_bits() as i32);
    let n_float = rounded - ROUNDER;
    // ln 2 in two parts; the first has 9 bits, so its product with n is exact.
    let r = (x - n_float * 0.693_359_4) - n_float * -2.121_944_4e-4;
    let q = 0.001_395_058_7_f32;
    let q = q * r + 0.008_368_947;
    let q = q * r + 0.041_666_206;
    let q = q * r + 0.166_665_18;
    let q = q * r + 0.5;
    let e_r = (q * (r * r) + r) + 1.0;
    let half = n >> 1;
    let rest = n.wrapping_sub(half);
    e_r * power_of_two(half) * power_of_two(rest)
}

#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits((exponent.wrapping_add(127) as u32) << 23)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Near zero an odd polynomial (degree 4 minimax in x², error 4.2e-9), elsewhere 1 - 2 / (e^2|x| + 1), from where
/// the second form no longer loses digits.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let magnitude = x.abs();
    let square = x * x;
    let p = -0.005_717_504_3_f32;
    let p = p * square + 0.020_651_052;
    let p = p * square + -0.053_743_664;
    let p = p * square + 0.133_314_94;
    let p = p * square + -0.333_332_84;
    let near = magnitude + magnitude * (square * p);
    let far = 1.0 - 2.0 / (exp(2.0 * magnitude) + 1.0);
    // A NaN fails the comparison and leaves through `far`, which it has made NaN.
    let result = if magnitude < 0.625 { near } else { far };
    f32::from_bits(result.to_bits() | (x.to_bits() & 0x8000_0000))
}

/// sin(pi u) and cos(pi u) for |u| <= 1, absolute error below 1e-7; NaN stays NaN.
///
/// |u| = q / 2 + r with q = 0, 1, 2 and |r| <= 1/4, an exact difference; sin(pi r) = r (pi + r² p(r²)) and
/// cos(pi r) = 1 + r² c(r²), p a degree 2 and c a degree 3 minimax fit (errors 3.6e-9 and 5.4e-11).
#[inline(always)]
pub fn sin_cos_pi(u: f32) -> (f32, f32) {
    let magnitude = u.abs();
    let past_first = magnitude > 0.25;
    let past_second = magnitude > 0.75;
    let quarters = if past_first { 0.5 } else { 0.0 };
    let quarters = if past_second { 1.0 } else { quarters };
    let r = magnitude - quarters;
    let square = r * r;
    let p = -0.589_479_6_f32;
    let p = p * square + 2.549_810_6;
    let p = p * square + -5.167_709_4;
    let near_sine = r * std::f32::consts::PI + r * (square * p);
    let c = 0.231_429_55_f32;
    let c = c * square + -1.335_058_5;
    let c = c * square + 4.058_707_7;
    let c = c * square + -4.934_802;
    let near_cosine = 1.0 + square * c;
    let turned = past_first != past_second;
    let sine = if turned { near_cosine } else { near_sine };
    let cosine = if turned { near_sine } else { near_cosine };
    let sine = if past_second { -sine } else { sine };
    let cosine = if past_first { -cosine } else { cosine };
    (f32::from_bits(sine.to_bits() ^ (u.to_bits() & 0x8000_0000)), cosine)
}

#[inline(always)]
pub fn exp_lanes(x: Lanes) -> Lanes {
    let mut y = [0.0; LANES];
    for lane in 0..LANES {
        y[lane] = exp(x[lane]);
    }
    y
}

#[inline(always)]
pub fn sigmoid_lanes(x: Lanes) -> Lanes {
    let mut y = [0.0; LANES];
    for lane in 0..LANES {
        y[lane] = sigmoid(x[lane]);
    }
    y
}

#[inline(always)]
pub fn tanh_lanes(x: Lanes) -> Lanes {
    let mut y = [0.0; LANES];
    for lane in 0..LANES {
        y[lane] = tanh(x[lane]);
    }
    y
}

#[inline(always)]
pub fn sin_cos_pi_lanes(u: Lanes) -> (Lanes, Lanes) {
    let mut sine = [0.0; LANES];
    let mut cosine = [0.0; LANES];
    for lane in 0..LANES {
        (sine[lane], cosine[lane]) = sin_cos_pi(u[lane]);
    }
    (sine, cosine)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest relative error of `approximate` over a sweep of `low..high`.
    fn worst_relative_error(low: f32, high: f32, approximate: fn(f32) -> f32, exact: fn(f64) -> f64) -> f64 {
        const STEPS: u32 = 400_000;
        let mut worst = 0.0_f64;
        for step in 0..=STEPS {
            let x = low + (high - low) * (step as f32 / STEPS as f32);
            let expected = exact(f64::from(x));
            if expected == 0.0 {
                assert_eq!(approximate(x), 0.0);
                continue;
            }
            worst = worst.max(((f64::from(approximate(x)) - expected) / expected).abs());
        }
        worst
    }

    #[test]
    fn exp_is_accurate_over_its_normal_range() {
        let worst = worst_relative_error(-87.3, 88.7, exp, f64::exp);
        assert!(worst < 2e-7, "relative error {worst:e}");
        let worst = worst_relative_error(-1.0, 1.0, exp, f64::exp);
        assert!(worst < 2e-7, "relative error {worst:e}");
    }

    #[test]
    fn sigmoid_is_accurate() {
        let exact = |x: f64| 1.0 / (1.0 + (-x).exp());
        let worst = worst_relative_error(-87.0, 87.0, sigmoid, exact);
        assert!(worst < 3e-7, "relative error {worst:e}");
    }

    #[test]
    fn tanh_is_accurate_on_both_sides_of_the_seam() {
        for (low, high) in [(-20.0, 20.0), (-0.7, 0.7), (0.6, 0.65), (1e-30, 1e-3)] {
            let worst = worst_relative_error(low, high, tanh, f64::tanh);
            assert!(worst < 3e-7, "relative error {worst:e} in {low}..{high}");
        }
    }

    #[test]
    fn sine_and_cosine_of_a_half_turn_are_accurate() {
        const STEPS: i32 = 400_000;
        let (mut worst, mut worst_near_zero) = (0.0_f64, 0.0_f64);
        for step in -STEPS..=STEPS {
            let u = step as f32 / STEPS as f32;
            let (want_sine, want_cosine) = (f64::from(u) * std::f64::consts::PI).sin_cos();
            let (sine, cosine) = sin_cos_pi(u);
            let error = (f64::from(sine) - want_sine).abs();
            worst = worst.max(error).max((f64::from(cosine) - want_cosine).abs());
            if step != 0 && u.abs() <= 0.25 {
                worst_near_zero = worst_near_zero.max(error / want_sine.abs());
            }
        }
        assert!(worst < 1e-7, "absolute error {worst:e}");
        assert!(worst_near_zero < 2e-7, "relative error of the sine {worst_near_zero:e}");
        let turns = [0.0, 0.5, 1.0, -0.5, -1.0].map(sin_cos_pi);
        assert_eq!(turns, [(0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (0.0, -1.0)]);
        assert!(sin_cos_pi(f32::NAN).0.is_nan() && sin_cos_pi(f32::NAN).1.is_nan());
    }

    #[test]
    fn extremes_and_nan() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(1000.0), f32::INFINITY);
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
        // Subnormal result: within one step of the exact value.
        let tiny = (-100.0_f64).exp() as f32;
        assert!(exp(-100.0).to_bits().abs_diff(tiny.to_bits()) <= 1);
        assert_eq!(sigmoid(f32::NEG_INFINITY), 0.0);
        assert_eq!(sigmoid(f32::INFINITY), 1.0);
        assert_eq!(sigmoid(0.0), 0.5);
        assert_eq!(tanh(f32::NEG_INFINITY), -1.0);
        assert_eq!(tanh(f32::INFINITY), 1.0);
        assert_eq!(tanh(-0.0).to_bits(), (-0.0_f32).to_bits());
        for function in [exp, sigmoid, tanh] {
            assert!(function(f32::NAN).is_nan());
            assert!(function(-f32::NAN).is_nan());
        }
    }

    kernel! {
        fn all_five(x: Lanes) -> [Lanes; 5] {
            let tanh = tanh_lanes(x);
            let (sine, cosine) = sin_cos_pi_lanes(tanh);
            [exp_lanes(x), sigmoid_lanes(x), tanh, sine, cosine]
        }
    }

    #[test]
    fn every_level_gives_the_same_bytes() {
        for start in -400..400 {
            let x = std::array::from_fn(|lane| start as f32 * 0.37 + lane as f32 * 0.011);
            for isa in Isa::available() {
                for (lane, value) in x.iter().enumerate() {
                    let got = all_five(isa, x).map(|lanes| lanes[lane].to_bits());
                    let (sine, cosine) = sin_cos_pi(tanh(*value));
                    let want = [exp(*value), sigmoid(*value), tanh(*value), sine, cosine];
                    let want = want.map(f32::to_bits);
                    assert_eq!(got, want, "{isa:?} at {value}");
                }
            }
        }
    }

    #[test]
    fn blocks_cover_a_length_once() {
        for len in [0, 1, LANES - 1, LANES, LANES + 1, 3 * LANES + 5] {
            let mut next = 0;
            for_each_block!(block in len => {
                assert_eq!(block.start, next);
                assert!(block.count >= 1 && block.count <= LANES);
                next += block.count;
            });
            assert_eq!(next, len);
        }
    }

    #[test]
    fn with_isa_restores_the_level() {
        let before = Isa::current();
        let portable = Isa::new(Level::Portable).expect("every machine has it");
        assert_eq!(with_isa(portable, Isa::current), portable);
        assert_eq!(Isa::current(), before);
    }
}
