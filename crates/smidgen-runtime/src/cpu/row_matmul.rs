//! The f32 matmul for few rows, as in generation with one token at a time, which is bound by the decoding of weights.
//!
//! `matmul.rs` packs a block of the right operand on all threads, waits, multiplies, and waits again: with one row
//! on the left, waiting and moving the packed block through the caches take most of the time. Here each task computes
//! one panel of columns, in a single parallel section: up to four rows directly from the stored blocks
//! (`direct_matmul.rs`), more rows from a panel that the task packs.
//! Chunks of depth and the order of each sum are those of `matmul.rs`, so both give the same bits.
//! Left out: right operands that are not transposed, which generation does not have.

use super::arena::aligned_floats;
use super::direct_matmul::{
    DIRECT_ROWS, DirectBlocks, DirectPanel, Sums, multiply_blocks, multiply_panel, write_sums,
};
use super::isa::Isa;
use super::kernel::{LeftRun, PANEL_COLUMNS, RightRows, TileMatmul, TileWrite, tile_matmul};
use super::matmul::depth_cut;
use super::matmul_terms::{Chunk, Init, MAX_PIECES, Output, Piece, Term, check_operands};
use super::packing::{PACK_DEPTH, RightPiece, STRIP, pack_right, panel_width};
use super::pool::{current_thread, current_threads, run_tasks};
use smidgen_ir::Storage;
use smidgen_ir::workspace_cpu::{COLUMN_BLOCK, DEPTH_BLOCK, ROW_BLOCK, matmul_floats};

/// Maximum number of rows for which this is faster than `matmul`.
pub const FEW_ROWS: usize = 16;

const _: () = assert!(PANEL_COLUMNS <= ROW_BLOCK && PANEL_COLUMNS <= COLUMN_BLOCK);

/// Computes the sum on the current thread pool; every right operand is transposed.
///
/// # Safety
/// As for [`super::matmul::matmul`].
pub unsafe fn row_matmul(isa: Isa, terms: &[Term], init: Init, output: Output, workspace: &mut [f32]) {
    check_operands(terms, &output, workspace, matmul_floats(current_threads()));
    assert!(terms.iter().all(|term| term.right_transposed), "a right operand that is not transposed");
    if output.rows == 0 {
        return;
    }
    let (_, panels) = aligned_floats(workspace).split_at_mut(DEPTH_BLOCK * COLUMN_BLOCK);
    let work = Work { isa, terms, init, output, panels: panels.as_mut_ptr() };
    let panels = output.columns.div_ceil(PANEL_COLUMNS);
    let panels_each = (panels / TASKS_WANTED).clamp(1, MAX_PANELS);
    // Threads take tasks in turn, so a thread probably continues this many panels later; a hint for prefetching.
    let stride = current_threads() * panels_each;
    run_tasks(panels.div_ceil(panels_each), |task| {
        let first = task * panels_each;
        let end = panels.min(first + panels_each);
        for panel in first..end {
            let next = if panel + 1 < end { panel + 1 } else { first + stride };
            // SAFETY: tasks own disjoint columns of C, and the panel of their thread.
            unsafe { work.multiply_panel(panel * PANEL_COLUMNS, next * PANEL_COLUMNS) }
        }
    });
}

/// Minimum number of tasks that a wide matrix is cut into.
const TASKS_WANTED: usize = 16;
/// Maximum panels of a task.
const MAX_PANELS: usize = 8;

struct Work<'a> {
    isa: Isa,
    terms: &'a [Term],
    init: Init,
    output: Output,
    /// One panel per thread, ROW_BLOCK × DEPTH_BLOCK floats apart.
    panels: *mut f32,
}

// SAFETY: tasks write disjoint columns of C and the panel of their own thread; the rest is only read.
unsafe impl Sync for Work<'_> {}

impl Work<'_> {
    unsafe fn multiply_panel(&self, first_column: usize, next_column: usize) {
        let columns = PANEL_COLUMNS.min(self.output.columns - first_column);
        depth_cut(self.terms).for_each(self.terms, |chunk, is_first| {
            let write = self.init.write_of(is_first, first_column);
            // SAFETY: the caller's promises; the panel holds at most DEPTH_BLOCK rows of PANEL_COLUMNS floats.
            unsafe {
                if self.output.rows <= DIRECT_ROWS {
                    self.multiply_directly(chunk, (first_column, next_column), columns, write)
                } else {
                    self.multiply_chunk(chunk, first_column, columns, write)
                }
            }
        });
    }

    /// For few rows, whose sums stay in registers while weights are decoded.
    unsafe fn multiply_directly(
        &self,
        chunk: &Chunk,
        (first_column, next_column): (usize, usize),
        columns: usize,
        write: TileWrite,
    ) {
        let rows = self.output.rows;
        let is_whole = columns.is_multiple_of(STRIP);
        let mut sums: Sums = [0.0; DIRECT_ROWS * PANEL_COLUMNS];
        // SAFETY: pieces are inside their terms, columns inside C; the panel belongs to this thread and holds a slice.
        unsafe {
            for piece in chunk.pieces() {
                let term = &self.terms[piece.term];
                match term.right.storage {
                    Storage::Gguf(block) if is_whole && term.scale == 1.0 && term.left.depth_stride == 1 => {
                        let (stored, left) = (term.right, self.left_run(piece, 0, piece.depth));
                        let blocks = DirectBlocks {
                            block,
                            stored,
                            first_column,
                            columns,
                            first_depth: piece.first,
                            rows,
                            left,
                            next_column: Some(next_column),
                        };
                        multiply_blocks(self.isa, &blocks, &mut sums);
                    }
                    _ => {
                        for slice in (0..piece.depth).step_by(PACK_DEPTH) {
                            let depth = PACK_DEPTH.min(piece.depth - slice);
                            let panel = self.pack(piece, slice, first_column, columns, (depth, 0));
                            let left = self.left_run(piece, slice, depth);
                            let width = panel_width(columns);
                            multiply_panel(self.isa, &DirectPanel { panel, width, rows, left }, &mut sums);
                        }
                    }
                }
            }
            write_sums(&sums, rows, columns, self.output.view.at(0, first_column), write);
        }
    }

    /// The left operand of a piece from `slice` on.
    unsafe fn left_run(&self, piece: &Piece, slice: usize, depth: usize) -> LeftRun {
        let left = self.terms[piece.term].left;
        // SAFETY: the piece is inside its term.
        let start = unsafe { left.pointer.add((piece.first + slice) * left.depth_stride) };
        LeftRun::strided(start, left.row_stride, left.depth_stride, depth)
    }

    /// Packs a slice of a piece into the panel of this thread, which has `panel_depth` rows, from `panel_row` on.
    unsafe fn pack(
        &self,
        piece: &Piece,
        slice: usize,
        first_column: usize,
        columns: usize,
        (panel_depth, panel_row): (usize, usize),
    ) -> *const f32 {
        let term = &self.terms[piece.term];
        // SAFETY: the caller's promises; the panel belongs to this thread.
        unsafe {
            let panels = self.panels.add(current_thread() * ROW_BLOCK * DEPTH_BLOCK);
            pack_right(
                self.isa,
                &RightPiece {
                    stored: term.right,
                    transposed: true,
                    scale: term.scale,
                    first_column,
                    columns,
                    first_depth: piece.first + slice,
                    depth: PACK_DEPTH.min(piece.depth - slice),
                    panels,
                    panel_depth,
                    panel_row,
                },
            );
            panels
        }
    }

    unsafe fn multiply_chunk(&self, chunk: &Chunk, first_column: usize, columns: usize, write: TileWrite) {
        let mut runs = [LeftRun::strided(std::ptr::null(), 0, 0, 0); MAX_PIECES];
        // SAFETY: the panel belongs to this thread; pieces are inside their terms, columns inside C.
        unsafe {
            let panel = self.panels.add(current_thread() * ROW_BLOCK * DEPTH_BLOCK);
            for (run, piece) in runs.iter_mut().zip(chunk.pieces()) {
                for slice in (0..piece.depth).step_by(PACK_DEPTH) {
                    let place = (chunk.depth, piece.chunk_depth + slice);
                    self.pack(piece, slice, first_column, columns, place);
                }
                *run = self.left_run(piece, 0, piece.depth);
            }
            tile_matmul(
                self.isa,
                &TileMatmul {
                    rows: self.output.rows,
                    columns,
                    runs: &runs[..chunk.pieces().len()],
                    right: RightRows { pointer: panel, row_stride: panel_width(columns), padded: true },
                    output: self.output.view.at(0, first_column),
                    write,
                },
            );
        }
    }
}
