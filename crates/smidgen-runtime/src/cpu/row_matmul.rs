//! The product of few rows, as generation has it: a token at a time, bound by how fast weights are decoded.
//!
//! `matmul.rs` packs a block of the right operand for all threads, waits, multiplies, waits: with one row on the left
//! the waiting and the way of the packed block through the caches are most of the time. Here a task packs one panel
//! of columns for itself and multiplies it at once, and a product is one parallel section.
//! Blocks of depth, packing and innermost loop are those of `matmul.rs`, so each element is the same sum in the same
//! order: the bytes are the same, and which of the two ran can never be seen in a result.
//! Left out: right operands that are not transposed, which generation does not have.

use super::isa::Isa;
use super::kernel::{LeftRun, OutputView, PANEL_COLUMNS, RightRows, TileMatmul, TileWrite, tile_matmul};
use super::matmul::{Chunk, Cursor, DEPTH_STEP, Init, MOST_RUNS, Output, Term, even_block, next_chunk};
use super::packing::{PACK_DEPTH, RightPiece, pack_right, panel_width};
use super::tasks::{aligned_floats, current_thread, current_threads, run_tasks};
use smidgen_ir::workspace_cpu::{COLUMN_BLOCK, DEPTH_BLOCK, ROW_BLOCK, matmul_floats};

/// Most rows for which this is the faster way.
pub const FEW_ROWS: usize = 16;

const _: () = assert!(PANEL_COLUMNS <= ROW_BLOCK && PANEL_COLUMNS <= COLUMN_BLOCK);

/// Computes the sum of products in the current pool; every right operand is transposed.
///
/// # Safety
/// As for `product`.
pub unsafe fn row_matmul(isa: Isa, terms: &[Term], init: Init, output: Output, workspace: &mut [f32]) {
    let threads = current_threads();
    assert!(
        workspace.len() >= matmul_floats(threads),
        "a matmul on {threads} threads needs {} floats of workspace, got {}",
        matmul_floats(threads),
        workspace.len()
    );
    assert!(terms.iter().all(|term| term.right_transposed && term.right.rows == output.columns));
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
    /// One panel for each thread, ROW_BLOCK × DEPTH_BLOCK floats apart.
    panels: *mut f32,
}

// SAFETY: tasks write disjoint columns of C and the panel of their own thread; the rest is only read.
unsafe impl Sync for Work<'_> {}

impl Work<'_> {
    unsafe fn multiply_panel(&self, first_column: usize) {
        let columns = PANEL_COLUMNS.min(self.output.columns - first_column);
        let depth: usize = self.terms.iter().map(Term::depth).sum();
        let capacity = even_block(depth.max(1), DEPTH_BLOCK, DEPTH_STEP);
        let mut cursor = Cursor { term: 0, first: 0 };
        let mut is_first = true;
        loop {
            let chunk = next_chunk(self.terms, &mut cursor, capacity);
            // A sum without terms still has to write its init.
            if chunk.count == 0 && !is_first {
                return;
            }
            let write = self.init.write_of(is_first, first_column);
            // SAFETY: the caller's promises; the panel holds at most DEPTH_BLOCK rows of PANEL_COLUMNS floats.
            unsafe { self.multiply_chunk(&chunk, first_column, columns, write) };
            is_first = false;
        }
    }

    unsafe fn multiply_chunk(&self, chunk: &Chunk, first_column: usize, columns: usize, write: TileWrite) {
        let mut runs = [LeftRun::strided(std::ptr::null(), 0, 0, 0); MOST_RUNS];
        // SAFETY: the panel is this thread's; pieces lie inside their terms, columns inside C.
        unsafe {
            let panel = self.panels.add(current_thread() * ROW_BLOCK * DEPTH_BLOCK);
            let mut panel_row = 0;
            for (run, piece) in runs.iter_mut().zip(&chunk.pieces[..chunk.count]) {
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
                            panel_row: panel_row + slice,
                        },
                    );
                }
                panel_row += piece.depth;
                let left = term.left;
                let start = left.pointer.add(piece.first * left.depth_stride);
                *run = LeftRun::strided(start, left.row_stride, left.depth_stride, piece.depth);
            }
            let view: OutputView = self.output.view.at(0, first_column);
            tile_matmul(
                self.isa,
                &TileMatmul {
                    rows: self.output.rows,
                    columns,
                    runs: &runs[..chunk.count],
                    right: RightRows { pointer: panel, row_stride: panel_width(columns), padded: true },
                    output: view,
                    write,
                },
            );
        }
    }
}
