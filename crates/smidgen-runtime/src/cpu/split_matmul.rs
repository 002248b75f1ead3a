//! The f32 matmul on AMX: each f32 number is split into three bf16 numbers.
//!
//! An f32 number is the sum of three bf16 numbers: itself rounded, the remainder rounded, and the rest. Of the nine
//! products of two such sums, the six largest are added up in f32; the other three are below 2⁻²⁴ of the result, which
//! f32 rounds off anyway. AMX has sixteen times the rate of f32 vectors, so six bf16 matmuls are still faster than one
//! in f32. A right operand that is stored as bf16 needs one plane and three matmuls.
//! All threads pack a block of the left operand, which stays in the L2 cache; each task packs some columns of the right
//! operand and multiplies them with all rows of the block. Sums continue from one chunk of depth to the next, so the
//! result depends on neither blocks, nor threads, nor the other rows.
//! Left out: numbers below 2⁻¹⁰⁹, whose smaller planes are subnormal and treated as zero.

use super::arena::aligned_floats;
use super::bf16_matmul::{SquareOfC, write_square};
use super::bf16_packing::{LeftPiece, PACK_DEPTH, RightPiece, is_bf16, pack_left, pack_right};
use super::bf16_unit::{
    Bf16Unit, Planes, SQUARE, TILE, TILE_DEPTH, TILE_ELEMENTS, TileSquare, multiply_square, with_unit,
};
use super::kernel::TileWrite;
use super::matmul_terms::{
    Chunk, DepthCut, Init, MAX_PIECES, Output, Piece, Term, check_operands, even_block,
};
use super::pool::{current_thread, current_threads, run_tasks};
use super::stored::SPAN_STEP;
use smidgen_ir::workspace_cpu::{SPLIT_COLUMNS, SPLIT_DEPTH, SPLIT_PLANES, SPLIT_ROWS, matmul_floats};
use std::ops::Range;

/// Minimum columns of C for which this is faster than `matmul`. The choice does not depend on the number of rows, so
/// that other rows do not change the bits of a row.
pub const MIN_COLUMNS: usize = 64;

/// The number of tasks that a large block is cut into.
const TASKS_WANTED: usize = 8;
/// Minimum rows of a task when a block is cut along rows.
const MIN_ROWS: usize = 64;
/// Rows of a left operand that one task packs.
const LEFT_ROWS: usize = SQUARE;
/// bf16 numbers in the packed left block, and in the packed columns of one thread.
const LEFT_ELEMENTS: usize = SPLIT_PLANES * SPLIT_DEPTH * SPLIT_ROWS;
const PANEL_ELEMENTS: usize = SPLIT_PLANES * SPLIT_DEPTH * SPLIT_COLUMNS;
const _: () = assert!(SPLIT_DEPTH.is_multiple_of(SPAN_STEP) && SPLIT_COLUMNS.is_multiple_of(SPAN_STEP));

/// Computes the sum on the current thread pool.
///
/// # Safety
/// The machine has AMX; every operand is readable and C is writable for its shape and strides while the call runs;
/// C overlaps no operand, and no two elements of C have the same address.
pub unsafe fn split_matmul(terms: &[Term], init: Init, output: Output, workspace: &mut [f32]) {
    check_operands(terms, &output, workspace, matmul_floats(current_threads()));
    if output.rows == 0 || output.columns == 0 {
        return;
    }
    let (lefts, panels) = aligned_floats(workspace).split_at_mut(LEFT_ELEMENTS / 2);
    let scratch = Scratch { lefts: lefts.as_mut_ptr().cast(), panels: panels.as_mut_ptr().cast() };
    let depth: usize = terms.iter().map(|term| term.depth().next_multiple_of(TILE_DEPTH)).sum();
    let capacity = even_block(depth.max(1), SPLIT_DEPTH, SPAN_STEP);
    let cut = DepthCut { capacity, step: SPAN_STEP, padding: TILE_DEPTH };
    let max_rows = SPLIT_DEPTH * SPLIT_ROWS / capacity / SQUARE * SQUARE;
    let row_block = even_block(output.rows, max_rows, SQUARE);
    for first_row in (0..output.rows).step_by(row_block) {
        cut.for_each(terms, |chunk, is_first| {
            let block = Block {
                terms,
                chunk,
                strips: Strips::of(terms, chunk),
                first_row,
                rows: row_block.min(output.rows - first_row),
                write: init.write_of(is_first, 0),
                output,
                scratch,
            };
            // SAFETY: the caller's promises; the blocks run one after the other.
            unsafe {
                pack_block(&block);
                multiply_block(&block);
            }
        });
    }
}

/// How the planes of a chunk are packed into strips of 16 rows or columns.
struct Strips {
    /// Right tiles of a strip before each piece.
    first_right: [usize; MAX_PIECES],
    /// Elements of a strip of rows, and of a strip of columns.
    left_elements: usize,
    right_elements: usize,
}

impl Strips {
    fn of(terms: &[Term], chunk: &Chunk) -> Strips {
        let mut first_right = [0; MAX_PIECES];
        let mut right_tiles = 0;
        for (first, piece) in first_right.iter_mut().zip(chunk.pieces()) {
            *first = right_tiles;
            right_tiles += planes(&terms[piece.term]).right() * piece.depth.div_ceil(TILE_DEPTH);
        }
        Strips {
            first_right,
            left_elements: SPLIT_PLANES * chunk.depth / TILE_DEPTH * TILE_ELEMENTS,
            right_elements: right_tiles * TILE_ELEMENTS,
        }
    }
}

fn planes(term: &Term) -> Planes {
    if is_bf16(&term.right, term.scale) { Planes::ThreeByOne } else { Planes::Three }
}

/// Offset of a piece in a strip of the left operand, in elements.
fn left_offset(piece: &Piece) -> usize {
    SPLIT_PLANES * piece.chunk_depth / TILE_DEPTH * TILE_ELEMENTS
}

/// The caller's workspace: a packed block of the left operand, and some columns of the right operand per thread.
#[derive(Clone, Copy)]
struct Scratch {
    lefts: *mut u16,
    panels: *mut u16,
}

/// Some rows of C and one chunk of depth.
struct Block<'a> {
    terms: &'a [Term],
    chunk: &'a Chunk,
    strips: Strips,
    first_row: usize,
    rows: usize,
    write: TileWrite,
    output: Output,
    scratch: Scratch,
}

// SAFETY: tasks write disjoint parts of the packed block and of C, and the panel of their own thread; the bias is
// only read.
unsafe impl Sync for Block<'_> {}

/// Packs the rows of the left operand.
unsafe fn pack_block(block: &Block<'_>) {
    let (pieces, strips) = (block.chunk.pieces(), &block.strips);
    assert!(
        block.rows.div_ceil(TILE) * strips.left_elements <= LEFT_ELEMENTS
            && SPLIT_COLUMNS / TILE * strips.right_elements <= PANEL_ELEMENTS,
        "a block larger than its workspace"
    );
    let groups = block.rows.div_ceil(LEFT_ROWS);
    run_tasks(groups * pieces.len(), |task| {
        let (piece, row) = (&pieces[task / groups], task % groups * LEFT_ROWS);
        let mut left = block.terms[piece.term].left;
        let start = (block.first_row + row) * left.row_stride + piece.first * left.depth_stride;
        // SAFETY: rows and depth are inside the left operand; tasks cut the packed block, which has room for them,
        // into disjoint tiles.
        unsafe {
            left.pointer = left.pointer.add(start);
            let at = row / TILE * strips.left_elements + left_offset(piece);
            pack_left::<SPLIT_PLANES>(&LeftPiece {
                left,
                rows: LEFT_ROWS.min(block.rows - row),
                depth: piece.depth,
                tiles: block.scratch.lefts.add(at),
                strip_elements: strips.left_elements,
            });
        }
    });
}

unsafe fn multiply_block(block: &Block<'_>) {
    let groups = block.output.columns.div_ceil(SPLIT_COLUMNS);
    let parts = (TASKS_WANTED / groups).clamp(1, block.rows.div_ceil(MIN_ROWS));
    let part_rows = even_block(block.rows, block.rows.div_ceil(parts), SQUARE);
    let parts = block.rows.div_ceil(part_rows);
    run_tasks(groups * parts, |task| {
        let first_row = task % parts * part_rows;
        let rows = first_row..block.rows.min(first_row + part_rows);
        let first = task / parts * SPLIT_COLUMNS;
        let columns = first..block.output.columns.min(first + SPLIT_COLUMNS);
        // SAFETY: tasks own disjoint rows and columns of C, and the panel of their thread.
        unsafe {
            let panel = block.scratch.panels.add(current_thread() * PANEL_ELEMENTS);
            pack_columns(block, columns.clone(), panel);
            with_unit(Bf16Unit::Amx, || {
                for column in columns.clone().step_by(SQUARE) {
                    let strips = panel.add((column - first) / TILE * block.strips.right_elements);
                    multiply_part(block, rows.clone(), column, strips);
                }
            });
        }
    });
}

/// Packs some columns of the right operands.
unsafe fn pack_columns(block: &Block<'_>, columns: Range<usize>, panel: *mut u16) {
    for (piece, first_tile) in block.chunk.pieces().iter().zip(block.strips.first_right) {
        let term = &block.terms[piece.term];
        let planes = planes(term);
        for inside in (0..piece.depth).step_by(PACK_DEPTH) {
            let tile = first_tile + planes.right() * (inside / TILE_DEPTH);
            // SAFETY: columns and depth are inside the right operand and the panel.
            unsafe {
                let packed = RightPiece {
                    stored: term.right,
                    transposed: term.right_transposed,
                    scale: term.scale,
                    first_column: columns.start,
                    columns: columns.len(),
                    first_depth: piece.first + inside,
                    depth: PACK_DEPTH.min(piece.depth - inside),
                    tiles: panel.add(tile * TILE_ELEMENTS),
                    strip_elements: block.strips.right_elements,
                };
                match planes {
                    Planes::One | Planes::ThreeByOne => pack_right::<1>(&packed),
                    Planes::Three => pack_right::<SPLIT_PLANES>(&packed),
                }
            }
        }
    }
}

/// Multiplies some rows of the block with the columns of one square.
unsafe fn multiply_part(block: &Block<'_>, rows: Range<usize>, column: usize, right: *const u16) {
    let (pieces, strips) = (block.chunk.pieces(), &block.strips);
    let last_strip = block.rows.div_ceil(TILE) - 1;
    let columns = SQUARE.min(block.output.columns - column);
    // SAFETY: the packed strips hold the tiles of the block; rows and columns are inside C.
    unsafe {
        for row in rows.clone().step_by(SQUARE) {
            let strip = row / TILE;
            let left = block.scratch.lefts.add(strip * strips.left_elements).cast_const();
            // Without a second strip the last one is used twice; the extra rows are not written to C.
            let next_left =
                block.scratch.lefts.add((strip + 1).min(last_strip) * strips.left_elements).cast_const();
            let c = SquareOfC {
                view: block.output.view.at(block.first_row + row, column),
                rows: SQUARE.min(rows.end - row),
                columns,
                write: block.write.from_column(column),
            };
            write_square(c, |output, output_stride, accumulate| {
                let mut square = TileSquare {
                    planes: Planes::Three,
                    left: [left, next_left],
                    right: [right, if columns > TILE { right } else { std::ptr::null() }],
                    depth_tiles: 0,
                    accumulate,
                    output,
                    // The next square of rows.
                    prefetch: output.wrapping_add(SQUARE * output_stride).cast_const(),
                    output_stride,
                };
                if pieces.is_empty() {
                    multiply_square(Bf16Unit::Amx, &square);
                }
                for (piece, first_right) in pieces.iter().zip(strips.first_right) {
                    let at = left_offset(piece);
                    let right = right.add(first_right * TILE_ELEMENTS);
                    square.planes = planes(&block.terms[piece.term]);
                    square.left = [left.add(at), next_left.add(at)];
                    square.right[0] = right;
                    if columns > TILE {
                        square.right[1] = right.add(strips.right_elements);
                    }
                    square.depth_tiles = piece.depth.div_ceil(TILE_DEPTH);
                    multiply_square(Bf16Unit::Amx, &square);
                    square.accumulate = true;
                }
            });
        }
    }
}

#[cfg(test)]
#[path = "split_matmul_tests.rs"]
mod tests;
