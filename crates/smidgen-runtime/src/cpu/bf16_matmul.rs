//! The bf16 matmul on AMX or AVX-512: operands rounded to bf16, sums in f32.
//!
//! It computes the sum of `matmul.rs` in squares of 32 × 32, on processors that multiply bf16. Blocks of both operands
//! are packed into tiles in the caller's workspace; a task then multiplies some columns of the right block with
//! all rows of the left block, which stays in the L2 cache.
//! Blocks and tasks follow from the shape alone, each element of C belongs to one task, which sums in the order of
//! the terms, and chunks of depth follow from the depth alone. So an element depends on neither the number of
//! threads nor the other rows.
//! Left out: packing into tiles (`bf16_packing.rs`) and the instructions that multiply them (`bf16_unit.rs`).

use super::arena::aligned_floats;
use super::bf16_packing::{LeftPiece, PACK_COLUMNS, PACK_DEPTH, RightPiece, pack_left, pack_right};
use super::bf16_unit::{
    Bf16Unit, Planes, SQUARE, TILE, TILE_DEPTH, TILE_ELEMENTS, TileSquare, multiply_square, with_unit,
};
use super::kernel::{OutputView, TileWrite};
use super::matmul_terms::{Chunk, DepthCut, Init, Output, Piece, Term, check_operands, even_block};
use super::pool::run_tasks;
use smidgen_ir::workspace_cpu::{BF16_DEPTH, BF16_LEFT, BF16_RIGHT, bf16_matmul_floats};
use std::ops::Range;

/// The number of tasks that a large block is cut into.
const TASKS_WANTED: usize = 8;
/// Minimum rows of a task when a block is cut along rows.
const MIN_ROWS: usize = 64;
/// Rows and depth of a left operand that one task packs.
const LEFT_ROWS: usize = SQUARE;
const LEFT_DEPTH: usize = 512;
/// The depth of a right operand with contiguous columns that one task packs.
const RIGHT_DEPTH: usize = 64;
const _: () = assert!(LEFT_DEPTH.is_multiple_of(TILE_DEPTH) && RIGHT_DEPTH.is_multiple_of(TILE_DEPTH));

/// Computes the sum on the current thread pool.
///
/// # Safety
/// The machine supports `unit`; every operand is readable and C is writable for its shape and strides
/// while the call runs; C overlaps no operand, and no two elements of C have the same address.
pub unsafe fn bf16_matmul(unit: Bf16Unit, terms: &[Term], init: Init, output: Output, workspace: &mut [f32]) {
    check_operands(terms, &output, workspace, bf16_matmul_floats());
    if output.rows == 0 || output.columns == 0 {
        return;
    }
    let (lefts, rights) = aligned_floats(workspace).split_at_mut(BF16_LEFT / 2);
    let scratch = Scratch { lefts: lefts.as_mut_ptr().cast(), rights: rights.as_mut_ptr().cast() };
    let depth: usize = terms.iter().map(|term| term.depth().next_multiple_of(TILE_DEPTH)).sum();
    let chunks = depth.div_ceil(BF16_DEPTH).max(1);
    let capacity = depth.div_ceil(chunks).next_multiple_of(PACK_DEPTH).max(PACK_DEPTH);
    let cut = DepthCut { capacity, step: PACK_DEPTH, padding: TILE_DEPTH };
    let row_block = even_block(output.rows, BF16_LEFT / capacity / SQUARE * SQUARE, SQUARE);
    let max_columns = BF16_RIGHT / capacity / PACK_COLUMNS * PACK_COLUMNS;
    let column_block = even_block(output.columns, max_columns, PACK_COLUMNS);
    for first_row in (0..output.rows).step_by(row_block) {
        cut.for_each(terms, |chunk, is_first| {
            for first_column in (0..output.columns).step_by(column_block) {
                let block = Block {
                    unit,
                    terms,
                    chunk,
                    first_row,
                    rows: row_block.min(output.rows - first_row),
                    first_column,
                    columns: column_block.min(output.columns - first_column),
                    write: init.write_of(is_first, 0),
                    output,
                    scratch,
                };
                // SAFETY: the caller's promises; the blocks run one after the other, and the first block in a
                // row of blocks packs the left operand for the whole row.
                unsafe {
                    pack_block(&block, first_column == 0);
                    multiply_block(&block);
                }
            }
        });
    }
}

/// The caller's workspace: a packed block of each operand.
#[derive(Clone, Copy)]
struct Scratch {
    lefts: *mut u16,
    rights: *mut u16,
}

/// Some rows and columns of C and one chunk of depth.
struct Block<'a> {
    unit: Bf16Unit,
    terms: &'a [Term],
    chunk: &'a Chunk,
    first_row: usize,
    rows: usize,
    first_column: usize,
    columns: usize,
    write: TileWrite,
    output: Output,
    scratch: Scratch,
}

// SAFETY: tasks write disjoint parts of the packed blocks and of C; the bias is only read.
unsafe impl Sync for Block<'_> {}

impl Block<'_> {
    /// Elements of a packed strip of 16 rows or columns.
    fn strip_elements(&self) -> usize {
        self.chunk.depth / TILE_DEPTH * TILE_ELEMENTS
    }
}

/// Packs the right operand, and the left one if `with_left`.
unsafe fn pack_block(block: &Block<'_>, with_left: bool) {
    let chunk = block.chunk;
    assert!(
        block.rows.div_ceil(TILE) * block.strip_elements() <= BF16_LEFT
            && block.columns.div_ceil(TILE) * block.strip_elements() <= BF16_RIGHT,
        "a block larger than its workspace"
    );
    let row_groups = block.rows.div_ceil(LEFT_ROWS);
    let left_tasks =
        |piece: &Piece| if with_left { row_groups * piece.depth.div_ceil(LEFT_DEPTH) } else { 0 };
    let right_tasks = |piece: &Piece| {
        if block.terms[piece.term].right_transposed {
            block.columns.div_ceil(PACK_COLUMNS)
        } else {
            piece.depth.div_ceil(RIGHT_DEPTH)
        }
    };
    let all: usize = chunk.pieces().iter().map(|piece| left_tasks(piece) + right_tasks(piece)).sum();
    run_tasks(all, |mut task| {
        for piece in chunk.pieces() {
            // SAFETY: tasks cut the packed blocks into disjoint tiles of the workspace, which has room for the
            // rows, the columns and the depth of a block; operands have the shape of their term.
            unsafe {
                if task < left_tasks(piece) {
                    let (slice, group) = (task / row_groups, task % row_groups);
                    return pack_rows(block, piece, group * LEFT_ROWS, slice * LEFT_DEPTH);
                }
                task -= left_tasks(piece);
                if task < right_tasks(piece) {
                    return if block.terms[piece.term].right_transposed {
                        let first = task * PACK_COLUMNS;
                        let columns = first..block.columns.min(first + PACK_COLUMNS);
                        pack_columns(block, piece, columns, 0..piece.depth)
                    } else {
                        let first = task * RIGHT_DEPTH;
                        let depth = first..piece.depth.min(first + RIGHT_DEPTH);
                        pack_columns(block, piece, 0..block.columns, depth)
                    };
                }
                task -= right_tasks(piece);
            }
        }
    });
}

/// Packs LEFT_ROWS rows and LEFT_DEPTH depth of a left operand, from depth `inside` of the piece on.
unsafe fn pack_rows(block: &Block<'_>, piece: &Piece, row: usize, inside: usize) {
    let strip_elements = block.strip_elements();
    let tile = (piece.chunk_depth + inside) / TILE_DEPTH;
    let mut left = block.terms[piece.term].left;
    let start = (block.first_row + row) * left.row_stride + (piece.first + inside) * left.depth_stride;
    // SAFETY: rows and depth are inside the left operand and the packed block.
    unsafe {
        left.pointer = left.pointer.add(start);
        pack_left::<1>(&LeftPiece {
            left,
            rows: LEFT_ROWS.min(block.rows - row),
            depth: LEFT_DEPTH.min(piece.depth - inside),
            tiles: block.scratch.lefts.add(row / TILE * strip_elements + tile * TILE_ELEMENTS),
            strip_elements,
        });
    }
}

/// Packs some columns of a right operand over a range of depth of the piece.
unsafe fn pack_columns(block: &Block<'_>, piece: &Piece, columns: Range<usize>, depth: Range<usize>) {
    let strip_elements = block.strip_elements();
    let term = &block.terms[piece.term];
    for inside in depth.clone().step_by(PACK_DEPTH) {
        for first in columns.clone().step_by(PACK_COLUMNS) {
            let tile = (piece.chunk_depth + inside) / TILE_DEPTH;
            // SAFETY: columns and depth are inside the right operand and the packed block.
            unsafe {
                pack_right::<1>(&RightPiece {
                    stored: term.right,
                    transposed: term.right_transposed,
                    scale: term.scale,
                    first_column: block.first_column + first,
                    columns: PACK_COLUMNS.min(columns.end - first),
                    first_depth: piece.first + inside,
                    depth: PACK_DEPTH.min(depth.end - inside),
                    tiles: block.scratch.rights.add(first / TILE * strip_elements + tile * TILE_ELEMENTS),
                    strip_elements,
                });
            }
        }
    }
}

unsafe fn multiply_block(block: &Block<'_>) {
    let groups = block.columns.div_ceil(SQUARE);
    let parts = (TASKS_WANTED / groups).clamp(1, block.rows.div_ceil(MIN_ROWS));
    let part_rows = even_block(block.rows, block.rows.div_ceil(parts), SQUARE);
    let parts = block.rows.div_ceil(part_rows);
    run_tasks(groups * parts, |task| {
        let column = task / parts * SQUARE;
        let first = task % parts * part_rows;
        let rows = first..block.rows.min(first + part_rows);
        // SAFETY: tasks own disjoint rows and columns of C.
        unsafe { with_unit(block.unit, || multiply_part(block, rows, column)) };
    });
}

/// Multiplies some rows of the block with the columns of one square.
unsafe fn multiply_part(block: &Block<'_>, rows: Range<usize>, column: usize) {
    let strip_elements = block.strip_elements();
    let last_strip = block.rows.div_ceil(TILE) - 1;
    let columns = SQUARE.min(block.columns - column);
    // SAFETY: the packed strips hold the tiles of the block; rows and columns are inside C.
    unsafe {
        let right = block.scratch.rights.add(column / TILE * strip_elements).cast_const();
        let next_right = if columns > TILE { right.add(strip_elements) } else { std::ptr::null() };
        for row in rows.clone().step_by(SQUARE) {
            let strip = row / TILE;
            let left = block.scratch.lefts.add(strip * strip_elements).cast_const();
            // Without a second strip the last one is used twice; the extra rows are not written to C.
            let next_left =
                block.scratch.lefts.add((strip + 1).min(last_strip) * strip_elements).cast_const();
            let c = SquareOfC {
                view: block.output.view.at(block.first_row + row, block.first_column + column),
                rows: SQUARE.min(rows.end - row),
                columns,
                write: block.write.from_column(block.first_column + column),
            };
            write_square(c, |output, output_stride, accumulate| {
                let (left, right) = ([left, next_left], [right, next_right]);
                let depth_tiles = block.chunk.depth / TILE_DEPTH;
                // Sums that start from C read it immediately, so the square below is prefetched instead.
                let ahead = if accumulate { SQUARE * output_stride } else { 0 };
                let prefetch = output.wrapping_add(ahead).cast_const();
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
                multiply_square(block.unit, &square);
            });
        }
    }
}

/// A square of C, or a part of one at the edge of C.
#[derive(Clone, Copy)]
pub(super) struct SquareOfC {
    pub view: OutputView,
    pub rows: usize,
    pub columns: usize,
    pub write: TileWrite,
}

/// Computes a square, directly into C if it is whole, else into a local buffer that is then copied. `multiply` gets
/// the target, its row stride, and whether to add to its present value.
///
/// # Safety
/// The square is inside C, and no other thread writes it during the call; a bias has a float for each of its columns.
#[inline(always)]
pub(super) unsafe fn write_square(square: SquareOfC, multiply: impl FnOnce(*mut f32, usize, bool)) {
    let SquareOfC { view: output, rows, columns, write } = square;
    let whole = rows == SQUARE && columns.is_multiple_of(TILE) && output.column_stride == 1;
    match write {
        TileWrite::Overwrite if whole => return multiply(output.pointer, output.row_stride, false),
        TileWrite::Add if whole => return multiply(output.pointer, output.row_stride, true),
        TileWrite::Bias(_) | TileWrite::Overwrite | TileWrite::Add => {}
    }
    let mut local = LocalSquare([0.0; SQUARE * SQUARE]);
    // Sums start from the value of C here too, so that a row has the same bits at an edge and inside.
    for row in 0..rows {
        for column in 0..columns {
            // SAFETY: the element is inside C, and the bias has a float for each column.
            local.0[row * SQUARE + column] = unsafe {
                match write {
                    TileWrite::Overwrite => 0.0,
                    TileWrite::Add => *output.at(row, column).pointer,
                    TileWrite::Bias(bias) => *bias.add(column),
                }
            };
        }
    }
    multiply(local.0.as_mut_ptr(), SQUARE, !matches!(write, TileWrite::Overwrite));
    // SAFETY: rows and columns of the square are inside C.
    unsafe {
        if output.column_stride == 1 {
            for row in 0..rows {
                let sums = &local.0[row * SQUARE..][..columns];
                let target = output.pointer.add(row * output.row_stride);
                std::ptr::copy_nonoverlapping(sums.as_ptr(), target, sums.len());
            }
            return;
        }
        for column in 0..columns {
            for row in 0..rows {
                *output.at(row, column).pointer = local.0[row * SQUARE + column];
            }
        }
    }
}

/// Aligned to cache lines; a row of a square has two.
#[repr(align(64))]
struct LocalSquare([f32; SQUARE * SQUARE]);

#[cfg(test)]
#[path = "bf16_matmul_tests.rs"]
mod tests;
