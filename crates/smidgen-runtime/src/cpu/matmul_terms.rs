//! The operands of a CPU matmul, and how its depth is cut into chunks.
//!
//! Every CPU matmul is a sum, C (M, N) = init + Σ scale · L (M, K) · R (K, N), computed in one pass over C.
//! A LoRA layer is such a sum (x·Wᵀ + s·h·Bᵀ), and so is the gradient of an input that feeds several layers.
//! A chunk is a block of depth that may span several terms, so that short terms need no separate pass.
//! Left out: blocks of rows and columns, which each matmul chooses (`matmul.rs`, `bf16_matmul.rs`, `split_matmul.rs`,
//! `row_matmul.rs`).

use super::kernel::{OutputView, TileWrite};
use super::stored::Stored;
use smidgen_ir::Storage;

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

/// One matmul of the sum. `right` is (K, N) as stored, or (N, K) if `right_transposed`.
#[derive(Clone, Copy, Debug)]
pub struct Term {
    pub left: Left,
    pub right: Stored,
    pub right_transposed: bool,
    pub scale: f32,
}

impl Term {
    /// A term without depth, to initialize arrays.
    pub const EMPTY: Term = Term {
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
        if self.right_transposed { self.right.columns } else { self.right.rows }
    }

    pub fn columns(&self) -> usize {
        if self.right_transposed { self.right.rows } else { self.right.columns }
    }
}

/// The value of C before the first term is added.
#[derive(Clone, Copy, Debug)]
pub enum Init {
    /// Zeros.
    Overwrite,
    /// Its present value.
    Accumulate,
    /// These N floats in every row.
    Bias(*const f32),
}

impl Init {
    /// How a chunk is written to C from `first_column` on: the first one starts from this init, the others add.
    pub(super) fn write_of(self, is_first: bool, first_column: usize) -> TileWrite {
        match (is_first, self) {
            (false, _) | (true, Init::Accumulate) => TileWrite::Add,
            (true, Init::Overwrite) => TileWrite::Overwrite,
            (true, Init::Bias(bias)) => TileWrite::Bias(bias).from_column(first_column),
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

/// Panics if the workspace is too small or a term has other columns than C.
pub(super) fn check_operands(terms: &[Term], output: &Output, workspace: &[f32], needed_floats: usize) {
    let given = workspace.len();
    assert!(given >= needed_floats, "a matmul needs {needed_floats} floats of workspace, got {given}");
    for term in terms {
        assert_eq!(term.columns(), output.columns, "columns of a term and of C");
    }
}

/// The size of equal blocks of `total`: as few blocks of at most `max` as possible, rounded up to `step`, which divides
/// `max`.
pub(super) fn even_block(total: usize, max: usize, step: usize) -> usize {
    total.div_ceil(total.div_ceil(max)).next_multiple_of(step)
}

/// Maximum pieces in one chunk.
pub(super) const MAX_PIECES: usize = 16;

/// A range of depth inside one term.
#[derive(Clone, Copy, Default)]
pub(super) struct Piece {
    pub term: usize,
    pub first: usize,
    pub depth: usize,
    /// Padded depth of the pieces before it in the chunk.
    pub chunk_depth: usize,
}

/// A block of depth: pieces of one or more terms.
pub(super) struct Chunk {
    pieces: [Piece; MAX_PIECES],
    count: usize,
    /// Padded depth of all pieces.
    pub depth: usize,
}

impl Chunk {
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces[..self.count]
    }
}

/// How depth is cut into chunks.
#[derive(Clone, Copy)]
pub(super) struct DepthCut {
    /// Maximum padded depth of a chunk.
    pub capacity: usize,
    /// Inside a term, pieces begin at multiples of this, as spans of block formats must.
    pub step: usize,
    /// Pieces are padded to multiples of this.
    pub padding: usize,
}

impl DepthCut {
    /// Calls `body(chunk, is_first)` for each chunk in order. Without any depth it calls `body` once with an empty
    /// chunk, because a sum without terms still has to write its init.
    pub fn for_each(&self, terms: &[Term], mut body: impl FnMut(&Chunk, bool)) {
        let (mut term, mut first) = (0, 0);
        let mut is_first = true;
        loop {
            let mut chunk = Chunk { pieces: [Piece::default(); MAX_PIECES], count: 0, depth: 0 };
            while term < terms.len() && chunk.count < MAX_PIECES {
                let left = terms[term].depth() - first;
                let room = self.capacity - chunk.depth;
                let depth = if left <= room { left } else { room / self.step * self.step };
                if depth > 0 {
                    chunk.pieces[chunk.count] = Piece { term, first, depth, chunk_depth: chunk.depth };
                    chunk.count += 1;
                    chunk.depth += depth.next_multiple_of(self.padding);
                }
                if depth < left {
                    first += depth;
                    break;
                }
                (term, first) = (term + 1, 0);
            }
            if chunk.count == 0 && !is_first {
                return;
            }
            body(&chunk, is_first);
            is_first = false;
        }
    }
}
