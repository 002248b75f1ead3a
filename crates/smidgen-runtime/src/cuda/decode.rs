//! Decodes rows of stored matrices to the matmul type, or to f32; rows of a table may be selected by ids.
//!
//! There is one kernel per format. The source may be some rows of a tensor whose scales follow all of its codes, and
//! the target has a row stride. Unaligned data is decoded element by element.
//! Kernels: `kernels/decode.cu` and `kernels/decode_gguf.cu`, which share `kernels/decode.cuh`. The formats of
//! `decode.cu` are in `kernels/decode_formats.cuh`.

use super::modules::KernelFile;
use super::stage::{Arg, Stage};
use crate::device::{DeviceError, Operand};
use smidgen_ir::storage::bnb4_parts;
use smidgen_ir::{Block, Code4, DType, Storage};

pub const FILE: KernelFile = KernelFile {
    name: "decode.cu",
    source: concat!(
        include_str!("../../kernels/dynamic_map.cuh"),
        include_str!("../../kernels/decode.cuh"),
        include_str!("../../kernels/decode_formats.cuh"),
        include_str!("../../kernels/decode.cu")
    ),
    kernels: &[
        "decode_f32",
        "decode_bf16",
        "decode_f16",
        "decode_int8",
        "decode_fp8",
        "decode_fp8_blocks",
        "decode_bnb4",
        "decode_bnb4_nested",
    ],
};

pub const GGUF_FILE: KernelFile = KernelFile {
    name: "decode_gguf.cu",
    source: concat!(include_str!("../../kernels/decode.cuh"), include_str!("../../kernels/decode_gguf.cu")),
    kernels: &[
        "decode_q4_0",
        "decode_q4_1",
        "decode_q5_0",
        "decode_q5_1",
        "decode_q8_0",
        "decode_q4_k",
        "decode_q5_k",
        "decode_q6_k",
        "decode_q2_k",
        "decode_q3_k",
        "decode_iq4_nl",
        "decode_iq4_xs",
        "decode_mxfp4",
        "decode_int4_by_32",
        "decode_int4_by_128",
    ],
};

/// The destination of decoded rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    pub pointer: u64,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Whether the target is f32 rather than the type of activations.
    pub wide: bool,
}

/// Selects rows of a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowChoice {
    /// Consecutive rows from this one on.
    From(usize),
    /// The rows with the i32 numbers at this device address.
    ByIds(u64),
}

/// Decodes rows `first_row..first_row + rows` of a matrix to the type of activations.
pub fn decode_rows(
    stage: &Stage<'_>,
    operand: &Operand,
    first_row: usize,
    rows: usize,
    target: u64,
    target_stride: usize,
) -> Result<(), DeviceError> {
    let target = Target { pointer: target, stride: target_stride, wide: false };
    decode(stage, operand, RowChoice::From(first_row), rows, target, 1.0)
}

/// Decodes some rows of a matrix, times a factor.
pub fn decode(
    stage: &Stage<'_>,
    matrix: &Operand,
    choice: RowChoice,
    rows: usize,
    target: Target,
    factor: f32,
) -> Result<(), DeviceError> {
    let (of_view, columns) = (stage.rows(matrix), matrix.columns);
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let (mut first_row, total_rows) = stage.rows_in_tensor(matrix);
    let ids = match choice {
        RowChoice::ByIds(ids) => ids,
        RowChoice::From(first) => {
            assert!(first + rows <= of_view, "rows {first}..{} of {of_view}", first + rows);
            first_row += first;
            0
        }
    };
    let bytes = stage.pointer(matrix);
    let code = i32::from(matches!(matrix.storage, Storage::Bnb4 { code: Code4::Fp4, .. }));
    let groups = rows * columns.div_ceil(8);
    assert!(groups < 1 << 31, "{rows} rows of {columns} are too many for one launch");
    let aligned = columns.is_multiple_of(8)
        && is_aligned(target.pointer, target.stride)
        && reads_by_eights(matrix, bytes, total_rows);
    let args = [
        Arg::Pointer(target.pointer),
        Arg::Long(target.stride as i64),
        Arg::Int(i32::from(target.wide)),
        Arg::Word(rows as u32),
        Arg::Pointer(bytes),
        Arg::Long(total_rows as i64),
        Arg::Long(matrix.stride as i64),
        Arg::Int(columns as i32),
        Arg::Int(code),
        Arg::Int(i32::from(aligned)),
        Arg::Long(first_row as i64),
        Arg::Pointer(ids),
        Arg::Int(of_view as i32),
        Arg::Float(factor),
    ];
    let blocks = groups.div_ceil(GROUPS_OF_A_BLOCK) as u32;
    stage.launch(kernel_of(matrix.storage), [blocks, 1, 1], THREADS, 0, &args)
}

/// Whether every row can be accessed in aligned groups of 16 bytes.
pub fn is_aligned(pointer: u64, stride: usize) -> bool {
    pointer.is_multiple_of(16) && stride.is_multiple_of(8)
}

/// Threads per block, and groups of eight elements that a block decodes. Both must match `decode.cuh`.
const THREADS: u32 = 256;
const GROUPS_OF_A_BLOCK: usize = 256 * 4 * 2;

/// Whether codes and scales are aligned, so that eight elements can be read at a time.
pub fn reads_by_eights(matrix: &Operand, bytes: u64, total_rows: usize) -> bool {
    match matrix.storage {
        Storage::Plain(_) => is_aligned(bytes, matrix.stride),
        Storage::Int8Rows | Storage::Fp8Rows | Storage::Fp8Blocks => bytes.is_multiple_of(8),
        Storage::Bnb4 { double, .. } => {
            let parts = bnb4_parts(total_rows * matrix.columns, double);
            bytes.is_multiple_of(8) && parts.scales.is_multiple_of(4) && parts.group_scales.is_multiple_of(4)
        }
        Storage::Gguf(block) => {
            assert!(
                matrix.columns.is_multiple_of(block.elements()),
                "`check` refuses rows that are not whole blocks"
            );
            true
        }
        Storage::Dynamic8 { .. } => false,
    }
}

fn kernel_of(storage: Storage) -> &'static str {
    match storage {
        Storage::Plain(DType::F32) => "decode_f32",
        Storage::Plain(DType::Bf16) => "decode_bf16",
        Storage::Plain(DType::F16) => "decode_f16",
        Storage::Int8Rows => "decode_int8",
        Storage::Fp8Rows => "decode_fp8",
        Storage::Fp8Blocks => "decode_fp8_blocks",
        Storage::Bnb4 { double: false, .. } => "decode_bnb4",
        Storage::Bnb4 { double: true, .. } => "decode_bnb4_nested",
        Storage::Gguf(Block::Q4_0) => "decode_q4_0",
        Storage::Gguf(Block::Q4_1) => "decode_q4_1",
        Storage::Gguf(Block::Q5_0) => "decode_q5_0",
        Storage::Gguf(Block::Q5_1) => "decode_q5_1",
        Storage::Gguf(Block::Q8_0) => "decode_q8_0",
        Storage::Gguf(Block::Q4K) => "decode_q4_k",
        Storage::Gguf(Block::Q5K) => "decode_q5_k",
        Storage::Gguf(Block::Q6K) => "decode_q6_k",
        Storage::Gguf(Block::Q2K) => "decode_q2_k",
        Storage::Gguf(Block::Q3K) => "decode_q3_k",
        Storage::Gguf(Block::Iq4Nl) => "decode_iq4_nl",
        Storage::Gguf(Block::Iq4Xs) => "decode_iq4_xs",
        Storage::Gguf(Block::Mxfp4) => "decode_mxfp4",
        Storage::Gguf(Block::Int4By32) => "decode_int4_by_32",
        Storage::Gguf(Block::Int4By128) => "decode_int4_by_128",
        Storage::Plain(DType::F64 | DType::I32 | DType::U64) | Storage::Dynamic8 { .. } => {
            unreachable!("`check` refuses real numbers stored as {storage}")
        }
    }
}
