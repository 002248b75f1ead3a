//! The vector type that loops are generic over, and the vector `exp` and `tanh` that attention needs.
//!
//! `isa_x86.rs` and `isa_portable.rs` implement [`Lanes`]; `isa.rs` chooses between them at run time.

/// A vector of `WIDTH` floats. Every method is unsafe: pointers must be valid for the lanes that are read or
/// written, and the machine must support the instruction set of the type. All are inlined into the caller,
/// which carries the target features (see `on_each_isa!`).
#[allow(clippy::missing_safety_doc)]
pub trait Lanes: Copy {
    const WIDTH: usize;
    /// A vector of `WIDTH` 32-bit integers.
    type Words: Copy;
    /// A lookup table of sixteen floats.
    type Table: Copy;

    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(source: *const f32) -> Self;
    /// Loads the first `count < WIDTH` lanes and reads no memory past them; the others are zero.
    unsafe fn load_first(source: *const f32, count: usize) -> Self;
    unsafe fn load_bf16(source: *const u16) -> Self;
    unsafe fn load_f16(source: *const u16) -> Self;
    unsafe fn store(self, target: *mut f32);
    unsafe fn store_first(self, target: *mut f32, count: usize);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// The larger lane; `other` if either is NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// The smaller lane; `other` if either is NaN.
    unsafe fn min(self, other: Self) -> Self;
    /// `self * factor + addend`, fused if the instruction set can.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// The magnitude of `self` with the sign of `sign`.
    unsafe fn copysign(self, sign: Self) -> Self;
    /// `yes` in the lanes where `self < limit`, else `no`.
    unsafe fn select_less(self, limit: Self, yes: Self, no: Self) -> Self;
    /// `self * 2^exponent` for whole exponents in -252..=252, overflow included.
    unsafe fn scale_by_power(self, exponent: Self) -> Self;
    unsafe fn sum(self) -> f32;
    unsafe fn largest(self) -> f32;
    /// Every lane is the f16 at `source`.
    unsafe fn splat_f16(source: *const u8) -> Self;
    /// Every lane of the first is the f16 at `source`, of the second the next f16.
    unsafe fn splat_f16_pair(source: *const u8) -> (Self, Self);
    /// Signed words as floats.
    unsafe fn from_words(words: Self::Words) -> Self;
    /// Words as the bits of floats.
    unsafe fn from_bits(words: Self::Words) -> Self;
    unsafe fn widen_u8(source: *const u8) -> Self::Words;
    unsafe fn widen_i8(source: *const u8) -> Self::Words;
    /// The 4-bit codes of `WIDTH / 2` bytes, the high nibble of each byte first; bits above a code are undefined.
    unsafe fn widen_nibble_pairs(source: *const u8) -> Self::Words;
    /// Word i is `bits >> i`.
    unsafe fn bits_from_each_lane(bits: u32) -> Self::Words;
    unsafe fn and(words: Self::Words, mask: u32) -> Self::Words;
    unsafe fn or(words: Self::Words, other: Self::Words) -> Self::Words;
    unsafe fn shift_left(words: Self::Words, count: u32) -> Self::Words;
    unsafe fn shift_right(words: Self::Words, count: u32) -> Self::Words;
    /// The values, each times `scale`.
    unsafe fn table(values: &[f32; 16], scale: f32) -> Self::Table;
    /// The table entries whose indices are the low four bits of the words.
    unsafe fn look_up(table: Self::Table, words: Self::Words) -> Self;
    /// The f16 in the low halves of `WIDTH` words at `source`, and those in the high halves.
    unsafe fn from_f16_pairs(source: *const u32) -> (Self, Self);
    /// Writes the first sixteen bytes of each of `WIDTH` rows, transposed: byte i of row r, at `r * stride + i` of the
    /// source, goes to `i * WIDTH + r` of the target.
    unsafe fn transpose_bytes(source: *const u8, stride: usize, target: *mut u8);
    /// Writes `scale` times the transpose of the `WIDTH`×`WIDTH` square at `source` to `target`.
    unsafe fn transpose_square(
        source: *const f32,
        source_stride: usize,
        target: *mut f32,
        target_stride: usize,
        scale: Self,
    );
}

/// e to the power of each lane, within 1.2e-7 relative; infinite above 88.73, and 0 below -87.33, where the result
/// would be subnormal: computing with subnormals takes a hundred cycles, and all masked scores are in that range.
///
/// # Safety
/// The machine supports the instruction set of `V`.
#[inline(always)]
pub unsafe fn exp<V: Lanes>(x: V) -> V {
    // SAFETY: the caller's promise.
    let [power] = unsafe { exp_of_each([x]) };
    power
}

/// [`exp`] of several vectors, interleaved: one vector alone is a chain of dependent instructions that leaves
/// the arithmetic units idle.
///
/// # Safety
/// The machine supports the instruction set of `V`.
#[inline(always)]
pub unsafe fn exp_of_each<V: Lanes, const N: usize>(mut x: [V; N]) -> [V; N] {
    // exp(x) = 2^n · exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2. ln 2 is split in two parts,
    // the first with enough trailing zeros that n · first is exact. Taylor to r^7 leaves 5e-9 relative.
    const LN2_FIRST: f32 = 0.693_359_4;
    const LN2_SECOND: f32 = -2.121_944_4e-4;
    const LOWEST: f32 = -87.33;
    // Adding 1.5 · 2^23 leaves no bits below one: the sum is rounded to a whole number.
    const ROUNDER: f32 = 12_582_912.0;
    const COEFFICIENTS: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    // SAFETY: arithmetic on lanes only; the caller promises the instruction set.
    unsafe {
        let arguments = x;
        let mut n = x;
        let mut power = [V::splat(1.0 / 5040.0); N];
        for (x, n) in x.iter_mut().zip(&mut n) {
            // The operand order lets NaN through.
            *x = V::splat(LOWEST).max(V::splat(90.0).min(*x));
            *n = x.mul_add(V::splat(std::f32::consts::LOG2_E), V::splat(ROUNDER)).sub(V::splat(ROUNDER));
        }
        for (x, n) in x.iter_mut().zip(&n) {
            *x = n.mul_add(V::splat(-LN2_FIRST), *x);
            *x = n.mul_add(V::splat(-LN2_SECOND), *x);
        }
        for coefficient in COEFFICIENTS {
            for (power, r) in power.iter_mut().zip(&x) {
                *power = power.mul_add(*r, V::splat(coefficient));
            }
        }
        for ((power, n), x) in power.iter_mut().zip(&n).zip(&arguments) {
            let scaled = power.scale_by_power(*n);
            *power = x.select_less(V::splat(LOWEST), V::splat(0.0), scaled);
        }
        power
    }
}

/// The hyperbolic tangent of each lane, within a few units in the last place.
///
/// # Safety
/// The machine supports the instruction set of `V`.
#[inline(always)]
pub unsafe fn tanh<V: Lanes>(x: V) -> V {
    // Near zero 1 - 2 / (e^2x + 1) cancels, so there the continued fraction of Lambert is cut after
    // its fifth level: x (945 + 105 x² + x⁴) / (945 + 420 x² + 15 x⁴), 1e-9 relative up to 0.6.
    // SAFETY: arithmetic on lanes only; the caller promises the instruction set.
    unsafe {
        let magnitude = x.abs();
        let square = x.mul(x);
        let above = square.add(V::splat(105.0)).mul_add(square, V::splat(945.0)).mul(x);
        let below = square.mul_add(V::splat(15.0), V::splat(420.0)).mul_add(square, V::splat(945.0));
        let near = above.div(below);
        let grown = exp(magnitude.add(magnitude)).add(V::splat(1.0));
        let far = V::splat(1.0).sub(V::splat(2.0).div(grown)).copysign(x);
        magnitude.select_less(V::splat(0.6), near, far)
    }
}
