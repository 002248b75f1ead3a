//! C (M, N) = init + Σ scale · L (M, K) · R (K, N) with operands rounded to bf16 and sums in f32.
//!
//! The same sum as `product.rs` for processors that multiply bf16: both operands are packed into tiles in the
//! caller's workspace, then squares of 32 × 32 are computed. A task packs its rows over the whole depth of a
//! block and keeps its part of C in the second-level cache while depth passes.
//! Blocks and tasks follow from the shape alone and each element of C belongs to one task, which sums it in
//! the order of the terms: the bytes do not depend on the number of threads.
//! Left out: tiles (`bf16_packing.rs`) and the instructions that multiply them (`bf16_unit.rs`).

use super::bf16_packing::{LeftPiece, PACK_COLUMNS, PACK_DEPTH, RightPiece, pack_left, pack_right};
use super::bf16_unit::{
    Bf16Unit, SQUARE, TILE, TILE_DEPTH, TILE_ELEMENTS, TileSquare, multiply_square, with_unit,
};
use super::kernel::{OutputView, TileWrite};
use super::product::{Init, Output, Term, even_block};
use super::tasks::{aligned_floats, current_thread, current_threads, run_tasks};
use smidgen_ir::workspace::{BF16_DEPTH, BF16_LEFT, BF16_RIGHT, bf16_product_floats};

/// Depth over which a strip of the right operand stays in the first-level cache while rows pass by.
const INNER_TILES: usize = 640 / TILE_DEPTH;
/// Most pieces of terms in one block of depth.
const MOST_PIECES: usize = 16;
/// Tasks that a block is cut into where it is large enough.
const TASKS_WANTED: usize = 8;
/// Rows of a task of a small product.
const MOST_ROWS: usize = 128;

/// Computes the sum of products in the current pool.
///
/// # Safety
/// The machine supports `unit`; every operand is readable and C is writable for its shape and strides
/// while the call runs; C overlaps no operand, and no two elements of C lie at the same address.
pub unsafe fn bf16_product(
    unit: Bf16Unit,
    terms: &[Term],
    init: Init,
    output: Output,
    workspace: &mut [f32],
) {
    let threads = current_threads();
    let needed = bf16_product_floats(threads);
    assert!(
        workspace.len() >= needed,
        "a product on {threads} threads needs {needed} floats of workspace, got {}",
        workspace.len()
    );
    for term in terms {
        assert_eq!(term.columns(), output.columns, "columns of a term and of C");
    }
    if output.rows == 0 || output.columns == 0 {
        return;
    }
    let (packed, lefts) = aligned_floats(workspace).split_at_mut(BF16_RIGHT / 2);
    let scratch = Scratch { packed: packed.as_mut_ptr().cast(), lefts: lefts.as_mut_ptr().cast() };
    let padded = |term: &Term| term.depth().next_multiple_of(TILE_DEPTH);
    let depth: usize = terms.iter().map(padded).sum();
    let chunks = depth.div_ceil(BF16_DEPTH).max(1);
    let capacity = depth.div_ceil(chunks).next_multiple_of(PACK_DEPTH);
    // A multiple of the step, or rounding a block up would take it out of the workspace.
    let most_columns = BF16_RIGHT / capacity.max(TILE_DEPTH) / PACK_COLUMNS * PACK_COLUMNS;
    let column_block = even_block(output.columns, most_columns, PACK_COLUMNS);
    for first_column in (0..output.columns).step_by(column_block) {
        let mut cursor = Cursor { term: 0, first: 0 };
        let mut is_first = true;
        loop {
            let chunk = next_chunk(terms, &mut cursor, capacity);
            // A sum without terms still has to write its init.
            if chunk.count == 0 && !is_first {
                break;
            }
            let block = Block {
                unit,
                terms,
                chunk: &chunk,
                first_column,
                columns: column_block.min(output.columns - first_column),
                write: match (is_first, init) {
                    (false, _) | (true, Init::Accumulate) => TileWrite::Add,
                    (true, Init::Overwrite) => TileWrite::Overwrite,
                    // SAFETY: the bias has one float per column of C.
                    (true, Init::Bias(bias)) => TileWrite::Bias(unsafe { bias.add(first_column) }),
                },
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
#[derive(Clone, Copy, Default)]
struct Piece {
    term: usize,
    first: usize,
    depth: usize,
    /// Tiles of the chunk before it.
    first_tile: usize,
}

/// A block of depth: pieces of one or more terms.
struct Chunk {
    pieces: [Piece; MOST_PIECES],
    count: usize,
    tiles: usize,
}

impl Chunk {
    fn pieces(&self) -> &[Piece] {
        &self.pieces[..self.count]
    }

    /// Elements of a strip of 16 rows or columns.
    fn strip_elements(&self) -> usize {
        self.tiles * TILE_ELEMENTS
    }
}

struct Cursor {
    term: usize,
    first: usize,
}

/// Pieces end at multiples of [`PACK_DEPTH`] or at the end of their term, as spans of a storage have to.
fn next_chunk(terms: &[Term], cursor: &mut Cursor, capacity: usize) -> Chunk {
    let mut chunk = Chunk { pieces: [Piece::default(); MOST_PIECES], count: 0, tiles: 0 };
    while cursor.term < terms.len() && chunk.count < MOST_PIECES {
        let left = terms[cursor.term].depth() - cursor.first;
        let room = capacity - chunk.tiles * TILE_DEPTH;
        let depth = if left <= room { left } else { room / PACK_DEPTH * PACK_DEPTH };
        if depth > 0 {
            chunk.pieces[chunk.count] =
                Piece { term: cursor.term, first: cursor.first, depth, first_tile: chunk.tiles };
            chunk.count += 1;
            chunk.tiles += depth.div_ceil(TILE_DEPTH);
        }
        if depth < left {
            cursor.first += depth;
            break;
        }
        *cursor = Cursor { term: cursor.term + 1, first: 0 };
    }
    chunk
}

/// The caller's workspace: the packed right block, and one left block for each thread.
#[derive(Clone, Copy)]
struct Scratch {
    packed: *mut u16,
    lefts: *mut u16,
}

/// Some columns of C and a block of depth.
struct Block<'a> {
    unit: Bf16Unit,
    terms: &'a [Term],
    chunk: &'a Chunk,
    first_column: usize,
    columns: usize,
    write: TileWrite,
    output: Output,
    scratch: Scratch,
}

// SAFETY: tasks write disjoint parts of the packed block, of C, and the left block of their own thread; the
// bias is only read.
unsafe impl Sync for Block<'_> {}

unsafe fn pack_block(block: &Block<'_>) {
    let chunk = block.chunk;
    assert!(
        block.columns.div_ceil(TILE) * chunk.strip_elements() <= BF16_RIGHT,
        "a block larger than its workspace"
    );
    let groups = block.columns.div_ceil(PACK_COLUMNS);
    let slices = |piece: &Piece| piece.depth.div_ceil(PACK_DEPTH);
    let all_slices: usize = chunk.pieces().iter().map(slices).sum();
    run_tasks(groups * all_slices, |task| {
        let (group, mut slice) = (task / all_slices, task % all_slices);
        let mut index = 0;
        while slice >= slices(&chunk.pieces[index]) {
            slice -= slices(&chunk.pieces[index]);
            index += 1;
        }
        let piece = chunk.pieces[index];
        let term = &block.terms[piece.term];
        let (first, inside) = (group * PACK_COLUMNS, slice * PACK_DEPTH);
        let tile = piece.first_tile + inside / TILE_DEPTH;
        let strip = first / TILE;
        // SAFETY: groups and slices cut the packed block into disjoint tiles of the workspace, which has room
        // for the columns and the depth of a block; the stored matrix has the shape of its term.
        unsafe {
            pack_right(&RightPiece {
                stored: term.right,
                transposed: term.right_transposed,
                scale: term.scale,
                first_column: block.first_column + first,
                columns: PACK_COLUMNS.min(block.columns - first),
                first_depth: piece.first + inside,
                depth: PACK_DEPTH.min(piece.depth - inside),
                tiles: block.scratch.packed.add(strip * chunk.strip_elements() + tile * TILE_ELEMENTS),
                strip_elements: chunk.strip_elements(),
            });
        }
    });
}

unsafe fn multiply_block(block: &Block<'_>) {
    let squares = block.columns.div_ceil(SQUARE);
    let rows = block.output.rows;
    // Cut along rows first: tasks that share rows pack the same left operand.
    let room = BF16_LEFT / block.chunk.strip_elements().max(1) * TILE / SQUARE * SQUARE;
    let row_block = even_block(rows, room.min((rows / TASKS_WANTED).max(MOST_ROWS)), SQUARE);
    let row_tasks = rows.div_ceil(row_block);
    let squares_each = squares.div_ceil((TASKS_WANTED / row_tasks).clamp(1, squares));
    let column_tasks = squares.div_ceil(squares_each);
    run_tasks(row_tasks * column_tasks, |task| {
        let first_row = task / column_tasks * row_block;
        let rows = row_block.min(block.output.rows - first_row);
        let first = task % column_tasks * squares_each;
        let last = squares.min(first + squares_each);
        // SAFETY: tasks own disjoint rows and columns of C.
        unsafe { with_unit(block.unit, || multiply_part(block, first_row, rows, first..last)) }
    });
}

unsafe fn multiply_part(block: &Block<'_>, first_row: usize, rows: usize, squares: std::ops::Range<usize>) {
    let chunk = block.chunk;
    let strip_elements = chunk.strip_elements();
    // SAFETY: a left block has room for the rows of a task and belongs to this thread, which runs one task at
    // a time; rows and columns are inside C and the left operands.
    unsafe {
        assert!(rows.div_ceil(TILE) * strip_elements <= BF16_LEFT, "rows larger than their workspace");
        let lefts = block.scratch.lefts.add(current_thread() * BF16_LEFT);
        for piece in chunk.pieces() {
            let mut left = block.terms[piece.term].left;
            let start = first_row * left.row_stride + piece.first * left.depth_stride;
            left.pointer = left.pointer.add(start);
            pack_left(&LeftPiece {
                left,
                rows,
                depth: piece.depth,
                tiles: lefts.add(piece.first_tile * TILE_ELEMENTS),
                strip_elements,
            });
        }
        let last_strip = rows.div_ceil(TILE) - 1;
        let inner = even_block(chunk.tiles.max(1), INNER_TILES, 1);
        for first_tile in (0..chunk.tiles.max(1)).step_by(inner) {
            let depth_tiles = inner.min(chunk.tiles - first_tile);
            let write = if first_tile == 0 { block.write } else { TileWrite::Add };
            let tiles = first_tile * TILE_ELEMENTS;
            for square in squares.clone() {
                let column = square * SQUARE;
                let columns = SQUARE.min(block.columns - column);
                let right = block.scratch.packed.add(column / TILE * strip_elements + tiles).cast_const();
                let beside = if columns > TILE { right.add(strip_elements) } else { std::ptr::null() };
                for row in (0..rows).step_by(SQUARE) {
                    let strip = row / TILE;
                    let left = lefts.add(strip * strip_elements + tiles).cast_const();
                    // Where there is no second strip the first serves as well: its rows are not written out.
                    let below = lefts.add((strip + 1).min(last_strip) * strip_elements + tiles).cast_const();
                    let place = Place { row, rows: SQUARE.min(rows - row), column, columns };
                    write_square(block, write, first_row, place, |output, output_stride| {
                        multiply_square(
                            block.unit,
                            &TileSquare {
                                left: [left, below],
                                right: [right, beside],
                                depth_tiles,
                                output,
                                output_stride,
                            },
                        );
                    });
                }
            }
        }
    }
}

/// A square of a task's part of C.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    rows: usize,
    /// In the block.
    column: usize,
    columns: usize,
}

/// Has a square computed, straight into C where it fits and nothing has to be added, else beside it.
#[inline(always)]
unsafe fn write_square(
    block: &Block<'_>,
    write: TileWrite,
    first_row: usize,
    place: Place,
    multiply: impl FnOnce(*mut f32, usize),
) {
    // SAFETY: the square lies inside C.
    let output: OutputView =
        unsafe { block.output.view.at(first_row + place.row, block.first_column + place.column) };
    let whole = place.rows == SQUARE && place.columns.is_multiple_of(TILE);
    if whole && output.column_stride == 1 && matches!(write, TileWrite::Overwrite) {
        multiply(output.pointer, output.row_stride);
        return;
    }
    let mut local = LocalSquare([0.0; SQUARE * SQUARE]);
    multiply(local.0.as_mut_ptr(), SQUARE);
    // SAFETY: rows and columns of the square lie inside C, and the bias has a float for each column.
    unsafe {
        if output.column_stride == 1 {
            for row in 0..place.rows {
                let sums = &local.0[row * SQUARE..][..place.columns];
                let target = output.pointer.add(row * output.row_stride);
                match write {
                    TileWrite::Overwrite => std::ptr::copy_nonoverlapping(sums.as_ptr(), target, sums.len()),
                    TileWrite::Add => {
                        for (column, sum) in sums.iter().enumerate() {
                            *target.add(column) += sum;
                        }
                    }
                    TileWrite::Bias(bias) => {
                        for (column, sum) in sums.iter().enumerate() {
                            *target.add(column) = *bias.add(place.column + column) + sum;
                        }
                    }
                }
            }
            return;
        }
        for column in 0..place.columns {
            for row in 0..place.rows {
                let element = output.at(row, column).pointer;
                let sum = local.0[row * SQUARE + column];
                *element = match write {
                    TileWrite::Overwrite => sum,
                    TileWrite::Add => *element + sum,
                    TileWrite::Bias(bias) => *bias.add(place.column + column) + sum,
                };
            }
        }
    }
}

/// On a boundary of cache lines: rows of a square are two of them.
#[repr(align(64))]
struct LocalSquare([f32; SQUARE * SQUARE]);

#[cfg(test)]
#[path = "bf16_product_tests.rs"]
mod tests;
