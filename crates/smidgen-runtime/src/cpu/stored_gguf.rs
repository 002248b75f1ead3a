//! Decodes spans of blocks to f32, for each block format.
//!
//! Blocks of 32 are decoded whole, larger ones in parts of 64: spans begin at multiples of 64.
//! The product of a scale and a code is exact in f32 except for q6_k, and adding a minimum is then the only
//! rounding, so fused and separate arithmetic give the same bits.
//! Layouts are those of ggml; `quant/blocks.rs` decodes the same ones element by element.

use super::isa::Lanes;
use super::stored::{SPAN_STEP, Stored};
use smidgen_ir::Block;
use smidgen_ir::quant::blocks::{E2M1_DOUBLED, IQ4_NUMBERS, floats_of, half_power, iq4_scale, q3_scale};

/// Writes elements `first..first + count` of row `row` of the whole tensor.
///
/// # Safety
/// The span is inside the readable tensor, begins at a multiple of 64 and ends at one or at the end of the row;
/// `target` is writable for `count` floats, and the machine supports the instruction set of `V`.
#[inline(always)]
pub unsafe fn decode_gguf<V: Lanes>(
    stored: &Stored,
    block: Block,
    row: usize,
    first: usize,
    count: usize,
    target: *mut f32,
) {
    let (elements, bytes) = (block.elements(), block.bytes());
    debug_assert!(stored.columns.is_multiple_of(elements) && first.is_multiple_of(SPAN_STEP));
    debug_assert!(count.is_multiple_of(elements.min(SPAN_STEP)));
    // SAFETY: rows are whole blocks; pieces of 32 or 64 elements are in one block and in the span.
    unsafe {
        let row = stored.pointer.add(row * (stored.columns / elements) * bytes);
        match block {
            Block::Q4_0
            | Block::Q4_1
            | Block::Q5_0
            | Block::Q5_1
            | Block::Q8_0
            | Block::Iq4Nl
            | Block::Mxfp4
            | Block::Int4By32 => {
                let blocks = row.add(first / 32 * bytes);
                for index in 0..count / 32 {
                    let (source, target) = (blocks.add(index * bytes), target.add(index * 32));
                    match block {
                        Block::Q4_0 => decode_q4_0::<V>(source, target),
                        Block::Q4_1 => decode_q4_1::<V>(source, target),
                        Block::Q5_0 => decode_q5_0::<V>(source, target),
                        Block::Q5_1 => decode_q5_1::<V>(source, target),
                        Block::Iq4Nl => decode_table::<V>(source.add(2), &IQ4, V::splat_f16(source), target),
                        Block::Mxfp4 => {
                            let scale = V::splat(half_power(source.read()));
                            decode_table::<V>(source.add(1), &E2M1, scale, target);
                        }
                        Block::Int4By32 => decode_int4::<V>(source, 0, 32, target),
                        _ => decode_q8_0::<V>(source, target),
                    }
                }
            }
            Block::Q2K
            | Block::Q3K
            | Block::Q4K
            | Block::Q5K
            | Block::Q6K
            | Block::Iq4Xs
            | Block::Int4By128 => {
                for at in (0..count).step_by(SPAN_STEP) {
                    let source = row.add((first + at) / elements * bytes);
                    let (quarter, target) = ((first + at) % elements / SPAN_STEP, target.add(at));
                    match block {
                        Block::Q2K => decode_q2_k::<V>(source, quarter, target),
                        Block::Q3K => decode_q3_k::<V>(source, quarter, target),
                        Block::Iq4Xs => decode_iq4_xs::<V>(source, quarter, target),
                        Block::Int4By128 => decode_int4::<V>(source, quarter * SPAN_STEP, SPAN_STEP, target),
                        Block::Q4K => decode_q4_k_or_q5_k::<V, false>(source, quarter, target),
                        Block::Q5K => decode_q4_k_or_q5_k::<V, true>(source, quarter, target),
                        _ => decode_q6_k::<V>(source, quarter, target),
                    }
                }
            }
        }
    }
}

// Each function below decodes 32 or 64 elements of the block at `source` to `target`; the caller
// promises a readable block, writable floats and the instruction set of `V`.

#[inline(always)]
unsafe fn decode_q4_0<V: Lanes>(source: *const u8, target: *mut f32) {
    // SAFETY: the caller's promise; 16 bytes of nibbles follow the scale.
    unsafe {
        let scale = V::splat_f16(source);
        let middle = V::splat(8.0);
        for at in (0..16).step_by(V::WIDTH) {
            let bytes = V::widen_u8(source.add(2 + at));
            let (low, high) = (V::and(bytes, 15), V::shift_right(bytes, 4));
            V::from_words(low).sub(middle).mul(scale).store(target.add(at));
            V::from_words(high).sub(middle).mul(scale).store(target.add(16 + at));
        }
    }
}

#[inline(always)]
unsafe fn decode_q4_1<V: Lanes>(source: *const u8, target: *mut f32) {
    // SAFETY: the caller's promise; 16 bytes of nibbles follow scale and minimum.
    unsafe {
        let (scale, minimum) = V::splat_f16_pair(source);
        for at in (0..16).step_by(V::WIDTH) {
            let bytes = V::widen_u8(source.add(4 + at));
            let (low, high) = (V::and(bytes, 15), V::shift_right(bytes, 4));
            V::from_words(low).mul_add(scale, minimum).store(target.add(at));
            V::from_words(high).mul_add(scale, minimum).store(target.add(16 + at));
        }
    }
}

/// Codes of five bits: nibbles at `nibbles`, fifth bits in `fifths`, lowest bit first.
#[inline(always)]
unsafe fn five_bits<V: Lanes>(nibbles: *const u8, fifths: u32, at: usize) -> [V; 2] {
    // SAFETY: the caller's promise; 16 bytes of nibbles.
    unsafe {
        let bytes = V::widen_u8(nibbles.add(at));
        let low_fifth = V::and(V::shift_left(V::bits_from_each_lane(fifths >> at), 4), 16);
        let high_fifth = V::and(V::shift_left(V::bits_from_each_lane(fifths >> (16 + at)), 4), 16);
        let low = V::or(V::and(bytes, 15), low_fifth);
        let high = V::or(V::shift_right(bytes, 4), high_fifth);
        [V::from_words(low), V::from_words(high)]
    }
}

#[inline(always)]
unsafe fn decode_q5_0<V: Lanes>(source: *const u8, target: *mut f32) {
    // SAFETY: the caller's promise; fifth bits and nibbles follow the scale.
    unsafe {
        let scale = V::splat_f16(source);
        let middle = V::splat(16.0);
        let fifths = source.add(2).cast::<u32>().read_unaligned();
        for at in (0..16).step_by(V::WIDTH) {
            let [low, high] = five_bits::<V>(source.add(6), fifths, at);
            low.sub(middle).mul(scale).store(target.add(at));
            high.sub(middle).mul(scale).store(target.add(16 + at));
        }
    }
}

#[inline(always)]
unsafe fn decode_q5_1<V: Lanes>(source: *const u8, target: *mut f32) {
    // SAFETY: the caller's promise; fifth bits and nibbles follow scale and minimum.
    unsafe {
        let (scale, minimum) = V::splat_f16_pair(source);
        let fifths = source.add(4).cast::<u32>().read_unaligned();
        for at in (0..16).step_by(V::WIDTH) {
            let [low, high] = five_bits::<V>(source.add(8), fifths, at);
            low.mul_add(scale, minimum).store(target.add(at));
            high.mul_add(scale, minimum).store(target.add(16 + at));
        }
    }
}

#[inline(always)]
unsafe fn decode_q8_0<V: Lanes>(source: *const u8, target: *mut f32) {
    // SAFETY: the caller's promise; 32 codes follow the scale.
    unsafe {
        let scale = V::splat_f16(source);
        for at in (0..32).step_by(V::WIDTH) {
            V::from_words(V::widen_i8(source.add(2 + at))).mul(scale).store(target.add(at));
        }
    }
}

/// What the codes of 4-bit formats mean.
const IQ4: [f32; 16] = floats_of(&IQ4_NUMBERS);
const E2M1: [f32; 16] = floats_of(&E2M1_DOUBLED);

/// 32 codes, which are nibbles and mean the numbers of a table, times a scale.
#[inline(always)]
unsafe fn decode_table<V: Lanes>(nibbles: *const u8, numbers: &[f32; 16], scale: V, target: *mut f32) {
    // SAFETY: the caller's promise; 16 bytes of nibbles.
    unsafe {
        let table = V::table(numbers, 1.0);
        for at in (0..16).step_by(V::WIDTH) {
            let bytes = V::widen_u8(nibbles.add(at));
            V::look_up(table, bytes).mul(scale).store(target.add(at));
            V::look_up(table, V::shift_right(bytes, 4)).mul(scale).store(target.add(16 + at));
        }
    }
}

/// `count` elements of a block of GPTQ from `first` on.
#[inline(always)]
unsafe fn decode_int4<V: Lanes>(source: *const u8, first: usize, count: usize, target: *mut f32) {
    // SAFETY: the caller's promise; a scale and a zero in four bytes, then two codes in each byte.
    unsafe {
        let (scale, zero) = (V::splat_f16(source), f32::from(source.add(2).read()));
        let numbers: [f32; 16] = std::array::from_fn(|code| code as f32 - zero);
        let table = V::table(&numbers, 1.0);
        for at in (0..count).step_by(V::WIDTH) {
            let codes = V::widen_nibble_pairs(source.add(4 + (first + at) / 2));
            V::look_up(table, codes).mul(scale).store(target.add(at));
        }
    }
}

#[inline(always)]
unsafe fn decode_q2_k<V: Lanes>(source: *const u8, quarter: usize, target: *mut f32) {
    // SAFETY: the caller's promise. A half of 128 elements has 32 bytes, whose lowest pairs of bits are its first 32
    // elements; sixteen bytes of scales and minimums come first, those of the block last.
    unsafe {
        let (scale, minimum) = V::splat_f16_pair(source.add(80));
        let codes = source.add(16 + quarter / 2 * 32);
        for part in 0..2 {
            let shift = (quarter % 2 * 2 + part) as u32 * 2;
            for at in (0..32).step_by(V::WIDTH) {
                let sub = source.add(4 * quarter + 2 * part + at / 16).read();
                let scale = scale.mul(V::splat(f32::from(sub & 15)));
                let minimum = minimum.mul(V::splat(f32::from(sub >> 4)));
                let code = V::and(V::shift_right(V::widen_u8(codes.add(at)), shift), 3);
                V::from_words(code).mul(scale).sub(minimum).store(target.add(32 * part + at));
            }
        }
    }
}

#[inline(always)]
unsafe fn decode_q3_k<V: Lanes>(source: *const u8, quarter: usize, target: *mut f32) {
    // SAFETY: the caller's promise. 32 bytes of third bits, one for each eighth of the block, then pairs of bits as in q2_k,
    // twelve bytes of scales, and the scale of the block.
    unsafe {
        let (block_scale, middle) = (V::splat_f16(source.add(108)), V::splat(4.0));
        let scales: [u8; 12] = source.add(96).cast::<[u8; 12]>().read();
        let codes = source.add(32 + quarter / 2 * 32);
        for part in 0..2 {
            let (shift, eighth) = ((quarter % 2 * 2 + part) as u32 * 2, (2 * quarter + part) as u32);
            for at in (0..32).step_by(V::WIDTH) {
                let scale = f32::from(q3_scale(&scales, 4 * quarter + 2 * part + at / 16));
                let pair = V::and(V::shift_right(V::widen_u8(codes.add(at)), shift), 3);
                let third = V::and(V::shift_right(V::widen_u8(source.add(at)), eighth), 1);
                let code = V::from_words(V::or(pair, V::shift_left(third, 2))).sub(middle);
                code.mul(block_scale.mul(V::splat(scale))).store(target.add(32 * part + at));
            }
        }
    }
}

#[inline(always)]
unsafe fn decode_iq4_xs<V: Lanes>(source: *const u8, quarter: usize, target: *mut f32) {
    // SAFETY: the caller's promise. Eight bytes of scales, then 16 bytes of nibbles for each 32 elements.
    unsafe {
        let head: [u8; 8] = source.cast::<[u8; 8]>().read();
        for part in 0..2 {
            let sub = 2 * quarter + part;
            let scale = V::splat_f16(source).mul(V::splat(f32::from(iq4_scale(&head, sub))));
            decode_table::<V>(source.add(8 + 16 * sub), &IQ4, scale, target.add(32 * part));
        }
    }
}

/// Scale and minimum of sub-block `index` of a q4_k or q5_k block, six bits each in twelve bytes.
#[inline(always)]
unsafe fn six_bit_scales(scales: *const u8, index: usize) -> (f32, f32) {
    // SAFETY: the caller promises twelve readable bytes.
    unsafe {
        let byte = |at: usize| scales.add(at).read();
        let (scale, minimum) = if index < 4 {
            (byte(index) & 63, byte(index + 4) & 63)
        } else {
            let low = byte(index + 4);
            (low & 15 | byte(index - 4) >> 6 << 4, low >> 4 | byte(index) >> 6 << 4)
        };
        (f32::from(scale), f32::from(minimum))
    }
}

#[inline(always)]
unsafe fn decode_q4_k_or_q5_k<V: Lanes, const IS_Q5: bool>(
    source: *const u8,
    quarter: usize,
    target: *mut f32,
) {
    // SAFETY: the caller's promise; a quarter has 32 bytes of nibbles and two sub-blocks. In q5_k, 32 bytes in front of
    // the nibbles hold the fifth bits, one bit for each sub-block.
    unsafe {
        let (scale, minimum) = V::splat_f16_pair(source);
        let nibbles = source.add(if IS_Q5 { 48 } else { 16 } + 32 * quarter);
        let (low_scale, low_minimum) = six_bit_scales(source.add(4), 2 * quarter);
        let (high_scale, high_minimum) = six_bit_scales(source.add(4), 2 * quarter + 1);
        let (low_scale, low_minimum) = (scale.mul(V::splat(low_scale)), minimum.mul(V::splat(low_minimum)));
        let (high_scale, high_minimum) =
            (scale.mul(V::splat(high_scale)), minimum.mul(V::splat(high_minimum)));
        for at in (0..32).step_by(V::WIDTH) {
            let bytes = V::widen_u8(nibbles.add(at));
            let (mut low, mut high) = (V::and(bytes, 15), V::shift_right(bytes, 4));
            if IS_Q5 {
                let fifths = V::shift_right(V::widen_u8(source.add(16 + at)), 2 * quarter as u32);
                low = V::or(low, V::and(V::shift_left(fifths, 4), 16));
                high = V::or(high, V::and(V::shift_left(fifths, 3), 16));
            }
            V::from_words(low).mul(low_scale).sub(low_minimum).store(target.add(at));
            V::from_words(high).mul(high_scale).sub(high_minimum).store(target.add(32 + at));
        }
    }
}

#[inline(always)]
unsafe fn decode_q6_k<V: Lanes>(source: *const u8, quarter: usize, target: *mut f32) {
    // SAFETY: the caller's promise. A half of 128 elements has 64 bytes of nibbles, whose low ones are
    // its first quarter, 32 bytes of bit pairs and 8 scales.
    unsafe {
        let (half, upper) = (quarter / 2, (quarter % 2) as u32);
        let (nibbles, pairs) = (source.add(64 * half), source.add(128 + 32 * half));
        let scales = source.add(192 + 4 * quarter).cast::<i8>();
        let block_scale = V::splat_f16(source.add(208));
        let middle = V::splat(32.0);
        for part in 0..2 {
            for at in (0..32).step_by(V::WIDTH) {
                let low = V::and(V::shift_right(V::widen_u8(nibbles.add(32 * part + at)), 4 * upper), 15);
                let pair = V::shift_right(V::widen_u8(pairs.add(at)), 4 * upper + 2 * part as u32);
                let codes = V::or(low, V::shift_left(V::and(pair, 3), 4));
                let scale = V::splat(f32::from(scales.add(2 * part + at / 16).read()));
                let value = V::from_words(codes).sub(middle).mul(block_scale.mul(scale));
                value.store(target.add(32 * part + at));
            }
        }
    }
}
