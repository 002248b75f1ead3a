//! C (M, N) = init + Σ scale · L (M, K) · R (K, N): a sum of products in one pass over C.
//!
//! A LoRA layer is one such sum (x·Wᵀ + s·h·Bᵀ), and so is the gradient of an input that feeds several
//! layers. L is f32 with any strides; R is a stored matrix in its own format, used as is or transposed,
//! decoded and packed block by block into the caller's workspace. Nothing is allocated.
//! Blocks and tasks follow from the shape alone and each element of C belongs to one task, which sums
//! it in the order of the terms: the bytes do not depend on the number of threads.
//! Left out: the innermost loops (`kernel.rs`) and the copies (`packing.rs`).

use super::isa::Isa;
use super::kernel::{LeftRun, OutputView, PANEL_COLUMNS, RightRows, TileMatmul, TileWrite, tile_matmul};
use super::packing::{PACK_COLUMNS, PACK_DEPTH, RightPiece, copy_left, pack_right, panel_width};
use super::stored::{SPAN_STEP, Stored};
use super::tasks::{aligned_floats, current_thread, current_threads, run_tasks};
use smidgen_ir::Storage;
use smidgen_ir::workspace_cpu::{COLUMN_BLOCK, DEPTH_BLOCK, ROW_BLOCK, matmul_floats};

/// A left operand (M, K) of f32: element (i, k) at `i * row_stride + k * depth_stride`.
#[derive(Clone, Copy, Debug)]
pub struct Left {
    pub pointer: *const f32,
    pub row_stride: usize,
    pub depth_stride: usize,
}

// SAFETY: a view is only an address, and nothing is written through it.
unsafe impl Send for Left {}
// SAFETY: as above.
unsafe impl Sync for Left {}

/// One product of the sum. `right` is (K, N) as stored, or (N, K) where `right_transposed`.
#[derive(Clone, Copy, Debug)]
pub struct Term {
    pub left: Left,
    pub right: Stored,
    pub right_transposed: bool,
    pub scale: f32,
}

impl Term {
    /// A term of no depth, to fill an array with.
    pub const NOTHING: Term = Term {
        left: Left { pointer: std::ptr::null(), row_stride: 0, depth_stride: 0 },
        right: Stored {
            pointer: std::ptr::null(),
            storage: Storage::F32,
            first_row: 0,
            rows: 0,
            total_rows: 0,
            columns: 0,
            row_stride: 0,
        },
        right_transposed: false,
        scale: 0.0,
    };

    /// K of this term.
    pub fn depth(&self) -> usize {
        match self.right_transposed {
            true => self.right.columns,
            false => self.right.rows,
        }
    }

    pub fn columns(&self) -> usize {
        match self.right_transposed {
            true => self.right.rows,
            false => self.right.columns,
        }
    }
}

/// What C holds before the first term.
#[derive(Clone, Copy, Debug)]
pub enum Init {
    /// Zeros.
    Overwrite,
    /// What is there.
    Accumulate,
    /// In every row, these N floats.
    Bias(*const f32),
}

impl Init {
    /// How a block of depth is written, from a column of C on: the first begins with this, the others go on.
    pub(super) fn write_of(self, is_first: bool, first_column: usize) -> TileWrite {
        match (is_first, self) {
            (false, _) | (true, Init::Accumulate) => TileWrite::Add,
            (true, Init::Overwrite) => TileWrite::Overwrite,
            (true, Init::Bias(bias)) => TileWrite::Bias(bias.wrapping_add(first_column)),
        }
    }
}

/// C (M, N), with M = `rows` and N = `columns`.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    pub view: OutputView,
    pub rows: usize,
    pub columns: usize,
}

const _: () = assert!(COLUMN_BLOCK.is_multiple_of(PACK_COLUMNS) && DEPTH_BLOCK.is_multiple_of(PACK_DEPTH));
/// Blocks of depth begin at multiples of this inside a term, for the sake of block formats.
pub(super) const DEPTH_STEP: usize = SPAN_STEP;
const _: () = assert!(PACK_COLUMNS.is_multiple_of(SPAN_STEP) && PACK_DEPTH.is_multiple_of(SPAN_STEP));
/// Most pieces of terms in one block of depth.
pub(super) const MOST_RUNS: usize = 16;
/// Tasks that a block is cut into where it is large enough.
const TASKS_WANTED: usize = 16;
/// Rows of one task of a transposed block: two panels.
const TRANSPOSED_ROWS: usize = 2 * PANEL_COLUMNS;
/// Panels of a task from which on a copy of an awkward left operand pays.
const COPY_FROM_PANELS: usize = 3;

/// Computes the sum of products in the current pool.
///
/// # Safety
/// The machine supports `isa`; every operand is readable and C is writable for its shape and strides
/// while the call runs; C overlaps no operand, and no two elements of C lie at the same address.
pub unsafe fn matmul(isa: Isa, terms: &[Term], init: Init, output: Output, workspace: &mut [f32]) {
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
    let (packed, lefts) = aligned_floats(workspace).split_at_mut(DEPTH_BLOCK * COLUMN_BLOCK);
    let scratch = Scratch { packed: packed.as_mut_ptr(), lefts: lefts.as_mut_ptr() };
    let depth: usize = terms.iter().map(Term::depth).sum();
    let capacity = even_block(depth.max(1), DEPTH_BLOCK, DEPTH_STEP);
    let column_block = even_block(output.columns, COLUMN_BLOCK, PACK_COLUMNS);
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
                isa,
                terms,
                chunk: &chunk,
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
            is_first = false;
        }
    }
}

/// The size of equal blocks of `total`: as few as `most` allows, rounded up to `step` (divides `most`).
pub(super) fn even_block(total: usize, most: usize, step: usize) -> usize {
    total.div_ceil(total.div_ceil(most)).next_multiple_of(step)
}

/// A stretch of a term along depth.
#[derive(Clone, Copy, Default)]
pub(super) struct Piece {
    pub term: usize,
    pub first: usize,
    pub depth: usize,
}

/// A block of depth: pieces of one or more terms.
pub(super) struct Chunk {
    pub pieces: [Piece; MOST_RUNS],
    pub count: usize,
    pub depth: usize,
}

pub(super) struct Cursor {
    pub term: usize,
    pub first: usize,
}

pub(super) fn next_chunk(terms: &[Term], cursor: &mut Cursor, capacity: usize) -> Chunk {
    let mut chunk = Chunk { pieces: [Piece::default(); MOST_RUNS], count: 0, depth: 0 };
    while cursor.term < terms.len() && chunk.count < MOST_RUNS {
        let left = terms[cursor.term].depth() - cursor.first;
        let room = capacity - chunk.depth;
        let depth = if left <= room { left } else { room / DEPTH_STEP * DEPTH_STEP };
        if depth > 0 {
            chunk.pieces[chunk.count] = Piece { term: cursor.term, first: cursor.first, depth };
            chunk.count += 1;
            chunk.depth += depth;
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
    packed: *mut f32,
    lefts: *mut f32,
}

// SAFETY: tasks write disjoint parts of the packed block, and the left block of their own thread.
unsafe impl Send for Scratch {}
// SAFETY: as above.
unsafe impl Sync for Scratch {}

/// Some columns of C and a block of depth.
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
    let all_slices: usize = chunk.pieces[..chunk.count].iter().map(slices).sum();
    run_tasks(groups * all_slices, |task| {
        let (group, mut slice) = (task / all_slices, task % all_slices);
        let (mut index, mut panel_row) = (0, 0);
        while slice >= slices(&chunk.pieces[index]) {
            slice -= slices(&chunk.pieces[index]);
            panel_row += chunk.pieces[index].depth;
            index += 1;
        }
        let piece = chunk.pieces[index];
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
                    panel_row: panel_row + slice * PACK_DEPTH,
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
    // Cut along rows first: tasks that share rows read, and perhaps copy, the same left operand.
    let row_most = (block.output.rows / TASKS_WANTED).clamp(ROW_BLOCK / 2, ROW_BLOCK);
    let row_block = even_block(block.output.rows, row_most, 8);
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

/// Whether to compute Cᵀ = Rᵀ · Lᵀ: C has less than a panel of columns, and L lies with its rows
/// contiguous. Then the vectors of the kernel run along M, straight over L, and N need not fill them.
/// The gradients of LoRA factors are of this kind. A bias goes along N, where there are no vectors now.
fn is_better_transposed(block: &Block<'_>) -> bool {
    let pieces = &block.chunk.pieces[..block.chunk.count];
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
    for piece in &block.chunk.pieces[..block.chunk.count] {
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
    let mut runs = [LeftRun::strided(std::ptr::null(), 0, 0, 0); MOST_RUNS];
    // SAFETY: a left block holds ROW_BLOCK × DEPTH_BLOCK floats and belongs to this thread, which runs
    // one task at a time; panels lie in the packed block as `pack_block` laid them; rows and columns
    // are inside C and the left operands.
    unsafe {
        let scratch = block.scratch.lefts.add(current_thread() * ROW_BLOCK * DEPTH_BLOCK);
        let mut copied = 0;
        for (run, piece) in runs.iter_mut().zip(&chunk.pieces[..chunk.count]) {
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
            let write = match block.write {
                TileWrite::Bias(bias) => TileWrite::Bias(bias.add(first)),
                other => other,
            };
            tile_matmul(
                block.isa,
                &TileMatmul {
                    rows,
                    columns,
                    runs: &runs[..chunk.count],
                    right: RightRows {
                        pointer: block.scratch.packed.add(first * chunk.depth),
                        row_stride: panel_width(columns),
                        padded: true,
                    },
                    output: block.output.view.at(first_row, block.first_column + first),
                    write,
                },
            );
        }
    }
}

/// Whether a left operand is slow where it lies: neighbours along depth are not neighbours in memory, or
/// its rows are whole multiples of 4 KiB apart and so compete for the same few places of the caches.
fn misses_caches(run: &LeftRun) -> bool {
    run.depth_stride != 1 || run.row_stride.is_multiple_of(1024)
}
