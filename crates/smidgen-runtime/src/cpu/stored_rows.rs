//! Decodes spans of storages with one byte per element: bitsandbytes int8 with a scale per row, and fp8 with a scale per
//! row or per square block.
//!
//! The results have the bits of the plain decoders of `quant`, which define the formats.
//! Left out: matmuls in fp8, which only GPUs have.

use super::isa::Lanes;
use super::stored::Stored;
use smidgen_ir::quant::fp8::{EXPONENT_SHIFT, NAN, decode_byte};
use smidgen_ir::quant::int8::ONE_127TH;
use smidgen_ir::storage::{FP8_BLOCK, row_scales};

/// Scale number `index` of the tensor; the scales follow the codes.
///
/// # Safety
/// The tensor is readable and has that many scales.
#[inline(always)]
unsafe fn scale_of(stored: &Stored, index: usize) -> f32 {
    // SAFETY: scales follow the codes.
    unsafe {
        let scales = stored.pointer.add(row_scales(stored.total_rows, stored.columns)).cast::<f32>();
        scales.add(index).read_unaligned()
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
    // SAFETY: codes and scales are in the tensor; every vector is inside the span.
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

/// Like [`decode_int8`], for fp8 with a scale per row.
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
    // SAFETY: the span is inside the row, which has a scale.
    unsafe {
        decode_fp8_run::<V>(
            stored.pointer.add(row * stored.columns + first),
            scale_of(stored, row),
            count,
            target,
        );
    }
}

/// Like [`decode_int8`], for fp8 with a scale per square block.
///
/// # Safety
/// As [`decode_int8`].
#[inline(always)]
pub unsafe fn decode_fp8_blocks<V: Lanes>(
    stored: &Stored,
    row: usize,
    first: usize,
    count: usize,
    target: *mut f32,
) {
    let first_block = row / FP8_BLOCK * stored.columns.div_ceil(FP8_BLOCK);
    let mut done = 0;
    while done < count {
        let column = first + done;
        let run = (FP8_BLOCK - column % FP8_BLOCK).min(count - done);
        // SAFETY: the run is in one block and inside the span.
        unsafe {
            decode_fp8_run::<V>(
                stored.pointer.add(row * stored.columns + column),
                scale_of(stored, first_block + column / FP8_BLOCK),
                run,
                target.add(done),
            );
        }
        done += run;
    }
}

/// # Safety
/// `source` is readable for `count` bytes and `target` writable for as many floats; else as [`decode_int8`].
#[inline(always)]
unsafe fn decode_fp8_run<V: Lanes>(source: *const u8, scale: f32, count: usize, target: *mut f32) {
    let whole = count / V::WIDTH * V::WIDTH;
    // Magnitudes compare as the numbers that they stand for; NaN is above all of them.
    let nan = f32::from_bits(u32::from(NAN) << 20);
    // SAFETY: every vector and every element is inside the run.
    unsafe {
        for at in (0..whole).step_by(V::WIDTH) {
            let words = V::widen_u8(source.add(at));
            let sign = V::shift_left(V::and(words, 0x80), 24);
            let magnitude = V::shift_left(V::and(words, 0x7F), 20);
            let value = V::from_bits(V::or(sign, magnitude)).mul(V::splat(EXPONENT_SHIFT));
            let value = value.mul(V::splat(scale));
            V::from_bits(magnitude)
                .select_less(V::splat(nan), value, V::splat(f32::NAN))
                .store(target.add(at));
        }
        for at in whole..count {
            *target.add(at) = decode_byte(source.add(at).read()) * scale;
        }
    }
}
