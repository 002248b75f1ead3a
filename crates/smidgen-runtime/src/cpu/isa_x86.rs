//! [`Lanes`] over the intrinsics of AVX-512 and of AVX2 with FMA and F16C.
//!
//! Most methods are one or two instructions. The trait documents what they do and what they require of the caller:
//! the machine has the instruction set, and pointers are valid for the lanes that are read or written.
//! Every `unsafe` block here relies on that. No alignment is assumed.
//! Left out: operations that only one of the two sets has.

use super::isa_lanes::Lanes;
use std::arch::x86_64::*;

/// Methods that return one expression of intrinsics as a vector.
macro_rules! vector_expression {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) = $value:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($argument: $kind),*) -> Self {
            // SAFETY: the caller keeps the promises of `Lanes`.
            Self(unsafe { $value })
        }
    )*};
}

/// Methods that return one expression of intrinsics as it is.
macro_rules! plain_expression {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty = $value:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($argument: $kind),*) -> $result {
            // SAFETY: the caller keeps the promises of `Lanes`.
            unsafe { $value }
        }
    )*};
}

#[derive(Clone, Copy)]
pub struct Avx512Lanes(__m512);

#[derive(Clone, Copy)]
pub struct Avx2Lanes(__m256);

#[inline(always)]
fn first_lanes_mask(count: usize) -> __mmask16 {
    ((1u32 << count) - 1) as __mmask16
}

impl Lanes for Avx512Lanes {
    const WIDTH: usize = 16;
    type Words = __m512i;
    type Table = __m512;

    vector_expression! {
        fn splat(value: f32) = _mm512_set1_ps(value);
        fn load(source: *const f32) = _mm512_loadu_ps(source);
        fn load_first(source: *const f32, count: usize) = _mm512_maskz_loadu_ps(first_lanes_mask(count), source);
        fn add(self: Self, other: Self) = _mm512_add_ps(self.0, other.0);
        fn sub(self: Self, other: Self) = _mm512_sub_ps(self.0, other.0);
        fn mul(self: Self, other: Self) = _mm512_mul_ps(self.0, other.0);
        fn div(self: Self, other: Self) = _mm512_div_ps(self.0, other.0);
        fn max(self: Self, other: Self) = _mm512_max_ps(self.0, other.0);
        fn min(self: Self, other: Self) = _mm512_min_ps(self.0, other.0);
        fn mul_add(self: Self, factor: Self, addend: Self) = _mm512_fmadd_ps(self.0, factor.0, addend.0);
        fn abs(self: Self) = _mm512_abs_ps(self.0);
        fn scale_by_power(self: Self, exponent: Self) = _mm512_scalef_ps(self.0, exponent.0);
        fn splat_f16(source: *const u8) = _mm512_cvtph_ps(_mm256_set1_epi16(source.cast::<i16>().read_unaligned()));
        fn from_words(words: __m512i) = _mm512_cvtepi32_ps(words);
        fn from_bits(words: __m512i) = _mm512_castsi512_ps(words);
        fn look_up(table: __m512, words: __m512i) = _mm512_permutexvar_ps(words, table);
        fn load_f16(source: *const u16) = _mm512_cvtph_ps(_mm256_loadu_si256(source.cast()));
        fn load_bf16(source: *const u16) =
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(source.cast()))));
        fn select_less(self: Self, limit: Self, yes: Self, no: Self) =
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, limit.0), no.0, yes.0);
    }

    plain_expression! {
        fn widen_u8(source: *const u8) -> __m512i = _mm512_cvtepu8_epi32(_mm_loadu_si128(source.cast()));
        fn widen_i8(source: *const u8) -> __m512i = _mm512_cvtepi8_epi32(_mm_loadu_si128(source.cast()));
        fn bits_from_each_lane(bits: u32) -> __m512i = {
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            _mm512_srlv_epi32(_mm512_set1_epi32(bits as i32), lanes)
        };
        fn and(words: __m512i, mask: u32) -> __m512i = _mm512_and_si512(words, _mm512_set1_epi32(mask as i32));
        fn or(words: __m512i, other: __m512i) -> __m512i = _mm512_or_si512(words, other);
        fn shift_left(words: __m512i, count: u32) -> __m512i =
            _mm512_sll_epi32(words, _mm_cvtsi32_si128(count as i32));
        fn shift_right(words: __m512i, count: u32) -> __m512i =
            _mm512_srl_epi32(words, _mm_cvtsi32_si128(count as i32));
        fn table(values: &[f32; 16], scale: f32) -> __m512 =
            _mm512_mul_ps(_mm512_loadu_ps(values.as_ptr()), _mm512_set1_ps(scale));
        fn store(self: Self, target: *mut f32) -> () = _mm512_storeu_ps(target, self.0);
        fn store_first(self: Self, target: *mut f32, count: usize) -> () =
            _mm512_mask_storeu_ps(target, first_lanes_mask(count), self.0);
        fn sum(self: Self) -> f32 = _mm512_reduce_add_ps(self.0);
        fn largest(self: Self) -> f32 = _mm512_reduce_max_ps(self.0);
    }

    #[inline(always)]
    unsafe fn widen_nibble_pairs(source: *const u8) -> __m512i {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(source.cast()));
            _mm512_or_si512(_mm512_srli_epi64::<4>(bytes), _mm512_slli_epi64::<32>(bytes))
        }
    }
    #[inline(always)]
    unsafe fn splat_f16_pair(source: *const u8) -> (Self, Self) {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let pairs = _mm512_cvtph_ps(_mm256_set1_epi32(source.cast::<i32>().read_unaligned()));
            (Self(_mm512_moveldup_ps(pairs)), Self(_mm512_movehdup_ps(pairs)))
        }
    }

    #[inline(always)]
    unsafe fn copysign(self, sign: Self) -> Self {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let sign_bit = _mm512_set1_ps(-0.0);
            let signs = _mm512_and_ps(sign_bit, sign.0);
            Self(_mm512_or_ps(_mm512_andnot_ps(sign_bit, self.0), signs))
        }
    }
    #[inline(always)]
    unsafe fn from_f16_pairs(source: *const u32) -> (Self, Self) {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let words = _mm512_loadu_si512(source.cast());
            let low = _mm512_cvtepi32_epi16(words);
            let high = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(words));
            (Self(_mm512_cvtph_ps(low)), Self(_mm512_cvtph_ps(high)))
        }
    }
    #[inline(always)]
    unsafe fn transpose_bytes(source: *const u8, stride: usize, target: *mut u8) {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            // Lane l of quarter q holds row 4 l + q.
            let mut quarters = [_mm512_setzero_si512(); 4];
            for (q, quarter) in quarters.iter_mut().enumerate() {
                let row = source.add(q * stride);
                let first = _mm512_castsi128_si512(_mm_loadu_si128(row.cast()));
                let second = _mm_loadu_si128(row.add(4 * stride).cast());
                let third = _mm_loadu_si128(row.add(8 * stride).cast());
                let fourth = _mm_loadu_si128(row.add(12 * stride).cast());
                *quarter = _mm512_inserti32x4::<1>(first, second);
                *quarter = _mm512_inserti32x4::<2>(*quarter, third);
                *quarter = _mm512_inserti32x4::<3>(*quarter, fourth);
            }
            let [a, b, c, d] = quarters;
            let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
            let (ab_high, cd_high) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
            // Word i of lane l is byte i of rows 4 l to 4 l + 3.
            let bytes = [
                _mm512_unpacklo_epi16(ab, cd),
                _mm512_unpackhi_epi16(ab, cd),
                _mm512_unpacklo_epi16(ab_high, cd_high),
                _mm512_unpackhi_epi16(ab_high, cd_high),
            ];
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            for (four, bytes) in bytes.into_iter().enumerate() {
                _mm512_storeu_si512(target.add(64 * four).cast(), _mm512_permutexvar_epi32(order, bytes));
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
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let mut rows = [_mm512_setzero_ps(); 16];
            for (row, lanes) in rows.iter_mut().enumerate() {
                *lanes = _mm512_loadu_ps(source.add(row * source_stride));
            }
            let columns = transpose_16x16(rows);
            for (column, lanes) in columns.iter().enumerate() {
                let scaled = _mm512_mul_ps(*lanes, scale.0);
                _mm512_storeu_ps(target.add(column * target_stride), scaled);
            }
        }
    }
}

/// The transpose of 16 rows of 16 lanes.
///
/// # Safety
/// The machine has AVX-512.
#[inline(always)]
pub unsafe fn transpose_16x16(mut a: [__m512; 16]) -> [__m512; 16] {
    // SAFETY: the caller's promise.
    unsafe {
        // Four rounds: pairs of rows, quads of rows within 128-bit lanes, then the lanes twice.
        let mut b = a;
        for pair in 0..8 {
            b[2 * pair] = _mm512_unpacklo_ps(a[2 * pair], a[2 * pair + 1]);
            b[2 * pair + 1] = _mm512_unpackhi_ps(a[2 * pair], a[2 * pair + 1]);
        }
        for quad in 0..4 {
            let base = 4 * quad;
            let (low, high) = (_mm512_castps_pd(b[base]), _mm512_castps_pd(b[base + 2]));
            a[base] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            a[base + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
            let (low, high) = (_mm512_castps_pd(b[base + 1]), _mm512_castps_pd(b[base + 3]));
            a[base + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            a[base + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
        // a[4 q + c] holds, in its 128-bit lane l, rows 4q..4q+4 of column 4l + c.
        for column in 0..4 {
            let (first, second) = (a[column], a[4 + column]);
            b[column] = _mm512_shuffle_f32x4::<0x88>(first, second);
            b[4 + column] = _mm512_shuffle_f32x4::<0xdd>(first, second);
            let (third, fourth) = (a[8 + column], a[12 + column]);
            b[8 + column] = _mm512_shuffle_f32x4::<0x88>(third, fourth);
            b[12 + column] = _mm512_shuffle_f32x4::<0xdd>(third, fourth);
        }
        for column in 0..4 {
            a[column] = _mm512_shuffle_f32x4::<0x88>(b[column], b[8 + column]);
            a[8 + column] = _mm512_shuffle_f32x4::<0xdd>(b[column], b[8 + column]);
            a[4 + column] = _mm512_shuffle_f32x4::<0x88>(b[4 + column], b[12 + column]);
            a[12 + column] = _mm512_shuffle_f32x4::<0xdd>(b[4 + column], b[12 + column]);
        }
        a
    }
}

/// Eight set words, then eight clear ones: a window into it masks the first lanes.
static WINDOW: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

impl Avx2Lanes {
    #[inline(always)]
    unsafe fn first_lanes(count: usize) -> __m256i {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe { _mm256_loadu_si256(WINDOW.as_ptr().add(8 - count).cast()) }
    }
    #[inline(always)]
    unsafe fn power_of_two(exponent: __m256i) -> __m256 {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let biased = _mm256_add_epi32(exponent, _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }
    }
}

impl Lanes for Avx2Lanes {
    const WIDTH: usize = 8;
    type Words = __m256i;
    type Table = [__m256; 2];

    vector_expression! {
        fn splat(value: f32) = _mm256_set1_ps(value);
        fn load(source: *const f32) = _mm256_loadu_ps(source);
        fn load_first(source: *const f32, count: usize) = _mm256_maskload_ps(source, Self::first_lanes(count));
        fn add(self: Self, other: Self) = _mm256_add_ps(self.0, other.0);
        fn sub(self: Self, other: Self) = _mm256_sub_ps(self.0, other.0);
        fn mul(self: Self, other: Self) = _mm256_mul_ps(self.0, other.0);
        fn div(self: Self, other: Self) = _mm256_div_ps(self.0, other.0);
        fn max(self: Self, other: Self) = _mm256_max_ps(self.0, other.0);
        fn min(self: Self, other: Self) = _mm256_min_ps(self.0, other.0);
        fn mul_add(self: Self, factor: Self, addend: Self) = _mm256_fmadd_ps(self.0, factor.0, addend.0);
        fn abs(self: Self) = _mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0);
        fn splat_f16(source: *const u8) = _mm256_cvtph_ps(_mm_set1_epi16(source.cast::<i16>().read_unaligned()));
        fn from_words(words: __m256i) = _mm256_cvtepi32_ps(words);
        fn from_bits(words: __m256i) = _mm256_castsi256_ps(words);
        fn load_f16(source: *const u16) = _mm256_cvtph_ps(_mm_loadu_si128(source.cast()));
        fn load_bf16(source: *const u16) =
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(source.cast()))));
        fn select_less(self: Self, limit: Self, yes: Self, no: Self) =
            _mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, limit.0));
        fn copysign(self: Self, sign: Self) =
            _mm256_or_ps(self.abs().0, _mm256_and_ps(_mm256_set1_ps(-0.0), sign.0));
    }

    plain_expression! {
        fn widen_u8(source: *const u8) -> __m256i = _mm256_cvtepu8_epi32(_mm_loadl_epi64(source.cast()));
        fn widen_i8(source: *const u8) -> __m256i = _mm256_cvtepi8_epi32(_mm_loadl_epi64(source.cast()));
        fn bits_from_each_lane(bits: u32) -> __m256i =
            _mm256_srlv_epi32(_mm256_set1_epi32(bits as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        fn and(words: __m256i, mask: u32) -> __m256i = _mm256_and_si256(words, _mm256_set1_epi32(mask as i32));
        fn or(words: __m256i, other: __m256i) -> __m256i = _mm256_or_si256(words, other);
        fn shift_left(words: __m256i, count: u32) -> __m256i =
            _mm256_sll_epi32(words, _mm_cvtsi32_si128(count as i32));
        fn shift_right(words: __m256i, count: u32) -> __m256i =
            _mm256_srl_epi32(words, _mm_cvtsi32_si128(count as i32));
        fn table(values: &[f32; 16], scale: f32) -> [__m256; 2] = {
            let scale = _mm256_set1_ps(scale);
            let (low, high) = (_mm256_loadu_ps(values.as_ptr()), _mm256_loadu_ps(values.as_ptr().add(8)));
            [_mm256_mul_ps(low, scale), _mm256_mul_ps(high, scale)]
        };
        fn store(self: Self, target: *mut f32) -> () = _mm256_storeu_ps(target, self.0);
        fn store_first(self: Self, target: *mut f32, count: usize) -> () =
            _mm256_maskstore_ps(target, Self::first_lanes(count), self.0);
    }

    #[inline(always)]
    unsafe fn look_up(table: [__m256; 2], words: __m256i) -> Self {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let low = _mm256_permutevar8x32_ps(table[0], words);
            let high = _mm256_permutevar8x32_ps(table[1], words);
            // Bit 3 selects the half; the blend reads the sign bit.
            let is_high = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(words));
            Self(_mm256_blendv_ps(low, high, is_high))
        }
    }
    #[inline(always)]
    unsafe fn widen_nibble_pairs(source: *const u8) -> __m256i {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(source.cast::<i32>().read_unaligned()));
            _mm256_or_si256(_mm256_srli_epi64::<4>(bytes), _mm256_slli_epi64::<32>(bytes))
        }
    }
    #[inline(always)]
    unsafe fn splat_f16_pair(source: *const u8) -> (Self, Self) {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let pairs = _mm256_cvtph_ps(_mm_set1_epi32(source.cast::<i32>().read_unaligned()));
            (Self(_mm256_moveldup_ps(pairs)), Self(_mm256_movehdup_ps(pairs)))
        }
    }

    #[inline(always)]
    unsafe fn scale_by_power(self, exponent: Self) -> Self {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            // Two factors, because a single one cannot express 2^-150 or 2^128.
            let whole = _mm256_cvtps_epi32(exponent.0);
            let first = _mm256_srai_epi32::<1>(whole);
            let second = _mm256_sub_epi32(whole, first);
            let scaled = _mm256_mul_ps(self.0, Self::power_of_two(first));
            Self(_mm256_mul_ps(scaled, Self::power_of_two(second)))
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let half = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let half = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)))
        }
    }
    #[inline(always)]
    unsafe fn from_f16_pairs(source: *const u32) -> (Self, Self) {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let words = _mm256_loadu_si256(source.cast());
            let low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
            // Each 128-bit lane gets its low halves, then its high halves; the permutation puts them in order.
            let halves = _mm256_packus_epi32(low, _mm256_srli_epi32::<16>(words));
            let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(halves);
            let (low, high) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
            (Self(_mm256_cvtph_ps(low)), Self(_mm256_cvtph_ps(high)))
        }
    }
    #[inline(always)]
    unsafe fn transpose_bytes(source: *const u8, stride: usize, target: *mut u8) {
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            // As for AVX-512, with two 128-bit lanes.
            let mut quarters = [_mm256_setzero_si256(); 4];
            for (q, quarter) in quarters.iter_mut().enumerate() {
                let row = source.add(q * stride);
                let first = _mm256_castsi128_si256(_mm_loadu_si128(row.cast()));
                let second = _mm_loadu_si128(row.add(4 * stride).cast());
                *quarter = _mm256_inserti128_si256::<1>(first, second);
            }
            let [a, b, c, d] = quarters;
            let (ab, cd) = (_mm256_unpacklo_epi8(a, b), _mm256_unpacklo_epi8(c, d));
            let (ab_high, cd_high) = (_mm256_unpackhi_epi8(a, b), _mm256_unpackhi_epi8(c, d));
            let bytes = [
                _mm256_unpacklo_epi16(ab, cd),
                _mm256_unpackhi_epi16(ab, cd),
                _mm256_unpacklo_epi16(ab_high, cd_high),
                _mm256_unpackhi_epi16(ab_high, cd_high),
            ];
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            for (four, bytes) in bytes.into_iter().enumerate() {
                _mm256_storeu_si256(target.add(32 * four).cast(), _mm256_permutevar8x32_epi32(bytes, order));
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
        // SAFETY: the caller keeps the promises of `Lanes`.
        unsafe {
            let mut a = [_mm256_setzero_ps(); 8];
            let mut b = a;
            for (row, lanes) in a.iter_mut().enumerate() {
                *lanes = _mm256_loadu_ps(source.add(row * source_stride));
            }
            for pair in 0..4 {
                b[2 * pair] = _mm256_unpacklo_ps(a[2 * pair], a[2 * pair + 1]);
                b[2 * pair + 1] = _mm256_unpackhi_ps(a[2 * pair], a[2 * pair + 1]);
            }
            for quad in 0..2 {
                let base = 4 * quad;
                a[base] = _mm256_shuffle_ps::<0x44>(b[base], b[base + 2]);
                a[base + 1] = _mm256_shuffle_ps::<0xee>(b[base], b[base + 2]);
                a[base + 2] = _mm256_shuffle_ps::<0x44>(b[base + 1], b[base + 3]);
                a[base + 3] = _mm256_shuffle_ps::<0xee>(b[base + 1], b[base + 3]);
            }
            for column in 0..4 {
                b[column] = _mm256_permute2f128_ps::<0x20>(a[column], a[4 + column]);
                b[4 + column] = _mm256_permute2f128_ps::<0x31>(a[column], a[4 + column]);
            }
            for (column, lanes) in b.iter().enumerate() {
                let scaled = _mm256_mul_ps(*lanes, scale.0);
                _mm256_storeu_ps(target.add(column * target_stride), scaled);
            }
        }
    }
}
