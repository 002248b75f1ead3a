//! A matrix in its storage format, and the one place that decodes it.
//!
//! Everything else of the CPU device sees f32: [`Stored::decode_span`] turns a span of a row into
//! floats, and a new format is a new arm there; the arms are in `stored_bnb.rs` and
//! `stored_gguf.rs`. Every instruction set gives the same bits as the plain decoders of `quant`.
//! Matmuls ask for spans that begin at multiples of 64 elements of the row, so that a span never begins
//! inside a block of 64 elements or fewer.
//! Left out: writing formats other than f32.

use super::footprint::Footprint;
use super::isa::Lanes;
use super::stored_bnb::{decode_bnb4, decode_int8};
use super::stored_gguf::decode_gguf;
use smidgen_ir::{DType, Storage};

/// Where spans of a row may begin.
pub const SPAN_STEP: usize = 64;

/// A view of `rows` × `columns` elements: the rows from `first_row` on of a tensor that has
/// `total_rows`. Parts of a storage that belong to the whole tensor, such as scales, are located from
/// `pointer` and `total_rows`, so a slice of rows shares them.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    /// Start of the whole tensor; it need not be aligned.
    pub pointer: *const u8,
    pub storage: Storage,
    pub first_row: usize,
    pub rows: usize,
    pub total_rows: usize,
    pub columns: usize,
    /// Elements from one row to the next; always `columns` unless the storage is plain.
    pub row_stride: usize,
}

// SAFETY: a view is only an address; the unsafe functions that dereference it state what they require.
unsafe impl Send for Stored {}
// SAFETY: as above, and nothing is written through a `Stored`.
unsafe impl Sync for Stored {}

impl Stored {
    /// A whole tensor. Panics if a row of a block format is not a whole number of blocks.
    pub fn dense(pointer: *const u8, storage: Storage, rows: usize, columns: usize) -> Stored {
        if let Storage::Gguf(block) = storage {
            let elements = block.elements();
            assert!(
                columns.is_multiple_of(elements),
                "rows of {columns} in {storage}, whose blocks hold {elements}"
            );
        }
        Stored { pointer, storage, first_row: 0, rows, total_rows: rows, columns, row_stride: columns }
    }

    /// A dense matrix of f32.
    pub fn dense_f32(pointer: *const f32, rows: usize, columns: usize) -> Stored {
        Stored::dense(pointer.cast(), Storage::F32, rows, columns)
    }

    /// Rows `first..first + rows` of this view.
    pub fn row_slice(self, first: usize, rows: usize) -> Stored {
        assert!(first <= self.rows && rows <= self.rows - first, "{rows} rows from {first} of {}", self.rows);
        Stored { first_row: self.first_row + first, rows, ..self }
    }

    /// Writes elements `first..first + count` of `row` to `target` as f32.
    ///
    /// # Safety
    /// The span is inside the matrix, the matrix is readable, `target` is writable for `count` floats, and
    /// the machine supports the instruction set of `V`. In block formats the span begins at a multiple
    /// of [`SPAN_STEP`] and ends at one or at the end of the row.
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
                Storage::Bnb4 { code, double } => {
                    decode_bnb4::<V>(self, code, double, row * self.columns + first, count, target);
                }
                Storage::Gguf(block) => decode_gguf::<V>(self, block, row, first, count, target),
            }
        }
    }
}

impl From<Stored> for Footprint {
    fn from(view: Stored) -> Footprint {
        let address = view.pointer.addr();
        match view.storage {
            Storage::Plain(dtype) => {
                let (row_bytes, stride) = (view.columns * dtype.bytes(), view.row_stride * dtype.bytes());
                Footprint::rows(address + view.first_row * stride, view.rows, row_bytes, stride)
            }
            storage => Footprint::flat(address, storage.bytes(view.total_rows, view.columns)),
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
