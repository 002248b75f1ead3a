//! The f32 matmul for few rows, as in generation: one token at a time, bound by how fast weights are decoded.
//!
//! `matmul.rs` packs a block of the right operand on all threads, waits, multiplies, and waits again: with one row
//! on the left, waiting and moving the packed block through the caches take most of the time. Here each task packs
//! one panel of columns for itself and multiplies it at once, in a single parallel section.
//! Chunks of depth, packing and the innermost loop are those of `matmul.rs`, so each element is the same sum in the
//! same order: both give the same bytes.
//! Left out: right operands that are not transposed, which generation does not have.

use super::arena::aligned_floats;
use super::isa::Isa;
use super::kernel::{LeftRun, PANEL_COLUMNS, RightRows, TileMatmul, TileWrite, tile_matmul};
use super::matmul::depth_cut;
use super::matmul_terms::{Chunk, Init, MOST_PIECES, Output, Term, check_operands};
use super::packing::{PACK_DEPTH, RightPiece, pack_right, panel_width};
use super::pool::{current_thread, current_threads, run_tasks};
use smidgen_ir::workspace_cpu::{COLUMN_BLOCK, DEPTH_BLOCK, ROW_BLOCK, matmul_floats};

/// Most rows for which this is faster than `matmul`.
pub const FEW_ROWS: usize = 16;

const _: () = assert!(PANEL_COLUMNS <= ROW_BLOCK && PANEL_COLUMNS <= COLUMN_BLOCK);

/// Computes the sum on the current thread pool; every right operand is transposed.
///
/// # Safety
/// As for [`super::matmul::matmul`].
pub unsafe fn row_matmul(isa: Isa, terms: &[Term], init: Init, output: Output, workspace: &mut [f32]) {
    check_operands(terms, &output, workspace, matmul_floats(current_threads()));
    assert!(terms.iter().all(|term| term.right_transposed), "a right operand that is not transposed");
    let (_, panels) = aligned_floats(workspace).split_at_mut(DEPTH_BLOCK * COLUMN_BLOCK);
    let work = Work { isa, terms, init, output, panels: panels.as_mut_ptr() };
    run_tasks(output.columns.div_ceil(PANEL_COLUMNS), |task| {
        // SAFETY: tasks own disjoint columns of C, and the panel of their thread.
        unsafe { work.multiply_panel(task * PANEL_COLUMNS) }
    });
}

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
    unsafe fn multiply_panel(&self, first_column: usize) {
        let columns = PANEL_COLUMNS.min(self.output.columns - first_column);
        depth_cut(self.terms).for_each(self.terms, |chunk, is_first| {
            let write = self.init.write_of(is_first, first_column);
            // SAFETY: the caller's promises; the panel holds at most DEPTH_BLOCK rows of PANEL_COLUMNS floats.
            unsafe { self.multiply_chunk(chunk, first_column, columns, write) };
        });
    }

    unsafe fn multiply_chunk(&self, chunk: &Chunk, first_column: usize, columns: usize, write: TileWrite) {
        let mut runs = [LeftRun::strided(std::ptr::null(), 0, 0, 0); MOST_PIECES];
        // SAFETY: the panel belongs to this thread; pieces are inside their terms, columns inside C.
        unsafe {
            let panel = self.panels.add(current_thread() * ROW_BLOCK * DEPTH_BLOCK);
            for (run, piece) in runs.iter_mut().zip(chunk.pieces()) {
                let term = &self.terms[piece.term];
                for slice in (0..piece.depth).step_by(PACK_DEPTH) {
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
                            panels: panel,
                            panel_depth: chunk.depth,
                            panel_row: piece.chunk_depth + slice,
                        },
                    );
                }
                let left = term.left;
                let start = left.pointer.add(piece.first * left.depth_stride);
                *run = LeftRun::strided(start, left.row_stride, left.depth_stride, piece.depth);
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
