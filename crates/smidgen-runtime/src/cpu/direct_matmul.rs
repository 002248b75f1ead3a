//! Multiplies one to four rows by a panel of columns, directly from GGUF blocks, without packing.
//!
//! A step of generation reads every weight once, so a copy of decoded weights costs more than the matmul itself. The
//! sums of a panel stay in registers while a block is decoded (`gguf_columns.rs`) and are kept between the terms of a
//! matmul. They are added in the order of `matmul.rs`, so the results have the same bits.
//! Other storages are packed in slices that fit into the L1 cache.
//! Left out: threads and chunks of depth (`row_matmul.rs`).

use super::block_columns::with_format;
use super::gguf_columns::{Columns, Sink, Unpack, VECTORS, decode_columns};
use super::isa::{Isa, Lanes, on_each_isa};
use super::kernel::{LeftRun, OutputView, PANEL_COLUMNS, TileWrite};
use super::stored::Stored;
use smidgen_ir::Block;

/// Maximum number of rows whose sums fit into registers next to the weights.
pub const DIRECT_ROWS: usize = 4;

/// The sums of a panel, by row.
pub type Sums = [f32; DIRECT_ROWS * PANEL_COLUMNS];

/// A matmul of some rows with the columns of a panel, over a piece of depth.
#[derive(Clone, Copy)]
pub struct DirectBlocks {
    pub block: Block,
    pub stored: Stored,
    pub first_column: usize,
    /// A multiple of 16, at most [`PANEL_COLUMNS`].
    pub columns: usize,
    pub first_depth: usize,
    pub rows: usize,
    /// Contiguous along depth.
    pub left: LeftRun,
    /// The first column of this thread's next panel, for prefetching.
    pub next_column: Option<usize>,
}

/// Adds the products to the sums.
///
/// # Safety
/// The machine supports `isa`; the left rows and the stored matrix are readable for the shape; the depth meets the
/// conditions of [`Columns`].
pub unsafe fn multiply_blocks(isa: Isa, blocks: &DirectBlocks, sums: &mut Sums) {
    // SAFETY: the caller's promises are passed on.
    unsafe { with_format!(blocks.block, Format => multiply_format::<Format>(isa, blocks, sums)) }
}

on_each_isa! {
    unsafe fn multiply_format[B: Unpack](blocks: &DirectBlocks, sums: &mut Sums) = multiply_format_with;
}

#[inline(always)]
unsafe fn multiply_format_with<V: Lanes, B: Unpack>(blocks: &DirectBlocks, sums: &mut Sums) {
    // SAFETY: the caller's promises; rows are inside the left operand.
    unsafe {
        let mut row = 0;
        if blocks.rows - row >= 4 {
            multiply_rows::<V, B, 4>(blocks, row, sums);
            row += 4;
        }
        if blocks.rows - row >= 2 {
            multiply_rows::<V, B, 2>(blocks, row, sums);
            row += 2;
        }
        if blocks.rows > row {
            multiply_rows::<V, B, 1>(blocks, row, sums);
        }
    }
}

#[inline(always)]
unsafe fn multiply_rows<V: Lanes, B: Unpack, const ROWS: usize>(
    blocks: &DirectBlocks,
    first_row: usize,
    sums: &mut Sums,
) {
    debug_assert_eq!(blocks.left.depth_stride, 1);
    let together = VECTORS * V::WIDTH;
    let sums = &mut sums[first_row * PANEL_COLUMNS..(first_row + ROWS) * PANEL_COLUMNS];
    for column in (0..blocks.columns).step_by(together) {
        let columns = Columns {
            stored: blocks.stored,
            first_row: blocks.first_column + column,
            rows: together.min(blocks.columns - column),
            first: blocks.first_depth,
            depth: blocks.left.depth,
            next_row: blocks.next_column.map(|next| next + column),
        };
        // SAFETY: a panel is a whole number of vectors of any width, three at a time.
        unsafe {
            let pointer = blocks.left.pointer.add(first_row * blocks.left.row_stride);
            let left = LeftRun { pointer, ..blocks.left };
            let mut sink = RowSums::<V, ROWS> { sums: [[V::splat(0.0); VECTORS]; ROWS], left };
            for (row, of_row) in sink.sums.iter_mut().enumerate() {
                for (index, sum) in of_row.iter_mut().enumerate() {
                    *sum = V::load(sums.as_ptr().add(row * PANEL_COLUMNS + column + index * V::WIDTH));
                }
            }
            decode_columns::<V, B>(&columns, &mut sink);
            for (row, of_row) in sink.sums.iter().enumerate() {
                for (index, sum) in of_row.iter().enumerate() {
                    sum.store(sums.as_mut_ptr().add(row * PANEL_COLUMNS + column + index * V::WIDTH));
                }
            }
        }
    }
}

struct RowSums<V, const ROWS: usize> {
    sums: [[V; VECTORS]; ROWS],
    left: LeftRun,
}

impl<V: Lanes, const ROWS: usize> Sink<V> for RowSums<V, ROWS> {
    #[inline(always)]
    unsafe fn take(&mut self, element: usize, weights: [V; VECTORS]) {
        let LeftRun { pointer, row_stride, .. } = self.left;
        for (row, sums) in self.sums.iter_mut().enumerate() {
            // SAFETY: the left operand has this row and this depth.
            unsafe {
                let factor = V::splat(*pointer.add(row * row_stride + element));
                for (sum, weight) in sums.iter_mut().zip(&weights) {
                    *sum = factor.mul_add(*weight, *sum);
                }
            }
        }
    }
}

/// A matmul of some rows with a packed panel.
#[derive(Clone, Copy)]
pub struct DirectPanel {
    pub panel: *const f32,
    /// Floats of a row of the panel: a multiple of 16.
    pub width: usize,
    pub rows: usize,
    pub left: LeftRun,
}

on_each_isa! {
    /// Adds the products to the sums.
    ///
    /// # Safety
    /// The machine supports `isa`; the left rows and the panel are readable for the shape.
    pub unsafe fn multiply_panel(panel: &DirectPanel, sums: &mut Sums) = multiply_panel_with;
}

#[inline(always)]
unsafe fn multiply_panel_with<V: Lanes>(panel: &DirectPanel, sums: &mut Sums) {
    for row in 0..panel.rows {
        let sums = &mut sums[row * PANEL_COLUMNS..(row + 1) * PANEL_COLUMNS];
        let mut column = 0;
        while column < panel.width {
            let vectors = VECTORS.min((panel.width - column) / V::WIDTH);
            // SAFETY: the vectors are inside a row of the panel and of the sums.
            unsafe {
                match vectors {
                    3 => multiply_columns::<V, 3>(panel, row, column, sums),
                    2 => multiply_columns::<V, 2>(panel, row, column, sums),
                    _ => multiply_columns::<V, 1>(panel, row, column, sums),
                }
            }
            column += vectors * V::WIDTH;
        }
    }
}

#[inline(always)]
unsafe fn multiply_columns<V: Lanes, const COUNT: usize>(
    panel: &DirectPanel,
    row: usize,
    column: usize,
    sums: &mut [f32],
) {
    let &DirectPanel { panel, width, left, .. } = panel;
    // SAFETY: the caller's promises.
    unsafe {
        let mut vectors = [V::splat(0.0); COUNT];
        for (index, vector) in vectors.iter_mut().enumerate() {
            *vector = V::load(sums.as_ptr().add(column + index * V::WIDTH));
        }
        for k in 0..left.depth {
            let factor = V::splat(*left.pointer.add(row * left.row_stride + k * left.depth_stride));
            for (index, vector) in vectors.iter_mut().enumerate() {
                *vector = factor.mul_add(V::load(panel.add(k * width + column + index * V::WIDTH)), *vector);
            }
        }
        for (index, vector) in vectors.iter().enumerate() {
            vector.store(sums.as_mut_ptr().add(column + index * V::WIDTH));
        }
    }
}

/// Writes the sums of some rows and columns to C.
///
/// # Safety
/// C, and the bias, have these rows and columns.
pub unsafe fn write_sums(sums: &Sums, rows: usize, columns: usize, output: OutputView, write: TileWrite) {
    for row in 0..rows {
        for column in 0..columns {
            let sum = sums[row * PANEL_COLUMNS + column];
            // SAFETY: the caller's promise.
            unsafe {
                let target = output.at(row, column).pointer;
                *target = match write {
                    TileWrite::Overwrite => sum,
                    TileWrite::Add => *target + sum,
                    TileWrite::Bias(bias) => *bias.add(column) + sum,
                };
            }
        }
    }
}
