//! Copies the operands of an f32 matmul into the workspace, in the order in which the kernel reads them.
//!
//! The right operand becomes panels of 48 columns, with one row per k; the last panel is as wide as its
//! columns rounded up to 16, padded with zeros. The scale of a term is applied here.
//! The left operand is copied only if its own layout would miss the caches.
//! Left out: element formats, which only `decode_span.rs` knows.

use super::block_columns::with_format;
use super::gguf_columns::{Columns, Sink, Unpack, VECTORS, decode_columns};
use super::isa::{Isa, Lanes, on_each_isa};
use super::kernel::{LeftRun, PANEL_COLUMNS, TILE_ROWS};
use super::stored::Stored;
use smidgen_ir::Storage;

/// Columns that one packing task handles: whole panels, and whole spans of 64 elements.
pub const PACK_COLUMNS: usize = 192;

/// Depth that one packing task handles.
pub const PACK_DEPTH: usize = 128;

/// Stored rows that are decoded together before they are transposed: the widest vector.
pub const STRIP: usize = 16;

/// A piece of a right operand (depth, columns) to pack into panels.
#[derive(Clone, Copy)]
pub struct RightPiece {
    pub stored: Stored,
    /// Whether the right operand is the transpose of the stored matrix.
    pub transposed: bool,
    pub scale: f32,
    /// Columns of the right operand, at most [`PACK_COLUMNS`].
    pub first_column: usize,
    pub columns: usize,
    /// Depth, at most [`PACK_DEPTH`].
    pub first_depth: usize,
    pub depth: usize,
    /// The panel of the first column.
    pub panels: *mut f32,
    /// Rows of a panel.
    pub panel_depth: usize,
    /// Rows written before this piece in each panel.
    pub panel_row: usize,
}

/// Floats per row of the panel that begins where `columns_left` columns remain.
pub const fn panel_width(columns_left: usize) -> usize {
    if columns_left >= PANEL_COLUMNS { PANEL_COLUMNS } else { columns_left.next_multiple_of(STRIP) }
}

/// Decodes, scales and packs a piece of a right operand.
///
/// # Safety
/// The machine supports `isa`, the piece is inside the readable stored matrix, and no other thread uses
/// the rows of the writable panels that belong to this piece.
pub unsafe fn pack_right(isa: Isa, piece: &RightPiece) {
    // SAFETY: the caller's promises are passed on.
    unsafe {
        match (piece.transposed, piece.stored.storage) {
            (true, Storage::Gguf(block)) if piece.columns.is_multiple_of(STRIP) => {
                with_format!(block, Format => pack_blocks::<Format>(isa, piece));
            }
            (true, _) => pack_transposed(isa, piece),
            (false, _) => pack_as_stored(isa, piece),
        }
    }
}

on_each_isa! {
    unsafe fn pack_blocks[B: Unpack](piece: &RightPiece) = pack_blocks_with;
}
on_each_isa! {
    unsafe fn pack_transposed(piece: &RightPiece) = pack_transposed_with;
}
on_each_isa! {
    unsafe fn pack_as_stored(piece: &RightPiece) = pack_as_stored_with;
}

/// The address of the piece's first row in the panel of `column`, and the width of the panel's rows.
#[inline(always)]
unsafe fn panel_of(piece: &RightPiece, column: usize) -> (*mut f32, usize) {
    let first = column / PANEL_COLUMNS * PANEL_COLUMNS;
    let width = panel_width(piece.columns - first);
    // SAFETY: panels before the last one are full, so the offset is inside the packed block.
    let start = unsafe { piece.panels.add(first * piece.panel_depth + piece.panel_row * width) };
    (start, width)
}

/// Packs the transpose of GGUF blocks, which are transposed before they are decoded; columns are a multiple of `STRIP`.
#[inline(always)]
unsafe fn pack_blocks_with<V: Lanes, B: Unpack>(piece: &RightPiece) {
    for panel in (0..piece.columns).step_by(PANEL_COLUMNS) {
        let end = piece.columns.min(panel + PANEL_COLUMNS);
        for column in (panel..end).step_by(VECTORS * V::WIDTH) {
            let rows = (VECTORS * V::WIDTH).min(end - column);
            // SAFETY: the columns exist; the sink writes the vectors that are inside a row of the panel.
            unsafe {
                let (start, width) = panel_of(piece, column);
                let columns = Columns {
                    stored: piece.stored,
                    first_row: piece.first_column + column,
                    rows,
                    first: piece.first_depth,
                    depth: piece.depth,
                    next_row: None,
                };
                let mut sink = PanelRows {
                    target: start.add(column - panel),
                    width,
                    vectors: rows / V::WIDTH,
                    scale: V::splat(piece.scale),
                };
                decode_columns::<V, B>(&columns, &mut sink);
            }
        }
    }
}

/// Writes decoded columns to the rows of a panel.
struct PanelRows<V> {
    target: *mut f32,
    width: usize,
    vectors: usize,
    scale: V,
}

impl<V: Lanes> Sink<V> for PanelRows<V> {
    #[inline(always)]
    unsafe fn take(&mut self, element: usize, weights: [V; VECTORS]) {
        // SAFETY: the vectors are inside the row of the panel.
        unsafe {
            let row = self.target.add(element * self.width);
            for (index, weight) in weights.iter().enumerate().take(self.vectors) {
                weight.mul(self.scale).store(row.add(index * V::WIDTH));
            }
        }
    }
}

#[inline(always)]
unsafe fn pack_transposed_with<V: Lanes>(piece: &RightPiece) {
    let mut decoded = [0.0f32; STRIP * PACK_DEPTH];
    let scale = piece.scale;
    for column in (0..piece.columns).step_by(STRIP) {
        let used = STRIP.min(piece.columns - column);
        // SAFETY: stored rows `first_column + column ..` exist for `used` of them; the buffer holds
        // STRIP rows of PACK_DEPTH; the panel has STRIP floats in each row from this column on.
        unsafe {
            for j in 0..used {
                piece.stored.decode_span::<V>(
                    piece.first_column + column + j,
                    piece.first_depth,
                    piece.depth,
                    decoded.as_mut_ptr().add(j * PACK_DEPTH),
                );
            }
            decoded[used * PACK_DEPTH..].fill(0.0);
            let (panel, width) = panel_of(piece, column);
            let target = panel.add(column % PANEL_COLUMNS);
            transpose_with::<V>(&Transpose {
                source: decoded.as_ptr(),
                source_stride: PACK_DEPTH,
                rows: STRIP,
                columns: piece.depth,
                target,
                target_stride: width,
                scale,
            });
        }
    }
}

#[inline(always)]
unsafe fn pack_as_stored_with<V: Lanes>(piece: &RightPiece) {
    let mut decoded = [0.0f32; PACK_COLUMNS];
    for k in 0..piece.depth {
        // SAFETY: the span is in the stored row; panel rows are as wide as the copied vectors.
        unsafe {
            piece.stored.decode_span::<V>(
                piece.first_depth + k,
                piece.first_column,
                piece.columns,
                decoded.as_mut_ptr(),
            );
            let scale = V::splat(piece.scale);
            for first in (0..piece.columns).step_by(PANEL_COLUMNS) {
                let (panel, width) = panel_of(piece, first);
                for at in (0..width).step_by(V::WIDTH) {
                    V::load(decoded.as_ptr().add(first + at)).mul(scale).store(panel.add(k * width + at));
                }
            }
        }
    }
}

/// `target` (columns, rows) = scale · `source` (rows, columns)ᵀ.
#[derive(Clone, Copy)]
pub struct Transpose {
    pub source: *const f32,
    pub source_stride: usize,
    pub rows: usize,
    pub columns: usize,
    pub target: *mut f32,
    pub target_stride: usize,
    pub scale: f32,
}

/// Writes the transpose.
///
/// # Safety
/// The source is readable and the target (columns, rows) writable; the machine supports the
/// instruction set of `V`.
#[inline(always)]
pub unsafe fn transpose_with<V: Lanes>(transpose: &Transpose) {
    let Transpose { source, source_stride, rows, columns, target, target_stride, scale } = *transpose;
    let (whole_rows, whole_columns) = (rows / V::WIDTH * V::WIDTH, columns / V::WIDTH * V::WIDTH);
    // SAFETY: every square and every single element is inside (rows, columns).
    unsafe {
        for column in (0..whole_columns).step_by(V::WIDTH) {
            for row in (0..whole_rows).step_by(V::WIDTH) {
                V::transpose_square(
                    source.add(row * source_stride + column),
                    source_stride,
                    target.add(column * target_stride + row),
                    target_stride,
                    V::splat(scale),
                );
            }
        }
        for row in 0..rows {
            let first = if row < whole_rows { whole_columns } else { 0 };
            for column in first..columns {
                *target.add(column * target_stride + row) = *source.add(row * source_stride + column) * scale;
            }
        }
    }
}

/// Copies the first `rows` rows of a left operand to `target` and returns a view of the copy. A run that is
/// contiguous along depth keeps its rows; any other becomes tiles of 8 rows that are contiguous across rows.
/// The copy has `rows` rounded up to 8, times depth, floats.
///
/// # Safety
/// The rows are readable and the target is writable.
pub unsafe fn copy_left(run: &LeftRun, rows: usize, target: *mut f32) -> LeftRun {
    // SAFETY: the caller's promises; indices stay below rows and depth.
    unsafe {
        if run.depth_stride == 1 {
            for row in 0..rows {
                std::ptr::copy_nonoverlapping(
                    run.pointer.add(row * run.row_stride),
                    target.add(row * run.depth),
                    run.depth,
                );
            }
            return LeftRun::strided(target, run.depth, 1, run.depth);
        }
        for k in 0..run.depth {
            let source = run.pointer.add(k * run.depth_stride);
            for first in (0..rows).step_by(TILE_ROWS) {
                let tile = target.add(first * run.depth + k * TILE_ROWS);
                if run.row_stride == 1 && rows - first >= TILE_ROWS {
                    let octet = source.add(first).cast::<[f32; TILE_ROWS]>().read_unaligned();
                    tile.cast::<[f32; TILE_ROWS]>().write_unaligned(octet);
                    continue;
                }
                for row in first..rows.min(first + TILE_ROWS) {
                    *tile.add(row - first) = *source.add(row * run.row_stride);
                }
            }
        }
        LeftRun {
            pointer: target,
            row_stride: 1,
            octet_stride: TILE_ROWS * run.depth,
            depth_stride: TILE_ROWS,
            depth: run.depth,
        }
    }
}
