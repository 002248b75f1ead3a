//! Decodes a span of a row of a stored matrix to f32: the one place that knows every storage format.
//!
//! The rest of the CPU device sees only f32. A new format is a new arm here; the decoders are in `stored_rows.rs`,
//! `stored_bnb.rs` and `stored_gguf.rs`. Every instruction set gives the same bits as the plain decoders of `quant`.
//! Left out: writing formats other than f32.

use super::isa::Lanes;
use super::stored::Stored;
use super::stored_bnb::decode_bnb4;
use super::stored_gguf::decode_gguf;
use super::stored_rows::{decode_fp8, decode_fp8_blocks, decode_int8};
use smidgen_ir::{DType, Storage};

impl Stored {
    /// Writes elements `first..first + count` of `row` to `target` as f32.
    ///
    /// # Safety
    /// The span is inside the matrix, the matrix is readable, `target` is writable for `count` floats, and
    /// the machine supports the instruction set of `V`. In block formats the span begins at a multiple
    /// of [`super::stored::SPAN_STEP`] and ends at one or at the end of the row.
    #[inline(always)]
    pub unsafe fn decode_span<V: Lanes>(&self, row: usize, first: usize, count: usize, target: *mut f32) {
        debug_assert!(row < self.rows && first + count <= self.columns);
        debug_assert!(self.first_row + self.rows <= self.total_rows);
        let row = self.first_row + row;
        // SAFETY: the span is inside the row by the caller's promise.
        unsafe {
            match self.storage {
                Storage::Plain(DType::F32) => {
                    let source = self.pointer.cast::<f32>().add(row * self.row_stride + first);
                    decode_f32::<V>(source, count, target);
                }
                Storage::Plain(DType::Bf16) => {
                    let source = self.pointer.cast::<u16>().add(row * self.row_stride + first);
                    decode_bf16::<V>(source, count, target);
                }
                Storage::Plain(DType::F16) => {
                    let source = self.pointer.cast::<u16>().add(row * self.row_stride + first);
                    decode_f16::<V>(source, count, target);
                }
                Storage::Plain(DType::F64 | DType::I32 | DType::U64) | Storage::Dynamic8 { .. } => {
                    unreachable!("`check` refuses real numbers stored as {}", self.storage)
                }
                Storage::Int8Rows => decode_int8::<V>(self, row, first, count, target),
                Storage::Fp8Rows => decode_fp8::<V>(self, row, first, count, target),
                Storage::Fp8Blocks => decode_fp8_blocks::<V>(self, row, first, count, target),
                Storage::Bnb4 { code, double } => {
                    decode_bnb4::<V>(self, code, double, row * self.columns + first, count, target);
                }
                Storage::Gguf(block) => decode_gguf::<V>(self, block, row, first, count, target),
            }
        }
    }
}

/// # Safety
/// `source` is readable for `count` elements, which need not be aligned; else as `decode_span`.
#[inline(always)]
unsafe fn decode_f32<V: Lanes>(source: *const f32, count: usize, target: *mut f32) {
    let whole = count / V::WIDTH * V::WIDTH;
    // SAFETY: every vector and every element is inside the span.
    unsafe {
        for at in (0..whole).step_by(V::WIDTH) {
            V::load(source.add(at)).store(target.add(at));
        }
        for at in whole..count {
            *target.add(at) = source.add(at).read_unaligned();
        }
    }
}

/// # Safety
/// As `decode_f32`.
#[inline(always)]
unsafe fn decode_bf16<V: Lanes>(source: *const u16, count: usize, target: *mut f32) {
    let whole = count / V::WIDTH * V::WIDTH;
    // SAFETY: every vector and every element is inside the span.
    unsafe {
        for at in (0..whole).step_by(V::WIDTH) {
            V::load_bf16(source.add(at)).store(target.add(at));
        }
        for at in whole..count {
            let bits = source.add(at).read_unaligned();
            *target.add(at) = f32::from_bits(u32::from(bits) << 16);
        }
    }
}

/// # Safety
/// As `decode_f32`.
#[inline(always)]
unsafe fn decode_f16<V: Lanes>(source: *const u16, count: usize, target: *mut f32) {
    let whole = count / V::WIDTH * V::WIDTH;
    // SAFETY: every vector and every element is inside the span.
    unsafe {
        for at in (0..whole).step_by(V::WIDTH) {
            V::load_f16(source.add(at)).store(target.add(at));
        }
        for at in whole..count {
            let bits = source.add(at).read_unaligned();
            *target.add(at) = half::f16::from_bits(bits).to_f32();
        }
    }
}
