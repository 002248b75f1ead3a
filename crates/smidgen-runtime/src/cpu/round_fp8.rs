//! Rounds activations to fp8 with a scale for each row: the reference for the kernels of `kernels/fp8.cuh`.
//!
//! CPU plans never have this operation, because CPUs have no fp8 matmul.

use super::chunk::{Chunk, for_each_row_chunk};
use super::footprint::assert_disjoint;
use super::view::{Dst, Src, SrcRows};
use smidgen_ir::quant::fp8;
use smidgen_ir::storage::row_scales;

/// Writes codes and scales in the order of `Storage::Fp8Rows`. `factors` are the bytes of one f32 per column, by which
/// columns are multiplied first.
pub fn round_fp8(x: SrcRows, factors: Option<Src<u8>>, to: Dst<u8>) {
    let (rows, columns) = (x.rows(), x.columns());
    let factor = |column: usize| {
        let bytes = |factors: Src<u8>| [0, 1, 2, 3].map(|byte| factors.get(4 * column + byte));
        factors.map_or(1.0, |factors| f32::from_le_bytes(bytes(factors)))
    };
    assert_disjoint("round_fp8", to, [x.into()]);
    let (codes, scales) = (to.part(0, rows * columns), row_scales(rows, columns));
    for_each_row_chunk(rows, columns, |Chunk { start, len, .. }| {
        let (mut numbers, mut rounded) = (vec![0.0; columns], vec![0; columns]);
        for row in start..start + len {
            for (column, number) in numbers.iter_mut().enumerate() {
                *number = x.row(row).get(column) * factor(column);
            }
            let scale = fp8::encode_row(&numbers, &mut rounded);
            for (column, code) in rounded.iter().enumerate() {
                codes.set(row * columns + column, *code);
            }
            for (byte, value) in scale.to_le_bytes().into_iter().enumerate() {
                to.set(scales + 4 * row + byte, value);
            }
        }
    });
}
