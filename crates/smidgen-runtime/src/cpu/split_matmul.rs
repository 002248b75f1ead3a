//! C (M, N) = init + Σ scale · L (M, K) · R (K, N) in f32, formed by the unit for bf16.
//!
//! A number of f32 is the sum of three of bf16: itself rounded, what that leaves rounded, and the rest. Of the nine
//! products of two such sums the six largest are added up in f32; the others are below 2⁻²⁴ of the product, which is
//! what f32 rounds off anyway. AMX has sixteen times the rate of f32 vectors, so six products still gain. A right
//! operand that is bf16 as it is stored has one plane, and three products.
//! A block of the left operand is packed by all threads and stays in the second-level cache; a task packs some
//! columns of the right one for itself and passes with them over all rows of the block. Sums go on from one block of
//! depth to the next as if there were none, so bytes depend on neither blocks, nor threads, nor the other rows.
//! Left out: numbers below 2⁻¹⁰⁹, whose smaller planes are subnormal and taken for zero.

use super::bf16_matmul::{SquareOfC, write_square};
use super::bf16_packing::{LeftPiece, PACK_DEPTH, RightPiece, is_bf16, pack_left, pack_right};
use super::bf16_unit::{
    Bf16Unit, Planes, SQUARE, TILE, TILE_DEPTH, TILE_ELEMENTS, TileSquare, multiply_square, with_unit,
};
use super::kernel::TileWrite;
use super::matmul::{Init, Output, Term, even_block};
use super::stored::SPAN_STEP;
use super::tasks::{aligned_floats, current_thread, current_threads, run_tasks};
use smidgen_ir::workspace_cpu::{SPLIT_COLUMNS, SPLIT_DEPTH, SPLIT_PLANES, SPLIT_ROWS, matmul_floats};
use std::ops::Range;

/// Fewest columns of C for which this is the faster way. Rows have no say: how many there are must not show.
pub const FEWEST_COLUMNS: usize = 64;

/// Most pieces of terms in one block of depth.
const MOST_PIECES: usize = 16;
/// Tasks that a block is cut into where it is large enough.
const TASKS_WANTED: usize = 8;
/// Fewest rows of a task, where a block is cut along rows.
const FEWEST_ROWS: usize = 64;
/// Rows of a left operand that one task packs.
const LEFT_ROWS: usize = SQUARE;
/// Numbers of bf16 in the packed left block, and in a thread's columns.
const LEFT_ELEMENTS: usize = SPLIT_PLANES * SPLIT_DEPTH * SPLIT_ROWS;
const PANEL_ELEMENTS: usize = SPLIT_PLANES * SPLIT_DEPTH * SPLIT_COLUMNS;
const _: () = assert!(SPLIT_DEPTH.is_multiple_of(SPAN_STEP) && SPLIT_COLUMNS.is_multiple_of(SPAN_STEP));

/// Computes the sum of products in the current pool.
///
/// # Safety
/// The machine has AMX; every operand is readable and C is writable for its shape and strides while the call runs;
/// C overlaps no operand, and no two elements of C lie at the same address.
pub unsafe fn split_matmul(terms: &[Term], init: Init, output: Output, workspace: &mut [f32]) {
    let threads = current_threads();
    assert!(
        workspace.len() >= matmul_floats(threads),
        "a matmul on {threads} threads needs {} floats of workspace, got {}",
        matmul_floats(threads),
        workspace.len()
    );
    for term in terms {
        assert_eq!(term.columns(), output.columns, "columns of a term and of C");
    }
    if output.rows == 0 || output.columns == 0 {
        return;
    }
    let (lefts, panels) = aligned_floats(workspace).split_at_mut(LEFT_ELEMENTS / 2);
    let scratch = Scratch { lefts: lefts.as_mut_ptr().cast(), panels: panels.as_mut_ptr().cast() };
    let padded = |term: &Term| term.depth().next_multiple_of(TILE_DEPTH);
    let depth: usize = terms.iter().map(padded).sum();
    let capacity = even_block(depth.max(1), SPLIT_DEPTH, SPAN_STEP);
    let most_rows = SPLIT_DEPTH * SPLIT_ROWS / capacity / SQUARE * SQUARE;
    let row_block = even_block(output.rows, most_rows, SQUARE);
    for first_row in (0..output.rows).step_by(row_block) {
        let mut cursor = Cursor { term: 0, first: 0 };
        let mut is_first = true;
        loop {
            let chunk = next_chunk(terms, &mut cursor, capacity);
            // A sum without terms still has to write its init.
            if chunk.count == 0 && !is_first {
                break;
            }
            let block = Block {
                terms,
                chunk: &chunk,
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
            is_first = false;
        }
    }
}

/// A stretch of a term along depth, filled up to whole tiles.
#[derive(Clone, Copy)]
struct Piece {
    term: usize,
    first: usize,
    depth: usize,
    planes: Planes,
    /// Tiles of a strip of either operand before it.
    first_left: usize,
    first_right: usize,
}

/// A block of depth: pieces of one or more terms.
struct Chunk {
    pieces: [Piece; MOST_PIECES],
    count: usize,
    /// Elements of a strip of 16 rows, and of one of 16 columns.
    left_strip: usize,
    right_strip: usize,
}

impl Chunk {
    fn pieces(&self) -> &[Piece] {
        &self.pieces[..self.count]
    }
}

struct Cursor {
    term: usize,
    first: usize,
}

/// Pieces end at multiples of [`SPAN_STEP`] or at the end of their term, as spans of a storage have to.
fn next_chunk(terms: &[Term], cursor: &mut Cursor, capacity: usize) -> Chunk {
    let nothing = Piece { term: 0, first: 0, depth: 0, planes: Planes::Three, first_left: 0, first_right: 0 };
    let mut pieces = [nothing; MOST_PIECES];
    let (mut count, mut steps, mut right_tiles) = (0, 0, 0);
    while cursor.term < terms.len() && count < MOST_PIECES {
        let term = &terms[cursor.term];
        let left = term.depth() - cursor.first;
        let room = capacity - steps * TILE_DEPTH;
        let depth = if left <= room { left } else { room / SPAN_STEP * SPAN_STEP };
        if depth > 0 {
            let planes = match is_bf16(&term.right, term.scale) {
                true => Planes::ThreeByOne,
                false => Planes::Three,
            };
            pieces[count] = Piece {
                term: cursor.term,
                first: cursor.first,
                depth,
                planes,
                first_left: SPLIT_PLANES * steps,
                first_right: right_tiles,
            };
            count += 1;
            steps += depth.div_ceil(TILE_DEPTH);
            right_tiles += planes.right() * depth.div_ceil(TILE_DEPTH);
        }
        if depth < left {
            cursor.first += depth;
            break;
        }
        *cursor = Cursor { term: cursor.term + 1, first: 0 };
    }
    let left_strip = SPLIT_PLANES * steps * TILE_ELEMENTS;
    Chunk { pieces, count, left_strip, right_strip: right_tiles * TILE_ELEMENTS }
}

/// The caller's workspace: a packed block of the left operand, and some columns of the right one for each thread.
#[derive(Clone, Copy)]
struct Scratch {
    lefts: *mut u16,
    panels: *mut u16,
}

/// Some rows of C and a block of depth.
struct Block<'a> {
    terms: &'a [Term],
    chunk: &'a Chunk,
    first_row: usize,
    rows: usize,
    write: TileWrite,
    output: Output,
    scratch: Scratch,
}

// SAFETY: tasks write disjoint parts of the packed block and of C, and the columns of their own thread; the bias is
// only read.
unsafe impl Sync for Block<'_> {}

/// Packs the rows of the left operand.
unsafe fn pack_block(block: &Block<'_>) {
    let chunk = block.chunk;
    assert!(
        block.rows.div_ceil(TILE) * chunk.left_strip <= LEFT_ELEMENTS
            && SPLIT_COLUMNS / TILE * chunk.right_strip <= PANEL_ELEMENTS,
        "a block larger than its workspace"
    );
    let groups = block.rows.div_ceil(LEFT_ROWS);
    run_tasks(groups * chunk.count, |task| {
        let (piece, row) = (&chunk.pieces[task / groups], task % groups * LEFT_ROWS);
        let mut left = block.terms[piece.term].left;
        let start = (block.first_row + row) * left.row_stride + piece.first * left.depth_stride;
        // SAFETY: rows and depth are inside the left operand; tasks cut the packed block, which has room for them,
        // into disjoint tiles.
        unsafe {
            left.pointer = left.pointer.add(start);
            let at = row / TILE * chunk.left_strip + piece.first_left * TILE_ELEMENTS;
            pack_left::<SPLIT_PLANES>(&LeftPiece {
                left,
                rows: LEFT_ROWS.min(block.rows - row),
                depth: piece.depth,
                tiles: block.scratch.lefts.add(at),
                strip_elements: chunk.left_strip,
            });
        }
    });
}

unsafe fn multiply_block(block: &Block<'_>) {
    let groups = block.output.columns.div_ceil(SPLIT_COLUMNS);
    let parts = (TASKS_WANTED / groups).clamp(1, block.rows.div_ceil(FEWEST_ROWS));
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
                    let strips = panel.add((column - first) / TILE * block.chunk.right_strip);
                    multiply_part(block, rows.clone(), column, strips);
                }
            });
        }
    });
}

/// Packs some columns of the right operands.
unsafe fn pack_columns(block: &Block<'_>, columns: Range<usize>, panel: *mut u16) {
    for piece in block.chunk.pieces() {
        let term = &block.terms[piece.term];
        for inside in (0..piece.depth).step_by(PACK_DEPTH) {
            let tile = piece.first_right + piece.planes.right() * (inside / TILE_DEPTH);
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
                    strip_elements: block.chunk.right_strip,
                };
                match piece.planes {
                    Planes::One | Planes::ThreeByOne => pack_right::<1>(&packed),
                    Planes::Three => pack_right::<SPLIT_PLANES>(&packed),
                }
            }
        }
    }
}

/// Multiplies some rows of the block with the columns of one square.
unsafe fn multiply_part(block: &Block<'_>, rows: Range<usize>, column: usize, right: *const u16) {
    let chunk = block.chunk;
    let last_strip = block.rows.div_ceil(TILE) - 1;
    let columns = SQUARE.min(block.output.columns - column);
    // SAFETY: the packed strips hold the tiles of the block; rows and columns are inside C.
    unsafe {
        for row in rows.clone().step_by(SQUARE) {
            let strip = row / TILE;
            let left = block.scratch.lefts.add(strip * chunk.left_strip).cast_const();
            // Where there is no second strip the first serves as well: its rows are not written out.
            let below = block.scratch.lefts.add((strip + 1).min(last_strip) * chunk.left_strip).cast_const();
            let c = SquareOfC {
                view: block.output.view.at(block.first_row + row, column),
                rows: SQUARE.min(rows.end - row),
                columns,
                write: match block.write {
                    TileWrite::Bias(bias) => TileWrite::Bias(bias.add(column)),
                    other => other,
                },
            };
            write_square(c, |output, output_stride, accumulate| {
                let mut square = TileSquare {
                    planes: Planes::Three,
                    left: [left, below],
                    right: [right, if columns > TILE { right } else { std::ptr::null() }],
                    depth_tiles: 0,
                    accumulate,
                    output,
                    // The next rows of C.
                    asked_for: output.wrapping_add(SQUARE * output_stride).cast_const(),
                    output_stride,
                };
                if chunk.count == 0 {
                    multiply_square(Bf16Unit::Amx, &square);
                }
                for piece in chunk.pieces() {
                    let at = piece.first_left * TILE_ELEMENTS;
                    let right = right.add(piece.first_right * TILE_ELEMENTS);
                    square.planes = piece.planes;
                    square.left = [left.add(at), below.add(at)];
                    square.right[0] = right;
                    if columns > TILE {
                        square.right[1] = right.add(chunk.right_strip);
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
