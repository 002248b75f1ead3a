//! A matrix as it lies in memory, in its own element format, and the one place that decodes it.
//!
//! Everything else of the CPU backend sees f32: [`Stored::decode_span`] turns a span of a row into
//! floats, and a new format is a new arm there and in [`Element`].
//! The product asks for spans that begin at multiples of 64 elements of the row, so that a block
//! format never has to begin inside a block of 64 or less.
//! Left out: writing formats other than f32.

use super::convert::Element;
use super::isa::Lanes;

/// A view of a row-major matrix of `rows` × `columns` elements, rows `row_stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    pub pointer: *const u8,
    pub element: Element,
    pub rows: usize,
    pub columns: usize,
    pub row_stride: usize,
}

// SAFETY: a view is only an address; who dereferences it (unsafe functions) answers for the access.
unsafe impl Send for Stored {}
// SAFETY: as above, and nothing is written through a `Stored`.
unsafe impl Sync for Stored {}

impl Stored {
    /// A dense matrix of f32.
    pub fn dense_f32(pointer: *const f32, rows: usize, columns: usize) -> Stored {
        Stored { pointer: pointer.cast(), element: Element::F32, rows, columns, row_stride: columns }
    }

    /// Writes elements `first..first + count` of `row` to `target` as f32.
    ///
    /// # Safety
    /// The span lies in the matrix, the matrix is readable, `target` is good for `count` floats, and
    /// the machine supports the instruction set of `V`.
    #[inline(always)]
    pub unsafe fn decode_span<V: Lanes>(&self, row: usize, first: usize, count: usize, target: *mut f32) {
        debug_assert!(row < self.rows && first + count <= self.columns);
        let whole = count / V::WIDTH * V::WIDTH;
        // SAFETY: the span is inside the row by the caller's promise, every vector inside the span.
        unsafe {
            let source = self.pointer.add(self.element.bytes() * (row * self.row_stride + first));
            match self.element {
                Element::F32 => {
                    let source = source.cast::<f32>();
                    for at in (0..whole).step_by(V::WIDTH) {
                        V::load(source.add(at)).store(target.add(at));
                    }
                    for at in whole..count {
                        *target.add(at) = source.add(at).read_unaligned();
                    }
                }
                Element::Bf16 => {
                    let source = source.cast::<u16>();
                    for at in (0..whole).step_by(V::WIDTH) {
                        V::load_bf16(source.add(at)).store(target.add(at));
                    }
                    for at in whole..count {
                        let bits = source.add(at).read_unaligned();
                        *target.add(at) = f32::from_bits(u32::from(bits) << 16);
                    }
                }
                Element::F16 => {
                    let source = source.cast::<u16>();
                    for at in (0..whole).step_by(V::WIDTH) {
                        V::load_f16(source.add(at)).store(target.add(at));
                    }
                    for at in whole..count {
                        let bits = source.add(at).read_unaligned();
                        *target.add(at) = half::f16::from_bits(bits).to_f32();
                    }
                }
            }
        }
    }
}
