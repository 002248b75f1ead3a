//! Decodes spans of the 4-bit storages of bitsandbytes: codes with scales over the flattened tensor.
//!
//! A block of 64 codes shares a scale, so the sixteen values are scaled once per block and looked up.
//! Blocks run over the flattened tensor: if rows are not a multiple of 64, a span contains parts of blocks
//! and may begin at a low nibble.
//! Left out: the values of the codes, which `quant` defines.

use super::isa::Lanes;
use super::stored::Stored;
use smidgen_ir::Code4;
use smidgen_ir::quant::bnb4::code_values;
use smidgen_ir::quant::dynamic_map::SIGNED_MAP;
use smidgen_ir::storage::{BNB4_BLOCK, BNB4_GROUP, Bnb4Parts, bnb4_parts};

/// Writes elements `first..first + count` of the flattened tensor.
///
/// # Safety
/// The span is inside the readable tensor, `target` is writable for `count` floats, and the machine supports
/// the instruction set of `V`.
#[inline(always)]
pub unsafe fn decode_bnb4<V: Lanes>(
    stored: &Stored,
    code: Code4,
    double: bool,
    first: usize,
    count: usize,
    target: *mut f32,
) {
    let parts = bnb4_parts(stored.total_rows * stored.columns, double);
    let values = code_values(code);
    let mut done = 0;
    while done < count {
        let element = first + done;
        let in_block = BNB4_BLOCK - element % BNB4_BLOCK;
        let run = in_block.min(count - done);
        // SAFETY: the run is in one block of the tensor and inside the span.
        unsafe {
            let scale = block_scale(stored.pointer, &parts, double, element / BNB4_BLOCK);
            decode_run::<V>(stored.pointer, values, scale, element, run, target.add(done));
        }
        done += run;
    }
}

/// # Safety
/// `tensor` is readable, and `parts` are its parts.
#[inline(always)]
unsafe fn block_scale(tensor: *const u8, parts: &Bnb4Parts, double: bool, block: usize) -> f32 {
    // SAFETY: the scales of every block are in the tensor.
    unsafe {
        let scales = tensor.add(parts.scales);
        if !double {
            return scales.cast::<f32>().add(block).read_unaligned();
        }
        let groups = tensor.add(parts.group_scales).cast::<f32>();
        let offset = tensor.add(parts.offset).cast::<f32>().read_unaligned();
        let byte = scales.add(block).read();
        SIGNED_MAP[usize::from(byte)] * groups.add(block / BNB4_GROUP).read_unaligned() + offset
    }
}

/// Elements of one block.
///
/// # Safety
/// As [`decode_bnb4`], for elements with the same scale.
#[inline(always)]
unsafe fn decode_run<V: Lanes>(
    codes: *const u8,
    values: &[f32; 16],
    scale: f32,
    first: usize,
    count: usize,
    target: *mut f32,
) {
    // A low nibble at the start is decoded alone, so that the rest begins with a whole byte.
    let lead = first % 2;
    let whole = (count - lead) / V::WIDTH * V::WIDTH;
    // SAFETY: every byte holds an element of the run; every vector is inside it.
    unsafe {
        let table = V::table(values, scale);
        let source = codes.add((first + lead) / 2);
        for at in (0..whole).step_by(V::WIDTH) {
            V::look_up(table, V::widen_nibble_pairs(source.add(at / 2))).store(target.add(lead + at));
        }
        for at in (0..lead).chain(lead + whole..count) {
            let element = first + at;
            let nibble = codes.add(element / 2).read() >> (4 - 4 * (element % 2)) & 15;
            *target.add(at) = values[usize::from(nibble)] * scale;
        }
    }
}
