//! A matrix in its storage format: its address, and the rows of a tensor that it covers.
//!
//! `decode_span.rs` decodes it. Spans of a row begin at multiples of 64 elements, so that a span never begins
//! inside a block of 64 elements or fewer.

use super::footprint::Footprint;
use smidgen_ir::Storage;

/// Spans of a row begin at multiples of this.
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
