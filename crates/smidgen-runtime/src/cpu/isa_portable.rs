//! [`Lanes`] in plain Rust: four floats, which every 64-bit target keeps in one register.
//!
//! It is the only implementation outside x86-64 and the reference for the other two in tests.
//! Left out: explicit NEON; the compiler vectorises these loops.

use super::isa_lanes::Lanes;

#[derive(Clone, Copy)]
#[repr(align(16))]
pub struct PortableLanes([f32; 4]);

#[inline(always)]
fn each(make: impl Fn(usize) -> f32) -> PortableLanes {
    PortableLanes([make(0), make(1), make(2), make(3)])
}

/// Fused only if there is an instruction for it; otherwise `mul_add` would be a library call, a hundred times slower.
#[inline(always)]
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) << 23) as u32)
}

#[inline(always)]
fn each_word(make: impl Fn(usize) -> u32) -> [u32; 4] {
    [make(0), make(1), make(2), make(3)]
}

impl Lanes for PortableLanes {
    const WIDTH: usize = 4;
    type Words = [u32; 4];
    type Table = [f32; 16];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        PortableLanes([value; 4])
    }
    #[inline(always)]
    unsafe fn load(source: *const f32) -> Self {
        // SAFETY: the caller promises four readable floats; no alignment is assumed.
        PortableLanes(unsafe { source.cast::<[f32; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_first(source: *const f32, count: usize) -> Self {
        let mut lanes = [0.0; 4];
        for (index, lane) in lanes.iter_mut().enumerate().take(count) {
            // SAFETY: the caller promises `count` readable floats.
            *lane = unsafe { source.add(index).read() };
        }
        PortableLanes(lanes)
    }
    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> Self {
        // SAFETY: the caller promises four readable halves.
        each(|i| f32::from_bits(u32::from(unsafe { source.add(i).read_unaligned() }) << 16))
    }
    #[inline(always)]
    unsafe fn load_f16(source: *const u16) -> Self {
        // SAFETY: the caller promises four readable halves.
        each(|i| half::f16::from_bits(unsafe { source.add(i).read_unaligned() }).to_f32())
    }
    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        // SAFETY: the caller promises four writable floats; no alignment is assumed.
        unsafe { target.cast::<[f32; 4]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_first(self, target: *mut f32, count: usize) {
        for (index, lane) in self.0.iter().enumerate().take(count) {
            // SAFETY: the caller promises `count` writable floats.
            unsafe { target.add(index).write(*lane) };
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        each(|i| self.0[i] + other.0[i])
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        each(|i| self.0[i] - other.0[i])
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        each(|i| self.0[i] * other.0[i])
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        each(|i| self.0[i] / other.0[i])
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        each(|i| if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] })
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        each(|i| if self.0[i] < other.0[i] { self.0[i] } else { other.0[i] })
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        each(|i| multiply_add(self.0[i], factor.0[i], addend.0[i]))
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        each(|i| self.0[i].abs())
    }
    #[inline(always)]
    unsafe fn copysign(self, sign: Self) -> Self {
        each(|i| self.0[i].copysign(sign.0[i]))
    }
    #[inline(always)]
    unsafe fn select_less(self, limit: Self, yes: Self, no: Self) -> Self {
        each(|i| if self.0[i] < limit.0[i] { yes.0[i] } else { no.0[i] })
    }
    #[inline(always)]
    unsafe fn scale_by_power(self, exponent: Self) -> Self {
        // Two factors, because a single one cannot express 2^-150 or 2^128.
        each(|i| {
            let whole = exponent.0[i] as i32;
            let first = whole >> 1;
            self.0[i] * power_of_two(first) * power_of_two(whole - first)
        })
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        (self.0[0] + self.0[2]) + (self.0[1] + self.0[3])
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        self.0[0].max(self.0[2]).max(self.0[1].max(self.0[3]))
    }
    #[inline(always)]
    unsafe fn splat_f16(source: *const u8) -> Self {
        // SAFETY: the caller promises a readable half.
        PortableLanes([half::f16::from_bits(unsafe { source.cast::<u16>().read_unaligned() }).to_f32(); 4])
    }
    #[inline(always)]
    unsafe fn splat_f16_pair(source: *const u8) -> (Self, Self) {
        // SAFETY: the caller promises two readable halves.
        unsafe { (Self::splat_f16(source), Self::splat_f16(source.add(2))) }
    }
    #[inline(always)]
    unsafe fn from_words(words: [u32; 4]) -> Self {
        each(|i| words[i] as i32 as f32)
    }
    #[inline(always)]
    unsafe fn from_bits(words: [u32; 4]) -> Self {
        each(|i| f32::from_bits(words[i]))
    }
    #[inline(always)]
    unsafe fn widen_u8(source: *const u8) -> [u32; 4] {
        // SAFETY: the caller promises four readable bytes.
        each_word(|i| u32::from(unsafe { source.add(i).read() }))
    }
    #[inline(always)]
    unsafe fn widen_i8(source: *const u8) -> [u32; 4] {
        // SAFETY: the caller promises four readable bytes.
        each_word(|i| i32::from(unsafe { source.cast::<i8>().add(i).read() }) as u32)
    }
    #[inline(always)]
    unsafe fn widen_nibble_pairs(source: *const u8) -> [u32; 4] {
        // SAFETY: the caller promises two readable bytes.
        let [first, second] = unsafe { source.cast::<[u8; 2]>().read() }.map(u32::from);
        [first >> 4, first, second >> 4, second]
    }
    #[inline(always)]
    unsafe fn bits_from_each_lane(bits: u32) -> [u32; 4] {
        each_word(|i| bits >> i)
    }
    #[inline(always)]
    unsafe fn and(words: [u32; 4], mask: u32) -> [u32; 4] {
        each_word(|i| words[i] & mask)
    }
    #[inline(always)]
    unsafe fn or(words: [u32; 4], other: [u32; 4]) -> [u32; 4] {
        each_word(|i| words[i] | other[i])
    }
    #[inline(always)]
    unsafe fn shift_left(words: [u32; 4], count: u32) -> [u32; 4] {
        each_word(|i| words[i] << count)
    }
    #[inline(always)]
    unsafe fn shift_right(words: [u32; 4], count: u32) -> [u32; 4] {
        each_word(|i| words[i] >> count)
    }
    #[inline(always)]
    unsafe fn table(values: &[f32; 16], scale: f32) -> [f32; 16] {
        values.map(|value| value * scale)
    }
    #[inline(always)]
    unsafe fn look_up(table: [f32; 16], words: [u32; 4]) -> Self {
        each(|i| table[words[i] as usize & 15])
    }
    #[inline(always)]
    unsafe fn from_f16_pairs(source: *const u32) -> (Self, Self) {
        // SAFETY: the caller promises four readable words.
        let word = |i: usize| unsafe { source.add(i).read_unaligned() };
        let half = |bits: u32| half::f16::from_bits(bits as u16).to_f32();
        (each(|i| half(word(i))), each(|i| half(word(i) >> 16)))
    }
    #[inline(always)]
    unsafe fn transpose_bytes(source: *const u8, stride: usize, target: *mut u8) {
        // SAFETY: the caller promises sixteen readable bytes in each of four rows, and as many writable ones.
        unsafe {
            for r in 0..4 {
                let bytes = source.add(r * stride).cast::<[u8; 16]>().read();
                for (i, byte) in bytes.into_iter().enumerate() {
                    target.add(4 * i + r).write(byte);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn transpose_square(
        source: *const f32,
        source_stride: usize,
        target: *mut f32,
        target_stride: usize,
        scale: Self,
    ) {
        // SAFETY: the caller promises a 4×4 square at either pointer with these strides.
        unsafe {
            for column in 0..4 {
                let lanes = each(|i| *source.add(i * source_stride + column)).mul(scale);
                lanes.store(target.add(column * target_stride));
            }
        }
    }
}
