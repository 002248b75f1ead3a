//! The innermost loops of every f32 matmul: a small tile of C is held in registers over all of K.
//!
//! The left operand is not packed: its elements are broadcast from memory, with any two strides.
//! The right operand is read as rows of whole vectors, from a packed panel or a plain row-major matrix.
//! A matmul may have several left operands, one after the other along K ([`LeftRun`]), so a sum of
//! matmuls passes over C once. Each element of C is summed in the order of K with any tiling.
//! Left out: threads, packing and cache blocking (`matmul.rs`, `packing.rs`).

use super::isa::{Isa, Lanes, on_each_isa, prefetch};
use std::mem::MaybeUninit;

/// Maximum columns of a tile; panels of packed right operands have this width.
pub const PANEL_COLUMNS: usize = 48;

/// Rows of one tile; [`LeftRun::octet_stride`] counts in these.
pub const TILE_ROWS: usize = 8;

/// How many rows of the right operand are prefetched.
const PREFETCH_ROWS: usize = 12;

/// A left operand (rows, depth) of f32. Element (i, k) is at
/// `(i / 8) * octet_stride + (i % 8) * row_stride + k * depth_stride` from `pointer`.
#[derive(Clone, Copy, Debug)]
pub struct LeftRun {
    pub pointer: *const f32,
    pub row_stride: usize,
    pub octet_stride: usize,
    pub depth_stride: usize,
    pub depth: usize,
}

impl LeftRun {
    /// A plain strided view.
    pub fn strided(pointer: *const f32, row_stride: usize, depth_stride: usize, depth: usize) -> LeftRun {
        LeftRun { pointer, row_stride, octet_stride: TILE_ROWS * row_stride, depth_stride, depth }
    }
}

/// A right operand: one row per k, columns contiguous. If `padded`, each row is readable up to the next
/// multiple of 16 columns.
#[derive(Clone, Copy, Debug)]
pub struct RightRows {
    pub pointer: *const f32,
    pub row_stride: usize,
    pub padded: bool,
}

/// C in memory: element (i, j) is at `i * row_stride + j * column_stride` from `pointer`.
#[derive(Clone, Copy, Debug)]
pub struct OutputView {
    pub pointer: *mut f32,
    pub row_stride: usize,
    pub column_stride: usize,
}

// SAFETY: a view is only an address; tasks that share it write disjoint elements.
unsafe impl Send for OutputView {}
// SAFETY: as above.
unsafe impl Sync for OutputView {}

impl OutputView {
    /// The view that begins at element (`row`, `column`) of this one.
    ///
    /// # Safety
    /// That element is inside the allocation of the view.
    #[inline(always)]
    pub unsafe fn at(self, row: usize, column: usize) -> OutputView {
        OutputView {
            // SAFETY: the caller's promise.
            pointer: unsafe { self.pointer.add(row * self.row_stride + column * self.column_stride) },
            ..self
        }
    }
}

/// How a result is combined with the old value of C.
#[derive(Clone, Copy, Debug)]
pub enum TileWrite {
    /// C = L·R.
    Overwrite,
    /// C = C + L·R.
    Add,
    /// C = bias + L·R, with one bias per column.
    Bias(*const f32),
}

impl TileWrite {
    /// The same write for columns from `column` on.
    #[inline(always)]
    pub fn from_column(self, column: usize) -> TileWrite {
        match self {
            TileWrite::Bias(bias) => TileWrite::Bias(bias.wrapping_add(column)),
            TileWrite::Overwrite | TileWrite::Add => self,
        }
    }
}

/// A single-threaded matmul: C (rows, columns) from the `runs`, one after the other along depth, and the
/// rows of `right`.
#[derive(Clone, Copy)]
pub struct TileMatmul<'a> {
    pub rows: usize,
    pub columns: usize,
    pub runs: &'a [LeftRun],
    pub right: RightRows,
    pub output: OutputView,
    pub write: TileWrite,
}

/// Maximum vectors of columns in a tile. The accumulators must fit into registers together with the vectors of a right
/// row and one broadcast: 8×3 of 32 registers with AVX-512, 4×3 of 16 with AVX2, 4×2 of 16 with SSE2 or of 32 with NEON.
const fn max_vectors(width: usize) -> usize {
    if width >= 8 { 3 } else { 2 }
}

/// Computes the matmul on the calling thread. Walks over groups of vectors of columns, of nearly equal width, and for
/// each over all rows, so that a group's columns of the right operand stay in the L1 cache.
///
/// # Safety
/// The machine supports `isa`; the operands are readable and C is writable for the given shape and
/// strides; C overlaps no operand.
pub unsafe fn tile_matmul(isa: Isa, matmul: &TileMatmul<'_>) {
    let width = isa.width();
    let mut vectors_left = matmul.columns.div_ceil(width);
    let mut column = 0;
    while vectors_left > 0 {
        let vectors = vectors_left.div_ceil(vectors_left.div_ceil(max_vectors(width)));
        let last_lanes = width.min(matmul.columns - column - (vectors - 1) * width);
        let partial = last_lanes < width && !matmul.right.padded;
        let strip = Strip { column, last_lanes };
        // SAFETY: the strip is inside the columns of C; the caller's promises are passed on.
        unsafe {
            match (vectors, partial) {
                (1, false) => strip_of_rows::<1, false>(isa, matmul, strip),
                (1, true) => strip_of_rows::<1, true>(isa, matmul, strip),
                (2, false) => strip_of_rows::<2, false>(isa, matmul, strip),
                (2, true) => strip_of_rows::<2, true>(isa, matmul, strip),
                (_, false) => strip_of_rows::<3, false>(isa, matmul, strip),
                (_, true) => strip_of_rows::<3, true>(isa, matmul, strip),
            }
        }
        column += vectors * width;
        vectors_left -= vectors;
    }
}

/// Some columns of C: the first one, and how many lanes of the last vector are in use.
#[derive(Clone, Copy)]
struct Strip {
    column: usize,
    last_lanes: usize,
}

on_each_isa! {
    unsafe fn strip_of_rows<const NV: usize, const PARTIAL: bool>(
        matmul: &TileMatmul<'_>,
        strip: Strip,
    ) = strip_of_rows_with;
}

#[inline(always)]
unsafe fn strip_of_rows_with<V: Lanes, const NV: usize, const PARTIAL: bool>(
    matmul: &TileMatmul<'_>,
    strip: Strip,
) {
    // Combinations that do not occur compile to a panic.
    if const { NV > max_vectors(V::WIDTH) } {
        unreachable!("{NV} vectors of {}", V::WIDTH);
    }
    // SAFETY: every tile is inside the rows of C.
    unsafe {
        let mut row = 0;
        if V::WIDTH == 16 {
            while matmul.rows - row >= 8 {
                tile_anywhere::<V, 8, NV, PARTIAL>(matmul, strip, row);
                row += 8;
            }
        }
        while matmul.rows - row >= 4 {
            tile_anywhere::<V, 4, NV, PARTIAL>(matmul, strip, row);
            row += 4;
        }
        if matmul.rows - row >= 2 {
            tile_anywhere::<V, 2, NV, PARTIAL>(matmul, strip, row);
            row += 2;
        }
        if matmul.rows > row {
            tile_anywhere::<V, 1, NV, PARTIAL>(matmul, strip, row);
        }
    }
}

/// A tile of C with any column stride: if it is not 1, the tile is computed on the stack and copied.
#[inline(always)]
unsafe fn tile_anywhere<V: Lanes, const ROWS: usize, const NV: usize, const PARTIAL: bool>(
    matmul: &TileMatmul<'_>,
    strip: Strip,
    row: usize,
) {
    // SAFETY: the tile at (row, strip.column) is inside C, and the stack tile holds 8 × 48 floats, of which those that
    // are read were written.
    unsafe {
        let output = matmul.output.at(row, strip.column);
        let write = matmul.write.from_column(strip.column);
        let is_direct = output.column_stride == 1;
        let mut local = MaybeUninit::<[f32; TILE_ROWS * PANEL_COLUMNS]>::uninit();
        let local = local.as_mut_ptr().cast::<f32>();
        let (target, first) = match (is_direct, write) {
            (true, write) => ((output.pointer, output.row_stride), write),
            (false, TileWrite::Add) => ((local, PANEL_COLUMNS), TileWrite::Overwrite),
            (false, write) => ((local, PANEL_COLUMNS), write),
        };
        tile::<V, ROWS, NV, PARTIAL>(matmul, strip, row, target, first);
        if is_direct {
            return;
        }
        for j in 0..(NV - 1) * V::WIDTH + strip.last_lanes {
            for i in 0..ROWS {
                let element = output.at(i, j).pointer;
                let value = *local.add(i * PANEL_COLUMNS + j);
                *element = match write {
                    TileWrite::Add => *element + value,
                    _ => value,
                };
            }
        }
    }
}

#[inline(always)]
unsafe fn tile<V: Lanes, const ROWS: usize, const NV: usize, const PARTIAL: bool>(
    matmul: &TileMatmul<'_>,
    strip: Strip,
    row: usize,
    (target, target_stride): (*mut f32, usize),
    write: TileWrite,
) {
    let last_lanes = strip.last_lanes;
    // SAFETY: the operands are readable for the rows and columns of the tile and the depth of the
    // runs; the last vector of a right row is read in full only where it is full or padded.
    unsafe {
        let mut right = matmul.right.pointer.add(strip.column);
        let right_stride = matmul.right.row_stride;
        // C is needed thousands of cycles from now: prefetch it. Rows may begin inside a cache line, so
        // the last float of the tile is prefetched as well.
        for i in 0..ROWS {
            for v in 0..NV {
                prefetch(target.wrapping_add(i * target_stride + v * V::WIDTH));
            }
            prefetch(target.wrapping_add(i * target_stride + NV * V::WIDTH - 1));
        }
        let mut sums = [[V::splat(0.0); NV]; ROWS];
        for run in matmul.runs {
            let (octet, inside) = (row / TILE_ROWS, row % TILE_ROWS);
            let mut left = run.pointer.add(octet * run.octet_stride + inside * run.row_stride);
            let (row_stride, depth_stride) = (run.row_stride, run.depth_stride);
            for _ in 0..run.depth {
                // Rows of an unpacked matrix are too far apart for the hardware prefetcher, and packed
                // panels come from the L2 cache.
                for v in 0..NV {
                    prefetch(right.wrapping_add(PREFETCH_ROWS * right_stride + v * V::WIDTH));
                }
                let mut vectors = [V::splat(0.0); NV];
                for (v, vector) in vectors.iter_mut().enumerate() {
                    let source = right.add(v * V::WIDTH);
                    *vector = if PARTIAL && v == NV - 1 {
                        V::load_first(source, last_lanes)
                    } else {
                        V::load(source)
                    };
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let factor = V::splat(*left.add(i * row_stride));
                    for (sum, vector) in sums.iter_mut().zip(&vectors) {
                        *sum = factor.mul_add(*vector, *sum);
                    }
                }
                left = left.wrapping_add(depth_stride);
                right = right.wrapping_add(right_stride);
            }
        }
        // Unrolled by hand: a loop that the compiler does not unroll would index `sums` at run time, which
        // forces the accumulators into memory in the loop above.
        macro_rules! write_rows {
            ($($i:literal)*) => {$(
                if $i < ROWS {
                    let at = target.add($i * target_stride);
                    write_row::<V, NV>(&sums[$i % ROWS], at, last_lanes, write);
                }
            )*};
        }
        write_rows!(0 1 2 3 4 5 6 7);
    }
}

#[inline(always)]
unsafe fn write_row<V: Lanes, const NV: usize>(
    sums: &[V; NV],
    target: *mut f32,
    last_lanes: usize,
    write: TileWrite,
) {
    // SAFETY: the row of C, and the bias, have `last_lanes` floats in the last vector and whole vectors
    // before it.
    unsafe {
        let old = match write {
            TileWrite::Overwrite => None,
            TileWrite::Add => Some(target.cast_const()),
            TileWrite::Bias(bias) => Some(bias),
        };
        let last = (NV - 1) * V::WIDTH;
        for (v, sum) in sums[..NV - 1].iter().enumerate() {
            let value = match old {
                None => *sum,
                Some(old) => V::load(old.add(v * V::WIDTH)).add(*sum),
            };
            value.store(target.add(v * V::WIDTH));
        }
        match (old, last_lanes == V::WIDTH) {
            (None, true) => sums[NV - 1].store(target.add(last)),
            (None, false) => sums[NV - 1].store_first(target.add(last), last_lanes),
            (Some(old), true) => V::load(old.add(last)).add(sums[NV - 1]).store(target.add(last)),
            (Some(old), false) => V::load_first(old.add(last), last_lanes)
                .add(sums[NV - 1])
                .store_first(target.add(last), last_lanes),
        }
    }
}
