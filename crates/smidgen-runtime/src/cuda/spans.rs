//! Matrices as kernel arguments: an address, a row stride, and whether 16-byte accesses are allowed.
//!
//! Elementwise kernels come in pairs: `_eight` processes spans of eight aligned elements, `_one` single elements. The
//! choice depends only on addresses, strides and columns, and both give the same results.

use super::stage::{Arg, Stage};
use crate::device::Operand;
use smidgen_ir::{DType, Storage};

/// Threads per block of a kernel over spans.
pub const THREADS: u32 = 256;
/// Elements of an aligned span.
pub const SPAN: usize = 8;

/// A grid with one thread for each of `items`; `None` without items.
pub fn grid_over(items: usize) -> Option<[u32; 3]> {
    (items > 0).then(|| [count(items.div_ceil(THREADS as usize)), 1, 1])
}

/// Address and stride of each operand.
pub fn addresses_and_strides(stage: &Stage<'_>, operands: &[&Operand]) -> Vec<Arg> {
    operands.iter().flat_map(|operand| [stage.address(operand), long(operand.stride)]).collect()
}

/// Address and stride of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct MatrixAddress {
    pub pointer: Arg,
    pub stride: Arg,
    /// Whether every row begins at a multiple of 16 bytes.
    pub aligned: bool,
}

impl MatrixAddress {
    pub fn of(stage: &Stage<'_>, operand: &Operand) -> MatrixAddress {
        MatrixAddress::at(stage.pointer(operand), operand.stride)
    }

    /// The place of a vector, of which only the start has to be aligned.
    pub fn of_vector(stage: &Stage<'_>, operand: &Operand) -> MatrixAddress {
        MatrixAddress::at(stage.pointer(operand), 0)
    }

    pub fn at(pointer: u64, stride: usize) -> MatrixAddress {
        MatrixAddress {
            pointer: Arg::Pointer(pointer),
            stride: long(stride),
            aligned: pointer.is_multiple_of(16) && stride.is_multiple_of(SPAN),
        }
    }

    /// An absent matrix: the kernel sees a null pointer.
    pub const NONE: MatrixAddress =
        MatrixAddress { pointer: Arg::Pointer(0), stride: Arg::Long(0), aligned: true };
}

/// A matrix cut into spans, numbered along the rows.
#[derive(Clone, Copy, Debug)]
pub struct Spans {
    pub aligned: bool,
    pub spans_of_row: Arg,
    pub spans: Arg,
    count: u32,
}

impl Spans {
    pub fn of(rows: usize, columns: usize, places: &[MatrixAddress]) -> Spans {
        let aligned = columns.is_multiple_of(SPAN) && places.iter().all(|place| place.aligned);
        let spans_of_row = if aligned { columns / SPAN } else { columns };
        let count = count(rows * spans_of_row);
        Spans { aligned, spans_of_row: word(spans_of_row), spans: Arg::Word(count), count }
    }

    /// Selects one of a kernel's two forms.
    pub fn form(&self, eight: &'static str, one: &'static str) -> &'static str {
        if self.aligned { eight } else { one }
    }

    /// A grid in which each thread handles `spans_of_thread` spans; `None` if there are none.
    pub fn grid(&self, spans_of_thread: u32) -> Option<[u32; 3]> {
        (self.count > 0).then(|| [self.count.div_ceil(THREADS * spans_of_thread), 1, 1])
    }
}

/// The code for the element type of a stored vector, as in `prelude.cuh`.
pub fn stored_dtype(operand: &Operand) -> Arg {
    Arg::Int(dtype_code(operand))
}

pub fn dtype_code(operand: &Operand) -> i32 {
    match operand.storage {
        Storage::Plain(DType::F32) => 0,
        Storage::Plain(DType::Bf16) => 1,
        Storage::Plain(DType::F16) => 2,
        storage => unreachable!("`check` refuses vectors stored as {storage}"),
    }
}

/// Converts a size to 32 bits, as kernels count. A plan with larger sizes does not fit any GPU.
pub fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or_else(|_| panic!("{number} does not fit a 32-bit kernel argument"))
}

pub fn word(number: usize) -> Arg {
    Arg::Word(count(number))
}

pub fn int(number: usize) -> Arg {
    Arg::Int(
        i32::try_from(number).unwrap_or_else(|_| panic!("{number} does not fit a 32-bit kernel argument")),
    )
}

pub fn long(number: usize) -> Arg {
    Arg::Long(number as i64)
}
