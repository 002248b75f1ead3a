//! The matmuls of attention tiles on the bf16 unit: one thread packs both operands and multiplies them.
//!
//! It has the interface of `tile_matmul` of `kernel.rs`, with operands rounded to bf16 and sums in f32. The rest of
//! attention stays f32. A tile on the diagonal is not cut into pieces here: multiplying the masked half is faster than
//! packing the right operand twice.
//! Left out: attention itself (`attention.rs`, `attention_gradient.rs`).

use super::bf16_matmul::{SquareOfC, write_square};
use super::bf16_packing::{LeftPiece, PACK_COLUMNS, PACK_DEPTH, RightPiece, pack_left, pack_right};
use super::bf16_unit::{
    Bf16Unit, Planes, SQUARE, TILE, TILE_DEPTH, TILE_ELEMENTS, TileSquare, multiply_square, with_unit,
};
use super::kernel::TileMatmul;
use super::matmul_terms::Left;
use super::stored::Stored;

/// Computes a matmul of one run on the calling thread, with a workspace for `tile_elements` of each operand.
///
/// # Safety
/// The machine supports `unit`; the operands are readable and C is writable for the shape and strides; C overlaps
/// no operand; the workspace belongs to the calling thread and holds both packed operands.
pub unsafe fn bf16_tile_matmul(
    unit: Bf16Unit,
    matmul: &TileMatmul<'_>,
    workspace: *mut u16,
    tile_elements: usize,
) {
    let [run] = matmul.runs else { panic!("a tile of attention has one left operand") };
    let (rows, columns, depth) = (matmul.rows, matmul.columns, run.depth);
    let depth_tiles = depth.div_ceil(TILE_DEPTH);
    let strip_elements = depth_tiles * TILE_ELEMENTS;
    assert!(
        rows.div_ceil(TILE).max(columns.div_ceil(TILE)) * strip_elements <= tile_elements,
        "a tile of {rows} x {columns} x {depth} is larger than its workspace"
    );
    // SAFETY: the caller's promises; every tile is in the workspace.
    unsafe {
        let (lefts, rights) = (workspace, workspace.add(tile_elements));
        let left = Left { pointer: run.pointer, row_stride: run.row_stride, depth_stride: run.depth_stride };
        pack_left::<1>(&LeftPiece { left, rows, depth, tiles: lefts, strip_elements });
        let stored = Stored {
            row_stride: matmul.right.row_stride,
            ..Stored::dense_f32(matmul.right.pointer, depth, columns)
        };
        for first_depth in (0..depth).step_by(PACK_DEPTH) {
            for first_column in (0..columns).step_by(PACK_COLUMNS) {
                pack_right::<1>(&RightPiece {
                    stored,
                    transposed: false,
                    scale: 1.0,
                    first_column,
                    columns: PACK_COLUMNS.min(columns - first_column),
                    first_depth,
                    depth: PACK_DEPTH.min(depth - first_depth),
                    tiles: rights
                        .add(first_column / TILE * strip_elements + first_depth / TILE_DEPTH * TILE_ELEMENTS),
                    strip_elements,
                });
            }
        }
        with_unit(unit, || {
            let last_strip = rows.div_ceil(TILE) - 1;
            for column in (0..columns).step_by(SQUARE) {
                let right = rights.add(column / TILE * strip_elements).cast_const();
                let next_right =
                    if columns - column > TILE { right.add(strip_elements) } else { std::ptr::null() };
                for row in (0..rows).step_by(SQUARE) {
                    let strip = row / TILE;
                    let left = lefts.add(strip * strip_elements).cast_const();
                    // Without a second strip the last one is used twice; the extra rows are not written to C.
                    let next_left = lefts.add((strip + 1).min(last_strip) * strip_elements).cast_const();
                    let square = SquareOfC {
                        view: matmul.output.at(row, column),
                        rows: SQUARE.min(rows - row),
                        columns: SQUARE.min(columns - column),
                        write: matmul.write,
                    };
                    write_square(square, |output, output_stride, accumulate| {
                        let (left, right, prefetch) =
                            ([left, next_left], [right, next_right], output.cast_const());
                        let square = TileSquare {
                            planes: Planes::One,
                            left,
                            right,
                            depth_tiles,
                            accumulate,
                            output,
                            prefetch,
                            output_stride,
                        };
                        multiply_square(unit, &square);
                    });
                }
            }
        });
    }
}
