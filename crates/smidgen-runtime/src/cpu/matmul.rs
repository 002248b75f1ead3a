//! The f32 matmul on vector units: C (M, N) = init + Σ scale · L (M, K) · R (K, N).
//!
//! L is f32 with any strides. R is a stored matrix in its own format, as is or transposed; blocks of it are
//! decoded and packed into the caller's workspace, and nothing is allocated.
//! Blocks and tasks follow from the shape alone, and each element of C belongs to one task, which sums
//! in the order of the terms, so the result does not depend on the number of threads.
//! Left out: the innermost loops (`kernel.rs`) and packing (`packing.rs`).

use super::arena::aligned_floats;
use super::isa::Isa;
use super::kernel::{LeftRun, OutputView, PANEL_COLUMNS, RightRows, TileMatmul, TileWrite, tile_matmul};
use super::matmul_terms::{
    Chunk, DepthCut, Init, MAX_PIECES, Output, Piece, Term, check_operands, even_block,
};
use super::packing::{PACK_COLUMNS, PACK_DEPTH, RightPiece, copy_left, pack_right, panel_width};
use super::pool::{current_thread, current_threads, run_tasks};
use super::stored::SPAN_STEP;
use smidgen_ir::workspace_cpu::{COLUMN_BLOCK, DEPTH_BLOCK, ROW_BLOCK, matmul_floats};

const _: () = assert!(COLUMN_BLOCK.is_multiple_of(PACK_COLUMNS) && DEPTH_BLOCK.is_multiple_of(PACK_DEPTH));
const _: () = assert!(PACK_COLUMNS.is_multiple_of(SPAN_STEP) && PACK_DEPTH.is_multiple_of(SPAN_STEP));
/// The number of tasks that a large block is cut into.
const TASKS_WANTED: usize = 16;
/// Rows of one task when a block is computed transposed: two panels.
const TRANSPOSED_ROWS: usize = 2 * PANEL_COLUMNS;
/// Minimum panels per task for which copying a left operand with a slow layout pays off.
const COPY_FROM_PANELS: usize = 3;

/// How [`matmul`] and `row_matmul` cut depth. They share the cut because it decides the order of sums.
pub(super) fn depth_cut(terms: &[Term]) -> DepthCut {
    let depth: usize = terms.iter().map(Term::depth).sum();
    let capacity = even_block(depth.max(1), DEPTH_BLOCK, SPAN_STEP);
    DepthCut { capacity, step: SPAN_STEP, padding: 1 }
}

/// Computes the sum on the current thread pool.
///
/// # Safety
/// The machine supports `isa`; every operand is readable and C is writable for its shape and strides
/// while the call runs; C overlaps no operand, and no two elements of C have the same address.
pub unsafe fn matmul(isa: Isa, terms: &[Term], init: Init, output: Output, workspace: &mut [f32]) {
    check_operands(terms, &output, workspace, matmul_floats(current_threads()));
    if output.rows == 0 || output.columns == 0 {
        return;
    }
    let (packed, lefts) = aligned_floats(workspace).split_at_mut(DEPTH_BLOCK * COLUMN_BLOCK);
    let scratch = Scratch { packed: packed.as_mut_ptr(), lefts: lefts.as_mut_ptr() };
    let cut = depth_cut(terms);
    let column_block = even_block(output.columns, COLUMN_BLOCK, PACK_COLUMNS);
    for first_column in (0..output.columns).step_by(column_block) {
        cut.for_each(terms, |chunk, is_first| {
            let block = Block {
                isa,
                terms,
                chunk,
                first_column,
                columns: column_block.min(output.columns - first_column),
                write: init.write_of(is_first, first_column),
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

/// The caller's workspace: the packed right block, and one left block per thread.
#[derive(Clone, Copy)]
struct Scratch {
    packed: *mut f32,
    lefts: *mut f32,
}

// SAFETY: tasks write disjoint parts of the packed block, and the left block of their own thread.
unsafe impl Send for Scratch {}
// SAFETY: as above.
unsafe impl Sync for Scratch {}

/// Some columns of C and one chunk of depth.
struct Block<'a> {
    isa: Isa,
    terms: &'a [Term],
    chunk: &'a Chunk,
    first_column: usize,
    columns: usize,
    write: TileWrite,
    output: Output,
    scratch: Scratch,
}

// SAFETY: the bias pointer inside `write` is only read; the other parts are `Sync`.
unsafe impl Sync for Block<'_> {}

unsafe fn pack_block(block: &Block<'_>) {
    let chunk = block.chunk;
    let groups = block.columns.div_ceil(PACK_COLUMNS);
    let slices = |piece: &Piece| piece.depth.div_ceil(PACK_DEPTH);
    let all_slices: usize = chunk.pieces().iter().map(slices).sum();
    run_tasks(groups * all_slices, |task| {
        let (group, mut slice) = (task / all_slices, task % all_slices);
        let mut index = 0;
        while slice >= slices(&chunk.pieces()[index]) {
            slice -= slices(&chunk.pieces()[index]);
            index += 1;
        }
        let piece = chunk.pieces()[index];
        let term = &block.terms[piece.term];
        let first = group * PACK_COLUMNS;
        // SAFETY: groups and slices cut the packed block into disjoint parts of the workspace, which
        // holds DEPTH_BLOCK × COLUMN_BLOCK floats; the stored matrix has the shape of its term.
        unsafe {
            pack_right(
                block.isa,
                &RightPiece {
                    stored: term.right,
                    transposed: term.right_transposed,
                    scale: term.scale,
                    first_column: block.first_column + first,
                    columns: PACK_COLUMNS.min(block.columns - first),
                    first_depth: piece.first + slice * PACK_DEPTH,
                    depth: PACK_DEPTH.min(piece.depth - slice * PACK_DEPTH),
                    panels: block.scratch.packed.add(first * chunk.depth),
                    panel_depth: chunk.depth,
                    panel_row: piece.chunk_depth + slice * PACK_DEPTH,
                },
            );
        }
    });
}

unsafe fn multiply_block(block: &Block<'_>) {
    if is_better_transposed(block) {
        run_tasks(block.output.rows.div_ceil(TRANSPOSED_ROWS), |task| {
            let first_row = task * TRANSPOSED_ROWS;
            let rows = TRANSPOSED_ROWS.min(block.output.rows - first_row);
            // SAFETY: tasks own disjoint rows of C.
            unsafe { multiply_part_transposed(block, first_row, rows) }
        });
        return;
    }
    let panels = block.columns.div_ceil(PANEL_COLUMNS);
    // Cut along rows first: tasks that share rows read, and may copy, the same left operand.
    let max_rows = (block.output.rows / TASKS_WANTED).clamp(ROW_BLOCK / 2, ROW_BLOCK);
    let row_block = even_block(block.output.rows, max_rows, 8);
    let row_tasks = block.output.rows.div_ceil(row_block);
    let groups_wanted = (TASKS_WANTED / row_tasks).clamp(1, panels.div_ceil(2));
    let panels_each = panels.div_ceil(groups_wanted);
    let column_tasks = panels.div_ceil(panels_each);
    run_tasks(row_tasks * column_tasks, |task| {
        let first_row = task / column_tasks * row_block;
        let rows = row_block.min(block.output.rows - first_row);
        let first_panel = task % column_tasks * panels_each;
        let last_panel = panels.min(first_panel + panels_each);
        // SAFETY: tasks own disjoint rows and columns of C.
        unsafe { multiply_part(block, first_row, rows, first_panel..last_panel) }
    });
}

/// Whether to compute Cᵀ = Rᵀ · Lᵀ instead: C is narrower than a panel, and M is the contiguous dimension of L.
/// Then the vectors of the kernel run along M and read L directly, and N need not fill them. The gradients of LoRA
/// factors have this shape. A bias prevents it, because the kernel reads the bias along its vectors.
fn is_better_transposed(block: &Block<'_>) -> bool {
    let pieces = block.chunk.pieces();
    block.columns < PANEL_COLUMNS
        && !matches!(block.write, TileWrite::Bias(_))
        && !pieces.is_empty()
        && pieces.iter().all(|piece| {
            let left = block.terms[piece.term].left;
            left.row_stride == 1 && left.depth_stride != 1
        })
}

unsafe fn multiply_part_transposed(block: &Block<'_>, first_row: usize, rows: usize) {
    let width = panel_width(block.columns);
    let mut packed = block.scratch.packed.cast_const();
    let mut write = block.write;
    for piece in block.chunk.pieces() {
        let left = block.terms[piece.term].left;
        // SAFETY: the single panel holds a row of `width` floats for each step of depth; rows and
        // columns are inside C and the left operands.
        unsafe {
            let output = block.output.view.at(first_row, block.first_column);
            tile_matmul(
                block.isa,
                &TileMatmul {
                    rows: block.columns,
                    columns: rows,
                    runs: &[LeftRun::strided(packed, 1, width, piece.depth)],
                    right: RightRows {
                        pointer: left.pointer.add(first_row + piece.first * left.depth_stride),
                        row_stride: left.depth_stride,
                        padded: false,
                    },
                    output: OutputView {
                        pointer: output.pointer,
                        row_stride: output.column_stride,
                        column_stride: output.row_stride,
                    },
                    write,
                },
            );
            packed = packed.add(piece.depth * width);
        }
        write = TileWrite::Add;
    }
}

unsafe fn multiply_part(block: &Block<'_>, first_row: usize, rows: usize, panels: std::ops::Range<usize>) {
    let chunk = block.chunk;
    let mut runs = [LeftRun::strided(std::ptr::null(), 0, 0, 0); MAX_PIECES];
    // SAFETY: a left block holds ROW_BLOCK × DEPTH_BLOCK floats and belongs to this thread, which runs
    // one task at a time; `pack_block` has written the panels; rows and columns are inside C and the
    // left operands.
    unsafe {
        let scratch = block.scratch.lefts.add(current_thread() * ROW_BLOCK * DEPTH_BLOCK);
        let mut copied = 0;
        for (run, piece) in runs.iter_mut().zip(chunk.pieces()) {
            let left = block.terms[piece.term].left;
            let start = first_row * left.row_stride + piece.first * left.depth_stride;
            *run = LeftRun::strided(left.pointer.add(start), left.row_stride, left.depth_stride, piece.depth);
            if panels.len() >= COPY_FROM_PANELS && misses_caches(run) {
                *run = copy_left(run, rows, scratch.add(copied));
                copied += rows.next_multiple_of(8) * piece.depth;
            }
        }
        for panel in panels {
            let first = panel * PANEL_COLUMNS;
            let columns = PANEL_COLUMNS.min(block.columns - first);
            tile_matmul(
                block.isa,
                &TileMatmul {
                    rows,
                    columns,
                    runs: &runs[..chunk.pieces().len()],
                    right: RightRows {
                        pointer: block.scratch.packed.add(first * chunk.depth),
                        row_stride: panel_width(columns),
                        padded: true,
                    },
                    output: block.output.view.at(first_row, block.first_column + first),
                    write: block.write.from_column(first),
                },
            );
        }
    }
}

/// Whether a left operand is slow to read in place: depth is not contiguous, or rows are multiples of 4 KiB
/// apart and so compete for the same cache sets.
fn misses_caches(run: &LeftRun) -> bool {
    run.depth_stride != 1 || run.row_stride.is_multiple_of(1024)
}
