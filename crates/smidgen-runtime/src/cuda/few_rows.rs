//! Linear layers of a decode step: up to eight rows times weights that are read once, as they are stored.
//!
//! One launch replaces the decoding of the weight, the matmul, the bias, the adapter and the residual, for up to three
//! linears that do not depend on each other. A linear gives the same bits alone and together with others.
//! Only `decode` uses it: a training step always uses the algorithms of its planned shape, whatever its number of rows.
//! Left to cuBLASLt: more rows, GGUF, weights in another plain type than activations, rows not aligned to 16 bytes.
//! Kernels: `kernels/few_rows.cu`.

use super::decode::{is_aligned, reads_by_eights};
use super::matmul::Matrix;
use super::modules::KernelFile;
use super::stage::Stage;
use crate::device::{DeviceError, Operand};
use smidgen_ir::{Code4, DType, Entry, Storage};

pub const FILE: KernelFile = KernelFile {
    name: "few_rows.cu",
    source: concat!(
        include_str!("../../kernels/dynamic_map.cuh"),
        include_str!("../../kernels/decode.cuh"),
        include_str!("../../kernels/decode_formats.cuh"),
        include_str!("../../kernels/matrix_unit.cuh"),
        include_str!("../../kernels/few_rows.cu")
    ),
    kernels: &[
        "few_rows_plain_1",
        "few_rows_plain_2",
        "few_rows_plain_8",
        "few_rows_int8_1",
        "few_rows_int8_2",
        "few_rows_int8_8",
        "few_rows_fp8_1",
        "few_rows_fp8_2",
        "few_rows_fp8_8",
        "few_rows_fp8_blocks_1",
        "few_rows_fp8_blocks_2",
        "few_rows_fp8_blocks_8",
        "few_rows_bnb4_1",
        "few_rows_bnb4_2",
        "few_rows_bnb4_8",
        "few_rows_bnb4_nested_1",
        "few_rows_bnb4_nested_2",
        "few_rows_bnb4_nested_8",
    ],
};

/// Most rows of one launch.
const MOST_ROWS: usize = 8;
/// Threads and warps of a block, and outputs of a team of warps. All must match `few_rows.cu`.
const THREADS: u32 = 256;
const WARPS: usize = 8;
const OUTPUTS: usize = 2;
/// With more rows than this, tensor cores multiply, and a block has `TILED_OUTPUTS` outputs.
const MOST_ROWS_WITHOUT_TILES: usize = 2;
const TILED_OUTPUTS: usize = 32;
/// Blocks that keep every multiprocessor of a large GPU busy. A constant, so that sums do not depend on the GPU.
const BLOCKS_WANTED: usize = 512;

/// Most linears of one launch: q, k and v.
pub const MOST_LINEARS: usize = 3;

/// A linear layer: y = x·Wᵀ plus addends.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    pub x: &'a Operand,
    pub weight: &'a Operand,
    pub addends: Addends<'a>,
    pub y: Matrix,
}

/// The terms that are added to x·Wᵀ.
#[derive(Clone, Copy, Debug, Default)]
pub struct Addends<'a> {
    pub bias: Option<&'a Operand>,
    pub residual: Option<&'a Operand>,
    /// h, B and the scale of an adapter.
    pub adapter: Option<(&'a Operand, &'a Operand, f32)>,
}

/// Whether [`few_rows`] supports a linear.
pub fn fits(stage: &Stage<'_>, linear: &Linear<'_>) -> bool {
    let Linear { x, weight, addends, .. } = *linear;
    let act = |operand: &Operand| operand.storage == Storage::Plain(stage.activations);
    let of_adapter = addends.adapter.map(|(h, b, _)| [h, b]).into_iter().flatten();
    let mut plain = [Some(x), addends.bias, addends.residual].into_iter().flatten().chain(of_adapter);
    let (_, total_rows) = stage.rows_in_tensor(weight);
    let is_known = match weight.storage {
        Storage::Plain(dtype) => dtype == stage.activations,
        Storage::Int8Rows | Storage::Fp8Rows | Storage::Fp8Blocks | Storage::Bnb4 { .. } => true,
        Storage::Gguf(_) | Storage::Dynamic8 { .. } => false,
    };
    stage.step.entry == Entry::Decode
        && stage.rows(x) <= MOST_ROWS
        && x.columns.is_multiple_of(8)
        && is_aligned(stage.pointer(x), x.stride)
        && is_known
        && reads_by_eights(weight, stage.pointer(weight), total_rows)
        && plain.all(act)
}

// These structures must match those in `decode.cuh` and `few_rows.cu`.

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Source {
    bytes: u64,
    rows: i64,
    stride: i64,
    columns: i32,
    code: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FewRows {
    source: Source,
    first_row: i64,
    outputs: i32,
    rows: i32,
    first_block: i32,
    x: u64,
    x_stride: i64,
    y: u64,
    y_stride: i64,
    bias: u64,
    residual: u64,
    residual_stride: i64,
    h: u64,
    h_stride: i64,
    b: u64,
    b_stride: i64,
    rank: i32,
    scale: f32,
    split: i32,
}

#[repr(C)]
#[derive(Default)]
struct FewLinears {
    linears: [FewRows; MOST_LINEARS],
    count: i32,
}

/// Warps that share two outputs: the fewest that give enough blocks.
fn split_of(outputs: usize) -> usize {
    let blocks = |split: usize| outputs.div_ceil(WARPS / split * OUTPUTS);
    [1, 2, 4].into_iter().find(|split| blocks(*split) >= BLOCKS_WANTED).unwrap_or(WARPS)
}

/// y (T, N) = x (T, K)·Wᵀ + bias + scale·h·Bᵀ + residual for each linear. All have the same rows and the same storage.
pub fn few_rows(stage: &Stage<'_>, linears: &[Linear<'_>]) -> Result<(), DeviceError> {
    let (rows, storage) = (stage.rows(linears[0].x), linears[0].weight.storage);
    let mut all = FewLinears { count: linears.len() as i32, ..FewLinears::default() };
    let is_tiled = rows > MOST_ROWS_WITHOUT_TILES && stage.activations != DType::F32;
    let mut blocks = 0;
    for (entry, linear) in all.linears.iter_mut().zip(linears) {
        debug_assert!(stage.rows(linear.x) == rows && linear.weight.storage == storage);
        let outputs = stage.rows(linear.weight);
        let split = split_of(outputs);
        *entry = FewRows { first_block: blocks as i32, ..structure_of(stage, linear, split) };
        blocks += outputs.div_ceil(if is_tiled { TILED_OUTPUTS } else { WARPS / split * OUTPUTS });
    }
    if rows == 0 || blocks == 0 {
        return Ok(());
    }
    stage.launch_with(kernel_of(storage, rows), blocks as u32, THREADS, &all, &[])
}

fn structure_of(stage: &Stage<'_>, linear: &Linear<'_>, split: usize) -> FewRows {
    let Linear { x, weight, addends, y } = linear;
    let pointer = |operand: Option<&Operand>| operand.map_or(0, |operand| stage.pointer(operand));
    let stride = |operand: Option<&Operand>| operand.map_or(0, |operand| operand.stride as i64);
    let (h, b) = addends.adapter.map(|(h, b, _)| (h, b)).unzip();
    let (first_row, total_rows) = stage.rows_in_tensor(weight);
    let source = Source {
        bytes: stage.pointer(weight),
        rows: total_rows as i64,
        stride: weight.stride as i64,
        columns: weight.columns as i32,
        code: i32::from(matches!(weight.storage, Storage::Bnb4 { code: Code4::Fp4, .. })),
    };
    FewRows {
        source,
        first_row: first_row as i64,
        outputs: stage.rows(weight) as i32,
        rows: stage.rows(x) as i32,
        first_block: 0,
        x: stage.pointer(x),
        x_stride: x.stride as i64,
        y: y.pointer,
        y_stride: y.stride as i64,
        bias: pointer(addends.bias),
        residual: pointer(addends.residual),
        residual_stride: stride(addends.residual),
        h: pointer(h),
        h_stride: stride(h),
        b: pointer(b),
        b_stride: stride(b),
        rank: h.map_or(0, |h| h.columns as i32),
        scale: addends.adapter.map_or(0.0, |(_, _, scale)| scale),
        split: split as i32,
    }
}

fn kernel_of(storage: Storage, rows: usize) -> &'static str {
    let size = rows.saturating_sub(1).min(2);
    let format = match storage {
        Storage::Plain(_) => 0,
        Storage::Int8Rows => 1,
        Storage::Fp8Rows => 2,
        Storage::Fp8Blocks => 3,
        Storage::Bnb4 { double: false, .. } => 4,
        Storage::Bnb4 { double: true, .. } => 5,
        Storage::Gguf(_) | Storage::Dynamic8 { .. } => unreachable!("`fits` refuses {storage}"),
    };
    FILE.kernels[3 * format + size]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_has_room_for_its_rows() {
        let bf16 = Storage::Plain(DType::Bf16);
        let names = [1, 2, 3, 8].map(|rows| kernel_of(bf16, rows));
        assert_eq!(names, [1, 2, 8, 8].map(|most| format!("few_rows_plain_{most}")));
        let nf4 = Storage::Bnb4 { code: Code4::Nf4, double: true };
        assert_eq!(kernel_of(nf4, 3), "few_rows_bnb4_nested_8");
        assert_eq!(kernel_of(Storage::Int8Rows, 2), "few_rows_int8_2");
        assert_eq!(kernel_of(Storage::Fp8Blocks, 1), "few_rows_fp8_blocks_1");
    }

    #[test]
    fn small_matrices_are_shared_by_more_warps() {
        assert_eq!([512, 3584, 18_944, 152_064].map(split_of), [8, 4, 1, 1]);
    }
}
