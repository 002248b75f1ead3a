//! Decodes spans of storages that have one scale per row: int8 of bitsandbytes, and floats of eight bits.
//!
//! The bits are those of the plain decoders of `quant`, which define what the bytes mean.
//! Left out: products with such floats in their own precision, which only GPUs have.

use super::isa::Lanes;
use super::stored::Stored;
use smidgen_ir::quant::fp8::{EXPONENT_SHIFT, decode_byte};
use smidgen_ir::quant::int8::ONE_127TH;
use smidgen_ir::storage::row_scales;

/// The f32 of a row behind all codes.
///
/// # Safety
/// The row is inside the readable tensor.
#[inline(always)]
unsafe fn scale_of(stored: &Stored, row: usize) -> f32 {
    // SAFETY: scales follow the codes, one for each row.
    unsafe {
        let scales = stored.pointer.add(row_scales(stored.total_rows, stored.columns)).cast::<f32>();
        scales.add(row).read_unaligned()
    }
}

/// Writes `count` elements of row `row` of the whole tensor, from `first` on.
///
/// # Safety
/// The span is inside the readable tensor, `target` is writable for `count` floats, and the machine supports
/// the instruction set of `V`.
#[inline(always)]
pub unsafe fn decode_int8<V: Lanes>(
    stored: &Stored,
    row: usize,
    first: usize,
    count: usize,
    target: *mut f32,
) {
    let whole = count / V::WIDTH * V::WIDTH;
    // SAFETY: codes and scales lie in the tensor; every vector is inside the span.
    unsafe {
        let scale = scale_of(stored, row) * ONE_127TH;
        let source = stored.pointer.add(row * stored.columns + first);
        for at in (0..whole).step_by(V::WIDTH) {
            V::from_words(V::widen_i8(source.add(at))).mul(V::splat(scale)).store(target.add(at));
        }
        for at in whole..count {
            *target.add(at) = f32::from(source.add(at).cast::<i8>().read()) * scale;
        }
    }
}

/// The same for floats of eight bits.
///
/// # Safety
/// As [`decode_int8`].
#[inline(always)]
pub unsafe fn decode_fp8<V: Lanes>(
    stored: &Stored,
    row: usize,
    first: usize,
    count: usize,
    target: *mut f32,
) {
    let whole = count / V::WIDTH * V::WIDTH;
    // SAFETY: codes and scales lie in the tensor; every vector is inside the span.
    unsafe {
        let scale = scale_of(stored, row);
        let source = stored.pointer.add(row * stored.columns + first);
        for at in (0..whole).step_by(V::WIDTH) {
            let words = V::widen_u8(source.add(at));
            let sign = V::shift_left(V::and(words, 0x80), 24);
            let magnitude = V::shift_left(V::and(words, 0x7F), 20);
            let value = V::from_bits(V::or(sign, magnitude)).mul(V::splat(EXPONENT_SHIFT));
            value.mul(V::splat(scale)).store(target.add(at));
        }
        for at in whole..count {
            *target.add(at) = decode_byte(source.add(at).read()) * scale;
        }
    }
}
